"""The trace: in which order the groups are used, learnt from the last cycle and followed in the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class Trace(Generic[Unit]):
    """The order of uses of one phase (training, or evaluation), as a cycle of units.

    A cycle is recorded while the one before it is followed. A use that was not expected moves the place in the followed
    cycle to the next such use, if there is one, and is otherwise only recorded: prediction is an accelerator, never a
    condition. The recorded cycle becomes the followed one at its end, so the trace heals itself within one cycle. Only a cycle
    that `interrupt` excuses counts as an exception, until a second one is like it.
    """

    def __init__(self) -> None:
        self.cycle: tuple[Unit, ...] = ()
        """The order that is followed; empty until one is known."""
        self.place = 0
        """The number of its uses that are over."""
        self.mispredictions = 0
        """Uses that came when another was expected (or none), since the first cycle was complete."""
        self._places: dict[Unit, list[int]] = {}
        """The places of each unit in the cycle."""
        self._recorded: list[Unit] = []
        self._before: tuple[Unit, ...] = ()
        self._used: set[Unit] = set()
        self._mispredicted = False
        self._excused = 0

    def used(self, group: Unit) -> bool:
        """Whether `group` was used in the cycle that is going on."""
        return group in self._used

    def use(self, group: Unit) -> None:
        """Group `group` is used now."""
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
        if place is not None:  # else not expected in the rest of this cycle: stay, the next use may fit again
            self.place = place + 1

    def interrupt(self) -> None:
        """Something else came in between: this cycle may differ for that reason, and the next one from this."""
        self._excused = 2

    def restart(self) -> None:
        """An exception ended this cycle: it begins anew, and may differ for that reason, and the next one from it."""
        self._recorded, self._used, self.place, self._mispredicted = [], set(), 0, False
        self.interrupt()

    def end_cycle(self) -> bool:
        """The cycle is over (an optimizer step; the end of an evaluation pass). An empty one changes nothing.

        Returns whether it went another way than the ones before it, for no reason that `interrupt` told.
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
        """The uses expected in the rest of this cycle, `into_next`: and in the next one. Empty until one is known.

        What is read before the end of a training cycle is stale after it: the step changes every group.
        """
        cycle = self.cycle
        for place in range(self.place, len(cycle)):  # no slice: who looks ahead stops after a few
            yield cycle[place]
        if into_next:
            yield from cycle
