"""State that a model, its hooks and a loss function keep from one call to the next. Training thread only.

A loop over micro-batches changes this state in order; micro-batches that take turns would mix it up. So each pass
compares the state with a copy, and on a change restores it and runs a loop instead.

[Note: Where state is looked for]
In attributes and buffers of every module; in variables captured by hooks and the loss function, and attributes of the
objects whose methods they are; in global and class variables of a model's own classes; in lists, dicts, sets and small
objects in these; in the random numbers of Python, NumPy, and a module's generators. Gathered parameters are compared in
guarded.py. State that Python cannot list (iterators, files, objects of other languages) is not found.
"""

from __future__ import annotations

import abc
import collections
import contextvars
import operator
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity.errors import InfinityError
from infinity.fsdp2.names import clean_name

_PLAIN = (int, float, complex, str, bytes, frozenset, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, set, tuple, collections.deque)
_DEPTH = 3
"""Maximum depth of nested containers that are searched."""
_ELEMENTS_MAX = 1000
"""Maximum number of elements of a container that is searched; longer ones are only compared."""
_COPIED_BYTES_MAX = 64 << 20
"""Maximum size of a tensor that is copied; larger ones cannot be restored."""
_LIBRARIES = frozenset(
    {"torch", "infinity", "numpy", "lightning", "builtins", "logging", "threading", "functools", "types", "weakref"}
)
"""Lightning's Trainer is an attribute of the model, and notes what its steps log."""
_TORCHS_OWN = {*vars(nn.Module()), "forward"} - {"training"}
"""Attributes of a module that hold no state of the user's, or that are compared separately."""


class KeptState:
    """A copy of the current state of a model and `functions`: [Note: Where state is looked for].

    groups: modules that `changed` can check separately.
    """

    def __init__(self, model: nn.Module, groups: Iterable[nn.Module] = (), functions: Iterable[Any] = ()) -> None:
        self._context = contextvars.copy_context()
        self._modules = {*model.modules()}
        self._by_id: dict[int, list[_Entry]] = {}
        """Entries already made for a value, by its id."""
        of_groups: dict[nn.Module | None, list[_Entry]] = {group: [] for group in (None, *groups)}
        names = {name: module for name, module in model.named_modules() if module in of_groups}
        for name, module in model.named_modules():
            owner = name
            while owner and owner not in names:
                owner = owner.rpartition(".")[0]
            of_groups[names.get(owner)] += self._in_module(clean_name(name), module)
        for function in functions:
            of_groups[None] += self._in_value("a variable of the loss function", function, _DEPTH)
        self._of_groups = {group: [*dict.fromkeys(entries)] for group, entries in of_groups.items()}
        everything = (entry for of_group in self._of_groups.values() for entry in of_group)
        self._all = [*_random_numbers(), *dict.fromkeys(everything)]

    def changed(self, groups: Iterable[nn.Module] | None = None) -> str | None:
        """Describe the first change in `groups` (None: in all) or in modules outside all groups; None without one."""
        some = self._all if groups is None else (entry for group in (None, *groups) for entry in self._of_groups[group])
        return next((f"{words} is changed by a forward" for entry in some if (words := entry.changed())), None)

    def differs(self, contexts: Iterable[contextvars.Context]) -> str | None:
        """As `changed` for all state and `contexts`, including writes that leave no trace."""
        everywhere = (f"{words} is changed by a forward" for entry in self._all if (words := entry.differs()))
        return self.changed_in(contexts) or next(everywhere, None)

    def changed_in(self, contexts: Iterable[contextvars.Context]) -> str | None:
        """As `changed`, for context variables in `contexts`, which began as copies of the caller's."""
        for variable, value in (item for context in contexts for item in context.items()):
            if variable not in self._context or self._context[variable] is not value:
                return f"context variable {variable.name} is changed by a forward"
        return None

    def restore(self) -> None:
        """Restore all state. Raises InfinityError if a changed tensor was too large to copy."""
        for entry in self._all:
            entry.restore()

    def _in_module(self, name: str, module: nn.Module) -> list[_Entry]:
        of = f" of {name}" if name else " of the model"
        buffer = f"buffer {name}." if name else "buffer "
        entries: list[_Entry] = [_Fields("attribute {}" + of, vars(module)), _Fields(buffer + "{}", module._buffers)]
        for key, value in module._buffers.items():
            entries += self._in_value(buffer + key, value, 1)
        for key, value in vars(module).items():
            if key not in _TORCHS_OWN or key == "forward":
                entries += self._in_value(f"attribute {key}{of}", value, _DEPTH)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            entries += self._in_value(f"a variable of a hook{of}", hook, _DEPTH)
        for cls in type(module).__mro__:
            if not is_of_library(cls) or issubclass(cls, FSDPModule):
                entries += self._in_class(cls)
        return entries

    def _in_class(self, cls: type) -> list[_Entry]:
        entries = self._by_id.get(id(cls))
        if entries is None:
            entries = self._by_id[id(cls)] = []
            fields = cast("dict[str, Any]", vars(cls))
            entries.append(_Fields(f"{cls.__name__}.{{}}", fields, partial(setattr, cls), partial(delattr, cls)))
            for key, value in vars(cls).items():
                if not key.startswith("__") or key == "__call__":
                    entries += self._in_value(f"{cls.__name__}.{key}", value, 1)
        return entries

    def _in_function(self, words: str, function: FunctionType, depth: int) -> list[_Entry]:
        """Return entries for the variables that it captured, and for data among the global variables that it names."""
        entries: list[_Entry] = []
        names = function.__globals__
        for name in function.__code__.co_names:
            if isinstance(names.get(name, len), (*_PLAIN, *_CONTAINERS, torch.Tensor)):
                entries.append(
                    _Variable(f"global variable {name}", partial(names.get, name), partial(names.__setitem__, name))
                )
                entries += self._in_value(f"global variable {name}", names[name], 1)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            get = partial(getattr, cell, "cell_contents", None)  # None if the cell is empty
            entries.append(_Variable(f"{words} ({name})", get, partial(setattr, cell, "cell_contents")))
            entries += self._in_value(f"{words} ({name})", get(), depth)
        return entries

    def _in_value(self, words: str, value: Any, depth: int) -> list[_Entry]:
        if isinstance(value, _PLAIN) or not depth:
            return []
        if id(value) in self._by_id:
            return self._by_id[id(value)]
        entries = self._by_id[id(value)] = []
        inner: Iterable[Any] = ()
        if isinstance(value, nn.Module):
            for module in {*value.modules()} - self._modules:  # modules of the model are handled separately
                entries += self._in_module(type(module).__name__, module)
        elif isinstance(value, torch.Tensor):
            entries += [_Tensor(words, value)] if type(value) is torch.Tensor and not value.is_inference() else []
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "biufc" and value.flags.writeable and value.flags.c_contiguous:
                entries.append(_Tensor(words, torch.from_numpy(value)))
        elif isinstance(value, tuple(_ACCESS)):
            get, put = next(access for kind, access in _ACCESS.items() if isinstance(value, kind))
            entries.append(_Variable(words, partial(get, value), partial(put, value)))
            inner = value if isinstance(value, (list, collections.deque)) else ()
        elif isinstance(value, dict):
            entries.append(_Fields(words, value))
            inner = value.values()
        elif isinstance(value, tuple):
            inner = value
        elif isinstance(value, partial):
            inner = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            inner = (value.__self__, value.__func__)
        elif isinstance(value, FunctionType):
            if not is_of_library(value):
                entries += self._in_function(words, value, depth)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not is_of_library(type(value)):
            entries.append(_Fields(words, vars(value)))
            inner = vars(value).values()
        for element in [*inner] if len([*inner]) <= _ELEMENTS_MAX else ():
            entries += self._in_value(words, element, depth - 1)
        return entries


class _Entry(abc.ABC):
    """One piece of state and its previous value. words: its name for the user."""

    def __init__(self, words: str) -> None:
        self._words = words

    @abc.abstractmethod
    def changed(self) -> str | None:
        """Return the name of what changed, or None. Cheap: called at each pause."""

    def differs(self) -> str | None:
        """As `changed`, including writes that leave no trace. Called once per pass."""
        return self.changed()

    @abc.abstractmethod
    def restore(self) -> None:
        """Restore the previous value."""


class _Variable(_Entry):
    def __init__(self, words: str, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        super().__init__(words)
        self._get, self._put, self._before = get, put, get()

    def changed(self) -> str | None:
        return None if _is_same(self._get(), self._before) else self._words

    def restore(self) -> None:
        if self.changed():
            self._put(self._before)


class _Fields(_Entry):
    """The items of a dict, or the attributes of an object except `_TORCHS_OWN`. `{}` in `words` is the key. `put` and
    `remove` set and delete an item; None uses the dict itself."""

    def __init__(
        self,
        words: str,
        fields: dict[Any, Any],
        put: Callable[[Any, Any], object] | None = None,
        remove: Callable[[Any], object] | None = None,
    ) -> None:
        super().__init__(words)
        self._fields, self._before = fields, dict(fields)
        self._put, self._remove = put or fields.__setitem__, remove or fields.__delitem__

    def _changed(self) -> Iterator[Any]:
        now, before = self._fields, self._before
        if (
            len(now) == len(before)
            and all(map(operator.is_, now.values(), before.values()))
            and now.keys() == before.keys()
        ):
            return
        for key in {**before, **now}:
            here = key in now and key in before and _is_same(now[key], before[key])
            if not here and key not in _TORCHS_OWN:
                yield key

    def changed(self) -> str | None:
        return next((self._words.format(key) for key in self._changed()), None)

    def restore(self) -> None:
        for key in [*self._changed()]:
            if key in self._before:
                self._put(key, self._before[key])
            else:
                self._remove(key)


class _Tensor(_Entry):
    def __init__(self, words: str, tensor: torch.Tensor) -> None:
        super().__init__(words)
        self._tensor, self._version = tensor, tensor._version
        copied = tensor.layout is torch.strided and tensor.grad_fn is None and tensor.nbytes <= _COPIED_BYTES_MAX
        self._copy = tensor.detach().clone() if copied and not tensor.is_meta else None

    def changed(self) -> str | None:
        return self._words if self._tensor._version != self._version else None

    def differs(self) -> str | None:
        written = self._copy is not None and not torch.equal(_bytes_of(self._tensor), _bytes_of(self._copy))
        return self._words if written else self.changed()

    def restore(self) -> None:
        if not self.differs():
            return
        if self._copy is None:
            raise InfinityError(
                f"{self._words} is changed by a forward, so micro-batches can't take turns, and it is too large to "
                'restore: restart with infinity.schedule "horizontal"'
            )
        with torch.no_grad():
            self._tensor.copy_(self._copy)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other)


def is_of_library(thing: Any) -> bool:
    """Return True if a class or function belongs to infinity, torch, NumPy or Python, not to the user."""
    while isinstance(thing, partial):
        thing = thing.func
    return str(getattr(thing, "__module__", None)).partition(".")[0] in _LIBRARIES


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _random_numbers() -> Iterator[_Entry]:
    yield _Variable("the state of Python's random numbers", *_pickled(random.getstate, random.setstate))
    yield _Variable("the state of NumPy's random numbers", *_pickled(np.random.get_state, np.random.set_state))


def _pickled(get: Callable[..., Any], put: Callable[..., Any]) -> tuple[Callable[..., bytes], Callable[..., object]]:
    """Return the same accessors with the state as comparable bytes. The object, if any, is their first argument."""
    return lambda *of: pickle.dumps(get(*of)), lambda *of_and_state: put(
        *of_and_state[:-1], pickle.loads(of_and_state[-1])
    )


def _set_elements(of: set[Any] | list[Any] | collections.deque[Any], elements: Iterable[Any]) -> None:
    of.clear()
    if isinstance(of, set):
        of.update(elements)
    else:
        of.extend(elements)


_ACCESS: dict[type, tuple[Callable[..., Any], Callable[..., object]]] = {
    random.Random: _pickled(random.Random.getstate, random.Random.setstate),
    np.random.RandomState: _pickled(lambda of: of.get_state(), lambda of, state: of.set_state(state)),
    np.random.Generator: _pickled(
        lambda of: of.bit_generator.state, lambda of, state: setattr(of.bit_generator, "state", state)
    ),
    torch.Generator: (
        lambda of: of.get_state().numpy().tobytes(),
        lambda of, state: of.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    set: (frozenset, _set_elements),
    list: (tuple, _set_elements),
    collections.deque: (tuple, _set_elements),
}
"""Per type with state: a getter that returns something comparable, and a setter."""
