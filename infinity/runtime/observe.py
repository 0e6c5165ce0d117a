"""How far a training is, and what its steps took: seconds, bytes and waiting. Training thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from infinity.swap import SwapStats

PARTS = ("fwd", "bwd", "step")


@dataclass
class StepProgress:
    """Counters of an engine. accumulation: micro-batches per step."""

    accumulation: int
    global_steps: int = 0
    """Steps of the training, skipped ones included."""
    skipped_steps: int = 0
    """Steps in which nothing was updated, because an fp16 gradient overflowed."""
    micro_steps: int = 0
    """Backward passes of this run that ended, those of the step that is due included."""
    boundary: bool | None = None
    """Whether a step is due, as the user said so; None where `accumulation` says it."""
    keeps_losses: bool = False
    """Whether somebody wants to know the loss of a step."""
    step_losses: Sequence[torch.Tensor] = ()
    """Of this rank's micro-batches in the last step (0-D, fp32, on the device), each divided as its gradient was: their sum is
    the mean. Empty where nobody wants to know."""
    _micro_steps_before: int = 0
    """`micro_steps` when the last step ended."""
    _counted_from: int = 0
    """`micro_steps` when `accumulation` was set."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    """The same of the step that is due."""

    @property
    def is_in_step(self) -> bool:
        """Whether a backward pass of the step that is due has ended."""
        return self.micro_steps != self._micro_steps_before

    def ends_a_step(self, micro_steps: int) -> bool:
        """Whether a step is due after so many micro-batches."""
        if self.boundary is not None:
            return self.boundary
        counted = micro_steps - self._counted_from
        return counted > 0 and counted % self.accumulation == 0

    def accumulate(self, accumulation: int) -> None:
        """From the step that is due on, so many micro-batches make a step."""
        self.accumulation, self._counted_from = accumulation, self.micro_steps

    def end_backward(self, losses: Sequence[torch.Tensor]) -> None:
        """The backward passes of micro-batches with these losses ended, each divided as its gradient was."""
        self.micro_steps += len(losses)
        if self.keeps_losses:
            self._losses += [loss.float().reshape(()) for loss in losses]

    def end_step(self) -> None:
        """A step was taken, or skipped."""
        self.global_steps += 1
        self.boundary = None
        self._micro_steps_before = self.micro_steps
        self.step_losses, self._losses = self._losses, []

    def begin_step_anew(self) -> None:
        """The gradients of the step that is due were dropped: it begins with its first micro-batch again."""
        self.micro_steps, self.boundary = self._micro_steps_before, None
        self._losses.clear()

    def go_on_from(self, global_steps: int, skipped_steps: int) -> None:
        """A training goes on that has taken so many steps; its next one begins."""
        self.global_steps, self.skipped_steps = global_steps, skipped_steps
        self.micro_steps = self._micro_steps_before = self._counted_from = global_steps * self.accumulation
        self._losses.clear()


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
    """Measures from one step's end to the next. swap_stats: counters of a paged model; None if the model is on the device."""

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
