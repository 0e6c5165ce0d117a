"""The places of a model's bytes, resolved once: arena extents, offsets in the host cache, tensors in host memory.

Makes the sub-groups and groups of a `PagedModel`; see [Note: Where bytes rest] in sub_group.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from infinity.aio import Lease, PinnedSlab, near
from infinity.store.arena import Arena, Extent
from infinity.store.foreign import ForeignFiles
from infinity.store.layout import Field, Layout, SubGroup
from infinity.swap.group import ForeignReads, PagedGroup, group_chunk
from infinity.swap.options import PagingOptions
from infinity.swap.shard import spans_of
from infinity.swap.stager import Chunk
from infinity.swap.sub_group import Location, PagedSubGroup, Tier


def place_sub_groups(
    layout: Layout,
    arena: Arena,
    stored: str,
    *,
    has_second: Callable[[SubGroup], bool],
    dtype: torch.dtype,
    on_lost: Callable[[PagedSubGroup, str], None],
) -> list[PagedSubGroup]:
    """Make all sub-groups with their extents, in this order: first slots, second slots, gradients.

    `has_second`: returns True for sub-groups with a second slot. `dtype`: of compute parameters. Fields in host memory
    get their places in `place_held` and `place_cached`. Raises StoreError, naming `stored`, if the arena can't hold the
    extents; nothing is reserved then.
    """
    sub_groups = layout.sub_groups
    twice = [sub for sub in sub_groups if has_second(sub)]
    spilled = [sub for sub in sub_groups if sub.gradient_bytes]
    sizes = [*(sub.nbytes for sub in (*sub_groups, *twice)), *(sub.gradient_bytes for sub in spilled)]
    extents = iter(arena.reserve(sizes, stored) if any(sizes) else [Extent(0, 0)] * len(sizes))
    slots = {sub.index: [next(extents)] for sub in sub_groups}
    for sub in twice:
        slots[sub.index].append(next(extents))
    gradient_of = {sub.index: next(extents) for sub in spilled}
    placed = []
    for sub in sub_groups:
        chunk = Chunk(f"sub-group {sub.index}", sub.lease_bytes, (), ())
        paged = PagedSubGroup(sub, tuple(slots[sub.index]), chunk, dtype, gradient_of.get(sub.index))
        chunk.on_lost = partial(on_lost, paged)
        for name in sub.fields:
            paged.locations[name] = _location(paged, name)
        placed.append(paged)
    return placed


def place_held(sub_groups: Sequence[PagedSubGroup], node: int | None) -> list[str]:
    """Place held fields, one after another, in memory of a NUMA node. Returns the requests that the machine refused."""
    held = [(sub, name) for sub in sub_groups for name in sub.layout.fields if name in sub.layout.held]
    nbytes, notes = sum(sub.layout.field_bytes(name) for sub, name in held), list[str]()
    if nbytes:
        with near(node, notes):
            slab = PinnedSlab(nbytes)
        view = partial(_view, slab)
        at = 0
        for sub, name in held:
            at = _place(sub, name, view, at)
    return notes


def place_cached(sub_groups: Sequence[PagedSubGroup], groups: Sequence[PagedGroup], cache: Lease) -> None:
    """Place cached fields: first the gathered ones by group, so that each group is contiguous; then the others."""
    cache.view(torch.uint8).zero_()  # like arena bytes that were never written
    at = 0
    for group in groups:
        first = at
        for sub in group.members:
            if sub.layout.gathered in sub.layout.cached:
                at = _place(sub, sub.layout.gathered, cache.view, at)
        if group.members and not group.foreign.nbytes and not any(sub.gathers_from_nvme for sub in group.members):
            numel = sum(sub.layout.numel for sub in group.members)
            group.cached = cache.view(group.members[0].compute_dtype, first, numel)
    for sub in sub_groups:
        for name in sub.layout.cached:
            if sub.locations[name].tensor is None:
                at = _place(sub, name, cache.view, at)


def make_groups(
    layout: Layout, names: Sequence[str], sub_groups: Sequence[PagedSubGroup], options: PagingOptions
) -> list[PagedGroup]:
    """Make the groups, with their members and shard numbers. `open_chunks` adds their chunks."""
    groups = [PagedGroup(index, name, options.timing_of(index)) for index, name in enumerate(names)]
    first = 0
    for space, group in enumerate(groups):
        group.members = [sub_groups[sub.index] for sub in layout.by_space[space]]
        count = sum(shard.group == space for shard in layout.shards)
        group.shards, first = range(first, first + count), first + count
        assert all(layout.shards[index].group == space for index in group.shards), (
            "the shards of a group are not contiguous"
        )
        group.delivery.stays = group.resident_delivery.stays = options.keep_on_device
    return groups


def place_foreign(layout: Layout, groups: Sequence[PagedGroup], files: ForeignFiles) -> None:
    """Set the reads of each group in foreign files, behind its flat space."""
    for group in groups:
        part, first = layout.foreign[group.index], layout.gathered_bytes(group.index)
        read_and_filled = [spans_of(files, pages.range, first + pages.lease_offset) for pages in part.pages]
        reads = tuple(span for spans, _ in read_and_filled for span in spans)
        group.foreign = ForeignReads(part.nbytes, reads, tuple(fill for _, fills in read_and_filled for fill in fills))


def open_chunks(layout: Layout, sub_groups: Sequence[PagedSubGroup], groups: Sequence[PagedGroup]) -> None:
    """Set the chunk that fetches each group, and the writes of each sub-group; all fields must be placed."""
    for sub in sub_groups:
        sub.chunk.writes = sub.slot_span(0)
    for group in groups:
        group.chunk = group_chunk(group, layout.gathered_bytes(group.index) + group.foreign.nbytes)


def _location(sub: PagedSubGroup, name: Field) -> Location:
    layout: SubGroup = sub.layout
    nbytes, numel, dtype = layout.field_bytes(name), layout.field_numel(name), sub.dtype(name)
    if name in layout.held or name in layout.cached:  # until `place_held` or `place_cached`
        return Location(Tier.HOST, nbytes, dtype, numel)
    return Location(Tier.NVME, nbytes, dtype, numel, layout.field_offset(name))


def _view(slab: PinnedSlab, dtype: torch.dtype, at: int, numel: int) -> torch.Tensor:
    return torch.frombuffer(slab, dtype=dtype, count=numel, offset=at)


def _place(sub: PagedSubGroup, name: Field, view: Callable[[torch.dtype, int, int], torch.Tensor], at: int) -> int:
    """Place a field at byte `at` of the memory that `view` gives. Returns the next free byte."""
    location = sub.locations[name]
    sub.locations[name] = replace(location, tensor=view(location.dtype, at, location.numel))
    return at + location.nbytes
