"""FSDP2's recipes in a loop of one's own: what stock FSDP2 trains is trained paged to the bit, or refused in fitting words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm, self.head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.register_buffer("shift", torch.arange(64.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.relu(self.base(x)))) + self.shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def shard(model: Model, policy: MixedPrecisionPolicy = BF16, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)


def trained(
    model: Model, path: Path | None, finish: Callable[[Model], object] = lambda model: None
) -> list[torch.Tensor]:
    """The values after three steps, on NVMe or by stock FSDP2; `finish` gives first values once the model is paged."""
    if path is None:
        finish(model)
        return take_steps(model, torch.optim.AdamW(trained_in(model), lr=0.01, fused=True))
    with infinity.SwapManager(path, pinned_bytes_max="16MiB") as swap:
        swap.page(model)
        finish(model)
        return take_steps(model, infinity.PagedAdamW(trained_in(model), swap=swap, lr=0.01, fused=True))


def trained_in(model: Model) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def take_steps(model: Model, optimizer: Any) -> list[torch.Tensor]:
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local = [getattr(p.data, "_local_tensor", p.data) for p in model.parameters()]
    return [value.float() + 0 for value in local]


def draw(model: Model) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Block):
                module.shift.copy_(torch.arange(64.0))
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()


@pytest.mark.parametrize("first", ["to_empty", "page"])
def test_a_model_on_the_meta_device_is_made_empty_and_reset(first: str, nvme_path: Path) -> None:
    def empty(model: Model) -> None:
        model.to_empty(device="cpu")
        draw(model)

    results = []
    for path in (None, nvme_path):
        with torch.device("meta"):
            model = Model()
        shard(model)
        if first == "to_empty":
            empty(model)
        results.append(trained(model, path, empty if first == "page" else lambda model: None))
    assert all(map(torch.equal, *results))


def test_a_model_with_values_is_not_made_empty(nvme_path: Path) -> None:
    model = Model()
    shard(model)
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(model)
        with pytest.raises(infinity.ConfigError, match="the model is paged"):
            model.to_empty(device="cpu")


@pytest.mark.parametrize("recipe", ["ignored", "bf16", "fp16", "bf16 in fp32"])
def test_a_frozen_part(recipe: str, nvme_path: Path) -> None:
    results = []
    for path in (None, nvme_path):
        torch.manual_seed(0)
        model = Model()
        frozen = {p for block in model.blocks for p in block.base.parameters()}
        for parameter in frozen:
            parameter.requires_grad_(False)
        if recipe == "ignored":  # FSDP2 doesn't cast what it ignores
            for block in model.blocks:
                block.base.bfloat16()
            shard(model, ignored_params=frozen)
        else:
            for block in model.blocks:
                block.base.half() if recipe == "fp16" else block.base.bfloat16()
            shard(model, MixedPrecisionPolicy() if recipe == "bf16 in fp32" else BF16)
        if recipe == "bf16 in fp32":
            with (
                infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap,
                pytest.raises(
                    infinity.ConfigError, match=r"frozen parameter blocks.0.base.weight is torch.bfloat16 in a group"
                ),
            ):
                swap.page(model)
            return
        results.append(trained(model, path))
    assert all(map(torch.equal, *results))


def refused(model: Model, path: Path) -> str:
    with (
        infinity.SwapManager(path, pinned_bytes_max="16MiB") as swap,
        pytest.raises(infinity.ConfigError) as error,
    ):
        swap.page(model)
    return str(error.value)


def test_what_is_refused_says_why(nvme_path: Path) -> None:
    model = Model()
    shard(model, ignored_params={model.blocks[0].norm.weight})
    assert "blocks.0.norm.weight is trained and not sharded: take it out of ignored_params" in refused(model, nvme_path)

    model, mesh = Model(), init_device_mesh("cpu", (1,))
    fully_shard(model.blocks[1].head, mesh=mesh)
    shard(model)
    assert "blocks.1.head is gathered in torch.float32 and other groups in torch.bfloat16" in refused(model, nvme_path)

    model = Model().bfloat16()
    shard(model)
    words = refused(model, nvme_path)
    assert "blocks.0.base.weight is trained in torch.bfloat16, in which small updates are lost" in words

    model = Model()
    fully_shard(model.blocks[0], mesh=mesh)
    assert "the root module must be an FSDP2 group too" in refused(model, nvme_path)
