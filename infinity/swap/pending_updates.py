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
forward: [Note: Balance of the passes] in infinity/schedule/scheme.py). Its compute parameters were read for its
backward and are staged still, as the trace knows that they are needed again; so the update reads the rest of the state. A group
of which a gradient is missing, or that was used in forward more than once so that more may come, is left to the step.

[Note: Speculative updates]
Where gradients are clipped, scaled or accumulated, what they are multiplied by is known only when the last of them has come. As
a rule it is what it was expected to be: the norm is below the clipping, nothing overflowed. So a group is updated in the
backward with the expected factor, from the slot that holds its values into the other one, and its gradients go on waiting. The
step accepts that, and the other slot is current from then on; or it discards it, and the update waits for its group's next use,
as if it had never been made early. Nothing of a discarded update is ever seen: the values are those of the slot that nobody
touched, and the new ties are kept here until then. So an exception, a failed write or a kill in between leaves the values of
the step before.

What can't be written to another slot is not updated early: what is in host memory changes where it is, and a gradient on
NVMe would be read once more. In a durable run the other slot is free, as the last step was committed before the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from infinity.aio import Lease
from infinity.schedule.readahead import in_turn
from infinity.schedule.scheme import SpeculationPolicy, UpdateTiming
from infinity.swap.chunk import Chunk, ChunkState
from infinity.swap.group import PagedGroup
from infinity.swap.health import ModelHealth
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup, Slots, SubGroupUpdate
from infinity.swap.timeline import measured


class Speculation:
    """What the backward of a step updates for the step to accept, and whether it should. Used by one thread at a time."""

    def __init__(self, stager: Stager) -> None:
        self.expected_scale: float | None = None
        """By what the step will probably multiply its gradients; None where this backward is not its last one."""
        self.is_due = True
        """Whether the next backward speculates; if not, state may be read ahead for the step. Changes in `accept` alone, after
        which all that reads a sub-group is pointed again."""
        self._stager = stager
        self._policy = SpeculationPolicy()
        self._inputs: dict[int, Any] = {}
        """By number of their shard: all that updates depend on, without the gradient and the state."""
        self._ties: dict[PagedSubGroup, torch.Tensor] = {}
        """Of each sub-group whose other slot holds its update: what the ties will be."""

    def __iter__(self) -> Iterator[PagedSubGroup]:
        return iter(self._ties)

    @property
    def promises(self) -> bool:
        """Whether an update in this backward will probably be accepted."""
        return self.expected_scale is not None and self._policy.speculates

    def may_update(self, sub: PagedSubGroup) -> bool:
        """Whether the backward updates the sub-group, whose other slot may be written to."""
        return sub.is_speculative and sub.committed_slot in (None, sub.current_slot)

    def note_inputs(self, inputs: Mapping[int, Any]) -> None:
        """Shards are about to be updated from these."""
        self._inputs |= inputs

    def begin(self, sub: PagedSubGroup, ties: torch.Tensor) -> None:
        """Its update is being written to the other slot, and has these ties."""
        self._ties[sub] = ties

    def discard(self, sub: PagedSubGroup) -> bool:
        """The update of a sub-group is void. Whether there was one."""
        return self._ties.pop(sub, None) is not None

    def discard_all(self) -> None:
        """All of them are void."""
        self._ties.clear()
        self._inputs.clear()

    def accept(self, inputs: Mapping[int, Any], grad_scale: float) -> set[PagedSubGroup]:
        """The sub-groups that were updated as the step would, from these inputs, which are updated now; all others are as
        before. Whatever reads them is to be pointed to their other slot, as `defer` does."""
        were_updated = bool(self._ties)
        for sub in [*self._ties]:
            shards = [piece.shard for piece in sub.layout.pieces if piece.shard in inputs]
            if not shards or any(self._inputs.get(shard) != inputs[shard] for shard in shards):
                self.discard(sub)
        accepted = {*self._ties}
        for sub, ties in self._ties.items():
            self._stager.drop(sub.chunk)  # read since, from the slot that was current
            sub.current_slot, sub.ties = 1 - sub.current_slot, ties
        self.discard_all()
        as_planned = bool(accepted) or not were_updated  # not where settings were changed since the backward
        self._policy.note(as_expected=grad_scale == self.expected_scale and as_planned)
        self.is_due = self._policy.speculates
        return accepted

    def note_skipped(self) -> None:
        """The step changes nothing."""
        self._policy.note(as_expected=False)


class PendingUpdates:
    """Which sub-groups wait for an update: nobody else says so, or changes it.

    `waiting`: those, in the order of the step. `stepped`: what the last step updates, done or not, in its order.
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
        self.waiting: dict[PagedSubGroup, SubGroupUpdate] = {}
        """The sub-groups that wait for an update, in the order of the step. Not to be changed from outside."""
        self._running: tuple[PagedSubGroup, torch.Tensor] | None = None
        """The sub-group whose update is running, and the ties that it had before."""
        self.stepped: tuple[PagedSubGroup, ...] = ()

    def of(self, group: PagedGroup) -> list[PagedSubGroup]:
        """The group's members that wait for an update."""
        return [sub for sub in group.members if sub in self.waiting] if self.waiting else []

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
        assert not self.waiting
        stager = self._stager
        for group in self._groups:
            waits = any(sub in updates for sub in group.members)
            if any(sub in updates for sub in group.resident_sub_groups):
                group.resident_delivery.forget()
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
        self.waiting.update(updates)
        for group in self._groups:
            self.point(group)

    # It waits -> it runs -> nothing waits; or back, where an exception ends it.

    def catch_up(self, sub: PagedSubGroup) -> None:
        """Run the update that a sub-group waits for, if it does, where its group is not about to be gathered."""
        if sub not in self.waiting:
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
            self._slots.wait_for_checkpoint_copy(sub, sub.current_slot)
        if into is not None:
            assert group is not None and group.chunk is not None
            stager.wait_copied(group.chunk)  # what it holds changes in the update
        lease = stager.acquire(sub.chunk) if sub.moves else None
        try:
            with self._health.change("an optimizer step") if sub.rests_in_host else self._restoring_ties(sub):
                self._update_in_lease(sub, self.waiting[sub], lease, into, holds_old=group is not None and group.stays)
                with self._health.change("an optimizer step"):
                    self._running = None
                    del self.waiting[sub]
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
        moving, in_memory = [sub for sub in self.waiting if sub.moves], [sub for sub in self.waiting if not sub.moves]
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
    def _restoring_ties(self, sub: PagedSubGroup) -> Iterator[None]:
        """Around an update of what is in a lease: until its write begins, an exception leaves the sub-group as it was."""
        self._running = (sub, sub.ties)
        try:
            yield
        except BaseException:
            self._restore_ties()
            raise

    def _restore_ties(self) -> None:
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
        *,
        first: bool,
        last: bool,
    ) -> None:
        """Update members of a group whose gradients came: to stay ([Note: Updates in the backward]), or in their other slot,
        for the step to accept ([Note: Speculative updates]). `first`, `last`: whether none of the group was updated before
        these in this backward, and none follows.

        Where the masters need the group's compute parameters or the group stays, these are in its lease meanwhile. Afterwards
        that holds the new ones if the group stays; else it is forgotten with the `last` ones. Raises IoError when a transfer
        failed. After any failure the values are torn, unless the updates are speculative.
        """
        assert group.timing.in_backward and self.waiting.keys().isdisjoint(updates)
        stager, speculative = self._stager, group.timing is UpdateTiming.SPECULATIVE
        run = self._run_speculative if speculative else self._run_applied
        with contextlib.nullcontext() if speculative else self._health.change("an update in the backward"):
            if group.cached is not None and not speculative:
                group.forget(stager)  # its compute parameters change where they lie
            early: tuple[Chunk, ...] = ()
            if group.chunk is not None and not first:  # it may hold what the updates before these have made
                early, group.chunk.early = group.chunk.early, ()
            chunk = group.chunk_to_update
            compute = stager.acquire(chunk) if chunk is not None else None
            stays = False
            try:
                if chunk is not None:
                    stager.wait_copied(chunk)  # what it holds changes in the updates
                for sub, update in updates.items():
                    run(sub, update, compute)
                    after_each(sub)
                stays = group.stays or not last
            finally:
                if chunk is not None and stays:
                    chunk.early = (*early, *(sub.chunk for sub in updates)) if speculative else ()
                    group.end_gather(stager)
                else:
                    group.forget(stager)
                if not (speculative and stays and not last):  # else nothing is to be read from elsewhere yet
                    self.point(group)

    def _run_applied(self, sub: PagedSubGroup, update: SubGroupUpdate, compute: Lease | None) -> None:
        if sub.rests_in_host:
            self._slots.wait_for_checkpoint_copy(sub, sub.current_slot)
        if sub.moves:
            self._update_staged(sub, update, compute)
            self.write_and_point(sub)
            return
        self._update_in_lease(sub, update, None, compute, holds_old=True)

    def _run_speculative(self, sub: PagedSubGroup, update: SubGroupUpdate, compute: Lease | None) -> None:
        with self._restoring_ties(sub):
            self._update_staged(sub, update, compute)
            ties = sub.ties
            self._restore_ties()  # until the step accepts, its values are the old ones
        self.speculation.begin(sub, ties)  # first, as a write that fails discards it
        self._slots.write_other_slot(sub)

    def _update_staged(self, sub: PagedSubGroup, update: SubGroupUpdate, compute: Lease | None) -> None:
        """Update a sub-group in its lease, which is in use after it."""
        stager = self._stager
        lease = stager.acquire(sub.chunk)
        try:
            self._update_in_lease(sub, update, lease, compute, holds_old=True)
        except BaseException:
            stager.release(sub.chunk, keep=False)
            stager.drop(sub.chunk)  # also where the device reads it: what is left there is half updated
            raise

    def _update_in_lease(
        self, sub: PagedSubGroup, update: SubGroupUpdate, lease: Lease | None, compute: Lease | None, *, holds_old: bool
    ) -> None:
        """Update what is under `lease`; afterwards `compute`, the lease of its group, has its new compute parameters.

        `holds_old`: whether that has the old ones, which are taken from there where they complete the masters.
        """
        timeline = self._stager.timeline
        try:
            if compute is not None and holds_old and sub.gathers_from_nvme and sub.layout.split:
                sub.staged = compute.view(sub.compute_dtype, sub.layout.gathered_start, sub.layout.numel)
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
        self._point_sub_group(sub, self.group_of(sub))

    def point(self, group: PagedGroup) -> None:
        """From now on, staging the group's chunk fetches what is gathered of those members that don't wait for an update, and
        staging a member's chunk what its update will need."""
        for sub in group.members:
            self._point_sub_group(sub, group)
        group.point(self.waiting)

    def moved(self, sub: PagedSubGroup) -> None:
        """The sub-group's values are in another slot: whatever reads it does so there."""
        group = self.group_of(sub)
        if group is None:
            self._point_sub_group(sub, None)
            return
        group.forget(self._stager)
        self.point(group)

    def point_all(self) -> None:
        """Whatever reads a sub-group reads what it needs now, where it is now."""
        for sub in self._sub_groups:
            self._point_sub_group(sub, self.group_of(sub))
        for group in self._groups:
            group.point(self.waiting)

    def clear(self) -> None:
        """Nothing waits any more: the values are not whole any more, or gone, and what is set anew is not to be updated."""
        self.waiting.clear()
        for group in self._groups:
            self.point(group)

    def recover(self) -> None:
        """An exception ended an update at whatever line: one that was running waits again, and none is speculative any more."""
        self._restore_ties()
        self.speculation.discard_all()
        self.point_all()

    def _point_sub_group(self, sub: PagedSubGroup, group: PagedGroup | None) -> None:
        with_group = False
        if group is not None and group.chunk is not None:
            speculates = sub.is_speculative and self.speculation.is_due
            in_backward = group.timing is UpdateTiming.BACKWARD or speculates
            with_group = group.stays or (in_backward and sub not in self.waiting)
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
    into.view(sub.dtype(name), sub.layout.gathered_start, sub.layout.numel).copy_(sub.view(name, lease))
