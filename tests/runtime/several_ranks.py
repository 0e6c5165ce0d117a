"""What several ranks do together, as scripts under torchrun: `several_ranks.py SCENE FOLDER`. Used by the tests beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity


def model(layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))


def config(path: Path | str, **own: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(path)}
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": {"pinned_bytes_max": "16MiB", **own},
    }


def one_step(engine: infinity.Engine) -> float:
    loss = engine(torch.ones(2, 8)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def again_and_again(folder: Path) -> None:
    """Engines one after another in one process, each with a process group of its own."""
    for _ in range(3):
        engine, *_ = infinity.initialize(model=model(), config=config(folder))
        with engine:
            one_step(engine)
    print("made three engines", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
