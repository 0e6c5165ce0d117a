"""Floor 4. A model whose state rests in the arena: its groups, shards and sub-groups, and access to single ranges.

Knows bytes and chunks; knows neither FSDP2 nor the optimizer. Used by the training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from infinity.aio import Lease
from infinity.device import Landing
from infinity.errors import InfinityError
from infinity.store import Arena, Extent, Field, Layout, SubGroup
from infinity.swap.budget import ACCESS_BYTES
from infinity.swap.chunk import Chunk, ChunkState, Span
from infinity.swap.stager import Stager
from infinity.units import PAGE_BYTES, align_up

_RANGE_BYTES = ACCESS_BYTES - 2 * PAGE_BYTES


@dataclass(eq=False)
class PagedSubGroup:
    """One sub-group and the chunk through which the optimizer reads and writes it.

    `held`: the fields that stay in host memory (1-D). The chunk of one that holds all of them moves nothing and is never used.
    """

    layout: SubGroup
    extent: Extent
    chunk: Chunk
    held: dict[Field, torch.Tensor]
    copy_dtype: torch.dtype

    @property
    def moves(self) -> bool:
        """Whether stepping it takes bytes from the arena."""
        return self.layout.nbytes > 0

    def dtype(self, which: Field) -> torch.dtype:
        """Of the field's elements."""
        return self.copy_dtype if which is Field.COPY else torch.float32

    def view(self, which: Field, lease: Lease | None) -> torch.Tensor:
        """The field's elements (1-D, `layout.numel`) while the chunk is in use under `lease` (None where nothing moves)."""
        if which in self.held:
            return self.held[which]
        assert lease is not None
        return lease.view(self.dtype(which), self.layout.field_offset(which), self.layout.numel)


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

    def read(self, which: Field, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of a field (1-D, fp32, on the CPU) in ordinary memory.

        Raises InfinityError after a torn step: see `PagedModel.check_whole`.
        """
        self.model.check_whole()
        out = torch.empty(numel, dtype=torch.float32)

        def take(staged: torch.Tensor, at: int) -> None:
            out[at - start : at - start + staged.numel()].copy_(staged)

        self.model._access(self, which, start, numel, take, write=False)
        return out

    def write(self, which: Field, start: int, values: torch.Tensor) -> None:
        """Set elements [start, start + values.numel()) of a field (1-D). Setting the master sets its copies too."""

        def give(staged: torch.Tensor, at: int) -> None:
            staged.copy_(values[at - start : at - start + staged.numel()])

        numel = values.numel()
        self.model._access(self, which, start, numel, give, write=True)
        if which in (Field.EXP_AVG, Field.EXP_AVG_SQ):
            self.stepped = True
        if which is Field.MASTER:
            if self.resident is not None:
                self.resident[start : start + numel].copy_(values)
            elif self.model.has_copy:
                self.model._access(self, Field.COPY, start, numel, give, write=True)
            self.filled = True


@dataclass(eq=False)
class PagedGroup:
    """The shards that FSDP2 gathers together. `chunk` fetches the copies of all of them that are not resident; where these are
    cached there is none, and `cached` holds them (1-D, the group's flat space)."""

    index: int
    name: str
    shards: list[PagedShard] = field(default_factory=list)
    chunk: Chunk | None = None
    cached: torch.Tensor | None = field(default=None, repr=False)
    gathering: set[int] = field(default_factory=set)
    """Numbers of the shards that were handed to FSDP2 and not yet gathered."""
    landing: Landing | None = None
    """Fires when the device has taken over the last of the shards that were handed over."""

    @property
    def handed_over(self) -> bool:
        """Whether every shard that its chunk fetches was handed over."""
        return all(shard.resident is not None or shard.index in self.gathering for shard in self.shards)


class PagedModel:
    """Lays shards out in the arena and keeps what is needed to find them.

    Args:
        copy_dtype: what is gathered: bf16, fp16, or fp32.
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
        copy_dtype: torch.dtype,
        stager: Stager,
        arena: Arena,
        what: str,
    ) -> None:
        self.layout = layout
        self.copy_dtype = copy_dtype
        self.has_copy = any(Field.COPY in each.fields for each in layout.sub_groups)
        self._open_stager: Stager | None = stager
        self._torn: str | None = None
        extents = arena.reserve([s.nbytes for s in layout.sub_groups], what) if layout.nbytes else []
        nowhere = [Extent(0, 0)] * len(layout.sub_groups)
        self.sub_groups = [
            self._sub_group(s, extent) for s, extent in zip(layout.sub_groups, extents or nowhere, strict=True)
        ]
        self.groups = [PagedGroup(index, name) for index, name in enumerate(group_names)]
        self.shards: list[PagedShard] = []
        self._by_space = [[self.sub_groups[s.index] for s in cuts] for cuts in layout.by_space]
        self._cache = stager.make_room(layout.cached_bytes, "the host cache") if layout.cached_bytes else None
        if self._cache is not None:
            self._place_cached(self._cache)
        for space, group in enumerate(self.groups):
            group.chunk = self._group_chunk(group, self._by_space[space])
        self._add_shards(shapes)

    def tear(self, why: str) -> None:
        """From now on the values are not those of one step: some were updated and some were not, or a write was lost."""
        self._torn = self._torn or why

    def mend(self) -> None:
        """All values were set anew."""
        self._torn = None

    def close(self) -> None:
        """Let go of all that holds memory. The values can't be used any more; idempotent."""
        if self._open_stager is None:
            return
        for group in self.groups:
            self.forget(group)
            group.cached = None
            if group.chunk is not None:
                group.chunk.fills = ()
        for shard in self.shards:
            shard.resident = None
        for sub in self.sub_groups:
            sub.held.clear()
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
        """Raise InfinityError when the values are torn (naming the failure; they may still be set, not used), or gone."""
        _ = self._stager
        if self._torn is not None:
            raise InfinityError(
                f"the parameters and their optimizer state are torn, part of them old and part new, since this failed: "
                f"{self._torn}; load a checkpoint (or a state dict of the model, then one of the optimizer) before going on"
            )

    def gathered_view(self, shard: PagedShard) -> torch.Tensor:
        """The shard's copy (1-D, padded) in its group's lease, or where it is resident or cached. A chunk must be in use."""
        if shard.resident is not None:
            return shard.resident
        _, start = self.layout.place[shard.index]
        numel = self.layout.shards[shard.index].numel
        if shard.group.cached is not None:
            return shard.group.cached[start : start + numel]
        assert shard.group.chunk is not None and shard.group.chunk.lease is not None
        return shard.group.chunk.lease.view(self.copy_dtype, start * self.copy_dtype.itemsize, numel)

    def forget(self, group: PagedGroup) -> None:
        """Drop the group's staged copies, which are about to be stale, whoever was to gather them. Cached ones, which are about
        to be changed, the device has copied after this.

        FSDP2 may fetch a group ahead and then not use it: what it fetched is copied by then, and never reported gathered.
        """
        group.gathering.clear()
        if group.cached is not None and group.landing is not None:
            group.landing.wait()
        group.landing = None
        if group.chunk is None:
            return
        if group.chunk.state is ChunkState.IN_USE:
            self._stager.release(group.chunk, keep=False)
        self._stager.drop(group.chunk)

    def _sub_group(self, layout: SubGroup, extent: Extent) -> PagedSubGroup:
        state = [each for each in layout.resting if each is not Field.COPY]
        first = layout.field_offset(state[0]) if state else layout.nbytes
        reads = (Span(extent.offset + first, first, layout.nbytes - first),) if state else ()
        writes = (Span(extent.offset, 0, layout.nbytes),) if layout.nbytes else ()
        chunk = Chunk(f"sub-group {layout.index}", layout.nbytes, reads, writes, on_lost=self.tear)
        sub = PagedSubGroup(layout, extent, chunk, {}, self.copy_dtype)
        for which in layout.held:
            if which in layout.fields:
                sub.held[which] = torch.zeros(layout.numel, dtype=sub.dtype(which))
        return sub

    def _place_cached(self, cache: Lease) -> None:
        """Give the cached fields their places: group by group what is gathered, so that it lies in one piece, then the rest."""
        cache.view(torch.uint8).zero_()  # like bytes of the arena that were never written
        at = 0
        for group, members in zip([*self.groups, None], self._by_space, strict=True):
            first = at
            for sub in members:
                if group is not None and sub.layout.gathered in sub.layout.cached:
                    at = _place(sub, sub.layout.gathered, cache, at)
            if group is not None and members and all(sub.layout.gathered in sub.held for sub in members):
                group.cached = cache.view(self.copy_dtype, first, sum(sub.layout.numel for sub in members))
        for sub in self.sub_groups:
            for which in sub.layout.cached:
                if which not in sub.held:
                    at = _place(sub, which, cache, at)

    def _add_shards(self, shapes: Sequence[tuple[torch.Size, torch.Size]]) -> None:
        for index, (spec, (shape, padded)) in enumerate(zip(self.layout.shards, shapes, strict=True)):
            group = self.groups[spec.group]
            shard = PagedShard(spec.name, index, shape, padded, spec.trained, group, self)
            if spec.resident:
                shard.resident = torch.zeros(spec.numel, dtype=self.copy_dtype)
            group.shards.append(shard)
            self.shards.append(shard)

    def _group_chunk(self, group: PagedGroup, members: Sequence[PagedSubGroup]) -> Chunk | None:
        if not members or group.cached is not None:
            return None
        spans, fills, total = [], [], 0
        for member in members:
            which = member.layout.gathered
            itemsize = member.layout.itemsize(which)
            start, nbytes = member.layout.start * itemsize, member.layout.numel * itemsize
            if which in member.held:
                fills.append((start, member.held[which]))
            else:
                spans.append(Span(member.extent.offset + member.layout.field_offset(which), start, nbytes))
            total += nbytes
        after = tuple(member.chunk for member in members)
        return Chunk(f"group {group.name}", total, tuple(spans), (), after=after, fills=tuple(fills))

    def _access(
        self,
        shard: PagedShard,
        which: Field,
        start: int,
        numel: int,
        move: Callable[[torch.Tensor, int], None],
        *,
        write: bool,
    ) -> None:
        """Call `move(elements, first)` for the ranges that make up [start, start + numel), staged; write them back.

        The bytes around a range that share its first and last page are read first and written back unchanged.
        """
        if write and which in (Field.MASTER, Field.COPY):
            self.forget(shard.group)
        for sub, at, low, count in self._ranges(shard, which, start, numel):
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
            chunk = Chunk(name, whole.nbytes, reads, (whole,), after=(sub.chunk,), on_lost=self.tear)
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

    def _ranges(
        self, shard: PagedShard, which: Field, start: int, numel: int
    ) -> Iterator[tuple[PagedSubGroup, int, int, int]]:
        """(sub-group, first element of the shard, first element of the sub-group, count), each of a bounded size."""
        space, _ = self.layout.place[shard.index]
        for sub in self._by_space[space]:
            step = _RANGE_BYTES // sub.layout.itemsize(which)
            for piece in sub.layout.pieces:
                if piece.shard != shard.index:
                    continue
                low, high = max(start, piece.start), min(start + numel, piece.start + piece.numel)
                for at in range(low, high, step):
                    yield sub, at, piece.offset + at - piece.start, min(step, high - at)


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
