"""Access to ranges of a paged model's values, for state_dict, checkpoints and reads of single weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from infinity.schedule.pinned import ACCESS_BYTES
from infinity.store.layout import Field, Piece
from infinity.swap.group import PagedGroup
from infinity.swap.health import ModelHealth
from infinity.swap.pending_updates import PendingUpdates
from infinity.swap.stager import Chunk, Span, Stager
from infinity.swap.sub_group import PagedSubGroup, Slots
from infinity.units import PAGE_BYTES, align_up

RANGE_NUMEL = (ACCESS_BYTES - 2 * PAGE_BYTES) // 4
"""Elements that one access moves, at most."""

PieceOf = tuple[PagedSubGroup, Piece]
"""A piece of a shard, and its sub-group."""


class Values:
    """Reads and writes ranges of fields. Used by one thread at a time."""

    def __init__(
        self,
        updates: PendingUpdates,
        slots: Slots,
        health: ModelHealth,
        stager: Stager,
        *,
        compute_dtype: torch.dtype,
        has_compute_field: bool,
    ) -> None:
        self._updates, self._slots, self.health, self._stager = updates, slots, health, stager
        self.compute_dtype, self.has_compute_field = compute_dtype, has_compute_field

    def access(
        self,
        group: PagedGroup,
        ranges: Iterable[tuple[PagedSubGroup, int, int, int]],
        name: Field,
        label: str,
        move: Callable[[torch.Tensor, int], None],
        *,
        write: bool,
    ) -> None:
        """Stage each of the `ranges` (from `ranges_of`) of a field, call `move(elements, first)`, and write it back.

        A write first reads the partly covered first and last page, and keeps their other bytes. `label`: for errors.
        """
        stager, ranges = self._stager, [*ranges]
        for sub, *_ in ranges:
            self._updates.catch_up(sub)
        if write and name in (Field.MASTER, Field.COMPUTE):
            group.forget(stager)
        for sub, at, low, count in ranges:
            if write:
                self._updates.speculation.discard(sub)
                stager.drop(sub.chunk)  # staged for its update
                if self._slots.leave_committed(sub):
                    self._updates.moved(sub)
                self._slots.wait_for_checkpoint_copy(sub, sub.current_slot)
            location = sub.locations[name]
            if location.tensor is not None:
                move(location.tensor[low : low + count], at)
                continue
            dtype = sub.dtype(name)
            offset = sub.extent.offset + location.offset + low * dtype.itemsize
            nbytes = count * dtype.itemsize
            first = offset // PAGE_BYTES * PAGE_BYTES
            pages = Span(first, 0, align_up(offset + nbytes) - first)
            reads = _edges(pages, offset, offset + nbytes) if write else (pages,)
            chunk = Chunk(label, pages.nbytes, reads, (pages,), after=(sub.chunk,), on_lost=self.health.tear)
            lease = stager.acquire(chunk)
            try:
                move(lease.view(dtype, offset - first, count), at)
            except BaseException:
                stager.release(chunk, keep=False)
                raise
            if write:
                stager.write_back(chunk)
                stager.settle(chunk)
            else:
                stager.release(chunk, keep=False)

    def set_sub_group(
        self, sub: PagedSubGroup, ties: torch.Tensor, fill: Callable[[Field, torch.Tensor], None]
    ) -> None:
        """Give a sub-group new values and ties: `fill` sets the elements (1-D) of each field.

        They are written in the background. Raises IoError. The values must be torn meanwhile.
        """
        stager, group = self._stager, self._updates.group_of(sub)
        self._updates.speculation.discard(sub)
        if group is not None:
            group.forget(stager)
        lease = stager.occupy(sub.chunk) if sub.moves else None
        try:
            for name in sub.layout.fields:
                fill(name, sub.view(name, lease))
        except BaseException:
            if lease is not None:
                stager.release(sub.chunk, keep=False)
            raise
        sub.ties = ties
        if lease is not None:
            self._updates.write_and_point(sub)
        if group is not None:
            self._updates.point(group)


def ranges_of(pieces: Sequence[PieceOf], start: int, numel: int) -> Iterator[tuple[PagedSubGroup, int, int, int]]:
    """Yield the parts of elements [start, start + numel) of a shard, by piece and at most RANGE_NUMEL each: (sub-group,
    first element of the shard, first element of the sub-group, count)."""
    first = bisect_right(pieces, start, key=lambda piece_of: piece_of[1].start) - 1
    for number in range(max(0, first), len(pieces)):
        sub, piece = pieces[number]
        if piece.start >= start + numel:
            break
        low, high = max(start, piece.start), min(start + numel, piece.start + piece.numel)
        for at in range(low, high, RANGE_NUMEL):
            yield sub, at, piece.offset + at - piece.start, min(RANGE_NUMEL, high - at)


def _edges(pages: Span, start: int, end: int) -> tuple[Span, ...]:
    """Return the first and last page of `pages`, each if [start, end) covers it only in part."""
    last_page = pages.offset + pages.nbytes - PAGE_BYTES
    partly = {pages.offset} if start != pages.offset else set()
    if end != last_page + PAGE_BYTES:
        partly.add(last_page)
    return tuple(Span(page, page - pages.offset, PAGE_BYTES) for page in sorted(partly))
