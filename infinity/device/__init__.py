"""The compute device: copies to it ahead of use, and back."""

from infinity.device.buffers import HostBuffer, HostBuffers
from infinity.device.reused_memory import ReusedMemory
from infinity.device.set_aside import SetAside
from infinity.device.staging import CopyEvent, Device, InFlightCopy, cpu_multiplies_fast_in, why_slow
from infinity.device.streams import StreamDevice, device_for

__all__ = [
    "CopyEvent",
    "Device",
    "HostBuffer",
    "HostBuffers",
    "InFlightCopy",
    "ReusedMemory",
    "SetAside",
    "StreamDevice",
    "cpu_multiplies_fast_in",
    "device_for",
    "why_slow",
]
