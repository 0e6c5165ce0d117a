"""The parameter lap: from a recorded trace over the drive and the device into FSDP2's hands, and back.

Reads top-down: `gather` is what FSDP2 sets off for each shard, `gathered` what it says when it has copied one. Used by one
thread at a time; see infinity/swap/README.md for a lap by example.

[Note: When a group has been copied]
FSDP2 asks for all shards of a group, one after the other, and copies them at once into the buffer it gathers from; only then
does it turn to another group. So when a shard of another group is asked for, the one before has been copied, and its lease goes
back: not only when FSDP2 reports it gathered, which it does when the group is used. However many groups are prefetched
(`set_modules_to_forward_prefetch` takes any list), no more than two leases are in use. On a single rank FSDP2 copies when it
uses, one group at a time, and reports at once.

[Note: Ahead on the device]
Each time a group was gathered, the lap starts to copy the compute parameters of the next groups to a device that has memory of
its own, one piece per group, if they are staged. Until the gather the chunk stays staged, and its copy event
says when the device has the bytes; whatever is about to change them forgets the group, and what is on the device with it. An
update that only waits for the gather, with everything that it reads staged, is run at that moment too: the host updates one
group while the device computes the one before it. Compute parameters that stay in host memory go with those of their group, in
one piece of their own; whatever is about to change one of them takes these back.

"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from infinity.errors import InfinityError
from infinity.fsdp2.sharding import in_backward
from infinity.swap.chunk import ChunkState
from infinity.swap.group import PagedGroup
from infinity.swap.paged_model import PagedModel
from infinity.swap.policy import StagingPolicy
from infinity.swap.shard import PagedShard
from infinity.swap.timeline import measured


class ParameterLap:
    """Moves the compute parameters of one model.

    policy: what to stage when. ahead: which groups go to the device before they are gathered, where that has memory of its
    own.
    entered: around all that moves something. alone: whether the model is sharded over one rank, on which FSDP2 gathers a group
    as soon as it has it.
    """

    def __init__(
        self,
        paged: PagedModel,
        policy: StagingPolicy,
        ahead: DeviceAhead | None,
        entered: Callable[..., contextlib.AbstractContextManager[None]],
        *,
        alone: bool,
    ) -> None:
        self._paged, self._policy, self.entered, self._alone = paged, policy, entered, alone
        self._stager = paged.stager
        self.ahead = ahead
        self._asked: PagedGroup | None = None
        """The group whose shards FSDP2 asks for, or asked for last."""
        self._experts: list[PagedGroup] = []
        """Those that a router has chosen, and that are still to be gathered."""

    def gather(self, shard: PagedShard, *, training: bool, dtype: torch.dtype) -> torch.Tensor:
        """FSDP2 asks for a shard: the bytes (1-D) on the device among which its compute parameter is, until its group is
        gathered.

        `training`: whether a module in training mode asks. `dtype`: what the model is gathered in. Raises InfinityError when
        the values are torn, were never given, or are asked for in another dtype; IoError when a transfer failed.
        """
        delivery = shard.delivery
        if (piece := delivery.give_more(shard.index)) is not None:
            return piece
        timeline = self._stager.timeline
        noted = timeline.gathering(shard.group.name) if timeline is not None else contextlib.nullcontext()
        with self.entered(gathers=True), noted:
            self._begin(shard, training, dtype)
            return delivery.give(shard.index)

    def gathered(self, shard: PagedShard) -> None:
        """FSDP2 has copied a shard. The group's lease goes back with its last one, or earlier."""
        timeline = self._stager.timeline
        if timeline is not None:
            timeline.gathered(shard.group.name, at_once=self._alone)
        group, delivery = shard.group, shard.group.delivery
        if shard.resident is None:
            last = delivery.given == {shard.index}
        else:
            last = not delivery.given and shard.index == group.shards[-1]
        if not last:
            delivery.given.discard(shard.index)
            return
        with self.entered():
            if shard.resident is None:
                delivery.given.clear()
                self._release(group)
            self.start_ahead()  # not before: small copies of this group would stand behind large ones of the next

    def look_ahead(self, using: PagedGroup | None = None) -> None:
        """Start the reads for what comes next; `using`: the group whose members are being updated now."""
        self._policy.look_ahead(using)
        self._stager.want()

    def read_experts(self, groups: Sequence[PagedGroup]) -> None:
        """These experts are gathered next, in this order: start to read those that are not staged, while there is room."""
        for group in groups:
            if group.chunk is not None:
                self._stager.readahead.staged.renew(group.chunk)  # so that none of them leaves for another
        self._experts = [*groups]
        self._read_next_experts()

    def _read_next_experts(self) -> None:
        for group in self._experts:
            chunk = group.chunk
            if chunk is not None and chunk.state is ChunkState.ON_NVME and not self._stager.prefetch(chunk):
                break

    def start_ahead(self, *, update: bool = True) -> None:
        """Start what comes next on its way to the device, as far as it is staged and fits, and let go of what doesn't come next
        any more. `update`: whether updates that wait for a group's gather may be run for it now."""
        if self.ahead is None:
            return
        for group in self.ahead.turn_to_next(asked_for=self._asked):
            if not self._start_ahead(group, update=update):
                break
            self.ahead.started.append(group)

    def release_copied(self) -> None:
        """The lease of the group that was asked for last goes back, if FSDP2 has copied all of it."""
        group = self._asked
        if group is not None and group.delivery.is_given:
            self._release(group)
            group.delivery.given.clear()

    def recover(self) -> None:
        """An exception ended a pass; the groups rest."""
        self._asked = None
        self._experts = []
        if self.ahead is not None:
            self.ahead.recover()

    # The stages of a gather.

    def _begin(self, shard: PagedShard, training: bool, dtype: torch.dtype) -> None:
        """FSDP2 asks for the first shard of its delivery: all of them are on the device after this."""
        group, delivery, stager = shard.group, shard.delivery, self._stager
        self._check(shard, dtype)
        if group.chunk is None and shard.index == group.shards.start:
            # Nothing of it is to be read, but perhaps updates are to be run, and it is to be copied.
            self._policy.use(group, module_trains=training)
            self.look_ahead(group)
        if shard.resident is not None:
            self._update_resident(group)
        else:
            self._turn_to(group, training)
        if self.ahead is not None:
            self.ahead.late += delivery.in_flight is None
        with measured(stager.timeline if stager.device.is_discrete else None, "copy", group.name):
            if delivery.in_flight is None:
                if shard.resident is not None:
                    group.start_resident_h2d(stager.device)
                else:
                    group.start_h2d(stager.device)
            delivery.arrive()

    def _check(self, asked: PagedShard, dtype: torch.dtype) -> None:
        if in_backward():
            self._paged.health.check_not_torn()
        else:
            self._paged.health.check_whole()
        if dtype != self._paged.compute_dtype:
            raise InfinityError(f"{asked.name} is gathered in {dtype}, but was paged for {self._paged.compute_dtype}")
        shards = asked.group.shards
        for shard in self._paged.shards[shards.start : shards.stop]:
            if not shard.filled:
                raise InfinityError(
                    f"{shard.name} was never given values: load or initialise it before the first forward"
                )

    def _turn_to(self, group: PagedGroup, training: bool) -> None:
        """The group's chunk is in use after this."""
        if self._asked is not group:
            self.release_copied()
            self._asked = group
        if group.chunk is None:
            self._stage(group)
        elif not group.delivery.given and not group.in_use:
            self._update_resident(group)
            self._policy.use(group, module_trains=training)
            self._stage(group)
            self.look_ahead()
            if group in self._experts:
                self._experts = self._experts[self._experts.index(group) + 1 :]
                self._read_next_experts()

    def _update_resident(self, group: PagedGroup) -> None:
        """Compute parameters of the group that stay in host memory are up to date after this."""
        for sub in group.resident_sub_groups:
            self._paged.updates.catch_up(sub)

    def _stage(self, group: PagedGroup) -> None:
        """Bring the group's compute parameters into its chunk's lease, and the chunk in use; or up to date where they are
        cached. Members that wait for an update get it now."""
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

    def _release(self, group: PagedGroup) -> None:
        if group.in_use:
            assert group.chunk is not None
            may_come = group.is_routed or (group.is_frozen and self._policy.is_first_evaluation)
            stays = self._policy.keep_for_update(group)
            keep = may_come or stays or self._stager.readahead.needed(group.chunk) is not None
            self._stager.release(group.chunk, keep=keep, copy_event=group.delivery.copy_event)
        if group.cached is None:  # what is cached must have been copied before it is stepped: see PagedGroup.forget
            group.delivery.copy_event = None

    # Ahead of a gather.

    def _start_ahead(self, group: PagedGroup, *, update: bool) -> bool:
        """Begin to copy a group's compute parameters to the device, if that takes no waiting for the drive. Whether they are on
        their way."""
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
                if group.in_use:
                    assert group.chunk is not None
                    stager.release(group.chunk, keep=True, copy_event=group.delivery.copy_event)
        if resident:
            group.start_resident_h2d(stager.device)
        return True


class DeviceAhead:
    """Which groups go to the device ahead of their gather: those on their way, and those that come next. Moves nothing.

    bytes_max: what compute parameters that FSDP2 has not asked for yet may take of the device's memory.
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
                group.resident_delivery.end()
        self.started = []
        return coming
