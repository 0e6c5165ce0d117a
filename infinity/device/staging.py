"""Floor 4. From pinned host memory to the device that computes, and back: what any device promises, and the CPU.

On a CPU the staged bytes are used where they lie. A device with memory of its own gets copies: see streams.py. Called by the
training thread, which in a backward on CUDA is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from infinity.aio import PinnedSlab
from infinity.device.direct import DirectRead


class CopyEvent(Protocol):
    """Says when bytes that a copy reads or writes in host memory may be touched."""

    def done(self) -> bool:
        """Whether the copy has ended; never blocks."""

    def wait(self) -> None:
        """Block until it has."""


class InFlightCopy(Protocol):
    """Bytes on their way to the device. Whoever drops it before `on_device` wants them no more."""

    copy_event: CopyEvent
    """Fires when they have come, so that the host bytes may be reused."""

    def on_device(self) -> torch.Tensor:
        """All of them on the device (1-D): whatever the current stream does from now on comes after their arrival.

        Where they come straight from a drive this blocks until they have; it raises IoError where a read failed then.
        """


Fill = Callable[[torch.Tensor, Any], Sequence[DirectRead]]
"""Has a stream of the device (None on a CPU) read what fills a tensor (1-D, on the device)."""


class Device(Protocol):
    """What the swap floor needs from the device."""

    torch_device: torch.device
    is_discrete: bool
    """Whether it has memory of its own, so that bytes are copied to it and back."""

    @property
    def numa_node(self) -> int | None:
        """That of the host memory which is nearest; None where nobody says."""

    def register(self, slab: PinnedSlab) -> str | None:
        """Make the slab known to the device's copy engine; in words why that was refused, or None."""

    def unregister(self, slab: PinnedSlab) -> None:
        """Undo `register`, before the slab is unmapped. Every copy from or to it has ended."""

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        """Begin to copy `staged` (1-D, host memory) to the device, whatever that computes meanwhile."""

    def start_filling(self, numel: int, dtype: torch.dtype, fill: Fill) -> InFlightCopy:
        """Have memory of the device (1-D) filled by reads, whatever the device computes meanwhile.

        Whoever wants it no more keeps what is returned until its copy event has fired.
        """

    def copy_event(self) -> CopyEvent:
        """Fires when everything taken so far has ended."""

    def start_d2h(self, found: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        """Begin to copy `found`, as the current stream leaves it, `into` host memory of the same shape and dtype.

        `found` may be forgotten at once; nobody may look into `into` before the copy event fired.
        """


class AlreadyCopied:
    """Where no copy touches host memory."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _InPlace:
    def __init__(self, staged: torch.Tensor) -> None:
        self.copy_event: CopyEvent = AlreadyCopied()
        self._staged = staged

    def on_device(self) -> torch.Tensor:
        return self._staged


class _Filled(_InPlace):
    def __init__(self, filled: torch.Tensor, reads: Sequence[DirectRead]) -> None:
        super().__init__(filled)
        self._reads = reads

    def on_device(self) -> torch.Tensor:
        for read in self._reads:
            read.check()
        return super().on_device()


class CpuDevice:
    """Compute reads the staged bytes in place; every use of them is over when the call that used them returns."""

    torch_device = torch.device("cpu")
    is_discrete = False
    numa_node = None

    def register(self, slab: PinnedSlab) -> str | None:
        return None

    def unregister(self, slab: PinnedSlab) -> None:
        pass

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        return _InPlace(staged)

    def start_filling(self, numel: int, dtype: torch.dtype, fill: Fill) -> InFlightCopy:
        filled = torch.empty(numel, dtype=dtype)
        return _Filled(filled, fill(filled, None))

    def copy_event(self) -> CopyEvent:
        return AlreadyCopied()

    def start_d2h(self, found: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        into.copy_(found)
        return AlreadyCopied()
