"""Floor 8. Groups on their way to a device with memory of its own before they are gathered, within a bound of that memory.

Owns no bytes: a group holds its own copies while they are on their way. Used by the training thread, at each gather.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from infinity.swap.paged_model import PagedGroup, PagedModel, PagedShard
from infinity.swap.policy import StagingPolicy


class DeviceAhead:
    """Keeps the next groups on their way: see [Note: Ahead on the device] in paged_model.py.

    bytes_max: what copies that nobody has asked for yet may take of the device's memory. look_ahead: called after each update
    that is run for one.
    """

    def __init__(
        self,
        paged: PagedModel,
        policy: StagingPolicy,
        look_ahead: Callable[[PagedGroup | None], None],
        *,
        bytes_max: int,
    ) -> None:
        self._paged, self._policy, self._look_ahead = paged, policy, look_ahead
        self._started: list[PagedGroup] = []
        self.bytes_max = bytes_max
        self.late = 0
        """How often the copies of a group, or those of it that stay in host memory, were not on their way yet when they were
        asked for."""

    def recover(self) -> None:
        """Nothing is on its way any more."""
        self._started = []

    def ask(self, shard: PagedShard) -> None:
        """A shard is about to be given out."""
        in_flight = shard.group.in_flight if shard.resident is None else shard.group.residents.in_flight
        self.late += in_flight is None

    def start(self, *, asked_for: PagedGroup | None, update: bool) -> None:
        """Start what comes next, as far as it is staged and fits, and let go of what doesn't come next any more.

        asked_for: the group whose shards are being given out, or were last. update: whether updates that wait for a group's
        gather may be run for it now.
        """
        soon = dict.fromkeys(self._soon())
        for group in self._started:
            if group not in soon and group is not asked_for:
                group.in_flight = None
                group.residents.drop_in_flight()
        self._started = []
        for group in soon:
            if not self._paged.start_ahead(group, partial(self._look_ahead, group), update=update):
                break
            self._started.append(group)

    def _soon(self) -> list[PagedGroup]:
        found, room = [], self.bytes_max
        for group in self._policy.next_gathers():
            nbytes = self._paged.compute_bytes(group)
            room -= nbytes
            if room < 0:
                break
            if nbytes:
                found.append(group)
        return found
