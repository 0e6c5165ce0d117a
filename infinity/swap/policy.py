"""What to stage when: the traces of a paged model, the phase of each gather, and the extent of the look-ahead.

Moves nothing: it is notified of each event, and says which chunks should be staged. Used by the training thread only.

[Note: Phases]
Training and evaluation each have a trace. A gather belongs to training if it happens in a backward, or in a forward of
the whole model in training mode with gradients. Any other gather, including generation, belongs to evaluation, for any
mode of a submodule. The optimizer step ends a training cycle; the end of a forward ends an evaluation cycle. If
parts of the model are called without the whole, a cycle ends when a group is used again. Experts are in no trace: their
router says which come. No collective depends on a trace: if those of two ranks differ, only demand reads differ.

[Note: State before its gradients]
After the last groups of a backward are read, nothing is left to read before the step, and room becomes free. The step
changes the compute parameters of trained groups, so reading these is useless. But the state that the step updates first
is already final, so as much of it is read as the pool holds. Those updates then wait for no read, and the step reads
that much less. If all that a group reads from the drives is frozen, the group stays staged for the next forward, or is
read ahead for it. State whose gradients wait on NVMe is read together with these, and so after them. A write to a
sub-group in between drops what was read of it (`Values.access`, `Values.set_sub_group`). A skipped step keeps it.

[Note: Following what comes]
The coming uses are one sequence (`_coming`), known to its end. Each use advances along it, and each finished update
leaves it (`PendingUpdates.run`). So the wanted units are not chosen again at each call: a look-ahead is valid while the
sequence is the same. That holds if the followed cycle and the step that left updates are the same, and the place in the
cycle never fell. An exception while following leaves no look-ahead, and the next one starts from the current place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from infinity.fsdp2.sharding import has_trained
from infinity.schedule.readahead import UNTIL_THE_END, LookAhead, Trace, Use
from infinity.schedule.scheme import UpdateTiming
from infinity.swap.group import PagedGroup
from infinity.swap.options import PagingOptions
from infinity.swap.paged_model import PagedModel
from infinity.swap.staging_units import StepBytes, Unit, Units
from infinity.swap.sub_group import PagedSubGroup

log = logging.getLogger("infinity")


class StagingPolicy:
    """Decides which chunks of a paged model should be staged now.

    Args:
        paged: the model.
        options: decide when the optimizer updates its parameters.
        pool_bytes: size of the pinned pool, without the cached bytes.
        look_ahead_bytes: by which reads run ahead of use; the next group is always read. None: no bound but the pool.
    """

    def __init__(
        self, paged: PagedModel, options: PagingOptions, pool_bytes: int, look_ahead_bytes: int | None
    ) -> None:
        self._paged = paged
        self._updates_wait = options.updates_wait
        self._readahead = paged.stager.readahead
        self._traces: dict[bool, Trace[PagedGroup | PagedSubGroup]] = {True: Trace(), False: Trace()}
        self._phase = True
        """True if training used the last group."""
        self._pass_trains: bool | None = None
        """True if the running forward of the whole model is training; None if none is running."""
        self.micro_batches_at_once = self.reductions_at_once = 1
        """Arguments of the last forward of the whole model: see `begin_pass`."""
        self._forwards: Counter[int] = Counter()
        """By group number: calls in training since the last step."""
        self._logged_misprediction = False
        self.units = Units(paged, options, pool_bytes, look_ahead_bytes)
        """The units that may be staged, and their bytes."""
        self._trained = [sub for sub in paged.sub_groups if sub.layout.trained]
        self._in_backward = frozenset(
            sub
            for group in paged.groups
            for sub in group.members
            if sub.is_speculative or (group.timing is UpdateTiming.BACKWARD and sub.layout.trained)
        )
        """Sub-groups that the backward updates; speculative ones only while speculation is due."""
        self._spilled = frozenset(sub.unit for sub in paged.sub_groups if sub.gradient_extent is not None)
        self._updated_from_compute: dict[PagedGroup, None] = {}
        """Groups whose compute parameters stay staged until this backward has updated them."""
        self._following: _Following | None = None
        """The current look-ahead: see [Note: Following what comes]."""

    @property
    def mispredictions(self) -> int:
        """Number of unexpected uses since the start."""
        return sum(trace.mispredictions for trace in self._traces.values())

    # Notifications.

    def begin_pass(self, trains: bool, micro_batches: int, reductions: int) -> None:
        """Begin a forward of the whole model, whose `micro_batches` give each gradient as a sum of `reductions`."""
        self._pass_trains = trains
        self.micro_batches_at_once, self.reductions_at_once = micro_batches, reductions

    def end_pass(self) -> None:
        """End a forward of the whole model."""
        self._traces[False].end_cycle()
        self._pass_trains = None

    @property
    def in_pass(self) -> bool:
        """True while a forward of the whole model is running."""
        return self._pass_trains is not None

    def recover(self) -> None:
        """Recover from an exception that interrupted a pass."""
        self._pass_trains, self._phase, self._following = None, True, None
        self.discard_step()
        for trace in self._traces.values():
            trace.restart()

    def count_forward(self, group: int) -> None:
        """Count a call of a group in training."""
        self._forwards[group] += 1

    def use(self, group: PagedGroup, *, backward: bool, module_trains: bool) -> None:
        """Record that a group is gathered, in a `backward` or not: see [Note: Phases]. `module_trains`: by a module in
        training mode."""
        self._phase = training = backward or (module_trains if self._pass_trains is None else self._pass_trains)
        if group.is_routed:
            return
        trace = self._traces[training]
        # The other phase doesn't ask for groups that this one leaves gathered; that is no misprediction.
        self._traces[not training].interrupt()
        if not training and self._pass_trains is None and trace.used(group):
            trace.end_cycle()
        trace.use(group)

    def begin_update(self, group: PagedGroup) -> None:
        """Record that members of a group are being updated in the backward."""
        self._phase = True
        self._forwards[group.index] += 1  # so that `gradients_are_final` is False for later gradients

    def keep_for_update(self, group: PagedGroup) -> bool:
        """Return True if the running backward updates a gathered group from the compute parameters that it was gathered
        from. These then come before all other needs until `end_update`."""
        if not group.timing.in_backward or group.masters_chunk is None:
            return False
        if not self.gradients_are_final(group) or not has_trained(group.sharded_module):
            return False
        speculation = self._paged.updates.speculation
        if group.timing is UpdateTiming.SPECULATIVE and not (
            speculation.promises and any(map(speculation.may_update, group.members))
        ):
            return False
        self._updated_from_compute[group] = None
        return True

    def end_update(self, group: PagedGroup) -> None:
        """Record that all members that the backward updates are updated."""
        self._updated_from_compute.pop(group, None)

    def use_state(self, sub: PagedSubGroup) -> None:
        """Record that a sub-group was updated in the backward."""
        self._traces[True].use(sub)

    def gradients_are_final(self, group: PagedGroup) -> bool:
        """Return True if, in this backward, a complete set of the group's gradients is final."""
        return self._forwards[group.index] == self.micro_batches_at_once

    def count_forwards_anew(self, group: PagedGroup) -> None:
        """Record that the gradients of a group were taken; the next micro-batch may bring more."""
        self._forwards[group.index] -= min(self._forwards[group.index], self.micro_batches_at_once)

    def discard_step(self) -> None:
        """Forget the forward and backward passes since the last step."""
        self._forwards.clear()
        self._updated_from_compute.clear()

    def end_step(self) -> None:
        """End a training cycle, with the optimizer step."""
        trace = self._traces[True]
        before = trace.cycle
        if trace.end_cycle() and not self._logged_misprediction and _groups_in(trace.cycle) != _groups_in(before):
            self._logged_misprediction = True
            log.info("the execution order changed since the last step; prefetch now follows the new order")
        self._phase = True
        self.discard_step()

    # Decisions.

    @property
    def is_first_evaluation(self) -> bool:
        """True during the first evaluation, in which the next use can't be predicted."""
        return not self._phase and not self._traces[False].cycle

    def look_ahead(self, using: PagedGroup | None = None) -> None:
        """Update which chunks are wanted, soonest needed first. `using`: the group whose members are being updated."""
        following, self._following = self._following, None
        if following is not None and self._is_rest_of(following):
            self._follow(following, using)
            self._readahead.fit()
        else:
            following, stay = self._begin_following()
            self._follow(following, using)
            self._readahead.follow(following.ahead, stay)
        self._following = following

    def next_gathers(self) -> Iterator[PagedGroup]:
        """Yield the groups gathered next, each once, up to one that the backward updates before its gather."""
        seen: set[PagedGroup] = set()
        updated: set[int] = set()
        for used in self._traces[self._phase].upcoming(into_next=not self._phase):
            if isinstance(used, PagedSubGroup):
                updated.add(used.layout.space)
            elif used.index in updated:
                return
            elif used not in seen:
                seen.add(used)
                yield used

    def step_bytes(self, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        """See `SwapManager.step_bytes`."""
        cycle = self._traces[True].cycle
        updated = frozenset(used for used in cycle if isinstance(used, PagedSubGroup))
        in_backward = updated if cycle else self._in_backward
        stepped = {*self._paged.updates.stepped} if cycle else set()
        later = [sub for sub in self._trained if sub not in in_backward or sub in stepped]
        foretold = StepBytes(
            self._paged, self.units, in_backward=in_backward, later=later, for_gathers=self._updates_wait
        )
        read, written = foretold.of_updates()
        if cycle:
            return read + foretold.of_cycle(cycle, self._next_step(cycle)), written
        return read + foretold.of_gathers(2 * micro_batches if gathers is None else gathers), written

    # Implementation.

    def _is_rest_of(self, following: _Following) -> bool:
        """Return True if the coming uses are the remainder of those that `following` began with."""
        trace, updates = self._traces[self._phase], self._paged.updates
        same = self._readahead.following is following.ahead and following.trains == self._phase
        same = same and (self._phase or following.updates_wait == bool(updates.waiting))
        same = same and following.cycle is trace.cycle and following.stepped is updates.stepped
        return same and following.ahead.place <= trace.place

    def _begin_following(self) -> tuple[_Following, frozenset[Unit]]:
        trace, paged = self._traces[self._phase], self._paged
        # While updates wait, their state takes the room that an evaluation would have.
        stay = self.units.staying if self._phase or paged.updates.waiting else self.units.stay_in(trace.cycle)
        coming = [*self._coming(self._phase, trace.cycle, trace.place)]
        following = _Following(
            LookAhead(iter(coming), *self.units.limits(stay)),
            self._phase,
            trace.cycle,
            paged.updates.stepped,
            bool(paged.updates.waiting),
        )
        return following, frozenset(group.unit for group in stay)

    def _follow(self, following: _Following, using: PagedGroup | None) -> None:
        """Advance a look-ahead to the current place."""
        place = self._traces[self._phase].place
        if using is None:
            now = [Use[Unit](0, group.unit) for group in self._updated_from_compute]
        elif using is not following.using or place != following.ahead.place:
            waiting = self._paged.updates.of(using)
            now = [*(Use[Unit](0, sub.unit, until_done=True) for sub in waiting), Use(0, using.unit)]
        else:
            return
        following.ahead.advance(place, now)
        following.using = using

    def _coming(self, trains: bool, cycle: Sequence[PagedGroup | PagedSubGroup], place: int) -> Iterator[Use[Unit]]:
        """Yield the uses from a place of a cycle on, soonest first: each group, and the inputs of its updates. In
        evaluation, continues into the next cycle."""
        updates = self._paged.updates.waiting
        for at in range(place, len(cycle) if trains else 2 * len(cycle)):
            used = cycle[at % len(cycle)]
            if isinstance(used, PagedSubGroup):  # an update in the backward, which also needs the compute parameters
                for unit in self.units.with_compute(used):
                    yield Use(at, unit)
            else:
                for unit in self._units_of(used, updates, used.unit):
                    yield Use(at, unit, until_done=unit is not used.unit)
        yield from (Use[Unit](UNTIL_THE_END, sub.unit, until_done=True) for sub in updates)
        if trains:
            yield from (Use(UNTIL_THE_END, unit) for unit in self._next_step(cycle))

    def _next_step(self, cycle: Sequence[PagedGroup | PagedSubGroup]) -> Iterator[Unit]:
        """Yield the units of the next step, predicted from the last one, in order, up to the first that can't be read
        before it: see [Note: State before its gradients]. With updates in the forward, leaves room for its gathers."""
        in_backward = self._in_backward if self._paged.updates.speculation.is_due else ()
        stepped = {sub: None for sub in self._paged.updates.stepped if sub not in in_backward}
        groups = (unit for unit in cycle if isinstance(unit, PagedGroup))
        units: Iterable[Unit]
        if not self._updates_wait:
            frozen = takewhile(lambda group: group.is_frozen, groups)
            units = chain((sub.unit for sub in stepped), (group.unit for group in frozen))
        else:
            units = (
                unit
                for group in groups
                for unit in self._units_of(group, stepped, group.unit if group.is_frozen else group)
            )
        yield from takewhile(lambda unit: unit not in self._spilled, units)

    def _units_of(self, group: PagedGroup, updated: Mapping[PagedSubGroup, object], compute: Unit) -> list[Unit]:
        """Return the units of a gather: its compute parameters, as `compute`, between the sub-groups updated for it."""
        if not updated:
            return [compute]
        resident_sub_groups = [sub.unit for sub in group.resident_sub_groups if sub in updated]
        members = [sub.unit for sub in group.members if sub in updated]
        return [*resident_sub_groups, compute, *members]


def _groups_in(cycle: Sequence[PagedGroup | PagedSubGroup]) -> list[PagedGroup]:
    """Return the gathers of a cycle, without its updates, which begin and end by themselves."""
    return [used for used in cycle if isinstance(used, PagedGroup)]


@dataclass(eq=False)
class _Following:
    """A look-ahead, and the state that it is valid for."""

    ahead: LookAhead[Unit]
    trains: bool
    cycle: Sequence[PagedGroup | PagedSubGroup]
    stepped: Sequence[PagedSubGroup]
    updates_wait: bool
    """True if the step had left updates when it began."""
    using: PagedGroup | None = None
