"""Floor 8. The stager of a paged model, until the model is closed.

The model outlives its swap manager, and must not keep the pinned pool: whatever belongs to the model reaches the stager through
this one reference, and `close` drops it.
"""

from __future__ import annotations

from infinity.errors import InfinityError
from infinity.swap.stager import Stager


class OpenStager:
    """One reference to a stager, which can be dropped."""

    def __init__(self, stager: Stager) -> None:
        self._stager: Stager | None = stager

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._stager is not None

    @property
    def stager(self) -> Stager:
        """The stager. Raises InfinityError after `close`."""
        if self._stager is None:
            raise InfinityError(
                "the swap manager of this model is closed, and its parameters are gone with it: save them before close()"
            )
        return self._stager

    def close(self) -> None:
        """Let go of the stager, and of the pool with it."""
        self._stager = None
