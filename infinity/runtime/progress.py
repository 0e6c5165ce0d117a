"""Floor 11. How far a training is: its steps, and the micro-batches of the step that is due. Training thread only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
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
    _micro_steps_before: int = 0
    """`micro_steps` when the last step ended."""

    def ends_a_step(self, micro_steps: int) -> bool:
        """Whether a step is due after so many micro-batches."""
        if self.boundary is not None:
            return self.boundary
        return micro_steps > 0 and micro_steps % self.accumulation == 0

    def end_step(self) -> None:
        """A step was taken, or skipped."""
        self.global_steps += 1
        self.boundary = None
        self._micro_steps_before = self.micro_steps

    def begin_step_anew(self) -> None:
        """The gradients of the step that is due were dropped: it begins with its first micro-batch again."""
        self.micro_steps, self.boundary = self._micro_steps_before, None

    def go_on_from(self, global_steps: int, skipped_steps: int) -> None:
        """A training goes on that has taken so many steps; its next one begins."""
        self.global_steps, self.skipped_steps = global_steps, skipped_steps
        self.micro_steps = self._micro_steps_before = global_steps * self.accumulation
