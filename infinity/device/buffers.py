"""Pinned host memory for copies from the device: allocated when first needed, then reused.

Owns its slabs until `close`. Training thread only, but `give_back` may be called at any time on any thread.

[Note: One slab in the end]
Copies from the device mostly have the same sizes in every step. Then each buffer has a slab of its own size (rounded up
to 4 KiB, never to a power of two), and no slab is allocated after the first step.

If sizes vary, a slab serves any buffer that fits, but no buffer can span two slabs. So idle slabs are merged. A buffer
that fits nowhere replaces them by one slab of their total size, or of its own if larger. As soon as nothing is lent,
one slab of the most that was ever lent at once replaces all. Buffers that are lent and returned like a stack then
always fit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from infinity.aio import FreeRanges, PinnedSlab, near
from infinity.device.staging import Device
from infinity.units import PAGE_BYTES, align_up


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
    """Lent memory. `tensor` (1-D) is valid until `give_back`, which is called once, with no copy into it in flight.

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
    """Buffers for one device: [Note: One slab in the end].

    pin: True if slabs are registered with the device. bytes_max: upper bound of all slabs; None for no bound.
    """

    def __init__(self, device: Device, *, pin: bool, bytes_max: int | None = None) -> None:
        self.nbytes = 0
        """Bytes of all slabs."""
        self.lent_bytes_max = 0
        """Maximum number of bytes lent at once."""
        self.bytes_max = bytes_max
        self.notes: list[str] = []
        """Reasons why a buffer is not pinned, or is on another NUMA node than the nearest; of the first such slab."""
        self._device, self._pin = device, pin
        self._slabs: list[_Slab] = []
        self._idle: dict[int, list[_Slab]] = {}
        """Slabs without loans, by size."""
        self._lent_bytes = 0
        self._sizes_vary = False
        """True after a buffer found no slab of its size although enough bytes were free."""
        self._returned: deque[tuple[_Slab, int, int]] = deque()
        """Returned buffers (slab, offset, bytes) that are not free in the slab yet: see `_take_back`."""

    def lend(self, numel: int, dtype: torch.dtype) -> HostBuffer:
        """Return memory for `numel` elements. Raises MemoryError if the machine has no more. For buffers without a bound."""
        buffer = self.try_lend(numel, dtype)
        assert buffer is not None
        return buffer

    def try_lend(self, numel: int, dtype: torch.dtype) -> HostBuffer | None:
        """As `lend`, but return None if the bound has no more."""
        nbytes = align_up(max(1, numel * dtype.itemsize))
        if self.bytes_max is not None and nbytes > self.bytes_max:
            return None
        self._take_back()
        if self._sizes_vary and not self._lent_bytes and len(self._slabs) > 1:
            self._replace_idle(max(self.lent_bytes_max, nbytes))
        slab = self._slab_with(nbytes) or self._make_room(nbytes)
        if slab is None:
            return None
        if slab in self._idle.get(slab.nbytes, ()):  # False if an exception ended an earlier call below this line
            self._idle[slab.nbytes].remove(slab)
        offset = slab.ranges.take(nbytes)
        assert offset is not None
        self._lent_bytes += nbytes
        self.lent_bytes_max = max(self.lent_bytes_max, self._lent_bytes)
        tensor = torch.frombuffer(slab.memory, dtype=dtype, count=max(1, numel), offset=offset)[:numel]
        return HostBuffer(self, slab, offset, nbytes, tensor)

    def reset(self) -> None:
        """Take back all buffers after an exception that may have lost some. All copies must have ended."""
        self._returned.clear()
        self._lent_bytes = 0
        self._idle = {}
        for slab in self._slabs:
            slab.ranges.reset(())
            self._idle.setdefault(slab.nbytes, []).append(slab)
        self.nbytes = sum(slab.nbytes for slab in self._slabs)

    def trim(self) -> None:
        """Free the slabs of which nothing is lent. All copies must have ended."""
        self._take_back()
        self._drop_idle()

    def close(self) -> None:
        """Free all slabs. All copies must have ended, and no buffer may be used any more."""
        for slab in self._slabs:
            self._device.unregister(slab.memory)
        self._slabs.clear()
        self._idle.clear()

    def _take_back(self) -> None:
        """Free the buffers that `give_back` has recorded, which the garbage collector may call at any point."""
        while self._returned:
            slab, offset, nbytes = self._returned.popleft()
            slab.ranges.put(offset, nbytes)
            self._lent_bytes -= nbytes
            if slab.is_idle:
                self._idle.setdefault(slab.nbytes, []).append(slab)

    def _slab_with(self, nbytes: int) -> _Slab | None:
        """Return an idle slab of this size, else the slab with the smallest range that fits, or None."""
        if self._idle.get(nbytes):
            return self._idle[nbytes][0]
        if nbytes > self.nbytes - self._lent_bytes:
            return None
        self._sizes_vary = True
        fitting = [slab for slab in self._slabs if slab.ranges.largest >= nbytes]
        return min(fitting, key=lambda slab: slab.ranges.largest, default=None)

    def _make_room(self, nbytes: int) -> _Slab | None:
        """Return a slab for `nbytes` that replaces the idle ones; None if the bound does not allow it."""
        idle_bytes = sum(size * len(slabs) for size, slabs in self._idle.items())
        size = max(nbytes, idle_bytes)
        if self.bytes_max is not None:
            size = min(size, (self.bytes_max - self.nbytes + idle_bytes) // PAGE_BYTES * PAGE_BYTES)
        return self._replace_idle(size) if size >= nbytes else None

    def _drop_idle(self) -> None:
        for slab in [slab for slabs in self._idle.values() for slab in slabs]:
            self._device.unregister(slab.memory)
            self._slabs.remove(slab)
            self.nbytes -= slab.nbytes
        self._idle.clear()

    def _replace_idle(self, nbytes: int) -> _Slab:
        """Replace the idle slabs by one of `nbytes`, and return it."""
        self._drop_idle()
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
