"""A rank that calls one block alone between steps, on the device that isn't there: prints its losses there and in memory."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import training
from fake import LateRuntime

import infinity
from infinity.device import StreamDevice
from infinity.swap import manager


def losses_with(zero: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "infinity": {"pinned_bytes_max": "16MiB"},
    }
    losses = []
    with infinity.initialize(model=training.Model(training.Case()), config=config)[0] as engine:
        for number in range(4):
            loss = training.loss_of(engine, training.batch(number, 0))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if number == 1:
                with torch.no_grad():
                    engine.module.blocks[1](torch.ones(1, 2, 64, dtype=torch.bfloat16))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    in_memory = losses_with({})
    place = {"device": "nvme", "nvme_path": sys.argv[1]}
    bounds = {
        "stage3_prefetch_bucket_size": training.BLOCK_NUMEL,
        "stage3_max_live_parameters": 3 * training.BLOCK_NUMEL,
        "stage3_max_reuse_distance": 0,
    }
    runtime = LateRuntime()
    patched: Any = manager
    patched.device_for = lambda torch_device: StreamDevice(runtime)
    with runtime.watching():
        on_nvme = losses_with({"offload_param": place, "offload_optimizer": place, **bounds})
    print(json.dumps([in_memory, on_nvme]), flush=True)
    dist.destroy_process_group()


main()
