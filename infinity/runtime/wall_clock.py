"""Floor 5. Where the seconds of a step go, printed as DeepSpeed prints it where `wall_clock_breakdown` is set.

Training thread only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from infinity.swap.timeline import Timeline, measured

P = ParamSpec("P")
R = TypeVar("R")

PARTS = ("fwd", "bwd", "step")
_IN_A_TRACE = {"fwd": "forward", "bwd": "backward", "step": "step"}


class WallClock:
    """Seconds of each part, of a micro-batch and of a whole step. Waits for the device around each part, so it costs time."""

    def __init__(self) -> None:
        self._micro = dict.fromkeys(PARTS, 0.0)
        self._whole = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count what happens in the block for `part`."""
        started = _now()
        yield
        seconds = _now() - started
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


class Timed(Protocol):
    """Who has a clock where times are wanted, and counts its steps."""

    wall_clock: WallClock | None
    global_steps: int

    @property
    def timeline(self) -> Timeline | None: ...


E = TypeVar("E", bound=Timed)


def timed(part: str) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """A method whose time counts for `part`, where a clock or a trace runs; after "step" the clock is told."""

    def decorate(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        @functools.wraps(method)
        def run(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with measured(self.timeline, "step", _IN_A_TRACE[part]):
                return clocked(self, *args, **kwargs)

        def clocked(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.wall_clock is None:
                return method(self, *args, **kwargs)
            steps = self.global_steps
            with self.wall_clock.measure(part):
                result = method(self, *args, **kwargs)
            if part == "step":
                self.wall_clock.report(stepped=self.global_steps > steps)
            return result

        return run

    return decorate


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
