"""What one rank keeps in pinned memory from step to step, as a plan counts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostCache:
    """What one rank keeps in pinned memory from step to step, in bytes by group: compute parameters, and the other state."""

    compute: tuple[int, ...] = ()
    other_state: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.compute) + sum(self.other_state)


NO_CACHE = HostCache()
