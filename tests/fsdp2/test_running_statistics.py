"""BatchNorm and its like, and other buffers, where a model computes in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")


class FrozenNorm(nn.Module):
    """As in DETR: nothing but buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale.view(-1, 1, 1) + (self.bias - self.running_mean * scale).view(-1, 1, 1)


class NormAndRelu(nn.BatchNorm2d):
    """As in timm: its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        return functional.batch_norm(x, mean, var, self.weight, self.bias, self.training).relu()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(4), FrozenNorm(), NormAndRelu(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    mixing = [layer for norm in norms for layer in (norm, nn.Conv2d(4, 4, 3, padding=1))]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *mixing, nn.Flatten(), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 1))


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(number))


def train(dtype: str, path: Path | None, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    place = {"device": "nvme", "nvme_path": str(path)}
    zero = {"offload_param": place, "offload_optimizer": place, "stage3_param_persistence_threshold": 0} if path else {}
    config = {
        dtype: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **zero},
    }
    losses: list[float] = []

    def evaluate(engine: infinity.Engine) -> None:
        with torch.no_grad():
            losses.append(engine.eval()(batch(9)).float().sum().item())

    with infinity.initialize(model=model(), config=config)[0] as engine:
        for number in range(3):
            losses.append((loss := engine(batch(number)).float().square().mean()).item())
            engine.backward(loss)
            engine.step()
        evaluate(engine)
        statistics = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        engine.save_checkpoint(folder)
    with infinity.initialize(model=model(), config=config)[0] as engine:
        engine.load_checkpoint(folder)
        evaluate(engine)
    assert losses[-1] == losses[-2]
    return losses, statistics


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_statistics_follow_in_fp32_as_under_autocast(dtype: str, nvme_path: Path, tmp_path: Path) -> None:
    """And on NVMe they are what they are in memory, in a checkpoint, too."""
    losses, statistics = train(dtype, nvme_path, tmp_path / "nvme")
    in_memory, statistics_in_memory = train(dtype, None, tmp_path / "none")
    assert losses == in_memory
    plain = model()
    for name, expected in plain.named_buffers():
        assert torch.equal(statistics[name], statistics_in_memory[name])
        assert statistics[name].dtype == expected.dtype
    assert statistics["1.num_batches_tracked"] == 3
    with torch.autocast("cpu", torch.bfloat16 if dtype == "bf16" else torch.float16):
        assert plain(batch(0)).float().square().mean().item() == losses[0]


class Scaled(nn.Linear):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


def test_another_buffer_that_meets_16_bits_is_named() -> None:
    config: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    engine = infinity.initialize(model=nn.Sequential(nn.Linear(4, 4), Scaled()), config=config)[0]
    with engine, pytest.raises(infinity.InfinityError, match=r"1 mixes fp32 .* float buffers stay fp32 \(1\.scale\)"):
        engine(torch.ones(2, 4))
