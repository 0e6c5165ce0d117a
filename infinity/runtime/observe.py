"""Floor 11. What each step took: seconds, bytes and waiting. Training thread only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from infinity.swap import SwapStats


@dataclass(frozen=True)
class EngineStats:
    """What the last step took: seconds from the end of the step before it, bytes to and from NVMe, and waiting.

    stall_seconds: time the training thread stood waiting for NVMe.
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    stall_seconds: float


class StepMeter:
    """Measures from one step's end to the next. swap_stats: counters of what rests on NVMe; None where nothing does."""

    def __init__(self, swap_stats: Callable[[], SwapStats | None]) -> None:
        self._swap_stats = swap_stats
        self.restart()

    def restart(self) -> None:
        """The next step's seconds and bytes count from now."""
        self._mark = self._counters()

    def end_step(self) -> EngineStats:
        """What was taken since the last step's end, or since `restart`."""
        now = self._counters()
        seconds, read, written, stall = (b - a for a, b in zip(self._mark, now, strict=True))
        self._mark = now
        return EngineStats(float(seconds), int(read), int(written), float(stall))

    def _counters(self) -> tuple[float, int, int, float]:
        stats = self._swap_stats()
        if stats is None:
            return time.perf_counter(), 0, 0, 0.0
        return time.perf_counter(), stats.read_bytes, stats.written_bytes, stats.stall_seconds
