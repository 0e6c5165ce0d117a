"""Floor 8. What to stage when: the traces of a paged model, whose pass it is, and how far reads run ahead.

Decides and moves nothing: is told what happens, and says which chunks should be staged. Used by the training thread only.

[Note: Phases]
Training and evaluation have a trace each. A gather is training's when it happens in a backward, or in a forward of the whole
model in training mode with gradients; anything else, generation included, is evaluation's, whatever mode one submodule is in.
The optimizer step ends a cycle of training, the end of a forward one of evaluation; where parts of the model are called without
the whole, an evaluation begins anew when a group comes again. Reads are each rank's own affair: no collective depends on a
trace, so where the traces of two ranks differ, no more than their reads on demand do.

[Note: State before its gradients]
Once the last groups of a backward are on their way, nothing is left to read before the step, and room comes free. The step
changes all copies, so none is worth reading; but the state that it begins with is already as the step will find it, and is read
then, as much as the pool holds: those updates wait for nothing, and the step has so many bytes less to read. State whose
gradients wait on NVMe comes with these, and so after them. Whoever writes to a sub-group in between drops what was read of it
(`PagedModel.access`, `set_state`); a skipped step leaves it, good for the next one.

[Note: Following what comes]
What comes next is one sequence (`_coming`), and each use takes a step along it; each update that is done leaves it. So what is
wanted is not chosen anew: a look-ahead follows, as long as the sequence is the same one. That is known from what it is made of:
the cycle that is followed, the updates that the step left, and how far along both of them anybody is. An exception in the
middle of following leaves no look-ahead, and the next one begins where everything is by then.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from infinity.fsdp2.sharding import in_backward
from infinity.schedule.lookahead import UNTIL_THE_END, LookAhead, cycle_read_bytes
from infinity.schedule.pinned import look_ahead_room
from infinity.schedule.scheme import Update
from infinity.schedule.trace import Trace
from infinity.swap.chunk import Chunk
from infinity.swap.group import PagedGroup
from infinity.swap.paged_model import PagedModel
from infinity.swap.sub_group import PagedSubGroup
from infinity.swap.wanted import Wanted

log = logging.getLogger("infinity")


class StagingPolicy:
    """Which chunks of a paged model should be staged now.

    Args:
        paged: the model.
        update: when the optimizer updates its parameters.
        pool_bytes: of the pinned pool, without what stays cached.
        look_ahead_bytes: how far reads run ahead of use (the next group is always read); as far as the pool allows where None.
    """

    def __init__(self, paged: PagedModel, update: Update, pool_bytes: int, look_ahead_bytes: int | None) -> None:
        self._paged = paged
        self._update: Update = update
        self._traces = {True: Trace(), False: Trace()}
        self._phase = True
        """Whether it was training that used a group last."""
        self._pass_trains: bool | None = None
        """Whether the forward of the whole model that is going on is training's; None where none is going on."""
        self._forwards: Counter[int] = Counter()
        """By group: how often it was called in training since the last step."""
        self._told_surprise = False
        copies = [group.chunk for group in paged.groups]
        states = [sub.chunk if sub.moves else None for sub in paged.sub_groups]
        self._units: list[Chunk | None] = [*copies, *states, *[None] * len(copies)]
        """What is staged: by number of its group, then by number of its sub-group; then, again by number of its group, room for
        copies that the step is still to make."""
        group_bytes = [_lease_bytes(chunk) for chunk in copies]
        self._numbers = {chunk: unit for unit, chunk in enumerate(self._units) if chunk is not None}
        self._unit_bytes = [*group_bytes, *map(_lease_bytes, states), *group_bytes]
        self._gathered_bytes = [*group_bytes, *[0] * len(states), *group_bytes]
        """The same, but nothing for sub-groups."""
        self._trained = [sub for sub in paged.sub_groups if sub.layout.trained]
        self._spilled = frozenset(self._unit(sub) for sub in paged.sub_groups if sub.gradient is not None)
        largest_group = max(group_bytes)
        self._room_bytes = look_ahead_room(pool_bytes, largest_group)
        """Bytes of the pool that reads ahead may hold ..."""
        self._look_ahead_bytes = self._room_bytes
        """... and as many of them as the user allows."""
        if look_ahead_bytes is not None:
            # One is gathered for the backward before another, whose copies wait for its update, is done with them.
            least = 2 * largest_group if update == "backward" else 0
            self._look_ahead_bytes = min(self._room_bytes, max(look_ahead_bytes, least))
        self._limits = (self._unit_bytes, self._room_bytes), (self._gathered_bytes, self._look_ahead_bytes)
        """What should be staged of what comes next: as much as the pool has room for, and gathers as far as they may run ahead;
        what the updates of a group need counts with the group."""
        self._following: _Following | None = None
        """See [Note: Following what comes]."""

    @property
    def mispredictions(self) -> int:
        """Uses that were not expected, since the start."""
        return sum(trace.mispredictions for trace in self._traces.values())

    # What it is told.

    def begin_pass(self, *, trains: bool) -> None:
        """A forward of the whole model begins."""
        self._pass_trains = trains

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
        trace = self._traces[training]
        # What one phase leaves gathered, the other doesn't ask for: no other path.
        self._traces[not training].interrupt()
        if not training and self._pass_trains is None and trace.used(group.index):
            self._end_evaluation()
        trace.use(group.index)

    def begin_update(self, group: PagedGroup) -> None:
        """Members of a group are updated in the backward now."""
        self._phase = True
        self._forwards[group.index] += 1  # whoever brings more gradients is too late

    def use_state(self, sub: PagedSubGroup) -> None:
        """A sub-group was updated in the backward."""
        self._traces[True].use(self._unit(sub))

    def gradients_are_final(self, group: PagedGroup) -> bool:
        """In a backward: whether the gradients of a group, once all are there, are all that come."""
        return self._forwards[group.index] == 1

    def discard_step(self) -> None:
        """What forward and backward passes did since the last step is void."""
        self._forwards.clear()

    def end_step(self) -> None:
        """The optimizer step is over."""
        if self._traces[True].end_cycle():
            self._tell_surprise()
        self._phase = True
        self._forwards.clear()

    # What it says.

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
        read = sum(span.nbytes for sub in self._trained for span in sub.chunk.reads)
        written = sum(span.nbytes for sub in self._trained for span in sub.chunk.writes)
        cycle = self._traces[True].cycle
        if cycle:
            return read + self._gathers_of(cycle), written
        for group in self._paged.groups:
            times = 2 * micro_batches if gathers is None else gathers[group.name]
            spared = self._update == "forward"  # the first gather after a step takes what was just updated
            if self._update == "backward" and group.completes is not None:
                times = max(times, 2)  # its update in the backward takes the copies that were read for it
            frozen = _compute_bytes(group, stepped=False)
            read += frozen * times + (_compute_bytes(group) - frozen) * (times - spared)
        return read, written

    # How.

    def _is_training(self, module_trains: bool) -> bool:
        """Whose gather it is: see [Note: Phases]."""
        if in_backward():
            return True
        return module_trains if self._pass_trains is None else self._pass_trains

    def _end_evaluation(self) -> None:
        if self._traces[False].end_cycle():
            self._tell_surprise()

    def _tell_surprise(self) -> None:
        if not self._told_surprise:
            self._told_surprise = True
            log.info("the model took another path than in the pass before; reads follow the new one from now on")

    def _unit(self, sub: PagedSubGroup) -> int:
        return len(self._paged.groups) + sub.layout.index

    def _room_for(self, group: PagedGroup) -> int:
        """The number that stands for copies of a group that the step is still to make."""
        return len(self._paged.groups) + len(self._paged.sub_groups) + group.index

    def _goes_on(self, following: _Following) -> bool:
        """Whether what comes is the rest of what came then."""
        trace = self._traces[self._phase]
        same = following.trains == self._phase and following.cycle is trace.cycle
        return same and following.stepped is self._paged.updates.stepped and following.place <= trace.place

    def _begin_following(self) -> _Following:
        trace, paged = self._traces[self._phase], self._paged
        ahead = LookAhead(self._coming(self._phase, trace.cycle, trace.place), *self._limits)
        wanted = Wanted(ahead, self._units, self._numbers)
        return _Following(
            ahead, wanted, self._phase, trace.cycle, trace.place, paged.updates.stepped, dict.fromkeys(paged.updates)
        )

    def _follow(self, following: _Following, using: PagedGroup | None) -> None:
        """Go along to where everything is now."""
        ahead, trace = following.ahead, self._traces[self._phase]
        if following.pending:
            self._leave_out_done(following, using)
        if trace.place != following.place:
            ahead.pass_to(trace.place)
            following.place = trace.place
            following.using = None
        if using is not following.using or using is None:
            waiting = self._paged.updates.of(using) if using is not None else []
            now = [*(~self._unit(sub) for sub in waiting), using.index] if using is not None else []
            ahead.need_now(now)
            following.using, following.waiting = using, deque(waiting)
        ahead.fit()

    def _leave_out_done(self, following: _Following, using: PagedGroup | None) -> None:
        """Updates that were run since: of the group that was in use, in their order; of those that were used meanwhile; or, on
        some other way, of any."""
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
            following.ahead.done(self._unit(sub))
            group = self._paged.groups[sub.layout.space] if sub.layout.space < len(self._paged.groups) else None
            if group is not None and self._paged.may_go_direct(group) and not self._any_waits(group):
                following.ahead.done(group.index)

    def _any_waits(self, group: PagedGroup) -> bool:
        return any(sub in self._paged.updates for sub in reversed(group.members))  # they are run in their order

    def _coming(self, trains: bool, cycle: Sequence[int], place: int) -> Iterator[tuple[float, int]]:
        """What is to be staged from a place of a cycle on, soonest first: (place, number in `_units`) of each group and of what
        its updates need, for `LookAhead`; in evaluation also for the next cycle."""
        paged = self._paged
        groups = paged.groups
        for at in range(place, len(cycle) if trains else 2 * len(cycle)):
            index = cycle[at % len(cycle)]
            if index >= len(groups):  # an update in the backward, which needs the copies too
                yield from ((at, unit) for unit in self._with_compute(index))
                continue
            copies = index if not paged.may_go_direct(groups[index]) else ~index
            yield from ((at, unit) for unit in self._units_of(groups[index], paged.updates, copies, until_done=True))
        yield from ((UNTIL_THE_END, ~self._unit(sub)) for sub in tuple(paged.updates) if sub in paged.updates)
        if trains:
            yield from ((UNTIL_THE_END, unit) for unit in self._next_step(cycle))

    def _next_step(self, cycle: Sequence[int]) -> Iterator[int]:
        """What the coming step updates, if it is like the last, in its order and up to what can't be read before it: see
        [Note: State before its gradients]. Where that is in the next forward, with room for the copies that it will gather."""
        if self._update == "backward":
            return
        stepped = dict.fromkeys(self._paged.updates.stepped)
        units: Iterable[int]
        if self._update == "step":
            units = map(self._unit, stepped)
        else:
            groups = (self._paged.groups[index] for index in cycle)
            units = (unit for group in groups for unit in self._units_of(group, stepped, self._room_for(group)))
        yield from takewhile(lambda unit: unit not in self._spilled, units)

    def _units_of(
        self, group: PagedGroup, updated: Container[PagedSubGroup], copies: int, *, until_done: bool = False
    ) -> Iterator[int]:
        """What a gather needs staged, its copies as number `copies`: the updates that it brings come before and after them.

        `until_done`: these are needed for that update alone, as ~unit says.
        """
        resident_sub_groups = [self._unit(sub) for sub in group.resident_sub_groups if sub in updated]
        members = [self._unit(sub) for sub in group.members if sub in updated]
        yield from (~unit if until_done else unit for unit in resident_sub_groups)
        if members or not self._paged.may_go_direct(group):
            yield copies
        yield from (~unit if until_done else unit for unit in members)

    def _with_compute(self, unit: int) -> Iterator[int]:
        """A sub-group that is updated in the backward, and before it the group whose copies that needs."""
        sub = self._paged.sub_groups[unit - len(self._paged.groups)]
        if self._paged.groups[sub.layout.space].completes is not None:
            yield sub.layout.space
        yield unit

    def _gathers_of(self, cycle: Sequence[int]) -> int:
        """Bytes that the gathers of a cycle read, beside what the updates read that come with them."""
        groups = self._paged.groups
        waiting = set(self._trained if self._update == "forward" else ())
        uses, reads = [], []
        updating: list[int] = []
        direct_bytes = 0
        for index in cycle:
            if index >= len(groups):
                *copies, unit = self._with_compute(index)
                if copies != updating:  # in use from the first member's update to the last one's
                    uses += copies
                    reads += [_compute_bytes(groups[each]) for each in copies]
                updating = copies
                uses.append(unit)
                reads.append(0)
                continue
            group = groups[index]
            resident_sub_groups = [sub for sub in group.resident_sub_groups if sub in waiting]
            updated = [sub for sub in group.members if sub in waiting]
            waiting -= {*resident_sub_groups, *updated}
            if not updated and self._paged.may_go_direct(group):  # what is in host memory beside it is not kept for it
                uses += map(self._unit, resident_sub_groups)
                reads += [0] * len(resident_sub_groups)
                direct_bytes += _compute_bytes(group)
                continue
            uses += [*map(self._unit, resident_sub_groups), *map(self._unit, updated), index]
            reads += [0] * (len(resident_sub_groups) + len(updated)) + [_compute_bytes(group, stepped=not updated)]
        return direct_bytes + cycle_read_bytes(uses, reads, *self._limits)


@dataclass(eq=False)
class _Following:
    """A look-ahead, and what it was told of."""

    ahead: LookAhead
    wanted: Wanted
    trains: bool
    cycle: Sequence[int]
    place: int
    stepped: Sequence[PagedSubGroup]
    pending: dict[PagedSubGroup, None]
    """Updates that were left. While `stepped` is the same they only get fewer; so they are the same where they are as many."""
    using: PagedGroup | None = None
    waiting: deque[PagedSubGroup] = field(default_factory=deque)
    """Its members that waited for an update."""


def _lease_bytes(chunk: Chunk | None) -> int:
    return chunk.lease_bytes if chunk is not None else 0


def _compute_bytes(group: PagedGroup, *, stepped: bool = True) -> int:
    """What gathering a group reads where nothing of it is staged; `stepped`: the copies of what is trained too."""
    members = [sub for sub in group.members if stepped or not sub.layout.trained]
    return sum(sub.layout.numel * sub.layout.itemsize(sub.layout.gathered) for sub in members if sub.gathers_from_nvme)
