"""Readahead: chooses the units to stage from the coming uses and the bytes that may be held, the next unit to read and
the first to evict; and the trace, from which the coming uses are predicted.

A unit is anything that is staged as a whole and can be a dict key: a chunk in the product, a number in the simulator.
The units to stage are the next distinct ones, soonest first, while their bytes fit. The next one is always included.
The first that does not fit ends the choice and is not skipped: later units would only take its room.

[Note: Farthest next use]
The groups used soonest are held, whether they are still to be read or were just used. So a used group is evicted
exactly when its next use is farther than that of all others that fit. At the turn from forward to backward these are
the groups used last, and each byte held there saves a read. No other choice of as many bytes saves more, except for a
group that fits only in part (a group is gathered from one piece of memory).

[Note: As early as the bytes allow]
Reads start in the order of need, each as soon as its bytes fit. Bandwidth and compute times set the latest start of a
read; the bytes that may be held set the earliest. Waiting in between gains nothing: empty room serves no use, and an
idle drive delays all later reads. The proof: docs/decisions/39-reads-start-as-early-as-the-bytes-allow.md.

[Note: What makes room]
The cheapest comes first. First, units without a coming use are dropped, oldest first: they are not read again. Then
writes in flight are awaited: their room becomes free without a read. Only then a wanted unit is dropped, the one needed
last: it must be read again, and has the most time for that. For units of one size, no other choice reads less (Belady).

[Note: What a call costs]
Thousands of units may be wanted, staged and in flight, and each gather or update asks for the next read and the next
eviction. So no call looks at all units. The look-ahead handles a use once when it enters and once when it leaves. The
next unit to read and the first to evict are in heaps, in which an entry counts only if it agrees with its unit. If an
exception loses an entry, the cost is a demand read, or a heap that is rebuilt.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter, le
from typing import Any, Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)

UNTIL_THE_END = math.inf
"""The place after all uses; no use passes it."""

_NOW = -1.0
_LAST = 1 << 62
"""The need of a unit that stays, if its next use is beyond the look-ahead."""


@dataclass(eq=False)
class Use(Generic[Unit]):
    """A use of a unit at a place of a sequence. `until_done`: the unit is needed there until `LookAhead.done`."""

    place: float
    unit: Unit
    until_done: bool = False
    number: int = 0
    """Its position among the chosen uses; smaller is sooner."""


Limit = tuple[Any, int]
"""The bytes of each unit (a mapping, or a sequence if units are numbers), and the bytes that may be chosen."""


class LookAhead(Generic[Unit]):
    """Chooses the units to stage for the coming uses, and follows as uses pass: see the notes of this file.

    Pulls from the sequence what it chooses and one use more; places never fall. Uses that are needed now come before
    all others. After any change, call `fit` to choose again.

    Args:
        coming: the sequence.
        limits: each bounds the bytes that may be chosen. The first unit is always chosen.
    """

    def __init__(self, coming: Iterator[Use[Unit]], *limits: Limit) -> None:
        self._coming = coming
        self._unit_bytes = [unit_bytes for unit_bytes, _ in limits]
        self._left = [bytes_max for _, bytes_max in limits]
        """By limit: the bytes left by the chosen units. Negative if they are too large."""
        self._sequence: deque[Use[Unit]] = deque()
        """The chosen part of the sequence, numbered from `_first` on."""
        self._first = 0
        self._given_up: list[Use[Unit]] = []
        """Uses that were pulled and are not chosen, soonest last."""
        self._uses: dict[Unit, deque[Use[Unit]]] = {}
        """By chosen unit: its uses in the chosen part."""
        self._done: set[Unit] = set()
        self.place = 0.0
        """The place of the next use; those before it are over."""
        self._changed: dict[Unit, None] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._uses

    def __iter__(self) -> Iterator[Unit]:
        """Iterate over the chosen units, soonest first."""
        return iter(sorted(self._uses, key=lambda unit: self._uses[unit][0].number))

    def needed(self, unit: Unit) -> int | None:
        """Return when a unit is needed; smaller is sooner. None if it is not chosen."""
        uses = self._uses.get(unit)
        return uses[0].number if uses else None  # may be empty if an exception interrupted `_drop`

    @property
    def end(self) -> int:
        """The number of uses in the sequence that are over or chosen."""
        return self._first + len(self._sequence)

    def advance(self, place: float, now: Sequence[Use[Unit]] = ()) -> None:
        """End the uses before `place`, and replace those that are needed `now`, whose own places don't count."""
        self.place = max(self.place, place)
        while self._sequence and self._sequence[0].place < place:
            use = self._sequence.popleft()
            self._first += 1
            self._drop(use, 0)
        while self._given_up and self._given_up[-1].place < place:
            self._given_up.pop()
        for use in reversed(now):
            use.place = _NOW
            self._first -= 1
            self._sequence.appendleft(use)
            self._take(use, self._first, front=True)

    def done(self, unit: Unit) -> None:
        """End the uses of a unit that were needed `until_done`."""
        self._done.add(unit)
        if unit in self._uses:
            self._uses[unit] = deque(use for use in self._uses[unit] if not use.until_done)
            self._changed[unit] = None
            if not self._uses[unit]:
                del self._uses[unit]
                self._count(unit, -1)

    def fit(self) -> list[Unit]:
        """Choose as many uses as the limits allow. Returns the units that were chosen or given up, or whose need
        changed, since the last call."""
        while len(self._uses) > 1 and min(self._left, default=0) < 0:
            self._given_up.append(self._sequence.pop())
            self._drop(self._given_up[-1], -1)
        while (use := self._given_up.pop() if self._given_up else next(self._coming, None)) is not None:
            is_over = use.place < self.place or (use.until_done and use.unit in self._done)
            if is_over and use.place != _NOW:
                continue
            is_new = bool(self._uses) and use.unit not in self._uses
            if is_new and not all(map(le, map(itemgetter(use.unit), self._unit_bytes), self._left)):
                self._given_up.append(use)
                break
            self._sequence.append(use)
            self._take(use, self._first + len(self._sequence) - 1, front=False)
        changed, self._changed = [*self._changed], {}
        return changed

    def _take(self, use: Use[Unit], number: int, *, front: bool) -> None:
        use.number = number
        uses = self._uses.get(use.unit)
        if uses is None:
            self._uses[use.unit] = deque((use,))
            self._count(use.unit, 1)
        elif front:
            uses.appendleft(use)
            self._changed[use.unit] = None
        else:
            uses.append(use)

    def _drop(self, use: Use[Unit], end: int) -> None:
        """Remove a use from the sequence's beginning (end 0) or end (-1). A use that is done was removed before."""
        uses = self._uses.get(use.unit)
        if uses is None or uses[end] is not use:
            return
        if end == 0:
            uses.popleft()
            self._changed[use.unit] = None
        else:
            uses.pop()
        if not uses:
            del self._uses[use.unit]
            self._count(use.unit, -1)

    def _count(self, unit: Unit, sign: int) -> None:
        """Count the bytes of a unit that is chosen (1) or no longer (-1)."""
        for number, unit_bytes in enumerate(self._unit_bytes):
            self._left[number] -= sign * unit_bytes[unit]
        self._changed[unit] = None


class Eviction(Generic[Unit]):
    """The units that may be dropped, and their order: see [Note: What makes room]. Decides only.

    `needed` is when a unit is needed next; smaller is sooner, None is never. No two units have the same number. Each
    call costs the logarithm of the units: a heap entry counts only if it agrees with its unit, so no search is needed
    if a unit leaves or its need changes.
    """

    def __init__(self) -> None:
        self._staged: dict[Unit, tuple[int, int | None]] = {}
        """By unit, oldest first: its number in that order, and when it is needed."""
        self._unwanted: list[tuple[int, Unit]] = []
        self._wanted: list[tuple[int, int, Unit]] = []
        self._ages = count()
        self._compact_at = 64

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._staged

    def __iter__(self) -> Iterator[Unit]:
        """Iterate, oldest first."""
        return iter(self._staged)

    def add(self, unit: Unit, needed: int | None) -> None:
        """Add a unit that may be dropped, as the youngest."""
        self._staged[unit] = (next(self._ages), needed)
        self._push(unit)

    def renew(self, unit: Unit) -> None:
        """Make a unit the youngest, if it is staged."""
        if unit in self._staged:
            self.add(unit, self._staged[unit][1])

    def discard(self, unit: Unit) -> None:
        """Remove a unit that was dropped or is in use, if it is staged."""
        self._staged.pop(unit, None)

    def need(self, unit: Unit, needed: int | None) -> None:
        """Change when a unit is needed, if it is staged."""
        if unit in self._staged and self._staged[unit][1] != needed:
            self._staged[unit] = (self._staged[unit][0], needed)
            self._push(unit)

    def need_all(self, needed_of: Callable[[Unit], int | None]) -> None:
        """Ask again when each unit is needed, after the sequence of uses was replaced."""
        self._staged = {unit: (age, needed_of(unit)) for unit, (age, _) in self._staged.items()}
        self._fill()

    def victim(self, *, writes_in_flight: bool) -> Unit | None:
        """Return the unit to drop next. None: wait for a write in flight, or, without one, nothing can be dropped."""
        unit = self.oldest_unwanted()
        if unit is None and not writes_in_flight:
            unit = self._last_wanted()
            if unit is None and self._staged:
                self._fill()  # an exception interrupted a change before its entry
                return self.victim(writes_in_flight=False)
        return unit

    def oldest_unwanted(self, fitting: Callable[[Unit], bool] = lambda unit: True) -> Unit | None:
        """Return the oldest `fitting` unit without a coming use, which a prefetch may displace."""
        passed: list[tuple[int, Unit]] = []
        chosen = None
        while self._unwanted and chosen is None:
            age, unit = self._unwanted[0]
            if self._staged.get(unit) != (age, None):
                heapq.heappop(self._unwanted)
            elif fitting(unit):
                chosen = unit
            else:
                passed.append(heapq.heappop(self._unwanted))
        for entry in passed:
            heapq.heappush(self._unwanted, entry)
        return chosen

    def _last_wanted(self) -> Unit | None:
        while self._wanted:
            later, age, unit = self._wanted[0]
            if self._staged.get(unit) == (age, -later):
                return unit
            heapq.heappop(self._wanted)
        return None

    def _push(self, unit: Unit) -> None:
        age, needed = self._staged[unit]
        if needed is None:
            heapq.heappush(self._unwanted, (age, unit))
        else:
            heapq.heappush(self._wanted, (-needed, age, unit))
        if len(self._unwanted) + len(self._wanted) > self._compact_at:
            self._fill()

    def _fill(self) -> None:
        staged = self._staged.items()
        self._unwanted = [(age, unit) for unit, (age, needed) in staged if needed is None]
        self._wanted = [(-needed, age, unit) for unit, (age, needed) in staged if needed is not None]
        heapq.heapify(self._unwanted)
        heapq.heapify(self._wanted)
        self._compact_at = 64 + 4 * len(self._staged)


class ReadAhead(Generic[Unit]):
    """The units that are staged or wanted, the next one to read and the first one to drop. Decides only.

    Args:
        held: units that have memory and are not to be read.
        readable: the type of units that can be read. Other units only stand for room.
    """

    def __init__(self, held: Container[Unit], readable: type) -> None:
        self.staged: Eviction[Unit] = Eviction()
        """The units that may be dropped."""
        self.following: LookAhead[Unit] = LookAhead(iter(()))
        self._held, self._readable = held, readable
        self._stay: Collection[Unit] = ()
        self._to_read: list[tuple[int, int, Unit]] = []
        """A heap of (when it is needed, number, unit). Numbers are unique, so units are never compared."""
        self._numbers = count()
        self._compact_at = 64

    def needed(self, unit: Unit) -> int | None:
        """Return when a unit is needed; smaller is sooner. None if it is not wanted."""
        uses = self.following._uses.get(unit)
        if uses:
            return uses[0].number
        return _LAST if unit in self._stay else None

    def follow(self, following: LookAhead[Unit], stay: Collection[Unit] = ()) -> None:
        """Replace the wanted units: those that `following` chooses, then those that `stay`."""
        self.following, self._stay = following, stay
        following.fit()
        self._fill(following)
        self.staged.need_all(self.needed)

    def fit(self) -> None:
        """Choose again after a change to `following`."""
        for unit in self.following.fit():
            if unit in self._held:
                self.staged.need(unit, self.needed(unit))
            elif isinstance(unit, self._readable):
                self.unstage(unit)

    def stage(self, unit: Unit) -> None:
        """Add a unit that is staged or being staged, and may be dropped."""
        self.staged.add(unit, self.needed(unit))

    def unstage(self, unit: Unit) -> None:
        """Add a unit that is only on NVMe."""
        needed = self.needed(unit)
        if needed is not None:
            heapq.heappush(self._to_read, (needed, next(self._numbers), unit))
            if len(self._to_read) > self._compact_at:
                self._fill(dict.fromkeys(unit for _, _, unit in self._to_read))

    def to_read(self) -> Iterator[Unit]:
        """Yield the wanted units on NVMe, soonest needed first. Skips a unit that returns to NVMe after its turn."""
        reached = -_LAST
        passed_over: list[Unit] = []
        try:
            while self._to_read:
                needed, _, unit = self._to_read[0]
                agrees = unit not in self._held and self.needed(unit) == needed
                if agrees and needed >= reached:
                    reached = needed
                    yield unit
                    continue
                if agrees:
                    passed_over.append(unit)
                heapq.heappop(self._to_read)
        finally:
            for unit in passed_over:
                self.unstage(unit)

    def _fill(self, units: Iterable[Unit]) -> None:
        entries = [
            (needed, next(self._numbers), unit)
            for unit in units
            if isinstance(unit, self._readable) and unit not in self._held and (needed := self.needed(unit)) is not None
        ]
        heapq.heapify(entries)
        self._to_read, self._compact_at = entries, 64 + 2 * len(entries)


def in_turn(units: Sequence[Unit], *, at_once: int | None = None) -> LookAhead[Unit]:
    """Return a look-ahead over units that are used one after another, `at_once` at a time (all if None)."""
    uses = (Use(float(place), unit) for place, unit in enumerate(units))
    ones: Mapping[Unit, int] = dict.fromkeys(units, 1)
    return LookAhead(uses, (ones, len(units) if at_once is None else at_once))


def plan_look_ahead(uses: Sequence[int], group_bytes: Sequence[int], look_ahead_bytes: int) -> list[int]:
    """Plan what should be staged at every place of a known step, for the simulator.

    After `place` uses, the groups of `uses[place : ends[place]]` should be staged. Returns `ends`, one longer than
    `uses`. It never falls, so a reader that follows it starts every read once.
    """
    ahead = LookAhead((Use(float(place), group) for place, group in enumerate(uses)), (group_bytes, look_ahead_bytes))
    ends = []
    for place in range(len(uses) + 1):
        ahead.advance(place)
        ahead.fit()
        ends.append(ahead.end)
    return ends


def cycle_read_bytes(
    uses: Sequence[Unit], read_bytes: Sequence[int], next_cycle: Iterable[Unit], *limits: Limit
) -> int:
    """Return the bytes read in one of many equal cycles of uses, if a look-ahead's units stay staged after each use.

    A use reads nothing if its unit stayed since its last use.

    Args:
        uses: the unit of each use, in order.
        read_bytes: by place in `uses`, the bytes that staging the unit there reads.
        next_cycle: the units chosen for the next cycle, in order; those with a use may stay beyond the end.
        limits: as for `LookAhead`.
    """
    ends = [*next_cycle]
    first, stayed = _read_in_cycle(uses, read_bytes, ends, limits, set())
    return _read_in_cycle(uses, read_bytes, ends, limits, stayed)[0] if stayed else first


def _read_in_cycle(
    uses: Sequence[Unit],
    read_bytes: Sequence[int],
    ends: Sequence[Unit],
    limits: Sequence[Limit],
    stayed: set[Unit],
) -> tuple[int, set[Unit]]:
    """Return the bytes read in a cycle that begins with the units `stayed`, and the units that stay at its end."""
    total = 0
    coming = [
        *(Use(float(place), unit) for place, unit in enumerate(uses)),
        *(Use(UNTIL_THE_END, unit) for unit in ends),
    ]
    ahead = LookAhead(iter(coming), *limits)
    ahead.fit()
    for place, unit in enumerate(uses):
        if unit not in stayed:
            total += read_bytes[place]
        ahead.advance(place + 1)
        changed = ahead.fit()
        stayed.add(unit)
        stayed -= {other for other in changed if other not in ahead}
        if unit not in ahead:
            stayed.discard(unit)
    return total, stayed


class Trace(Generic[Unit]):
    """The order of uses of one phase (training or evaluation), as a cycle of units.

    Each cycle is recorded while the previous one is followed. An unexpected use moves the place to the next such use in
    the followed cycle, if there is one, and otherwise is only recorded: a prediction changes speed, never results. At
    its end the recorded cycle becomes the followed one, so a wrong trace is corrected within one cycle. Only a cycle
    that `interrupt` excuses is treated as an exception, until a second one equals it.
    """

    def __init__(self) -> None:
        self.cycle: tuple[Unit, ...] = ()
        """The order that is followed; empty until one is known."""
        self.place = 0
        """Number of its uses that are over."""
        self.mispredictions = 0
        """Number of uses that were not the expected ones, since the first cycle was complete."""
        self._places: dict[Unit, list[int]] = {}
        """By unit: its places in the cycle."""
        self._recorded: list[Unit] = []
        self._before: tuple[Unit, ...] = ()
        self._used: set[Unit] = set()
        self._mispredicted = False
        self._excused = 0

    def used(self, group: Unit) -> bool:
        """Return True if `group` was used in the current cycle."""
        return group in self._used

    def use(self, group: Unit) -> None:
        """Record a use of `group`."""
        self._recorded.append(group)
        self._used.add(group)
        if not self.cycle:
            return
        places = self._places.get(group, [])
        later = bisect_left(places, self.place)
        place = places[later] if later < len(places) else None
        if place != self.place:
            self._mispredicted = True
            self.mispredictions += 1
        if place is not None:  # else the cycle has no such use left: stay, the next use may fit again
            self.place = place + 1

    def interrupt(self) -> None:
        """Excuse this cycle and the next: another activity came in between, so they may differ."""
        self._excused = 2

    def restart(self) -> None:
        """Begin this cycle again after an exception, and excuse it and the next."""
        self._recorded, self._used, self.place, self._mispredicted = [], set(), 0, False
        self.interrupt()

    def end_cycle(self) -> bool:
        """End the cycle (an optimizer step; the end of an evaluation pass). An empty one changes nothing.

        Returns True if it differed from the cycles before without an excuse.
        """
        if not self._recorded:
            return False
        if self.place < len(self.cycle):
            self._mispredicted = True
            self.mispredictions += 1
        recorded, excused = tuple(self._recorded), self._excused > 0
        new = recorded != self._before
        unexcused = self._mispredicted and new and not excused
        if not (self.cycle and new and excused):
            self.cycle, self._places = recorded, {}
            for place, group in enumerate(recorded):
                self._places.setdefault(group, []).append(place)
        self._before, self._excused = recorded, max(0, self._excused - 1)
        self._recorded, self._used, self.place, self._mispredicted = [], set(), 0, False
        return unexcused

    def upcoming(self, *, into_next: bool = False) -> Iterator[Unit]:
        """Yield the expected uses in the rest of this cycle (`into_next`: and in the next). Empty until one is known.

        Bytes read before the end of a training cycle are stale after it: the step changes every group.
        """
        cycle = self.cycle
        for place in range(self.place, len(cycle)):  # no slice, because callers stop after a few
            yield cycle[place]
        if into_next:
            yield from cycle
