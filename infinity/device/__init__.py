"""Floor 4. The device that computes: copies to it ahead of use, and back."""

from infinity.device.buffers import HostBuffer, HostBuffers
from infinity.device.direct import DirectRead, DirectReader, direct_reader_for
from infinity.device.staging import CopyEvent, CpuDevice, Device, InFlightCopy
from infinity.device.streams import StreamDevice, device_for

__all__ = [
    "CopyEvent",
    "CpuDevice",
    "Device",
    "DirectRead",
    "DirectReader",
    "HostBuffer",
    "HostBuffers",
    "InFlightCopy",
    "StreamDevice",
    "device_for",
    "direct_reader_for",
]
