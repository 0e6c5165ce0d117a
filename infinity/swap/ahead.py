"""Which groups go to the device ahead of their gather: see [Note: Ahead on the device] in parameter_lap.py.

Decides and moves nothing. Used by the training thread, at each gather.
"""

from __future__ import annotations

from infinity.swap.group import PagedGroup
from infinity.swap.policy import StagingPolicy


class DeviceAhead:
    """The groups on their way, and those that come next.

    bytes_max: what compute parameters that nobody has asked for yet may take of the device's memory.
    """

    def __init__(self, policy: StagingPolicy, *, bytes_max: int) -> None:
        self._policy = policy
        self.bytes_max = bytes_max
        self.started: list[PagedGroup] = []
        """Those that were started, soonest needed first."""
        self.late = 0
        """How often compute parameters of a group, or those of it that stay in host memory, were not on their way yet when they
        were asked for."""

    def recover(self) -> None:
        """Nothing is on its way any more."""
        self.started = []

    def turn_to_next(self, *, asked_for: PagedGroup | None) -> list[PagedGroup]:
        """The groups that come next and fit, soonest first. What was started and isn't among them is let go of, but for the
        group `asked_for`, whose shards are being given out or were last."""
        coming, room = [], self.bytes_max
        for group in self._policy.next_gathers():
            room -= group.compute_bytes
            if room < 0:
                break
            if group.compute_bytes:
                coming.append(group)
        for group in self.started:
            if group not in coming and group is not asked_for:
                group.delivery.let_go()
                group.resident_delivery.forget_delivery()
        self.started = []
        return coming
