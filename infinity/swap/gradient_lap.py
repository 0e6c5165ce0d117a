"""The gradient lap: from FSDP2's reduce-scatter, over a wait in memory or on NVMe, into the update of its sub-groups.

Reads top-down. FSDP2 has reduced a gradient (`came`), or over one rank of a CPU is about to copy those of a group
(`came_unreduced`). With all of a group `PagedOptimizer._group_came` continues: `take` (the gradients wait), `take` and
`update_soon` (they wait, and a speculative update is made), or `note_applied` and `update_soon` (an update that stays). The
step that follows makes the others: see pending_updates.py. Used by the training thread, and by autograd's threads on its
behalf; see infinity/swap/README.md for a lap by example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.sharding import is_alone, local_of
from infinity.optim.kernel import norms, norms_match_torch
from infinity.schedule.update_timing import UpdateTiming
from infinity.swap.group import PagedGroup
from infinity.swap.health import Health
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.paging import Paging
from infinity.swap.shard import GradientState, PagedShard
from infinity.swap.sub_group import PagedSubGroup, SubGroupUpdate
from infinity.swap.taken_gradient import RefusingGradient, StandIn, Taken, refusal, used_up

Gradients = Mapping[nn.Parameter, torch.Tensor]
"""This rank's elements (1-D) of the gradient of each parameter: in fp32, or as autograd left them, not to be changed then."""


class GradientLap:
    """Follows the gradients of one model's trained parameters from one step to the next."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._updates_to_stay = paging.options.update == "backward" and not paging.options.speculative
        """Whether updates in the backward stay, and no step discards them."""
        self.shards: dict[nn.Parameter, PagedShard] = {}
        self.hooks: dict[nn.Parameter, int] = {}
        """The number of the hook by which FSDP2 says that a gradient came, where there is one."""
        self.version = 0
        """Changes with each gradient that comes, and with the end of each step."""
        shards = paging.paged.shards
        self._gradient_counts = {
            group: sum(shards[index].trained and shards[index].resident is None for index in group.shards)
            for group in paging.paged.groups
        }
        """Of how many parameters of a group gradients come."""
        self.norms: dict[nn.Parameter, torch.Tensor] = {}
        """Norms (0-D) of the gradients that were taken or applied in the backward since the last step, in their order."""
        self._arrivals: Counter[nn.Parameter] = Counter()
        """How often one came since the last step."""
        self._arrived: dict[PagedGroup, dict[nn.Parameter, None]] = {}
        self._applied: dict[nn.Parameter, Any] = {}
        """With what was updated in the backward since the last step: settings, and the number of that step."""
        self._coming: list[tuple[PagedGroup, Mapping[PagedSubGroup, SubGroupUpdate]]] = []
        """Groups that are updated as soon as their gradients are in host memory: before the backward ends."""
        self._stand_ins: dict[nn.Parameter, StandIn] = {}
        """What `.grad` shows of gradients that were taken; made once."""
        self._shown: dict[nn.Parameter, StandIn] = {}
        """Those that it shows."""

    def came_unreduced(self, group: PagedGroup, grads: Mapping[nn.Parameter, torch.Tensor]) -> Gradients:
        """A backward has come to the gradients of a group, whose reduction would copy them (in their shapes). Those that need
        no reduction: of the whole group, where no hook of the user looks at one and none is in `.grad`; else none of them."""
        ours = {p: self.shards[p] for p in grads if p in self.shards and self.shards[p].resident is None}
        final = group.timing is not UpdateTiming.BACKWARD or self._paging.policy.gradients_are_final(group)
        whole = len(ours) == self._gradient_counts[group] and group not in self._arrived
        if not final or not whole or self._paging.policy.reductions_at_once > 1:
            return {}
        if not all(self._is_free(parameter, shard) for parameter, shard in ours.items()):
            return {}
        self.version += 1
        has = self._paging.waiting_gradients.has
        elements = ((parameter, grads[parameter].view(-1), has(shard)) for parameter, shard in ours.items())
        return {parameter: grad.to(torch.float32, copy=True) if added else grad for parameter, grad, added in elements}

    def _is_free(self, parameter: nn.Parameter, shard: PagedShard) -> bool:
        """Whether `.grad` has no part in what becomes of the next gradient, and no hook of the user waits for it there."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        shown = self._shown.get(parameter)
        if parameter.grad is not None and (
            shown is None or shown.taken is not Taken.FOR_STEP or not shown.is_shown_alone(parameter)
        ):
            return False
        only_ours = hooks is not None and [*hooks] == [self.hooks.get(parameter)]
        return only_ours and shard.gradient in (GradientState.NONE, GradientState.TAKEN)

    def came(self, parameter: nn.Parameter) -> PagedGroup | None:
        """The gradient of a parameter is reduced. Its group, where all gradients of that are there now; else None.

        Raises InfinityError for a gradient of a group that was updated already, where the values are torn then; where
        somebody set `.grad` of one that was taken before; and where an exception has ended the taking of one.
        """
        self.version += 1
        if self.left(parameter) is None:
            return None  # another optimizer over the same parameter has taken it
        shard = self.shards[parameter]
        group = shard.group
        if shard.gradient is GradientState.APPLIED:
            self._paging.paged.health.tear(f"an update in the backward (more than one gradient for {group.name})")
            raise InfinityError(
                f"group {group.name} was updated in the backward, and now there are more gradients for it: set infinity.update "
                '(PagingOptions.update) to "forward" for a model that is used more than once per step'
            )
        self._arrivals[parameter] += 1
        if self._arrivals[parameter] < self._paging.policy.reductions_at_once:
            return None  # those of the others follow in this backward
        if group.timing is UpdateTiming.BACKWARD and not self._paging.policy.gradients_are_final(group):
            return None
        if shard.gradient is GradientState.TAKING:
            raise lost_gradients()
        arrived = self._arrived.setdefault(group, {})
        if parameter not in arrived:
            shard.move_gradient_to(GradientState.ARRIVED)
            arrived[parameter] = None
        return group if len(arrived) == self._gradient_counts[group] else None

    def pop_arrived(self, group: PagedGroup) -> Gradients:
        """The gradients that came of a group and are in `.grad`, in their order."""
        grads = {}
        for parameter in self._arrived.pop(group):
            if parameter.grad is not None:
                grads[parameter] = local_of(parameter.grad).reshape(-1)
            else:
                self.shards[parameter].move_gradient_to(GradientState.NONE)
        return grads

    def take(self, group: PagedGroup, grads: Gradients) -> None:
        """Keep gradients that arrived of a group until the update, and note their norms. `.grad` refuses to be used after
        it."""
        shards = [self.shards[parameter] for parameter in grads]
        for sub in group.members:
            self._paging.paged.updates.speculation.discard(sub)
        self._coming = [coming for coming in self._coming if coming[0] is not group]
        for shard in shards:
            shard.move_gradient_to(GradientState.TAKING)
        by_index = {shard.index: grad for shard, grad in zip(shards, grads.values(), strict=True)}
        self._paging.waiting_gradients.take(group, by_index)
        self._note_norms_and_refuse(grads)
        for shard in shards:
            shard.move_gradient_to(GradientState.TAKEN)

    def take_all(self) -> dict[nn.Parameter, torch.Tensor]:
        """Take what came of groups of which a gradient is missing. Returns the norms of all that were taken."""
        for group in list(self._arrived):
            if group.timing.gradients_wait:
                self.take(group, self.pop_arrived(group))
        return self.norms

    def note_applied(self, grads: Gradients, inputs: Mapping[nn.Parameter, Any]) -> None:
        """Gradients that arrived of a group are about to be applied.

        `inputs`: with which each parameter is updated; those of the step must be the same.
        """
        self._note_norms_and_refuse(grads)
        for parameter, used in inputs.items():
            self._applied[parameter] = used
            self.shards[parameter].move_gradient_to(GradientState.APPLIED)

    def update_soon(self, group: PagedGroup, updates: Mapping[PagedSubGroup, SubGroupUpdate]) -> None:
        """Update members of a group as soon as their gradients are in host memory, which are on their way there: on a CPU now,
        else behind the next group's, or when the backward ends."""
        behind = int(self._paging.device.is_discrete)
        if behind and not self._coming:
            Variable._execution_engine.queue_callback(self._update_coming)
        self._coming.append((group, updates))
        self._update_coming(leave=behind)

    def forget_coming(self) -> None:
        """A backward begins: what an exception left of the one before is not updated speculatively any more."""
        if not self._updates_to_stay:
            self._coming.clear()

    def check_complete(self) -> None:
        """Raise InfinityError where an exception ended `take` or the updates in the backward (the values are torn then), or
        where the updates of this step would use up gradients that were taken for another optimizer."""
        health = self._paging.paged.health
        lost = any(shard.gradient is GradientState.TAKING for shard in self.shards.values())
        # FSDP2's own part of that backward may be over.
        if (self._coming and self._updates_to_stay) or (lost and health.state is Health.PART_STEPPED):
            health.tear("an update in the backward (interrupted)")
            health.check_not_torn()
        if lost:
            raise lost_gradients()
        has, paged = self._paging.waiting_gradients.has, self._paging.paged
        numbers = {shard.index for shard in self.shards.values()}
        for sub in paged.sub_groups:
            waiting = [index for piece in sub.layout.pieces if has(paged.shards[index := piece.shard])]
            others = [index for index in waiting if index not in numbers]
            if 0 < len(others) < len(waiting):
                raise InfinityError(
                    f"two optimizers step parts of one group, as {paged.shards[others[0]].name}, which are updated together: "
                    "give all parameters of a group to one optimizer, in parameter groups of their own"
                )

    @property
    def has_applied(self) -> bool:
        """Whether the backward has updated groups since the last step."""
        return bool(self._applied)

    def check_applied(self, inputs: Mapping[nn.Parameter, Any], grad_scale: float) -> None:
        """Raise InfinityError where the backward applied gradients in another way than a step with these would."""
        if grad_scale != 1.0 or any(inputs.get(p) != used for p, used in self._applied.items()):
            raise InfinityError(
                "the gradients were applied in the backward already, with other settings, another state or other parameters "
                "than this step has: change the learning rate and the like before the backward, or set infinity.update "
                '(PagingOptions.update) to "forward"'
            )

    def check_unused(self) -> None:
        """Raise InfinityError where torch would step once more with a gradient that the last step has used."""
        for parameter, stand_in in self._shown.items():
            if stand_in.is_used_up(parameter):
                raise used_up(stand_in.name)

    def used(self, stepped: Iterable[nn.Parameter]) -> dict[nn.Parameter, Taken]:
        """What became of gradients that a step over these parameters has used, where `.grad` is to show that: they are not in
        it, or whoever changed them would change an update that waits."""
        used = dict.fromkeys(self._applied, Taken.BY_STEP)
        for parameter in stepped:
            in_grad = parameter.grad is not None and not isinstance(local_of(parameter.grad), RefusingGradient)
            if not in_grad and parameter in self._shown and self._shown[parameter].taken is Taken.ZEROED:
                used[parameter] = Taken.ZEROED
            elif not in_grad or self._paging.options.update != "step":
                used[parameter] = Taken.BY_STEP
        return used

    def end(self, used: Mapping[nn.Parameter, Taken]) -> None:
        """The step is over: what comes from now on belongs to the next. `used`: what `.grad` shows from now on."""
        self.version += 1
        self.hide_taken()
        for parameter, taken in used.items():
            self._show(parameter, taken)
        self._paging.paged.updates.speculation.discard_all()
        self._paging.waiting_gradients.forget({shard.index for shard in self.shards.values()})
        self.norms.clear()
        self._coming.clear()
        self._arrivals.clear()
        self._arrived.clear()
        self._applied.clear()
        for shard in self.shards.values():
            shard.move_gradient_to(GradientState.NONE)
        self._paging.paged.health.note_all_stepped()

    def left(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the gradient that is in `.grad`; None where there is none, or it was taken.

        Raises InfinityError where somebody set `.grad` of one that was taken, which would have no effect.
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
        """Raise InfinityError where somebody set `.grad` of a gradient that was taken, which would have no effect."""
        for parameter, stand_in in self._shown.items():
            if stand_in.taken is Taken.FOR_STEP and parameter.grad is not stand_in.grad:
                raise refusal(stand_in.name)

    def hide_taken(self) -> list[nn.Parameter]:
        """`.grad` of what was taken is None again. The parameters of which it was not."""
        hidden = [parameter for parameter, stand_in in self._shown.items() if parameter.grad is stand_in.grad]
        for parameter in hidden:
            parameter.grad = None
        self._shown.clear()
        return hidden

    def _show(self, parameter: nn.Parameter, taken: Taken) -> None:
        stand_in = self._stand_ins.get(parameter) or StandIn(parameter, self.shards[parameter].name)
        self._stand_ins[parameter] = self._shown[parameter] = stand_in
        stand_in.show(parameter, taken)

    def _note_norms_and_refuse(self, grads: Gradients) -> None:
        """Of gradients that `.grad` shows no more: whoever would use them is refused."""
        for parameter, norm in zip(grads, _norms_of(grads), strict=True):
            self._show(parameter, Taken.FOR_STEP)
            self.norms[parameter] = norm

    def _update_coming(self, *, leave: int = 0) -> None:
        """Update the groups whose gradients are on their way, but for the last `leave`. An exception leaves what isn't."""
        while len(self._coming) > leave:
            self._update(*self._coming[0])
            del self._coming[0]

    def _update(self, group: PagedGroup, updates: Mapping[PagedSubGroup, SubGroupUpdate]) -> None:
        parameters, policy = self._paging.parameters, self._paging.policy

        def look_ahead(sub: PagedSubGroup) -> None:
            policy.use_state(sub)
            parameters.look_ahead()

        with self._paging.entered():
            parameters.give_back_copied()  # FSDP2 may have asked for it again, as the next group; that request is void
            policy.begin_update(group)
            self._paging.paged.updates.run_in_backward(group, updates, look_ahead)


def move_out(parameter: nn.Parameter) -> None:
    """The gradient of a resident shard came, which stays in `.grad`: not as a view into those of its whole group, which all
    would live as long."""
    grad = parameter.grad
    local = local_of(grad) if grad is not None else None
    if local is not None and local.untyped_storage().nbytes() > local.nbytes:
        assert isinstance(grad, DTensor)
        grad._local_tensor = local.clone()


def trained_shard(parameter: nn.Parameter) -> PagedShard:
    """What a parameter is paged as. Raises ConfigError for one that isn't, or that was frozen when it was."""
    local = local_of(parameter)  # not of its .data, which would be another view of it, made in Python
    if not isinstance(local, PagedTensor):
        raise ConfigError("a parameter given to the optimizer is not paged: call swap.page(model) first, then make it")
    if parameter.requires_grad and not local._shard.trained:
        raise ConfigError(f"{local._shard.name} was frozen when the model was paged: unfreeze it before page()")
    return local._shard


def lost_gradients() -> InfinityError:
    return InfinityError(
        "an exception ended the taking of gradients, and some of them are lost: call zero_grad(), and begin the step anew with "
        "its first micro-batch"
    )


def _norms_of(grads: Gradients) -> Sequence[torch.Tensor]:
    """The norm (0-D) of each gradient, as torch has it: over several ranks a DTensor, of which this rank holds its part."""
    if not all(map(is_alone, grads)):
        return [torch._foreach_norm([cast(torch.Tensor, parameter.grad)])[0] for parameter in grads]
    here = [*grads.values()]
    if all(grad.is_cpu for grad in here) and norms_match_torch():
        return norms(here).unbind()
    return torch._foreach_norm([grad.float() for grad in here])
