"""The learning-rate schedules of the config: frozen values that map optimizer steps to rates, for torch's LambdaLR.

[Note: which step has which learning rate]
A scheduler is stepped after the optimizer: after n calls of `scheduler.step()` it holds the rate of optimizer step n, counted
from 0. DeepSpeed's schedules number their own iterations: iteration i is in force in optimizer step i + 1, and step 0 runs at
the lowest rate of the schedule. The formulas below use iterations, i = n - 1, so that a run which moves here from DeepSpeed has
the same rate in every step.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import Optimizer

from infinity.config.optimizers import (
    LRRangeTestConfig,
    OneCycleConfig,
    SchedulerConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
)
from infinity.config.rules import WarmupType
from infinity.errors import ConfigError

T = TypeVar("T", int, float)


def make_lr_scheduler(config: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler that `config` describes, for all parameter groups of `optimizer`; its first rate is set at once.

    Call its `step()` after each optimizer step. `state_dict()` holds the step count and the schedule's numbers, and a resumed
    run continues with both, as with torch's own.

    Raises ConfigError if the length of a list of rates differs from the number of groups, and for a missing number that has no
    default.
    """
    groups = optimizer.param_groups
    if isinstance(config, OneCycleConfig):
        return OneCycle(optimizer, config)
    if isinstance(config, LRRangeTestConfig):
        lowest = _per_group(config.lr_range_test_min_lr, len(groups), "lr_range_test_min_lr")
        size, growth = config.lr_range_test_step_size, config.lr_range_test_step_rate
        return AbsoluteLR(optimizer, [RangeRate(low, size, growth, config.lr_range_test_staircase) for low in lowest])
    total = None
    if isinstance(config, (WarmupCosineLRConfig, WarmupDecayLRConfig)):
        total = _known(config.total_num_steps, "total_num_steps")
    warmup = max(2, config.warmup_num_steps)  # ln(1) is 0 and can't divide
    if isinstance(config, WarmupCosineLRConfig):
        assert total is not None
        ratios = config.warmup_min_ratio, config.cos_min_ratio
        return LambdaLR(optimizer, WarmupCosineRatio(warmup, config.warmup_type, total, *ratios))
    highest = config.warmup_max_lr if config.warmup_max_lr is not None else tuple(group["lr"] for group in groups)
    lows = _per_group(config.warmup_min_lr, len(groups), "warmup_min_lr")
    highs = _per_group(highest, len(groups), "warmup_max_lr")
    bounds = zip(lows, highs, strict=True)
    return AbsoluteLR(optimizer, [WarmupRate(warmup, config.warmup_type, low, high, total) for low, high in bounds])


def is_driven_by_metric(schedule: Any) -> bool:
    """Return True if `schedule.step` requires an argument, as that of ReduceLROnPlateau does: the caller steps it."""
    parameters = inspect.signature(schedule.step).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


class AbsoluteLR(LambdaLR):
    """LambdaLR whose callables return learning rates, not factors on the optimizer's own: the config's numbers stay unrounded.
    They are objects with plain attributes, which LambdaLR can save."""

    def get_lr(self) -> list[Any]:
        return [schedule(self.last_epoch) for schedule in self.lr_lambdas]


def warmup_share(iteration: int, num_steps: int, warmup_type: WarmupType) -> float:
    """Return the share of a warmup of `num_steps` w that is done at iteration i: for "log" ln(i + 1) / ln(w), for "linear"
    i / w, and 1 from i = w on."""
    if iteration >= num_steps:
        return 1.0
    if warmup_type == "log":
        return (1.0 / math.log(num_steps)) * math.log(iteration + 1)
    return iteration / num_steps


@dataclass(frozen=True)
class WarmupRate:
    """WarmupLR and WarmupDecayLR: `low` + (`high` - `low`) · g(i), a learning rate.

    With w = `warmup_num_steps`, g is the share of the warmup for i < w. After it g is 1; or, if T = `total_num_steps` is
    given, the share of iterations that are left, (T - i) / max(1, T - w), at least 0.
    """

    warmup_num_steps: int
    warmup_type: WarmupType
    low: float
    high: float
    total_num_steps: int | None = None

    def __call__(self, steps: int, /) -> float:
        iteration = steps - 1
        if iteration < 0:
            return self.low
        share = warmup_share(iteration, self.warmup_num_steps, self.warmup_type)
        if self.total_num_steps is not None and iteration >= self.warmup_num_steps:
            left = self.total_num_steps - iteration
            share = max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))
        return self.low + (self.high - self.low) * share


@dataclass(frozen=True)
class WarmupCosineRatio:
    """WarmupCosineLR: a factor on the optimizer's learning rate.

    With w = `warmup_num_steps`, it is `warmup_min_ratio` + (1 - `warmup_min_ratio`) · warmup(i) for i < w. Then it is half a
    cosine, with x = (i - w + 1) / (T - w): `cos_min_ratio` + (1 - `cos_min_ratio`) · (1 + cos(π·x)) / 2.
    After T = `total_num_steps` it stays at `cos_min_ratio`; in DeepSpeed the cosine rises again.
    """

    warmup_num_steps: int
    warmup_type: WarmupType
    total_num_steps: int
    warmup_min_ratio: float
    cos_min_ratio: float

    def __call__(self, steps: int, /) -> float:
        iteration, first = steps - 1, self.warmup_num_steps
        if iteration < 0:
            return 0.0
        if iteration < first:
            share = warmup_share(iteration, first, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * share
        done = min(1.0, (iteration - first + 1) / max(1, self.total_num_steps - first))
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * done)) / 2.0


@dataclass(frozen=True)
class RangeRate:
    """LRRangeTest after n steps: `low` · (1 + `growth` · n / `step_size`), with the quotient rounded down in a `staircase`."""

    low: float
    step_size: int
    growth: float
    staircase: bool

    def __call__(self, steps: int, /) -> float:
        sizes = steps // self.step_size if self.staircase else steps / self.step_size
        return self.low * (1.0 + self.growth * sizes)


@dataclass(frozen=True)
class CycleRate:
    """The learning rate of OneCycle after n steps: a triangle from `low` up to `high` and back, then a decay.

    Up in `up_steps`, down in `down_steps`; d units of `decay_steps` after the cycle, `low` / (1 + `decay_rate` · d).
    """

    low: float
    high: float
    up_steps: int
    down_steps: int
    decay_steps: int
    decay_rate: float

    def __call__(self, steps: int, /) -> float:
        after = steps - self.up_steps - self.down_steps
        if after <= 0:
            return self.low + (self.high - self.low) * self.height(steps)
        return self.low / (1.0 + self.decay_rate * self.decay_units(after))

    def height(self, steps: int) -> float:
        """Return the height of the triangle after `steps` of the cycle: 0 at both ends, 1 at the top."""
        if steps <= self.up_steps:
            return steps / self.up_steps
        return (self.up_steps + self.down_steps - steps) / self.down_steps

    def decay_units(self, after: int) -> float:
        return after / self.decay_steps if self.decay_steps else 0.0


class OneCycle(AbsoluteLR):
    """The 1cycle policy (Smith, arXiv:1803.09820): the learning rate rises and falls once, the first beta falls and rises.

    After n steps of the cycle the first beta is `high` - (`high` - `low`) · height(n); d units after the cycle it is
    `high` · (1 + `decay_mom_rate` · d), below 1. As in DeepSpeed, the second beta is 0.99 while momentum is cycled, and the
    first step runs at `cycle_min_mom`.
    """

    second_beta = 0.99
    beta_max = 1.0 - 1e-6  # Adam's bias correction divides by 1 - beta^step

    def __init__(self, optimizer: Optimizer, config: OneCycleConfig) -> None:
        down_steps = config.cycle_second_step_size
        cycle = CycleRate(
            low=_known(config.cycle_min_lr, "cycle_min_lr"),
            high=_known(config.cycle_max_lr, "cycle_max_lr"),
            up_steps=config.cycle_first_step_size,
            down_steps=config.cycle_first_step_size if down_steps is None else down_steps,
            decay_steps=config.decay_step_size,
            decay_rate=config.decay_lr_rate,
        )
        self.cycle_momentum = config.cycle_momentum and "betas" in optimizer.defaults
        self.min_mom, self.max_mom = config.cycle_min_mom, config.cycle_max_mom
        self.decay_mom_rate = config.decay_mom_rate
        super().__init__(optimizer, [cycle for _ in optimizer.param_groups])

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.cycle_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self._first_beta(self.last_epoch), self.second_beta)

    def get_mom(self) -> list[Any] | None:
        """Return the betas of each parameter group; None if momentum is not cycled."""
        beta = self._first_beta(self.last_epoch) if self.last_epoch else self.max_mom
        return [(beta, self.second_beta) for _ in self.optimizer.param_groups] if self.cycle_momentum else None

    def _first_beta(self, steps: int) -> float:
        cycle = cast(CycleRate, self.lr_lambdas[0])  # its only place, so that the saved state is numbers
        if steps == 0:
            return self.min_mom
        after = steps - cycle.up_steps - cycle.down_steps
        if after <= 0:
            return self.max_mom - (self.max_mom - self.min_mom) * cycle.height(steps)
        return min(self.beta_max, self.max_mom * (1.0 + self.decay_mom_rate * cycle.decay_units(after)))


def _known(value: T | None, name: str) -> T:
    if value is None:
        raise ConfigError(f"scheduler.params.{name}: missing; write it down or pass it to Config.resolve({name}=...)")
    return value


def _per_group(rate: float | tuple[float, ...], groups: int, name: str) -> tuple[float, ...]:
    if not isinstance(rate, tuple):
        return (rate,) * groups
    if len(rate) != groups:
        raise ConfigError(
            f"scheduler.params.{name}: got {len(rate)} rates, expected one or as many as the optimizer has parameter "
            f"groups ({groups})"
        )
    return rate
