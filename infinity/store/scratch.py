"""Floor 4. Extents of the arena that are taken and given back, in any sizes and any order.

Owns the ranges that it reserved, for as long as the arena lives. One thread at a time.

[Note: The most that was taken]
One request may get several pieces, so free bytes are of use wherever they lie. The arena grows only where all free bytes
are too few, and only by the bytes missing: it reserves the most that was ever taken at once, however sizes vary. Pieces are
rare: neighbours merge, and where everything is given back between two steps, it is one range again.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.aio import FreeRanges
from infinity.store.arena import Arena, Extent
from infinity.units import PAGE_BYTES, align_up


class Scratch:
    """See the note of this file. `purpose` names its use in errors."""

    def __init__(self, arena: Arena, purpose: str) -> None:
        self._arena, self._purpose = arena, purpose
        self._ranges = FreeRanges(0)
        self._reserved: list[Extent] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far."""
        return self._ranges.nbytes

    @property
    def free_bytes(self) -> int:
        """Reserved bytes that are free."""
        return self._ranges.free_bytes

    def take(self, nbytes: int) -> list[Extent]:
        """Extents that sum to `nbytes` (rounded up to 4 KiB); one extent wherever one range is large enough.

        Raises StoreError as `Arena.reserve`, and takes nothing then.
        """
        size = align_up(nbytes, PAGE_BYTES)
        if size > self._ranges.free_bytes:
            (more,) = self._arena.reserve([size - self._ranges.free_bytes], self._purpose)
            self._reserved.append(more)
            self._ranges.grow(more.offset, more.nbytes)
        pieces = self._ranges.take_pieces(size)
        assert pieces is not None
        return [Extent(offset, length) for offset, length in pieces]

    def reset(self) -> None:
        """Take back all extents, after an exception that may have lost some. Nobody may be reading or writing them."""
        self._ranges = FreeRanges(0)
        for extent in self._reserved:
            self._ranges.grow(extent.offset, extent.nbytes)

    def give_back(self, extents: Sequence[Extent]) -> None:
        """Give back extents that nobody reads or writes any more."""
        for extent in extents:
            self._ranges.put(extent.offset, extent.nbytes)
