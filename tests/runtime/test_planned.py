"""What a run holds is what was planned for it: gradients that wait, and the pinned pool where none is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quiet import come_to_rest
from torch import nn

import infinity
from infinity.plan.estimate import memory_of, pipeline_of
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.planner import plan_step
from infinity.plan.strategy import STRATEGIES, Strategy
from infinity.plan.transformer import Transformer
from infinity.plan.work import Work
from infinity.schedule.scheme import Scheme, Update
from infinity.units import MIB

LAYERS = 3
WIDTH = 256
MACHINE = Machine(
    name="any",
    host_bytes_per_s=1e10,
    device_is_host=True,
    flops_per_s=1e12,
    host_bytes=10**11,
    drive=DriveSpeed(1e9, 1e9),
)
UPDATES: list[Update] = ["step", "forward", "backward"]

pytestmark = pytest.mark.usefixtures("one_rank")


class Model(nn.Module):
    """Blocks without anything small, which would stay in host memory; pages and sub-groups cut it evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h).tanh()
        return h


def work_of(update: Update, accumulation: int, clipping: bool = False, *, at_once: int = 1, **settings: Any) -> Work:
    shape = Transformer(LAYERS, WIDTH, 1, 1, 2, WIDTH * WIDTH, WIDTH * WIDTH)
    scheme = Scheme("split", update, speculative=update == "backward" and (clipping or accumulation > at_once))
    passing = {"micro_batches": accumulation, "micro_batches_at_once": at_once}
    return Work(shape, clipping=clipping, scheme=scheme, **passing, **settings)


def started(
    strategy: Strategy, nvme_path: Path, update: Update, accumulation: int, clipping: bool = False, **own: Any
) -> infinity.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1e4 if clipping else 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": strategy.stage,
            "offload_param": {"device": strategy.parameters, "nvme_path": str(nvme_path)},
            "offload_optimizer": {"device": strategy.optimizer, "nvme_path": str(nvme_path)},
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": {"wrap": ["Linear"], "update": update, **own},
    }
    return infinity.initialize(model=Model(), config=config)[0]


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each.uses_nvme], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("update", "accumulation", "clipping"),
    [*((update, 1, False) for update in UPDATES), ("forward", 2, False), ("backward", 1, True), ("backward", 2, True)],
)
def test_gradients_pool_and_drive_take_what_was_planned(
    strategy: Strategy, update: Update, accumulation: int, clipping: bool, nvme_path: Path
) -> None:
    work = work_of(update, accumulation, clipping, keeps_gathered=strategy.stage == 3 and accumulation > 1)
    pool = pipeline_of(work, strategy).pinned_bytes
    planned = memory_of(work, strategy, pinned_bytes=pool, device_is_host=True)
    with started(strategy, nvme_path, update, accumulation, clipping) as engine:
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(4, WIDTH)).float().square().mean())
        assert engine.gradient_bytes == planned.host.get("gradients", 0)
        assert engine.swap is not None
        assert engine.swap.stats().pinned_bytes == pool
        assert engine.swap.stats().arena_bytes == planned.nvme_bytes
        assert pool > 4 * MIB


@pytest.mark.parametrize(
    "strategy", [each for each in STRATEGIES if each.optimizer == "cpu"], ids=lambda each: each.name
)
@pytest.mark.parametrize(("update", "clipping"), [("step", False), ("backward", False), ("backward", True)])
def test_host_memory_holds_what_was_planned(
    strategy: Strategy, update: Update, clipping: bool, nvme_path: Path
) -> None:
    work = work_of(update, 1, clipping)
    planned = memory_of(work, strategy, pinned_bytes=0, device_is_host=True)
    with started(strategy, nvme_path, update, 1, clipping) as engine:
        engine.backward(engine(torch.ones(4, WIDTH)).float().square().mean())
        assert engine.gradient_bytes == planned.host.get("gradients", 0)
        assert engine.swap is not None
        sub_groups = engine.swap.paged.layout.sub_groups
        held = sum(sub.field_bytes(name) for sub in sub_groups for name in sub.fields if name in sub.held)
        assert held == planned.host["optimizer state: remainders and moments"]
        assert engine.swap.stats().cached_bytes == 2 * work.shard_numel
        assert engine.swap.stats().arena_bytes == 0


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each.uses_nvme], ids=lambda each: each.name)
def test_only_gradients_of_copies_on_nvme_wait_there(strategy: Strategy, nvme_path: Path) -> None:
    work = work_of("forward", 1, gradient_bytes_max=0)
    planned = memory_of(work, strategy, pinned_bytes=0, device_is_host=True)
    with started(strategy, nvme_path, "forward", 1, gradient_bytes_max=0) as engine:
        engine.backward(engine(torch.ones(4, WIDTH)).float().square().mean())
        assert engine.gradient_bytes == planned.host["gradients"]
        assert engine.swap is not None
        spilled = sum(sub.layout.gradient_bytes for sub in engine.swap.paged.sub_groups)
        assert spilled == planned.nvme.get("gradients", 0)


@pytest.mark.parametrize(
    ("update", "accumulation", "clipping"),
    [("step", 1, False), ("forward", 1, True), ("backward", 1, False), ("backward", 1, True), ("backward", 2, True)],
)
def test_a_step_moves_what_was_planned_and_a_discarded_one_so_much_more(
    update: Update, accumulation: int, clipping: bool, nvme_path: Path
) -> None:
    work = work_of(update, accumulation, clipping)
    plan = plan_step(work, MACHINE, STRATEGIES[-1], cache_bytes=0)
    assert plan.simulated is not None
    with started(STRATEGIES[-1], nvme_path, update, accumulation, clipping) as engine:
        moved = []
        for step in range(6):
            assert engine.swap is not None
            before = engine.swap.stats()
            for _ in range(accumulation):
                engine.backward(engine(torch.ones(4, WIDTH)).float().square().mean() * (1e9 if step == 4 else 1.0))
            engine.step()
            come_to_rest(engine.swap)
            after = engine.swap.stats()
            moved.append((after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes))
    staged = 2 * engine.numel if accumulation > 1 else 0  # groups stay gathered, and such small ones staged too
    assert moved[3] == (plan.simulated.read_bytes - staged, plan.simulated.written_bytes)
    more = [sum(each) for each in zip(*moved[4:], strict=True)]
    assert more == [2 * a + b for a, b in zip(moved[3], plan.discarded_bytes, strict=True)]


@pytest.mark.parametrize(
    ("update", "clipping"), [("step", False), ("forward", True), ("backward", False), ("backward", True)]
)
@pytest.mark.parametrize("accumulation", [2, 7])
def test_a_vertical_step_holds_and_moves_what_was_planned(
    update: Update, accumulation: int, clipping: bool, nvme_path: Path
) -> None:
    work = work_of(update, accumulation, clipping, at_once=accumulation)
    strategy = STRATEGIES[-1]
    plan = plan_step(work, MACHINE, strategy, cache_bytes=0)
    assert plan.simulated is not None
    planned = memory_of(work, strategy, pinned_bytes=plan.pipeline.pinned_bytes, device_is_host=True)
    x = torch.ones(4, WIDTH)
    with started(strategy, nvme_path, update, accumulation, clipping, schedule="vertical") as engine:
        assert engine.swap is not None
        waiting = []
        step = engine.step
        engine.step = lambda: waiting.append(engine.gradient_bytes) or step()  # type: ignore[func-returns-value,method-assign]
        for _ in range(4):
            before = engine.swap.stats()
            engine.train_batch(iter([(x, None)] * accumulation), loss_fn=lambda y, _: y.float().square().mean())
            come_to_rest(engine.swap)
            after = engine.swap.stats()
        assert waiting[-1] == planned.host.get("gradients", 0)
        assert after.arena_bytes == planned.nvme_bytes
    moved = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
    assert moved == (plan.simulated.read_bytes, plan.simulated.written_bytes)
    once = plan_step(work_of(update, 1, clipping), MACHINE, strategy, cache_bytes=0)
    assert plan.plain_bytes == once.plain_bytes
    apart = plan_step(work_of(update, accumulation, clipping), MACHINE, strategy, cache_bytes=0)
    assert apart.plain_bytes[0] > plan.plain_bytes[0]
