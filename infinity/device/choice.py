"""Floor 4. Makes the Device of a torch device, and its direct reader."""

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


def direct_reader_for(torch_device: torch.device, descriptors: Sequence[int]) -> DirectReader | str:
    """A reader of these files into the memory of `torch_device`; or a message why there is none."""
    why_not = why_not_direct(torch_device)
    if why_not is not None:
        return why_not
    try:
        return KvikioReader(descriptors)
    except Exception as error:  # IoError, or an error of another version of kvikio
        return str(error)
