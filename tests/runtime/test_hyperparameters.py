"""A training resumed with a changed config: differences are named. The run's settings apply, or the config's on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import durable_training as training
import pytest
import torch
from durable_training import Case, step, weights
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, SequentialLR

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")

CASE = Case(update="step")
ORIGINAL = {"weight_decay": 0.1, "warmup_max_lr": 1e-2}
CHANGED = {"weight_decay": 0.3, "warmup_max_lr": 3e-2}
STEPS = 2


def make(path: Path, told: dict[str, Any], *, resume: Any = False, **own: Any) -> infinity.Engine:
    training.torch.manual_seed(0)
    config = training.config(path, CASE, **own)
    if "schedule" in told:
        config["scheduler"] = told["schedule"] if isinstance(told["schedule"], dict) else None
        made = told["schedule"] if callable(told["schedule"]) else None
        return infinity.initialize(model=training.Model(CASE), config=config, lr_scheduler=made, resume=resume)[0]
    config["optimizer"] = {"type": "AdamW", "params": {"weight_decay": told["weight_decay"]}}
    schedule = {"warmup_max_lr": told["warmup_max_lr"], "warmup_num_steps": 4}
    config["scheduler"] = {"type": "WarmupLR", "params": schedule}
    return infinity.initialize(model=training.Model(CASE), config=config, resume=resume)[0]


def gone_on(
    way: str, path: Path, told: dict[str, Any], original: dict[str, Any] = ORIGINAL, **own: Any
) -> infinity.Engine:
    """After STEPS of a training with the original settings, start another one with the given ones."""
    durability = "step" if way == "resume" else "none"
    with make(path, original, durability=durability) as engine:
        for _ in range(STEPS):
            step(engine)
        if way != "resume":
            engine.save_checkpoint(path / "checkpoints", format=way)
    engine = make(path, told, durability=durability, resume=way == "resume", **own)
    if way != "resume":
        engine.load_checkpoint(path / "checkpoints")
    assert engine.global_steps == STEPS
    return engine


WAYS = pytest.mark.parametrize("way", ["resume", "dcp", "arena"])


@WAYS
def test_the_settings_of_the_run_count_and_what_the_config_has_otherwise_is_named_once(
    way: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(nvme_path / "whole", ORIGINAL, durability="none") as engine:
        losses = [step(engine) for _ in range(STEPS + 2)]
        expected = weights(engine)
    with gone_on(way, nvme_path / "changed", CHANGED) as engine:
        assert [step(engine), step(engine)] == losses[STEPS:]
        assert all(value.equal(expected[name]) for name, value in weights(engine).items())
    named = [each.getMessage() for each in caplog.records if "hyper-parameters" in each.getMessage()]
    assert len(named) == 1, named
    assert "weight_decay 0.3 instead of 0.1" in named[0]
    assert "schedule's high 0.03 instead of 0.01" in named[0]
    assert 'resume_hyperparameters "config"' in named[0]
    assert "betas" not in named[0] and " lr " not in named[0]


@WAYS
def test_parameter_groups_may_come_in_another_order(
    way: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    durability = "step" if way == "resume" else "none"

    def made(path: Path, order: int = 1, moved: int = 0, count: int = 2, **given: Any) -> infinity.Engine:
        torch.manual_seed(0)
        model = training.Model(CASE)
        parameters = sorted(model.parameters(), key=lambda parameter: -parameter.dim())
        cut = sum(parameter.dim() > 1 for parameter in parameters) + moved
        groups = [
            {"params": parameters[:cut], "lr": 1e-2, "weight_decay": 0.3},
            {"params": parameters[cut:], "lr": 1e-3, "weight_decay": 0.0},
        ]
        groups = groups if count == 2 else [{"params": parameters}]
        config = training.config(path, CASE, durability=durability)
        del config["scheduler"]
        schedule = lambda optimizer: LambdaLR(optimizer, lambda step: 0.7**step)  # noqa: E731
        return infinity.initialize(
            model=model, config=config, model_parameters=groups[::order], lr_scheduler=schedule, **given
        )[0]

    with made(nvme_path / "whole") as engine:
        losses = [step(engine) for _ in range(STEPS + 2)]
        expected = weights(engine)
    with made(nvme_path / "turned") as engine:
        for _ in range(STEPS):
            step(engine)
        if way != "resume":
            engine.save_checkpoint(nvme_path / "checkpoints", format=way)
    if way == "resume":
        with pytest.raises(infinity.CheckpointError, match="other parameter groups"):
            made(nvme_path / "turned", moved=1, resume=True)
    for other in ({"moved": 1}, {"count": 1}) if way != "resume" else ():
        with made(nvme_path / "other", **other) as engine:
            with pytest.raises(infinity.CheckpointError, match="in any order"):
                engine.load_checkpoint(nvme_path / "checkpoints")
            step(engine)  # nothing was changed
    with made(nvme_path / "turned", order=-1, resume=way == "resume") as engine:
        if way != "resume":
            engine.load_checkpoint(nvme_path / "checkpoints")
        assert [step(engine), step(engine)] == losses[STEPS:]
        assert all(value.equal(expected[name]) for name, value in weights(engine).items())
    assert not [each for each in caplog.records if "hyper-parameters" in each.getMessage()]


@pytest.mark.parametrize("scheduled", ["before the save", "after the load"])
@pytest.mark.parametrize(("way", "device"), [("dcp", "nvme"), ("arena", "nvme"), ("dcp", "none")])
def test_settings_that_only_the_checkpoint_or_only_the_training_has_do_no_harm(
    way: str, device: str, scheduled: str, nvme_path: Path
) -> None:
    """A schedule adds initial_lr to the groups."""

    def schedule(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 0.7**step)

    def made(path: Path, now: str) -> infinity.Engine:
        torch.manual_seed(0)
        config = training.config(path, CASE, durability="none")
        del config["scheduler"]
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part] |= {"device": device}
        lr_scheduler = schedule if scheduled == now else lambda _: None
        return infinity.initialize(model=training.Model(CASE), config=config, lr_scheduler=lr_scheduler)[0]

    with made(nvme_path / "one", "before the save") as engine:
        for _ in range(STEPS):
            step(engine)
        (group,) = engine.optimizer.param_groups
        group["of mine"] = {"some": [1, 2], "more": {"a": None}}
        engine.save_checkpoint(nvme_path / "checkpoints", format=way)
        if scheduled == "before the save":
            engine.lr_scheduler.step = lambda: None  # type: ignore[union-attr, method-assign]
            expected = [(step(engine), engine.get_lr()) for _ in range(3)]
        else:
            added, expected = schedule(engine.optimizer), []
            for _ in range(3):
                losses = step(engine)
                added.step()
                expected.append((losses, engine.get_lr()))
    with made(nvme_path / "two", "after the load") as engine:
        engine.load_checkpoint(nvme_path / "checkpoints")
        assert engine.optimizer.param_groups[0]["of mine"] == group["of mine"]
        assert [(step(engine), engine.get_lr()) for _ in range(3)] == expected


@WAYS
def test_the_settings_of_the_config_count_where_that_is_asked(way: str, nvme_path: Path) -> None:
    with make(nvme_path / "whole", CHANGED, durability="none") as engine:
        rates = []
        for _ in range(STEPS + 2):
            step(engine)
            rates.append(engine.get_lr())
    with gone_on(way, nvme_path / "changed", CHANGED, resume_hyperparameters="config") as engine:
        (group,) = engine.optimizer.param_groups
        assert group["weight_decay"] == CHANGED["weight_decay"]
        assert engine.get_lr() == rates[STEPS - 1]
        step(engine)
        assert engine.get_lr() == rates[STEPS]


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
COSINE = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}


def annealed(optimizer: Any) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=9)


def in_turn(*schedules: Any) -> Any:
    return lambda optimizer: SequentialLR(optimizer, [made(optimizer) for made in schedules], milestones=[1])


@pytest.mark.parametrize(
    ("original", "changed", "had", "has"),
    [
        (WARMUP, COSINE, "AbsoluteLR of WarmupRate", "LambdaLR of WarmupCosineRatio"),
        (annealed, WARMUP, "CosineAnnealingLR", "AbsoluteLR of WarmupRate"),
        (WARMUP, annealed, "AbsoluteLR of WarmupRate", "CosineAnnealingLR"),
        (
            in_turn(ConstantLR, annealed),
            in_turn(ConstantLR, ConstantLR),
            "SequentialLR of ConstantLR, CosineAnnealingLR",
            "SequentialLR of ConstantLR, ConstantLR",
        ),
    ],
)
@WAYS
def test_the_state_of_another_schedule_is_refused_or_left_out(
    way: str, original: Any, changed: Any, had: str, has: str, nvme_path: Path
) -> None:
    durability = "step" if way == "resume" else "none"
    before, after = {"schedule": original}, {"schedule": changed}
    with make(nvme_path / "whole", before, durability="none") as engine:
        losses = [step(engine) for _ in range(STEPS + 1)]
    with make(nvme_path / "rates", after, durability="none") as engine:
        rates = [(step(engine), engine.get_lr())[1] for _ in range(STEPS + 1)]
    words = rf'was {had}, and the config has {has},.*resume_hyperparameters "config"'
    path = nvme_path / "run"
    if way == "resume":
        gone_on(way, path, before, before).close()
        with pytest.raises(infinity.CheckpointError, match=words):
            make(path, after, resume=True, durability=durability)
        with make(path, before, resume=True, durability=durability) as engine:
            assert step(engine) == losses[STEPS]
    else:
        with pytest.raises(infinity.CheckpointError, match=words):
            gone_on(way, path, after, before)
        with make(path, after, durability=durability) as engine:
            assert step(engine) == losses[0]
            with pytest.raises(infinity.CheckpointError, match=words):
                engine.load_checkpoint(path / "checkpoints")
            step(engine)
            assert engine.get_lr() == rates[1]  # nothing was changed
            engine.load_checkpoint(path / "checkpoints", load_lr_scheduler_states=False)
            step(engine)
            rate = engine.get_lr()
            engine.save_checkpoint(path / "more", format=way)
            engine.load_checkpoint(path / "more")
            assert engine.get_lr() == rate
    with gone_on(way, nvme_path / "config", after, before, resume_hyperparameters="config") as engine:
        assert engine.get_lr() == rates[STEPS - 1]
        step(engine)
        assert engine.get_lr() == rates[STEPS]


def test_an_unchanged_config_is_not_spoken_of(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gone_on("resume", nvme_path, ORIGINAL) as engine:
        step(engine)
    assert "hyper-parameters" not in caplog.text
