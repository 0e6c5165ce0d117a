"""The paged sub-group: the places of its fields, and the meaning of its bytes in memory.

`Slots` writes a sub-group while keeping what commits and checkpoints need. All else here is plain data with accessors.

[Note: Where bytes rest]
A `Location` is the place of one field of a sub-group. It is resolved once, when the model is paged, and never changes.
Reads, the bytes of a step, a checkpoint's copy and the view of an update all follow from it. A field in host memory
(held or cached) has a tensor. A field on NVMe has an offset, which is the same in every slot and in the lease of the
sub-group's chunk. Only the current slot changes: see [Note: A/B slots].

[Note: A/B slots]
In a durable run a sub-group has two extents, its slots, and a commit names the slot that holds its state. An update
reads that slot and writes the other, which is then current; further writes before the next commit go to the same slot.
A write to a range outside an update first copies the whole sub-group. So the committed bytes stay as they are until
another commit has replaced them (infinity/store/durable.py, [Note: What a record promises]).

Bytes that a checkpoint still copies stay, too: [Note: A copy of bytes that keep changing] in infinity/store/arena_copy.py.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from infinity.aio import Lease
from infinity.optim.kernel import join, split
from infinity.store.arena import Extent
from infinity.store.arena_copy import Copying, Source
from infinity.store.layout import Field, SubGroup
from infinity.swap.health import ModelHealth
from infinity.swap.stager import Chunk, Span, Stager

_STATE_DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}

SubGroupUpdate = Callable[[Lease | None], None]
"""Updates a sub-group in place, with its state in the lease (None if nothing of it moves)."""


class Tier(enum.Enum):
    """The memory that holds a field."""

    HOST = "host"
    """Host memory, pinned or not: `Location.tensor`."""
    NVME = "nvme"
    """The arena: `Location.offset` of each slot."""


@dataclass(frozen=True)
class Location:
    """The place of one field of a sub-group: see [Note: Where bytes rest]."""

    tier: Tier
    nbytes: int
    dtype: torch.dtype
    numel: int
    offset: int = 0
    """NVMe: first byte, in each slot and in the lease."""
    tensor: torch.Tensor | None = field(default=None, repr=False)
    """Host: the elements (1-D)."""


@dataclass(eq=False)
class PagedSubGroup:
    """One sub-group and the chunk through which the optimizer reads and writes it.

    `slots`: its extents in the arena; two in a durable run or if its updates are speculative, else one. `current_slot`:
    the number of the slot that holds its values. `committed_slot`: the slot that must not change. `gradient_extent`:
    where its gradient waits for the update, if not in host memory. `ties`: indices of split masters that were rounded
    up on a tie (int32, ascending), see [Note: Split masters] in infinity/optim/kernel.py. If all of it is in host
    memory, its chunk moves nothing.
    """

    layout: SubGroup
    slots: tuple[Extent, ...]
    chunk: Chunk
    compute_dtype: torch.dtype
    gradient_extent: Extent | None = None
    locations: dict[Field, Location] = field(default_factory=dict, repr=False)
    ties: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32), repr=False)
    staged: torch.Tensor | None = field(default=None, repr=False)
    """During an update: its compute parameters (1-D) in its group's lease. The update replaces them there, or sets this
    to None once it has copied them."""
    is_speculative: bool = False
    """True if the backward updates it for the step to accept."""
    current_slot: int = 0
    committed_slot: int | None = None

    @property
    def extent(self) -> Extent:
        """The extent of the current slot."""
        return self.slots[self.current_slot]

    @property
    def write_slot(self) -> int:
        """The number of the slot that may be written."""
        return self.current_slot if self.current_slot != self.committed_slot else 1 - self.current_slot

    @cached_property
    def moves(self) -> bool:
        """True if stepping it moves bytes of the arena."""
        return self.layout.lease_bytes > 0

    @cached_property
    def unit(self) -> Chunk | PagedSubGroup:
        """The look-ahead's unit for its state."""
        return self.chunk if self.moves else self

    @cached_property
    def rests_in_host(self) -> bool:
        """True if a part of it is in host memory and changes in place."""
        return any(location.tier is Tier.HOST for location in self.locations.values())

    @cached_property
    def gathers_from_nvme(self) -> bool:
        """True if gathering it reads the arena."""
        return self.locations[self.layout.gathered].tier is Tier.NVME

    def slot_span(self, slot: int) -> tuple[Span, ...]:
        """Return the span of a whole slot."""
        return (Span(self.slots[slot].offset, 0, self.layout.nbytes),) if self.layout.nbytes else ()

    def reads(self, *, compute: bool) -> tuple[Span, ...]:
        """Return the spans that read its state and its gradient. `compute`: with the master's compute parameter."""
        fields = self.layout.state
        if fields and fields[0] is Field.COMPUTE and not compute:
            fields = fields[1:]
        spans = []
        if fields:
            first = self.locations[fields[0]].offset
            start = self.slots[self.current_slot].offset
            spans.append(Span(start + first, first, self.layout.nbytes - first))
        if self.gradient_extent is not None:
            spans.append(Span(self.gradient_extent.offset, self.layout.nbytes, self.layout.gradient_bytes))
        return tuple(spans)

    def dtype(self, name: Field) -> torch.dtype:
        if name is Field.COMPUTE:
            return self.compute_dtype
        if name is Field.REMAINDER:
            return torch.int16
        return _STATE_DTYPES[self.layout.itemsize(name)]

    def view(self, name: Field, lease: Lease | None) -> torch.Tensor:
        """Return a field's elements (1-D, `layout.field_numel`) while the chunk is in use under `lease`."""
        location = self.locations[name]
        if location.tensor is not None:
            return location.tensor
        assert lease is not None
        return lease.view(location.dtype, location.offset, location.numel)

    def views(self, lease: Lease | None) -> dict[Field, torch.Tensor]:
        """Return all fields, as `view` does each."""
        views = {name: at.tensor for name, at in self.locations.items() if at.tensor is not None}
        if lease is not None:
            whole = lease.view(torch.uint8)
            for name, at in self.locations.items():
                if at.tensor is None:
                    views[name] = whole[at.offset : at.offset + at.numel * at.dtype.itemsize].view(at.dtype)
        return views

    def master(self, lease: Lease | None) -> torch.Tensor:
        """Return the master weights (1-D, fp32): a view, or joined in new memory. `set_master` follows a change."""
        if not self.layout.split:
            return self.view(Field.MASTER, lease)
        return join(self.view(Field.COMPUTE, lease), self.view(Field.REMAINDER, lease), self.ties)

    def set_master(self, master: torch.Tensor, lease: Lease | None) -> None:
        """Store the changed result of `master`, and the compute parameter if there is one."""
        if self.layout.split:
            self.ties = split(master, self.view(Field.COMPUTE, lease), self.view(Field.REMAINDER, lease))
        elif Field.COMPUTE in self.layout.fields:
            self.view(Field.COMPUTE, lease).copy_(master)

    @contextlib.contextmanager
    def part_of_master(self, low: int, high: int, lease: Lease | None) -> Iterator[torch.Tensor]:
        """Yield elements [low, high) of the master weights (1-D, fp32), to be changed in the block. Split masters are
        joined, and split again after the block. Otherwise it is a view; call `set_master` after all changes."""
        if not self.layout.split:
            yield self.view(Field.MASTER, lease)[low:high]
            return
        copy, remainder = self.view(Field.COMPUTE, lease)[low:high], self.view(Field.REMAINDER, lease)[low:high]
        master = join(copy, remainder, self.ties[(self.ties >= low) & (self.ties < high)] - low)
        yield master
        self.set_ties(split(master, copy, remainder) + low, low, high)

    def sources(self) -> list[Source]:
        """Return the places of all its fields, in order; neighbours on NVMe are one source."""
        sources: list[Source] = []
        for name in self.layout.fields:
            location = self.locations[name]
            if location.tensor is not None:
                sources.append(Source(location.nbytes, memory=location.tensor.view(torch.uint8).numpy().data))
                continue
            offset = self.extent.offset + location.offset
            last = sources[-1] if sources else None
            if last is not None and last.memory is None and last.offset + last.nbytes == offset:
                sources[-1] = Source(last.nbytes + location.nbytes, last.offset)
            else:
                sources.append(Source(location.nbytes, offset))
        return sources

    def set_ties(self, ties: torch.Tensor, low: int, high: int) -> None:
        """Replace the ties among elements [low, high) by these (ascending)."""
        self.ties = torch.cat([self.ties[self.ties < low], ties, self.ties[self.ties >= high]])


class Slots:
    """Writes sub-groups without changing committed or snapshotted bytes. Used by one thread at a time."""

    def __init__(self, sub_groups: Sequence[PagedSubGroup], health: ModelHealth, stager: Stager) -> None:
        self._sub_groups, self._health, self._stager = sub_groups, health, stager
        self._copying: Copying | None = None
        self._snapshot_slots: list[int] = []
        """By sub-group: the slot that the checkpoint copies."""

    def start_copying(self, copying: Copying) -> None:
        """Begin a checkpoint's copy of all current values, which must be written already."""
        self._copying = copying
        self._snapshot_slots = [sub.current_slot for sub in self._sub_groups]

    def write_current(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease to the slot that may be written, and make it current.

        If the lease holds nothing but its gradient, all of its state is in host memory, and the lease only goes back.
        """
        if not sub.layout.nbytes:
            self._stager.release(sub.chunk, keep=False)
            return
        self._health.check_not_sealed()
        slot = sub.write_slot
        self.wait_for_checkpoint_copy(sub, slot)
        sub.chunk.writes = sub.slot_span(slot)
        self._stager.write_back(sub.chunk)
        sub.current_slot = slot

    def write_other_slot(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease to the other slot; the current slot keeps the values."""
        self._health.check_not_sealed()
        slot = 1 - sub.current_slot
        self.wait_for_checkpoint_copy(sub, slot)
        sub.chunk.writes = sub.slot_span(slot)
        self._stager.write_back(sub.chunk)

    def leave_committed(self, sub: PagedSubGroup) -> bool:
        """Copy a sub-group's values to the other slot if they are committed, before a range of them is written. Returns
        True if they were copied, and its reads must be pointed to that slot."""
        self._health.check_not_sealed()
        if sub.current_slot != sub.committed_slot:
            return False
        stager, slot = self._stager, sub.write_slot
        self.wait_for_checkpoint_copy(sub, slot)
        name = f"committed state of sub-group {sub.layout.index}"
        reads, writes = sub.slot_span(sub.current_slot), sub.slot_span(slot)
        chunk = Chunk(name, sub.layout.nbytes, reads, writes, after=(sub.chunk,))
        stager.acquire(chunk)
        stager.write_back(chunk)
        stager.settle(chunk)
        sub.current_slot = slot
        return True

    def wait_for_checkpoint_copy(self, sub: PagedSubGroup, slot: int) -> None:
        """Wait until a checkpoint has copied a sub-group's bytes in `slot` or in host memory, before they change."""
        copying, index = self._copying, sub.layout.index
        if copying is None or copying.is_copied(index):
            return
        if sub.rests_in_host or slot == self._snapshot_slots[index]:
            with self._stager.stalling(f"the checkpoint's copy of {sub.chunk.name}"):
                copying.wait_for(index)

    def close(self) -> None:
        """Forget the checkpoint; nothing is written any more."""
        self._copying = None
