"""Floor 11. What each step took: seconds, bytes and waiting; and where its seconds go. Training thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from infinity.swap import SwapStats

PARTS = ("fwd", "bwd", "step")


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


class WallClock:
    """Seconds of each part, of a micro-batch and of a whole step, printed as DeepSpeed prints them.

    Waits for the device around each part, so it costs time.
    """

    def __init__(self) -> None:
        self._micro = dict.fromkeys(PARTS, 0.0)
        self._whole = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count what happens in the block for `part`."""
        started = now()
        yield
        seconds = now() - started
        self._micro[part] += seconds
        self._whole[part] += seconds

    def report(self, *, stepped: bool) -> None:
        """Print what a micro-batch took, and where a step ended, what all of them took together; both start over."""
        self._print(self._micro, "_microstep")
        if stepped:
            self._print(self._whole, "")

    def _print(self, seconds: dict[str, float], suffix: str) -> None:
        parts = [f"{part}{suffix}: {1e3 * seconds[part]:.2f}" for part in PARTS]
        if dist.get_rank() == 0:
            print(" | ".join(("time (ms)", *parts)), flush=True)
        seconds.update(dict.fromkeys(PARTS, 0.0))


def now() -> float:
    """Seconds of a clock, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
