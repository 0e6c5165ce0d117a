"""The parameter lap: from the recorded trace, over the drive and the device, to FSDP2's gather, and back.

Read top-down: FSDP2 gathers a group inside `gathering`, and takes each shard from its delivery there. Used by one
thread at a time. infinity/swap/README.md follows one shard through the lap.

[Note: Ahead on the device]
After each gather, the lap starts to copy the next groups to a device with memory of its own, if they are staged, in one
piece per group. The chunk stays staged until the gather, and its copy event says when the device has the bytes. Code
that is about to change the bytes drops the group, together with its copy on the device. An update that waits only for
the gather, with all of its inputs staged, runs at that time too: the host updates one group while the device computes
the one before. Compute parameters that stay in host memory are copied with their group, in a piece of their own, which
is dropped before one of them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity.errors import InfinityError
from infinity.fsdp2.sharding import in_backward
from infinity.swap.group import PagedGroup
from infinity.swap.paged_model import PagedModel
from infinity.swap.policy import StagingPolicy
from infinity.swap.stager import ChunkState
from infinity.swap.timeline import measured


class ParameterLap:
    """Moves the compute parameters of one model.

    policy: decides what to stage. ahead: decides which groups go to the device before their gather, if the device has
    memory of its own. entered: guards everything that moves bytes.
    """

    def __init__(
        self,
        paged: PagedModel,
        policy: StagingPolicy,
        ahead: DeviceAhead | None,
        entered: Callable[..., contextlib.AbstractContextManager[None]],
    ) -> None:
        self._paged, self._policy, self._entered = paged, policy, entered
        self._stager = paged.stager
        self.ahead = ahead
        self._experts: list[PagedGroup] = []
        """Groups that a router has chosen and that are not gathered yet."""

    @contextlib.contextmanager
    def gathering(self, group: PagedGroup, *, training: bool, dtype: torch.dtype) -> Iterator[None]:
        """Run the block with a group's compute parameters on the device; FSDP2 copies them in it.

        `training`: True if a module in training mode asks. `dtype`: of the gather. Raises InfinityError if the values
        are torn or uninitialised, or were paged for another dtype; IoError if a transfer failed.
        """
        backward = in_backward()
        with self._entered(gathers=True), measured(self._stager.timeline, "gather", group.name):
            self._check(group, dtype, backward)
            self._policy.use(group, backward=backward, module_trains=training)
            self._begin(group)
            yield
            self._release(group, backward)
            self.start_ahead()  # only now: small copies of this group must not wait behind large ones of the next

    def look_ahead(self, using: PagedGroup | None = None) -> None:
        """Start the reads of what comes next. `using`: the group whose members are being updated."""
        self._policy.look_ahead(using)
        self._stager.want()

    def read_experts(self, groups: Sequence[PagedGroup]) -> None:
        """Start to read the experts that are gathered next, in this order, while there is room."""
        for group in groups:
            if group.chunk is not None:
                self._stager.readahead.staged.renew(group.chunk)  # so that none of them is evicted for another
        self._experts = [*groups]
        self._read_next_experts()

    def _read_next_experts(self) -> None:
        for group in self._experts:
            chunk = group.chunk
            if chunk is not None and chunk.state is ChunkState.ON_NVME and not self._stager.prefetch(chunk):
                break

    def start_ahead(self, *, update: bool = True) -> None:
        """Start to copy the next groups to the device, as far as they are staged and fit; drop copies no longer next.
        `update`: run updates that wait for the gather of such a group now."""
        if self.ahead is None:
            return
        for group in self.ahead.turn_to_next():
            if not self._start_ahead(group, update=update):
                break
            self.ahead.started.append(group)

    def recover(self) -> None:
        """Recover from an exception that interrupted a pass; no group is in use."""
        self._experts = []
        if self.ahead is not None:
            self.ahead.started = []

    # The stages of a gather.

    def _begin(self, group: PagedGroup) -> None:
        """Put all compute parameters of a group on the device."""
        stager = self._stager
        if group.chunk is None:
            self.look_ahead(group)  # it has nothing to read, but its updates may have to run
        for sub in group.resident_sub_groups:
            self._paged.updates.catch_up(sub)
        self._stage(group)
        if group.chunk is not None:
            self.look_ahead()
        if group in self._experts:
            self._experts = self._experts[self._experts.index(group) + 1 :]
            self._read_next_experts()
        with measured(stager.timeline, "copy", group.name) if stager.device.is_discrete else contextlib.nullcontext():
            late = group.start_h2d(stager.device)
        if self.ahead is not None:
            self.ahead.late += late

    def _check(self, group: PagedGroup, dtype: torch.dtype, backward: bool) -> None:
        if backward:
            self._paged.health.check_not_torn()
        else:
            self._paged.health.check_whole()
        if dtype != self._paged.compute_dtype:
            raise InfinityError(
                f"group {group.name} is gathered in {dtype}, but was paged for {self._paged.compute_dtype}"
            )
        for shard in self._paged.shards[group.shards.start : group.shards.stop]:
            if not shard.filled:
                raise InfinityError(
                    f"parameter {shard.name} is uninitialised: load or initialise it before the first forward"
                )

    def _stage(self, group: PagedGroup) -> None:
        """Read the group's compute parameters into its chunk's lease, bring the chunk into use, and run the members'
        waiting updates. Compute parameters in the host cache are only updated."""
        updates, chunk, stager = self._paged.updates, group.chunk, self._stager
        waiting = updates.of(group)
        lease = stager.acquire(chunk) if chunk is not None else None
        try:
            for sub in waiting:
                updates.run(sub, into=lease)
                self.look_ahead(group)
        except BaseException:
            if chunk is not None:
                stager.release(chunk, keep=False)
            raise
        finally:
            if waiting:
                updates.point(group)

    def _release(self, group: PagedGroup, backward: bool) -> None:
        """End a gather: FSDP2 has copied everything."""
        group.delivery.end()
        group.resident_delivery.end()
        if group.in_use:
            assert group.chunk is not None
            may_come = group.is_routed or (group.is_frozen and self._policy.is_first_evaluation)
            stays = backward and self._policy.keep_for_update(group)
            keep = may_come or stays or self._stager.readahead.needed(group.chunk) is not None
            self._stager.release(group.chunk, keep=keep, copy_event=group.delivery.copy_event)
        if group.cached is None:  # a cached group keeps the event: see PagedGroup.forget
            group.delivery.copy_event = None

    # Ahead of a gather.

    def _start_ahead(self, group: PagedGroup, *, update: bool) -> bool:
        """Start to copy a group's compute parameters to the device if no drive must be waited for. Returns True if they
        are on their way."""
        updates, stager = self._paged.updates, self._stager
        fetched = bool(group.fetched_bytes) and group.delivery.in_flight is None
        resident = bool(group.resident_bytes) and group.resident_delivery.in_flight is None
        waiting_resident = [sub for sub in group.resident_sub_groups if resident and sub in updates.waiting]
        waiting = waiting_resident + (updates.of(group) if fetched else [])
        needed = [sub.chunk for sub in waiting if sub.moves]
        if fetched and group.chunk is not None:
            needed.append(group.chunk)
        if (waiting and not update) or not all(stager.is_ready(chunk) for chunk in needed):
            return False
        for sub in waiting_resident:
            updates.catch_up(sub)
        if fetched:
            self._stage(group)
        try:
            group.start_h2d(stager.device)
        finally:
            group.return_lease(stager)
        return True


class DeviceAhead:
    """Decides which groups go to the device ahead of their gather, and records those on their way. Moves nothing.

    bytes_max: device memory for compute parameters that FSDP2 has not asked for yet.
    """

    def __init__(self, policy: StagingPolicy, *, bytes_max: int) -> None:
        self._policy = policy
        self.bytes_max = bytes_max
        self.started: list[PagedGroup] = []
        """The groups that were started, soonest needed first."""
        self.late = 0
        """Number of deliveries that had not been started when FSDP2 asked for them."""

    def turn_to_next(self) -> list[PagedGroup]:
        """Return the groups that come next and fit, soonest first. Drops started copies of other groups."""
        coming, room = [], self.bytes_max
        for group in self._policy.next_gathers():
            room -= group.compute_bytes
            if room < 0:
                break
            if group.compute_bytes:
                coming.append(group)
        for group in self.started:
            if group not in coming:
                group.delivery.end()
                group.resident_delivery.end()
        self.started = []
        return coming
