"""Floor 11. Where the seconds of a step go, printed as DeepSpeed prints it where `wall_clock_breakdown` is set.

Training thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

PARTS = ("fwd", "bwd", "step")


class WallClock:
    """Seconds of each part, of a micro-batch and of a whole step. Waits for the device around each part, so it costs time."""

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
