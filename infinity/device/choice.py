"""Floor 2. Which Device computes on a torch device."""

from __future__ import annotations

import torch

from infinity.device.cuda import CudaRuntime
from infinity.device.staging import CpuDevice, Device
from infinity.device.streams import StreamDevice


def device_for(torch_device: torch.device) -> Device:
    """The Device of `torch_device`: CUDA, or the CPU."""
    return StreamDevice(CudaRuntime(torch_device)) if torch_device.type == "cuda" else CpuDevice()
