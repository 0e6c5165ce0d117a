"""Floor 1. The whole config: its keys, the contradictions among them, and how they are resolved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from infinity.config.optimizers import OneCycleConfig, SchedulerConfig, SGDConfig
from infinity.config.resolve import resolve
from infinity.config.top_level import TopLevel


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
        return resolve(self, world_size, hidden_size, caller)

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
        if block.device == "nvme" and block.nvme_path is None and f"{path}.nvme_path" not in auto:
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
    if config.infinity.checkpoint_format == "arena" and not config.nvme_paths:
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
    if not config.nvme_paths:
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
