"""Progress of a training, and measurements of its steps: seconds, bytes and stalls. Training thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import sub

import torch
import torch.distributed as dist

PARTS = ("fwd", "bwd", "step")


@dataclass
class StepProgress:
    """Counters of an engine. accumulation: micro-batches per step."""

    accumulation: int
    global_steps: int = 0
    """Steps of the training, including skipped ones."""
    skipped_steps: int = 0
    """Steps that updated nothing, because an fp16 gradient overflowed."""
    micro_steps: int = 0
    """Finished backward passes, including those of the current step."""
    boundary: bool | None = None
    """True or False if the user set it: a step is due, or not; None if `accumulation` determines it."""
    keeps_losses: bool = False
    """True if `step_losses` are kept."""
    step_losses: Sequence[torch.Tensor] = ()
    """Losses of this rank's micro-batches in the last step (0-D, fp32, on the device), divided as their gradients were: their
    sum is the mean."""
    _micro_steps_before: int = 0
    """`micro_steps` at the end of the last step."""
    _counted_from: int = 0
    """`micro_steps` when `accumulation` was set."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    """As `step_losses`, of the current step."""

    @property
    def is_in_step(self) -> bool:
        """True after the first backward pass of a step."""
        return self.micro_steps != self._micro_steps_before

    def ends_a_step(self, micro_steps: int) -> bool:
        """Return True if a step is due after this many micro-batches."""
        if self.boundary is not None:
            return self.boundary
        counted = micro_steps - self._counted_from
        return counted > 0 and counted % self.accumulation == 0

    def accumulate(self, accumulation: int) -> None:
        """Set the number of micro-batches per step, from the current step on."""
        self.accumulation, self._counted_from = accumulation, self.micro_steps

    def end_backward(self, losses: Sequence[torch.Tensor], count: int | None = None) -> None:
        """Count the backward passes of micro-batches with these losses, divided as their gradients were; or `count`."""
        self.micro_steps += len(losses) if count is None else count
        if self.keeps_losses:
            self._losses += [loss.float().reshape(()) for loss in losses]

    def end_step(self) -> None:
        """Count a step that was taken or skipped."""
        self.global_steps += 1
        self.boundary = None
        self._micro_steps_before = self.micro_steps
        self.step_losses, self._losses = self._losses, []

    def restart_step(self) -> None:
        """Begin the current step again: its gradients were dropped."""
        self.micro_steps, self.boundary = self._micro_steps_before, None
        self._losses.clear()

    def resume(self, global_steps: int, skipped_steps: int) -> None:
        """Continue a training after this many steps."""
        self.global_steps, self.skipped_steps = global_steps, skipped_steps
        self.micro_steps = self._micro_steps_before = self._counted_from = global_steps * self.accumulation
        self._losses.clear()


@dataclass(frozen=True)
class EngineStats:
    """Measurements of the last step, from the end of the one before: seconds, bytes to and from NVMe, and seconds that the
    training thread waited for NVMe."""

    seconds: float
    read_bytes: int
    written_bytes: int
    stall_seconds: float


class StepMeter:
    """Measures from one step's end to the next. transferred: as `SwapManager.transferred`."""

    def __init__(self, transferred: Callable[[], tuple[int, int, float]]) -> None:
        self._transferred = transferred
        self.restart()

    def restart(self) -> None:
        """Measure the next step from now."""
        self._before = time.perf_counter(), *self._transferred()

    def end_step(self) -> EngineStats:
        """Return the measurements since the last step's end, or since `restart`."""
        before = self._before
        self.restart()
        seconds, read, written, stall = map(sub, self._before, before)
        return EngineStats(float(seconds), int(read), int(written), float(stall))


class WallClock:
    """Seconds of each part of a micro-batch and of a whole step, printed in DeepSpeed's format. Costs time, because it waits
    for the device at both ends of each part."""

    def __init__(self) -> None:
        self._micro = dict.fromkeys(PARTS, 0.0)
        self._whole = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to `part`."""
        started = now()
        yield
        seconds = now() - started
        self._micro[part] += seconds
        self._whole[part] += seconds

    def report(self, *, stepped: bool) -> None:
        """Print and reset the times of a micro-batch and, if a step ended, of all its micro-batches together."""
        for seconds, suffix in [(self._micro, "_microstep"), (self._whole, "")][: 1 + stepped]:
            parts = [f"{part}{suffix}: {1e3 * seconds[part]:.2f}" for part in PARTS]
            if dist.get_rank() == 0:
                print(" | ".join(("time (ms)", *parts)), flush=True)
            seconds.update(dict.fromkeys(PARTS, 0.0))


def now() -> float:
    """Return a clock's seconds, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
