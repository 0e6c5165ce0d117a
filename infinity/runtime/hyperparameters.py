"""Whose hyper-parameters count when a training resumes: the run's or the config's. Training thread only.

[Note: What the run was told]
A commit or checkpoint holds parameter groups and schedule as they are by then, with a learning rate that a schedule has moved.
So that a changed config is told from what training does, it also holds what the config (or the caller) had said at first.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from infinity.checkpoint.commits import order_of_groups
from infinity.config.rules import Whose
from infinity.errors import CheckpointError
from infinity.swap import HostedOptimizer

log = logging.getLogger("infinity")

Told = dict[str, Any]
"""Plain values: the kind of "optimizer", the settings of its "groups", the "schedule" with its kind."""

_PROGRESS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter"})
"""What a schedule counts."""
_NO_SETTINGS = frozenset({"params", "initial_lr", "foreach"})


_OF_GROUPS = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""What a schedule keeps of each parameter group, in their order."""


def in_order_of(group_names: Sequence[Sequence[str]], training_state: dict[str, Any]) -> dict[str, Any]:
    """A stored state with its parameter groups in the order of the optimizer's, which are given by their parameters' names.

    As it is where its groups hold other parameters. Raises CheckpointError for a schedule of which it is not known what it
    keeps of each group.
    """
    order = order_of_groups(training_state, group_names)
    if order is None or order == sorted(order):
        return training_state
    ordered = training_state | {"group_names": [*group_names]}
    if "param_groups" in training_state:
        ordered["param_groups"] = [training_state["param_groups"][place] for place in order]
    ordered["lr_scheduler"] = _schedule_in_order(training_state["lr_scheduler"], order)
    if told := training_state.get("hyperparameters"):
        groups = [told["groups"][place] for place in order]
        ordered["hyperparameters"] = told | {"groups": groups, "schedule": _schedule_in_order(told["schedule"], order)}
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
                    f"the parameter groups come in another order than when this was saved, and {name} of the schedule may "
                    "follow them or not: make them in the order in which they were"
                )
            value = [value[place] for place in order]
        ordered[name] = value
    return ordered


class Hyperparameters:
    """Of an optimizer and its schedule, as made anew; `whose` count where another training is gone on from."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any, whose: Whose) -> None:
        self._optimizer, self._schedule, self._whose = optimizer, schedule, whose
        self._groups = [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        self._schedule_state = copy.deepcopy(schedule.state_dict()) if schedule is not None else None
        self.told: Told = {
            "optimizer": _kind_of(optimizer),
            "groups": _settings(optimizer.param_groups),
            "schedule": _schedule_settings(schedule),
        }
        """What counts: see [Note: What the run was told]."""

    def settle(self, training_state: Mapping[str, Any], *, schedule: bool) -> None:
        """Optimizer and `schedule` (where that is wanted) have been set to what a run had, and stored in `training_state`:
        name what the config has otherwise, on rank 0, and set that again where the config's are to count."""
        stored = training_state.get("hyperparameters")  # older ones don't hold it
        run: Told = stored if stored is not None else {"groups": _settings(self._optimizer.param_groups)}
        changed = [*_differences(run, self.told)]
        if self._whose == "run":
            self._tell(
                logging.WARNING,
                changed,
                "the run's hyper-parameters count, and the config has others",
                'infinity.resume_hyperparameters "config" lets those of the config count',
            )
            self.told = self.told | run
        else:
            self._tell(logging.INFO, changed, "the config's hyper-parameters count, and the run had others", "")
            self._set_anew(training_state, schedule=schedule)

    def _set_anew(self, training_state: Mapping[str, Any], *, schedule: bool) -> None:
        """Those of the config, at the place of the schedule that the run has reached."""
        for group, configured in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(configured))
        if self._schedule is None or self._schedule_state is None or not schedule:
            return
        reached = training_state.get("lr_scheduler") or {}
        if isinstance(self._schedule, ReduceLROnPlateau):
            counted = {key: value for key, value in reached.items() if key in _PROGRESS}
            self._schedule.load_state_dict(self._schedule_state | counted)
            return
        self._schedule.load_state_dict(copy.deepcopy(self._schedule_state))
        with warnings.catch_warnings():  # torch misses the optimizer's steps
            warnings.simplefilter("ignore")
            for _ in range(
                reached.get("last_epoch", training_state["global_steps"] - training_state.get("skipped_steps", 0))
            ):
                self._schedule.step()

    def _tell(self, level: int, changed: list[str], whose: str, way_out: str) -> None:
        if changed and dist.get_rank() == 0:
            log.log(level, "%s", "; ".join(filter(None, [f"{whose}: {', '.join(changed)}", way_out])))


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The same name whether its state is paged or not."""
    if isinstance(optimizer, HostedOptimizer):
        return optimizer.kind
    return "Adam" if isinstance(optimizer, torch.optim.Adam) else type(optimizer).__name__


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of parameter groups, as they were before a schedule moved the learning rate."""
    settings_of_groups = []
    for group in groups:
        settings = {name: _plain(value) for name, value in group.items() if name not in _NO_SETTINGS}
        settings_of_groups.append(settings | {"lr": _plain(group.get("initial_lr", group["lr"]))})
    return settings_of_groups


def _schedule_settings(schedule: Any) -> dict[str, Any]:
    if schedule is None:
        return {"kind": "none"}
    settings = {k: _plain(v) for k, v in schedule.state_dict().items() if not k.startswith("_") and k not in _PROGRESS}
    return settings | {"kind": type(schedule).__name__}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(element) for name, element in value.items()}
    return value


def _differences(run: Told, config: Told) -> Iterator[str]:
    """In words, where both say something and not the same."""
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
