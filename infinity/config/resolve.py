"""Floor 1. Filling every "auto" from the caller, the hidden size or another value, and solving the batch sizes."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from infinity.config.check import SomeConfig, validated
from infinity.config.known import NESTED, known_paths
from infinity.config.rules import config_error
from infinity.config.top_level import TopLevel, solve_batch
from infinity.errors import ConfigError


def resolve(source: SomeConfig, world_size: int, hidden_size: int | None, caller: Mapping[str, Any]) -> SomeConfig:
    """`Config.resolve`, where its arguments are described."""
    _check_resolve_arguments(world_size, hidden_size, caller)
    values = source.model_dump(exclude_unset=True)
    _fill_autos(values, source.auto, hidden_size, caller)
    values |= _solve_from_values(values, source.auto, world_size, caller)
    config = validated(type(source), values, "config")
    config._ignored = source.ignored
    zero = config.zero_optimization
    ranks = zero.mics_shard_size if zero.mics_shard_size > 0 else world_size
    if world_size % ranks:
        problem = f"mics_shard_size: got {ranks}, expected a divisor of the {world_size} ranks"
        raise config_error("config", [f"zero_optimization.{problem}"])
    if ranks % (second := zero.zero_hpz_partition_size):
        expected = f"a divisor of the {ranks} ranks that a copy is sharded over"
        raise config_error("config", [f"zero_optimization.zero_hpz_partition_size: got {second}, expected {expected}"])
    return config


def _check_resolve_arguments(world_size: int, hidden_size: int | None, caller: Mapping[str, Any]) -> None:
    for name, value in (("world_size", world_size), ("hidden_size", hidden_size)):
        if value is not None and value < 1:
            raise ConfigError(f"Config.resolve: {name}: got {value}, expected an integer of at least 1")
    fillable = {name for path in known_paths() for name in _caller_names(path)}
    for name in caller:
        if name not in fillable:
            near = difflib.get_close_matches(name, fillable, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ConfigError(f"Config.resolve: {name}: no key of the config has this name{hint}")


@functools.cache
def _caller_names(path: str) -> tuple[str, ...]:
    """The names under which `resolve` takes a value for `path`, the most specific first."""
    parts = [part for part in path.split(".") if part != "params"]
    if len(parts) < 2:
        return tuple(parts)
    block, leaf = parts[-2:]
    names = [f"{block}_{leaf}"]
    if leaf == "enabled":
        names.append(block)
    if sum(other.rpartition(".")[2] == leaf for other in known_paths()) == 1:
        names.append(leaf)
    return tuple(names)


def _fill_autos(
    values: dict[str, Any], auto: Sequence[str], hidden_size: int | None, caller: Mapping[str, Any]
) -> None:
    """Put into `values` what the caller, the hidden size or another value gives for each path of `auto`."""
    by_size: dict[str, int] = {}
    if hidden_size is not None:
        by_size = {
            "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
            "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
        }
    fillable = set(known_paths()) - {"optimizer", "scheduler", *NESTED}  # a block has no value of its own
    # Sorted: the optimizer's lr comes before the scheduler's warmup_max_lr, which may be derived from it.
    for path in sorted(fillable.intersection(auto)):
        value = next((caller[name] for name in _caller_names(path) if caller.get(name) is not None), None)
        if value is None:
            value = by_size.get(path)
        if value is None and path == "scheduler.params.warmup_max_lr":
            value = values.get("optimizer", {}).get("lr", caller.get("lr"))
        if value is not None:
            _put(values, path, value)


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *blocks, leaf = [part for part in path.split(".") if part != "params"]
    for block in blocks:
        values = values.setdefault(block, {})
    values[leaf] = value


def _solve_from_values(
    values: Mapping[str, Any], auto: Sequence[str], world_size: int, caller: Mapping[str, Any]
) -> dict[str, int]:
    """The solved batch sizes by name. The caller's count where fewer than two are known."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    checked = validated(TopLevel, {name: values[name] for name in names if name in values}, "config")
    sizes: list[int | None] = [getattr(checked, name) for name in names]
    for index, name in enumerate(names):
        known = sum(size is not None for size in sizes)
        if sizes[index] is None and name not in auto and known < 2 and caller.get(name) is not None:
            sizes[index] = getattr(validated(TopLevel, {name: caller[name]}, "config"), name)
    batch = solve_batch(sizes[0], sizes[1], sizes[2], world_size=world_size)
    return dict(zip(names, batch, strict=True))
