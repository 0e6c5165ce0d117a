"""When each group is updated, so that neither the forward nor the backward waits for the drive while the other idles;
and whether an update before the step will probably be what the step does.

[Note: Balance of the passes]
With all updates in the backward a forward moves 2 of a step's 26 bytes per element ([Note: Schemes] in scheme.py), and has a
third of the compute. Where compute and drive take equally long, the drive idles in the forward, and the backward waits for it.
An element that is updated before its next forward moves 24 bytes there, and 2 in the backward. If a share s of them is, the
forward has its third of the bytes where

    2 + 22 s = 26 / 3        s = 0.30

and neither pass waits while the other idles, whatever the ratio of compute and drive. With saved activations recomputed a
forward has a quarter of the compute, and s is 0.20. So every fourth group is updated before its next forward; measured, shares
of 0.2 to 0.34 are equally good. Its gradients wait until then, which takes memory. The numbers are the same.
"""

from __future__ import annotations

import enum
from collections import deque

from infinity.schedule.scheme import Update

GROUPS_APART = 4
"""One of so many neighbours is updated before its next forward."""

_STEPS_SEEN = 4
_OTHERS_MAX = 1


class UpdateTiming(enum.Enum):
    """When a group is updated. Decided once per group, when the model is planned.

    SPECULATIVE: in the backward, into the other slot; the step accepts that, or discards it and updates the group as FORWARD.
    """

    STEP = "step"
    FORWARD = "forward"
    BACKWARD = "backward"
    SPECULATIVE = "speculative"

    @property
    def in_backward(self) -> bool:
        """True if the backward updates the group, for good or speculatively."""
        return self in (UpdateTiming.BACKWARD, UpdateTiming.SPECULATIVE)

    @property
    def gradients_wait(self) -> bool:
        """True if its gradients are kept from the backward until the step."""
        return self is not UpdateTiming.BACKWARD

    @property
    def update(self) -> Update:
        """The value of `PagingOptions.update` that asks for it."""
        return "backward" if self.in_backward else "step" if self is UpdateTiming.STEP else "forward"


def is_left_to_forward(group: int) -> bool:
    """Whether a group, by its number, is updated before its next forward where the others are updated in the backward."""
    return group % GROUPS_APART == GROUPS_APART - 1


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
