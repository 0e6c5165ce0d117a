"""The whole config: its keys, the contradictions among them, and how they are resolved."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from infinity.config.check import validated
from infinity.config.known import NESTED, known_paths
from infinity.config.optimizers import OneCycleConfig, SchedulerConfig, SGDConfig
from infinity.config.rules import config_error
from infinity.config.top_level import TopLevel, solve_batch
from infinity.errors import ConfigError


class Config(TopLevel):
    """The whole config. A block that the source leaves out holds its defaults; `optimizer` and `scheduler` are None.

    `communication_data_type`, fp32 or bf16, is read as `infinity.reduce_dtype`; fp16, in which a sum could overflow, is
    ignored.
    """

    def resolve(self, *, world_size: int, hidden_size: int | None = None, **caller: Any) -> Config:
        """A copy with the batch sizes solved and every "auto" filled.

        `caller` fills an "auto" by the name of its key (`lr=3e-4`), or of its block and key where several blocks have
        such a key (`offload_param_device="cpu"`; `bf16=True` for `bf16.enabled`); None counts as not given.
        `hidden_size` (elements) gives the bucket sizes that the caller does not. What nobody fills keeps its default.

        Raises ConfigError when the batch sizes contradict each other or the filled values break a rule, and when
        `caller` has a name that belongs to no key.
        """
        _check_resolve_arguments(world_size, hidden_size, caller)
        values = self.model_dump(exclude_unset=True)
        _fill_autos(values, self.auto, hidden_size, caller)
        values |= _solve_from_values(values, self.auto, world_size, caller)
        config = validated(Config, values, "config")
        config._ignored = self.ignored
        zero = config.zero_optimization
        ranks = zero.mics_shard_size if zero.mics_shard_size > 0 else world_size
        if world_size % ranks:
            problem = f"mics_shard_size: got {ranks}, expected a divisor of the {world_size} ranks"
            raise config_error("config", [f"zero_optimization.{problem}"])
        if ranks % (second := zero.zero_hpz_partition_size):
            expected = f"a divisor of the {ranks} ranks that a copy is sharded over"
            raise config_error(
                "config", [f"zero_optimization.zero_hpz_partition_size: got {second}, expected {expected}"]
            )
        return config

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Config:
        auto = (info.context or {}).get("auto", frozenset())
        if lines := list(_find_contradictions(self, auto)):
            raise PydanticCustomError("contradiction", "{lines}", {"lines": "\n".join(lines)})
        return self


def _find_contradictions(config: Config, auto: frozenset[str]) -> Iterator[str]:
    """Error lines for values that contradict each other. Values that are still "auto" are not judged."""
    zero = config.zero_optimization
    for name, block in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        path = f"zero_optimization.{name}"
        lacks_path = block.device == "nvme" and block.nvme_path is None and f"{path}.nvme_path" not in auto
        # Frozen parameters may rest in the user's own files; whether all do is known when the model is.
        if lacks_path and (name == "offload_optimizer" or zero.offload_optimizer.device == "nvme"):
            yield f'{path}.nvme_path: missing, expected a folder on the drive because {path}.device is "nvme"'
        if "zero_optimization.stage" in auto:
            continue
        if zero.stage < 3 and (block.device == "nvme" or (name == "offload_param" and block.device == "cpu")):
            yield (
                f'{path}.device: got "{block.device}" with zero_optimization.stage {zero.stage}, which keeps whole '
                "parameters on every rank; set zero_optimization.stage to 3"
            )
        elif zero.stage == 0 and block.device == "cpu":
            yield (
                f'{path}.device: got "cpu" with zero_optimization.stage 0, which shards nothing; '
                "set zero_optimization.stage to 1, 2 or 3"
            )
    if config.fp16.enabled and config.bf16.enabled:
        yield "fp16.enabled: got true together with bf16.enabled true, set one of the two to false"
    sgd = config.optimizer
    if isinstance(sgd, SGDConfig) and sgd.nesterov and (not sgd.momentum or sgd.dampening):
        yield "optimizer.params.nesterov: got true, which needs momentum above 0 and dampening 0"
    if config.infinity.durability == "step":
        yield from _find_durability_contradictions(config)
    if config.infinity.checkpoint_format == "arena" and config.uses_nvme and not config.nvme_paths:
        yield 'infinity.checkpoint_format: got "arena" without a place on NVMe; set zero_optimization.offload_param.nvme_path'
    elif config.infinity.checkpoint_format == "arena" and not config.uses_nvme:
        yield (
            'infinity.checkpoint_format: got "arena" while nothing rests on NVMe, where its bytes would come from; set '
            "zero_optimization.offload_param.device or offload_optimizer.device to nvme, or leave it out"
        )
    yield from _find_activation_contradictions(config)
    if config.infinity.keep_grad and config.infinity.gradient_bytes_max != "auto":
        yield (
            f"infinity.keep_grad: got true with infinity.gradient_bytes_max {config.infinity.gradient_bytes_max}, beyond which "
            'gradients wait on NVMe, where nobody can look at them; set that to "auto", or this to false'
        )
    if config.scheduler is not None:
        yield from _find_scheduler_contradictions(config.scheduler, auto)


def _find_durability_contradictions(config: Config) -> Iterator[str]:
    """Durability excludes state that stays in host memory: it has no place on the drive to be committed."""
    path = "infinity.durability"
    offload = config.zero_optimization.offload_optimizer
    if offload.device != "nvme":
        yield (
            f'{path}: got "step" while masters and optimizer state are not on NVMe; set '
            "zero_optimization.offload_optimizer.device to nvme, or save checkpoints instead"
        )
    if config.infinity.host_cache_bytes > 0:
        yield f'{path}: got "step" with infinity.host_cache_bytes, which keeps state in host memory; set it to 0'
    if offload.device == "nvme" and offload.ratio < 1:
        yield (
            f'{path}: got "step" with zero_optimization.offload_optimizer.ratio {offload.ratio:g}, which keeps the rest in '
            "host memory; set it to 1"
        )


def _find_activation_contradictions(config: Config) -> Iterator[str]:
    path = "infinity.offload_activations.device"
    if config.infinity.offload_activations.device != "nvme":
        return
    if config.uses_nvme and not config.nvme_paths:
        yield f'{path}: got "nvme" without a place on NVMe; set zero_optimization.offload_param.nvme_path'
    elif not config.uses_nvme:
        yield (
            f'{path}: got "nvme" while nothing rests on NVMe, so there are no drives to keep activations on; set '
            "zero_optimization.offload_param or offload_optimizer to nvme, or this to cpu"
        )
    if config.activation_checkpointing.cpu_checkpointing:
        yield f'{path}: got "nvme" with activation_checkpointing.cpu_checkpointing, which is cpu; set one of the two'
    if config.infinity.durability == "step":
        yield f'{path}: got "nvme" with infinity.durability "step", whose files hold nothing but what is committed; use cpu'


def _find_scheduler_contradictions(scheduler: SchedulerConfig, auto: frozenset[str]) -> Iterator[str]:
    for name in scheduler.required_keys:
        path = f"scheduler.params.{name}"
        if getattr(scheduler, name) is None and path not in auto:
            yield f'{path}: missing, expected a number from the config or, for "auto", from the caller'
    if isinstance(scheduler, OneCycleConfig):
        decays = scheduler.decay_lr_rate > 0 or (scheduler.cycle_momentum and scheduler.decay_mom_rate > 0)
        if decays and not scheduler.decay_step_size and "scheduler.params.decay_step_size" not in auto:
            yield "scheduler.params.decay_step_size: got 0 together with a decay rate, expected at least 1"


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
    if caller.get("gradient_clipping") is not None:  # a trainer that clips does so where the config doesn't say
        values.setdefault("gradient_clipping", caller["gradient_clipping"])


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
