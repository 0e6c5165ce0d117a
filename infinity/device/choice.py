"""Floor 2. Which Device computes on a torch device, and who reads files into its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.device.cuda import CudaRuntime
from infinity.device.direct import DirectReader, KvikioReader, why_not_direct
from infinity.device.staging import CpuDevice, Device
from infinity.device.streams import StreamDevice


def device_for(torch_device: torch.device) -> Device:
    """The Device of `torch_device`: CUDA, or the CPU."""
    return StreamDevice(CudaRuntime(torch_device)) if torch_device.type == "cuda" else CpuDevice()


def direct_reader_for(
    torch_device: torch.device, descriptors: Sequence[int], *, threads: int, task_bytes: int
) -> DirectReader | str:
    """Who reads these files into the memory of `torch_device`, so many bytes at once on each of so many threads; or, in words,
    why nobody does. Raises IoError."""
    return why_not_direct(torch_device) or KvikioReader(descriptors, threads=threads, task_bytes=task_bytes)
