"""Updates that are spread over the backward: in shares, in one order, of what is trained, and never of half a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity import PagingOptions
from infinity.swap.pending_updates import PendingUpdates

pytestmark = pytest.mark.usefixtures("one_rank")
WAYS: dict[str, dict[str, Any]] = {
    "to stay": {},
    "speculative": {"speculative": True, "gradient_dtype": torch.bfloat16},
}


class Block(nn.Module):
    """Two matrices, of which a part of it needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, part: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.a(x).tanh()
        return x + (y if part else self.b(y).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, part: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, part)
        return x


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).bfloat16()


def paged(swap: infinity.SwapManager, way: str) -> Any:
    model = Model()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    options = PagingOptions(param_persistence_threshold=0, sub_group_size=2048, update="backward", **WAYS[way])
    swap.page(model, options)
    return model


def step(model: Any, optimizer: Any, number: int) -> None:
    optimizer.expect(1.0)
    model(inputs(number)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each call that updates a part of a group: how many of its members, and whether these are the last."""
    counted: list[tuple[int, bool]] = []
    run = PendingUpdates.run_in_backward

    def counting(self: PendingUpdates, group: Any, updates: Any, after_each: Any, **more: Any) -> None:
        counted.append((len(updates), more["last"]))
        run(self, group, updates, after_each, **more)

    monkeypatch.setattr(PendingUpdates, "run_in_backward", counting)
    return counted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_group_is_updated_in_shares_in_the_same_order_in_every_step(
    way: str, seen_before: bool, nvme_path: Path, pieces: list[tuple[int, bool]]
) -> None:
    """Also if the model ran before its optimizer was made."""
    with infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap:
        model = paged(swap, way)
        if seen_before:
            with torch.no_grad():
                model(inputs(0))
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)
        steps = []
        for number in range(3):
            step(model, optimizer, number)
            steps.append([*pieces])
            pieces.clear()
    assert steps[0] == steps[1] == steps[2]
    assert not all(last for _, last in steps[0])


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_kept_staged_for_updates_that_do_not_follow(way: str, nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap:
        model = paged(swap, way)
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)
        for number in range(3):
            step(model, optimizer, number)
            assert not swap.paging.policy._updated_from_compute
        for parameter in model.blocks[:2].parameters():
            parameter.requires_grad_(False)
        optimizer.expect(1.0)
        model(inputs(3)).float().square().mean().backward()
        assert not swap.paging.policy._updated_from_compute


def test_a_model_that_is_frozen_in_the_middle_of_a_pass_goes_through_its_backward(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap:
        model = paged(swap, "speculative")
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)
        step(model, optimizer, 0)
        loss = model(inputs(1)).float().square().mean()
        model.requires_grad_(False)
        loss.backward()


@pytest.mark.parametrize("update", ["forward", "step", "backward"])
def test_a_sum_that_a_second_micro_batch_completes_is_kept_in_fp32(update: str, nvme_path: Path) -> None:
    """The first one leaves a weight of a group out, so that the group's other gradients wait in `.grad`."""

    def train(place: dict[str, str], **own: Any) -> list[torch.Tensor]:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0 if update != "backward" else 1e9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": place, "offload_optimizer": place,
            },
            "infinity": {"pinned_bytes_max": "8MiB", "wrap": ["Block"], **own},
        }  # fmt: skip
        engine, *_ = infinity.initialize(model=Model(), config=config)
        with engine:
            for number in range(6):
                engine.set_gradient_accumulation_boundary(number % 2 == 1)
                engine.backward(engine(inputs(number), number % 2 == 0).float().square().mean())
                engine.step()
            return [parameter.detach().full_tensor() + 0 for parameter in engine.module.parameters()]

    ours = train({"device": "nvme", "nvme_path": str(nvme_path)}, update=update)
    assert all(map(torch.equal, ours, train({"device": "none"})))
