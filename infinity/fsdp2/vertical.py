"""Floor 7. The vertical schedule: all micro-batches of a step pass through a group before the next group. Training thread only.

[Note: The vertical schedule]
Each micro-batch runs the model's own forward, as a coroutine that pauses where it is about to call a group. When all have come
to a group, they pass through it, one after the other. The first gathers it, the last releases it. One backward over all losses
goes the same way back: autograd runs the nodes that were made last first, so all micro-batches pass through a group before the
one below. They take turns in descending order, hence backward in ascending order, which is the order of their sums. So the
numbers are those of one micro-batch after the other, bit for bit, with [Note: A leaf for each micro-batch] in running_group.py.

The root is called once, with all micro-batches: its hooks, FSDP2's and ours, see one forward. A model whose micro-batches can't
take turns is found in its first such forward, before anything was changed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from infinity.errors import InfinityError
from infinity.fsdp2.buffers import ReusedBuffers
from infinity.fsdp2.coroutines import CannotPause, Coroutine, RandomState
from infinity.fsdp2.experts import routed_experts
from infinity.fsdp2.names import clean_name
from infinity.fsdp2.running_group import RunningGroup, grad_tensors, may_sum_unreduced
from infinity.fsdp2.sharding import in_backward, reshards_to_fewer_ranks
from infinity.units import format_bytes


class MicroBatch(NamedTuple):
    """What the model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def micro_batches_in(args: tuple[Any, ...]) -> int:
    """How many micro-batches the root's forward that is called with these runs."""
    return args[0].count if args and isinstance(args[0], _Pass) else 1


def reductions_in(args: tuple[Any, ...]) -> int:
    """How often the gradients of a parameter are reduced in the backward of that forward."""
    return args[0].count if args and isinstance(args[0], _Pass) and args[0].reductions_apart else 1


class Vertical:
    """Runs forwards of a sharded model in the vertical schedule. To be made after all others who hook the groups' forwards."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._model: nn.Module = model
        modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule) and name}
        sums = ReusedBuffers(4 * sum(p.numel() for p in model.parameters())) if may_sum_unreduced(model) else None
        self.reductions_apart = sums is None
        """Whether the gradients of each micro-batch are reduced by themselves."""
        self._root = RunningGroup(model, sums)
        self.groups = {cast(nn.Module, module): RunningGroup(module, sums) for module in modules.values()}
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
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave, prepend=True)

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        random: Sequence[RandomState],
        *,
        available_bytes: Callable[[], int | None] | None = None,
    ) -> list[tuple[Any, RandomState]] | None:
        """Run the model for each micro-batch, with its random numbers; what each returned, and the numbers that come next. One
        backward over all of them follows, then `end`.

        available_bytes: the memory that may still be taken for what they save, where that is to be looked at; None is unknown.
        Returns None where they can't take turns, or wouldn't fit: `why_not` says why, and nothing was changed.
        """
        self._abandon()
        if self.why_not is not None:
            return None
        memory = _Memory(available_bytes) if available_bytes is not None and not self._has_fitted else None
        module_state = _ModuleState(self._model) if not self._has_fitted else None
        self._pass = run = _Pass(self, self._model, self._root, random, memory)
        self._model.forward = run.forward
        try:
            outputs: tuple[Any, ...] = self._model(run, micro_batches)
            if module_state is not None:
                module_state.check()
        except CannotPause as reason:
            if module_state is None and self.reductions_apart:  # the other ranks may not have come here
                raise InfinityError(
                    f"the micro-batches of this model can't take turns, as they could before: {reason}; set "
                    'infinity.schedule to "horizontal"'
                ) from reason
            if module_state is not None:
                module_state.restore()
            self.why_not = str(reason)
            return None
        finally:
            run.restore_forward()
        self._has_fitted = True
        return list(zip(outputs, run.random_after, strict=True))

    def end(self) -> None:
        """The backward is over. What waited for a micro-batch that no gradient reached is released, and its gradients are in
        `.grad`."""
        if self._pass is not None:
            self._pass.end()
            self._abandon()

    def _abandon(self) -> None:
        """Where an exception ended a forward or its backward: the model is set as before it."""
        run, self._pass = self._pass, None
        if run is not None:
            run.reset()

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        another = self._pass is not None and (not args or args[0] is not self._pass)
        if another and torch.is_grad_enabled() and not in_backward():  # a loss may ask the model for something without
            self._abandon()

    def _come_to(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (run := self._pass) is not None and (coroutine := run.running) is not None:
            run.come_to(module, coroutine)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (run := self._pass) is not None and run.running is not None:
            run.enter(module, (args, kwargs))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (run := self._pass) is not None and run.running is not None:
            run.leave(module)


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
        self.reductions_apart = vertical.reductions_apart
        self._memory = memory
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        self._instance_forward = model.__dict__.get("forward")
        self._original_forward = model.forward
        self._resharding = {module for module, group in self._groups.items() if group.is_resharded_after_forward}
        self._called: set[tuple[nn.Module, int]] = set()
        self._inside: list[list[nn.Module]] = [[] for _ in random]
        """By micro-batch: the groups whose forward it is in, the innermost last."""
        self._is_last = False
        """Whether it is the last of this turn that runs."""
        self._returning: Counter[nn.Module] = Counter()
        """By group: how many micro-batches are still to come to its inputs in the backward."""
        self._have_gradients: dict[nn.Module, bool] = {}
        """By group: whether its inputs have."""
        self.micro_batch = 0
        """The one that runs."""
        self._coroutine: Coroutine | None = None
        self.random_after: list[RandomState] = []
        """By micro-batch: the random numbers that come next, after the forward."""
        for group in (root, *self._groups.values()):
            group.clear(is_running=True)

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
            while not all(coroutine.is_done for coroutine in coroutines):
                module = coroutines[0].waits_for
                if any(coroutine.is_done or coroutine.waits_for is not module for coroutine in coroutines):
                    # Their sums would come in another order than a loop's.
                    raise CannotPause("they take different ways through its groups")
                for k in reversed(range(self.count)):
                    self._is_last = k == 0
                    self._go_on(k, coroutines[k])
                if module is not None and self._memory is not None:
                    self._memory.end_turn(groups=len(self._groups))
        finally:
            for coroutine in coroutines:
                coroutine.end()
        self.random_after = [coroutine.random for coroutine in coroutines]
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
        around = self._inside[self.micro_batch]
        for outer in around:
            self._groups[outer].suspend()
        coroutine.pause(module)
        for outer in around:
            self._groups[outer].resume(self.micro_batch)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """The group is gathered, and the micro-batch enters it. In the backward FSDP2 releases it at the inputs of each."""
        self._inside[self.micro_batch].append(module)
        self._groups[module].enter(self.micro_batch)
        tensors = list(grad_tensors(inputs))
        if not self.reductions_apart and self._have_gradients.setdefault(module, bool(tensors)) != bool(tensors):
            raise CannotPause(f"inputs of group {self._names[module]} have gradients in some micro-batches only")
        self._groups[module].is_held = bool(tensors)
        if tensors:
            self._returning[module] += 1
            cast(FSDPModule, module).set_reshard_after_backward(False, recurse=False)
            came_back = itertools.count()
            for tensor in tensors:
                tensor.register_hook(partial(self._come_back, module, came_back))

    def leave(self, module: nn.Module) -> None:
        """The micro-batch has passed through the group, which is released after the last."""
        self._inside[self.micro_batch].remove(module)
        self._groups[module].leave()
        if module in self._resharding:
            cast(FSDPModule, module).set_reshard_after_forward(self._is_last, recurse=False)

    def restore_forward(self) -> None:
        """The root's forward is its own again. Idempotent."""
        if self._model.__dict__.get("forward") == self.forward:
            if self._instance_forward is not None:
                self._model.__dict__["forward"] = self._instance_forward
            else:
                del self._model.__dict__["forward"]

    # The backward.

    def _come_back(self, module: nn.Module, came_back: itertools.count[int], grad: torch.Tensor) -> None:
        """A gradient has reached an input of a group, as FSDP2 is about to hear."""
        if next(came_back) == 0:
            self._returning[module] -= 1
            if not self._returning[module]:
                self._groups[module].give_sums()
                cast(FSDPModule, module).set_reshard_after_backward(True, recurse=False)

    def end(self) -> None:
        """See `Vertical.end`."""
        for module, count in self._returning.items():
            if count:
                cast(FSDPModule, module).reshard()
        for group in self._groups.values():
            group.end()

    def reset(self) -> None:
        """The levers of the groups are as before the forward."""
        self.restore_forward()
        for module in self._resharding:
            cast(FSDPModule, module).set_reshard_after_forward(True, recurse=False)
        for module in self._returning:
            cast(FSDPModule, module).set_reshard_after_backward(True, recurse=False)
        for group in (self._root, *self._groups.values()):
            group.clear(is_running=False)


class _ModuleState:
    """What modules keep from one call to the next: buffers, as running means, and what a forward leaves in attributes for a
    loss that is computed later. Micro-batches that take turns would mix it up; a loop has it in order."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = [
            (module, f"{clean_name(name)}.{key}", buffer, buffer._version, buffer.clone())
            for name, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._attributes = set(self._graph_attributes())

    def check(self) -> None:
        """Raise CannotPause where the forwards changed any of it."""
        for module, name, buffer, version, _ in self._buffers:
            if buffer._version != version or module._buffers.get(name.rpartition(".")[2]) is not buffer:
                raise CannotPause(f"buffer {name} is changed by a forward")
        for name, attribute in self._graph_attributes():
            if (name, attribute) not in self._attributes:
                raise CannotPause(f"a forward leaves a tensor in attribute {attribute} of {name or 'the model'}")

    def restore(self) -> None:
        """Buffers are as before."""
        with torch.no_grad():
            for module, name, buffer, version, before in self._buffers:
                module._buffers[name.rpartition(".")[2]] = buffer
                if buffer._version != version:
                    buffer.copy_(before)

    def _graph_attributes(self) -> Iterator[tuple[str, str]]:
        for name, module in self._model.named_modules():
            for attribute, value in vars(module).items():
                leaves = tree_leaves(value) if isinstance(value, (torch.Tensor, list, tuple, dict)) else ()
                if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
                    yield clean_name(name), attribute


class _Memory:
    """Whether what the micro-batches save up to the end of the forward fits, judged by what it takes after each group."""

    def __init__(self, available_bytes: Callable[[], int | None]) -> None:
        self._available_bytes = available_bytes
        self._first: int | None = None
        self._turns = 0

    def end_turn(self, *, groups: int) -> None:
        """All have passed through one more of so many groups. Raises CannotPause where the others would take more than there
        is."""
        available = self._available_bytes()
        self._first = available if self._first is None else self._first
        if available is None or self._first is None:
            return
        if self._turns:
            needed = (self._first - available) * (groups - 1 - self._turns) // self._turns
            if needed > available:
                raise CannotPause(
                    f"what they save for the backward would take {format_bytes(needed)} more, and "
                    f"{format_bytes(available)} are available"
                )
        self._turns += 1


def _why_not(model: nn.Module, names: Sequence[str]) -> str | None:
    if len(names) == 0:
        return "it is one group"
    if any(isinstance(module, FSDPModule) and reshards_to_fewer_ranks(module) for module in model.modules()):
        return "zero_hpz_partition_size keeps a second sharding"
    if any(True for _ in routed_experts(model)):
        return "its micro-batches come to different experts"
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or isinstance(
            module, torch._dynamo.OptimizedModule
        ):
            return f"{clean_name(name) or 'the model'} is compiled"
    return None
