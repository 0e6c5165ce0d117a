"""Copies between pinned host memory and the compute device: the protocol, and the CPU.

A CPU uses staged bytes in place; other devices get copies (streams.py). Training thread, or autograd's in CUDA's
backward.
"""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.aio import PinnedSlab

_SUPPORT = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def cpu_multiplies_fast_in(dtype: torch.dtype) -> bool:
    """Return True if matrix products in this dtype use vector instructions, or if torch does not say."""
    supported = getattr(torch.ops.mkldnn, _SUPPORT.get(dtype, ""), None)
    return supported is None or bool(supported())


def why_slow(dtype: torch.dtype) -> str | None:
    """Return a warning about a CPU that is slow in this dtype; None if it is fast."""
    if cpu_multiplies_fast_in(dtype):
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return (
        f"{name} is slow on this CPU, which has no vector instructions for it: a backward may take 30 times as long as "
        "in fp32"
    )


class CopyEvent(Protocol):
    """Event that fires when a copy no longer uses its bytes in host memory."""

    def done(self) -> bool:
        """Return True if the copy has ended; never blocks."""

    def wait(self) -> None:
        """Block until the copy has ended."""


class InFlightCopy(Protocol):
    """A copy to the device. Dropping it before `on_device` discards the bytes."""

    copy_event: CopyEvent
    """Fires when the copy has ended and the host bytes may be reused."""

    def on_device(self) -> torch.Tensor:
        """Return the bytes on the device (1-D), for work that the current stream starts from now on."""


class Device(Protocol):
    """A compute device, as the rooms above use it."""

    torch_device: torch.device
    is_discrete: bool
    """True if it has its own memory, so that bytes must be copied."""

    @property
    def numa_node(self) -> int | None:
        """NUMA node of the nearest host memory; None if unknown."""

    def register(self, slab: PinnedSlab) -> str | None:
        """Register the slab with the device's copy engine. Returns the reason if that is refused, else None."""

    def unregister(self, slab: PinnedSlab) -> None:
        """Undo `register`, before the slab is unmapped. All its copies must have ended."""

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        """Start to copy `staged` (1-D, host memory) to the device while it computes."""

    def copy_event(self) -> CopyEvent:
        """Return an event that fires when all copies to the device started so far have ended."""

    def start_d2h(self, source: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        """Start to copy `source`, as the current stream leaves it, `into` host memory of the same shape and dtype.

        `source` may be dropped at once; `into` may not be read before the copy event has fired.
        """


class AlreadyCopied:
    """The event of a copy that was never needed: always done."""

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


class CpuDevice:
    """Computes on staged bytes in place; they are in use until the call that uses them returns."""

    torch_device = torch.device("cpu")
    is_discrete = False
    numa_node = None

    def register(self, slab: PinnedSlab) -> str | None:
        return None

    def unregister(self, slab: PinnedSlab) -> None:
        pass

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        return _InPlace(staged)

    def copy_event(self) -> CopyEvent:
        return AlreadyCopied()

    def start_d2h(self, source: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        into.copy_(source)
        return AlreadyCopied()
