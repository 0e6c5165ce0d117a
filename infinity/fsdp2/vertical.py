"""The vertical schedule: all micro-batches of a step pass through a group before the next group. Training thread only.

[Note: The vertical schedule]
Each micro-batch runs the model's own forward, as a coroutine that pauses where it is about to call a group. When all have come
to a group, they pass through it, one after the other. The first gathers it, the last releases it. One backward over all losses
goes the same way back: autograd runs the nodes that were made last first, so all micro-batches pass through a group before the
one below. They take turns in descending order, hence backward in ascending order, which is the order of their sums. So the
numbers are those of one micro-batch after the other, bit for bit, with [Note: A leaf for each micro-batch] in running_group.py.

The root is called once, with all micro-batches: FSDP2's hooks and ours see one forward.

State that a forward leaves behind would be mixed up, so each pass looks for it: at every pause in the group that was passed
through and outside of all, before the first group and at the end everywhere. If it finds some, that state is set back, and the
step is a loop over its micro-batches (see kept_state.py). That may be a cache that the first forward fills, so the next step
tries once more before the schedule is given up.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_modules

from infinity.errors import InfinityError
from infinity.fsdp2.buffers import ReusedBuffers
from infinity.fsdp2.coroutines import CannotPause, Coroutine, RandomState, settings_restored
from infinity.fsdp2.experts import routed_experts
from infinity.fsdp2.kept_state import KeptState, is_of_library
from infinity.fsdp2.names import clean_name
from infinity.fsdp2.running_group import RunningGroup, grad_tensors, may_sum_unreduced
from infinity.fsdp2.sharding import in_backward, reshard, reshards_to_fewer_ranks
from infinity.units import format_bytes


class MicroBatch(NamedTuple):
    """What the model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Turn(NamedTuple):
    """What a forward of one micro-batch gave."""

    output: Any
    random: RandomState
    """The random numbers that come next."""
    context: contextvars.Context
    """The context variables as it left them."""


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
        """Why the micro-batches of this model can't take turns, where that is known for good."""
        self.why_not_now = self.why_not
        """Why those of the last step couldn't."""
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
        state: KeptState,
        *,
        available_bytes: Callable[[], int | None] | None = None,
    ) -> list[Turn] | None:
        """Run the model for each micro-batch, with its random numbers. The losses follow, then `accepts`, one backward over all
        of them, and `end`.

        state: taken just before. available_bytes: the memory that may still be taken for what they save, where that is to be
        looked at; None is unknown.
        Returns None where they can't take turns, or wouldn't fit: `why_not_now` says why, and nothing was changed.
        """
        self._abandon()
        if self.why_not is not None:
            return None
        memory = _Memory(available_bytes) if available_bytes is not None and not self._has_fitted else None
        self._pass = run = _Pass(self, self._model, self._root, random, state, memory)
        self._model.forward = run.forward
        try:
            with settings_restored(), _without_hooks(self._model) as hooked:
                run.why_not = "hooks of your own are on the model itself" if hooked else None
                outputs: tuple[Any, ...] = self._model(run, micro_batches)
        except CannotPause as reason:
            if self._has_fitted and self.reductions_apart:  # the other ranks may not have come here
                raise InfinityError(
                    f"the micro-batches of this model can't take turns, as they could before: {reason}; set "
                    'infinity.schedule to "horizontal"'
                ) from reason
            self._give_back(state, str(reason), for_good=True)
            return None
        except Exception:
            why = run.why_not or state.changed()
            if why is None or self.reductions_apart:
                raise  # a loop would raise it too, or other ranks haven't
            self._give_back(state, why)
            return None
        finally:
            run.restore_forward()
        return [Turn(*turn) for turn in zip(outputs, run.random_after, run.contexts, strict=True)]

    def accepts(self, state: KeptState) -> bool:
        """After the losses: whether neither forwards nor losses left state behind that a loop would have in another order, on
        all ranks. If not, it is set back as by `forward`. A collective."""
        run = self._pass
        assert run is not None
        why = run.why_not or state.differs(run.contexts)
        if self.reductions_apart:
            differing = torch.tensor(float(why is not None), device=next(self._model.parameters()).device)
            dist.all_reduce(differing)
            why = why or ("a forward on another rank changes what outlives it" if differing else None)
        if why is not None:
            self._give_back(state, why)
            return False
        self._has_fitted, self.why_not_now = True, None
        return True

    def _give_back(self, state: KeptState, why: str, *, for_good: bool = False) -> None:
        """This step is a loop; so are all from now on, if the last one was."""
        self.why_not = why if for_good or self.why_not_now is not None else None
        self.why_not_now = why
        self._abandon()
        state.restore()
        reshard(self._model)  # what is gathered may have been written to

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
        state: KeptState,
        memory: _Memory | None,
    ) -> None:
        self._groups, self._root, self._model, self._random = vertical.groups, root, model, random
        self.reductions_apart = vertical.reductions_apart
        self._state, self._memory = state, memory
        self.why_not: str | None = None
        """State that a micro-batch left behind where others run, in words."""
        self._passed: set[nn.Module] = set()
        """The groups that the running micro-batch was in since its last pause."""
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
        self.contexts: list[contextvars.Context] = []
        """By micro-batch: its context variables."""
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
        self.contexts = [coroutine.context for coroutine in coroutines]
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
        self._passed = {*self._inside[micro_batch]}
        begins = coroutine.waits_for is None
        self._root.enter(micro_batch)
        coroutine.go_on()
        self._root.leave()
        self._coroutine = None
        self.why_not = self.why_not or self._state.changed(None if begins else self._passed)

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
        self._passed.add(module)
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


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[bool]:
    """A call of the model runs none of the user's hooks on it, as they would see all micro-batches. Whether it has any."""
    of_model = (model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)
    everywhere = (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks)
    taken = [
        (hooks, key, hook)
        for hooks in (*of_model, *everywhere)
        for key, hook in hooks.items()
        if not is_of_library(hook)
    ]
    try:
        for hooks, key, _ in taken:
            hooks[key] = _no_hook
        yield bool(taken)
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


def _no_hook(*_: Any, **__: Any) -> None:
    pass


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
