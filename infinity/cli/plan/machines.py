"""Presets of known machines, with the sources of their figures (repeated in docs/plan.md)."""

from __future__ import annotations

import re
from dataclasses import replace

from infinity.plan.machine import DriveSpeed, Machine

GB = 1e9

# GPU: 989 TFLOP/s dense bf16, 80 GB at 3.35 TB/s, NVLink 450 GB/s each way (H100 SXM5 data sheet). Training
# of dense models reaches 40 % of the peak (38 to 43 % in "The Llama 3 Herd of Models", 2024, table 4).
# Node: 2 TB, two sockets of 8 channels DDR5-4800 (614 GB/s, 80 % reached), 8 network ports of 400 Gb/s for
# compute, PCIe Gen5 x16 (64 GB/s, 55 reached), 8 U.2 drives of 3.84 TB (DGX H100 user guide).
# Drives: Gen4 of this class read 6.0 and write 3.25 GB/s sustained, 48 and 26 together.
_DGX_H100 = Machine(
    name="DGX H100",
    ranks_per_node=8,
    device_bytes=int(80 * GB),
    flops_per_s=0.40 * 989e12,
    device_bytes_per_s=3350 * GB,
    link_bytes_per_s=55 * GB,
    host_bytes=int(2000 * GB),
    host_bytes_per_s=0.8 * 614 * GB,
    drive_bytes=int(8 * 3840 * GB),
    drive=DriveSpeed(48 * GB, 26 * GB),
    node_link_bytes_per_s=0.8 * 450 * GB,
    network_bytes_per_s=0.8 * 400 * GB,
    collective_seconds=50e-6,
    group_seconds=100e-6,
)

# GPU: 312 TFLOP/s dense bf16, 80 GB at 2.04 TB/s, NVLink 300 GB/s each way (A100 data sheet); half of the peak, as
# Megatron-LM reports (Narayanan et al., SC'21). Node: 2 TB, two sockets of 8 channels DDR4-3200 (410 GB/s), 8 ports of
# 200 Gb/s, PCIe Gen4 x16 (DGX A100 user guide). Drives as DGX H100.
_DGX_A100 = replace(
    _DGX_H100,
    name="DGX A100",
    flops_per_s=0.50 * 312e12,
    device_bytes_per_s=2039 * GB,
    link_bytes_per_s=25 * GB,
    host_bytes_per_s=0.8 * 410 * GB,
    node_link_bytes_per_s=0.8 * 300 * GB,
    network_bytes_per_s=0.8 * 200 * GB,
)


# A cloud instance with one GPU of such a node: an eighth of its memory and drives.
def _share_of(node: Machine, name: str) -> Machine:
    return replace(
        node,
        name=name,
        ranks_per_node=1,
        host_bytes=node.host_bytes // 8,
        host_bytes_per_s=node.host_bytes_per_s / 8,
        drive_bytes=node.drive_bytes // 8,
        drive=DriveSpeed(6.0 * GB, 3.25 * GB),
    )


# Desktop: 64 GB of DDR5-5200 on two channels (83 GB/s), one Gen4 drive of 2 TB: 7.0 GB/s read, and 1.4 GB/s
# written, its rate once its fast cache is full (its data sheet says 6.9). PCIe Gen4 x16.
# GPU: 165 TFLOP/s bf16 with fp32 accumulation, 24 GB at 1008 GB/s (Ada whitepaper); half of the peak.
_RTX_4090 = Machine(
    name="one RTX 4090, one Gen4 drive",
    device_bytes=int(24 * GB),
    flops_per_s=0.50 * 165e12,
    device_bytes_per_s=1008 * GB,
    link_bytes_per_s=25 * GB,
    host_bytes=int(64 * GB),
    host_bytes_per_s=0.8 * 83 * GB,
    drive_bytes=int(2000 * GB),
    drive=DriveSpeed(7.0 * GB, 1.4 * GB),
    group_seconds=100e-6,
)


def _desktop(name: str, *, tflops: float, memory_gb: int, memory_gb_per_s: float, link_gb_per_s: float = 25) -> Machine:
    """Return the desktop of the RTX 4090 with another GPU, at half of its peak."""
    return replace(
        _RTX_4090,
        name=f"one {name}, one Gen4 drive",
        device_bytes=int(memory_gb * GB),
        flops_per_s=0.50 * tflops * 1e12,
        device_bytes_per_s=memory_gb_per_s * GB,
        link_bytes_per_s=link_gb_per_s * GB,
    )


PRESETS: dict[str, Machine] = {
    "dgx-h100": _DGX_H100,
    # GPU: as H100, with 141 GB at 4.8 TB/s (H200 data sheet). Drives: 8 Gen5 x4 of 7.68 TB, 13.0 GB/s read and 6.6 GB/s
    # written each (PM1743 as announced). The rest as DGX H100.
    "8xh200-gen5": replace(
        _DGX_H100,
        name="8 x H200, 8 Gen5 drives",
        device_bytes=int(141 * GB),
        device_bytes_per_s=4800 * GB,
        drive_bytes=int(8 * 7680 * GB),
        drive=DriveSpeed(8 * 13.0 * GB, 8 * 6.6 * GB),
    ),
    "dgx-a100": _DGX_A100,
    "h100": _share_of(_DGX_H100, "one H100 of 80 GB"),
    "a100": _share_of(_DGX_A100, "one A100 of 80 GB"),
    "rtx4090-gen4": _RTX_4090,
    # 71 TFLOP/s bf16 with fp32 accumulation, 24 GB at 936 GB/s (GA102 whitepaper).
    "rtx3090-gen4": _desktop("RTX 3090", tflops=71, memory_gb=24, memory_gb_per_s=936),
    # Twice the 22.1 TFLOP/s of fp32, 288 GB/s, PCIe Gen4 x8 (product page). Also sold with 8 GB: --gpu-memory 8GB.
    "rtx4060ti-gen4": _desktop(
        "RTX 4060 Ti of 16 GB", tflops=44, memory_gb=16, memory_gb_per_s=288, link_gb_per_s=12.5
    ),
    # Twice the 12.7 TFLOP/s of fp32, 360 GB/s (product page).
    "rtx3060-gen4": _desktop("RTX 3060 of 12 GB", tflops=25, memory_gb=12, memory_gb_per_s=360),
    # Assumed: 8 cores that reach 0.5 TFLOP/s in bf16 under FSDP2, 16 GB of which half is free, 40 GB/s of memory
    # bandwidth, one Gen4 drive of 1 TB that sustains 5.0 and 1.5 GB/s.
    "laptop": Machine(
        name="a laptop that computes on its CPU",
        device_is_host=True,
        flops_per_s=0.5e12,
        host_bytes=int(8 * GB),
        host_bytes_per_s=40 * GB,
        drive_bytes=int(1000 * GB),
        drive=DriveSpeed(5.0 * GB, 1.5 * GB),
        group_seconds=1e-3,
    ),
}

_GPUS = {name.removesuffix("-gen4"): machine for name, machine in PRESETS.items()}


def preset_of(name: str) -> Machine | None:
    """Return the preset of this name or GPU, such as "NVIDIA GeForce RTX 3090", "RTX 3090" or "3090"; else None."""
    letters = re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
    gpu = re.sub(r"(?<=h100|a100)(sxm4)?(80gb)?(hbm3|pcie)?$", "", letters)  # as nvidia-smi names them
    return PRESETS.get(name) or _GPUS.get(gpu) or _GPUS.get(f"rtx{gpu}")
