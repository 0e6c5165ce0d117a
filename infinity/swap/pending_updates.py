"""The updates that sub-groups wait for, and how one is run.

[Note: Updates that wait]
An optimizer step may defer the update of a sub-group. The sub-group then counts as having its new values already, so
the update runs before any read of them: when its group is gathered, when a range of it is read or written (checkpoints,
state_dict, reading a weight), or when the next step begins. A gather then reads and updates the state instead of the
compute parameter. The new compute parameter goes from lease to lease, without a read of its own. The step has fixed
every input of the update (gradient, hyper-parameters, step number), so results are those of an immediate update.

If a group stays staged, its lease has the old compute parameters until then. The update takes them from there and puts
the new ones there, and only the remaining state is read.

[Note: Updates in the backward]
Without clipping, accumulation and loss scaling, an update depends on no other gradient. A group is then updated as soon
as its gradients have arrived, and these need no memory afterwards. Every fourth group waits for the next forward
instead: [Note: Balance of the passes] in infinity/schedule/scheme.py. The group's compute parameters were read for its
backward and are still staged, because the trace expects this use. So the update reads only the other state. A group is
left to the step if a gradient is missing, or if it was used in forward more than once and more may come.

[Note: Speculative updates]
With clipping, loss scaling or accumulation, the factor of a gradient is known only after the last gradient. It is
usually the expected one: the norm is below the clipping threshold and nothing overflowed. So the backward updates a
group with the expected factor, from the slot that holds its values into the other slot, and the gradients keep waiting.
The step accepts the update, which makes the other slot current. Or it discards it, and the update waits for the group's
next use, as if it had never run early. A discarded update is never visible: the slot with the values was not written,
and the new ties are kept here until the step. So an exception, a failed write or a kill leaves the last step's values.

Sub-groups whose update can't be written to another slot are not updated early: fields in host memory change in place,
and a gradient on NVMe would be read twice. In a durable run the other slot is free, as the last step is committed.
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
from infinity.swap.group import PagedGroup
from infinity.swap.health import ModelHealth
from infinity.swap.stager import Chunk, ChunkState, Stager
from infinity.swap.sub_group import PagedSubGroup, Slots, SubGroupUpdate
from infinity.swap.timeline import measured


class Speculation:
    """The speculative updates of one backward, and whether to make them. Used by one thread at a time."""

    def __init__(self, stager: Stager) -> None:
        self.expected_scale: float | None = None
        """The factor by which the step will probably multiply gradients; None if this backward is not its last one."""
        self.is_due = True
        """True if the next backward speculates; if False, state may be read ahead for the step. Changes only in
        `accept`, after which the reads of all sub-groups are set again."""
        self._stager = stager
        self._policy = SpeculationPolicy()
        self.inputs: dict[int, Any] = {}
        """By shard number: everything that an update depends on, except the gradient and the state."""
        self._ties: dict[PagedSubGroup, torch.Tensor] = {}
        """By sub-group whose other slot holds its update: the new ties."""

    def __iter__(self) -> Iterator[PagedSubGroup]:
        return iter(self._ties)

    @property
    def promises(self) -> bool:
        """True if the step will probably accept updates of this backward."""
        return self.expected_scale is not None and self._policy.speculates

    def may_update(self, sub: PagedSubGroup) -> bool:
        """Return True if the backward updates the sub-group and its other slot may be written."""
        return sub.is_speculative and sub.committed_slot in (None, sub.current_slot)

    def begin(self, sub: PagedSubGroup, ties: torch.Tensor) -> None:
        """Record an update that is being written to the other slot, and its new ties."""
        self._ties[sub] = ties

    def discard(self, sub: PagedSubGroup) -> bool:
        """Discard the update of a sub-group. Returns False if there was none."""
        return self._ties.pop(sub, None) is not None

    def discard_all(self) -> None:
        self._ties.clear()
        self.inputs.clear()

    def accept(self, inputs: Mapping[int, Any], grad_scale: float) -> set[PagedSubGroup]:
        """Accept the updates that were made with the step's inputs, and discard all others. Returns the updated
        sub-groups. Their reads must then be pointed to the other slot, as `defer` does."""
        were_updated = bool(self._ties)
        for sub in [*self._ties]:
            shards = [piece.shard for piece in sub.layout.pieces]
            if inputs.keys().isdisjoint(shards) or any(self.inputs.get(n) != inputs.get(n) for n in shards):
                self.discard(sub)
        accepted = {*self._ties}
        for sub, ties in self._ties.items():
            self._stager.drop(sub.chunk)  # staged from the old slot
            sub.current_slot, sub.ties = 1 - sub.current_slot, ties
        self.discard_all()
        as_planned = bool(accepted) or not were_updated  # False if settings were changed since the backward
        self._policy.note(as_expected=grad_scale == self.expected_scale and as_planned)
        self.is_due = self._policy.speculates
        return accepted

    def note_skipped(self) -> None:
        """Record a step that changes nothing."""
        self._policy.note(as_expected=False)


class PendingUpdates:
    """The only record of which sub-groups wait for an update.

    `waiting`: those, in the order of the step. `stepped`: all that the last step updates, in its order, done or not.
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
        """The sub-groups that wait for an update, in the order of the step. Read-only outside this class."""
        self._running: tuple[PagedSubGroup, torch.Tensor] | None = None
        """The sub-group whose update is running, and its old ties."""
        self.stepped: tuple[PagedSubGroup, ...] = ()

    def of(self, group: PagedGroup) -> list[PagedSubGroup]:
        """Return the group's members that wait for an update."""
        return [sub for sub in group.members if sub in self.waiting] if self.waiting else []

    def group_of(self, sub: PagedSubGroup) -> PagedGroup | None:
        """Return the group that gathers from the sub-group; None for a sub-group of resident shards."""
        return self._groups[sub.layout.space] if sub.layout.space < len(self._groups) else None

    # Transition: idle -> waiting.

    def defer(
        self, updates: Mapping[PagedSubGroup, SubGroupUpdate], accepted: Collection[PagedSubGroup] = frozenset()
    ) -> None:
        """Make these sub-groups wait for their updates: see [Note: Updates that wait]. `accepted`: already updated.

        Drops what is staged of a group, unless that is current and, where members wait, the group stays. Of a
        sub-group, drops only what its update can't use. No sub-group may be waiting.
        """
        assert not self.waiting
        stager = self._stager
        for group in self._groups:
            waits = not updates.keys().isdisjoint(group.members)
            if not updates.keys().isdisjoint(group.resident_sub_groups):
                group.resident_delivery.forget()
            staged = {*group.chunk.early} if group.chunk is not None else set()
            is_current = staged == {sub.chunk for sub in group.members if sub in accepted}
            if is_current and (group.stays or not waits):
                group.end_use(stager)
                if group.chunk is not None:
                    group.chunk.early = ()
            else:
                group.forget(stager)
        for sub in updates:
            if sub.gradient_extent is not None:  # staged with an earlier gradient
                stager.drop(sub.chunk)
        self.stepped = tuple(updates)
        self.waiting.update(updates)
        for group in self._groups:
            self.point(group)

    # Transitions: waiting -> running -> idle, or back to waiting after an exception.

    def catch_up(self, sub: PagedSubGroup) -> None:
        """Run the update that a sub-group waits for, if any, when its group is not about to be gathered."""
        if sub not in self.waiting:
            return
        group = self.group_of(sub)
        with self._home_of(group) as home:
            self.run(sub, into=home)
        if group is not None:
            self.point(group)

    def run(self, sub: PagedSubGroup, *, into: Lease | None = None) -> None:
        """Read the state of a waiting sub-group, update it and start writing it.

        `into`: the lease of its group, which also gets the new compute parameter; it holds the old one if the group
        stays. Raises IoError if the read failed. After any exception before the write, the sub-group still waits and
        nothing is lost; the caller must drop the contents of `into`. Exception: if a part of it is in host memory,
        which changes in place, the values are torn.
        """
        stager, group = self._stager, self.group_of(sub)
        if sub.rests_in_host:
            self._slots.wait_for_checkpoint_copy(sub, sub.current_slot)
        if into is not None:
            assert group is not None and group.chunk is not None
            stager.wait_copied(group.chunk)  # the update changes its contents
        lease = stager.acquire(sub.chunk) if sub.moves else None
        try:
            with self._health.change("an optimizer step") if sub.rests_in_host else self._restoring_ties(sub):
                self._update_in_lease(sub, self.waiting[sub], lease, into, holds_old=group is not None and group.stays)
                with self._health.change("an optimizer step"):
                    self._running = None
                    del self.waiting[sub]
                    stager.readahead.following.done(sub.unit)
                    if lease is not None:
                        self.write_and_point(sub)
        except BaseException:
            if sub.chunk.state is ChunkState.IN_USE:
                stager.release(sub.chunk, keep=False)
                stager.drop(sub.chunk)  # also ends COPYING_TO_DEVICE: the lease is half updated
            raise

    def run_all(self, sub_groups_ahead: int) -> None:
        """Run every waiting update in a pipeline: read k+1, update k, write k-1.

        Reads `sub_groups_ahead` sub-groups ahead; the last writes continue in the background. Raises IoError if a
        transfer failed; after a failed read, the updates that have not run still wait.
        """
        if not self.waiting:
            return
        moving, in_memory = [sub for sub in self.waiting if sub.moves], [sub for sub in self.waiting if not sub.moves]
        groups = [group for group in self._groups if self.of(group)]
        ahead = in_turn([sub.chunk for sub in moving], at_once=1 + sub_groups_ahead)
        self._stager.readahead.follow(ahead)
        done = 0
        try:
            for sub in _in_turn(moving, in_memory):
                ahead.advance(done)
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
        """Hold the lease in which a group stays, during updates of its members outside a gather. Drops the staged bytes
        of a group that doesn't stay; after an exception, of any group."""
        stager = self._stager
        if group is None or group.chunk is None or not group.stays:
            if group is not None:
                group.forget(stager)
            yield None
            return
        group.end_use(stager)
        home = stager.acquire(group.chunk)
        try:
            yield home
            group.end_use(stager)
        except BaseException:
            group.forget(stager)
            raise

    @contextlib.contextmanager
    def _restoring_ties(self, sub: PagedSubGroup) -> Iterator[None]:
        """Restore the ties of a sub-group if an exception interrupts its update before the write begins."""
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

    # In the backward, while no sub-group of the group waits.

    def run_in_backward(
        self,
        group: PagedGroup,
        updates: Mapping[PagedSubGroup, SubGroupUpdate],
        after_each: Callable[[PagedSubGroup], None],
        *,
        first: bool,
        last: bool,
    ) -> None:
        """Update members of a group whose gradients have arrived, for good ([Note: Updates in the backward]) or in
        their other slot, for the step to accept ([Note: Speculative updates]). `first`, `last`: True if this backward
        has updated no member of the group before these, and updates none after them.

        During the updates the group's compute parameters are in its lease if the masters need them or the group stays.
        If the group stays, the lease keeps the new ones; else it is dropped after the `last` members. Raises IoError if
        a transfer failed. Any failure tears the values, unless the updates are speculative.
        """
        assert group.timing.in_backward and self.waiting.keys().isdisjoint(updates)
        stager, speculative = self._stager, group.timing is UpdateTiming.SPECULATIVE
        run = self._run_speculative if speculative else self._run_applied
        with contextlib.nullcontext() if speculative else self._health.change("an update in the backward"):
            if group.cached is not None and not speculative:
                group.forget(stager)  # its cached compute parameters change in place
            early: tuple[Chunk, ...] = ()
            if group.chunk is not None and not first:  # its lease may hold the results of the earlier updates
                early, group.chunk.early = group.chunk.early, ()
            chunk = group.chunk_to_update
            compute = stager.acquire(chunk) if chunk is not None else None
            stays = False
            try:
                if chunk is not None:
                    stager.wait_copied(chunk)  # the updates change its contents
                for sub, update in updates.items():
                    run(sub, update, compute)
                    after_each(sub)
                stays = group.stays or not last
            finally:
                if chunk is not None and stays:
                    chunk.early = (*early, *[sub.chunk for sub in updates]) if speculative else ()
                    group.end_use(stager)
                else:
                    group.forget(stager)
                if not speculative:  # the reads change only when the step accepts the updates
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
            self._restore_ties()  # the old values count until the step accepts
        self.speculation.begin(sub, ties)  # before the write, because a failed write discards it
        self._slots.write_other_slot(sub)

    def _update_staged(self, sub: PagedSubGroup, update: SubGroupUpdate, compute: Lease | None) -> None:
        """Update a sub-group in its lease, which stays in use."""
        stager = self._stager
        lease = stager.acquire(sub.chunk)
        try:
            self._update_in_lease(sub, update, lease, compute, holds_old=True)
        except BaseException:
            stager.release(sub.chunk, keep=False)
            stager.drop(sub.chunk)  # also ends COPYING_TO_DEVICE: the lease is half updated
            raise

    def _update_in_lease(
        self, sub: PagedSubGroup, update: SubGroupUpdate, lease: Lease | None, compute: Lease | None, *, holds_old: bool
    ) -> None:
        """Update the bytes in `lease`, and put the new compute parameters into `compute`, the lease of the group.

        `holds_old`: `compute` has the old ones, and the update takes them from there if they complete the masters.
        """
        timeline = self._stager.timeline
        try:
            if compute is not None and holds_old and sub.gathers_from_nvme and sub.layout.split:
                sub.staged = compute.view(sub.compute_dtype, sub.layout.gathered_start, sub.layout.numel)
            with measured(timeline, "update", sub.chunk.name):
                update(lease)  # PagedOptimizer._update, by `_updates_of`
            if compute is not None and sub.staged is None:
                with measured(timeline, "copy", sub.chunk.name):
                    made = sub.view(sub.layout.gathered, lease)
                    compute.view(made.dtype, sub.layout.gathered_start, sub.layout.numel).copy_(made)
        finally:
            sub.staged = None

    # Chunk reads, derived from the states.

    def write_and_point(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease. Its group must be pointed to the new bytes before it is read again."""
        self._slots.write_current(sub)
        self._point_sub_group(sub, self.group_of(sub))

    def point(self, group: PagedGroup) -> None:
        """Set what staging reads: for the group's chunk, the gathered field of members that don't wait for an update;
        for a member's chunk, the inputs of its update."""
        for sub in group.members:
            self._point_sub_group(sub, group)
        group.point(self.waiting)

    def moved(self, sub: PagedSubGroup) -> None:
        """Point all reads of a sub-group to its new current slot."""
        group = self.group_of(sub)
        if group is None:
            self._point_sub_group(sub, None)
            return
        group.forget(self._stager)
        self.point(group)

    def point_all(self) -> None:
        """Set the reads of all groups and sub-groups from their current states and slots."""
        for sub in self._sub_groups:
            self._point_sub_group(sub, self.group_of(sub))
        for group in self._groups:
            group.point(self.waiting)

    def clear(self) -> None:
        """Drop all waiting updates, because the values are no longer whole and must be set again, or are gone."""
        self.waiting.clear()
        self.stepped = ()
        for group in self._groups:
            self.point(group)

    def recover(self) -> None:
        """Recover from an exception at any line: an update that was running waits again, and none is speculative."""
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
            if sub.chunk.state in (ChunkState.READING, ChunkState.STAGED):  # with the old reads
                self._stager.drop(sub.chunk)
            sub.chunk.reads = reads


def _in_turn(moving: list[PagedSubGroup], in_memory: list[PagedSubGroup]) -> list[PagedSubGroup]:
    """Return all sub-groups, with those in memory spread evenly, so that the drive works while those are updated."""
    placed = [((2 * k + 1) * len(in_memory), sub) for k, sub in enumerate(moving)]
    placed += [((2 * k + 1) * len(moving), sub) for k, sub in enumerate(in_memory)]
    return [sub for _, sub in sorted(placed, key=itemgetter(0))]
