"""Floor 2. From pinned host memory to the device that computes.

On a CPU the staged bytes are used where they lie. On CUDA they are copied, and the host bytes are free when the copy's
event has fired, not when the call returns. Runs on the training thread.
"""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.aio import PinnedSlab


class Landing(Protocol):
    """Says when host bytes that were handed to the device may be reused."""

    def done(self) -> bool:
        """Whether the device has taken all of them over; never blocks."""

    def wait(self) -> None:
        """Block until it has."""


class Device(Protocol):
    """What the swap floor needs from the device."""

    torch_device: torch.device

    def register(self, slab: PinnedSlab) -> str | None:
        """Make the slab known to the device's copy engine; in words why that was refused, or None."""

    def unregister(self, slab: PinnedSlab) -> None:
        """Undo `register`, before the slab is unmapped. Every copy from it has landed."""

    def take(self, staged: torch.Tensor) -> torch.Tensor:
        """`staged` on the device, ordered before whatever the current stream does next."""

    def landing(self) -> Landing:
        """Fires when everything taken so far has landed."""


class _Landed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuDevice:
    """Compute reads the staged bytes in place; every use of them is over when the call that used them returns."""

    torch_device = torch.device("cpu")

    def register(self, slab: PinnedSlab) -> str | None:
        return None

    def unregister(self, slab: PinnedSlab) -> None:
        pass

    def take(self, staged: torch.Tensor) -> torch.Tensor:
        return staged

    def landing(self) -> Landing:
        return _Landed()


class _EventLanding:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """Copies on the current stream, asynchronously where the slab could be registered with CUDA."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._registered: set[int] = set()  # addresses

    def register(self, slab: PinnedSlab) -> str | None:
        status = torch.cuda.cudart().cudaHostRegister(slab.address, slab.nbytes, 1)
        if int(status) != 0:
            return f"cudaHostRegister refused the pinned pool ({status}): copies to the GPU are synchronous"
        self._registered.add(slab.address)
        return None

    def unregister(self, slab: PinnedSlab) -> None:
        if slab.address in self._registered:
            self._registered.remove(slab.address)
            torch.cuda.cudart().cudaHostUnregister(slab.address)

    def take(self, staged: torch.Tensor) -> torch.Tensor:
        return staged.to(self.torch_device, non_blocking=True)

    def landing(self) -> Landing:
        event = torch.cuda.Event()
        event.record()
        return _EventLanding(event)


def device_for(torch_device: torch.device) -> Device:
    """The Device of `torch_device`: CUDA, or the CPU."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice()
