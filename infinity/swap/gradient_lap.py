"""The gradient lap: from FSDP2's reduce-scatter, through a wait in memory or on NVMe, into the update of a sub-group.

FSDP2 has reduced a gradient (`came`), or on a single CPU rank is about to copy those of a group (`came_unreduced`).
Once a group is complete, `PagedOptimizer._group_came` (paged_optimizer.py) calls `take` (the gradients wait), `take`
and `update_in_backward` (they wait, and a speculative update runs), or `note_applied` and `update_in_backward` (the
update stays). The step runs all other updates (pending_updates.py). Used by the training thread, and by autograd's
threads on its behalf. infinity/swap/README.md follows one gradient.

[Note: Updates while autograd computes]
The update of a group waits until autograd computes the gradients of the next group, and is spread over that time: with
each share of those gradients, the same share of the update runs. So the drive works all the time, and not only between
two groups, when nothing is computed and the pool holds less than one group's state. The remainder runs when the next
group's gradients are complete, or when the backward ends. Shares count elements, not time, so the order is the same in
every step and the trace can learn it. A discrete device computes by itself: there the whole update of a group runs once
the next group's gradients are queued and its own have reached the host.

[Note: What .grad shows]
`.grad` does not hold a gradient that waits elsewhere, was applied, or was used by a step. If it were None then,
`clip_grad_norm_`, a second step or a sum with the next gradient would have no effect. Results would silently differ
from training in memory. So `.grad` is a stand-in: it has the shape, and raises on any use that needs the elements.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.elsewhere import ElsewhereTensor
from infinity.fsdp2.placements import as_sharded
from infinity.fsdp2.sharding import in_backward, is_alone, local_of
from infinity.optim.kernel import norms, norms_match_torch
from infinity.schedule.scheme import UpdateTiming
from infinity.swap.group import PagedGroup
from infinity.swap.health import Health
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.paging import Paging
from infinity.swap.shard import GradientState, PagedShard
from infinity.swap.sub_group import PagedSubGroup, SubGroupUpdate

Gradients = Mapping[nn.Parameter, torch.Tensor]
"""This rank's elements (1-D) of each parameter's gradient: fp32, or as autograd left them and then read-only."""


class GradientLap:
    """The gradients of one model's trained parameters, from one step to the next."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._updates_to_stay = paging.options.update == "backward" and not paging.options.speculative
        """True if updates in the backward stay, and no step discards them."""
        self.shards: dict[nn.Parameter, PagedShard] = {}
        self.hooks: dict[nn.Parameter, int] = {}
        """The id of the hook by which FSDP2 reports a gradient, if there is one."""
        self.version = 0
        """Changes with each gradient that arrives, and with the end of each step."""
        shards = paging.paged.shards
        self._gradient_counts = {
            group: sum(shards[index].trained and shards[index].resident is None for index in group.shards)
            for group in paging.paged.groups
        }
        """Number of parameters per group that deliver a gradient to this lap."""
        self.norms: dict[nn.Parameter, torch.Tensor] = {}
        """Norms (0-D) of the gradients taken or applied in the backward since the last step, in order of arrival."""
        self.is_before_last = False
        """True if another backward follows before the step: norms of its gradients will replace those of this one's."""
        self._arrivals: Counter[nn.Parameter] = Counter()
        """Number of gradients per parameter since the last step."""
        self._arrived: dict[PagedGroup, dict[nn.Parameter, None]] = {}
        self._ends_backward = False
        """True if `_end_backward` is queued."""
        self._applied: dict[nn.Parameter, Any] = {}
        """By parameter updated in the backward since the last step: the inputs of its update, see `note_applied`."""
        self._due: list[_DueUpdates] = []
        """Groups to update before the backward ends: see [Note: Updates while autograd computes]."""
        self._stand_ins: dict[nn.Parameter, StandIn] = {}
        """By parameter: its stand-in, made once."""
        self._shown: dict[nn.Parameter, StandIn] = {}
        """The stand-ins that `.grad` shows now."""

    def came_unreduced(self, group: PagedGroup, grads: Mapping[nn.Parameter, torch.Tensor]) -> Gradients:
        """Accept a group's gradients (in their shapes) before FSDP2 copies them. Returns all of them, flattened; or
        none if the group can't skip the copy, for example because a user hook reads a gradient or `.grad` holds one."""
        ours = {p: self.shards[p] for p in grads if p in self.shards and self.shards[p].resident is None}
        final = group.timing is not UpdateTiming.BACKWARD or self._paging.policy.gradients_are_final(group)
        whole = len(ours) == self._gradient_counts[group] and group not in self._arrived
        if not final or not whole or self._paging.policy.reductions_at_once > 1:
            return {}
        if not all(map(self._is_free, ours, ours.values())):
            return {}
        self.version += 1
        added = () if self._is_part(group, ours) else self._paging.waiting_gradients.kept_shards
        elements = {parameter: grads[parameter].view(-1) for parameter in ours}
        for parameter, shard in ours.items():
            if shard.index in added:
                elements[parameter] = elements[parameter].to(torch.float32, copy=True)
        return elements

    def _is_free(self, parameter: nn.Parameter, shard: PagedShard) -> bool:
        """Return True if `.grad` takes no part in handling the next gradient, and no user hook reads it there."""
        shown = self._shown.get(parameter)
        if parameter.grad is not None and (
            shown is None or shown.taken is not Taken.FOR_STEP or not shown.is_shown_alone(parameter)
        ):
            return False
        return self._is_hook_ours(parameter) and shard.gradient in (GradientState.NONE, GradientState.TAKEN)

    def _is_hook_ours(self, parameter: nn.Parameter) -> bool:
        """Return True if no user hook is called with the reduced gradient."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        return hooks is not None and [*hooks] == [self.hooks.get(parameter)]

    def _needs_fp32(self, parameter: nn.Parameter, grad: torch.Tensor) -> bool:
        """Return True if 16 bits may not hold a gradient: a sum of several, or what a user hook has made of it."""
        if grad.dtype is not torch.float32:
            return False
        reduced_once = self._arrivals[parameter] == 1 and self._paging.policy.micro_batches_at_once == 1
        return not (reduced_once and self._is_hook_ours(parameter))

    def came(self, parameter: nn.Parameter) -> PagedGroup | None:
        """Record that a gradient is reduced. Returns its group if all of the group's gradients have arrived, else None.

        Raises InfinityError if the group was updated already (the values are torn), if `.grad` of a taken gradient was
        set, or if an exception interrupted the taking of a gradient.
        """
        self.version += 1
        if self.left(parameter) is None:
            return None  # another optimizer over the same parameter has taken it
        shard = self.shards[parameter]
        group = shard.group
        if shard.gradient is GradientState.APPLIED:
            self._paging.paged.health.tear(f"an update in the backward (more than one gradient for {group.name})")
            raise InfinityError(
                f"group {group.name} received another gradient after the backward had updated it: set infinity.update "
                '(PagingOptions.update) to "forward" for a model that is used more than once per step'
            )
        self._arrivals[parameter] += 1
        if self._arrivals[parameter] < self._paging.policy.reductions_at_once:
            return None  # this backward brings the other reductions
        if group.timing is UpdateTiming.BACKWARD and not self._paging.policy.gradients_are_final(group):
            return None
        if shard.gradient is GradientState.TAKING:
            raise lost_gradients()
        arrived = self._arrived.setdefault(group, {})
        if parameter not in arrived:
            shard.move_gradient_to(GradientState.ARRIVED)
            arrived[parameter] = None
        if len(arrived) == self._gradient_counts[group]:
            return group
        if not self._ends_backward and in_backward():
            Variable._execution_engine.queue_callback(self._end_backward)
            self._ends_backward = True
        return None

    def pop_arrived(self, group: PagedGroup) -> Gradients:
        """Return and remove a group's arrived gradients, which are in `.grad`, in order of arrival."""
        grads = {}
        for parameter in self._arrived.pop(group):
            if parameter.grad is not None:
                grads[parameter] = local_of(parameter.grad).reshape(-1)
            else:
                self.shards[parameter].move_gradient_to(GradientState.NONE)
        return grads

    def take(self, group: PagedGroup, grads: Gradients) -> None:
        """Keep a group's arrived gradients until their update, and record their norms. `.grad` becomes a stand-in."""
        shards = [self.shards[parameter] for parameter in grads]
        for sub in group.members:
            self._paging.paged.updates.speculation.discard(sub)
        self._due = [due for due in self._due if due.group is not group]
        for shard in shards:
            shard.move_gradient_to(GradientState.TAKING)
        by_index = {shard.index: grad for shard, grad in zip(shards, grads.values(), strict=True)}
        sums = {self.shards[parameter].index for parameter, grad in grads.items() if self._needs_fp32(parameter, grad)}
        is_part = self._is_part(group, grads)
        self._paging.waiting_gradients.take(group, by_index, sums=sums, in_place=is_part)
        self._note_norms_and_refuse(grads, none=is_part)
        for shard in shards:
            shard.move_gradient_to(GradientState.TAKEN)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Take the gradients of incomplete groups that earlier backwards brought gradients of: FSDP2 would add the next
        ones to those in `.grad`, and the sum of all would be in another order."""
        self._ends_backward = False
        with self._paging.entered():
            for group in list(self._arrived):
                if group.timing.gradients_wait:
                    self.take(group, self.pop_arrived(group))

    def take_all(self) -> dict[nn.Parameter, torch.Tensor]:
        """Take the gradients of incomplete groups. Returns the norms of all gradients that were taken."""
        self._end_backward()
        for parameter, shard in self.shards.items():
            if shard.gradient is GradientState.TAKEN and parameter not in self.norms:  # no later backward brought more
                gradient = self._paging.waiting_gradients.whole(shard.group, shard.index)
                (self.norms[parameter],) = _norms_of({parameter: gradient})
        return self.norms

    def note_applied(self, grads: Gradients, inputs: Mapping[nn.Parameter, Any]) -> None:
        """Record that a group's gradients are about to be applied.

        `inputs`: of each parameter's update; the step must have the same.
        """
        self._note_norms_and_refuse(grads)
        for parameter, used in inputs.items():
            self._applied[parameter] = used
            self.shards[parameter].move_gradient_to(GradientState.APPLIED)

    def update_in_backward(self, group: PagedGroup, updates: Mapping[PagedSubGroup, SubGroupUpdate]) -> None:
        """Update members of a group before this backward ends: see [Note: Updates while autograd computes]."""
        if not self._due:
            Variable._execution_engine.queue_callback(self._update_due)
        self._due.append(_DueUpdates(group, dict(updates), len(updates)))
        self._update_due(leave=1)

    def came_further(self, share: float) -> None:
        """Continue the due update: autograd has computed this share (0 to 1) of the current group's gradients."""
        if self._due:
            due = self._due[0]
            count = math.floor(share * due.total) - (due.total - len(due.updates))
            if 0 < count < len(due.updates):
                self._update(due, count)

    def forget_due(self) -> None:
        """Begin a backward: drop speculative updates that an exception left from the one before."""
        self._ends_backward = False
        if not self._updates_to_stay:
            self._due.clear()

    def check_not_replaced(self) -> None:
        """Raise InfinityError if a newer optimizer gets the gradients of one of the parameters."""
        for parameter, hook in self.hooks.items():
            if hook not in parameter._post_accumulate_grad_hooks:
                raise InfinityError(
                    f"{self.shards[parameter].name} is stepped by an optimizer that was made later: step that one"
                )

    def check_complete(self) -> None:
        """Raise InfinityError if an exception interrupted `take`, or updates in the backward that stay (which tears the
        values), or if this step's updates would use up gradients that were taken for another optimizer."""
        health = self._paging.paged.health
        lost = any(shard.gradient is GradientState.TAKING for shard in self.shards.values())
        # FSDP2's own part of that backward may be over.
        if (self._due and self._updates_to_stay) or (lost and health.state is Health.PART_STEPPED):
            health.tear("an update in the backward (interrupted)")
            health.check_not_torn()
        if lost:
            raise lost_gradients()
        came, paged = self._paging.waiting_gradients.kept_shards, self._paging.paged
        others = came.difference(shard.index for shard in self.shards.values())
        for sub in paged.sub_groups if others else ():
            waiting = came.intersection(piece.shard for piece in sub.layout.pieces)
            if waiting & others and waiting - others:
                name = paged.shards[min(waiting & others)].name
                raise InfinityError(
                    f"two optimizers step parts of one group, such as {name}, but a group is updated as a whole: give "
                    "all of its parameters to one optimizer, in parameter groups of their own"
                )

    @property
    def has_applied(self) -> bool:
        """True if the backward has applied gradients since the last step."""
        return bool(self._applied)

    def check_applied(self, inputs: Mapping[nn.Parameter, Any], grad_scale: float) -> None:
        """Raise InfinityError if the backward applied gradients with other inputs than a step with these would use."""
        if grad_scale != 1.0 or any(inputs.get(p) != used for p, used in self._applied.items()):
            raise InfinityError(
                "the gradients were applied in the backward already, with other settings, optimizer state or "
                "parameters than this step has: change the learning rate and other settings before the backward, or "
                'set infinity.update (PagingOptions.update) to "forward"'
            )

    def check_unused(self) -> None:
        """Raise InfinityError if the next step would use a gradient that the last step has used."""
        for parameter, stand_in in self._shown.items():
            if stand_in.taken is Taken.BY_STEP and stand_in.is_shown_alone(parameter):  # torch would step with it
                raise used_up(stand_in.name)

    def used(self, stepped: Iterable[nn.Parameter]) -> dict[nn.Parameter, Taken]:
        """Return the stand-ins to show after a step over these parameters. A used gradient is not left in `.grad`,
        because changing it there would change a deferred update."""
        used = dict.fromkeys(self._applied, Taken.BY_STEP)
        for parameter in stepped:
            in_grad = parameter.grad is not None and not isinstance(local_of(parameter.grad), RefusingGradient)
            if not in_grad and parameter in self._shown and self._shown[parameter].taken is Taken.ZEROED:
                used[parameter] = Taken.ZEROED
            elif not in_grad or self._paging.options.update != "step":
                used[parameter] = Taken.BY_STEP
        return used

    def end(self, used: Mapping[nn.Parameter, Taken]) -> None:
        """End the step: later gradients belong to the next one. `used`: what `.grad` shows from now on."""
        self.version += 1
        self.hide_taken()
        for parameter, taken in used.items():
            self._show(parameter, taken)
        self._paging.paged.updates.speculation.discard_all()
        self._paging.waiting_gradients.forget({shard.index for shard in self.shards.values()})
        self.norms.clear()
        self._due.clear()
        self._ends_backward = False
        self._arrivals.clear()
        self._arrived.clear()
        self._applied.clear()
        for shard in self.shards.values():
            if shard.gradient is not GradientState.NONE:
                shard.move_gradient_to(GradientState.NONE)
        self._paging.paged.health.note_all_stepped()

    def left(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return this rank's part of the gradient in `.grad`; None if there is none or it was taken.

        Raises InfinityError if `.grad` of a taken gradient was set, which would have no effect.
        """
        stand_in, grad = self._shown.get(parameter), parameter.grad
        if stand_in is not None and grad is not stand_in.grad and stand_in.taken is Taken.FOR_STEP:
            raise refusal(stand_in.name)
        if grad is None:
            return None
        local = local_of(grad)
        if isinstance(local, RefusingGradient):
            return local.materialize() if stand_in is not None and stand_in.taken is Taken.ZEROED else None
        return local

    def check_untouched(self) -> None:
        """Raise InfinityError if `.grad` of a taken gradient was set, which would have no effect."""
        for parameter, stand_in in self._shown.items():
            if stand_in.taken is Taken.FOR_STEP and parameter.grad is not stand_in.grad:
                raise refusal(stand_in.name)

    def hide_taken(self) -> list[nn.Parameter]:
        """Set `.grad` to None where it shows a stand-in. Returns those parameters."""
        hidden = [parameter for parameter, stand_in in self._shown.items() if parameter.grad is stand_in.grad]
        for parameter in hidden:
            parameter.grad = None
        self._shown.clear()
        return hidden

    def _show(self, parameter: nn.Parameter, taken: Taken) -> None:
        stand_in = self._stand_ins.get(parameter) or StandIn(parameter, self.shards[parameter].name)
        self._stand_ins[parameter] = self._shown[parameter] = stand_in
        stand_in.taken = taken
        stand_in.grad._local_tensor = stand_in.local
        parameter.grad = stand_in.grad

    def _is_part(self, group: PagedGroup, grads: Iterable[nn.Parameter]) -> bool:
        """Return True if gradients that a later backward of this step adds to are summed without a norm of their own."""
        return self.is_before_last and self._paging.waiting_gradients.sums_in_place(group) and all(map(is_alone, grads))

    def _note_norms_and_refuse(self, grads: Gradients, *, none: bool = False) -> None:
        """Record the norms of gradients (or that there are `none` yet), and show a stand-in for each in `.grad`."""
        norms = {} if none else dict(zip(grads, _norms_of(grads), strict=True))
        for parameter in grads:
            self._show(parameter, Taken.FOR_STEP)
            self.norms.pop(parameter, None)
        self.norms |= norms

    def _update_due(self, *, leave: int = 0) -> None:
        """Update the due groups except the last `leave`. After an exception, the remaining updates stay due."""
        while len(self._due) > leave:
            self._update(self._due[0], len(self._due[0].updates))
            del self._due[0]

    def _update(self, due: _DueUpdates, count: int) -> None:
        parameters, policy = self._paging.parameters, self._paging.policy
        updates = dict(itertools.islice(due.updates.items(), count))

        def look_ahead(sub: PagedSubGroup) -> None:
            policy.use_state(sub)
            parameters.look_ahead()

        with self._paging.entered():
            left = len(due.updates)
            if first := left == due.total:
                policy.begin_update(due.group)
            self._paging.paged.updates.run_in_backward(due.group, updates, look_ahead, first=first, last=count == left)
            for sub in updates:
                del due.updates[sub]
            if not due.updates:
                policy.end_update(due.group)


_VIEWS = {torch.ops.aten.view, torch.ops.aten.detach, torch.ops.aten.alias}
_ZEROING = {torch.ops.aten.zero_, torch.ops.aten._foreach_zero_}


class Taken(enum.Enum):
    """The state of a gradient that `.grad` doesn't hold."""

    FOR_STEP = "for the step"
    """The next step will use it, or the backward has applied it. A further gradient is added to it."""
    BY_STEP = "by the step"
    """A step has used it, and zero_grad() was not called. In-memory training would still hold it."""
    ZEROED = "zeroed"
    """zero_grad(set_to_none=False) was called since: it is 0, without memory."""


class RefusingGradient(ElsewhereTensor):
    """A stand-in for a taken gradient (fp32, of the shard's shape). Has no elements; reads raise unless they are 0."""

    _gradient: StandIn

    def materialize(self) -> torch.Tensor:
        if self._gradient.taken is not Taken.ZEROED:
            raise self._gradient.refusal()
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def __iadd__(self, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override, misc]
        """Return `other`, a gradient that FSDP2 reduced in a further backward; `.grad` holds that until it is taken."""
        if self._gradient.taken is Taken.ZEROED:
            return other + 0.0  # -0.0 becomes 0.0, as in a sum with zeros
        if not in_backward() or self._gradient.taken is Taken.BY_STEP:
            raise self._gradient.refusal()
        return other

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RefusingGradient({self._gradient.name}, size={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RefusingGradient)]
        base = stand_ins[0]
        if func.overloadpacket in _VIEWS:
            return _made(base.shape, base.stride(), base.device, base._gradient)
        if func.overloadpacket in _ZEROING and all(one._gradient.taken is not Taken.FOR_STEP for one in stand_ins):
            for one in stand_ins:
                one._gradient.taken = Taken.ZEROED
            return args[0] if func.overloadpacket is torch.ops.aten.zero_ else None
        zeros = {id(one): one.materialize() for one in stand_ins}
        result = func(*tree_map(lambda leaf: zeros.get(id(leaf), leaf), args), **(kwargs or {}))
        if any(zero.any() for zero in zeros.values()):
            raise refusal(base._gradient.name)
        return next((one for one in stand_ins if zeros[id(one)] is result), result)


class StandIn:
    """The stand-in that `.grad` of one parameter shows, and the state of the real gradient: `taken`."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        data = parameter.data
        assert isinstance(data, DTensor)
        local = data._local_tensor
        self.name, self.taken = name, Taken.FOR_STEP
        # Holds no parameter: the parameter holds this by its `.grad`, a cycle that Python's collector doesn't see.
        self.local = _made(local.shape, local.stride(), local.device, self)
        self.grad = as_sharded(self.local, data)
        """The value of `.grad` while it shows this; FSDP2 may replace its local tensor by what it adds."""

    def is_shown_alone(self, parameter: nn.Parameter) -> bool:
        """Return True if `.grad` shows it, and FSDP2 has added nothing."""
        return parameter.grad is self.grad and self.grad._local_tensor is self.local

    def refusal(self) -> InfinityError:
        """Return the error for a use of the elements."""
        return used_up(self.name) if self.taken is Taken.BY_STEP else refusal(self.name)


def refusal(name: str) -> InfinityError:
    """Return the error for reading or changing a taken gradient."""
    return InfinityError(
        f"the gradient{f' of {name}' if name else ''} was already consumed by the backward pass and can no longer be "
        "read or modified: for clipping set gradient_clipping in the config; for other uses set infinity.keep_grad to "
        'true (PagingOptions: update "forward" or "step", gradients in fp32, no gradient_bytes_max), which leaves '
        "gradients in .grad until the step; to drop gradients call zero_grad() of the optimizer"
    )


def used_up(name: str) -> InfinityError:
    """Return the error for using a gradient twice, or adding to it."""
    return InfinityError(
        f"the gradient of {name} was used up by the last step, and zero_grad() was not called since, so torch would "
        "add to it or step with it again: call zero_grad() of the optimizer after each step; to keep gradients after a "
        'step, page with PagingOptions(update="step"), gradients in fp32 and no gradient_bytes_max'
    )


def _made(shape: torch.Size, stride: tuple[int, ...], device: torch.device, gradient: StandIn) -> RefusingGradient:
    base = torch.empty_strided(shape, stride, dtype=torch.float32, device=device)
    base.untyped_storage().resize_(0)
    made: RefusingGradient = torch.Tensor._make_subclass(RefusingGradient, base)
    made._gradient = gradient
    return made


@dataclass
class _DueUpdates:
    """The updates in the backward that a group still waits for; `total` counts them with those that have run."""

    group: PagedGroup
    updates: dict[PagedSubGroup, SubGroupUpdate]
    total: int


def move_out(parameter: nn.Parameter) -> None:
    """Copy a resident shard's gradient, which stays in `.grad`, so that it doesn't keep alive those of its whole
    group."""
    grad = parameter.grad
    local = local_of(grad) if grad is not None else None
    if local is not None and local.untyped_storage().nbytes() > local.nbytes:
        assert isinstance(grad, DTensor)
        grad._local_tensor = local.clone()


def trained_shard(parameter: nn.Parameter) -> PagedShard:
    """Return the shard of a parameter. Raises ConfigError if it isn't paged, or was frozen when the model was paged."""
    local = local_of(parameter)  # not of its .data, which would make another view in Python
    if not isinstance(local, PagedTensor):
        raise ConfigError(
            "a parameter given to the optimizer is not paged: make the optimizer after swap.page(model), from parameters "
            "that fully_shard does not ignore"
        )
    if parameter.requires_grad and not local._shard.trained:
        raise ConfigError(f"{local._shard.name} was frozen when the model was paged: unfreeze it before page()")
    return local._shard


def lost_gradients() -> InfinityError:
    return InfinityError(
        "an exception interrupted the taking of gradients, and some are lost: call zero_grad(), and repeat the step "
        "from its first micro-batch"
    )


def _norms_of(grads: Gradients) -> Sequence[torch.Tensor]:
    """Return each gradient's norm (0-D) as torch does: on several ranks, a DTensor with this rank's part."""
    if not all(map(is_alone, grads)):
        return [torch._foreach_norm([cast(torch.Tensor, parameter.grad)])[0] for parameter in grads]
    here = [*grads.values()]
    if all(grad.is_cpu for grad in here) and norms_match_torch():
        return norms(here).unbind()
    return torch._foreach_norm([grad.float() for grad in here])
