"""The base of all paged optimizers: how a step updates each sub-group.

Optimizer state is in optimizer_state.py; the arithmetic is in paged_adam.py, paged_muon.py and hosted_optimizer.py. In
the backward, a gradient passes through this file (here) and gradient_lap.py (lap):

    1  here  `_gradient_came`, or `_take_unreduced`       FSDP2 reports gradients
    2  lap   `came`, or `came_unreduced`                  is the group complete?
    3  here  `_group_came`                                by the group's timing: apply, take, or take and speculate
    4  lap   `take`                                       gradients wait, and their norms are recorded
    5  here  `_apply_gradients`, `_update_speculatively`  build the updates of the sub-groups (`_updates_of`)
    6  lap   `update_in_backward`, `_update`              run them: `PendingUpdates.run_in_backward`
    7  here  `_update`                                    the arithmetic in a lease, which `Stager.write_back` writes

[Note: What an update holds]
A deferred update holds no parameter and no moment. Paged tensors reference the paging, which references the deferred
updates. If an update referenced paged tensors, a model dropped without `close` would never be freed: Python's collector
does not see the reference from a view to its base, so it takes the base for one that is held from outside.
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from infinity.aio import Lease
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.sharding import in_backward, set_gradient_handlers
from infinity.schedule.scheme import UpdateTiming
from infinity.store.layout import Field
from infinity.swap.gradient_lap import GradientLap, Gradients, Taken, lost_gradients, move_out, trained_shard
from infinity.swap.group import PagedGroup
from infinity.swap.health import Health
from infinity.swap.manager import SwapManager
from infinity.swap.optimizer_state import PagedState
from infinity.swap.shard import PagedShard
from infinity.swap.sub_group import PagedSubGroup, SubGroupUpdate
from infinity.swap.waiting_gradients import HostGradient


class PagedOptimizer(torch.optim.Optimizer, abc.ABC):
    """Base class of the optimizers for a model that `swap.page` was called on.

    `PagingOptions.update` decides when a parameter is updated. `state_dict`, `load_state_dict`, `param_groups` and lr
    schedulers work as in torch; the per-element entries of `state` are paged tensors.
    """

    moments: tuple[str, ...] = ()
    """The per-element entries of `state`, by name."""
    counts_steps: bool = True
    """True if `state` holds a "step"."""
    rounds_moments: bool = False
    """True if moments may be kept in fewer than 32 bits."""

    def _adopt(self, swap: SwapManager) -> None:
        """Attach to the paging and follow the gradients; called at the end of construction. Raises ConfigError for
        parameters that `swap` did not page or that were frozen then, and if the arena has no place for the moments."""
        self._paging = swap.paging
        kind = type(self).__name__
        self._paged_state = PagedState(self._paging, kind, self.moments, counts_steps=self.counts_steps)
        self._without_parameters = object.__new__(type(self))
        """A copy of this optimizer without its parameters: see [Note: What an update holds]."""
        self._without_parameters.__dict__.update(vars(self), param_groups=[], state={})
        if not self.rounds_moments and self._paging.options.moments_dtype is not torch.float32:
            raise ConfigError(
                f"{kind} keeps its numbers in fp32, and the model was paged for "
                f"{self._paging.options.moments_dtype}: leave moments_dtype out, or use Adam or AdamW"
            )
        for group in self.param_groups:
            self._settings(group)
        self._speculation = self._paging.paged.updates.speculation
        self._places: dict[nn.Parameter, tuple[int, dict[str, Any]]] = {}
        """By parameter: its position in `param_groups`, and its group. Cached during a backward."""
        self._prepared: tuple[float, int] | None = None
        """The `grad_scale` of the last `prepare`, and the version of the lap at that time."""
        self.lap = GradientLap(self._paging)
        for group in self.param_groups:
            self._follow(group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does. Raises ConfigError, and adds nothing, if this optimizer can't take a parameter."""
        super().add_param_group(param_group)
        if hasattr(self, "lap"):  # torch's constructor calls this too
            try:
                self._follow(self.param_groups[-1]["params"])
            except ConfigError:
                del self.param_groups[-1]
                raise

    def _follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Register gradient hooks for parameters."""
        self.lap.shards |= {parameter: trained_shard(parameter) for parameter in parameters}
        self._places.clear()
        for parameter in parameters:
            shard = self.lap.shards[parameter]
            taken = self._paging.options.update == "backward" or self._paging.waiting_gradients.takes(shard.group)
            if not taken or not parameter.requires_grad:
                continue
            came = partial(_tell, weakref.ref(self)) if shard.resident is None else move_out
            if shard.index in self._paging.gradient_hooks:  # of an older optimizer, which this one replaces
                self._paging.gradient_hooks[shard.index].remove()
            hook = parameter.register_post_accumulate_grad_hook(came)  # FSDP2 calls it
            self._paging.gradient_hooks[shard.index], self.lap.hooks[parameter] = hook, hook.id
            module = shard.group.sharded_module
            if shard.resident is None and module is not None and not self._paging.device.is_discrete:
                further = (
                    None if self._paging.options.updates_are_collective else partial(_tell_further, weakref.ref(self))
                )
                set_gradient_handlers(
                    module,
                    partial(_tell_unreduced, weakref.ref(self), shard.group),
                    further,  # ranks must run equally many collectives
                )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0
    ) -> float | None:
        """Update every parameter that has a gradient (fp32, of the shard's shape), multiplied by `grad_scale` first.

        On return every update is done, or deferred until its values are used (`PagingOptions.update`). The last writes
        continue in the background. Raises IoError if a transfer failed. The stored state is then torn: no step, read or
        gather works until state is loaded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        prepared, self._prepared = self._prepared, None
        if prepared != (grad_scale, self.lap.version):
            self.prepare(grad_scale)
            self._prepared = None
        with self._paging.paged.health.change("an optimizer step"):
            self._take_step(grad_scale)
        return loss

    def expect(self, grad_scale: float | None) -> None:
        """Announce the step's last backward, and the factor of its gradients if none is clipped or overflows; None if
        another backward follows before the step."""
        self._speculation.expected_scale = grad_scale
        self.lap.is_before_last = grad_scale is None
        self.lap.forget_due()

    @torch.no_grad()
    def prepare(self, grad_scale: float = 1.0) -> None:
        """Do the part of a step that precedes its own changes: checks, deferred updates, and taking gradients. A
        deferred update that fails may tear the values."""
        self._paging.leave_unfinished_pass()
        with self._paging.entered():
            self._paging.paged.health.check_not_torn()
            self.lap.check_not_replaced()
            self.lap.check_complete()
            self.lap.check_untouched()
            self.lap.check_unused()
            self._check_used(grad_scale)
            self._paging.finish_updates()
            self.take_gradients()
            self._prepared = grad_scale, self.lap.version

    @torch.no_grad()
    def _take_step(self, grad_scale: float) -> None:
        """Run a prepared step, inside a change of the model's health."""
        with self._paging.entered():
            stepping = self._stepping(grad_scale)
            accepted: set[PagedSubGroup] = set()
            if self._paging.options.speculative:
                inputs = {stepped.shard.index: stepped.inputs for stepped in stepping.values()}
                accepted = self._speculation.accept(inputs, grad_scale)
            remaining = [sub for sub in self._paging.paged.sub_groups if sub not in accepted]
            updates = self._updates_of(remaining, stepping, self._paging.waiting_gradients.claim)
            self._paging.paged.updates.defer(updates, accepted)
            for parameter, stepped in stepping.items():
                self._paged_state.count_step(stepped.shard, self.state[parameter])
            used = self.lap.used(stepping)
            if not self._paging.options.updates_wait:
                self._paging.finish_updates()  # a failure tears: a repeated step would repeat a part
            self._end_backward(used)
            self._paging.end_step()

    def skip(self) -> None:
        """Take a step that changes nothing, for example after an overflow. Its gradients are dropped."""
        self._paging.paged.health.check_not_part_stepped()
        self._speculation.note_skipped()
        self._end_backward()
        self._paging.end_step()

    def discard(self) -> None:
        """Drop the gradients before all values are set. A step that the backward began is torn until they are."""
        health = self._paging.paged.health
        if health.state is Health.PART_STEPPED:
            health.tear("a step that was not taken to its end")
        self._end_backward()
        self._paging.policy.discard_step()
        self.zero_grad()

    @property
    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """Norms (0-D) of the gradients that were taken or applied in the backward since the last step."""
        return self.lap.norms

    def check_untouched(self) -> None:
        """See `GradientLap.check_untouched`."""
        self.lap.check_untouched()

    def take_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Take the gradients of incomplete groups. Returns the norms of all gradients that were taken."""
        return self.lap.take_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does, and drop those that the backward took.

        Raises InfinityError if the backward applied some of them, because that step has begun.
        """
        health = self._paging.paged.health
        if self.lap.has_applied and not in_backward():
            self._paging.leave_unfinished_pass()  # tears the values if an exception interrupted that backward
        with self._paging.entered():
            if self.lap.has_applied and health.state in (Health.WHOLE, Health.PART_STEPPED):
                raise InfinityError(
                    "the gradients were applied in the backward already, and zero_grad() can't undo that: call step() "
                    'first, or set infinity.update (PagingOptions.update) to "forward"'
                )
            hidden = self.lap.hide_taken()
            super().zero_grad(set_to_none)
            if health.state is not Health.PART_STEPPED:
                self._end_backward({} if set_to_none else dict.fromkeys(hidden, Taken.ZEROED))

    @torch.no_grad()
    def _gradient_came(self, parameter: nn.Parameter) -> None:
        """Process a gradient that FSDP2 has reduced in the backward."""
        with self._paging.entered():
            group = self.lap.came(parameter)
            if group is not None:
                self._group_came(group, self.lap.pop_arrived(group))

    @torch.no_grad()
    def _take_unreduced(
        self, group: PagedGroup, grads: Mapping[nn.Parameter, torch.Tensor]
    ) -> Collection[nn.Parameter]:
        """Process a group's gradients before FSDP2 copies them. Returns the parameters for which no copy is needed."""
        with self._paging.entered():
            came = self.lap.came_unreduced(group, grads)
            if came:
                self._group_came(group, came)
            return came.keys()

    def _group_came(self, group: PagedGroup, grads: Gradients) -> None:
        """Process the complete gradients of a group: apply them, or take them. Taken gradients also update the group
        speculatively if the step will probably accept that."""
        if group.timing is UpdateTiming.BACKWARD:
            self._apply_gradients(group, grads)
            return
        policy = self._paging.policy
        due = group.timing is UpdateTiming.SPECULATIVE and self._speculation.promises
        speculates = due and policy.gradients_are_final(group)
        self.lap.take(group, grads)
        policy.count_forwards_anew(group)
        if speculates:
            self._update_speculatively(group, [*grads])

    def _apply_gradients(self, group: PagedGroup, grads: Gradients) -> None:
        """Update a group for good with the gradients that arrived."""
        health = self._paging.paged.health
        if health.state is Health.WHOLE:  # the first update of this backward; moments can't be set by hand after it
            for parameter, state in [*self.state.items()]:
                self.state[parameter] = self._paged_state.adopted(cast(nn.Parameter, parameter), state)
        stepping = self._stepping(1.0, [*grads], grads)  # may refuse the settings
        health.note_part_stepped()
        updates = self._updates_of(group.members, stepping, lambda sub: None)
        for parameter, stepped in stepping.items():
            self._paged_state.count_step(stepped.shard, self.state[parameter])
        self.lap.note_applied(grads, self._inputs_of({p: stepped.settings for p, stepped in stepping.items()}))
        self.lap.update_in_backward(group, updates)

    def _update_speculatively(self, group: PagedGroup, parameters: list[nn.Parameter]) -> None:
        """Update the eligible sub-groups of a group whose gradients were taken, for the step to accept."""
        assert self._speculation.expected_scale is not None
        stepping = self._stepping(self._speculation.expected_scale, parameters, {})
        members = [sub for sub in group.members if self._speculation.may_update(sub)]
        updates = self._updates_of(members, stepping, self._paging.waiting_gradients.held)
        if updates:
            self._speculation.inputs |= {stepped.shard.index: stepped.inputs for stepped in stepping.values()}
            self.lap.update_in_backward(group, updates)

    def _updates_of(
        self,
        sub_groups: Sequence[PagedSubGroup],
        stepping: Mapping[nn.Parameter, Stepping],
        taken: Callable[[PagedSubGroup], torch.Tensor | None],
    ) -> dict[PagedSubGroup, SubGroupUpdate]:
        """Return the update of each sub-group with a stepped parameter. `taken` returns its gradients if they wait."""
        by_shard = {stepped.shard.index: stepped for stepped in stepping.values()}
        updates: dict[PagedSubGroup, SubGroupUpdate] = {}
        for sub in sub_groups:
            here = {  # without padding, but for a matrix that all ranks update together
                piece.shard: of
                for piece in sub.layout.pieces
                if (of := by_shard.get(piece.shard)) and (sub.layout.whole or piece.start < of.shard.shape.numel())
            }
            if here:
                updates[sub] = partial(self._without_parameters._update, sub, here, taken(sub))
        return updates

    def _check_used(self, grad_scale: float) -> None:
        """Raise InfinityError if the backward applied gradients differently from this step, and ConfigError if the
        settings of a parameter group can't be paged."""
        settings: dict[nn.Parameter, Any] = {}
        for group in self.param_groups:
            settings |= dict.fromkeys(group["params"], self._settings(group))
        if self.lap.has_applied:
            self.lap.check_applied(self._inputs_of(settings), grad_scale)

    def _inputs_of(self, settings: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]:
        """Return by parameter: its settings, its step count, and the moments that are not in the arena."""
        states = {p: self.state.get(p, {}) for p in settings}
        return {
            p: (used, float(states[p].get("step", 0.0)), self._paged_state.replaced(states[p]))
            for p, used in settings.items()
        }

    def _end_backward(self, used: Mapping[nn.Parameter, Taken] | None = None) -> None:
        self.lap.end(used or {})
        self._places.clear()

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Run the block with state of all parameters, as a checkpoint has it: zeros and step 0 before their first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._paged_state.make(parameter, self.state[parameter])
        yield

    @property
    def unstepped(self) -> Collection[nn.Parameter]:
        """The parameters that have not stepped."""
        return [p for p, shard in self.lap.shards.items() if p.requires_grad and not shard.stepped]

    def forget_steps(self, parameters: Collection[nn.Parameter]) -> None:
        """After a load: let the next step of these parameters be their first."""
        for parameter in (p for p in parameters if p.requires_grad):
            self.state.pop(parameter, None)
            self._paged_state.make(parameter, self.state[parameter])

    def restore_steps(self, steps: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Make state for moments that are already in the arena, with these step counts. There is no state yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in steps or trained_shard(parameter).stepped:
                    self._paged_state.make(parameter, self.state[parameter], zero=False)
        for parameter, step in steps.items():
            self.state[parameter]["step"].copy_(step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; moments go into the arena. After a torn step, load the model's state dict first."""
        with self._paging.entered():
            health = self._paging.paged.health
            health.check_not_part_stepped()
            super().load_state_dict(state_dict)
            for parameter, loaded in cast("list[tuple[nn.Parameter, dict[str, Any]]]", list(self.state.items())):
                del self.state[parameter]
                self._paged_state.load(parameter, self.state[parameter], loaded)
            if health.state is Health.TORN:  # drop the gradients of that step, applied or not
                self._end_backward()
                self._paging.policy.discard_step()
                health.mend()

    def _stepping(
        self, grad_scale: float, only: Collection[nn.Parameter] | None = None, grads: Gradients | None = None
    ) -> dict[nn.Parameter, Stepping]:
        """Return a `Stepping` for each parameter that has a gradient, with state made at its first step. `grads`: the
        gradients that are not kept as waiting; by default those in `.grad`."""
        came, shards = self._paging.waiting_gradients.kept_shards, self.lap.shards
        left: dict[nn.Parameter, torch.Tensor] = {}
        chosen = []
        for parameter, group in self._with_groups(only):
            grad = self.lap.left(parameter) if grads is None else grads.get(parameter)
            waits = shards[parameter].index in came
            if grad is not None:
                left[parameter] = grad.reshape(-1)
                if waits:  # an exception interrupted the taking
                    raise lost_gradients()
            if grad is not None or waits:
                chosen.append((parameter, group))
        started = dict(zip(left, self._paging.host_gradients.start([*left.values()]), strict=True))
        stepping: dict[nn.Parameter, Stepping] = {}
        settings: dict[int, Any] = {}
        for parameter, group in chosen:
            if id(group) not in settings:  # once per parameter group
                settings[id(group)] = self._settings(group)
            shard = shards[parameter]
            self.state[parameter], steps, first = self._paged_state.begin_step(parameter, shard, self.state[parameter])
            assert isinstance(parameter, DTensor)
            of_group = settings[id(group)]
            stepping[parameter] = Stepping(
                shard, parameter._spec, of_group, steps, first, started.get(parameter), grad_scale
            )
        return stepping

    def _with_groups(self, only: Collection[nn.Parameter] | None) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        """Return the parameters, or `only` these, in order, each with its parameter group."""
        if only is None:
            return [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        if not self._places:  # cached, because building it takes time linear in the parameters
            self._places = {p: (place, group) for place, (p, group) in enumerate(self._with_groups(None))}
        places = [(*self._places[p], p) for p in only if p in self._places]  # others left the groups
        places.sort(key=itemgetter(0))
        return [(parameter, group) for _, group, parameter in places]

    @abc.abstractmethod
    def _settings(self, group: dict[str, Any]) -> Any:
        """Return the fixed, hashable settings of a parameter group. Raises ConfigError if they can't be paged."""

    @abc.abstractmethod
    def _step_pieces(self, sub: PagedSubGroup, batches: Mapping[Any, list[SteppedPiece]], lease: Lease | None) -> None:
        """Step elements of one sub-group, batched by settings, and refresh its compute parameters."""

    def _takes_staged(self, sub: PagedSubGroup, batches: Mapping[Any, list[SteppedPiece]]) -> bool:
        """Return True if `_step_pieces` takes compute parameters from `PagedSubGroup.staged`, if set, and puts new ones
        there. Otherwise they are copied into the lease first, and the caller that set `staged` copies the new ones."""
        return False

    def _step_and_verify(self, sub: PagedSubGroup, batches: Mapping[Any, list[SteppedPiece]], lease: Lease) -> bool:
        """Step unverified bytes and verify them in the same pass. Returns False, with nothing done, if that can't be.

        Raises IntegrityError; only the bytes in the lease have changed then.
        """
        return False

    @torch.no_grad()
    def _update(
        self, sub: PagedSubGroup, stepping: dict[int, Stepping], taken: torch.Tensor | None, lease: Lease | None
    ) -> None:
        """Step the pieces of one sub-group in place and refresh its copies. `taken`: its gradients if they wait."""
        if taken is None and any(stepped.grad is None for stepped in stepping.values()):
            assert lease is not None
            taken = self._paging.waiting_gradients.staged(sub, lease)
        elif taken is not None:
            self._paging.host_gradients.settle()
        batches: dict[Any, list[SteppedPiece]] = {}
        for piece in sub.layout.pieces:
            stepped = stepping.get(piece.shard)
            numel = (
                min(piece.numel, stepped.shard.shape.numel() - piece.start) if stepped else 0
            )  # padding is never stepped
            # A rank that has no rows of a matrix takes part in its collective update.
            if stepped is not None and (numel > 0 or sub.layout.whole):
                if stepped.grad is not None:
                    grad = stepped.grad.wait()[piece.start : piece.start + numel]
                else:
                    assert taken is not None
                    grad = taken[piece.offset : piece.offset + numel]
                batches.setdefault(stepped.settings, []).append(
                    SteppedPiece(stepped, piece.offset, piece.start, numel, grad)
                )
        if sub.staged is not None and not self._takes_staged(sub, batches):
            sub.view(Field.COMPUTE, lease).copy_(sub.staged)
            sub.staged = None
        if lease is None or not sub.chunk.unverified:
            self._step_pieces(sub, batches, lease)
        elif not self._step_and_verify(sub, batches, lease):
            self._paging.paged.stager.io.verify(sub.chunk)
            self._step_pieces(sub, batches, lease)
        resident = [done for batch in batches.values() for done in batch if done.stepping.shard.resident is not None]
        if resident:
            master = sub.master(lease)
            for done in resident:
                done.stepping.shard.set_resident(done.start, master[done.place])


def _tell(optimizer: weakref.ref[PagedOptimizer], parameter: nn.Parameter) -> None:
    """Pass on a gradient. The parameter must not hold the optimizer: Python's collector doesn't see tensor hooks."""
    alive = optimizer()
    if alive is not None:
        alive._gradient_came(parameter)


def _tell_unreduced(
    optimizer: weakref.ref[PagedOptimizer], group: PagedGroup, grads: Mapping[nn.Parameter, torch.Tensor]
) -> Collection[nn.Parameter]:
    alive = optimizer()
    return alive._take_unreduced(group, grads) if alive is not None else ()


def _tell_further(optimizer: weakref.ref[PagedOptimizer], share: float) -> None:
    alive = optimizer()
    if alive is not None:
        with torch.no_grad():
            alive.lap.came_further(share)


@dataclass(frozen=True)
class Stepping:
    """One parameter to step. spec: how it is sharded. settings: of its parameter group. steps: its steps so far. first:
    True if this is its first step. grad: 1-D; None if it was taken. See [Note: What an update holds]."""

    shard: PagedShard
    spec: DTensorSpec
    settings: Any
    steps: torch.Tensor
    first: bool
    grad: HostGradient | None
    grad_scale: float

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Everything that its update depends on, except the gradient and the state."""
        return self.settings, self.grad_scale, float(self.steps)


@dataclass(frozen=True)
class SteppedPiece:
    """Elements [start, start + numel) of a parameter, at `offset` in a sub-group, and their gradient (1-D, CPU)."""

    stepping: Stepping
    offset: int
    start: int
    numel: int
    grad: torch.Tensor

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    def scaled(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return a copy of the gradient, or of its elements [start, end), in fp32 and multiplied by the step's factor.
        A copy, because optimizers may change it, and a discarded or interrupted update is run again."""
        grad = self.grad[start:end].to(torch.float32, copy=True)
        return grad if self.stepping.grad_scale == 1.0 else grad.mul_(self.stepping.grad_scale)
