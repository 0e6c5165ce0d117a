"""Floor 8. OpenMP threads without work: they spin where compute bounds a step, and sleep where the drives do. Training thread
only.

[Note: Where spinning pays]
torch's threads spin for some milliseconds after each operation, to be there for the next. That is worth a tenth of a step
that compute bounds. Where the drives bound it, the step takes as long without, and a fifth less of the CPU: the second thread
spun through all the Python between two operations. So whether they spin is chosen from how much of a step the training thread
stood waiting for drives; and where they slept and it didn't wait for much any more, they spin for good. They sleep in the
passes and steps of a training alone: whatever else the process computes finds them as it knows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from infinity.aio import EarlySleep, start_early_sleep

_SLEEP_FROM = 1 / 3
_SPIN_BELOW = 1 / 6
"""Shares of a step that were waits. Operations which wake their threads take up to 15 % longer, so from the first one doesn't
come below the second where that is all it costs."""

_STEPS = 2
"""So many in a row decide, as any one may be unlike the others."""


class SleepChoice:
    """Whether idle threads are to sleep, from the steps so far."""

    def __init__(self) -> None:
        self.sleeps = False
        self._is_final = False
        self._in_a_row = 0

    def note_step(self, share: float) -> None:
        """A step is over; the training thread stood waiting for this `share` of it (0 to 1)."""
        speaks_for_change = share < _SPIN_BELOW if self.sleeps else share >= _SLEEP_FROM
        self._in_a_row = self._in_a_row + 1 if speaks_for_change else 0
        if self._in_a_row == _STEPS and not self._is_final:
            self.sleeps, self._is_final = not self.sleeps, self.sleeps
            self._in_a_row = 0


class IdleThreads:
    """Has idle threads sleep in the steps of a training where that is chosen.

    stall_seconds: for how long the training thread has waited for drives, in all. compute_here: whether threads of this process
    compute the model, and not a device. start: has idle threads sleep until its end; None where that can't be.
    """

    def __init__(
        self,
        stall_seconds: Callable[[], float],
        *,
        compute_here: bool,
        start: Callable[[], EarlySleep | None] = start_early_sleep,
    ) -> None:
        self._stall_seconds, self._compute_here, self._start = stall_seconds, compute_here, start
        self._choice = SleepChoice()
        self._sleep: EarlySleep | None = None
        self._began: tuple[float, float] | None = None
        """When the step began, and what had been waited by then."""

    def begin_pass(self) -> None:
        """A forward of a step begins."""
        if self._began is None:
            self._began = self._now()
        if self._choice.sleeps and self._compute_here and self._sleep is None:
            self._sleep = self._start()

    def end_step(self) -> None:
        """The step is over."""
        if self._began is not None:
            seconds, waited = (now - then for now, then in zip(self._now(), self._began, strict=True))
            self._choice.note_step(waited / seconds)
        self.leave_step()

    def leave_step(self) -> None:
        """The step ends here, in whatever way; it says nothing about the next ones."""
        self._began = None
        sleep, self._sleep = self._sleep, None
        if sleep is not None:
            sleep.end()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._stall_seconds()
