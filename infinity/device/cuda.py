"""Streams, events and memory of one CUDA device, through torch: no CUDA library is linked.

A thin layer: streams.py decides the order of all work.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from infinity.aio import PinnedSlab
from infinity.host_memory import control_group_limits
from infinity.kernel_files import number_of
from infinity.units import format_bytes

_PCI_DEVICES = Path("/sys/bus/pci/devices")


class CudaRuntime:
    """Streams, copies and memory of a CUDA device."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._pinned: set[int] = set()  # addresses

    @property
    def numa_node(self) -> int | None:
        """NUMA node of the GPU's bus, which has the nearest host memory; None if unknown."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        domain, bus, slot = (
            getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
        )
        if domain is None or bus is None or slot is None:  # missing in this torch
            return None
        node = number_of(_PCI_DEVICES / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "numa_node")
        return node if node is not None and node >= 0 else None

    def pin(self, slab: PinnedSlab) -> str | None:
        """Register a slab with the copy engine. Returns the reason if that is refused, else None."""
        status = int(torch.cuda.cudart().cudaHostRegister(slab.address, slab.nbytes, 1))
        if status != 0:
            return _refused(slab.nbytes, status)
        self._pinned.add(slab.address)
        return None

    def unpin(self, slab: PinnedSlab) -> None:
        """Undo `pin`; does nothing for a slab that is not pinned."""
        if slab.address in self._pinned:
            self._pinned.remove(slab.address)
            torch.cuda.cudart().cudaHostUnregister(slab.address)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def empty(self, numel: int, dtype: torch.dtype, stream: torch.cuda.Stream) -> torch.Tensor:
        """Return device memory (1-D) allocated on `stream`; later work of that stream may reuse it once it is freed."""
        with torch.cuda.stream(stream):
            return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def start_copy(self, into: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Copy on `stream`; if the host memory is pinned, returns before the copy has run."""
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)

    def note_use(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Record that `stream` uses the tensor: freed memory is then reused only after that stream's present work."""
        tensor.record_stream(stream)


def _refused(nbytes: int, status: int) -> str:
    """Return the message for a refused registration: possible limits, and the consequence."""
    limits = []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        limits.append(f"the limit on locked memory (ulimit -l) is {format_bytes(locked)}")
    if groups := control_group_limits():
        limits.append(f"the cgroup's limit on memory is {format_bytes(min(group.limit_bytes for group in groups))}")
    why = " and ".join(limits) or "no limit on locked memory or of the cgroup is set"
    return (
        f"cudaHostRegister refused {format_bytes(nbytes)} of host memory (CUDA error {status}): copies between it and "
        f"the GPU are synchronous and do not overlap with compute; {why}: raise the limit, or lower pinned_bytes_max"
    )
