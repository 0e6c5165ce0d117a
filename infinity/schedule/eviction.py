"""Eviction: which staged unit leaves the pool when somebody needs room, in the product and in the simulator.

[Note: What makes room]
Cheapest first. A unit that nothing comes for is dropped, oldest first: it will not be read again. Then writes in flight are
awaited: their room comes free without a read. Only then a wanted unit is dropped, the one needed last: it must be read again,
and of all units it leaves most time for that. Where units have one size, no other choice reads less (Belady).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class Eviction(Generic[Unit]):
    """The units that may be dropped, and their order: see [Note: What makes room]. Decides; drops nothing itself.

    leaves_room: whether a unit leaves room when it is dropped; one that doesn't is never told to.

    `needed` says when a unit is needed next: the smaller, the sooner; None where nothing comes for it. No two units are needed
    at the same moment. Each call costs the logarithm of the units: a heap entry counts only while it agrees with its unit, so
    that nothing has to be searched when a unit leaves or is needed at another moment.
    """

    def __init__(self, leaves_room: Callable[[Unit], bool] = lambda unit: True) -> None:
        self._leaves_room = leaves_room
        self._staged: dict[Unit, tuple[int, int | None]] = {}
        """By unit, oldest first: its number in that order, and when it is needed."""
        self._unwanted: list[tuple[int, Unit]] = []
        self._wanted: list[tuple[int, int, Unit]] = []
        self._ages = count()
        self._compact_at = 64

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._staged

    def __iter__(self) -> Iterator[Unit]:
        """Oldest first."""
        return iter(self._staged)

    def add(self, unit: Unit, needed: int | None) -> None:
        """From now on the unit may be dropped. It is the youngest."""
        self._staged[unit] = (next(self._ages), needed)
        self._push(unit)

    def renew(self, unit: Unit) -> None:
        """The unit is the youngest now. Nothing to do where it isn't staged."""
        if unit in self._staged:
            self.add(unit, self._staged[unit][1])

    def __delitem__(self, unit: Unit) -> None:
        """The unit was dropped, or is in use."""
        del self._staged[unit]

    def need(self, unit: Unit, needed: int | None) -> None:
        """The unit is needed at another moment now. Nothing to do where it isn't staged."""
        if unit in self._staged and self._staged[unit][1] != needed:
            self._staged[unit] = (self._staged[unit][0], needed)
            self._push(unit)

    def need_all(self, needed_of: Callable[[Unit], int | None]) -> None:
        """Another sequence of uses comes: ask anew when each unit is needed."""
        self._staged = {unit: (age, needed_of(unit)) for unit, (age, _) in self._staged.items()}
        self._fill()

    def victim(self, *, writes_in_flight: bool) -> Unit | None:
        """The unit to drop next. None: wait for a write, or, where none is in flight, nothing can be dropped."""
        unit = self.oldest_unwanted()
        if unit is None and not writes_in_flight:
            unit = self._last_wanted()
            if unit is None and any(map(self._leaves_room, self._staged)):
                self._fill()  # an exception came between a change and its entry
                return self.victim(writes_in_flight=False)
        return unit

    def oldest_unwanted(self, fitting: Callable[[Unit], bool] = lambda unit: True) -> Unit | None:
        """The oldest `fitting` unit that nothing comes for: what reads ahead may displace."""
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
        if not self._leaves_room(unit):
            return
        if needed is None:
            heapq.heappush(self._unwanted, (age, unit))
        else:
            heapq.heappush(self._wanted, (-needed, age, unit))
        if len(self._unwanted) + len(self._wanted) > self._compact_at:
            self._fill()

    def _fill(self) -> None:
        """Make all entries anew."""
        staged = [(unit, entry) for unit, entry in self._staged.items() if self._leaves_room(unit)]
        self._unwanted = [(age, unit) for unit, (age, needed) in staged if needed is None]
        self._wanted = [(-needed, age, unit) for unit, (age, needed) in staged if needed is not None]
        heapq.heapify(self._unwanted)
        heapq.heapify(self._wanted)
        self._compact_at = 64 + 4 * len(self._staged)
