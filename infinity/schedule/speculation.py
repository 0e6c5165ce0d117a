"""Whether a step will probably do with its gradients what is expected before the backward."""

from __future__ import annotations

from collections import deque

_STEPS_SEEN = 4
_OTHERS_MAX = 1


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
