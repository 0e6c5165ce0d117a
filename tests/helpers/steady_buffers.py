"""Run by several ranks, `steady_buffers.py FOLDER` trains a model on NVMe and says whether its collectives came to use the same
blocks of memory in each step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.fsdp2.buffers import ReusedBuffers

WIDTH = 64


def train(path: Path) -> tuple[ReusedBuffers, list[int]]:
    """Three blocks of one size. The store of their buffers, and how many blocks of memory it had made after each step."""
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(path)},
            "stage3_param_persistence_threshold": 0,
            "stage3_module_granularity_threshold": 0,
        },
        "infinity": {"update": "backward", "wrap": ["Linear"]},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    made = []
    with infinity.initialize(model=model, config=config)[0] as engine:
        (group,) = engine.module[1]._get_fsdp_state()._fsdp_param_groups
        buffers: ReusedBuffers = group._reduce_scatter_comm._buffers
        assert group._all_gather_comm._buffers is buffers
        for _ in range(8):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
            made.append(buffers.made)
    return buffers, made


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _, made = train(Path(sys.argv[1]))
    print("steady" if made[-4:] == made[-4:-3] * 4 else f"made {made}", flush=True)
    dist.destroy_process_group()
