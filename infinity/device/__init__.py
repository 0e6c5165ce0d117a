"""Floor 4. The device that computes: copies to it ahead of use, and back."""

from infinity.device.buffers import HostBuffer, HostBuffers
from infinity.device.choice import device_for, direct_reader_for
from infinity.device.direct import DirectRead, DirectReader
from infinity.device.staging import CopyEvent, CpuDevice, Device, InFlightCopy
from infinity.device.streams import Runtime, StreamDevice

__all__ = [
    "CopyEvent",
    "CpuDevice",
    "Device",
    "DirectRead",
    "DirectReader",
    "HostBuffer",
    "HostBuffers",
    "InFlightCopy",
    "Runtime",
    "StreamDevice",
    "device_for",
    "direct_reader_for",
]
