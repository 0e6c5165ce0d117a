"""Floor 8. A model whose state rests in the arena: its groups, shards and sub-groups, and access to single ranges.

Knows bytes and chunks; knows neither FSDP2 nor the optimizer. Used by one thread at a time.

[Note: Updates that wait]
An optimizer step may leave the update of a sub-group for later: the values of the sub-group are then those that the update
will give it, and it runs before anybody sees them. That is when its group is gathered: its state is read instead of its copy,
updated, and the new copy goes from lease to lease, so that the gather needs no read of its own; or when a range of it is read
or written (checkpoints, state_dict, a look at a weight); or when the next step begins. What the update needs (gradient,
hyper-parameters, the number of the step) was fixed by the step, so the numbers are those of an update at once.

[Note: Ahead on the device]
A device with memory of its own gets a group's copies in one piece, before the group is gathered where they are staged by then:
the manager asks for it whenever a group was gathered. Until the gather the chunk stays staged, and its copy event
says when the device has the bytes; whatever is about to change the copies forgets the group, and what is on the device with it.
An update that only waits for the gather, with everything that it reads staged, is run at that moment too: the host updates one
group while the device computes the one before it. Copies that stay in host memory go with those of their group, in one piece of
their own; whatever is about to change one of them takes these back.

[Note: Past host memory]
Where something reads files straight into the device's memory (`aio.use_gds`), a group's copies go that way whenever they are
read only to be gathered: no member waits for an update, none of them is held, and the backward doesn't update from them.
Nothing of such a group is staged; the bytes that a gather needs are read for it alone, ahead of use as far as the device has
room. What is still to be written is waited for first; who changes the copies afterwards forgets the group, and what was read
of it with it.

[Note: Updates in the backward]
Where nothing has to be known of all gradients before one is applied (no clipping, no accumulation, no loss scale), a group can
be updated as soon as its gradients are reduced, and they need no memory beyond that. The copies were read for its backward and
are staged still, as the trace knows that they are needed again; so the update reads the state beside them. A group of which a
gradient is missing, or that was used in forward more than once so that more may come, is left to the step.

[Note: A/B slots]
In a durable run a sub-group has two extents, its slots, and a commit says in which of them its state is. An update reads that
one and writes the other, which is current from then on; more writes before the next commit go to the same one again. A range
that is written outside of an update takes the rest of the sub-group along first. So the committed bytes stay as they are until
another commit has taken their place (infinity/store/durable.py, [Note: What a record promises]).

What a checkpoint is copying must stay, too, until it is copied: see [Note: A copy of what goes on changing] in
infinity/store/arena_copy.py.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from infinity.aio import Lease
from infinity.device import CopyEvent, Device, HostBuffer, HostBuffers, InFlightCopy
from infinity.errors import InfinityError
from infinity.optim.kernel import join, split
from infinity.schedule.pinned import ACCESS_BYTES
from infinity.store import Arena, Extent, Field, Layout, SubGroup
from infinity.store.arena_copy import Copying, Source
from infinity.store.commit import SUM_BYTES
from infinity.store.layout import Piece
from infinity.swap.chunk import Chunk, ChunkState, Span
from infinity.swap.direct import DirectReads
from infinity.swap.health import ModelHealth
from infinity.swap.stager import Stager
from infinity.swap.timeline import measured
from infinity.units import PAGE_BYTES, align_up

_RANGE_NUMEL = (ACCESS_BYTES - 2 * PAGE_BYTES) // 4


SubGroupUpdate = Callable[[Lease | None], None]
"""Updates a sub-group in place, whose state is under the lease (None where nothing of it moves)."""


@dataclass(eq=False)
class PagedSubGroup:
    """One sub-group and the chunk through which the optimizer reads and writes it.

    `slots`: where it lies; two in a durable run: see [Note: A/B slots]. `current_slot` is the number of the one that holds its
    values, `committed_slot` of the one that must stay as it is.
    `held`: the fields that stay in host memory (1-D). The chunk of one that holds all of them moves nothing and is never used.
    `gradient`: where its gradient waits for the update, unless that is in host memory.
    `ties`: where a split master was rounded up on a tie (int32, ascending): see [Note: Copy and remainder].
    """

    layout: SubGroup
    slots: tuple[Extent, ...]
    chunk: Chunk
    held: dict[Field, torch.Tensor]
    compute_dtype: torch.dtype
    gradient: Extent | None = None
    ties: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32), repr=False)
    current_slot: int = 0
    committed_slot: int | None = None

    @property
    def extent(self) -> Extent:
        """Where its values are."""
        return self.slots[self.current_slot]

    @property
    def write_slot(self) -> int:
        """The number of the slot that may be written to."""
        return self.current_slot if self.current_slot != self.committed_slot else 1 - self.current_slot

    @property
    def moves(self) -> bool:
        """Whether stepping it takes bytes from the arena."""
        return self.layout.lease_bytes > 0

    def reads(self, *, copy: bool) -> tuple[Span, ...]:
        """What fetches its state, with the copy where that is a part of the master (or without it), and its gradient."""
        fields = [each for each in self.layout.state if copy or each is not Field.COMPUTE]
        spans = []
        if fields:
            first = self.layout.field_offset(fields[0])
            spans.append(Span(self.extent.offset + first, first, self.layout.nbytes - first))
        if self.gradient is not None:
            spans.append(Span(self.gradient.offset, self.layout.nbytes, self.layout.gradient_bytes))
        return tuple(spans)

    @property
    def gathers_from_nvme(self) -> bool:
        """Whether gathering it takes bytes from the arena."""
        return self.layout.gathered in self.layout.on_nvme

    def dtype(self, which: Field) -> torch.dtype:
        """Of the field's elements."""
        if which is Field.COMPUTE:
            return self.compute_dtype
        return torch.int16 if which is Field.REMAINDER else torch.float32

    def view(self, which: Field, lease: Lease | None) -> torch.Tensor:
        """The field's elements (1-D, `layout.numel`) while the chunk is in use under `lease` (None where nothing moves)."""
        if which in self.held:
            return self.held[which]
        assert lease is not None
        return lease.view(self.dtype(which), self.layout.field_offset(which), self.layout.numel)

    def master(self, lease: Lease | None) -> torch.Tensor:
        """The master weights (1-D, fp32): a view, or joined in memory of their own; `set_master` when changed."""
        if not self.layout.split:
            return self.view(Field.MASTER, lease)
        return join(self.view(Field.COMPUTE, lease), self.view(Field.REMAINDER, lease), self.ties)

    def set_master(self, master: torch.Tensor, lease: Lease | None) -> None:
        """Store what `master` returned, changed, and in the copy where there is one."""
        if self.layout.split:
            self.ties = split(master, self.view(Field.COMPUTE, lease), self.view(Field.REMAINDER, lease))
        elif Field.COMPUTE in self.layout.fields:
            self.view(Field.COMPUTE, lease).copy_(master)

    def sources(self) -> list[Source]:
        """Where the bytes of all its fields are, in order."""
        found: list[Source] = []
        for which in self.layout.fields:
            nbytes = self.layout.numel * self.layout.itemsize(which)
            if which in self.held:
                found.append(Source(nbytes, memory=self.held[which].view(torch.uint8).numpy().data))
                continue
            offset = self.extent.offset + self.layout.field_offset(which)
            last = found[-1] if found else None
            if last is not None and last.memory is None and last.offset + last.nbytes == offset:
                found[-1] = Source(last.nbytes + nbytes, last.offset)
            else:
                found.append(Source(nbytes, offset))
        return found

    def set_ties(self, ties: torch.Tensor, low: int, high: int) -> None:
        """The ties among elements [low, high) are these (ascending)."""
        self.ties = torch.cat([self.ties[self.ties < low], ties, self.ties[self.ties >= high]])


@dataclass(eq=False)
class PagedShard:
    """This rank's piece of one parameter.

    shape: of the piece as FSDP2 and the user see it. padded_shape: as it is gathered. `resident` is its copy where that
    stays in host memory (1-D, padded). `filled`: whether it was ever given values.
    """

    name: str
    index: int
    shape: torch.Size
    padded_shape: torch.Size
    trained: bool
    group: PagedGroup = field(repr=False)
    model: PagedModel = field(repr=False)
    resident: torch.Tensor | None = field(default=None, repr=False)
    filled: bool = False
    stepped: bool = False
    """Whether its moments were ever written: if not, they read as zero."""

    @property
    def sub_groups(self) -> list[PagedSubGroup]:
        """Those that hold a piece of it."""
        return self.model.sub_groups_of(self.index)

    def read(self, which: Field, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of the master or a moment (1-D, fp32, on the CPU) in ordinary memory.

        Raises InfinityError after a torn step: see `PagedModel.check_whole`.
        """
        self.model.check_whole()
        if which is not Field.MASTER or not self._split:
            return self._read(which, start, numel, torch.float32)
        copy = self._read(Field.COMPUTE, start, numel, self.model.compute_dtype)
        remainder = self._read(Field.REMAINDER, start, numel, torch.int16)
        ties = []
        for sub, at, low, count in self.model.ranges(self, start, numel):
            found = sub.ties[(sub.ties >= low) & (sub.ties < low + count)]
            ties.append(found + (at - start - low))
        return join(copy, remainder, torch.cat(ties))

    def write(self, which: Field, start: int, values: torch.Tensor) -> None:
        """Set elements [start, start + values.numel()) of the master or a moment (1-D). The master's copies follow it.

        Raises IoError where a transfer failed. The values are torn then: some ranges may be new, or the copy alone.
        """
        self.model.health.check_not_ahead()
        with self.model.health.change(f"setting {self.name}"):
            self._set(which, start, values)

    def _set(self, which: Field, start: int, values: torch.Tensor) -> None:
        if which is not Field.MASTER:
            self._write(which, start, values)
            self.stepped = True
            return
        if self._split:
            self._write_split(start, values)
        else:
            self._write(which, start, values)
        if self.resident is not None:
            self.set_resident(start, values)
        elif self.model.has_compute_field and not self._split:
            self._write(Field.COMPUTE, start, values)
        self.filled = True

    def set_resident(self, start: int, values: torch.Tensor) -> None:
        """Set elements of the copy that stays in host memory, once the device has copied what they were."""
        assert self.resident is not None
        self.group.residents.forget()
        self.resident[start : start + values.numel()].copy_(values)

    def refresh_resident(self) -> None:
        """Set the copy that stays in host memory from the master."""
        for start in range(0, self.shape.numel(), _RANGE_NUMEL):
            numel = min(_RANGE_NUMEL, self.shape.numel() - start)
            self.set_resident(start, self.read(Field.MASTER, start, numel))

    @property
    def _split(self) -> bool:
        return any(sub.layout.split for sub in self.sub_groups)

    def _write_split(self, start: int, values: torch.Tensor) -> None:
        copy = torch.empty(values.numel(), dtype=self.model.compute_dtype)
        remainder = torch.empty(values.numel(), dtype=torch.int16)
        ties = split(values.contiguous(), copy, remainder)
        self._write(Field.COMPUTE, start, copy)
        self._write(Field.REMAINDER, start, remainder)
        for sub, at, low, count in self.model.ranges(self, start, values.numel()):
            first = at - start
            found = ties[(ties >= first) & (ties < first + count)]
            sub.set_ties(found + (low - first), low, low + count)

    def _read(self, which: Field, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(numel, dtype=dtype)

        def take(staged: torch.Tensor, at: int) -> None:
            out[at - start : at - start + staged.numel()].copy_(staged)

        self.model.access(self, which, start, numel, take, write=False)
        return out

    def _write(self, which: Field, start: int, values: torch.Tensor) -> None:
        def give(staged: torch.Tensor, at: int) -> None:
            staged.copy_(values[at - start : at - start + staged.numel()])

        self.model.access(self, which, start, values.numel(), give, write=True)


@dataclass(eq=False)
class Residents:
    """The copies of a group that stay in host memory, one behind the other: of `count` shards."""

    copies: torch.Tensor | None = field(default=None, repr=False)
    """1-D; None where there are none."""
    count: int = 0
    delivered: set[int] = field(default_factory=set)
    """Numbers of the shards that were given out since the copies were taken."""
    in_flight: InFlightCopy | None = field(default=None, repr=False)
    """On their way to the device, until the last shard is asked for."""
    copy_event: CopyEvent | None = None
    """Fires when the device has them as they were taken last."""

    @property
    def nbytes(self) -> int:
        return self.copies.nbytes if self.copies is not None else 0

    def start_h2d(self, device: Device) -> None:
        """Begin to bring them to the device, whatever was taken of them before."""
        assert self.copies is not None
        self.in_flight = device.start_h2d(self.copies)
        self.copy_event = self.in_flight.copy_event
        self.delivered.clear()

    def on_device(self, index: int, copy: torch.Tensor, device: Device) -> torch.Tensor:
        """That of one shard, on the device."""
        assert self.copies is not None
        if self.in_flight is None or index in self.delivered:
            self.start_h2d(device)
        assert self.in_flight is not None
        start = copy.storage_offset() - self.copies.storage_offset()
        taken = self.in_flight.on_device()[start : start + copy.numel()]
        self.delivered.add(index)
        if len(self.delivered) == self.count:
            self.drop_in_flight()
        return taken

    def drop_in_flight(self) -> None:
        """Nobody gathers them soon."""
        self.in_flight = None
        self.delivered.clear()

    def forget(self) -> None:
        """They are about to change: what the device was given is stale, and it has copied them after this."""
        self.drop_in_flight()
        if self.copy_event is not None:
            self.copy_event.wait()
            self.copy_event = None


@dataclass(eq=False)
class PagedGroup:
    """The shards that FSDP2 gathers together. `chunk` fetches the copies of all of them that are not resident; where these are
    cached there is none, and `cached` holds them (1-D, the group's flat space)."""

    index: int
    name: str
    shards: list[PagedShard] = field(default_factory=list)
    members: list[PagedSubGroup] = field(default_factory=list, repr=False)
    """The sub-groups of its flat space."""
    resident_sub_groups: list[PagedSubGroup] = field(default_factory=list, repr=False)
    """Those that hold shards of it which stay resident, and perhaps shards of other groups."""
    chunk: Chunk | None = None
    cached: torch.Tensor | None = field(default=None, repr=False)
    fetched: int = 0
    """How many of its shards the chunk fetches, or the cache holds."""
    gathering: set[int] = field(default_factory=set)
    """Numbers of the shards that were handed to FSDP2 and not yet gathered."""
    in_flight: InFlightCopy | None = field(default=None, repr=False)
    """Its copies on their way to the device, from before the first shard is asked for until the last one is."""
    copy_event: CopyEvent | None = None
    """Fires when the device has the copies, so that they may change where they rest in host memory."""
    residents: Residents = field(default_factory=Residents)

    @property
    def completes(self) -> Chunk | None:
        """What holds copies that are a part of its masters, which an update in the backward takes from there."""
        return self.chunk if any(sub.gathers_from_nvme and sub.layout.split for sub in self.members) else None

    @property
    def all_delivered(self) -> bool:
        """Whether every shard that its chunk fetches was asked for."""
        return len(self.gathering) == self.fetched


class PagedModel:
    """Lays shards out in the arena and keeps what is needed to find them.

    Args:
        compute_dtype: what is gathered: bf16, fp16, or fp32.
        in_backward: groups are updated in the backward, where that is possible: see [Note: Updates in the backward].
        host_memory: for the copies that stay in host memory; ordinary memory where None.
        durable: leave what is committed as it is, in twice the space: see [Note: A/B slots]. Nothing is held or cached then.
        direct: see [Note: Past host memory]; None where all goes through host memory.
        what: names the bytes in an error about missing space.

    Takes a lease for what stays in pinned memory, until `close`. Raises StoreError when the arena can't hold the rest; nothing
    is reserved then.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        group_names: Sequence[str],
        shapes: Sequence[tuple[torch.Size, torch.Size]],
        compute_dtype: torch.dtype,
        in_backward: bool = False,
        durable: bool = False,
        stager: Stager,
        arena: Arena,
        host_memory: HostBuffers | None = None,
        direct: DirectReads | None = None,
        what: str,
    ) -> None:
        self.layout = layout
        self._in_backward = in_backward
        self.compute_dtype = compute_dtype
        self.has_compute_field = any(Field.COMPUTE in each.fields for each in layout.sub_groups)
        self.updates: dict[PagedSubGroup, SubGroupUpdate] = {}
        """What the last optimizer step left to do: see [Note: Updates that wait]."""
        self.stepped: tuple[PagedSubGroup, ...] = ()
        """What it updates, done or not, in its order."""
        self.health = ModelHealth(on_ill=self._forget_updates)
        self._open_stager: Stager | None = stager
        self._direct = direct
        self._copying: Copying | None = None
        self._snapshot_slots: list[int] = []
        self._arena = arena
        self._unfinished: tuple[PagedSubGroup, torch.Tensor] | None = None
        """The sub-group that is being updated, of which nothing is written yet, and the ties that it had before."""
        assert not (durable and any(s.held or s.cached for s in layout.sub_groups))
        self.sub_groups = self._reserve(arena, what, slots=2 if durable else 1)
        self.groups = [PagedGroup(index, name) for index, name in enumerate(group_names)]
        self.shards: list[PagedShard] = []
        for space, group in enumerate(self.groups):
            group.members = [self.sub_groups[s.index] for s in layout.by_space[space]]
        self._cache = stager.make_room(layout.cached_bytes, "the host cache") if layout.cached_bytes else None
        if self._cache is not None:
            self._place_cached(self._cache)
        for group in self.groups:
            group.chunk = _group_chunk(group)
            self.expect(group)
        self._by_shard: list[list[tuple[PagedSubGroup, Piece]]] = [[] for _ in shapes]
        for sub in self.sub_groups:
            for piece in sub.layout.pieces:
                self._by_shard[piece.shard].append((sub, piece))
        self._residents: HostBuffer | None = None
        self._add_shards(shapes, host_memory)
        for group in self.groups:
            found = {
                sub.layout.index: sub
                for shard in group.shards
                if shard.resident is not None
                for sub in shard.sub_groups
            }
            group.resident_sub_groups = list(found.values())

    def _forget_updates(self) -> None:
        """The values are not whole any more: what is set anew is not to be updated."""
        self.updates.clear()
        for group in self.groups:
            self.expect(group)

    def close(self) -> None:
        """Let go of all that holds memory. The values can't be used any more; idempotent."""
        if self._open_stager is None:
            return
        self._copying = None
        for group in self.groups:
            self.forget(group)
            group.cached = None
            if group.chunk is not None:
                group.chunk.fills = ()
            group.residents.forget()
            group.residents.copies = None
        for shard in self.shards:
            shard.resident = None
        if self._residents is not None:
            self._residents.give_back()
        for sub in self.sub_groups:
            sub.held.clear()
        self.updates.clear()
        if self._cache is not None:
            self._cache.give_back()
        self._open_stager = None

    @property
    def _stager(self) -> Stager:
        if self._open_stager is None:
            raise InfinityError(
                "the swap manager of this model is closed, and its parameters are gone with it: save them before close()"
            )
        return self._open_stager

    def check_whole(self) -> None:
        """Raise InfinityError when the values are not those of one step, or gone: see `ModelHealth`."""
        _ = self._stager
        self.health.check_whole()

    def check_not_torn(self) -> None:
        """Raise InfinityError when no pass may go on: the values are torn, or gone."""
        _ = self._stager
        self.health.check_not_torn()

    def gathered_view(self, shard: PagedShard) -> torch.Tensor:
        """The shard's copy (1-D, padded) on the device. The group's chunk must be in use, where there is one."""
        group = shard.group
        if shard.resident is not None:
            return group.residents.on_device(shard.index, shard.resident, self._stager.device)
        if group.in_flight is None:
            self._start_h2d(group)
        assert group.in_flight is not None
        _, start = self.layout.place[shard.index]
        try:
            copies = group.in_flight.on_device()
        except BaseException:
            group.in_flight = None  # whoever asks again has it read again
            raise
        return copies[start : start + self.layout.shards[shard.index].numel]

    def compute_bytes(self, group: PagedGroup) -> int:
        """What the group's copies take on the device."""
        return self._moved_bytes(group) + group.residents.nbytes

    def _moved_bytes(self, group: PagedGroup) -> int:
        return group.cached.nbytes if group.cached is not None else group.chunk.lease_bytes if group.chunk else 0

    def start_ahead(self, group: PagedGroup, look_ahead: Callable[[], None], *, update: bool) -> bool:
        """Begin to copy a group's copies to the device before it is gathered, if that takes no waiting for the drive.

        `update`: where members wait for an update that nothing has to be read for any more, they get it now, and `look_ahead`
        is called after each. Returns whether the copies are on their way.
        """
        of_members = bool(self._moved_bytes(group)) and group.in_flight is None
        of_residents = bool(group.residents.nbytes) and group.residents.in_flight is None
        resident_sub_groups = [sub for sub in group.resident_sub_groups if of_residents and sub in self.updates]
        waiting = resident_sub_groups + [sub for sub in self.waiting(group) if of_members]
        needed = [sub.chunk for sub in waiting if sub.moves]
        if of_members and group.chunk is not None:
            if not self.goes_direct(group):
                needed.append(group.chunk)
            elif not self._stager.may_be_read(group.chunk):
                return False
        if (waiting and not update) or not all(self._stager.is_ready(chunk) for chunk in needed):
            return False
        for sub in resident_sub_groups:
            self.catch_up(sub)
        if of_members:
            self.acquire(group, look_ahead)
            try:
                if group.in_flight is None:
                    self._start_h2d(group)
            finally:
                if group.chunk is not None and group.chunk.state is ChunkState.IN_USE:
                    self._stager.release(group.chunk, keep=True, copy_event=group.copy_event)
        if of_residents:
            group.residents.start_h2d(self._stager.device)
        return True

    def may_go_direct(self, group: PagedGroup) -> bool:
        """Whether its copies go past host memory when they are read only to be gathered: see [Note: Past host memory]."""
        if self._direct is None or group.chunk is None or any(sub.layout.gathered in sub.held for sub in group.members):
            return False
        return not (self._in_backward and group.completes)

    def goes_direct(self, group: PagedGroup) -> bool:
        """Whether they would now."""
        staged = group.chunk is not None and group.chunk.state in (ChunkState.READING, ChunkState.STAGED)
        return self.may_go_direct(group) and not self.waiting(group) and not staged

    def _start_h2d(self, group: PagedGroup) -> None:
        copies = group.cached
        if copies is None:
            assert group.chunk is not None and group.chunk.lease is not None
            numel = sum(sub.layout.numel for sub in group.members)
            copies = group.chunk.lease.view(self.compute_dtype, 0, numel)
        group.in_flight = self._stager.device.start_h2d(copies)
        group.copy_event = group.in_flight.copy_event

    def forget(self, group: PagedGroup) -> None:
        """Drop the group's staged copies, which are about to be stale, whoever was to gather them. Cached ones, which are about
        to be changed, the device has copied after this.

        FSDP2 may fetch a group ahead and then not use it: what it fetched is copied by then, and never reported gathered.
        """
        group.gathering.clear()
        group.in_flight = None
        if group.cached is not None and group.copy_event is not None:
            group.copy_event.wait()
        group.copy_event = None
        if group.chunk is None:
            return
        if group.chunk.state is ChunkState.IN_USE:
            self._stager.release(group.chunk, keep=False)
        self._stager.drop(group.chunk)

    def sub_groups_of(self, shard: int) -> list[PagedSubGroup]:
        """The sub-groups that hold a piece of shard number `shard`."""
        return [sub for sub, _ in self._by_shard[shard]]

    def waiting(self, group: PagedGroup) -> list[PagedSubGroup]:
        """The group's members that wait for an update."""
        return [sub for sub in group.members if sub in self.updates]

    def defer(self, updates: Mapping[PagedSubGroup, SubGroupUpdate]) -> None:
        """These sub-groups are to be updated before anybody uses their values: see [Note: Updates that wait].

        What is staged of any group is forgotten; of a sub-group, only what the update can't use. No sub-group waits for another
        update.
        """
        assert not self.updates
        for group in self.groups:
            self.forget(group)
        for sub in updates:
            of_no_use = sub.gradient is not None or sub.chunk.reads != sub.reads(copy=True)
            if of_no_use:  # read with an earlier gradient, or without the copy
                self._stager.drop(sub.chunk)
        self.stepped = tuple(updates)
        self.updates.update(updates)
        for group in self.groups:
            self.expect(group)

    def expect(self, group: PagedGroup) -> None:
        """From now on, staging the group's chunk fetches the copies of those members that don't wait for an update, and staging
        a member's chunk what its update will need."""
        for sub in group.members:
            self._point(sub)
        if group.chunk is None:
            return
        reads, fills = [], []
        for sub in group.members:
            which = sub.layout.gathered
            itemsize = sub.layout.itemsize(which)
            start = sub.layout.start * itemsize
            if which in sub.held:
                fills.append((start, sub.held[which]))
            elif sub not in self.updates:
                offset = sub.extent.offset + sub.layout.field_offset(which)
                reads.append(Span(offset, start, sub.layout.numel * itemsize))
        group.chunk.reads, group.chunk.fills = tuple(reads), tuple(fills)

    def acquire(self, group: PagedGroup, look_ahead: Callable[[], None]) -> None:
        """Bring the group's copies into its chunk's lease, or up to date where they are cached, and the chunk in use; or on
        their way past host memory.

        Members that wait for an update get it now; `look_ahead` is called after each.
        """
        waiting, chunk = self.waiting(group), group.chunk
        if self._direct is not None and chunk is not None and self.goes_direct(group):
            if group.in_flight is None:
                self._stager.let_be_read(chunk)
                group.in_flight, group.copy_event = self._direct.start(chunk, self.compute_dtype), None
            return
        lease = self._stager.acquire(chunk) if chunk is not None else None
        try:
            for sub in waiting:
                self.run_update(sub, into=lease)
                look_ahead()
        except BaseException:
            if chunk is not None:
                self._stager.release(chunk, keep=False)
            raise
        finally:
            if waiting:
                self.expect(group)

    def update_in_backward(
        self, group: PagedGroup, updates: Mapping[PagedSubGroup, SubGroupUpdate], look_ahead: Callable[[], None]
    ) -> None:
        """Update members of a group whose gradients came: see [Note: Updates in the backward].

        `look_ahead` is called after each. Raises IoError when a transfer failed. After any failure the values are torn.
        """
        assert self._in_backward and not self.updates.keys() & updates.keys()
        chunk = group.completes
        with self.health.change("an update in the backward"):
            if group.cached is not None:
                self.forget(group)  # its copies change where they lie
            copies = self._stager.acquire(chunk) if chunk is not None else None
            try:
                for sub, update in updates.items():
                    self._update_beside(sub, update, copies)
                    look_ahead()
            finally:
                if chunk is not None:
                    self._stager.release(chunk, keep=False)
                self.forget(group)  # its copies are old
                self.expect(group)

    def _update_beside(self, sub: PagedSubGroup, update: SubGroupUpdate, copies: Lease | None) -> None:
        """Update one whose copy is in its group's lease, or held."""
        timeline = self._stager.timeline
        if sub.held:
            self._let_be_copied(sub, sub.current_slot)
        if not sub.moves:
            with measured(timeline, "update", sub.chunk.name):
                update(None)
            return
        lease = self._stager.acquire(sub.chunk)
        try:
            if copies is not None and sub.gathers_from_nvme and sub.layout.split:
                start = sub.layout.start * sub.layout.compute_itemsize
                with measured(timeline, "copy", sub.chunk.name):
                    sub.view(Field.COMPUTE, lease).copy_(copies.view(self.compute_dtype, start, sub.layout.numel))
            with measured(timeline, "update", sub.chunk.name):
                update(lease)
        except BaseException:
            self._stager.release(sub.chunk, keep=False)
            raise
        self._write_back(sub)

    def catch_up(self, sub: PagedSubGroup) -> None:
        """Run the update that a sub-group waits for, if it does, where its group is not about to be gathered."""
        if sub not in self.updates:
            return
        group = self.groups[sub.layout.space] if sub.layout.space < len(self.groups) else None
        if group is not None:
            self.forget(group)  # it was staged without what this one stores
        self.run_update(sub)
        if group is not None:
            self.expect(group)

    def run_update(self, sub: PagedSubGroup, *, into: Lease | None = None) -> None:
        """Read what a sub-group waits to have updated, update it and write it; its new copy also goes `into` its group's lease.

        Raises IoError when the read failed. Whatever ends it before the write has begun, the sub-group still waits and
        nothing is lost: what was read is dropped, and read again. Where a part of it stays in memory, which changes in
        place, the values are torn instead.
        """
        if sub.held:
            self._let_be_copied(sub, sub.current_slot)
        lease = self._stager.acquire(sub.chunk) if sub.moves else None
        timeline = self._stager.timeline
        try:
            with self.health.change("an optimizer step") if sub.held else self._undone(sub):
                with measured(timeline, "update", sub.chunk.name):
                    self.updates[sub](lease)
                if into is not None:
                    with measured(timeline, "copy", sub.chunk.name):
                        _copy_to_group(sub, lease, into)
                with self.health.change("an optimizer step"):
                    self._unfinished = None
                    del self.updates[sub]
                    if lease is not None:
                        self._write_back(sub)
        except BaseException:
            if sub.chunk.state is ChunkState.IN_USE:
                self._stager.release(sub.chunk, keep=False)
                self._stager.drop(sub.chunk)  # also where the device is at it: what is left there is half updated
            raise

    @contextlib.contextmanager
    def _undone(self, sub: PagedSubGroup) -> Iterator[None]:
        """Around an update of what is in a lease: until its write begins, an exception leaves the sub-group as it was."""
        self._unfinished = (sub, sub.ties)
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        if self._unfinished is not None:
            sub, ties = self._unfinished
            sub.ties = ties
            self._unfinished = None

    @property
    def leases(self) -> list[Lease]:
        """What it holds of the pinned pool until `close`."""
        return [self._cache] if self._cache is not None else []

    def recover(self) -> None:
        """Make anew what a pass that never ended has left: nothing is gathered or on its way. All chunks rest already."""
        self.health.settle()
        self._undo()
        for group in self.groups:
            group.gathering.clear()
            group.in_flight = None
            if group.copy_event is not None:
                group.copy_event.wait()
                group.copy_event = None
            group.residents.forget()
            self.expect(group)
        for sub in self.sub_groups:
            self._point(sub)

    def _write_back(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease to the slot that may be written to, where its values are from now on.

        What gathers its copies is to be told of it (`expect`) before the group is read again. Where no more than its gradient
        was read, all of it is in host memory.
        """
        if not sub.layout.nbytes:
            self._stager.release(sub.chunk, keep=False)
            return
        self.health.check_not_sealed()
        slot = sub.write_slot
        self._let_be_copied(sub, slot)
        sub.chunk.writes = _whole(sub, slot)
        self._stager.write_back(sub.chunk)
        sub.current_slot = slot
        self._point(sub)

    def _point(self, sub: PagedSubGroup) -> None:
        """What staging its chunk reads."""
        in_space = sub.layout.space < len(self.groups)
        resident_sub_groups = self._in_backward and in_space and self.groups[sub.layout.space].chunk is not None
        sub.chunk.reads = sub.reads(copy=not (resident_sub_groups and sub not in self.updates))

    def _leave_committed(self, sub: PagedSubGroup) -> None:
        """Before a range of a sub-group is written: where its values are committed, copy them to the other slot."""
        self.health.check_not_sealed()
        if sub.current_slot != sub.committed_slot:
            return
        slot = sub.write_slot
        self._let_be_copied(sub, slot)
        name = f"committed state of sub-group {sub.layout.index}"
        chunk = Chunk(name, sub.layout.nbytes, _whole(sub, sub.current_slot), _whole(sub, slot), after=(sub.chunk,))
        self._stager.acquire(chunk)
        self._stager.write_back(chunk)
        self._stager.settle(chunk)
        sub.current_slot = slot
        if sub.layout.space < len(self.groups):
            self.forget(self.groups[sub.layout.space])
            self.expect(self.groups[sub.layout.space])
        else:
            self._point(sub)

    def start_copying(self, copying: Copying) -> None:
        """A checkpoint has begun to copy all values as they are now; none waits for an update, and all are written."""
        assert not self.updates
        self._copying = copying
        self._snapshot_slots = [sub.current_slot for sub in self.sub_groups]

    def _let_be_copied(self, sub: PagedSubGroup, slot: int) -> None:
        """Before a sub-group's bytes in that slot change, or those held in memory: wait until they are copied."""
        copying, index = self._copying, sub.layout.index
        if copying is None or copying.is_copied(index):
            return
        if sub.held or slot == self._snapshot_slots[index]:
            with self._stager.stalling(f"the checkpoint's copy of {sub.chunk.name}"):
                copying.wait_for(index)

    def set_state(self, sub: PagedSubGroup, ties: torch.Tensor, fill: Callable[[Field, torch.Tensor], None]) -> None:
        """Give a sub-group new values and ties: `fill` sets the elements (1-D) of each of its fields.

        They are written in the background. Raises IoError; the values are to be torn meanwhile.
        """
        group = self.groups[sub.layout.space] if sub.layout.space < len(self.groups) else None
        if group is not None:
            self.forget(group)
        lease = self._stager.occupy(sub.chunk) if sub.moves else None
        try:
            for which in sub.layout.fields:
                fill(which, sub.view(which, lease))
        except BaseException:
            if lease is not None:
                self._stager.release(sub.chunk, keep=False)
            raise
        sub.ties = ties
        if lease is not None:
            self._write_back(sub)
        if group is not None:
            self.expect(group)

    def page_sums(self) -> bytes:
        """What each page of the state must hold, sub-group by sub-group; empty where the arena keeps no checksums."""
        if not self._arena.file.checked:
            return b""
        return b"".join(self._arena.file.checksums(sub.extent.offset, sub.layout.nbytes) for sub in self.sub_groups)

    def mark_committed(self) -> None:
        """All values are as a commit says, and all of them are written. They stay where they are until the next one."""
        assert not self.updates
        for sub in self.sub_groups:
            sub.committed_slot = sub.current_slot

    def _set_page_sums(self, sums: bytes) -> None:
        if not sums or not self._arena.file.checked:
            return
        at = 0
        for sub in self.sub_groups:
            length = sub.layout.nbytes // PAGE_BYTES * SUM_BYTES
            self._arena.file.set_checksums(sub.extent.offset, sums[at : at + length])
            at += length

    def restore(
        self,
        slots: Sequence[int],
        ties: Sequence[torch.Tensor],
        filled: Sequence[bool],
        stepped: Sequence[bool],
        sums: bytes,
    ) -> None:
        """The values are those of a commit that an earlier process made: by sub-group, its slot and its ties; by shard, whether
        it was given values and moments. Reads are held to `sums`, what `page_sums` returned there, unless it is empty."""
        for sub, slot, found in zip(self.sub_groups, slots, ties, strict=True):
            sub.current_slot = sub.committed_slot = slot
            sub.ties = found
            self._point(sub)
        self._set_page_sums(sums)
        for group in self.groups:
            self.expect(group)
        for shard, has_values, has_moments in zip(self.shards, filled, stepped, strict=True):
            shard.filled, shard.stepped = has_values, has_moments
            if shard.resident is not None and has_values:
                shard.refresh_resident()

    def _reserve(self, arena: Arena, what: str, *, slots: int) -> list[PagedSubGroup]:
        """All sub-groups with their extents: first slots one behind the other, then the second ones, then gradients."""
        layouts = self.layout.sub_groups
        spilled = [sub for sub in layouts if sub.gradient_bytes]
        sizes = [sub.nbytes for sub in layouts] * slots + [sub.gradient_bytes for sub in spilled]
        extents = arena.reserve(sizes, what) if any(sizes) else [Extent(0, 0)] * len(sizes)
        state, gradients = extents[: slots * len(layouts)], extents[slots * len(layouts) :]
        of_gradient = dict(zip([sub.index for sub in spilled], gradients, strict=True))
        return [
            self._sub_group(sub, tuple(state[number :: len(layouts)]), of_gradient.get(sub.index))
            for number, sub in enumerate(layouts)
        ]

    def _sub_group(self, layout: SubGroup, slots: tuple[Extent, ...], gradient: Extent | None) -> PagedSubGroup:
        chunk = Chunk(f"sub-group {layout.index}", layout.lease_bytes, (), (), on_lost=self.health.tear)
        sub = PagedSubGroup(layout, slots, chunk, {}, self.compute_dtype, gradient)
        chunk.writes = _whole(sub, 0)
        chunk.reads = sub.reads(copy=True)
        for which in layout.held:
            if which in layout.fields:
                sub.held[which] = torch.zeros(layout.numel, dtype=sub.dtype(which))
        return sub

    def _place_cached(self, cache: Lease) -> None:
        """Give the cached fields their places: group by group what is gathered, so that it lies in one piece, then the rest."""
        cache.view(torch.uint8).zero_()  # like bytes of the arena that were never written
        at = 0
        for group in self.groups:
            first = at
            for sub in group.members:
                if sub.layout.gathered in sub.layout.cached:
                    at = _place(sub, sub.layout.gathered, cache, at)
            if group.members and all(sub.layout.gathered in sub.held for sub in group.members):
                group.cached = cache.view(self.compute_dtype, first, sum(sub.layout.numel for sub in group.members))
        for sub in self.sub_groups:
            for which in sub.layout.cached:
                if which not in sub.held:
                    at = _place(sub, which, cache, at)

    def _add_shards(self, shapes: Sequence[tuple[torch.Size, torch.Size]], host_memory: HostBuffers | None) -> None:
        numel = sum(spec.numel for spec in self.layout.shards if spec.resident)
        if host_memory is not None and numel:
            self._residents = host_memory.lend(numel, self.compute_dtype)
        residents = self._residents.tensor.zero_() if self._residents else torch.zeros(numel, dtype=self.compute_dtype)
        at = 0
        for index, (spec, (shape, padded)) in enumerate(zip(self.layout.shards, shapes, strict=True)):
            group = self.groups[spec.group]
            shard = PagedShard(spec.name, index, shape, padded, spec.trained, group, self)
            if spec.resident:  # those of a group lie together, as groups come one after the other
                shard.resident = residents[at : at + spec.numel]
                first = at - group.residents.nbytes // self.compute_dtype.itemsize
                at += spec.numel
                group.residents.copies, group.residents.count = residents[first:at], group.residents.count + 1
            group.shards.append(shard)
            group.fetched += not spec.resident
            self.shards.append(shard)

    def access(
        self,
        shard: PagedShard,
        which: Field,
        start: int,
        numel: int,
        move: Callable[[torch.Tensor, int], None],
        *,
        write: bool,
    ) -> None:
        """For the shard: call `move(elements, first)` for the ranges that make up [start, start + numel), staged; write back.

        The bytes around a range that share its first and last page are read first and written back unchanged.
        """
        if write and which in (Field.MASTER, Field.COMPUTE):
            self.forget(shard.group)
        for sub, at, low, count in self.ranges(shard, start, numel):
            self.catch_up(sub)
            if write:
                self._stager.drop(sub.chunk)  # read ahead for its update
                self._leave_committed(sub)
                self._let_be_copied(sub, sub.current_slot)
            if which in sub.held:
                move(sub.held[which][low : low + count], at)
                continue
            dtype = sub.dtype(which)
            offset = sub.extent.offset + sub.layout.field_offset(which) + low * dtype.itemsize
            nbytes = count * dtype.itemsize
            first = offset // PAGE_BYTES * PAGE_BYTES
            last = align_up(offset + nbytes)
            whole = Span(first, 0, last - first)
            reads = _edges(whole, offset, offset + nbytes) if write else (whole,)
            name = f"{which.value} of {shard.name}"
            chunk = Chunk(name, whole.nbytes, reads, (whole,), after=(sub.chunk,), on_lost=self.health.tear)
            lease = self._stager.acquire(chunk)
            try:
                move(lease.view(dtype, offset - first, count), at)
            except BaseException:
                self._stager.release(chunk, keep=False)
                raise
            if write:
                self._stager.write_back(chunk)
                self._stager.settle(chunk)
            else:
                self._stager.release(chunk, keep=False)

    def ranges(self, shard: PagedShard, start: int, numel: int) -> Iterator[tuple[PagedSubGroup, int, int, int]]:
        """(sub-group, first element of the shard, first element of the sub-group, count), each of a bounded size."""
        pieces = self._by_shard[shard.index]
        first = bisect_right(pieces, start, key=lambda piece_of: piece_of[1].start) - 1
        for number in range(max(0, first), len(pieces)):
            sub, piece = pieces[number]
            if piece.start >= start + numel:
                break
            low, high = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            for at in range(low, high, _RANGE_NUMEL):
                yield sub, at, piece.offset + at - piece.start, min(_RANGE_NUMEL, high - at)


def _whole(sub: PagedSubGroup, slot: int) -> tuple[Span, ...]:
    """All of one of its slots."""
    return (Span(sub.slots[slot].offset, 0, sub.layout.nbytes),) if sub.layout.nbytes else ()


def _copy_to_group(sub: PagedSubGroup, lease: Lease | None, into: Lease) -> None:
    """Copy what is gathered of a sub-group, which is under `lease`, into the lease of its group."""
    which = sub.layout.gathered
    start = sub.layout.start * sub.layout.itemsize(which)
    into.view(sub.dtype(which), start, sub.layout.numel).copy_(sub.view(which, lease))


def _group_chunk(group: PagedGroup) -> Chunk | None:
    """What fetches the copies of a group; None where there are none or they are cached."""
    if not group.members or group.cached is not None:
        return None
    last = group.members[-1].layout
    nbytes = (last.start + last.numel) * last.itemsize(last.gathered)
    after = tuple(sub.chunk for sub in group.members)
    return Chunk(f"group {group.name}", nbytes, (), (), after=after)


def _place(sub: PagedSubGroup, which: Field, cache: Lease, at: int) -> int:
    """The cached field lies at byte `at` of the lease; where the next one may."""
    sub.held[which] = cache.view(sub.dtype(which), at, sub.layout.numel)
    return at + sub.layout.numel * sub.layout.itemsize(which)


def _edges(whole: Span, start: int, end: int) -> tuple[Span, ...]:
    """The first and last page of `whole` where [start, end) covers them only in part."""
    first_page = whole.offset
    last_page = whole.offset + whole.nbytes - PAGE_BYTES
    pages = set()
    if start != first_page:
        pages.add(first_page)
    if end != last_page + PAGE_BYTES:
        pages.add(last_page)
    return tuple(Span(page, page - whole.offset, PAGE_BYTES) for page in sorted(pages))
