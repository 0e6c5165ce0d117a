"""A model with parameters that have no dimension, or no elements, for the tests; run by several ranks,
`scalars.py FOLDER` trains it on NVMe and in memory and says whether they agree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity

CLIPPING = 0.5
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self, gain: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.gain = gain
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.gain.dim() == self.shift.dim() == 0
        return x + self.gain * torch.tanh(self.linear(x) - self.shift)


class Nothing(nn.Module):
    """A group that has no elements."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ self.weight.view(12, 0)).sum()


class Scaled(nn.Module):
    """Scalars in the root and in blocks; one is tied, one is frozen. What has no elements is so, too."""

    def __init__(self) -> None:
        super().__init__()
        gain = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList([Block(gain), Block(gain)])
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.fixed = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.nothing = nn.ModuleList([Nothing(0, 12), Nothing(12, 0)])
        self.none = nn.Parameter(torch.empty(0))
        self.none_fixed = nn.Parameter(torch.empty(2, 0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for module in self.nothing:
            x = module(x) + self.none.sum() + self.none_fixed.sum()
        return (x * self.logit_scale.exp() * self.fixed).square().mean()


def model() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def config(path: Path | None, *, bf16: bool, **own: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(path)} if path else {"device": "none"}
    return {
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": SETTINGS},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": {"pinned_bytes_max": "16MiB", **own} if path else {},
    }


def make(path: Path | None, *, bf16: bool = False, **options: Any) -> infinity.Engine:
    own = options.pop("own", {})
    chosen = options.pop("model", None) or model()
    engine, *_ = infinity.initialize(model=chosen, config=config(path, bf16=bf16, **own), **options)
    return engine


def batches(steps: int) -> list[torch.Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 12, generator=draw) for _ in range(steps)]


def train(engine: infinity.Engine, first: int, steps: int) -> list[tuple[float, float | None]]:
    history = []
    for x in batches(first + steps)[first:]:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        history.append((loss.item(), engine.get_global_grad_norm()))
    return history


def values(engine: infinity.Engine) -> dict[str, list[float]]:
    """Every master, whole."""
    return {name: p.full_tensor().flatten().tolist() if p.numel() else [] for name, p in engine.named_parameters()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    outcomes = []
    for place in (Path(sys.argv[1]), None):
        with make(place, bf16=True) as engine:
            outcomes.append((train(engine, 0, 4), values(engine)))
    print("equal" if outcomes[0] == outcomes[1] else f"different: {outcomes}", flush=True)
    dist.destroy_process_group()
