"""Copies from pinned host memory to the device that computes, and back: the protocol, and the CPU.

On a CPU the staged bytes are used in place. A device with memory of its own gets copies: see streams.py. Called by the training
thread, which in a backward on CUDA is autograd's.
"""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.aio import PinnedSlab

_SUPPORT = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def cpu_multiplies_fast_in(dtype: torch.dtype) -> bool:
    """Whether matrices of this dtype are multiplied by vector instructions. True where torch doesn't say."""
    supported = getattr(torch.ops.mkldnn, _SUPPORT.get(dtype, ""), None)
    return supported is None or bool(supported())


def why_slow(dtype: torch.dtype) -> str | None:
    """What to know of a CPU that is to compute in this dtype; None where it does so fast."""
    if cpu_multiplies_fast_in(dtype):
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return (
        f"{name} is slow on this CPU, which has no vector instructions to multiply in it: a backward may take 30 times as long "
        "as in fp32"
    )


class CopyEvent(Protocol):
    """Tells when a copy is done with its bytes in host memory."""

    def done(self) -> bool:
        """Whether the copy has ended; never blocks."""

    def wait(self) -> None:
        """Block until it has."""


class InFlightCopy(Protocol):
    """A copy to the device. Dropping it before `on_device` discards the bytes."""

    copy_event: CopyEvent
    """Fires when the copy has ended, so that the host bytes may be reused."""

    def on_device(self) -> torch.Tensor:
        """The bytes on the device (1-D), for work that the current stream starts from now on."""


class Device(Protocol):
    """A device as the swap floor uses it."""

    torch_device: torch.device
    is_discrete: bool
    """Whether it has memory of its own, so that bytes must be copied."""

    @property
    def numa_node(self) -> int | None:
        """The NUMA node of the nearest host memory; None where unknown."""

    def register(self, slab: PinnedSlab) -> str | None:
        """Register the slab with the device's copy engine. Returns a message where that is refused, else None."""

    def unregister(self, slab: PinnedSlab) -> None:
        """Undo `register`, before the slab is unmapped. All its copies must have ended."""

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        """Start to copy `staged` (1-D, host memory) to the device, while that computes."""

    def copy_event(self) -> CopyEvent:
        """An event that fires when all copies started so far have ended."""

    def start_d2h(self, source: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        """Start to copy `source`, as the current stream leaves it, `into` host memory of the same shape and dtype.

        `source` may be dropped at once; `into` may not be read before the copy event has fired.
        """


class AlreadyCopied:
    """The event of no copy at all: done."""

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
    """Computes on the staged bytes in place; a use of them is over when the call that uses them returns."""

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
