"""Reads untrusted pickles in time and memory bounded by their size. Subclasses define the permitted names. Any thread.

[Note: Pickles that grow]
A pickle of a hundred bytes can request a table of gigabytes, or hold lists of lists that are shared so often that a
traversal takes years; so does hashing such tuples. Therefore the unpickler is Python's own, whose table is a dict. Keys
are weighed before they are hashed, and the whole before it is traversed, as if nothing in them were shared.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, NoReturn

_DEPTH_MAX = 100
_KEY_BYTES_MAX = 1 << 16
_KEY_MAX = 1 << 60
"""Larger integers can be chosen to have the same hash."""


class CarefulUnpickler(pickle._Unpickler):
    """An unpickler of `content`, which may hold `bytes_max` bytes if nothing is shared. [Note: Pickles that grow]
    `load` may raise any Exception."""

    def __init__(self, content: bytes, bytes_max: int) -> None:
        super().__init__(io.BytesIO(content))
        self._bytes_max = self._left = bytes_max

    def load(self) -> Any:
        loaded = super().load()
        weigh(loaded, self._bytes_max)
        return loaded

    def spend(self, made: Any) -> Any:
        """Return `made`, a copy of something in the pickle. Raises UnpicklingError if copies take too many bytes."""
        self._left -= sys.getsizeof(made)
        if self._left < 0:
            raise pickle.UnpicklingError("it expands to more than its size permits")
        return made

    def checked_keys(self, keys: Iterable[Any]) -> list[Any]:
        """Return the keys, each of which can be hashed quickly."""
        keys = list(keys)
        for key in keys:
            if type(key) is not str:
                weigh(key, _KEY_BYTES_MAX)
            if isinstance(key, int) and abs(key) >= _KEY_MAX:
                raise pickle.UnpicklingError("it has a key that is too large a number")
        return keys


def weigh(value: Any, bytes_max: int) -> None:
    """Raise ValueError if `value` takes more than `bytes_max` bytes with nothing in it shared, or is nested too deeply.
    An object that contains itself passes; code that traverses it must reject it."""
    weighed: dict[int, tuple[int, int]] = {}

    def weight_of(value: Any) -> tuple[int, int]:
        """Return bytes and levels; both are 0 while it is being weighed."""
        parts = _parts(value)
        nbytes, levels = sys.getsizeof(value), 1
        if parts:
            weighed[id(value)] = 0, 0
            for part in parts:
                part_nbytes, part_levels = weighed.get(id(part)) or weight_of(part)
                nbytes, levels = nbytes + part_nbytes, max(levels, 1 + part_levels)
            weighed[id(value)] = nbytes, levels
        if nbytes > bytes_max:
            raise ValueError("it expands to more than its size permits, by sharing")
        if levels > _DEPTH_MAX:
            raise ValueError(f"it is nested more than {_DEPTH_MAX} levels deep")
        return nbytes, levels

    weight_of(value)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    return [*getattr(value, "__dict__", {}).values()] if is_dataclass(value) and not isinstance(value, type) else ()


def _refuse(unpickler: Any) -> NoReturn:
    raise pickle.UnpicklingError("it uses pickle's extension registry")


def _build(unpickler: Any) -> None:
    """Build as pickle does, but keep the state of what the process shares: classes, functions, enumerations."""
    if callable(unpickler.stack[-2]) or isinstance(unpickler.stack[-2], Enum):
        raise pickle.UnpicklingError("it changes a class or a function")
    unpickler.load_build()


def _bytearray8(unpickler: Any) -> None:
    """Load the bytes; pickle's own would allocate before it looks for them."""
    (nbytes,) = struct.unpack("<Q", unpickler.read(8))
    unpickler.append(bytearray(unpickler.read(nbytes)))


def _checked(load: Callable[[Any], None], hashed: slice) -> Callable[[Any], None]:
    """Return `load`, which hashes what is at `hashed` of the stack, with checked keys."""

    def checked(unpickler: Any) -> None:
        unpickler.checked_keys(unpickler.stack[hashed])
        load(unpickler)

    return checked


_HASHED = {
    pickle.SETITEM: slice(-2, None, 2),
    pickle.SETITEMS: slice(0, None, 2),
    pickle.DICT: slice(0, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
_OTHERS = {pickle.BUILD: _build, pickle.BYTEARRAY8: _bytearray8}
_of_pickle: dict[int, Any] = pickle._Unpickler.dispatch
CarefulUnpickler.dispatch = {
    **_of_pickle,
    **{operation[0]: _checked(_of_pickle[operation[0]], hashed) for operation, hashed in _HASHED.items()},
    **{operation[0]: load for operation, load in _OTHERS.items()},
    **{operation[0]: _refuse for operation in (pickle.EXT1, pickle.EXT2, pickle.EXT4)},
}
