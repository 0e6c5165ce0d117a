"""Floor 2. The device that computes, as the swap floor sees it: take staged host bytes over, say when they are free."""

from infinity.device.staging import CpuDevice, CudaDevice, Device, Landing, device_for

__all__ = ["CpuDevice", "CudaDevice", "Device", "Landing", "device_for"]
