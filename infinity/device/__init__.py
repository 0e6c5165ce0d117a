"""Floor 2. The device that computes, as the swap floor sees it: bytes go there ahead of use and come back."""

from infinity.device.buffers import HostBuffer, HostBuffers
from infinity.device.choice import device_for
from infinity.device.staging import CpuDevice, Device, Incoming, Landing
from infinity.device.streams import Runtime, StreamDevice

__all__ = [
    "CpuDevice",
    "Device",
    "HostBuffer",
    "HostBuffers",
    "Incoming",
    "Landing",
    "Runtime",
    "StreamDevice",
    "device_for",
]
