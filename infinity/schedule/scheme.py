"""The scheme of a step: the storage of master weights, the time of updates, the bytes that both move, and a prediction
whether a step will accept an early update.

[Note: Schemes]
Master weights are stored *split*, as the gathered bf16 compute parameter and its 16-bit remainder, or in *full* next to
the compute parameter. With Adam an element takes 12 bytes split and 14 in full, including the compute parameter. A
group is updated in the optimizer *step* after the backward; or just before its next *forward*, with the numbers that
the step settled; or in the *backward*, once its gradient is reduced, which gives the same result only if the update
depends on no other gradient. Bytes per element with one micro-batch, including compute parameters:

    split      forward   backward   step      read   written
    step       2         2          12        16     12
    forward    12        2                    14     12
    backward   2         12                   14     12

In full, the step reads 12 and writes 14. Updated before its forward, a group gets its compute parameters from the
update (12 + 2 read); updated in its backward, it has them already, and reads the full master (2 + 2 + 12).

If updates in the backward are speculative, a step that accepts them moves the bytes of "backward". A step that discards
them has read the other state and written all of it in vain; the next forward then makes the updates as "forward" does.

An optimizer with fewer numbers per element than Adam's two moments moves 4 bytes less, both ways, for each missing one.
Moments in bf16 move 2 bytes less each, moments in 8 bits 3 less, except for their scales.

[Note: Balance of the passes]
With all updates in the backward, a forward moves 2 of a step's 26 bytes per element ([Note: Schemes]), but has a third
of the compute. If compute and drive take equally long, the drive idles in the forward, and the backward waits for it.
An element that is updated before its next forward moves 24 bytes there, and 2 in the backward. For a share s of such
elements, the forward has its third of the bytes if

    2 + 22 s = 26 / 3        s = 0.30

and no pass waits while the other idles, at any ratio of compute and drive. If saved activations are recomputed, a
forward has a quarter of the compute, and s is 0.20. So a fourth of the elements is updated before its next forward;
measured shares of 0.2 to 0.34 are equally good. Their gradients take memory until then. The results are the same.

If all gradients wait for the step, as with speculative updates, the fourth is every fourth sub-group: each group has
some, and the drive is never idle between two groups. Otherwise it is every fourth group, and only its gradients wait.
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
"""One micro-batch after another, or all of them through a group before the next."""

COMPUTE_BYTES = 2
"""Bytes of a compute parameter (bf16)."""

MASTER_BYTES = 4
MOMENT_BYTES = 4
MOMENT_BYTES_OF: dict[str, float] = {"fp32": MOMENT_BYTES, "bf16": 2, "8bit": 1 + 4 / 256}
"""By the config's name of their dtype. A moment in 8 bits has a share in the scale of its block of 256."""

ADAM_MOMENTS = 2
"""Numbers that Adam keeps per element. SGD keeps one, its momentum, or none."""


def state_bytes(moments: float = ADAM_MOMENTS, moment_bytes: float = MOMENT_BYTES) -> float:
    """Return the bytes of master and moments per element; the compute parameter is part of a split master."""
    return MASTER_BYTES + moments * moment_bytes


@dataclass(frozen=True)
class Scheme:
    """See [Note: Schemes]. `moments`: numbers that the optimizer keeps per element, on average, of `moment_bytes` each.
    `speculative`: the step accepts or discards updates in the backward. `collective`: as for `late_update`."""

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
        """The time of the updates that the backward doesn't make."""
        return "step" if self.update == "step" else late_update(self.collective)

    @property
    def state_bytes(self) -> float:
        """Bytes of master and moments per element, as `state_bytes` returns."""
        return state_bytes(self.moments, self.moment_bytes)

    def compute_is_state(self, compute_itemsize: int = COMPUTE_BYTES) -> bool:
        """Return True if the compute parameter is part of the state: of a split master, or as the fp32 master."""
        return self.master_weights == "split" or compute_itemsize >= MASTER_BYTES

    def other_state_bytes(self) -> float:
        """Return the bytes of state per element without the compute parameter (if that is a part of it)."""
        return self.state_bytes - (COMPUTE_BYTES if self.compute_is_state() else 0)

    def compute_reads(self, gathers: int, compute_itemsize: int = COMPUTE_BYTES) -> int:
        """Return how often a step reads a trained, uncached compute parameter that it gathers `gathers` times."""
        if not self.compute_is_state(compute_itemsize):
            return gathers - (self.update == "forward")
        if self.update == "step":
            return gathers + 1
        return gathers if self.update == "forward" else max(gathers, 2)

    @property
    def discarded_bytes(self) -> tuple[float, float]:
        """Bytes (read, written) per element that a discarded update costs more than an accepted one. Includes the read
        that the next forward's update saves its gather."""
        return self.state_bytes - COMPUTE_BYTES, self.other_state_bytes() + COMPUTE_BYTES


def late_update(collective: bool) -> Update:
    """Return the best update outside the backward. `collective`: all ranks update in collectives, so no update may be
    deferred beyond the step."""
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
    """Return the update for `asked`, and True if it is speculative: in the backward, with a gradient's factor unknown.

    "auto" is in the backward, or `late_update` if gradients must stay in `.grad`. The factor is known if it depends on
    no other gradient. `collective`: as for `late_update`. Raises ConfigError for "backward" if gradients must stay in
    `.grad`, and for "forward" if ranks update together.
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
            'infinity.update "forward" defers updates to the rank that next uses a group, but on several ranks Muon '
            'updates matrices on all of them together: use "backward" or "step"'
        )
    if asked not in ("step", "forward", "backward"):
        raise ConfigError(f'infinity.update: expected "auto", "step", "forward" or "backward", got {asked!r}')
    return asked, asked == "backward" and not factor_known  # type: ignore[return-value]


APART = 4
"""One of so many groups or sub-groups is updated before its next forward."""

_STEPS_SEEN = 4
_OTHERS_MAX = 1


class UpdateTiming(enum.Enum):
    """When a group is updated. Fixed per group when the model is planned.

    SPECULATIVE: in the backward, into the other slot; the step accepts that, or discards it and updates the group as
    FORWARD. Every fourth sub-group is always updated as FORWARD: see [Note: Balance of the passes].
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
        """The value of `PagingOptions.update` that selects it."""
        return "backward" if self.in_backward else "step" if self is UpdateTiming.STEP else "forward"


def is_left_to_forward(number: int) -> bool:
    """Return True if the group or sub-group of this number is updated before its next forward, unlike the others."""
    return number % APART == APART - 1


class SpeculationPolicy:
    """Decides whether groups are updated speculatively in the backward.

    An accepted update hides behind the backward; a discarded one has read and written the state in vain. So at most one
    of the last four steps may have been unexpected, speculative or not. A run that clips every step updates two of them
    early, and no more.
    """

    def __init__(self) -> None:
        self._others: deque[bool] = deque(maxlen=_STEPS_SEEN)
        self.speculates = True
        """True if the next step will probably be as expected."""

    def note(self, *, as_expected: bool) -> None:
        """Record a step. `as_expected`: gradients were neither clipped nor overflowed, and no update was discarded."""
        self._others.append(not as_expected)
        self.speculates = sum(self._others) <= _OTHERS_MAX
