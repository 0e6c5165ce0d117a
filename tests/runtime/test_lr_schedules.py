"""What the learning-rate schedules promise: DeepSpeed's rate in every step, and a state that goes through a file."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import load_config
from infinity.config.optimizers import SchedulerConfig
from infinity.errors import ConfigError
from infinity.runtime.lr_schedules import make_lr_scheduler


def config_of(kind: str, **params: Any) -> SchedulerConfig:
    config = load_config({"scheduler": {"type": kind, "params": params}}).scheduler
    assert config is not None
    return config


def make(kind: str, *, lr: float = 0.5, groups: int = 1, **params: Any) -> tuple[torch.optim.Optimizer, LRScheduler]:
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    return optimizer, make_lr_scheduler(config_of(kind, **params), optimizer)


def rates(kind: str, steps: int, **params: Any) -> list[float]:
    """The rate in force in each of the first `steps` optimizer steps."""
    optimizer, scheduler = make(kind, **params)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


KINDS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 7},
    "WarmupDecayLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 7, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 7, "total_num_steps": 20, "warmup_type": "linear"},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5, "cycle_second_step_size": 8}
    | {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01},
}


def test_warmup_linear_reaches_the_maximum_and_stays() -> None:
    seen = rates("WarmupLR", 8, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    assert seen == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_a_range_test_grows_from_step_to_step_or_in_stairs() -> None:
    settings = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    assert rates("LRRangeTest", 5, **settings) == pytest.approx([0.1, 0.25, 0.4, 0.55, 0.7])
    stairs = rates("LRRangeTest", 5, **settings, lr_range_test_staircase=True)
    assert stairs == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.7])


def test_warmup_log_is_the_default_shape() -> None:
    seen = rates("WarmupLR", 6, warmup_max_lr=1.0, warmup_num_steps=4)
    assert seen == pytest.approx([0.0, 0.0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1.0, 1.0])


def test_warmup_ends_at_exactly_the_written_rate() -> None:
    assert rates("WarmupLR", 9, **KINDS["WarmupLR"])[-1] == 0.1


@pytest.mark.parametrize("warmup_num_steps", [0, 1, 2])
def test_warmup_of_fewer_than_two_steps_counts_as_two(warmup_num_steps: int) -> None:
    assert rates("WarmupLR", 4, warmup_max_lr=1.0, warmup_num_steps=warmup_num_steps) == [0.0, 0.0, 1.0, 1.0]


def test_warmup_may_start_above_or_at_zero() -> None:
    assert rates("WarmupLR", 2, warmup_min_lr=1.0, warmup_max_lr=0.0, warmup_num_steps=2) == [1.0, 1.0]
    assert set(rates("WarmupLR", 5, warmup_max_lr=0.0)) == {0.0}


def test_decay_goes_linearly_to_the_minimum_and_stays() -> None:
    params = {"warmup_min_lr": 0.2, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "total_num_steps": 6}
    seen = rates("WarmupDecayLR", 10, warmup_type="linear", **params)
    assert seen == pytest.approx([0.2, 0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_scales_the_rate_of_the_optimizer_and_stays_at_its_minimum() -> None:
    params = {"warmup_min_ratio": 0.2, "warmup_num_steps": 2, "total_num_steps": 6, "cos_min_ratio": 0.1}
    seen = rates("WarmupCosineLR", 10, lr=2.0, warmup_type="linear", **params)

    def cosine(done: float) -> float:
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2

    shares = [0.0, 0.2, 0.6, cosine(0.25), cosine(0.5), cosine(0.75), 0.1, 0.1, 0.1, 0.1]
    assert seen == pytest.approx([2.0 * share for share in shares])


def test_cosine_without_steps_after_the_warmup_ends_at_its_minimum() -> None:
    seen = rates("WarmupCosineLR", 6, lr=1.0, warmup_num_steps=3, total_num_steps=3, cos_min_ratio=0.5)
    assert seen[-2:] == pytest.approx([0.5, 0.5])


def test_one_cycle_goes_up_and_down_and_decays() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    seen = rates("OneCycle", 9, decay_step_size=2, decay_lr_rate=1.0, **params)
    assert seen == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.1 / 2])
    assert rates("OneCycle", 9, **params)[-2:] == pytest.approx([0.1, 0.1])


def test_one_cycle_moves_momentum_against_the_rate() -> None:
    optimizer, scheduler = make(
        "OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.05
    )
    seen = []
    for _ in range(30):
        seen.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        scheduler.step()
    first, second = zip(*seen, strict=True)
    assert first[:6] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.945])
    assert set(second) == {0.99}
    assert max(first) < 1.0


def test_one_cycle_leaves_momentum_alone_when_told_or_when_there_is_none() -> None:
    optimizer, _ = make("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_momentum=False)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    make_lr_scheduler(config_of("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5), plain)
    assert "betas" not in plain.param_groups[0]


def test_warmup_without_a_maximum_ends_at_the_rate_of_the_optimizer() -> None:
    assert rates("WarmupLR", 4, lr=0.25, warmup_num_steps=2, warmup_type="linear")[-1] == 0.25


def test_groups_may_have_their_own_rates() -> None:
    optimizer, scheduler = make("WarmupLR", groups=2, warmup_max_lr=[1.0, 0.1], warmup_num_steps=2)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1] == scheduler.get_last_lr()
    with pytest.raises(ConfigError, match=r"warmup_max_lr: got 2 rates, expected one or as many .* groups \(1\)"):
        make("WarmupLR", warmup_max_lr=[1.0, 0.1])


def test_a_missing_number_is_named() -> None:
    config = load_config({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}).scheduler
    assert config is not None
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: missing"):
        make_lr_scheduler(config, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 1, 9, 25])
def test_state_goes_through_a_file_and_the_run_goes_on(kind: str, at: int) -> None:
    def run(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[Any]:
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        return seen

    first = make(kind, groups=2, **KINDS[kind])
    run(*first, at)
    file = io.BytesIO()
    torch.save({"optimizer": first[0].state_dict(), "scheduler": first[1].state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = make(kind, groups=2, **KINDS[kind])
    second[0].load_state_dict(saved["optimizer"])
    second[1].load_state_dict(saved["scheduler"])
    assert second[1].state_dict() == first[1].state_dict()
    assert second[1].get_last_lr() == first[1].get_last_lr()
    assert run(*second, 30) == run(*first, 30)


def test_a_resumed_run_goes_on_with_the_schedule_it_began_with() -> None:
    _, began = make("WarmupLR", warmup_max_lr=1.0, warmup_num_steps=2)
    optimizer, resumed = make("WarmupLR", warmup_max_lr=9.0, warmup_num_steps=5)
    resumed.load_state_dict(began.state_dict())
    for _ in range(3):
        optimizer.step()
        resumed.step()
    assert resumed.get_last_lr() == [1.0]


@given(
    low=st.floats(0, 1),
    high=st.floats(0, 1),
    warmup=st.integers(0, 20),
    total=st.integers(1, 40),
    shape=st.sampled_from(["log", "linear"]),
)
def test_rates_stay_between_their_bounds(low: float, high: float, warmup: int, total: int, shape: str) -> None:
    params = {"warmup_min_lr": low, "warmup_max_lr": high, "warmup_num_steps": warmup, "warmup_type": shape}
    for seen in (rates("WarmupLR", 45, **params), rates("WarmupDecayLR", 45, total_num_steps=total, **params)):
        assert all(min(low, high) - 1e-12 <= rate <= max(low, high) + 1e-12 for rate in seen)
    assert rates("WarmupDecayLR", 45, total_num_steps=total, **params)[-1] == low
