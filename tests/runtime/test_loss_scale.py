"""fp16: the loss scale moves as DeepSpeed's does, and training with it equals the same loop written in plain FSDP2."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.config.blocks import Fp16Config
from infinity.runtime.loss_scale import make_loss_scale

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "several_ranks.py"


def scales(overflows: str, **settings: Any) -> list[float]:
    """The scale after each step; "x" is one that overflows."""
    scale = make_loss_scale(Fp16Config(enabled=True, **settings))
    found = []
    for step in overflows:
        if step == "x":
            scale.check_overflow()
        scale.update(overflow=step == "x")
        found.append(scale.scale)
    return found


# The expected scales are those of deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler (0.19.8) for the same steps.
@pytest.mark.parametrize(
    ("overflows", "settings", "expected"),
    [
        ("xxx", {"hysteresis": 1, "initial_scale_power": 4}, [8, 4, 2]),
        ("x.x.x", {"hysteresis": 2, "initial_scale_power": 4}, [16, 16, 8, 8, 4]),
        ("x.x.x", {"hysteresis": 2, "initial_scale_power": 4, "consecutive_hysteresis": True}, [16, 16, 16, 16, 16]),
        (".......", {"loss_scale_window": 2, "initial_scale_power": 4}, [16, 16, 32, 32, 64, 64, 128]),
        ("xx....x", {"loss_scale_window": 2, "initial_scale_power": 4}, [16, 8, 8, 8, 16, 16, 16]),
        ("xxx", {"hysteresis": 1, "initial_scale_power": 4, "min_loss_scale": 3}, [8, 4, 3]),
        ("x.x", {"loss_scale": 128}, [128, 128, 128]),
    ],
)
def test_the_scale_moves_as_deepspeed_s_does(overflows: str, settings: dict[str, Any], expected: list[float]) -> None:
    assert scales(overflows, **settings) == expected


def test_an_overflow_at_the_least_scale_is_an_error() -> None:
    with pytest.raises(infinity.InfinityError, match=r"min_loss_scale 1.*bf16"):
        scales("xxx", hysteresis=1, initial_scale_power=1)


def test_a_scale_goes_on_from_its_state() -> None:
    settings = Fp16Config(enabled=True, loss_scale_window=3, initial_scale_power=5)
    one, other = make_loss_scale(settings), make_loss_scale(settings)
    steps = [True, False, True, False, False, False, False, True, False]
    for overflow in steps[:4]:
        one.update(overflow=overflow)
    other.load_state_dict(one.state_dict())
    for overflow in steps[4:]:
        one.update(overflow=overflow)
        other.update(overflow=overflow)
        assert one.state_dict() == other.state_dict()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


PLACES = {"memory": ("none", "none"), "cpu": ("cpu", "cpu"), "nvme": ("nvme", "nvme"), "mixed": ("nvme", "cpu")}
STEPS = 12


def config(where: str, path: Path, **fp16: Any) -> dict[str, Any]:
    def place(device: str) -> dict[str, Any]:
        return {"device": device, **({"nvme_path": str(path)} if device == "nvme" else {})}

    parameters, state = PLACES[where]
    zero = {"stage": 3, "offload_param": place(parameters), "offload_optimizer": place(state)}
    return {
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, **fp16},
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
        "infinity": {"pinned_bytes_max": "16MiB"},
    }


def with_engine(settings: dict[str, Any]) -> tuple[list[float], list[torch.Tensor], int]:
    engine, *_ = infinity.initialize(model=model(), config=settings)
    losses = []
    with engine:
        for step in range(STEPS):
            loss = engine(batch(step)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses += [loss.item(), *engine.get_lr()]
        return losses, [p.data.full_tensor().clone() + 0 for p in engine.parameters()], engine.skipped_steps


def with_plain_fsdp2(scale: float) -> tuple[list[float], list[torch.Tensor], int]:
    """Unscale, clip and skip as separate steps of torch's own."""
    plain = model()
    for block in plain[1]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    fully_shard(plain, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    losses, skipped = [], 0
    rate = [0.0]  # of steps taken, not of steps tried
    rate += [1e-2 * math.log(i + 1) / math.log(6) if i < 6 else 1e-2 for i in range(STEPS)]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate[step - skipped]
        loss = plain(batch(step)).float().square().mean()
        (loss * scale).backward()
        for p in plain.parameters():
            p.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        if norm.isfinite():
            optimizer.step()
        else:
            skipped += 1
            scale /= 2
        optimizer.zero_grad()
        losses += [loss.item(), rate[step + 1 - skipped]]
    return losses, [p.data.full_tensor() for p in plain.parameters()], skipped


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("where", PLACES)
def test_training_equals_plain_fsdp2(where: str, nvme_path: Path) -> None:
    expected, got = with_plain_fsdp2(2.0**24), with_engine(config(where, nvme_path))
    assert expected[2] == got[2] > 1
    assert got[0] == pytest.approx(expected[0], rel=1e-12)  # losses bit for bit; rates are computed in another order
    assert got[0][::2] == expected[0][::2]
    assert all(torch.equal(a, b) for a, b in zip(expected[1], got[1], strict=True))


@pytest.mark.usefixtures("one_rank")
def test_a_skipped_step_says_so_and_changes_nothing(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, optimizer, _, schedule = infinity.initialize(model=model(), config=config("nvme", nvme_path))
    assert not optimizer.overflow  # accelerate looks before the first step whether there is such a thing
    with engine, caplog.at_level(logging.WARNING, "infinity"):
        before = [p.data.full_tensor().clone() + 0 for p in engine.parameters()]
        engine.backward(engine(batch(0)).float().square().mean())
        engine.step()
        assert "OVERFLOW! Skipping step. Attempted loss scale: 16777216, reducing to 8388608" in caplog.text
        assert optimizer.overflow
        assert optimizer.cur_scale == engine.cur_scale == engine.loss_scale == 2.0**23
        assert (engine.global_steps, engine.skipped_steps, schedule.last_epoch) == (1, 1, 0)
        assert not math.isfinite(engine.get_global_grad_norm())
        assert all(torch.equal(a, b.data.full_tensor() + 0) for a, b in zip(before, engine.parameters(), strict=True))
        assert all(p.grad is None for p in engine.parameters())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("update", ["step", "forward"])
def test_the_pass_after_a_skipped_step_is_foreseen(update: str, nvme_path: Path) -> None:
    settings = config("nvme", nvme_path)
    settings["infinity"]["update"] = update
    engine, *_ = infinity.initialize(model=model(), config=settings)
    with engine:
        for step in range(STEPS):
            engine.backward(engine(batch(step)).float().square().mean())
            engine.step()
        assert engine.skipped_steps > 1
        assert engine.swap is not None
        assert engine.swap.stats().mispredictions == 0


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_keeps_the_scale(nvme_path: Path, tmp_path: Path) -> None:
    def train(engine: infinity.Engine, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = engine(batch(step)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses += [loss.item(), engine.cur_scale]
        return losses

    settings = config("nvme", nvme_path, loss_scale_window=2)
    engine, *_ = infinity.initialize(model=model(), config=settings)
    with engine:
        train(engine, range(8))
        engine.save_checkpoint(tmp_path)
        expected, skipped = train(engine, range(8, 14)), engine.skipped_steps
    engine, *_ = infinity.initialize(model=model(), config=settings)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, range(8, 14)) == expected
        assert engine.skipped_steps == skipped


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_step_on_all(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, "overflowing_alone", str(nvme_path))
    assert done.stdout.count("skipped together") == 2, done.stdout
    assert done.stdout.count("OVERFLOW!") == 1, done.stdout
