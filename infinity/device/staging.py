"""Copies between pinned host memory and the compute device: the CPU, and the base of others (streams.py).

Training thread, or autograd's in CUDA's backward.
"""

from __future__ import annotations

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


class CopyEvent:
    """Event that fires when a copy no longer uses its bytes in host memory. This one is of no copy, and has fired."""

    def done(self) -> bool:
        """Return True if the copy has ended; never blocks."""
        return True

    def wait(self) -> None:
        """Block until the copy has ended."""


class InFlightCopy:
    """A copy to the device. Dropping it before `on_device` discards the bytes. This one uses them in place.

    copy_event: fires when the copy has ended and the host bytes may be reused.
    """

    def __init__(self, taken: torch.Tensor, copy_event: CopyEvent) -> None:
        self._taken, self.copy_event = taken, copy_event

    def on_device(self) -> torch.Tensor:
        """Return the bytes on the device (1-D), for work that the current stream starts from now on."""
        return self._taken


class Device:
    """A compute device. This one is the CPU: it uses staged bytes in place, until the call that uses them returns."""

    torch_device = torch.device("cpu")
    is_discrete = False
    """True if it has its own memory, so that bytes must be copied."""

    @property
    def numa_node(self) -> int | None:
        """NUMA node of the nearest host memory; None if unknown."""
        return None

    def register(self, slab: PinnedSlab) -> str | None:
        """Register the slab with the device's copy engine. Returns the reason if that is refused, else None."""
        return None

    def unregister(self, slab: PinnedSlab) -> None:
        """Undo `register`, before the slab is unmapped. All its copies must have ended."""

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        """Start to copy `staged` (1-D, host memory) to the device while it computes."""
        return InFlightCopy(staged, CopyEvent())

    def copy_event(self) -> CopyEvent:
        """Return an event that fires when all copies to the device started so far have ended."""
        return CopyEvent()

    def start_d2h(self, source: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        """Start to copy `source`, as the current stream leaves it, `into` host memory of the same shape and dtype.

        `source` may be dropped at once; `into` may not be read before the copy event has fired.
        """
        into.copy_(source)
        return CopyEvent()
