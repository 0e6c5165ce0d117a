"""The pinned pool: one slab of host memory, fixed at start, lent in leases.

Owns the slab and its free ranges. Used by the training thread only; the I/O threads see addresses, never the pool.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable

import torch

from infinity._aio import PinnedSlab
from infinity.errors import IN_CHILD, BudgetError, InfinityError
from infinity.units import align_up, format_bytes


class FreeRanges:
    """First-fit allocator over [0, nbytes): offsets and lengths only, no memory. Keeps the free ranges sorted by offset
    and merges neighbours at once, so that free ranges never touch. `grow` adds more."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free_bytes = nbytes
        self._end = nbytes
        self._free = [(0, nbytes)] if nbytes else []  # (start, end) of each

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of each free range."""
        return [(start, end - start) for start, end in self._free]

    @property
    def largest(self) -> int:
        """Size (bytes) of the largest free range."""
        return max((end - start for start, end in self._free), default=0)

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` from the lowest range that fits; return their offset, or None if none fits."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                self.free_bytes -= nbytes
                return start
        return None

    def take_pieces(self, nbytes: int) -> list[tuple[int, int]] | None:
        """Take `nbytes` from as few ranges as possible; return (offset, length) of each, or None."""
        if nbytes > self.free_bytes:
            return None
        pieces = []
        while nbytes:
            length = min(nbytes, self.largest)
            offset = self.take(length)
            assert offset is not None
            pieces.append((offset, length))
            nbytes -= length
        return pieces

    def grow(self, offset: int, nbytes: int) -> None:
        """Add [offset, offset + nbytes), which begins at the end of the known ranges or beyond it."""
        assert offset >= self._end, "a range that overlaps the known ones"
        self._end = offset + nbytes
        self.nbytes += nbytes
        self.put(offset, nbytes)

    def put(self, offset: int, nbytes: int) -> None:
        """Free [offset, offset + nbytes), which must be taken."""
        start, end = offset, offset + nbytes
        first = last = bisect_left(self._free, (start, 0))
        before_end = self._free[first - 1][1] if first else 0
        after_start = self._free[last][0] if last < len(self._free) else self._end
        assert before_end <= start and end <= after_start, "a range came back twice"
        if first and before_end == start:
            first -= 1
            start = self._free[first][0]
        if last < len(self._free) and after_start == end:
            end = self._free[last][1]
            last += 1
        self._free[first:last] = [(start, end)]
        self.free_bytes += nbytes

    def reset(self, taken: Iterable[tuple[int, int]]) -> None:
        """Set the taken ranges, as (offset, length); all others are free."""
        self._free, at = [], 0
        for offset, length in [*sorted(taken), (self.nbytes, 0)]:
            if offset > at:
                self._free.append((at, offset))
            at = offset + length
        self.free_bytes = sum(end - start for start, end in self._free)


class Lease:
    """Temporary ownership of pinned bytes. Returned exactly once: by `give_back()` or the end of a `with` block."""

    def __init__(self, pool: Lender, offset: int, nbytes: int) -> None:
        self._pool = pool
        self.offset = offset
        self.nbytes = nbytes
        self.held = True
        """True until the lease is given back."""

    def view(self, dtype: torch.dtype, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return a 1-D tensor over the leased bytes.

        Args:
            dtype: element type of the view.
            start: first byte inside the lease; a multiple of the element size.
            numel: number of elements; None for all up to the end of the lease.

        The view is valid until the lease is given back, which is not checked. Raises InfinityError in a forked child.
        """
        assert self.held, "a view of a lease that was given back"
        if os.getpid() != self._pool.pid:
            raise InfinityError(IN_CHILD)
        count = (self.nbytes - start) // dtype.itemsize if numel is None else numel
        nbytes = count * dtype.itemsize
        assert 0 <= start and start + nbytes <= self.nbytes, "a view beyond its lease"
        return self._pool.bytes.narrow(0, self.offset + start, nbytes).view(dtype)

    def give_back(self) -> None:
        """Return the bytes to the pool. No transfer or device copy may still use them."""
        assert self.held, "a lease came back twice"
        self.held = False
        self._pool._ranges.put(self.offset - self._pool._start, self.nbytes)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.held:
            self.give_back()


class Lender:
    """Lends bytes [start, start + nbytes) of a slab in leases of any size. See `PinnedPool` and `PoolPart`."""

    def __init__(self, slab_bytes: torch.Tensor, start: int, nbytes: int) -> None:
        self.bytes, self.pid = slab_bytes, os.getpid()
        self.peak_bytes = 0
        """Maximum number of bytes on lease at once."""
        self._start = start
        self._ranges = FreeRanges(nbytes)

    @property
    def nbytes(self) -> int:
        return self._ranges.nbytes

    @property
    def leased_bytes(self) -> int:
        return self._ranges.nbytes - self._ranges.free_bytes

    def try_lease(self, nbytes: int) -> Lease | None:
        """Return a lease of at least `nbytes` (rounded up to 4 KiB), or None if no free range is large enough."""
        size = align_up(max(nbytes, 1))
        offset = self._ranges.take(size)
        if offset is None:
            return None
        self.peak_bytes = max(self.peak_bytes, self.leased_bytes)
        return Lease(self, self._start + offset, size)

    def reclaim(self, keep: Iterable[Lease]) -> None:
        """Take back all leases except `keep`, after an exception that may have lost some. No transfer may use the
        others, which may not be used or given back afterwards."""
        self._ranges.reset((lease.offset - self._start, lease.nbytes) for lease in keep)


class PinnedPool(Lender):
    """A fixed budget of pinned host memory.

    Args:
        nbytes: size of the slab (bytes, rounded up to 4 KiB). All of it is resident from the start; it never grows.
        lock: ask the kernel to lock the pages; a refusal is a line in `notes`, not an error.
        in_background: return at once, and make the memory resident in the background.

    Raises MemoryError if the machine does not have enough memory.
    """

    def __init__(self, nbytes: int, *, lock: bool = False, in_background: bool = False) -> None:
        self.slab = PinnedSlab(align_up(nbytes), lock=lock, in_background=in_background)
        super().__init__(torch.frombuffer(self.slab, dtype=torch.uint8), 0, self.slab.nbytes)

    @property
    def notes(self) -> list[str]:
        """Messages about requests that the kernel refused."""
        return list(self.slab.notes)

    def release(self, keep: Iterable[Lease]) -> None:
        """Give the memory of all but these leases back to the kernel until `fill_again`; its bytes are lost. No engine may have
        the pool, see `IoEngine.pause`."""
        others = FreeRanges(self.nbytes)
        others.reset((lease.offset, lease.nbytes) for lease in keep)
        for offset, nbytes in others.ranges:
            self.slab.release(offset, nbytes)

    def fill_again(self) -> None:
        """After `release`: the memory becomes resident while it is used already."""
        self.slab.fill_again()

    def lease(self, nbytes: int) -> Lease:
        """As `try_lease`, but raise BudgetError instead of returning None."""
        lease = self.try_lease(nbytes)
        if lease is None:
            raise BudgetError(
                f"no room for {format_bytes(nbytes)} in the pinned pool: {format_bytes(self._ranges.free_bytes)} of "
                f"{format_bytes(self.nbytes)} are free, the largest piece {format_bytes(self._ranges.largest)}"
            )
        return lease


class PoolPart(Lender):
    """A lease of a pool, lent in smaller leases: the budget of one user, independent of all other leases.

    The owner returns the lease after all smaller ones are back.
    """

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease._pool.bytes, lease.offset, lease.nbytes)
        self.lease = lease
