"""What a step asks of the training thread grows as the model does, not with its square: counted in calls, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH = 64
SUB_GROUP_NUMEL = 2048
TIMES = 4


class Block(nn.Module):
    def __init__(self, sub_groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((sub_groups * SUB_GROUP_NUMEL // WIDTH, WIDTH), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x, self.weight).mean(-1, keepdim=True)


def engine_of(groups: int, sub_groups: int, update: str, nvme_path: Path, **own: Any) -> infinity.Engine:
    """A model of blocks of so many sub-groups each, in a pool that holds a part of it."""
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "sub_group_size": SUB_GROUP_NUMEL,
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": {"wrap": ["Block"], "update": update, "pinned_bytes_max": "9MiB", **own},
    }
    model = nn.Sequential(*(Block(sub_groups) for _ in range(groups)), nn.Linear(WIDTH, WIDTH))
    return infinity.initialize(model=model, config=config)[0]


def calls(act: Callable[[], None]) -> int:
    """How often functions and generators of the library were entered."""
    package = str(Path(infinity.__file__).parent)
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(engine: infinity.Engine) -> int:
    """Of a step and an evaluation whose paths are known."""
    batch = torch.ones(1, WIDTH)

    def act() -> None:
        engine.backward(engine(batch).float().square().mean())
        engine.step()
        engine.eval()
        with torch.no_grad():
            engine(batch)
        engine.train()

    for _ in range(2):
        act()
    return calls(act)


@pytest.mark.parametrize(("groups", "sub_groups"), [(30, 1), (2, 50)])
@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_calls_grow_with_groups_and_with_sub_groups(update: str, groups: int, sub_groups: int, nvme_path: Path) -> None:
    check_growth(groups, sub_groups, update, nvme_path)


@pytest.mark.parametrize(
    ("update", "own"), [("backward", {"durability": "step"}), ("forward", {"gradient_bytes_max": 0})]
)
def test_calls_grow_with_sub_groups_in_a_durable_run_and_with_gradients_on_nvme(
    update: str, own: dict[str, Any], nvme_path: Path
) -> None:
    check_growth(2, 50, update, nvme_path, **own)


def check_growth(groups: int, sub_groups: int, update: str, nvme_path: Path, **own: Any) -> None:
    """Calls are as many times more as the model is larger, or a bit; growing with the square they would be TIMES * TIMES."""
    found = []
    for times in (1, TIMES):
        size = (groups * times, sub_groups) if sub_groups == 1 else (groups, sub_groups * times)
        with engine_of(*size, update, nvme_path, run_name=f"times{times}", **own) as engine:
            found.append(calls_of_a_step(engine))
    assert found[1] < 1.5 * TIMES * found[0]
