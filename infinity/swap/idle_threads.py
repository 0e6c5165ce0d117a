"""OpenMP threads without work: they spin where compute bounds a step, and sleep where the drives do. One
thread at a time.

[Note: Where spinning pays]
torch's threads spin for some milliseconds after each operation, to be there for the next. Where compute bounds a step, that
is worth a tenth of it. Where drives bound it, the step takes as long without, and nearly a fifth less of the CPU: the second
thread spun through all the Python between two operations. So whether they spin follows from how much of a step the training
thread stood waiting for drives. Where that hides no compute, as where a phase of its own waits, steps get longer: then they
spin for good, as they do where the threads sleep and hardly anything is waited for any more. They sleep from a step's first
forward to its end: whatever else the process computes finds them as it knows them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from infinity.aio import EarlySleep, start_early_sleep

_SLEEP_FROM = 0.3
_SPIN_BELOW = 0.15
"""Shares of a step that were waits. Operations which wake their threads take up to 15 % longer, so from the first one doesn't
come below the second where that is all it costs."""

_LONGER_MAX = 1.05
"""How much longer a step may be with threads that sleep; a drive's own ups and downs are nearly as much."""

_STEPS = 3
"""So many in a row decide, as any one may be unlike the others."""

_FIRST_STEPS = 2
"""A training's first steps are shorter than those that follow: less is still being written from the ones before. They say
nothing."""


class SleepChoice:
    """Whether idle threads are to sleep, from the steps so far."""

    def __init__(self) -> None:
        self.sleeps = False
        self._is_final = False
        self._last: deque[tuple[float, float]] = deque(maxlen=_STEPS)
        """Seconds and share of waits of the last steps, since the choice was made."""
        self._spinning_seconds = 0.0
        """The middle one of the steps that made it."""
        self._steps = 0
        self._is_compared = False

    def note_step(self, seconds: float, waited: float) -> None:
        """A step is over, of whose `seconds` the training thread stood waiting for `waited`."""
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            return
        self._last.append((seconds, waited / seconds))
        if self._is_final or len(self._last) < _STEPS:
            return
        shortest, middle, _ = sorted(seconds for seconds, _ in self._last)
        if not self.sleeps:
            if all(share >= _SLEEP_FROM for _, share in self._last):
                self.sleeps, self._spinning_seconds = True, middle
                self._last.clear()
            return
        is_longer = not self._is_compared and shortest > _LONGER_MAX * self._spinning_seconds
        self._is_compared = True
        if is_longer or all(share < _SPIN_BELOW for _, share in self._last):
            self.sleeps, self._is_final = False, True


class IdleThreads:
    """Has idle threads sleep in the steps of a training where that is chosen.

    compute_here: whether threads of this process compute the model, and not a device. start: has idle threads sleep until its
    end; None where that can't be.
    """

    def __init__(self, *, compute_here: bool, start: Callable[[], EarlySleep | None] = start_early_sleep) -> None:
        self._compute_here, self._start = compute_here, start
        self._choice = SleepChoice()
        self._sleep: EarlySleep | None = None
        self._began: tuple[float, float] | None = None
        """When the step began, and what had been waited by then."""

    def begin_pass(self, waited: float) -> None:
        """A forward of a step begins. `waited`: seconds that the training thread has stood waiting for drives, in all."""
        if self._began is None:
            self._began = time.perf_counter(), waited
        if self._choice.sleeps and self._compute_here and self._sleep is None:
            self._sleep = self._start()

    def end_step(self, waited: float) -> None:
        """The step is over. `waited`: as above."""
        if self._began is not None:
            began, before = self._began
            self._choice.note_step(time.perf_counter() - began, waited - before)
        self.leave_step()

    def leave_step(self) -> None:
        """The step ends here, in whatever way; it says nothing about the next ones."""
        self._began = None
        if self._sleep is not None:
            self._sleep.end()
            self._sleep = None
