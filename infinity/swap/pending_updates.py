"""The updates that sub-groups wait for, and how one is run.

[Note: Updates that wait]
An optimizer step may leave the update of a sub-group for later. Until it runs, the sub-group counts as having the values that
the update will give it, and it runs before anybody reads them. That is when its group is gathered: its state is read instead of
its compute parameter, updated, and the new compute parameter goes from lease to lease, so that the gather needs no read of its
own; or when a range of it is read or written (checkpoints, state_dict, a look at a weight); or when the next step begins. What
the update needs (gradient, hyper-parameters, the number of the step) was fixed by the step, so the numbers are those of an
update at once.

The lease of a group that stays staged has the old compute parameters until then. So the update takes them from there and puts
the new ones there, and the rest of the state alone is read.

[Note: Updates in the backward]
Where nothing has to be known of all gradients before one is applied (no clipping, no accumulation, no loss scale), a group can
be updated as soon as its gradients are there, and they need no memory beyond that (but every fourth group's wait for the next
forward: [Note: Balance of the passes] in infinity/schedule/update_timing.py). Its compute parameters were read for its
backward and are staged still, as the trace knows that they are needed again; so the update reads the rest of the state. A group
of which a gradient is missing, or that was used in forward more than once so that more may come, is left to the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter

import torch

from infinity.aio import Lease
from infinity.schedule.readahead import in_turn
from infinity.schedule.update_timing import UpdateTiming
from infinity.swap.chunk import ChunkState
from infinity.swap.group import PagedGroup
from infinity.swap.health import ModelHealth
from infinity.swap.slots import Slots
from infinity.swap.speculation import Speculation
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup, SubGroupUpdate
from infinity.swap.timeline import measured


class PendingUpdates:
    """Which sub-groups wait for an update: nobody else says so, or changes it.

    Iterates over those that wait, in the order of the step.

    `stepped`: what the last step updates, done or not, in its order.
    """

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        sub_groups: Sequence[PagedSubGroup],
        slots: Slots,
        health: ModelHealth,
        stager: Stager,
    ) -> None:
        self._groups, self._sub_groups = groups, sub_groups
        self._slots, self._health, self._stager = slots, health, stager
        self.speculation = Speculation(stager)
        self._pending: dict[PagedSubGroup, SubGroupUpdate] = {}
        self._running: tuple[PagedSubGroup, torch.Tensor] | None = None
        """The sub-group whose update is running, and the ties that it had before."""
        self.stepped: tuple[PagedSubGroup, ...] = ()

    def __iter__(self) -> Iterator[PagedSubGroup]:
        return iter(self._pending)

    def __contains__(self, sub: object) -> bool:
        return sub in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    def of(self, group: PagedGroup) -> list[PagedSubGroup]:
        """The group's members that wait for an update."""
        return [sub for sub in group.members if sub in self._pending]

    def group_of(self, sub: PagedSubGroup) -> PagedGroup | None:
        """The group that gathers from the sub-group; None for one of resident shards."""
        return self._groups[sub.layout.space] if sub.layout.space < len(self._groups) else None

    # Nothing waits -> it waits.

    def defer(
        self, updates: Mapping[PagedSubGroup, SubGroupUpdate], accepted: Collection[PagedSubGroup] = frozenset()
    ) -> None:
        """These sub-groups are to be updated before anybody uses their values: see [Note: Updates that wait]; those `accepted`
        were.

        What is staged of a group is forgotten unless it is what the group has now, and stays where that is about to change; of
        a sub-group, only what the update can't use. No sub-group waits for another update.
        """
        assert not self._pending
        stager = self._stager
        for group in self._groups:
            waits = any(sub in updates for sub in group.members)
            if _is_staged_as_accepted(group, accepted) and (group.stays or not waits):
                group.end_gather(stager)
                if group.chunk is not None:
                    group.chunk.early = ()
            else:
                group.forget(stager)
        for sub in updates:
            if sub.gradient_extent is not None:  # read with an earlier gradient
                stager.drop(sub.chunk)
        self.stepped = tuple(updates)
        self._pending.update(updates)
        for group in self._groups:
            self.point(group)

    # It waits -> it runs -> nothing waits; or back, where an exception ends it.

    def catch_up(self, sub: PagedSubGroup) -> None:
        """Run the update that a sub-group waits for, if it does, where its group is not about to be gathered."""
        if sub not in self._pending:
            return
        group = self.group_of(sub)
        with self._home_of(group) as home:
            self.run(sub, into=home)
        if group is not None:
            self.point(group)

    def run(self, sub: PagedSubGroup, *, into: Lease | None = None) -> None:
        """Read what a sub-group waits to have updated, update it and write it; its new compute parameter also goes `into` its
        group's lease, where the old one is if the group stays.

        Raises IoError when the read failed. Whatever ends it before the write has begun, the sub-group still waits and
        nothing is lost: what was read is dropped, and read again; the caller is to drop what is `into`, too. Where a part of
        it stays in memory, which changes in place, the values are torn instead.
        """
        stager, group = self._stager, self.group_of(sub)
        if sub.rests_in_host:
            self._slots.let_be_copied(sub, sub.current_slot)
        if into is not None:
            assert group is not None and group.chunk is not None
            stager.wait_copied(group.chunk)  # what it holds changes in the update
        lease = stager.acquire(sub.chunk) if sub.moves else None
        try:
            with self._health.change("an optimizer step") if sub.rests_in_host else self._undo_on_error(sub):
                self._make(sub, self._pending[sub], lease, into, holds_old=group is not None and group.stays)
                with self._health.change("an optimizer step"):
                    self._running = None
                    del self._pending[sub]
                    if lease is not None:
                        self.write_and_point(sub)
        except BaseException:
            if sub.chunk.state is ChunkState.IN_USE:
                stager.release(sub.chunk, keep=False)
                stager.drop(sub.chunk)  # also where the device reads it: what is left there is half updated
            raise

    def run_all(self, sub_groups_ahead: int) -> None:
        """Run every update that is left, in a pipeline: k+1 is read, k updated, k-1 written.

        Reads `sub_groups_ahead` sub-groups ahead; the last writes go on in the background.
        Raises IoError when a transfer failed: where that was a read, the updates that were not run still wait.
        """
        moving, in_memory = [sub for sub in self if sub.moves], [sub for sub in self if not sub.moves]
        groups = [group for group in self._groups if self.of(group)]
        ahead = in_turn([sub.chunk for sub in moving], at_once=1 + sub_groups_ahead)
        self._stager.readahead.follow(ahead)
        done = 0
        try:
            for sub in _in_turn(moving, in_memory):
                ahead.pass_to(done)
                self._stager.readahead.fit()
                self._stager.want()
                done += sub.moves
                with self._home_of(self.group_of(sub)) as home:
                    self.run(sub, into=home)
        finally:
            for group in groups:
                self.point(group)

    @contextlib.contextmanager
    def _home_of(self, group: PagedGroup | None) -> Iterator[Lease | None]:
        """Around updates of members of a group that nobody gathers: the lease in which it stays. What is staged of another
        group is forgotten; after an exception, of any."""
        stager = self._stager
        if group is None or group.chunk is None or not group.stays:
            if group is not None:
                group.forget(stager)
            yield None
            return
        group.end_gather(stager)
        home = stager.acquire(group.chunk)
        try:
            yield home
            group.end_gather(stager)
        except BaseException:
            group.forget(stager)
            raise

    @contextlib.contextmanager
    def _undo_on_error(self, sub: PagedSubGroup) -> Iterator[None]:
        """Around an update of what is in a lease: until its write begins, an exception leaves the sub-group as it was."""
        self._running = (sub, sub.ties)
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        if self._running is not None:
            sub, ties = self._running
            sub.ties = ties
            self._running = None

    # In the backward, where nothing waits.

    def run_in_backward(
        self,
        group: PagedGroup,
        updates: Mapping[PagedSubGroup, SubGroupUpdate],
        after_each: Callable[[PagedSubGroup], None],
    ) -> None:
        """Update members of a group whose gradients came: to stay ([Note: Updates in the backward]), or in their other slot,
        for the step to accept ([Note: Speculative updates] in speculation.py).

        Where the masters need the group's compute parameters or the group stays, these are in its lease meanwhile. Afterwards
        that holds the new ones if the group stays; else it is forgotten. Raises IoError when a transfer failed. After any
        failure the values are torn, unless the updates are speculative.
        """
        assert group.timing.in_backward and not any(sub in self._pending for sub in updates)
        stager, speculative = self._stager, group.timing is UpdateTiming.SPECULATIVE
        run = self._run_speculative if speculative else self._run_applied
        with contextlib.nullcontext() if speculative else self._health.change("an update in the backward"):
            if group.cached is not None and not speculative:
                group.forget(stager)  # its compute parameters change where they lie
            chunk = group.renewed
            compute = stager.acquire(chunk) if chunk is not None else None
            stays = False
            try:
                if chunk is not None:
                    stager.wait_copied(chunk)  # what it holds changes in the updates
                for sub, update in updates.items():
                    run(sub, update, compute)
                    after_each(sub)
                stays = group.stays
            finally:
                if chunk is not None and stays:
                    chunk.early = tuple(sub.chunk for sub in updates) if speculative else ()
                    group.end_gather(stager)
                else:
                    group.forget(stager)
                self.point(group)

    def _run_applied(self, sub: PagedSubGroup, update: SubGroupUpdate, compute: Lease | None) -> None:
        if sub.rests_in_host:
            self._slots.let_be_copied(sub, sub.current_slot)
        if sub.moves:
            self._update_staged(sub, update, compute)
            self.write_and_point(sub)
            return
        self._make(sub, update, None, compute, holds_old=True)

    def _run_speculative(self, sub: PagedSubGroup, update: SubGroupUpdate, compute: Lease | None) -> None:
        with self._undo_on_error(sub):
            self._update_staged(sub, update, compute)
            ties = sub.ties
            self._undo()
        self.speculation.begin(sub, ties)  # first, as a write that fails discards it
        self._slots.write_other_slot(sub)

    def _update_staged(self, sub: PagedSubGroup, update: SubGroupUpdate, compute: Lease | None) -> None:
        """Update a sub-group in its lease, which is in use after it."""
        stager = self._stager
        lease = stager.acquire(sub.chunk)
        try:
            self._make(sub, update, lease, compute, holds_old=True)
        except BaseException:
            stager.release(sub.chunk, keep=False)
            stager.drop(sub.chunk)  # also where the device reads it: what is left there is half updated
            raise

    def _make(
        self, sub: PagedSubGroup, update: SubGroupUpdate, lease: Lease | None, compute: Lease | None, *, holds_old: bool
    ) -> None:
        """Update what is under `lease`; afterwards `compute`, the lease of its group, has its new compute parameters.

        `holds_old`: whether that has the old ones, which are taken from there where they complete the masters.
        """
        timeline = self._stager.timeline
        try:
            if compute is not None and holds_old and sub.gathers_from_nvme and sub.layout.split:
                start = sub.layout.start * sub.layout.compute_itemsize
                sub.staged = compute.view(sub.compute_dtype, start, sub.layout.numel)
            with measured(timeline, "update", sub.chunk.name):
                update(lease)  # PagedOptimizer._update, by `_updates_of`
            if compute is not None and sub.staged is None:
                with measured(timeline, "copy", sub.chunk.name):
                    _copy_to_group(sub, lease, compute)
        finally:
            sub.staged = None

    # What follows from the states.

    def write_and_point(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease. Its group is to be pointed to the new bytes before it is read again."""
        self._slots.write_current(sub)
        self._point_sub_group(sub)

    def point(self, group: PagedGroup) -> None:
        """From now on, staging the group's chunk fetches what is gathered of those members that don't wait for an update, and
        staging a member's chunk what its update will need."""
        for sub in group.members:
            self._point_sub_group(sub)
        group.point(self._pending)

    def moved(self, sub: PagedSubGroup) -> None:
        """The sub-group's values are in another slot: whatever reads it does so there."""
        group = self.group_of(sub)
        if group is None:
            self._point_sub_group(sub)
            return
        group.forget(self._stager)
        self.point(group)

    def point_all(self) -> None:
        """Whatever reads a sub-group reads what it needs now, where it is now."""
        for group in self._groups:
            self.point(group)
        for sub in self._sub_groups:
            self._point_sub_group(sub)

    def clear(self) -> None:
        """Nothing waits any more: the values are not whole any more, or gone, and what is set anew is not to be updated."""
        self._pending.clear()
        for group in self._groups:
            self.point(group)

    def recover(self) -> None:
        """An exception ended an update at whatever line: one that was running waits again, and none is speculative any more."""
        self._undo()
        self.speculation.discard_all()
        self.point_all()

    def _point_sub_group(self, sub: PagedSubGroup) -> None:
        group = self.group_of(sub)
        with_group = False
        if group is not None and group.chunk is not None:
            in_backward = group.timing.in_backward and self.speculation.is_due
            with_group = group.stays or (in_backward and sub not in self._pending)
        reads = sub.reads(compute=not with_group)
        if reads != sub.chunk.reads:
            if sub.chunk.state in (ChunkState.READING, ChunkState.STAGED):  # other bytes than these
                self._stager.drop(sub.chunk)
            sub.chunk.reads = reads


def _in_turn(moving: list[PagedSubGroup], in_memory: list[PagedSubGroup]) -> list[PagedSubGroup]:
    """All of them, those that rest in memory spread evenly: the drive reads and writes while they are updated."""
    placed = [((2 * k + 1) * len(in_memory), sub) for k, sub in enumerate(moving)]
    placed += [((2 * k + 1) * len(moving), sub) for k, sub in enumerate(in_memory)]
    return [sub for _, sub in sorted(placed, key=itemgetter(0))]


def _is_staged_as_accepted(group: PagedGroup, accepted: Collection[PagedSubGroup]) -> bool:
    """Whether what is staged of a group, if anything is, is what it has once these members' updates are accepted."""
    early = group.chunk.early if group.chunk is not None else ()
    return {*early} == {sub.chunk for sub in group.members if sub in accepted}


def _copy_to_group(sub: PagedSubGroup, lease: Lease | None, into: Lease) -> None:
    """Copy what is gathered of a sub-group, which is under `lease`, into the lease of its group."""
    name = sub.layout.gathered
    start = sub.layout.start * sub.layout.itemsize(name)
    into.view(sub.dtype(name), start, sub.layout.numel).copy_(sub.view(name, lease))
