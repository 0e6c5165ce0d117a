"""Floor 3. The trace: in which order the groups are used, learnt from the last cycle and followed in the next."""

from __future__ import annotations

from collections.abc import Iterator


class Trace:
    """The order of uses of one phase (training, or evaluation), as a cycle of group numbers.

    A cycle is recorded while the one before it is followed. A use that was not expected moves the place in the followed
    cycle to the next such use where there is one, and is otherwise only recorded: prediction is an accelerator, never a
    condition. The recorded cycle becomes the followed one at its end, so the trace heals itself within one cycle. Only a cycle
    that `interrupt` excuses is taken for an exception, until a second one is like it.
    """

    def __init__(self) -> None:
        self._followed: tuple[int, ...] = ()
        self._recorded: list[int] = []
        self._before: tuple[int, ...] = ()
        self._used: set[int] = set()
        self._place = 0
        self._surprised = False
        self._excused = 0
        self.surprises = 0
        """Uses that came when another was expected (or none), since the first cycle was complete."""

    @property
    def known(self) -> bool:
        """Whether a whole cycle has been recorded, so that something can be predicted."""
        return bool(self._followed)

    @property
    def cycle(self) -> tuple[int, ...]:
        """The order that is followed; empty until one is known."""
        return self._followed

    def used(self, group: int) -> bool:
        """Whether `group` was used in the cycle that is going on."""
        return group in self._used

    def use(self, group: int) -> None:
        """Group `group` is used now."""
        self._recorded.append(group)
        self._used.add(group)
        if not self._followed:
            return
        if self._place < len(self._followed) and self._followed[self._place] == group:
            self._place += 1
            return
        self._surprised = True
        self.surprises += 1
        try:
            self._place = self._followed.index(group, self._place) + 1
        except ValueError:
            return  # not expected in the rest of this cycle: stay, the next use may fit again

    def interrupt(self) -> None:
        """Something else came in between: this cycle may differ for that reason, and the next one from this."""
        self._excused = 2

    def restart(self) -> None:
        """An exception ended this cycle: it begins anew, and may differ for that reason, and the next one from it."""
        self._recorded, self._used, self._place, self._surprised = [], set(), 0, False
        self.interrupt()

    def end_cycle(self) -> bool:
        """The cycle is over (an optimizer step; the end of an evaluation pass). An empty one changes nothing.

        Returns whether it went another way than the ones before it, for no reason that `interrupt` told.
        """
        if not self._recorded:
            return False
        if self._followed and self._place < len(self._followed):
            self._surprised = True
            self.surprises += 1
        recorded, excused = tuple(self._recorded), self._excused > 0
        new = recorded != self._before
        surprised = self._surprised and new and not excused
        if not (self._followed and new and excused):
            self._followed = recorded
        self._before, self._excused = recorded, max(0, self._excused - 1)
        self._recorded, self._used, self._place, self._surprised = [], set(), 0, False
        return surprised

    def upcoming(self, *, into_next: bool = False) -> Iterator[int]:
        """The uses expected in the rest of this cycle, `into_next`: and in the next one. Empty until one is known.

        What is read before the end of a training cycle is stale after it: the step changes every group.
        """
        for place in range(self._place, len(self._followed)):  # no slice: who looks ahead stops after a few
            yield self._followed[place]
        if into_next:
            yield from self._followed
