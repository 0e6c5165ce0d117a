"""The scheme of a step: how master weights rest on the drive, when a group is updated, what that moves, and whether an update
before the step will probably be what the step does.

[Note: Schemes]
Master weights rest *split*, as the bf16 compute parameter that is gathered and its 16-bit remainder (with Adam 12 bytes of
state per element, the compute parameter among them), or in *full* beside the compute parameter (14). A group is updated in the
optimizer *step* after the backward; or just before its next *forward*, by the numbers that the step settled; or in the
*backward*, as soon as its gradient is reduced, which is the same only where nothing has to be known of all gradients before.
Bytes per element of one micro-batch, compute parameters included:

    split      forward   backward   step      read   written
    step       2         2          12        16     12
    forward    12        2                    14     12
    backward   2         12                   14     12

In full the step reads 12 and writes 14. Updated before its forward, a group gets its compute parameters from the update (12 + 2
read); updated in its backward, it has them already, and reads the full master (2 + 2 + 12).

Where the backward's updates are speculative, a step that accepts them moves what "backward" says. One that discards them has
read the other state and written all of it for nothing; the next forward makes the updates as "forward" does.

An optimizer with fewer numbers per element than Adam's two moments moves 4 bytes less, both ways, for each that it lacks; one
with moments in bf16 moves 2 bytes less for each, with moments in 8 bits 3 less, but for their scales.

[Note: Balance of the passes]
With all updates in the backward a forward moves 2 of a step's 26 bytes per element ([Note: Schemes]), and has a
third of the compute. Where compute and drive take equally long, the drive idles in the forward, and the backward waits for it.
An element that is updated before its next forward moves 24 bytes there, and 2 in the backward. If a share s of them is, the
forward has its third of the bytes where

    2 + 22 s = 26 / 3        s = 0.30

and neither pass waits while the other idles, at any ratio of compute and drive. With saved activations recomputed a
forward has a quarter of the compute, and s is 0.20. So a fourth of the elements is updated before its next forward; measured,
shares of 0.2 to 0.34 are equally good. Their gradients wait until then, which takes memory. The numbers are the same.

Where all gradients wait for the step, as with speculative updates, the fourth is every fourth sub-group: each group has some,
and the drive is never idle between two groups. Else it is every fourth group, whose gradients alone are kept.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Literal

from infinity.errors import ConfigError

MasterWeights = Literal["split", "full"]
Update = Literal["step", "forward", "backward"]
Schedule = Literal["horizontal", "vertical"]
"""One micro-batch after the other, or all of them through a group before the next."""

COMPUTE_BYTES = 2
"""One compute parameter (bf16)."""

MASTER_BYTES = 4
MOMENT_BYTES = 4
MOMENT_BYTES_OF: dict[str, float] = {"fp32": MOMENT_BYTES, "bf16": 2, "8bit": 1 + 4 / 256}
"""By the config's name of their dtype. A moment in 8 bits has a share in the scale of its block of 256."""

ADAM_MOMENTS = 2
"""Numbers that Adam keeps of each element. SGD keeps one, its momentum, or none without."""


def state_bytes(moments: float = ADAM_MOMENTS, moment_bytes: float = MOMENT_BYTES) -> float:
    """Master and moments of one element; of a split master the compute parameter is a part."""
    return MASTER_BYTES + moments * moment_bytes


@dataclass(frozen=True)
class Scheme:
    """See [Note: Schemes]. `moments`: how many numbers the optimizer keeps of each element, on average, of `moment_bytes` each.
    `speculative`: whether the step accepts or discards updates in the backward. `collective`: as for `late_update`."""

    master_weights: MasterWeights = "split"
    update: Update = "forward"
    moments: float = ADAM_MOMENTS
    moment_bytes: float = MOMENT_BYTES
    speculative: bool = False
    collective: bool = False

    def __post_init__(self) -> None:
        if self.moment_bytes != MOMENT_BYTES and self.moments != ADAM_MOMENTS:
            raise ConfigError("small moments are for the two of Adam and AdamW: leave moments_dtype at fp32")

    @property
    def late(self) -> Update:
        """When that is updated which the backward doesn't."""
        return "step" if self.update == "step" else late_update(self.collective)

    @property
    def state_bytes(self) -> float:
        """Master and moments of one element; of a split master the compute parameter is a part."""
        return state_bytes(self.moments, self.moment_bytes)

    def compute_is_state(self, compute_itemsize: int = COMPUTE_BYTES) -> bool:
        """Whether the compute parameter is a part of the state: of a split master, or as the fp32 master itself."""
        return self.master_weights == "split" or compute_itemsize >= MASTER_BYTES

    def other_state_bytes(self) -> float:
        """State per element without the compute parameter: remainder and moments, moments alone, or master and moments."""
        return self.state_bytes - (COMPUTE_BYTES if self.compute_is_state() else 0)

    def compute_reads(self, gathers: int, compute_itemsize: int = COMPUTE_BYTES) -> int:
        """How often a step reads a trained compute parameter that it gathers `gathers` times and that isn't cached."""
        if not self.compute_is_state(compute_itemsize):
            return gathers - (self.update == "forward")
        if self.update == "step":
            return gathers + 1
        return gathers if self.update == "forward" else max(gathers, 2)

    @property
    def discarded_bytes(self) -> tuple[float, float]:
        """Bytes (read, written) per element that a discarded update costs beyond an accepted one: the next forward reads the
        state, and spares the read of a gather."""
        return self.state_bytes - COMPUTE_BYTES, self.other_state_bytes() + COMPUTE_BYTES


def late_update(collective: bool) -> Update:
    """The best update that is not in the backward. `collective`: all ranks update in collectives, so that none may be left for
    later than the step."""
    return "step" if collective else "forward"


def choose_update(
    asked: str,
    *,
    clipping: bool,
    accumulation: int,
    loss_scaling: bool,
    keep_grad: bool = False,
    collective: bool = False,
) -> tuple[Update, bool]:
    """The update that was `asked` for; or, for "auto", in the backward, unless gradients are to stay in `.grad`: then
    `late_update`. And whether it is speculative: in the backward, where the factor of a gradient is not known.

    The factor is known where it depends on no other gradient. `collective`: as for `late_update`. Raises ConfigError where
    "backward" was asked for, and gradients are to stay in `.grad`, or "forward", and ranks update together.
    """
    factor_known = not clipping and accumulation == 1 and not loss_scaling
    if asked == "auto":
        asked = late_update(collective) if keep_grad else "backward"
    if asked == "backward" and keep_grad:
        raise ConfigError(
            'infinity.update "backward" does not go with infinity.keep_grad, as it takes gradients out of .grad; use '
            f'"{late_update(collective)}"' + ", which moves as few bytes" * (not collective)
        )
    if asked == "forward" and collective:
        raise ConfigError(
            'infinity.update "forward" leaves updates to whoever gathers a group or looks at it, and on several ranks Muon '
            'updates matrices on all of them together: use "backward" or "step"'
        )
    if asked not in ("step", "forward", "backward"):
        raise ConfigError(f'infinity.update: expected "auto", "step", "forward" or "backward", got {asked!r}')
    return asked, asked == "backward" and not factor_known  # type: ignore[return-value]


APART = 4
"""One of so many neighbours is updated before its next forward."""

_STEPS_SEEN = 4
_OTHERS_MAX = 1


class UpdateTiming(enum.Enum):
    """When a group is updated. Decided once per group, when the model is planned.

    SPECULATIVE: in the backward, into the other slot; the step accepts that, or discards it and updates the group as FORWARD.
    So is every fourth sub-group: see [Note: Balance of the passes].
    """

    STEP = "step"
    FORWARD = "forward"
    BACKWARD = "backward"
    SPECULATIVE = "speculative"

    def __init__(self, value: str) -> None:
        self.in_backward = value in ("backward", "speculative")
        """True if the backward updates the group, for good or speculatively."""

    @property
    def gradients_wait(self) -> bool:
        """True if its gradients are kept from the backward until the step."""
        return self is not UpdateTiming.BACKWARD

    @property
    def update(self) -> Update:
        """The value of `PagingOptions.update` that asks for it."""
        return "backward" if self.in_backward else "step" if self is UpdateTiming.STEP else "forward"


def is_left_to_forward(number: int) -> bool:
    """Whether the group or sub-group of a number is updated before its next forward, if the others are in the backward."""
    return number % APART == APART - 1


class SpeculationPolicy:
    """Says whether groups are to be updated in the backward, for the step to accept.

    An update that is accepted hides behind the backward; one that is discarded has read and written the state for nothing. So
    at most one of the last four steps may have been another than expected, speculative or not. A run that clips every step
    updates two of them early, and none after that.
    """

    def __init__(self) -> None:
        self._others: deque[bool] = deque(maxlen=_STEPS_SEEN)

    @property
    def speculates(self) -> bool:
        """Whether the next step will probably be as expected."""
        return sum(self._others) <= _OTHERS_MAX

    def note(self, *, as_expected: bool) -> None:
        """A step is over. `as_expected`: whether gradients were neither clipped nor overflowed, nor their updates discarded."""
        self._others.append(not as_expected)
