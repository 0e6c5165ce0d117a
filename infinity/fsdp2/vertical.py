"""The vertical schedule: all micro-batches of a step pass through a group before the next group. Training thread only.

[Note: The vertical schedule]
Each micro-batch runs the model's own forward as a coroutine that pauses before each group. When all have reached a
group, they pass through it one after the other: the first gathers it, the last releases it. One backward over all
losses returns the same way: autograd runs the newest nodes first, so all micro-batches pass through a group before the
one below. They take turns in descending order, so the backward runs in ascending order, the order of their sums. The
numbers are those of one micro-batch after the other, bit for bit, by [Note: A leaf for each micro-batch] in
running_group.py.

The root is called once, with all micro-batches, so FSDP2's hooks and infinity's see one forward.

Micro-batches would mix up state that a forward leaves behind. So each pass looks for such state: at every pause in the
current group and outside all groups, and everywhere before the first group and at the end. If it finds some, it
restores the state and runs the step as a loop over micro-batches (see kept_state.py). The cause may be a cache that the
first forward fills, so the next step tries once more before the schedule is given up.

[Note: The last turn goes back at once]
In the turn of the last group each micro-batch, in ascending order, runs to its loss and back to the inputs of that
group before the next one enters. So activations of the last group, the logits and the loss exist once. The gradients of
those inputs wait (see cut.py). One backward from all of them follows, which begins with the loss of the last
micro-batch. The root's forward ends with the first micro-batch, so hooks see one forward and one backward as before.

The last group is that of the previous pass; in the first pass, the last one in module order. If that is wrong, the pass
is repeated. If a loss uses more than the inputs of the last group, all forwards end before the backward.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from infinity.errors import InfinityError
from infinity.fsdp2.buffers import ReusedBuffers
from infinity.fsdp2.coroutines import CannotPause, Coroutine, RandomState, settings_restored, without_saving
from infinity.fsdp2.cut import Cut, Joined, Remaining
from infinity.fsdp2.experts import routed_experts
from infinity.fsdp2.kept_state import KeptState, is_of_library
from infinity.fsdp2.names import clean_name
from infinity.fsdp2.running_group import RunningGroup, grad_tensors, may_sum_unreduced
from infinity.fsdp2.sharding import in_backward, reshard, reshards_to_fewer_ranks
from infinity.units import format_bytes


class MicroBatch(NamedTuple):
    """Arguments of the model; or of `around`, if given, which gets the model's forward first and calls it once."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: Callable[..., Any] | None = None

    def on(self, forward: Callable[..., Any]) -> Callable[[], Any]:
        """Return the call, with that forward, as a function without arguments."""
        return partial(forward if self.around is None else partial(self.around, forward), *self.args, **self.kwargs)


class Turn(NamedTuple):
    """Result of the forward of one micro-batch."""

    output: Any
    random: RandomState
    """State of the random generators after it."""
    context: contextvars.Context
    """The context variables after it."""


def micro_batches_in(args: tuple[Any, ...]) -> int:
    """Return the number of micro-batches that a forward of the root with these arguments runs."""
    return args[0].count if args and isinstance(args[0], _Pass) else 1


def gradients_in(args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the numbers of micro-batches that the gradients of such a forward sum, and of reductions for that sum."""
    run = args[0] if args and isinstance(args[0], _Pass) else None
    if run is None or not run.is_whole_step:
        return 1, 1
    return run.count, run.count if run.reductions_apart else 1


class Vertical:
    """Runs forwards of a sharded model in the vertical schedule. `recover` repairs state after an abandoned forward."""

    def __init__(self, model: nn.Module, recover: Callable[[], object]) -> None:
        assert isinstance(model, FSDPModule)
        self.model: nn.Module = model
        self._recover = recover
        modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule) and name}
        may_sum = may_sum_unreduced(model)
        self.sums = ReusedBuffers(4 * sum(p.numel() for p in model.parameters())) if may_sum else None
        self.root = RunningGroup(model)
        self.groups = {cast(nn.Module, module): RunningGroup(module) for module in modules.values()}
        """Groups by module, without the root's."""
        self.why_not: str | None = _why_not(model, list(modules))
        """Permanent reason why the micro-batches of this model can't take turns, or None."""
        self.why_not_now = self.why_not
        """Reason why those of the last step could not."""
        self._pass: _Pass | None = None
        """The current forward or backward, or one that an exception ended."""
        self._fitted = 0
        """The most micro-batches whose forwards have ended together."""
        self.last: nn.Module | None = [*self.groups][-1] if self.groups else None
        """The group that is called last: see [Note: The last turn goes back at once]."""
        self.why_not_back: str | None = None
        """Reason why no micro-batch goes back in the turn of that group, or None."""
        self.once_more = False
        """True if a forward that could not be used may succeed if repeated."""
        self.share_that_fits: float | None = None
        """Share of the last forward's micro-batches that fits in memory; None if all fit."""
        self._remaining: Remaining | None = None
        """Of the last joined loss, until its backward."""
        model.register_forward_pre_hook(self._begin, prepend=True)

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        random: Sequence[RandomState],
        state: KeptState,
        *,
        is_whole_step: bool = True,
        goes_back: bool = True,
        memory: Memory | None = None,
    ) -> bool:
        """Run the model for each micro-batch, with its random numbers.

        Then call `losses`, `accepts` after the first loss, and `backward`.

        state: taken just before. is_whole_step: True if these are all micro-batches of a step; else their gradients are
        added one by one to those of other passes. goes_back: False if all forwards must end before the backward.
        memory: checks the memory for saved activations, if given.
        Returns False if they can't take turns or don't fit: `why_not_now` has the reason, and nothing was changed.
        """
        self.abandon()
        self.once_more, self.share_that_fits = False, None
        if self.why_not is not None:
            return False
        memory = memory if len(micro_batches) > self._fitted else None
        last = self.last if goes_back and self.why_not_back is None and len(micro_batches) > 1 else None
        self._pass = run = _Pass(self, random, state, memory, last, is_whole_step=is_whole_step)
        self.model.forward = run.forward
        try:
            with settings_restored(), _without_hooks(self.model) as hooked:
                run.why_not = "the model itself has user hooks" if hooked else None
                returned: tuple[Any, ...] = self.model(run, micro_batches)
                run.outputs[: len(returned)] = returned
        except _AnotherIsLast:
            self.last = run.last_called
            self._repeat(state)
            return False
        except _TooMuch as reason:
            self.share_that_fits, self.why_not_now = reason.share, str(reason)
            self._set_back(state)
            return False
        except CannotPause as reason:
            if self._fitted and run.reductions_apart:  # the other ranks may not stop here
                raise InfinityError(
                    f"the micro-batches of this model can no longer take turns: {reason}; set infinity.schedule to "
                    '"horizontal"'
                ) from reason
            self._give_back(state, str(reason), for_good=True)
            return False
        except Exception:
            why = run.why_not or state.changed()
            if why is None or run.reductions_apart:
                raise  # a loop would raise it too, or other ranks do not stop here
            self._give_back(state, why)
            return False
        finally:
            run.restore_forward()
        return True

    def losses(self, loss_of: Callable[[int, Turn], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the loss of each micro-batch in ascending order; `loss_of` computes it from its number and its turn. If
        the last turn goes back, each loss is computed after the backward of the one before."""
        run = self._pass
        assert run is not None
        if run.last is None:
            losses = [loss_of(k, run.take_turn(k)) for k in reversed(range(run.count))]
            yield from losses[::-1]
        for k in range(run.count) if run.last is not None else ():
            if k:
                run.end_forward(k)
            loss = loss_of(k, run.take_turn(k))
            run.note_loss(k, loss)
            yield loss
            del loss

    def accepts(self, state: KeptState) -> bool:
        """After the first loss: return True if no rank's forwards or losses changed state that a loop would change in
        another order. If they did, restore it as `forward` does. A collective."""
        run = self._pass
        assert run is not None
        whys = [run.why_not or state.differs(run.contexts), run.why_not_back]
        if run.reductions_apart:
            device = next(self.model.parameters()).device
            differing = torch.tensor([float(why is not None) for why in whys], device=device)
            dist.all_reduce(differing)
            others = ("a forward on another rank changes state that outlives it", "that of another rank can't")
            whys = [
                why or (words if on_one else None) for why, words, on_one in zip(whys, others, differing, strict=True)
            ]
        why, why_not_back = whys
        self.why_not_back = self.why_not_back or why_not_back
        if why is not None:
            self._give_back(state, why)
        elif why_not_back is not None:
            self._repeat(state)
        else:
            self._fitted, self.why_not_now = max(self._fitted, run.count), None
        return why is None and why_not_back is None

    def backward(self, losses: Iterator[torch.Tensor]) -> None:
        """Run the backward of all micro-batches from the iterator that `losses` returned. Call `end` afterwards."""
        run = self._pass
        assert run is not None
        run.keep_gathered()
        if run.last is None:
            torch.autograd.backward([*losses][::-1])
        else:
            run.go_back(losses)
            roots = [(next(losses), None), *run.remaining]
            torch.autograd.backward([tensor for tensor, _ in roots], [grad for _, grad in roots])

    def join(self, losses: Iterator[torch.Tensor], scaled: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the sum of `losses` (see the method `losses`). If possible, all micro-batches but the last go back
        now, from `scaled` losses. A backward from the sum, also `scaled`, does the remainder; then call `end`."""
        run = self._pass
        assert run is not None
        run.keep_gathered()
        if run.last is None:
            return torch.stack([*losses]).sum()
        values: list[torch.Tensor] = []

        def noted() -> Iterator[torch.Tensor]:
            for loss in losses:
                values.append(loss.detach())
                yield scaled(loss) if len(values) < run.count else loss
                del loss

        parts = noted()
        run.go_back(parts)
        last, inputs = next(parts), run.remaining
        probe = torch.ones((), dtype=last.dtype, device=last.device, requires_grad=True)
        (expected,) = torch.autograd.grad(scaled(probe), probe)
        with_grad = [p for group in (self.root, *self.groups.values()) for p in group.sharded if p.grad is not None]

        def check() -> str | None:
            if not self.root.is_gathered:
                return "the model was used after the forward, which released parameters that the backward needs"
            if any(parameter.grad is None for parameter in with_grad):
                return "gradients were dropped after the forward (zero_grad)"
            return None

        grads = [grad for _, grad in inputs]
        self._remaining = remaining = Remaining(grads, expected.item(), check=check)
        loss: torch.Tensor = Joined.apply(  # type: ignore[no-untyped-call]
            remaining, torch.stack(values).sum(), last, *(tensor for tensor, _ in inputs)
        )
        return loss

    @property
    def awaits_rest(self) -> bool:
        """True if a joined loss has run part of its backward, and the remainder follows."""
        return self._remaining is not None

    def end(self) -> None:
        """End the backward, also that of a forward without micro-batches."""
        if self._pass is not None:
            self._pass.end()
            self.abandon()

    def _repeat(self, state: KeptState) -> None:
        """Have this forward repeated, going back from another group or only after all forwards."""
        self.once_more = True
        self._set_back(state)

    def _give_back(self, state: KeptState, why: str, *, for_good: bool = False) -> None:
        """Run this step as a loop; if the last one was a loop too, run all later steps as loops."""
        self.why_not = why if for_good or self.why_not_now is not None else None
        self.why_not_now = why
        self._set_back(state)

    def _set_back(self, state: KeptState) -> None:
        self.abandon()
        state.restore()
        reshard(self.model)  # gathered parameters may have been written to
        self._recover()

    def abandon(self) -> None:
        """Reset the model to its state before a forward or backward that an exception ended."""
        run, self._pass = self._pass, None
        self._void("an exception or another forward came after the forward")
        if run is not None:
            run.reset()

    def _void(self, why: str) -> None:
        if self._remaining is not None:
            self._remaining.why_void = self._remaining.why_void or why
            self._remaining = None

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        another = self._pass is not None and (not args or args[0] is not self._pass)
        # A loss may call the model without gradients.
        if another and not in_backward() and (torch.is_grad_enabled() or self.awaits_rest):
            self.abandon()


class _AnotherIsLast(Exception):
    """A group was called after the expected last one."""


class _TooMuch(Exception):
    """Saved activations do not fit. `share`: share of the micro-batches that fits."""

    def __init__(self, words: str, share: float) -> None:
        super().__init__(words)
        self.share = share


class _Pass:
    """A forward of all micro-batches, and the backward that follows it.

    last: the group in whose turn each micro-batch goes back at once; None if all forwards end first.
    """

    def __init__(
        self,
        vertical: Vertical,
        random: Sequence[RandomState],
        state: KeptState,
        memory: Memory | None,
        last: nn.Module | None,
        *,
        is_whole_step: bool,
    ) -> None:
        self._groups, self._root, self._model, self._random = vertical.groups, vertical.root, vertical.model, random
        model, sums = vertical.model, vertical.sums if is_whole_step else None
        self.last, self.last_called = last, last
        self._cuts: list[Cut] = []
        """By micro-batch that has gone back."""
        self.why_not_back: str | None = None
        """Reason why none of them can go back at once, or None."""
        self._coroutines: list[Coroutine] = []
        self._hooks: list[RemovableHandle] = []
        self.outputs: list[Any] = [None] * len(random)
        """Output of each micro-batch's forward, until it is taken."""
        self.is_whole_step = is_whole_step
        self.reductions_apart = sums is None
        """True if the gradients of each micro-batch are reduced separately."""
        self._state, self._memory = state, memory
        self.why_not: str | None = None
        """State that a micro-batch changed for others, in words, or None."""
        self._passed: set[nn.Module] = set()
        """Groups that the running micro-batch used since its last pause."""
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        self._instance_forward = model.__dict__.get("forward")
        self._original_forward = model.forward
        self._resharding = {module for module, group in self._groups.items() if group.is_resharded_after_forward}
        self._called: set[tuple[nn.Module, int]] = set()
        self._inside: list[list[nn.Module]] = [[] for _ in random]
        """Groups whose forward each micro-batch is in, innermost last."""
        self._is_last = False
        """True if the running micro-batch is the last of this turn."""
        self._returning: Counter[nn.Module] = Counter()
        """Number of micro-batches whose backward has not reached the group's inputs, by group."""
        self._have_gradients: dict[nn.Module, bool] = {}
        """True if the group's inputs require gradients, by group."""
        self.micro_batch = 0
        """Number of the running micro-batch."""
        self._running: Coroutine | None = None
        for group in (self._root, *self._groups.values()):
            group.clear(is_running=True, sums=sums)

    @property
    def count(self) -> int:
        return len(self._random)

    # Forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the root's forward for the call in `Vertical.forward`; pass other calls on to the original."""
        if not args or args[0] is not self:
            self.restore_forward()
            return self._original_forward(*args, **kwargs)
        self._coroutines = [
            Coroutine(micro_batch.on(self._original_forward), random)
            for micro_batch, random in zip(args[1], self._random, strict=True)
        ]
        self._hooks = [
            hook
            for module in self._groups
            for hook in (
                module.register_forward_pre_hook(self._come_to, prepend=True, with_kwargs=True),
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, prepend=True),
            )
        ]
        try:
            return self._take_turns(self._coroutines)
        except BaseException:
            self._end_turns()
            raise

    def _call_root(self, *args: Any, **kwargs: Any) -> Any:
        """A micro-batch's call of the model by `MicroBatch.around`: without hooks, which see one forward of all."""
        args, kwargs = self._root.cast_inputs((args, kwargs))
        return self._root.cast_output(self._original_forward(*args, **kwargs))

    def _take_turns(self, coroutines: Sequence[Coroutine]) -> tuple[Any, ...]:
        while not all(coroutine.is_done for coroutine in coroutines):
            module = coroutines[0].waits_for
            if any(coroutine.is_done or coroutine.waits_for is not module for coroutine in coroutines):
                # Their sums would be in another order than in a loop.
                raise CannotPause("they take different routes through its groups")
            if module is not None and module is self.last:
                if not self._inside[0]:
                    self.end_forward(0)
                    return (coroutines[0].result,)
                self.last = None
            for k in reversed(range(self.count)):
                self._is_last = k == 0
                self._go_on(k)
            if module is not None and self._memory is not None:
                self._memory.end_turn(groups=len(self._groups))
        self.last = None
        self._end_turns()
        return tuple(coroutine.result for coroutine in coroutines)

    def end_forward(self, micro_batch: int) -> None:
        """Run a micro-batch through the last group to the end of its forward."""
        coroutine = self._coroutines[micro_batch]
        self._is_last = False
        with without_saving(), self._root.forward_again():  # saved tensors are used at once
            self._go_on(micro_batch)
            while micro_batch == 0 and not coroutine.is_done:
                self.last_called = coroutine.waits_for
                self._go_on(0)
        if self.last_called is not self.last:
            raise _AnotherIsLast
        if not coroutine.is_done:
            self._refuse(micro_batch, "it takes another route through its groups")
        if micro_batch:
            self.outputs[micro_batch] = self._root.cast_output(coroutine.result)
        if micro_batch == self.count - 1:
            self._end_turns()

    def take_turn(self, micro_batch: int) -> Turn:
        """Return the result of a micro-batch's forward, and drop it here."""
        output, coroutine = self.outputs[micro_batch], self._coroutines[micro_batch]
        self.outputs[micro_batch] = coroutine.result = None
        return Turn(output, coroutine.random, coroutine.context)

    def note_loss(self, micro_batch: int, loss: torch.Tensor) -> None:
        """Check the loss from which a micro-batch goes back; the first loss decides if that is possible."""
        if micro_batch < self.count - 1 and self.why_not_back is None:
            cut = self._cuts[micro_batch]
            if cut.is_passed(loss):
                self.why_not_back = "a loss uses more than the inputs of the last group"
            else:
                shared = cut.leaves_on_both_sides(loss)
                if any(count > 1 for count in shared.values()):  # the order of summation would change
                    self.why_not_back = "a parameter of the last turn is used more than once before"
                if not all(group.await_rest(shared) for group in (self._root, *self._groups.values())):
                    self.why_not_back = "a parameter with a gradient hook is used both in the last turn and before"
        why = self.why_not or self.why_not_back or self._state.changed_in([self._coroutines[micro_batch].context])
        if micro_batch and why:
            self._refuse(micro_batch, why)

    def _refuse(self, micro_batch: int, why: str) -> NoReturn:
        raise InfinityError(
            f"micro-batch {micro_batch} of this step can't take turns, although the first one did and its backward is "
            f'done: {why}; train with gradient_accumulation_steps and infinity.schedule "horizontal"'
        )

    @property
    def contexts(self) -> list[contextvars.Context]:
        """The context variables of each micro-batch whose forward has ended."""
        return [coroutine.context for coroutine in self._coroutines if coroutine.is_done]

    @property
    def remaining(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors where the backward continues for micro-batches that went back at once, and their gradients."""
        return [pair for cut in self._cuts for pair in cut.remaining]

    def _end_turns(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for coroutine in self._coroutines:
            coroutine.end()

    def _go_on(self, micro_batch: int) -> None:
        self._running, self.micro_batch = self._coroutines[micro_batch], micro_batch
        self._passed = {*self._inside[micro_batch]}
        begins = self._running.waits_for is None
        self._root.enter(micro_batch)
        try:
            self._model._compiled_call_impl = self._call_root
            self._running.go_on()
        finally:
            self._running = None
            vars(self._model).pop("_compiled_call_impl", None)
        self._root.leave()
        self.why_not = self.why_not or self._state.changed(None if begins else self._passed)

    def _come_to(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook, first: pause the micro-batch before a group."""
        if self._running is None:  # activation checkpointing recomputes a forward
            return None
        if (module, self.micro_batch) in self._called:
            raise CannotPause(f"group {self._names[module]} is called twice in a forward")
        self._called.add((module, self.micro_batch))
        around = self._inside[self.micro_batch]
        for outer in around:
            self._groups[outer].suspend()
        self._running.pause(module)
        for outer in around:
            self._groups[outer].resume(self.micro_batch)
        self.last_called = module
        if module is not self.last or self.micro_batch == self.count - 1 or around:
            return None
        self._cuts.append(Cut())
        try:
            return self._cuts[-1].apply((args, kwargs))
        except ValueError as error:
            self.why_not_back = f"its inputs can't be cut off ({error})"
            return None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook, last: enter the gathered group. In the backward FSDP2 releases it at its inputs."""
        if self._running is None:
            return
        self._inside[self.micro_batch].append(module)
        self._passed.add(module)
        self._groups[module].enter(self.micro_batch)
        tensors = list(grad_tensors((args, kwargs)))
        if not self.reductions_apart and self._have_gradients.setdefault(module, bool(tensors)) != bool(tensors):
            raise CannotPause(f"inputs of group {self._names[module]} have gradients in some micro-batches only")
        self._groups[module].is_held = bool(tensors)
        if tensors:
            if module is not self.last:
                self._returning[module] += 1
            elif module not in self._returning:
                self._returning[module] = self.count
            cast(FSDPModule, module).set_reshard_after_backward(False, recurse=False)
            came_back = itertools.count()
            for tensor in tensors:
                tensor.register_hook(partial(self._come_back, module, came_back))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: leave the group, which is released after the last micro-batch."""
        if self._running is None:
            return
        self._inside[self.micro_batch].remove(module)
        self._groups[module].leave()
        if module in self._resharding:
            cast(FSDPModule, module).set_reshard_after_forward(self._is_last, recurse=False)

    def restore_forward(self) -> None:
        """Restore the root's own forward, and its calls. Idempotent."""
        vars(self._model).pop("_compiled_call_impl", None)
        if self._model.__dict__.get("forward") == self.forward:
            if self._instance_forward is not None:
                self._model.__dict__["forward"] = self._instance_forward
            else:
                del self._model.__dict__["forward"]

    # Backward

    def keep_gathered(self) -> None:
        """Keep the groups gathered until all micro-batches have passed back through them. After the forward, because
        `LiveParameters` settles what stays gathered at its end, and when the backward begins."""
        for module, count in self._returning.items():
            if count:
                cast(FSDPModule, module).set_reshard_after_backward(False, recurse=False)

    def _come_back(self, module: nn.Module, came_back: itertools.count[int], grad: torch.Tensor) -> None:
        """Hook: a gradient has reached an input of a group; FSDP2's hook runs next."""
        if next(came_back) == 0:
            self._returning[module] -= 1
            if not self._returning[module]:
                self._groups[module].give_sums()
                cast(FSDPModule, module).set_reshard_after_backward(True, recurse=False)

    def go_back(self, losses: Iterator[torch.Tensor]) -> None:
        """Run the backward of all micro-batches but the last in the last group's turn; FSDP2 sees one backward."""
        assert self.last is not None
        for _ in range(self.count - 1):
            with self._root.part_of_backward():
                torch.autograd.backward(next(losses))
            self._groups[self.last].become_idle()

    def end(self) -> None:
        """End the backward: put sums that still wait into `.grad`, and release their groups."""
        for module, count in self._returning.items():
            if count:
                cast(FSDPModule, module).reshard()
        for group in self._groups.values():
            group.end()

    def reset(self) -> None:
        """Restore the groups' settings from before the forward."""
        self.restore_forward()
        self._end_turns()
        self._cuts, self._coroutines, self.outputs = [], [], []  # reference cycles that Python can't see
        for module in self._resharding:
            cast(FSDPModule, module).set_reshard_after_forward(True, recurse=False)
        for module in self._returning:
            cast(FSDPModule, module).set_reshard_after_backward(True, recurse=False)
        for group in (self._root, *self._groups.values()):
            group.clear(is_running=False)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[bool]:
    """Disable the user's hooks on the model, which would see all micro-batches at once; yield True if any exist."""
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


class Memory:
    """Predicts, from the memory taken after each group, if the saved activations of all micro-batches fit.

    now: returns the bytes that are free (None if unknown), and those that this process has taken; other processes change
    the former only. bytes_max: upper bound of all saved activations.
    """

    def __init__(self, now: Callable[[], tuple[int | None, int]], bytes_max: int) -> None:
        self._now, self._bytes_max = now, bytes_max
        self._first: tuple[int | None, int] | None = None
        self._turns = 0

    def end_turn(self, *, groups: int) -> None:
        """End a group's turn, of `groups` in all. Raises _TooMuch if the remaining turns would exceed the memory."""
        free, taken = self._now()
        self._first = (free, taken) if self._first is None else self._first
        if self._first[0] is None:
            return
        if self._turns:
            total, most = (taken - self._first[1]) * (groups - 1) // self._turns, min(self._first[0], self._bytes_max)
            if total > most:
                limit = "{} is available" if most == self._first[0] else "plain PyTorch takes {} more than the rest"
                words = f"saved activations would take {format_bytes(total)}, and {limit.format(format_bytes(most))}"
                raise _TooMuch(words, most / total)
        self._turns += 1


def _why_not(model: nn.Module, names: Sequence[str]) -> str | None:
    if len(names) == 0:
        return "it has only one group"
    if any(isinstance(module, FSDPModule) and reshards_to_fewer_ranks(module) for module in model.modules()):
        return "zero_hpz_partition_size keeps a second sharding"
    if any(True for _ in routed_experts(model)):
        return "its micro-batches use different experts"
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or isinstance(
            module, torch._dynamo.OptimizedModule
        ):
            return f"{clean_name(name) or 'the model'} is compiled"
    return None
