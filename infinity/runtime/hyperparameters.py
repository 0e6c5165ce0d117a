"""Decides whose hyper-parameters a resumed training uses: the run's or the config's. Training thread only.

[Note: The settings of the run]
A commit or checkpoint holds parameter groups and schedule as they are at that time, with a learning rate that a schedule has
changed. So it also holds the settings that the config (or the caller) gave at first, to detect a config that has changed.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from infinity.checkpoint.commits import order_of_groups
from infinity.config.rules import Whose
from infinity.errors import CheckpointError
from infinity.runtime.lr_schedules import is_driven_by_metric
from infinity.swap import HostedOptimizer

log = logging.getLogger("infinity")

Settings = dict[str, Any]
"""Plain values: the kind of "optimizer", the settings of its "groups", the "schedule" with its kind."""

_PROGRESS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter"})
"""Counters of a schedule."""
_NO_SETTINGS = frozenset({"params", "initial_lr", "foreach"})
_OF_GROUPS = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""Lists in a schedule with an element per parameter group."""


def in_order_of(group_names: Sequence[Sequence[str]], training_state: dict[str, Any]) -> dict[str, Any]:
    """Return a stored state with its parameter groups in the optimizer's order, given by the names of their parameters.

    It is unchanged if its groups have other parameters. Raises CheckpointError for a list in a schedule that may or may not
    have an element per group.
    """
    order = order_of_groups(training_state, group_names)
    if order is None or order == sorted(order):
        return training_state
    ordered = training_state | {"group_names": [*group_names]}
    if "param_groups" in training_state:
        ordered["param_groups"] = [training_state["param_groups"][place] for place in order]
    ordered["lr_scheduler"] = _schedule_in_order(training_state["lr_scheduler"], order)
    if run := training_state.get("hyperparameters"):
        groups = [run["groups"][place] for place in order]
        ordered["hyperparameters"] = run | {"groups": groups, "schedule": _schedule_in_order(run["schedule"], order)}
    return ordered


def _schedule_in_order(schedule: Any, order: list[int]) -> Any:
    if not isinstance(schedule, dict):
        return schedule
    ordered = {}
    for name, value in schedule.items():
        if name == "_schedulers":
            value = [_schedule_in_order(part, order) for part in value]
        elif (
            isinstance(value, (list, tuple)) and len(value) == len(order) and any(other != value[0] for other in value)
        ):
            if name not in _OF_GROUPS:
                raise CheckpointError(
                    f"the order of the parameter groups has changed since this was saved, and {name} of the schedule may "
                    "follow it or not: make the groups in the order of the saved run"
                )
            value = [value[place] for place in order]
        ordered[name] = value
    return ordered


class Hyperparameters:
    """The settings of an optimizer and its schedule as constructed. `whose`: the settings that count after a resume."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any, whose: Whose) -> None:
        self._optimizer, self._schedule, self._whose = optimizer, schedule, whose
        self._groups = [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        self._schedule_state = copy.deepcopy(schedule.state_dict()) if schedule is not None else None
        self.of_run: Settings = {
            "optimizer": _kind_of(optimizer),
            "groups": _settings(optimizer.param_groups),
            "schedule": _schedule_settings(schedule),
        }
        """The settings that count: see [Note: The settings of the run]."""

    def can_load_schedule(self, training_state: Mapping[str, Any]) -> bool:
        """Return False if `training_state` has no schedule, or has one of another kind and the config's counts. Raises
        CheckpointError if it has one of another kind and the run's counts."""
        state, ours = training_state["lr_scheduler"], self._schedule_state
        if state is None or ours is None:
            return state is not None
        run, kind = training_state.get("hyperparameters"), _kind_of_schedule(self._schedule)
        theirs = run["schedule"]["kind"] if run is not None else "none"
        if theirs == "none":  # one that was set later, or an older or imported state: only its parts tell
            theirs = "another one" if {"lr_lambdas", "_schedulers"} & ours.keys() - state.keys() else kind
        if theirs != kind and self._whose == "run":
            raise CheckpointError(
                f"the run's learning-rate schedule was {theirs}, and the config has {kind}, which can't take over its state: "
                "use the run's schedule; infinity.resume_hyperparameters \"config\" lets the config's settings count, and "
                "load_checkpoint(..., load_lr_scheduler_states=False) leaves the schedule as it is"
            )
        return bool(theirs == kind)

    def settle(self, training_state: Mapping[str, Any], *, schedule: bool) -> None:
        """Log on rank 0 which settings of the config differ from those in `training_state`, to which the optimizer and, if
        `schedule`, the schedule have just been set. Set the config's again if they count."""
        stored = training_state.get("hyperparameters")  # missing in older states
        run: Settings = stored if stored is not None else {"groups": _settings(self._optimizer.param_groups)}
        changed = ", ".join(_differences(run, self.of_run))
        if changed and dist.get_rank() == 0:
            if self._whose == "run":
                log.warning(
                    "the run's hyper-parameters count, and the config has others: %s; infinity.resume_hyperparameters "
                    '"config" lets those of the config count',
                    changed,
                )
            else:
                log.info("the config's hyper-parameters count, and the run had others: %s", changed)
        if self._whose == "run":
            loaded = schedule and self._schedule is not None and training_state["lr_scheduler"] is not None
            self.of_run = self.of_run | run | ({} if loaded else {"schedule": self.of_run["schedule"]})
        else:
            self._use_config(training_state, schedule=schedule)

    def _use_config(self, training_state: Mapping[str, Any], *, schedule: bool) -> None:
        """Set the config's settings, at the step of the schedule that the run has reached."""
        for group, configured in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(configured))
        if self._schedule is None or self._schedule_state is None or not schedule:
            return
        reached = training_state["lr_scheduler"] if self.can_load_schedule(training_state) else {}
        if is_driven_by_metric(self._schedule):
            counted = {key: value for key, value in reached.items() if key in _PROGRESS}
            self._schedule.load_state_dict(self._schedule_state | counted)
            return
        self._schedule.load_state_dict(copy.deepcopy(self._schedule_state))
        steps = training_state["global_steps"] - training_state.get("skipped_steps", 0)
        with warnings.catch_warnings():  # torch misses the optimizer's steps
            warnings.simplefilter("ignore")
            for _ in range(reached.get("last_epoch", steps)):
                self._schedule.step()


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a name that is the same whether the state is paged or not."""
    if isinstance(optimizer, HostedOptimizer):
        return optimizer.kind
    return "Adam" if isinstance(optimizer, torch.optim.Adam) else type(optimizer).__name__


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of parameter groups, with the learning rate before a schedule changed it."""
    settings_of_groups = []
    for group in groups:
        settings = {name: _plain(value) for name, value in group.items() if name not in _NO_SETTINGS}
        settings_of_groups.append(settings | {"lr": _plain(group.get("initial_lr", group["lr"]))})
    return settings_of_groups


def _schedule_settings(schedule: Any) -> dict[str, Any]:
    if schedule is None:
        return {"kind": "none"}
    settings = {k: _plain(v) for k, v in schedule.state_dict().items() if not k.startswith("_") and k not in _PROGRESS}
    return settings | {"kind": _kind_of_schedule(schedule)}


def _kind_of_schedule(schedule: Any) -> str:
    """Return the type of a schedule or of a callable in one, and those of its parts that have a state of their own."""
    lambdas = {type(f).__name__ for f in getattr(schedule, "lr_lambdas", ()) if not isinstance(f, FunctionType)}
    parts = [*map(_kind_of_schedule, getattr(schedule, "_schedulers", ())), *sorted(lambdas)]
    return type(schedule).__name__ + (f" of {', '.join(parts)}" if parts else "")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(element) for name, element in value.items()}
    return value


def _differences(run: Settings, config: Settings) -> Iterator[str]:
    """Describe the settings that both have, with different values."""
    run = config | run
    schedule: dict[str, Any] = run["schedule"]
    if run["optimizer"] != config["optimizer"]:
        yield f"optimizer {config['optimizer']} instead of {run['optimizer']}"
    for number, (theirs, ours) in enumerate(zip(run["groups"], config["groups"], strict=False)):
        of_group = f" of parameter group {number}" if len(config["groups"]) > 1 else ""
        yield from (f"{name}{of_group} {change}" for name, change in _changes(theirs, ours))
    if schedule["kind"] != config["schedule"]["kind"]:
        yield f"schedule {config['schedule']['kind']} instead of {schedule['kind']}"
    else:
        yield from (f"schedule's {name} {change}" for name, change in _changes(schedule, config["schedule"]))


def _changes(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() & now.keys()):
            yield from _changes(before[key], now[key], key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        seen = dict(change for a, b in zip(before, now, strict=True) for change in _changes(a, b, name))
        yield from seen.items()
    elif before != now:
        yield name, f"{now!r} instead of {before!r}"
