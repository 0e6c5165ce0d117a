"""Floor 4. Extents of the arena for what comes and goes, in any sizes and any order.

Owns the ranges that it reserved, for as long as the arena lives. Used by one thread at a time.

[Note: The most that was taken]
What is asked for may lie in several pieces, so the free bytes need not lie together to be of use. The arena grows only where
all of them are too few, and only by what they lack: what is reserved here is the most that was ever taken at once, however
sizes vary. Pieces are rare: neighbours merge, and where everything is given back between two steps, it is one range again.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.aio import FreeRanges
from infinity.store.arena import Arena, Extent
from infinity.units import PAGE_BYTES, align_up


class Scratch:
    """See the note of this file. `what`: is kept there, for errors."""

    def __init__(self, arena: Arena, what: str) -> None:
        self._arena, self._what = arena, what
        self._ranges = FreeRanges(0)
        self._reserved: list[Extent] = []

    @property
    def nbytes(self) -> int:
        """What was reserved so far (bytes)."""
        return self._ranges.nbytes

    @property
    def free_bytes(self) -> int:
        """How much of that is free."""
        return self._ranges.free_bytes

    def take(self, nbytes: int) -> list[Extent]:
        """Extents of `nbytes` together (rounded up to 4 KiB), one wherever one range holds them.

        Raises StoreError as `Arena.reserve`; nothing is then taken.
        """
        size = align_up(nbytes, PAGE_BYTES)
        if size > self._ranges.free_bytes:
            (more,) = self._arena.reserve([size - self._ranges.free_bytes], self._what)
            self._reserved.append(more)
            self._ranges.grow(more.offset, more.nbytes)
        pieces = self._ranges.take_pieces(size)
        assert pieces is not None
        return [Extent(offset, length) for offset, length in pieces]

    def reset(self) -> None:
        """Nothing is taken any more, whoever has what: for when an exception may have lost some. Nobody reads or writes it."""
        self._ranges = FreeRanges(0)
        for extent in self._reserved:
            self._ranges.grow(extent.offset, extent.nbytes)

    def give_back(self, extents: Sequence[Extent]) -> None:
        """They were taken, and nothing reads or writes them any more."""
        for extent in extents:
            self._ranges.put(extent.offset, extent.nbytes)
