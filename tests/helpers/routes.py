"""Ranks whose tokens go to different experts, each expert a group of its own: `routes.py FOLDER PLACE SCENE`. See the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.fsdp2 import routes


class Expert(nn.Linear):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            x = x + self.experts[number](x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor, *chosen: list[int]) -> torch.Tensor:
        x = self.first(x)
        for layer, experts in zip(self.layers, chosen, strict=True):
            x = layer(x, experts)
        return x.square().mean()


def make(folder: Path, place: str, **own: Any) -> infinity.Engine:
    torch.manual_seed(0)
    gathers_from_nvme = {"device": "nvme", "nvme_path": str(folder)} if place == "nvme" else {"device": "none"}
    config = {
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": gathers_from_nvme,
            "offload_optimizer": gathers_from_nvme,
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": {"wrap": ["Expert"], **own},
    }
    engine, *_ = infinity.initialize(model=Model(), config=config)
    return engine


def step(engine: infinity.Engine, *chosen: list[int]) -> None:
    engine.backward(engine(torch.ones(2, 16), *chosen))
    engine.step()


def refused(engine: infinity.Engine, *chosen: list[int]) -> None:
    try:
        step(engine, *chosen)
    except infinity.InfinityError as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)
    else:
        print("not refused", flush=True)


def at_once(engine: infinity.Engine, rank: int) -> None:
    """The first forward goes two ways; the groups are alike, so that nothing but the numbers would tell."""
    refused(engine, [0], [rank])


def skipped(engine: infinity.Engine, rank: int) -> None:
    """One rank has no token for an expert that all have used so far."""
    routes.LEAVING_SECONDS_MAX = 0.5
    for _ in range(2):
        step(engine, [0, 1, 2], [0, 1, 2])
    refused(engine, [0, 1, 2], [0, 2] if rank else [0, 1, 2])


def known(engine: infinity.Engine, rank: int) -> None:
    """Both ways were gone by all before."""
    for number in (0, 1, 0):
        step(engine, [0], [number])
    refused(engine, [0], [rank])


def ended(engine: infinity.Engine, rank: int) -> None:
    """One rank continues after the other has finished."""
    refused(engine, [0], [0, 1] if rank else [0])


def alike(engine: infinity.Engine, rank: int) -> None:
    """All ranks vary their way, alike; nothing stays in the store."""
    store = dist.distributed_c10d._get_default_store()
    for chosen in ([0], [1], [1, 2], [0], [2, 0]):
        step(engine, chosen, chosen[::-1])
        with torch.no_grad():
            engine(torch.ones(2, 16), [0], chosen)
    before = store.num_keys()
    for _ in range(3):
        step(engine, [2, 0], [0, 2])
    dist.barrier()
    print("nothing left behind" if store.num_keys() <= before + 2 else "keys are left", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with make(Path(sys.argv[1]), sys.argv[2]) as earlier:  # has been elsewhere at the same places
        step(earlier, [0, 1, 2], [2, 1, 0])
    made = make(Path(sys.argv[1]), sys.argv[2])
    globals()[sys.argv[3]](made, dist.get_rank())
    if sys.argv[3] == "alike":
        made.close()
