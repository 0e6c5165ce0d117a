"""Floor 2. Pinned host memory for what comes back from the device: made when first asked for, then lent again and again.

Owns its slabs until `close`. What a step brings back has the same sizes every time, so a buffer is used again for exactly
its own size (rounded up to 4 KiB, never to a power of two), and after the first step nothing is made any more. Training thread
only.
"""

from __future__ import annotations

import torch

from infinity.aio import PinnedSlab, near
from infinity.device.staging import Device
from infinity.units import align_up


class HostBuffer:
    """Lent memory: `tensor` (1-D) until `give_back`, which comes once, when no copy into it is in flight."""

    def __init__(self, owner: HostBuffers, slab: PinnedSlab, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._owner, self._slab = owner, slab

    def give_back(self) -> None:
        """The memory may be lent to somebody else."""
        self._owner._free.setdefault(self._slab.nbytes, []).append(self._slab)


class HostBuffers:
    """Buffers for one device; `pin`: whether they are registered with it."""

    def __init__(self, device: Device, *, pin: bool) -> None:
        self.nbytes = 0
        """Bytes of all that was made."""
        self.notes: list[str] = []
        """Why a buffer could not be pinned, or lies elsewhere than it should; told once, however many."""
        self._device, self._pin = device, pin
        self._slabs: list[PinnedSlab] = []
        self._free: dict[int, list[PinnedSlab]] = {}

    def lend(self, numel: int, dtype: torch.dtype) -> HostBuffer:
        """Memory for `numel` elements. Raises MemoryError where the machine has no more."""
        nbytes = align_up(max(1, numel * dtype.itemsize))
        free = self._free.get(nbytes)
        slab = free.pop() if free else self._make(nbytes)
        return HostBuffer(self, slab, torch.frombuffer(slab, dtype=dtype, count=numel))

    def close(self) -> None:
        """Every copy has landed, and nobody uses a buffer any more."""
        for slab in self._slabs:
            self._device.unregister(slab)
        self._slabs.clear()
        self._free.clear()

    def _make(self, nbytes: int) -> PinnedSlab:
        said: list[str] = []
        with near(self._device.numa_node, said):
            slab = PinnedSlab(nbytes)
        refused = self._device.register(slab) if self._pin else None
        said += [refused] if refused else []
        if not self.notes:
            self.notes += said
        self._slabs.append(slab)
        self.nbytes += nbytes
        return slab
