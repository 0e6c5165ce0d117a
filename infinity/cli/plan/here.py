"""Measures this machine for the planner: its memory, the rates of its drive, and a few training steps.

Compute is measured as it is used: blocks of the model's width in infinity's engine, in memory, so that the figures
include FSDP2's copies and the real AdamW. Main thread; leaves no files.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.cli.synthetic import Block
from infinity.drive.choice import DriveProfile, load_profile
from infinity.drive.describe import drive_of
from infinity.drive.measure import DriveRates, measure_drive
from infinity.host_memory import available_bytes
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.program import ADAM_BYTES, CLIP_BYTES, NORM_BYTES
from infinity.plan.transformer import BLOCK_FACTOR, Transformer, heads_for
from infinity.store.run_folder import free_bytes
from infinity.units import MIB

_BLOCK_NUMEL_MAX = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Wider blocks are measured at this size: their operations per second are the same."""

_NUMEL_MIN = 16 << 20
"""Smallest measured model (elements): more than any cache holds."""

_FLOPS_MAX = {"cpu": 3e11, "cuda": 2e14}
"""Operations of one measured step: a second or two on few cores."""

_STEPS = 5
_COPY_BYTES = 256 * MIB


def measure_machine(path: Path, model: Transformer, *, samples: int, report: Callable[[str], None]) -> Machine:
    """Measure this machine, and the drive under `path`, for training `model` in micro-batches of `samples`. `report`
    gets a line for each measurement."""
    drive, source = _drive_speed(path)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    report(
        f"drive ({source}): {drive.read_bytes_per_s / 1e9:.2f} GB/s read, {drive.write_bytes_per_s / 1e9:.2f} GB/s write"
    )
    flops_per_s, update_bytes_per_s = _measure_training(model, samples=samples, kind=kind, report=report)
    shared: dict[str, Any] = {
        "name": f"this machine, {path}",
        "flops_per_s": flops_per_s,
        "host_bytes": available_bytes() or 0,
        "drive": drive,
        "drive_bytes": drive_of(path).nbytes,
        "drive_free_bytes": free_bytes(path),
    }
    if kind == "cpu":
        return Machine(device_is_host=True, host_bytes_per_s=update_bytes_per_s, **shared)
    return Machine(
        device_bytes=torch.cuda.mem_get_info()[0],
        device_bytes_per_s=update_bytes_per_s,
        link_bytes_per_s=copy_rate(torch.device("cuda")),
        host_bytes_per_s=2 * copy_rate(torch.device("cpu")),
        **shared,
    )


def _drive_speed(path: Path) -> tuple[DriveSpeed, str]:
    measured: DriveProfile | DriveRates | None = load_profile(path)
    source = "its profile"
    if measured is None:
        measured = measure_drive(path, rounds=3)
        source = "a short measurement"
    each_way = measured.mixed_bytes_per_s / 2
    return DriveSpeed(measured.read_bytes_per_s, measured.write_bytes_per_s, (each_way, each_way)), source


def _measure_training(
    model: Transformer, *, samples: int, kind: str, report: Callable[[str], None]
) -> tuple[float, float]:
    """Time a few steps of a small model whose blocks are as wide as those of `model`, up to a limit: on a GPU in its
    memory, on a CPU paged in host memory.

    Returns the operations per second of forward and backward, at 6 per token and parameter, and the bytes per second of
    AdamW (on a GPU with norm and clipping), in the planner's memory traffic.
    """
    width = math.isqrt(_BLOCK_NUMEL_MAX[kind] // BLOCK_FACTOR) // 64 * 64
    hidden, heads = (model.hidden, model.heads) if model.hidden <= width else (width, heads_for(width))
    layers = max(2, min(model.layers, -(-_NUMEL_MIN // (BLOCK_FACTOR * hidden * hidden))))
    numel = layers * BLOCK_FACTOR * hidden * hidden
    tokens = max(16, int(_FLOPS_MAX[kind] / 6 / numel))
    seq = min(model.seq, tokens)
    batch = torch.randn(max(1, min(samples, tokens // seq)), seq, hidden, dtype=torch.bfloat16)
    place = {"device": "cpu" if kind == "cpu" else "none"}
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"update": "step" if kind == "cpu" else "auto"},
    }
    with infinity.init_empty():
        # Nested in another module, as groups are made of the modules in a list within the model.
        blocks = nn.Sequential(nn.Sequential(*(Block(hidden, heads) for _ in range(layers))))
    engine = infinity.initialize(model=blocks, config=config)[0]
    with engine:
        passes = [_timed_step(engine, batch.to(kind)) for _ in range(_STEPS + 1)][1:]
    gradient_seconds, step_seconds = (statistics.median(times) for times in zip(*passes, strict=True))
    exact = sum(parameter.numel() for parameter in blocks.parameters())
    flops_per_s = 6 * batch.shape[0] * seq * exact / gradient_seconds
    traffic = ADAM_BYTES if kind == "cpu" else ADAM_BYTES + NORM_BYTES + CLIP_BYTES
    update_bytes_per_s = traffic * exact / step_seconds
    report(
        f"training steps: {flops_per_s / 1e12:.3g} TFLOP/s on {layers} blocks of width {hidden}, "
        f"{batch.shape[0]} x {seq} tokens; AdamW at {update_bytes_per_s / 1e9:.1f} GB/s of memory traffic"
    )
    return flops_per_s, update_bytes_per_s


def _timed_step(engine: infinity.Engine, batch: torch.Tensor) -> tuple[float, float]:
    times = [_now()]
    engine.backward(engine(batch).float().square().mean())
    times.append(_now())
    engine.step()
    times.append(_now())
    return times[1] - times[0], times[2] - times[1]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def copy_rate(device: torch.device) -> float:
    """Measure the bytes per second from pinned host memory to `device`; on the CPU, from memory to memory."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_STEPS + 1):
        began = _now()
        target.copy_(source)
        times.append(_now() - began)
    return _COPY_BYTES / statistics.median(times[1:])
