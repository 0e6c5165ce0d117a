"""Pinned host memory for copies from the device: made when first needed, then reused.

Owns its slabs until `close`. Training thread only, but `give_back` may be called at any moment and on any thread.

[Note: One slab in the end]
Copies from the device mostly have the same sizes in every step. Then each buffer has a slab of just its size (rounded up to
4 KiB, never to a power of two), and none is made after the first step.

Where sizes vary, a slab serves any buffer that fits, but memory of two slabs can't be lent as one. So idle slabs are replaced:
a buffer that fits nowhere replaces them by one as large as all of them, or as itself if that is larger; and as soon as nothing
is lent, one slab replaces all, as large as the most that was ever lent at once. From then on buffers that are lent and given
back like a stack find room in it, whatever their sizes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from infinity.aio import FreeRanges, PinnedSlab, near
from infinity.device.staging import Device
from infinity.units import PAGE_BYTES, align_up, format_bytes


@dataclass(eq=False)
class _Slab:
    memory: PinnedSlab
    ranges: FreeRanges

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def is_idle(self) -> bool:
        return self.ranges.free_bytes == self.nbytes


class HostBuffer:
    """Lent memory: `tensor` (1-D) until `give_back`, which comes once, when no copy into it is in flight.

    nbytes: its size, a multiple of 4 KiB.
    """

    def __init__(self, owner: HostBuffers, slab: _Slab, offset: int, nbytes: int, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = nbytes
        self._owner, self._slab, self._offset = owner, slab, offset

    def give_back(self) -> None:
        """Return the memory, which may then be lent again."""
        self._owner._returned.append((self._slab, self._offset, self.nbytes))


class HostBuffers:
    """Buffers for one device; see the note of this file.

    pin: whether slabs are registered with the device. bytes_max: upper bound for all slabs (None: no bound).
    """

    def __init__(self, device: Device, *, pin: bool, bytes_max: int | None = None) -> None:
        self.nbytes = 0
        """Bytes of all slabs."""
        self.lent_bytes_max = 0
        """Most bytes that were lent at once."""
        self.bytes_max = bytes_max
        self.notes: list[str] = []
        """Why a buffer could not be pinned, or is on another NUMA node than it should be; said once."""
        self._device, self._pin = device, pin
        self._slabs: list[_Slab] = []
        self._idle: dict[int, list[_Slab]] = {}
        """Slabs with nothing lent, by size."""
        self._lent_bytes = 0
        self._sizes_vary = False
        """Whether a buffer ever found no slab of its size although enough bytes were free."""
        self._returned: deque[tuple[_Slab, int, int]] = deque()
        """(slab, offset, bytes) given back but not yet free in the slab: see `_take_back`."""

    def lend(self, numel: int, dtype: torch.dtype) -> HostBuffer:
        """Memory for `numel` elements. Raises MemoryError where the machine or the bound has no more."""
        buffer = self.try_lend(numel, dtype)
        if buffer is None:
            raise MemoryError(f"{format_bytes(numel * dtype.itemsize)} are more than is left of {self.bytes_max} bytes")
        return buffer

    def try_lend(self, numel: int, dtype: torch.dtype) -> HostBuffer | None:
        """As `lend`, but None where the bound has no more."""
        nbytes = align_up(max(1, numel * dtype.itemsize))
        if self.bytes_max is not None and nbytes > self.bytes_max:
            return None
        self._take_back()
        if self._sizes_vary and not self._lent_bytes and len(self._slabs) > 1:
            self._replace_idle(max(self.lent_bytes_max, nbytes))
        slab = self._slab_with(nbytes) or self._make_room(nbytes)
        if slab is None:
            return None
        if slab in self._idle.get(slab.nbytes, ()):  # not where an exception ended an earlier call behind this
            self._idle[slab.nbytes].remove(slab)
        offset = slab.ranges.take(nbytes)
        assert offset is not None
        self._lent_bytes += nbytes
        self.lent_bytes_max = max(self.lent_bytes_max, self._lent_bytes)
        tensor = torch.frombuffer(slab.memory, dtype=dtype, count=max(1, numel), offset=offset)[:numel]
        return HostBuffer(self, slab, offset, nbytes, tensor)

    def reset(self) -> None:
        """Take back all buffers, after an exception that may have lost some. All copies must have ended."""
        self._returned.clear()
        self._lent_bytes = 0
        self._idle = {}
        for slab in self._slabs:
            slab.ranges.reset(())
            self._idle.setdefault(slab.nbytes, []).append(slab)
        self.nbytes = sum(slab.nbytes for slab in self._slabs)

    def close(self) -> None:
        """Free all slabs. All copies must have ended, and nobody may use a buffer any more."""
        for slab in self._slabs:
            self._device.unregister(slab.memory)
        self._slabs.clear()
        self._idle.clear()

    def _take_back(self) -> None:
        """Free what `give_back` has only noted, since the garbage collector may call that at any point."""
        while self._returned:
            slab, offset, nbytes = self._returned.popleft()
            slab.ranges.put(offset, nbytes)
            self._lent_bytes -= nbytes
            if slab.is_idle:
                self._idle.setdefault(slab.nbytes, []).append(slab)

    def _slab_with(self, nbytes: int) -> _Slab | None:
        """An idle slab of just this size; else the slab that holds it with the least to spare."""
        if self._idle.get(nbytes):
            return self._idle[nbytes][0]
        if nbytes > self.nbytes - self._lent_bytes:
            return None
        self._sizes_vary = True
        fitting = [slab for slab in self._slabs if slab.ranges.largest >= nbytes]
        return min(fitting, key=lambda slab: slab.ranges.largest, default=None)

    def _make_room(self, nbytes: int) -> _Slab | None:
        """A slab for `nbytes` that replaces the idle ones; None where the bound doesn't allow it."""
        idle_bytes = sum(size * len(slabs) for size, slabs in self._idle.items())
        size = max(nbytes, idle_bytes)
        if self.bytes_max is not None:
            size = min(size, (self.bytes_max - self.nbytes + idle_bytes) // PAGE_BYTES * PAGE_BYTES)
        return self._replace_idle(size) if size >= nbytes else None

    def _replace_idle(self, nbytes: int) -> _Slab:
        """Replace the idle slabs by one of `nbytes`."""
        for slab in [slab for slabs in self._idle.values() for slab in slabs]:
            self._device.unregister(slab.memory)
            self._slabs.remove(slab)
            self.nbytes -= slab.nbytes
        self._idle.clear()
        return self._make(nbytes)

    def _make(self, nbytes: int) -> _Slab:
        notes: list[str] = []
        with near(self._device.numa_node, notes):
            memory = PinnedSlab(nbytes)
        refused = self._device.register(memory) if self._pin else None
        notes += [refused] if refused else []
        if not self.notes:
            self.notes += notes
        slab = _Slab(memory, FreeRanges(nbytes))
        self._slabs.append(slab)
        self._idle.setdefault(nbytes, []).append(slab)
        self.nbytes += nbytes
        return slab
