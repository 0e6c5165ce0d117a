"""What to stage when: the traces of a paged model, whose pass it is, and how far reads run ahead.

Moves nothing: is told what happens, and says which chunks should be staged. Used by the training thread only.

[Note: Phases]
Training and evaluation have a trace each. A gather belongs to training if it happens in a backward, or in a forward of the
whole model in training mode with gradients. Any other gather, generation included, belongs to evaluation, whatever mode one
submodule is in. The optimizer step ends a cycle of training; the end of a forward ends one of evaluation. Where parts of the
model are called without the whole, an evaluation begins anew when a group comes again. Experts are in no trace: their router
says when they come. No collective depends on a trace: where
the traces of two ranks differ, only their demand reads do.

[Note: State before its gradients]
Once the last groups of a backward are read, nothing is left to read before the step, and room comes free. The step changes the
compute parameters of trained groups, so these are not worth reading. But the state that the step updates first is already
final, and is read then, as much as the pool holds: those updates wait for nothing, and the step has so many bytes less to
read. Groups of which all that comes from the drives is frozen stay staged for the next forward, or are read ahead for it. State
whose gradients wait on NVMe is read with these, and so after them. Whoever writes to a sub-group in between drops what was read
of it (`Values.access`, `PagedModel.set_state`); a skipped step leaves it staged, valid for the next one.

[Note: Following what comes]
What comes next is one sequence (`_coming`). Each use goes one step along it, and each update that is done leaves it. So what is
wanted is not chosen anew: a look-ahead follows for as long as the sequence stays the same one. The sequence is the same if the
followed cycle is, and the updates that the step left, and if the place in the cycle never fell. An exception in the middle of
following leaves no look-ahead, and the next one begins at the place where everything is by then.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, takewhile

from infinity.fsdp2.sharding import in_backward
from infinity.schedule.lookahead import UNTIL_THE_END, LookAhead
from infinity.schedule.trace import Trace
from infinity.swap.group import PagedGroup
from infinity.swap.options import PagingOptions
from infinity.swap.paged_model import PagedModel
from infinity.swap.speculation import is_speculative
from infinity.swap.step_bytes import StepBytes
from infinity.swap.sub_group import PagedSubGroup
from infinity.swap.units import Units
from infinity.swap.wanted import Wanted

log = logging.getLogger("infinity")


class StagingPolicy:
    """Which chunks of a paged model should be staged now.

    Args:
        paged: the model.
        options: say when the optimizer updates its parameters.
        pool_bytes: of the pinned pool, without what stays cached.
        look_ahead_bytes: how far reads run ahead of use; the next group is always read. None: as far as the pool allows.
    """

    def __init__(
        self, paged: PagedModel, options: PagingOptions, pool_bytes: int, look_ahead_bytes: int | None
    ) -> None:
        self._paged = paged
        self._updates_wait = options.updates_wait
        self._traces = {True: Trace(), False: Trace()}
        self._phase = True
        """Whether it was training that used a group last."""
        self._pass_trains: bool | None = None
        """Whether the forward of the whole model that is going on is training's; None where none is going on."""
        self.micro_batches_at_once = 1
        """Of the last forward of the whole model: see [Note: The vertical schedule] in infinity/fsdp2/vertical.py."""
        self.reductions_at_once = 1
        """Of a gradient in the backward that follows it."""
        self._forwards: Counter[int] = Counter()
        """By group: how often it was called in training since the last step."""
        self._logged_misprediction = False
        self.units = Units(paged, options, pool_bytes, look_ahead_bytes)
        """What may be staged."""
        self._trained = [sub for sub in paged.sub_groups if sub.layout.trained]
        in_backward = (sub for group in paged.groups if group.updated_in_backward for sub in group.members)
        self._in_backward = frozenset(
            sub
            for sub in in_backward
            if sub.layout.trained and (not options.speculative or is_speculative(paged.layout, sub.layout, options))
        )
        """What the backward updates; where that is speculative, while it is due."""
        self._spilled = frozenset(self.units.of(sub) for sub in paged.sub_groups if sub.gradient_extent is not None)
        self._following: _Following | None = None
        """See [Note: Following what comes]."""

    @property
    def mispredictions(self) -> int:
        """Uses that were not expected, since the start."""
        return sum(trace.mispredictions for trace in self._traces.values())

    # What it is told.

    def begin_pass(self, *, trains: bool, micro_batches: int, reductions: int) -> None:
        """A forward of the whole model begins, with so many micro-batches at once."""
        self._pass_trains = trains
        self.micro_batches_at_once, self.reductions_at_once = micro_batches, reductions

    def end_pass(self) -> None:
        """The forward of the whole model is over."""
        self._end_evaluation()
        self._pass_trains = None

    @property
    def in_pass(self) -> bool:
        """Whether a forward of the whole model has begun and not ended."""
        return self._pass_trains is not None

    def recover(self) -> None:
        """An exception ended what was going on."""
        self._pass_trains, self._phase, self._following = None, True, None
        self._forwards.clear()
        for trace in self._traces.values():
            trace.restart()

    def count_forward(self, group: int) -> None:
        """A group was called in training."""
        self._forwards[group] += 1

    def use(self, group: PagedGroup, *, module_trains: bool) -> None:
        """A group is gathered now; `module_trains`: by a module in training mode."""
        self._phase = training = self._is_training(module_trains)
        if group.is_routed:
            return
        trace = self._traces[training]
        # The other phase doesn't ask for what this one leaves gathered: that is no other path.
        self._traces[not training].interrupt()
        if not training and self._pass_trains is None and trace.used(group.index):
            self._end_evaluation()
        trace.use(group.index)

    def begin_update(self, group: PagedGroup) -> None:
        """Members of a group are updated in the backward now."""
        self._phase = True
        self._forwards[group.index] += 1  # gradients that come after this are too late

    def use_state(self, sub: PagedSubGroup) -> None:
        """A sub-group was updated in the backward."""
        self._traces[True].use(self.units.of(sub))

    def gradients_are_final(self, group: PagedGroup) -> bool:
        """In a backward: whether the gradients of a group, once all are there, are all that come."""
        return self._forwards[group.index] == self.micro_batches_at_once

    def count_forwards_anew(self, group: PagedGroup) -> None:
        """The gradients of a group were taken; more may come of the next micro-batch."""
        self._forwards[group.index] = 0

    def discard_step(self) -> None:
        """What forward and backward passes did since the last step is void."""
        self._forwards.clear()

    def end_step(self) -> None:
        """The optimizer step is over."""
        if self._traces[True].end_cycle():
            self._log_misprediction()
        self._phase = True
        self._forwards.clear()

    # What it says.

    @property
    def is_first_evaluation(self) -> bool:
        """Whether an evaluation is going on, and none was before, so that nobody knows what comes after it."""
        return not self._phase and not self._traces[False].cycle

    def wanted(self, using: PagedGroup | None = None) -> Wanted:
        """The chunks that should be staged now, soonest needed first; `using`: the group whose members are being updated.

        It is good until the next call.
        """
        following, self._following = self._following, None
        if following is None or not self._goes_on(following):
            following = self._begin_following()
        self._follow(following, using)
        self._following = following
        return following.wanted

    def next_gathers(self) -> Iterator[PagedGroup]:
        """The groups that are gathered next, each once, until one that is updated in the backward before it is gathered."""
        groups = self._paged.groups
        seen: set[int] = set()
        for index in self._traces[self._phase].upcoming(into_next=not self._phase):
            if index >= len(groups):
                seen.add(-1 - self._paged.sub_groups[index - len(groups)].layout.space)
            elif -1 - index in seen:
                return
            elif index not in seen:
                seen.add(index)
                yield groups[index]

    def step_bytes(self, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        """See `SwapManager.step_bytes`."""
        cycle = self._traces[True].cycle
        in_backward = self._updated_in_backward(cycle)
        stepped = {*self._paged.updates.stepped} if cycle else set()
        later = [sub for sub in self._trained if sub not in in_backward or sub in stepped]
        foretold = StepBytes(
            self._paged, self.units, in_backward=in_backward, later=later, for_gathers=self._updates_wait
        )
        read, written = foretold.of_updates()
        if cycle:
            return read + foretold.of_cycle(cycle, self._next_step(cycle)), written
        return read + foretold.of_gathers(2 * micro_batches if gathers is None else gathers), written

    # How.

    def _is_training(self, module_trains: bool) -> bool:
        """Whose gather it is: see [Note: Phases]."""
        if in_backward():
            return True
        return module_trains if self._pass_trains is None else self._pass_trains

    def _end_evaluation(self) -> None:
        if self._traces[False].end_cycle():
            self._log_misprediction()

    def _log_misprediction(self) -> None:
        if not self._logged_misprediction:
            self._logged_misprediction = True
            log.info("the model took another path than in the pass before; reads follow the new one from now on")

    def _goes_on(self, following: _Following) -> bool:
        """Whether what comes is the rest of what came then."""
        trace = self._traces[self._phase]
        same = following.trains == self._phase and following.cycle is trace.cycle
        same = same and (self._phase or bool(following.pending) == bool(self._paged.updates))
        return same and following.stepped is self._paged.updates.stepped and following.place <= trace.place

    def _begin_following(self) -> _Following:
        trace, paged = self._traces[self._phase], self._paged
        # While updates wait, their state takes the room that an evaluation has.
        stay = self.units.staying if self._phase or paged.updates else self.units.stay_in(trace.cycle)
        ahead = LookAhead(self._coming(self._phase, trace.cycle, trace.place), *self.units.limits(stay))
        wanted = Wanted(ahead, self.units.chunks, self.units.numbers, stay)
        return _Following(
            ahead, wanted, self._phase, trace.cycle, trace.place, paged.updates.stepped, dict.fromkeys(paged.updates)
        )

    def _follow(self, following: _Following, using: PagedGroup | None) -> None:
        """Go along to the current place."""
        ahead, trace = following.ahead, self._traces[self._phase]
        if following.pending:
            self._leave_out_done(following, using)
        if trace.place != following.place:
            ahead.pass_to(trace.place)
            following.place = trace.place
            following.using = None
        if using is not following.using or using is None:
            waiting = self._paged.updates.of(using) if using is not None else []
            now = [*(~self.units.of(sub) for sub in waiting), using.index] if using is not None else []
            ahead.need_now(now)
            following.using, following.waiting = using, deque(waiting)
        ahead.fit()

    def _leave_out_done(self, following: _Following, using: PagedGroup | None) -> None:
        """Tell the look-ahead which updates were run since. Cheapest first: those of the group that was in use, in their order;
        those of groups used meanwhile; all."""
        updates, pending, waiting = self._paged.updates, following.pending, following.waiting
        done: list[PagedSubGroup] = []
        while waiting and waiting[0] not in updates:
            done.append(waiting.popleft())
        if len(pending) - len(done) != len(updates):
            groups = self._paged.groups
            used = following.cycle[following.place : self._traces[self._phase].place]
            indices = dict.fromkeys(index for index in used if index < len(groups))
            if using is not None:
                indices[using.index] = None
            members = dict.fromkeys(
                sub for index in indices for sub in (*groups[index].resident_sub_groups, *groups[index].members)
            )
            done = [*{sub: None for sub in (*done, *members) if sub in pending and sub not in updates}]
        if len(pending) - len(done) != len(updates):
            done = [sub for sub in pending if sub not in updates]
        for sub in done:
            del pending[sub]
            following.ahead.done(self.units.of(sub))

    def _coming(self, trains: bool, cycle: Sequence[int], place: int) -> Iterator[tuple[float, int]]:
        """The uses from a place of a cycle on, soonest first, for `LookAhead`: (place, unit) of each group and of what its
        updates need; in evaluation those of the next cycle too."""
        paged = self._paged
        groups = paged.groups
        for at in range(place, len(cycle) if trains else 2 * len(cycle)):
            index = cycle[at % len(cycle)]
            if index >= len(groups):  # an update in the backward, which needs the compute parameters too
                yield from ((at, unit) for unit in self.units.with_compute(index))
                continue
            yield from ((at, unit) for unit in self._units_of(groups[index], paged.updates, index, until_done=True))
        yield from ((UNTIL_THE_END, ~self.units.of(sub)) for sub in tuple(paged.updates) if sub in paged.updates)
        if trains:
            yield from ((UNTIL_THE_END, unit) for unit in self._next_step(cycle))

    def _next_step(self, cycle: Sequence[int]) -> Iterator[int]:
        """The units of the coming step, if it is like the last one, in its order, up to the first that can't be read before it:
        see [Note: State before its gradients]. Where groups are updated in the forward, with room for what that gathers."""
        in_backward = self._in_backward if self._paged.updates.speculation.is_due else ()
        stepped = {sub: None for sub in self._paged.updates.stepped if sub not in in_backward}
        groups = (self._paged.groups[index] for index in cycle if index < len(self._paged.groups))
        units: Iterable[int]
        if not self._updates_wait:
            units = chain(
                map(self.units.of, stepped), (group.index for group in takewhile(lambda group: group.is_frozen, groups))
            )
        else:
            units = (
                unit
                for group in groups
                for unit in self._units_of(
                    group, stepped, group.index if group.is_frozen else self.units.room_for(group)
                )
            )
        yield from takewhile(lambda unit: unit not in self._spilled, units)

    def _units_of(
        self, group: PagedGroup, updated: Container[PagedSubGroup], compute: int, *, until_done: bool = False
    ) -> Iterator[int]:
        """The units that a gather needs: its compute parameters, as unit `compute`, between the sub-groups updated for it.

        `until_done`: the sub-groups are needed for that update alone, as ~unit says.
        """
        resident_sub_groups = [self.units.of(sub) for sub in group.resident_sub_groups if sub in updated]
        members = [self.units.of(sub) for sub in group.members if sub in updated]
        yield from (~unit if until_done else unit for unit in resident_sub_groups)
        yield compute
        yield from (~unit if until_done else unit for unit in members)

    def _updated_in_backward(self, cycle: Sequence[int]) -> Set[PagedSubGroup]:
        """What a cycle updates in the backward; before there is one, what can be."""
        paged = self._paged
        if cycle:
            return {paged.sub_groups[unit - len(paged.groups)] for unit in cycle if unit >= len(paged.groups)}
        return self._in_backward


@dataclass(eq=False)
class _Following:
    """A look-ahead, and the state that it has been told."""

    ahead: LookAhead
    wanted: Wanted
    trains: bool
    cycle: Sequence[int]
    place: int
    stepped: Sequence[PagedSubGroup]
    pending: dict[PagedSubGroup, None]
    """Updates that were left. They only get fewer while `stepped` is the same; so equally many are the same ones."""
    using: PagedGroup | None = None
    waiting: deque[PagedSubGroup] = field(default_factory=deque)
    """Its members that waited for an update."""
