"""Floor 7. The vertical schedule: all micro-batches of a step pass through a group before the next group. Training thread only.

[Note: The vertical schedule]
Each micro-batch runs the model's own forward, as a coroutine that pauses where it is about to call a group. When all have come
to a group, they pass through it, one after the other. The first gathers it, the last releases it. One backward over all losses
goes the same way back: autograd runs the nodes that were made last first, so all micro-batches pass through a group before the
one below. They take turns in descending order, hence backward in ascending order, which is the order of their sums. So the
numbers are those of one micro-batch after the other, bit for bit, with [Note: A leaf for each micro-batch] in sharding.py.

The root is called once, with all micro-batches: its hooks, FSDP2's and ours, see one forward. A model whose micro-batches can't
take turns is found in its first such forward, before anything was changed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from infinity.fsdp2.coroutines import CannotPause, Coroutine, RandomState
from infinity.fsdp2.names import clean_name
from infinity.fsdp2.sharding import RunningGroup, in_backward
from infinity.units import format_bytes


class MicroBatch(NamedTuple):
    """What the model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def micro_batches_in(args: tuple[Any, ...]) -> int:
    """How many micro-batches the root's forward that is called with these runs."""
    return args[0].count if args and isinstance(args[0], _Pass) else 1


class Vertical:
    """Runs forwards of a sharded model in the vertical schedule. To be made after all others who hook the groups' forwards."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._model: nn.Module = model
        self._root = RunningGroup(model)
        modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule) and name}
        self.groups = {cast(nn.Module, module): RunningGroup(module) for module in modules.values()}
        """By module, without the root's."""
        self.why_not: str | None = _why_not(model, list(modules))
        """Why the micro-batches of this model can't take turns, where that is known."""
        self._pass: _Pass | None = None
        """Of the forward or backward that is going on, or that an exception ended."""
        self._has_fitted = False
        """Whether a forward of all micro-batches has come to its end."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        if self.why_not is None:
            for module in self.groups:
                module.register_forward_pre_hook(self._come_to, prepend=True)
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, prepend=True)

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        random: Sequence[RandomState],
        *,
        available_bytes: Callable[[], int | None] | None = None,
    ) -> tuple[Any, ...] | None:
        """Run the model for each micro-batch, with its random numbers; what each returned. One backward over all of them
        follows, then `end`.

        available_bytes: the memory that may still be taken for what they save, where that is to be looked at; None is unknown.
        Returns None where they can't take turns, or wouldn't fit: `why_not` says why, and nothing was changed.
        """
        self.end()
        if self.why_not is not None:
            return None
        memory = _Memory(available_bytes) if available_bytes is not None and not self._has_fitted else None
        self._pass = run = _Pass(self, self._model, self._root, random, memory)
        self._model.forward = run.forward
        try:
            outputs: tuple[Any, ...] = self._model(run, micro_batches)
        except CannotPause as reason:
            self.why_not = str(reason)
            return None
        finally:
            run.restore_forward()
        self._has_fitted = True
        return outputs

    def end(self) -> None:
        """The backward is over; or an exception ended it, or the forward. What stayed gathered for a micro-batch that no
        gradient reached is released. Idempotent."""
        run, self._pass = self._pass, None
        if run is not None:
            run.end()

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._pass is not None and (not args or args[0] is not self._pass) and not in_backward():
            self.end()  # an exception ended it

    def _come_to(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (run := self._pass) is not None and (coroutine := run.running) is not None:
            run.come_to(module, coroutine)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (run := self._pass) is not None and run.running is not None:
            self.groups[module].enter(run.micro_batch)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (run := self._pass) is not None and run.running is not None:
            self.groups[module].leave()
            run.leave(module, output)


class _Pass:
    """A forward of all micro-batches, and the backward that follows it."""

    def __init__(
        self,
        vertical: Vertical,
        model: nn.Module,
        root: RunningGroup,
        random: Sequence[RandomState],
        memory: _Memory | None,
    ) -> None:
        self._groups, self._root, self._model, self._random = vertical.groups, root, model, random
        self._memory = memory
        self._places = {module: place for place, module in enumerate(self._groups)}
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        self._instance_forward = model.__dict__.get("forward")
        self._original_forward = model.forward
        self._resharding = {module for module, group in self._groups.items() if group.is_resharded_after_forward}
        self._called: set[tuple[nn.Module, int]] = set()
        self._is_last = False
        """Whether no other micro-batch waits for the group that is about to be called."""
        self._returning: Counter[nn.Module] = Counter()
        """By group: through how many micro-batches a gradient is still to come back to it."""
        self.micro_batch = 0
        """The one that runs."""
        self._coroutine: Coroutine | None = None
        for group in (root, *self._groups.values()):
            group.begin()

    @property
    def count(self) -> int:
        """Micro-batches."""
        return len(self._random)

    @property
    def running(self) -> Coroutine | None:
        """The coroutine that the caller runs in."""
        return self._coroutine if self._coroutine is not None and self._coroutine.is_running else None

    # The forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in the place of the root's forward; for other calls than that of `Vertical.forward`, as if it didn't."""
        if not args or args[0] is not self:
            self.restore_forward()
            return self._original_forward(*args, **kwargs)
        coroutines = [
            Coroutine(partial(self._original_forward, *micro_batch.args, **micro_batch.kwargs), random)
            for micro_batch, random in zip(args[1], self._random, strict=True)
        ]
        try:
            while waiting := [k for k, coroutine in enumerate(coroutines) if not coroutine.is_done]:
                first = min((coroutines[k].waits_for for k in waiting), key=lambda module: self._places.get(module, -1))
                turn = [k for k in reversed(waiting) if coroutines[k].waits_for is first]
                for k in turn:
                    self._is_last = k == turn[-1]
                    self._go_on(k, coroutines[k])
                if first is not None and self._memory is not None:
                    self._memory.end_turn(len(self._groups) - 1 - self._places[first])
        finally:
            for coroutine in coroutines:
                coroutine.end()
        return tuple(coroutine.result for coroutine in coroutines)

    def _go_on(self, micro_batch: int, coroutine: Coroutine) -> None:
        self.micro_batch, self._coroutine = micro_batch, coroutine
        self._root.enter(micro_batch)
        coroutine.go_on()
        self._root.leave()
        self._coroutine = None

    def come_to(self, module: nn.Module, coroutine: Coroutine) -> None:
        """A micro-batch is about to call a group."""
        if (module, self.micro_batch) in self._called:
            raise CannotPause(f"group {self._names[module]} is called twice in a forward")
        self._called.add((module, self.micro_batch))
        coroutine.pause(module)

    def leave(self, module: nn.Module, output: Any) -> None:
        """A micro-batch has passed through a group, which is about to be released, or is not."""
        if module in self._resharding:
            cast(FSDPModule, module).set_reshard_after_forward(self._is_last, recurse=False)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if tensors:
            self._returning[module] += 1
            came_back = itertools.count()
            for tensor in tensors:
                tensor.register_hook(partial(self._come_back, module, came_back))

    def restore_forward(self) -> None:
        """The root's forward is its own again. Idempotent."""
        if self._model.__dict__.get("forward") == self.forward:
            if self._instance_forward is not None:
                self._model.__dict__["forward"] = self._instance_forward
            else:
                del self._model.__dict__["forward"]

    # The backward.

    def _come_back(self, module: nn.Module, came_back: itertools.count[int], grad: torch.Tensor) -> None:
        """A gradient reaches what a group returned: before FSDP2 hears of it."""
        if next(came_back) == 0:
            self._returning[module] -= 1
            cast(FSDPModule, module).set_reshard_after_backward(self._returning[module] == 0, recurse=False)

    def end(self) -> None:
        """See `Vertical.end`."""
        self.restore_forward()
        for module in self._resharding:
            cast(FSDPModule, module).set_reshard_after_forward(True, recurse=False)
        for module, count in self._returning.items():
            sharded = cast(FSDPModule, module)
            sharded.set_reshard_after_backward(True, recurse=False)
            if count:
                sharded.reshard()


class _Memory:
    """Whether what the micro-batches save up to the end of the forward fits, judged by what it takes after each group."""

    def __init__(self, available_bytes: Callable[[], int | None]) -> None:
        self._available_bytes = available_bytes
        self._first: int | None = None
        self._turns = 0

    def end_turn(self, groups_left: int) -> None:
        """All have passed through a group. Raises CannotPause where the others would take more than there is."""
        available = self._available_bytes()
        self._first = available if self._first is None else self._first
        if available is None or self._first is None:
            return
        if self._turns:
            needed = (self._first - available) * groups_left // self._turns
            if needed > available:
                raise CannotPause(
                    f"what they save for the backward would take {format_bytes(needed)} more, and "
                    f"{format_bytes(available)} are available"
                )
        self._turns += 1


def _why_not(model: nn.Module, names: Sequence[str]) -> str | None:
    if not names:
        return "it is one group"
    for name in names:
        inner = next((other for other in names if other.startswith(f"{name}.")), None)
        if inner is not None:
            return f"group {clean_name(inner)} lies in group {clean_name(name)}"
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or isinstance(
            module, torch._dynamo.OptimizedModule
        ):
            return f"{clean_name(name) or 'the model'} is compiled"
    return None
