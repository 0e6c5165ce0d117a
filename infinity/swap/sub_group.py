"""The paged sub-group: where each of its fields is, and what its bytes mean while they are in memory.

`Slots` writes a sub-group where that is allowed, as commits and checkpoints come first. All else here is data and pure looks
at it.

[Note: Where bytes rest]
A `Location` says where one field of one sub-group rests. It is resolved once, when the model is paged, and never changes:
reads, the bytes of a step, what a checkpoint copies and the view that an update works on follow from it. What stays in host
memory (held or cached there) has a tensor; what rests on NVMe has an offset, which is the same in every slot and in the lease
of the sub-group's chunk. Which slot is current is the one thing that moves: see [Note: A/B slots].

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
from infinity.swap.chunk import Chunk, Span
from infinity.swap.health import ModelHealth
from infinity.swap.stager import Stager

_STATE_DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}

SubGroupUpdate = Callable[[Lease | None], None]
"""Updates a sub-group in place, whose state is under the lease (None where nothing of it moves)."""


class Tier(enum.Enum):
    """What kind of memory a field rests in."""

    HOST = "host"
    """Host memory, pinned or not: `Location.tensor`."""
    NVME = "nvme"
    """The arena: `Location.offset` of each slot."""


@dataclass(frozen=True)
class Location:
    """Where one field of a sub-group rests: see [Note: Where bytes rest]."""

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

    `slots`: its extents in the arena; two in a durable run, or where its updates are speculative. `current_slot` is the number
    of the one that holds its values, `committed_slot` of the one that must stay as it is. `gradient_extent`: in which its
    gradient waits for the update, where that is not in host memory. `ties`: where a split master was rounded up on a tie
    (int32, ascending): see [Note: Split masters] in infinity/optim/kernel.py. The chunk of one that rests in host memory
    altogether moves nothing.
    """

    layout: SubGroup
    slots: tuple[Extent, ...]
    chunk: Chunk
    compute_dtype: torch.dtype
    gradient_extent: Extent | None = None
    locations: dict[Field, Location] = field(default_factory=dict, repr=False)
    ties: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32), repr=False)
    staged: torch.Tensor | None = field(default=None, repr=False)
    """While it is updated: its compute parameters (1-D) where its group is staged. The update takes them from there, and puts
    the new ones there, too; or it sets this to None once it has taken them."""
    is_speculative: bool = False
    """Whether the backward updates it for the step to accept."""
    current_slot: int = 0
    committed_slot: int | None = None

    @property
    def extent(self) -> Extent:
        """The slot that holds its values."""
        return self.slots[self.current_slot]

    @property
    def write_slot(self) -> int:
        """The number of the slot that may be written to."""
        return self.current_slot if self.current_slot != self.committed_slot else 1 - self.current_slot

    @cached_property
    def moves(self) -> bool:
        """Whether stepping it takes bytes from the arena."""
        return self.layout.lease_bytes > 0

    @cached_property
    def unit(self) -> Chunk | PagedSubGroup:
        """What a look-ahead has for its state."""
        return self.chunk if self.moves else self

    @cached_property
    def rests_in_host(self) -> bool:
        """Whether a part of it changes where it rests, in host memory."""
        return any(location.tier is Tier.HOST for location in self.locations.values())

    @cached_property
    def gathers_from_nvme(self) -> bool:
        """Whether gathering it takes bytes from the arena."""
        return self.locations[self.layout.gathered].tier is Tier.NVME

    def slot_span(self, slot: int) -> tuple[Span, ...]:
        """All of one of its slots."""
        return (Span(self.slots[slot].offset, 0, self.layout.nbytes),) if self.layout.nbytes else ()

    def reads(self, *, compute: bool) -> tuple[Span, ...]:
        """What fetches its state and its gradient: with the compute parameter where that is a part of the master, or
        without."""
        fields = self.layout.state
        if fields and fields[0] is Field.COMPUTE and not compute:
            fields = fields[1:]
        spans = []
        if fields:
            first = self.locations[fields[0]].offset
            spans.append(Span(self.extent.offset + first, first, self.layout.nbytes - first))
        if self.gradient_extent is not None:
            spans.append(Span(self.gradient_extent.offset, self.layout.nbytes, self.layout.gradient_bytes))
        return tuple(spans)

    def dtype(self, name: Field) -> torch.dtype:
        """Of the field's elements."""
        if name is Field.COMPUTE:
            return self.compute_dtype
        if name is Field.REMAINDER:
            return torch.int16
        return _STATE_DTYPES[self.layout.itemsize(name)]

    def view(self, name: Field, lease: Lease | None) -> torch.Tensor:
        """The field's numbers (1-D, `layout.field_numel`) while the chunk is in use under `lease` (None: nothing moves)."""
        location = self.locations[name]
        if location.tensor is not None:
            return location.tensor
        assert lease is not None
        return lease.view(location.dtype, location.offset, location.numel)

    def master(self, lease: Lease | None) -> torch.Tensor:
        """The master weights (1-D, fp32): a view, or joined in memory of their own; `set_master` when changed."""
        if not self.layout.split:
            return self.view(Field.MASTER, lease)
        return join(self.view(Field.COMPUTE, lease), self.view(Field.REMAINDER, lease), self.ties)

    def set_master(self, master: torch.Tensor, lease: Lease | None) -> None:
        """Store what `master` returned, changed, and in the compute parameter where there is one."""
        if self.layout.split:
            self.ties = split(master, self.view(Field.COMPUTE, lease), self.view(Field.REMAINDER, lease))
        elif Field.COMPUTE in self.layout.fields:
            self.view(Field.COMPUTE, lease).copy_(master)

    @contextlib.contextmanager
    def part_of_master(self, low: int, high: int, lease: Lease | None) -> Iterator[torch.Tensor]:
        """Elements [low, high) of the master weights (1-D, fp32), to be changed in the block: joined, and split again after it;
        or a view, with `set_master` to follow when all are changed."""
        if not self.layout.split:
            yield self.view(Field.MASTER, lease)[low:high]
            return
        copy, remainder = self.view(Field.COMPUTE, lease)[low:high], self.view(Field.REMAINDER, lease)[low:high]
        master = join(copy, remainder, self.ties[(self.ties >= low) & (self.ties < high)] - low)
        yield master
        self.set_ties(split(master, copy, remainder) + low, low, high)

    def sources(self) -> list[Source]:
        """Where the bytes of all its fields are, in order; neighbours on NVMe are one source."""
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
        """The ties among elements [low, high) are these (ascending)."""
        self.ties = torch.cat([self.ties[self.ties < low], ties, self.ties[self.ties >= high]])


class Slots:
    """Writes sub-groups where that is allowed. Used by one thread at a time."""

    def __init__(self, sub_groups: Sequence[PagedSubGroup], health: ModelHealth, stager: Stager) -> None:
        self._sub_groups, self._health, self._stager = sub_groups, health, stager
        self._copying: Copying | None = None
        self._snapshot_slots: list[int] = []
        """By sub-group: the slot that the checkpoint copies."""

    def start_copying(self, copying: Copying) -> None:
        """A checkpoint has begun to copy all values as they are now; all of them are written."""
        self._copying = copying
        self._snapshot_slots = [sub.current_slot for sub in self._sub_groups]

    def write_current(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease to the slot that may be written to, where its values are from now on.

        Where no more than its gradient was read, all of it is in host memory, and the lease goes back.
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
        """Start writing the sub-group's lease to the slot that doesn't hold its values, which stay as they are."""
        self._health.check_not_sealed()
        slot = 1 - sub.current_slot
        self.wait_for_checkpoint_copy(sub, slot)
        sub.chunk.writes = sub.slot_span(slot)
        self._stager.write_back(sub.chunk)

    def leave_committed(self, sub: PagedSubGroup) -> bool:
        """Before a range of a sub-group is written: where its values are committed, copy them to the other slot. Whether they
        were copied, so that what reads them is to be pointed there."""
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
        """Before a sub-group's bytes in that slot change, or those in host memory: wait until a checkpoint has copied them."""
        copying, index = self._copying, sub.layout.index
        if copying is None or copying.is_copied(index):
            return
        if sub.rests_in_host or slot == self._snapshot_slots[index]:
            with self._stager.stalling(f"the checkpoint's copy of {sub.chunk.name}"):
                copying.wait_for(index)

    def close(self) -> None:
        """Nothing is written any more."""
        self._copying = None
