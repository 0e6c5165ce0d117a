"""A model whose state is in the arena: its groups, shards and sub-groups, the health of its values, and its commits.

Handles bytes and chunks, not FSDP2 or the optimizer. Used by one thread at a time. Parameters are moved in
parameter_lap.py, gradients and updates in gradient_lap.py and pending_updates.py, single ranges in values.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch

from infinity.aio import Lease
from infinity.device import HostBuffer, HostBuffers
from infinity.fsdp2.sharding import forget_gathered
from infinity.store.arena import Arena
from infinity.store.arena_copy import Copying
from infinity.store.commit import SUM_BYTES
from infinity.store.files import StoredFile
from infinity.store.foreign import FOREIGN_DTYPES, ForeignFiles, StoredTensor
from infinity.store.layout import Field, Layout
from infinity.swap.group import PagedGroup
from infinity.swap.health import Health, ModelHealth
from infinity.swap.options import PagingOptions, is_speculative
from infinity.swap.pending_updates import PendingUpdates
from infinity.swap.placement import (
    make_groups,
    open_chunks,
    place_cached,
    place_foreign,
    place_held,
    place_sub_groups,
)
from infinity.swap.shard import CodedShard, ForeignShard, PagedShard
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup, Slots
from infinity.swap.values import PieceOf, Values
from infinity.units import PAGE_BYTES


class PagedModel:
    """Lays shards out in the arena and keeps what is needed to find them.

    Args:
        compute_dtype: of gathered parameters: bf16, fp16, or fp32.
        options: decide when groups are updated; None: the defaults.
        group_ranks: this rank's number in each group; None: 0.
        staying: numbers of the groups whose compute parameters stay staged. gather_in_place: gather frozen ones there.
        host_memory: holds the compute parameters that stay in host memory; None: ordinary memory.
        durable: keep committed bytes, in twice the space: see [Note: A/B slots]. Nothing is held or cached then.
        foreign: the foreign files of shards that have `Shard.foreign`.
        stored: the name of the bytes in an error about missing space.

    Takes a lease for everything that stays in pinned memory, until `close`. Raises StoreError if the arena can't hold
    the other bytes; nothing is reserved then.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        group_names: Sequence[str],
        shapes: Sequence[tuple[torch.Size, torch.Size]],
        compute_dtype: torch.dtype,
        group_ranks: Sequence[int] | None = None,
        options: PagingOptions | None = None,
        staying: Collection[int] = frozenset(),
        gather_in_place: bool = False,
        durable: bool = False,
        stager: Stager,
        arena: Arena,
        host_memory: HostBuffers | None = None,
        foreign: ForeignFiles | None = None,
        stored: str,
    ) -> None:
        assert not (durable and any(sub.held or sub.cached for sub in layout.sub_groups))
        self.layout = layout
        self.compute_dtype = compute_dtype
        self.health = ModelHealth(on_ill=lambda: self.updates.clear())
        self.stager = stager
        self._arena = arena
        options = options or PagingOptions()
        self.sub_groups = place_sub_groups(
            layout,
            arena,
            stored,
            has_second=lambda sub: durable or is_speculative(layout, sub, options),
            dtype=compute_dtype,
            on_lost=self._lose,
        )
        for sub in self.sub_groups:
            sub.is_speculative = is_speculative(layout, sub.layout, options)
        self.notes = place_held(self.sub_groups, stager.device.numa_node)
        """Requests that the machine refused."""
        self.groups = make_groups(layout, group_names, self.sub_groups, options)
        self._foreign = foreign
        if foreign is not None:
            place_foreign(layout, self.groups, foreign)
        self._cache = stager.make_room(layout.cached_bytes, "the host cache") if layout.cached_bytes else None
        if self._cache is not None:
            place_cached(self.sub_groups, self.groups, self._cache)
        open_chunks(layout, self.sub_groups, self.groups)
        for index in staying:
            group = self.groups[index]
            if group.chunk is not None:
                group.chunk.home = stager.make_room(group.chunk.lease_bytes, group.chunk.name)
                group.stays, group.may_gather_in_place = True, gather_in_place
        self._slots = Slots(self.sub_groups, self.health, stager)
        self.updates = PendingUpdates(self.groups, self.sub_groups, self._slots, self.health, stager)
        self.updates.point_all()
        self.values = Values(
            self.updates,
            self._slots,
            self.health,
            stager,
            compute_dtype=compute_dtype,
            has_compute_field=any(Field.COMPUTE in sub.fields for sub in layout.sub_groups),
        )
        self._residents: HostBuffer | None = None
        self.shards = self._make_shards(shapes, group_ranks, host_memory)

    @property
    def foreign_names(self) -> frozenset[str]:
        """The parameters that are in foreign files."""
        return frozenset(shard.name for shard in self.layout.shards if shard.foreign)

    @property
    def leases(self) -> list[Lease]:
        """The leases that it holds until `close`."""
        homes = [group.chunk.home for group in self.groups if group.chunk is not None]
        return [lease for lease in (*self.only_copies, *homes) if lease is not None]

    @property
    def only_copies(self) -> list[Lease]:
        """Those of them that hold bytes which are nowhere else."""
        return [self._cache] if self._cache is not None else []

    def recover(self) -> None:
        """Clean up after an interrupted pass: nothing is gathered or in flight. No chunk may be in use."""
        self.health.settle()
        for group in self.groups:
            group.recover()
        self.updates.recover()

    def close(self) -> None:
        """Release everything that holds memory, and make the values unusable. Idempotent."""
        if self.health.state is Health.CLOSED:
            return
        self._slots.close()
        for group in self.groups:
            group.forget(self.stager)
            group.forget_resident()
            group.cached = group.resident = None
            if group.chunk is not None:
                group.chunk.fills = ()
            if group.may_gather_in_place and group.sharded_module is not None:
                forget_gathered(group.sharded_module)
        for shard in self.shards:
            shard.resident = None
        if self._residents is not None:
            self._residents.give_back()
        self.updates.clear()
        for sub in self.sub_groups:
            sub.locations.clear()
        self.health.close()
        for lease in self.leases:
            lease.give_back()
        for group in self.groups:
            group.stays = False
            if group.chunk is not None:
                group.chunk.home = None

    # All values: checkpoints and commits.

    def start_copying(self, path: Path, finish: Callable[[StoredFile], None]) -> Copying:
        """Start to copy all values as they are now into the new file `path`, while training continues.

        `finish` then runs with the file on the copying thread. `join` or `cancel` must end the copy before the next one
        and before `close`. No update may wait, and all values must be written. Raises IoError, OSError.
        """
        assert not self.updates.waiting
        sections = [sub.sources() for sub in self.sub_groups]
        copying = Copying(self._arena, sections, path, finish)
        self._slots.start_copying(copying)
        return copying

    def page_sums(self) -> bytes:
        """Return the checksum of each page of the state, by sub-group; empty if the arena keeps no checksums."""
        if not self._arena.file.checked:
            return b""
        return b"".join(self._arena.file.checksums(sub.extent.offset, sub.layout.nbytes) for sub in self.sub_groups)

    def mark_committed(self) -> None:
        """Record that a commit holds all current values, all written. They are not changed until the next commit."""
        assert not self.updates.waiting
        for sub in self.sub_groups:
            sub.committed_slot = sub.current_slot

    def restore(
        self,
        slots: Sequence[int],
        ties: Sequence[torch.Tensor],
        filled: Sequence[bool],
        stepped: Sequence[bool],
        sums: bytes,
    ) -> None:
        """Adopt the values of an earlier process's commit, by sub-group (slots, ties) and by shard (filled, stepped).
        Reads are verified against `sums`, the result of `page_sums` there, unless it is empty."""
        for sub, slot, committed_ties in zip(self.sub_groups, slots, ties, strict=True):
            sub.current_slot = sub.committed_slot = slot
            sub.ties = committed_ties
        self._set_page_sums(sums)
        self.updates.point_all()
        for shard, has_values, has_moments in zip(self.shards, filled, stepped, strict=True):
            shard.filled, shard.stepped = has_values, has_moments
            if shard.resident is not None and has_values:
                shard.refresh_resident()

    def _set_page_sums(self, sums: bytes) -> None:
        if not sums or not self._arena.file.checked:
            return
        at = 0
        for sub in self.sub_groups:
            length = sub.layout.nbytes // PAGE_BYTES * SUM_BYTES
            self._arena.file.set_checksums(sub.extent.offset, sums[at : at + length])
            at += length

    # Implementation.

    def _lose(self, sub: PagedSubGroup, why: str) -> None:
        """Handle a failed write of a sub-group. A lost update that is not accepted, or was discarded, tears nothing."""
        if not self.updates.speculation.discard(sub) and sub.chunk.writes == sub.slot_span(sub.current_slot):
            self.health.tear(why)

    def _make_shards(
        self,
        shapes: Sequence[tuple[torch.Size, torch.Size]],
        group_ranks: Sequence[int] | None,
        host_memory: HostBuffers | None,
    ) -> list[PagedShard]:
        """Make all shards, and the memory of the resident ones; those of a group lie one after another."""
        pieces: list[list[PieceOf]] = [[] for _ in shapes]
        for sub in self.sub_groups:
            for piece in sub.layout.pieces:
                pieces[piece.shard].append((sub, piece))
        numel = sum(spec.numel for spec in self.layout.shards if spec.resident)
        if host_memory is not None and numel:
            self._residents = host_memory.lend(numel, self.compute_dtype)
        residents = self._residents.tensor.zero_() if self._residents else torch.zeros(numel, dtype=self.compute_dtype)
        shards: list[PagedShard] = []
        at = 0
        for group in self.groups:
            first = at
            resident_sub_groups: dict[int, PagedSubGroup] = {}
            for index in group.shards:
                spec, (shape, padded) = self.layout.shards[index], shapes[index]
                if spec.foreign:
                    shards.append(self._make_foreign_shard(index, group, shape, padded))
                    continue
                delivery = group.resident_delivery if spec.resident else group.delivery
                itemsize = self.compute_dtype.itemsize
                start = itemsize * (at - first if spec.resident else self.layout.place[index][1])
                place = slice(start, start + itemsize * padded.numel())
                shard = PagedShard(
                    spec.name,
                    index,
                    shape,
                    padded,
                    spec.trained,
                    group,
                    delivery,
                    place,
                    self.compute_dtype,
                    pieces[index],
                    self.values,
                    first=padded.numel() * (group_ranks[group.index] if group_ranks else 0),
                )
                shards.append(shard)
                if spec.resident:
                    shard.resident = residents[at : at + spec.numel]
                    at += spec.numel
                    resident_sub_groups |= {sub.layout.index: sub for sub in shard.sub_groups}
            if any(self.layout.shards[index].resident for index in group.shards):  # perhaps without elements
                group.resident = residents[first:at]
            group.resident_sub_groups = list(resident_sub_groups.values())
        return shards

    def _make_foreign_shard(self, index: int, group: PagedGroup, shape: torch.Size, padded: torch.Size) -> ForeignShard:
        assert self._foreign is not None
        part, first = self.layout.foreign[group.index], self.layout.gathered_bytes(group.index)
        rows, stored = part.rows[index], part.rows[index].stored
        nbytes = [file_range.nbytes for file_range in rows.ranges]
        places = [slice(first + at, first + at + size) for at, size in zip(part.places[index], nbytes, strict=True)]
        make: Callable[..., ForeignShard] = ForeignShard
        if not isinstance(stored, StoredTensor):
            make = partial(CodedShard, places=places, coded=stored)
        return make(
            self.layout.shards[index].name,
            index,
            shape,
            padded,
            False,
            group,
            group.delivery,
            slice(places[0].start, places[0].start + rows.padded_bytes),
            FOREIGN_DTYPES[stored.dtype] if isinstance(stored, StoredTensor) else self.compute_dtype,
            (),
            self.values,
            filled=True,
            rows=rows,
            files=self._foreign,
            stager=self.stager,
        )
