"""Muon over matrices that are sharded over several ranks: `sharded_matrices.py NVME_PATH fails|copies`. For several ranks.

fails: a read fails on rank 1 while the others wait for it in the update. copies: two copies of the model, each over two ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.swap import paged_muon

Outcome = tuple[list[float], list[torch.Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def make(device: dict[str, str], **zero: Any) -> infinity.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": device,
            "offload_optimizer": device,
            **zero,
        },
        "infinity": {"pinned_bytes_max": "8MiB", "wrap": ["Block"]},
    }
    return infinity.initialize(model=nn.Sequential(*(Block() for _ in range(3))), config=config)[0]


def step(engine: infinity.Engine, number: int) -> float:
    draw = torch.Generator().manual_seed(10 * number + int(os.environ["RANK"]))
    loss = engine(torch.randn(4, 64, generator=draw).bfloat16()).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def fails(device: dict[str, str]) -> bool:
    """Return True if a failure of one rank stops all ranks."""
    with make(device) as engine:
        step(engine, 0)
        if dist.get_rank() == 1:

            def fail(*_: Any) -> None:
                raise infinity.IoError("read 4 KiB: EIO")

            paged_muon._step_matrix = fail  # type: ignore[assignment]
        said = []
        for number in (1, 2):
            try:
                step(engine, number)
            except infinity.InfinityError as error:
                said.append(error)
        first, then = said
        words = "read 4 KiB: EIO" if dist.get_rank() == 1 else "rank 1: read 4 KiB: EIO"
        return isinstance(first, infinity.IoError) and str(first) == words and "the ranks have parted" in str(then)


def copies(device: dict[str, str]) -> bool:
    """Whether they train as in memory, and one rank may look at a weight alone."""

    def trained(place: dict[str, str]) -> Outcome:
        with make(place, mics_shard_size=2) as engine:
            losses = [step(engine, number) for number in range(4)]
            weights = [parameter.data for parameter in engine.module.parameters()]
            if dist.get_rank() == 0:
                losses.append(weights[0]._local_tensor.sum().item())
            return losses, [weight.full_tensor() + 0 for weight in weights]  # type: ignore[operator]

    ours, memory = trained(device), trained({"device": "none"})
    return ours[0] == memory[0] and all(map(torch.equal, ours[1], memory[1]))


if __name__ == "__main__":
    passed = {"fails": fails, "copies": copies}[sys.argv[2]]({"device": "nvme", "nvme_path": sys.argv[1]})
    print("as promised" if passed else "NOT as promised", flush=True)
    sys.exit(not passed)
