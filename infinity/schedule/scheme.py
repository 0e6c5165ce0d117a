"""Floor 6. The scheme of a step: how master weights rest on the drive, when a group is updated, and what that moves.

[Note: Schemes]
Master weights rest *split*, as the bf16 copy that is gathered and the 16 bits that rounding took away (with Adam
12 bytes of state per element, the copy among them), or in *full* beside the copy (14). A group is updated in the optimizer
*step* after the backward; or just before its next *forward*, by the numbers that the step settled; or in the *backward*, as
soon as its gradient is reduced, which is the same only where nothing has to be known of all gradients before. Bytes per element
of one micro-batch:

    split      forward             backward            step      read   written
    step       2                   2                   12        16     12
    forward    12 (copy included)  2                             14     12
    backward   2                   12 (copy included)            14     12

In full the step reads 12 and writes 14. Updated before its forward, a group gets its copy from the update (12 + 2 read);
updated in its backward, it has read the copy for that already, and reads the master beside it (2 + 2 + 12).

An optimizer that keeps less than Adam's two moments moves 4 bytes less, both ways, for each that it doesn't keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infinity.errors import ConfigError

MasterWeights = Literal["split", "full"]
Update = Literal["step", "forward", "backward"]

COMPUTE_BYTES = 2
"""One element of what is gathered (bf16)."""

MASTER_BYTES = 4
MOMENT_BYTES = 4

ADAM_MOMENTS = 2
"""Numbers that Adam keeps of each element. SGD keeps one, its momentum, or none without."""


def state_bytes(moments: int = ADAM_MOMENTS) -> int:
    """Master and moments of one element; split, the copy is a part of them."""
    return MASTER_BYTES + moments * MOMENT_BYTES


@dataclass(frozen=True)
class Scheme:
    """See [Note: Schemes]. `moments`: how many numbers (fp32) the optimizer keeps of each element."""

    master_weights: MasterWeights = "split"
    update: Update = "forward"
    moments: int = ADAM_MOMENTS

    @property
    def in_passes(self) -> bool:
        """Whether updates happen in forward or backward, so that groups and sub-groups share the pool at all times."""
        return self.update != "step"

    def compute_is_state(self, compute_itemsize: int = COMPUTE_BYTES) -> bool:
        """Whether what is gathered is a part of the state: a split master's copy, or the fp32 master itself."""
        return self.master_weights == "split" or compute_itemsize >= MASTER_BYTES

    def other_state_bytes(self, compute_itemsize: int = COMPUTE_BYTES) -> int:
        """State per element beside what is gathered: a remainder and moments, moments alone, or master and moments."""
        return state_bytes(self.moments) - (compute_itemsize if self.compute_is_state(compute_itemsize) else 0)

    def compute_reads(self, gathers: int, compute_itemsize: int = COMPUTE_BYTES) -> int:
        """How often a step reads a trained copy that is gathered `gathers` times in it and doesn't stay in memory."""
        if not self.compute_is_state(compute_itemsize):
            return gathers - (self.update == "forward")
        if self.update == "step":
            return gathers + 1
        return gathers if self.update == "forward" else max(gathers, 2)


def choose_update(
    asked: str, *, clipping: bool, accumulation: int, loss_scaling: bool, keep_grad: bool = False
) -> Update:
    """The update that the config's "auto" means, or what was `asked` for.

    In the backward, which keeps no gradients, where that is exact: what is done to one gradient must not depend on another.
    Raises ConfigError where "backward" was asked for and isn't.
    """
    reasons = ["gradient_clipping"] * clipping + ["gradient_accumulation_steps"] * (accumulation > 1)
    reasons += ["fp16"] * loss_scaling + ["infinity.keep_grad"] * keep_grad
    if asked == "auto":
        return "forward" if reasons else "backward"
    if asked == "backward" and reasons:
        raise ConfigError(
            f'infinity.update "backward" does not go with {" and ".join(reasons)}: a gradient would be applied before all '
            'are known; use "forward", which moves as few bytes'
        )
    if asked not in ("step", "forward", "backward"):
        raise ConfigError(f'infinity.update: expected "auto", "step", "forward" or "backward", got {asked!r}')
    return asked  # type: ignore[return-value]
