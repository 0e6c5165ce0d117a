"""Floor 0. The training config: DeepSpeed's JSON, read into frozen and documented models.

Owns what each key means, which values it may take and how "auto" is filled. Runs once, at start, on the caller's
thread; touches nothing but the config file. `python -m infinity.config` prints the reference (docs/config.md).
"""

from __future__ import annotations

import base64
import binascii
import difflib
import functools
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from infinity.errors import ConfigError
from infinity.units import MIB, PAGE_BYTES, parse_bytes, parse_count

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "Batch",
    "Bf16Config",
    "Config",
    "FlopsProfilerConfig",
    "Fp16Config",
    "InfinityConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OneCycleConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "WarmupCosineLRConfig",
    "WarmupDecayLRConfig",
    "WarmupLRConfig",
    "ZeroConfig",
    "load_config",
    "render_reference",
    "solve_batch",
]


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """The config in `source`: a dict, the path of a JSON file, or base64 of the JSON (as some launchers pass it).

    Values written as "auto" are listed in `Config.auto` and hold their defaults until `Config.resolve` fills them; keys
    that mean nothing here are listed in `Config.ignored`.

    Raises ConfigError when the source can't be read (path, line and column) or holds anything that can't be right;
    every problem is on a line of its own, with the dotted path of its key.
    """
    if isinstance(source, Mapping):
        return _read_config(source, "config")
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a dict, a path to JSON, or base64 of JSON, got {type(source).__name__}")
    text, origin = _read_text(source)
    return _read_config(_parse_json(text, origin), origin)


# --- What a value may be ---


@dataclass(frozen=True)
class _Rule:
    """One kind of value: how it is read, when it is right, and the words for it in an error and in the reference."""

    wanted: str
    parse: Callable[[Any], Any]
    accept: Callable[[Any], bool] = lambda value: True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._validate, handler(source))

    def read(self, value: Any) -> Any:
        """`value` as the config holds it. Raises ValueError when it is not of this kind."""
        try:
            if self.accept(read := self.parse(value)):
                return read
        except (TypeError, ValueError, OverflowError):
            pass
        raise ValueError(self.wanted)

    def _validate(self, value: Any) -> Any:
        try:
            return self.read(value)
        except ValueError:
            raise PydanticCustomError("unwanted", "{wanted}", {"wanted": self.wanted}) from None


def _integer(minimum: int) -> _Rule:
    return _Rule(f"an integer of at least {minimum}", _parse_integer, lambda number: number >= minimum)


def _parse_integer(value: Any) -> int:
    """An integer; 1e9, "1e9" and "40M" are integers too."""
    return parse_count(value if isinstance(value, (bool, str, float)) else operator.index(value))


def _number(wanted: str, below: float = math.inf) -> _Rule:
    return _Rule(wanted, _parse_number, lambda number: 0.0 <= number < below)


def _parse_number(value: Any) -> float:
    return math.nan if isinstance(value, bool) else float(value)


def _parse_numbers(value: Any) -> tuple[float, ...]:
    return tuple(_parse_number(number) for number in value) if isinstance(value, (list, tuple)) else ()


def _choice(literal: Any) -> _Rule:
    names = {name.lower(): name for name in get_args(literal)}
    wanted = f"one of {', '.join(get_args(literal))}"
    return _Rule(wanted, lambda value: names.get(value.lower()) if isinstance(value, str) else None, bool)


def _or_auto(rule: _Rule) -> _Rule:
    return _Rule(f'{rule.wanted}, or "auto"', lambda value: "auto" if value == "auto" else rule.read(value))


def _parse_class_names(value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, (list, tuple)) else ()
    return names if all(isinstance(name, str) and name for name in names) else ()


def _parse_paths(value: Any) -> str | tuple[str, ...]:
    """One path as it is; several as a tuple, which is empty where two are the same."""
    if not isinstance(value, (list, tuple)):
        path = os.fspath(value)
        return path if isinstance(path, str) else ""
    paths = tuple(_parse_paths(path) for path in value)
    if not all(isinstance(path, str) for path in paths) or len({os.path.normpath(str(p)) for p in paths}) < len(paths):
        return ()
    return str(paths[0]) if len(paths) == 1 else tuple(str(path) for path in paths)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


Device = Literal["none", "cpu", "nvme"]
Backend = Literal["auto", "io_uring", "linux_aio", "threads"]
Mix = Literal["auto", "interleaved", "bursts"]
ReduceDtype = Literal["fp32", "bf16"]
MasterWeights = Literal["split", "full"]
Update = Literal["auto", "step", "forward", "backward"]
OptimizerType = Literal["AdamW", "Adam"]
WarmupType = Literal["log", "linear"]
SchedulerType = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"]

_FLAG = _Rule(
    "true or false",
    lambda value: {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value,
    lambda flag: isinstance(flag, bool),
)
_RATES = _Rule(
    "a number of at least 0, or a list of one per group",
    lambda value: _parse_numbers(value) if isinstance(value, (list, tuple)) else _parse_number(value),
    lambda rates: rates != () and all(0.0 <= r < math.inf for r in (rates if isinstance(rates, tuple) else (rates,))),
)
_BLOCK_BYTES = _Rule(
    f'a positive multiple of {PAGE_BYTES} bytes such as {MIB} or "1MiB"',
    parse_bytes,
    lambda nbytes: nbytes > 0 and nbytes % PAGE_BYTES == 0,
)
_CACHE_BYTES = _Rule('a number of bytes such as 0 or "16GiB"', parse_bytes, lambda nbytes: nbytes >= 0)
_BUDGET_BYTES = _Rule(f'at least {PAGE_BYTES} bytes such as "512MiB"', parse_bytes, lambda nbytes: nbytes >= PAGE_BYTES)
_STAGE = _Rule("one of 0, 1, 2, 3", _parse_integer, lambda stage: stage in (0, 1, 2, 3))
_SIZE_OR_ALL = _Rule(
    "-1, or an integer of at least 1",
    lambda value: -1 if value in (-1, "-1") else _parse_integer(value),
    lambda size: size == -1 or size >= 1,
)
_DEPTH = _Rule(
    "an integer of at least -1", lambda value: -1 if value in (-1, "-1") else _parse_integer(value), lambda d: d >= -1
)
_INTERVAL = _Rule(
    "an integer of at least 0",
    lambda value: 0 if value == math.inf else _parse_integer(value),  # some launchers write Infinity for "never"
    lambda interval: interval >= 0,
)
_BETAS = _Rule(
    "two numbers in [0, 1)", _parse_numbers, lambda betas: len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)
)
_CLASS_NAMES = _Rule("a list of module class names", _parse_class_names, bool)

_Flag = Annotated[bool, _FLAG]
_Count = Annotated[int, _integer(0)]
_Positive = Annotated[int, _integer(1)]
_Amount = Annotated[float, _number("a number of at least 0")]
_Beta = Annotated[float, _number("a number in [0, 1)", below=1.0)]
_Rates = Annotated[float | tuple[float, ...], _RATES]
_Text = Annotated[str, _Rule("a non-empty text", os.fspath, lambda text: isinstance(text, str) and bool(text))]
_Paths = Annotated[
    str | tuple[str, ...],
    _Rule("a path, or a list of different paths", _parse_paths, lambda p: bool(p) and (isinstance(p, str) or all(p))),
]
_AutoCount = Annotated[int | Literal["auto"], _or_auto(_integer(0))]
_AutoPositive = Annotated[int | Literal["auto"], _or_auto(_integer(1))]


# --- The blocks ---


class _Block(BaseModel):
    """One JSON object of the config.

    `ignored_keys` exist in DeepSpeed and mean nothing here; `old_names` are other spellings of a key; `fixed_keys` are
    accepted with one value only, for the reason that stands beside it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    old_names: ClassVar[Mapping[str, str]] = {}
    fixed_keys: ClassVar[Mapping[str, tuple[bool, str]]] = {}


class AioConfig(_Block):
    """How transfers between the drives and pinned memory are cut and queued."""

    block_size: Annotated[int, _BLOCK_BYTES] = Field(
        default=MIB,
        description="Bytes per submission to the kernel; a transfer is cut into such blocks. Where absent or auto: the "
        "drive's profile (`infinity-bench sweep`), or else what its block queue passes on as one request.",
    )
    queue_depth: _Positive = Field(
        default=32,
        description="Submissions in flight per ring. Where absent or auto: the drive's profile, or else 32 MiB of blocks. "
        "DeepSpeed's default is 8.",
    )
    intra_op_parallelism: _Positive = Field(
        default=1, description="I/O threads; another name for `infinity.rings`, and the larger of the two is used."
    )

    ignored_keys = _names("single_submit overlap_events use_gds")
    old_names = {"thread_count": "intra_op_parallelism", "num_threads": "intra_op_parallelism"}


class OffloadParamConfig(_Block):
    """Where parameters rest between uses (stage 3)."""

    device: Annotated[Device, _choice(Device)] = Field(
        default="none",
        description="Where the parameters of this rank rest: none is the device that computes, cpu host memory.",
    )
    nvme_path: _Paths | None = Field(
        default=None,
        description="Folder on the drive, or a list of folders on several, over which everything is striped by their "
        "bandwidth; required when `device` is nvme.",
    )
    max_in_cpu: _Count = Field(
        default=0,
        description="Elements of parameters kept in host memory from step to step when `device` is nvme. DeepSpeed's "
        "default is 1e9; here nothing is cached unless asked for.",
    )
    pin_memory: _Flag = Field(
        default=True,
        description="Page-locked host memory when `device` is cpu. With nvme all transfers are pinned anyway.",
    )

    ignored_keys = _names("buffer_count buffer_size")


class OffloadOptimizerConfig(_Block):
    """Where the optimizer's state rests between steps (stages 1 to 3; nvme needs stage 3)."""

    device: Annotated[Device, _choice(Device)] = Field(
        default="none", description="Where the optimizer state of this rank rests: none is the device that computes."
    )
    nvme_path: _Paths | None = Field(
        default=None,
        description="Folder on the drive, or a list of folders on several, over which everything is striped by their "
        "bandwidth; required when `device` is nvme.",
    )
    pin_memory: _Flag = Field(
        default=True,
        description="Page-locked host memory when `device` is cpu. With nvme all transfers are pinned anyway.",
    )

    ignored_keys = _names(
        """
        buffer_count buffer_size cpuadam_cores_perc fast_init pipeline pipeline_read pipeline_write ratio
        super_offload
        """
    )


class ZeroConfig(_Block):
    """What is sharded over the ranks, where it rests, and how much of it is live.

    The deprecated switches `cpu_offload` and `cpu_offload_param` are read as `offload_optimizer` and `offload_param`
    with device cpu, and `cpu_offload_use_pin_memory` as their `pin_memory`.
    """

    stage: Annotated[int, _STAGE] = Field(
        default=0, description="0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too."
    )
    offload_param: OffloadParamConfig = Field(
        default=OffloadParamConfig(), description="Where parameters rest between uses."
    )
    offload_optimizer: OffloadOptimizerConfig = Field(
        default=OffloadOptimizerConfig(), description="Where the optimizer's state rests between steps."
    )
    sub_group_size: _AutoPositive = Field(
        default="auto",
        description="At most this many elements of this rank's shards are stepped together, fewer where the pinned budget "
        "doesn't hold three such sub-groups; their state is one extent. auto derives "
        "it from the pinned budget. DeepSpeed's default is 1e9.",
    )
    stage3_prefetch_bucket_size: _AutoCount = Field(
        default="auto",
        description="How far reading and gathering run ahead of use. Read: so many elements of this rank's shards, the next "
        "group always; auto is as far as the pinned budget allows. Gathered: so many elements, in backward the next group "
        "unless it is 0; auto is that one alone. DeepSpeed's default is 5e7, its auto 0.9 · hidden size²: less than a group "
        "here.",
    )
    stage3_param_persistence_threshold: _Count = Field(
        default=100_000, description="Parameters of fewer elements stay gathered. auto is 10 · hidden size."
    )
    stage3_model_persistence_threshold: _Count = Field(
        default=sys.maxsize, description="Upper bound on the elements that stay gathered because they are small."
    )
    stage3_max_live_parameters: _AutoCount = Field(
        default="auto",
        description="Elements that may be gathered at one time on one rank: a bound that always holds. auto is what the root, "
        "a group, the one gathered ahead of it and those kept by stage3_max_reuse_distance come to. DeepSpeed's default is "
        "1e9.",
    )
    stage3_max_reuse_distance: _AutoCount = Field(
        default="auto",
        description="A group that is used again within this many elements stays gathered in between, as long as the bound on "
        "live parameters has room: fewer bytes to read, more memory. auto is 0: none does, beyond the root from forward to "
        "backward. DeepSpeed's default is 1e9.",
    )
    stage3_gather_16bit_weights_on_model_save: _Flag = Field(
        default=False, description="Whether saving the model gathers its 16-bit weights on rank 0."
    )
    stage3_module_granularity_threshold: _Count = Field(
        default=0, description="Modules with fewer elements per submodule than this are fetched as one; 0 turns it off."
    )
    reduce_bucket_size: _Positive = Field(
        default=500_000_000,
        description="Elements reduced at one time, as an upper bound: FSDP2 reduces one group at a time. "
        "auto is hidden size².",
    )
    mics_shard_size: Annotated[int, _SIZE_OR_ALL] = Field(
        default=-1,
        description="Ranks that one copy of the model is sharded over, copies being replicated; -1 is all ranks.",
    )
    zero_hpz_partition_size: _Positive = Field(
        default=1,
        description="Ranks that a second copy of the parameters is sharded over for the backward pass; 1 is none.",
    )

    ignored_keys = _names(
        """
        allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint enable_sanity_checks
        fast_init grad_hooks ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
        log_trace_cache_warnings memory_efficient_linear mics_hierarchical_params_gather overlap_comm
        override_module_apply pipeline_loading_checkpoint reduce_scatter round_robin_gradients
        stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
        use_multi_rank_bucket_allreduce zenflow zero_quantized_gradients zero_quantized_nontrainable_weights
        zero_quantized_weights zeropp_loco_param
        """
    )
    old_names = {
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    }


class Fp16Config(_Block):
    """Training in fp16 with loss scaling."""

    enabled: _Flag = Field(default=False, description="Compute in fp16. Excludes `bf16.enabled`.")
    auto_cast: _Flag = Field(default=False, description="Whether inputs are cast to fp16.")
    loss_scale: _Amount = Field(default=0.0, description="Factor on the loss; 0 adapts it while training.")
    initial_scale_power: _Count = Field(default=16, description="The adaptive factor starts at 2 to this power.")
    loss_scale_window: _Positive = Field(
        default=1000, description="Steps without overflow after which the factor doubles."
    )
    hysteresis: _Positive = Field(default=2, description="Overflows before the factor is halved.")
    consecutive_hysteresis: _Flag = Field(
        default=False, description="Whether a step without overflow refills `hysteresis`."
    )
    min_loss_scale: _Amount = Field(default=1.0, description="The adaptive factor does not fall below this.")

    ignored_keys = _names("fp16_master_weights_and_grads fp16_optimizer_states opt_level")


class Bf16Config(_Block):
    """Training in bf16 with fp32 masters."""

    enabled: _Flag = Field(default=False, description="Compute in bf16. Excludes `fp16.enabled`.")

    ignored_keys = _names(
        """
        bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update
        """
    )


class ActivationCheckpointingConfig(_Block):
    """What happens to activations that a checkpointed model saves. Which parts are checkpointed, the model decides."""

    cpu_checkpointing: _Flag = Field(
        default=False, description="Keep saved activations in host memory between forward and backward."
    )

    ignored_keys = _names(
        """
        contiguous_memory_optimization number_checkpoints partition_activations profile
        synchronize_checkpoint_boundary
        """
    )


class FlopsProfilerConfig(_Block):
    """A count of floating-point operations at one step."""

    enabled: _Flag = Field(default=False, description="Whether to count.")
    profile_step: _Positive = Field(default=1, description="The step that is counted.")
    module_depth: Annotated[int, _DEPTH] = Field(
        default=-1, description="Depth of nested modules to report; -1 is the innermost."
    )
    top_modules: _Positive = Field(default=1, description="Modules to report at each depth, the largest first.")
    detailed: _Flag = Field(default=True, description="Whether every module is reported.")
    output_file: _Text | None = Field(default=None, description="Where the report goes; standard output when absent.")
    recompute_fwd_factor: _Amount = Field(
        default=0.0, description="Share of the forward pass that checkpointing computes again."
    )


class OptimizerConfig(_Block):
    """The optimizer, `{"type": ..., "params": {...}}` in the source.

    Adam with `adam_w_mode` true, DeepSpeed's default, decouples weight decay and is therefore typed AdamW here; type
    AdamW does so whatever `adam_w_mode` says.
    """

    type: Annotated[OptimizerType, _choice(OptimizerType)] = Field(
        default="AdamW",
        description="AdamW decouples weight decay from the gradient (Loshchilov and Hutter, 2019); Adam does not.",
    )
    lr: _Amount = Field(default=1e-3, description="Learning rate, where no scheduler sets it.")
    betas: Annotated[tuple[float, float], _BETAS] = Field(
        default=(0.9, 0.999), description="Decay of the running means of gradient and squared gradient."
    )
    eps: _Amount = Field(default=1e-8, description="Added to the denominator.")
    weight_decay: _Amount = Field(
        default=0.01,
        description="Per unit of learning rate. The default is torch's for the type that is written: 0.01 for AdamW, 0 "
        "for Adam whatever its `adam_w_mode`. DeepSpeed's own kernels default to 0 for both: write it down to be sure.",
    )
    torch_adam: _Flag = Field(
        default=False, description="Chooses torch's implementation in DeepSpeed; here it is always torch's."
    )

    ignored_keys = _names("capturable cuda_aware foreach fused set_grad_none")
    fixed_keys = {
        "amsgrad": (False, "the running maximum of AMSGrad is not kept"),
        "bias_correction": (True, "the update always corrects for bias"),
        "fp32_optimizer_states": (True, "the state is always fp32"),
        "maximize": (False, "losses are minimised"),
    }

    @model_validator(mode="before")
    @classmethod
    def _default_weight_decay(cls, data: Any) -> Any:
        if isinstance(data, dict) and str(data.get("type")).lower() == "adam":
            return {"weight_decay": 0.0, **data}
        return data


class _SchedulerBlock(_Block):
    """A learning-rate schedule, `{"type": ..., "params": {...}}` in the source; steps are optimizer steps."""

    required_keys: ClassVar[tuple[str, ...]] = ()
    ignored_keys = _names("last_batch_iteration")


class WarmupLRConfig(_SchedulerBlock):
    """From `warmup_min_lr` up to `warmup_max_lr`, then constant."""

    type: Literal["WarmupLR"] = Field(default="WarmupLR", description="Names this schedule.")
    warmup_min_lr: _Rates = Field(default=0.0, description="Learning rate at the start.")
    warmup_max_lr: _Rates = Field(
        default=1e-3, description='Learning rate after the warmup. "auto" falls back to the optimizer\'s `lr`.'
    )
    warmup_num_steps: _Count = Field(
        default=1000, description="Optimizer steps of the warmup; fewer than 2 count as 2."
    )
    warmup_type: Annotated[WarmupType, _choice(WarmupType)] = Field(
        default="log", description="Shape of the warmup: logarithmic or linear in the step."
    )


class WarmupDecayLRConfig(_SchedulerBlock):
    """As WarmupLR, then linearly down to `warmup_min_lr` at `total_num_steps`."""

    type: Literal["WarmupDecayLR"] = Field(default="WarmupDecayLR", description="Names this schedule.")
    total_num_steps: _Positive | None = Field(
        default=None, description="Optimizer steps of the whole training; required."
    )
    warmup_min_lr: _Rates = Field(default=0.0, description="Learning rate at the start and at the end.")
    warmup_max_lr: _Rates = Field(
        default=1e-3, description='Learning rate after the warmup. "auto" falls back to the optimizer\'s `lr`.'
    )
    warmup_num_steps: _Count = Field(
        default=1000, description="Optimizer steps of the warmup; fewer than 2 count as 2."
    )
    warmup_type: Annotated[WarmupType, _choice(WarmupType)] = Field(
        default="log", description="Shape of the warmup: logarithmic or linear in the step."
    )

    required_keys = ("total_num_steps",)


class WarmupCosineLRConfig(_SchedulerBlock):
    """A share of the optimizer's `lr`: from `warmup_min_ratio` up to 1, then along half a cosine to `cos_min_ratio`."""

    type: Literal["WarmupCosineLR"] = Field(default="WarmupCosineLR", description="Names this schedule.")
    total_num_steps: _Positive | None = Field(
        default=None, description="Optimizer steps of the whole training; required."
    )
    warmup_min_ratio: _Amount = Field(
        default=0.0, description="Share of the optimizer's `lr` at the start of the warmup."
    )
    warmup_num_steps: _Count = Field(
        default=1000, description="Optimizer steps of the warmup; fewer than 2 count as 2."
    )
    cos_min_ratio: _Amount = Field(default=1e-4, description="Share of the optimizer's `lr` at the end.")
    warmup_type: Annotated[WarmupType, _choice(WarmupType)] = Field(
        default="log", description="Shape of the warmup: logarithmic or linear in the step."
    )

    required_keys = ("total_num_steps",)


class OneCycleConfig(_SchedulerBlock):
    """Up to `cycle_max_lr` and back (Smith, 2018), with momentum going the other way, then an optional decay."""

    type: Literal["OneCycle"] = Field(default="OneCycle", description="Names this schedule.")
    cycle_min_lr: _Amount | None = Field(default=None, description="Learning rate at both ends of the cycle; required.")
    cycle_max_lr: _Amount | None = Field(default=None, description="Learning rate at the top of the cycle; required.")
    cycle_first_step_size: _Positive = Field(default=2000, description="Steps up.")
    cycle_second_step_size: _Positive | None = Field(default=None, description="Steps down; as many as up when absent.")
    decay_step_size: _Count = Field(default=0, description="Steps per unit of decay after the cycle.")
    decay_lr_rate: _Amount = Field(
        default=0.0, description="After n units of decay the learning rate is `cycle_min_lr` / (1 + this · n)."
    )
    cycle_momentum: _Flag = Field(
        default=True,
        description="Whether the first beta is cycled too, against the learning rate. As in DeepSpeed, the second beta "
        "is 0.99 then.",
    )
    cycle_min_mom: _Beta = Field(default=0.8, description="First beta at the top of the cycle.")
    cycle_max_mom: _Beta = Field(default=0.9, description="First beta at the end of the cycle.")
    decay_mom_rate: _Amount = Field(
        default=0.0,
        description="After n units of decay the first beta is `cycle_max_mom` · (1 + this · n), and below 1.",
    )

    required_keys = ("cycle_min_lr", "cycle_max_lr")
    ignored_keys = _names("cycle_first_stair_count cycle_second_stair_count last_batch_iteration")


SchedulerConfig = WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig | OneCycleConfig

_SCHEDULERS: dict[str, type[_SchedulerBlock]] = {
    "WarmupLR": WarmupLRConfig,
    "WarmupDecayLR": WarmupDecayLRConfig,
    "WarmupCosineLR": WarmupCosineLRConfig,
    "OneCycle": OneCycleConfig,
}


class InfinityConfig(_Block):
    """What only infinity knows."""

    pinned_bytes_max: Annotated[int | Literal["auto"], _or_auto(_BUDGET_BYTES)] = Field(
        default="auto", description="Pinned host memory of this process, in bytes; every transfer goes through it."
    )
    host_cache_bytes: Annotated[int, _CACHE_BYTES] = Field(
        default=0,
        description="So much of the pinned memory, in bytes, keeps 16-bit copies and optimizer state from step to step, those "
        "that spare the most transfers; they take no space on the drive. Counted in `pinned_bytes_max`; no more is taken than "
        "there is to keep.",
    )
    wrap: Annotated[tuple[str, ...] | Literal["auto"], _or_auto(_CLASS_NAMES)] = Field(
        default="auto",
        description="Class names of the modules that become groups, one `fully_shard` call each. auto is the repeated blocks, "
        "and parts of them, or of what is left, where stage3_max_live_parameters is less than they need.",
    )
    backend: Annotated[Backend, _choice(Backend)] = Field(
        default="auto",
        description="How storage is driven; auto takes the drive's profile, or else the first of io_uring, linux_aio and "
        "threads that the system permits.",
    )
    mix: Annotated[Mix, _choice(Mix)] = Field(
        default="auto",
        description="How reads and writes that wait for one drive share it: interleaved, or in bursts of one, then the "
        "other; auto takes the drive's profile, or else interleaves.",
    )
    rings: _Positive = Field(
        default=1, description="Ring threads per drive; each has `aio.queue_depth` submissions in flight."
    )
    iopoll: _Flag = Field(
        default=False, description="Whether io_uring polls the drive for completions; its driver needs poll queues."
    )
    sqpoll: _Flag = Field(
        default=False, description="Whether a kernel thread polls for io_uring's submissions, which costs a core."
    )
    lock_memory: _Flag = Field(default=False, description="Whether to lock the pinned memory against swapping (mlock).")
    fused: _Flag = Field(default=True, description="Whether the step runs torch's fused AdamW kernel.")
    master_weights: Annotated[MasterWeights, _choice(MasterWeights)] = Field(
        default="split",
        description="How an fp32 master weight rests on NVMe beside its bf16 copy: split keeps the 16 bits that the copy "
        "lacks, full keeps all 32. The numbers are the same.",
    )
    update: Annotated[Update, _choice(Update)] = Field(
        default="auto",
        description="When the weights of a group are updated: in step, in forward just before the group is gathered, or in "
        "backward as soon as its gradient is there, which clipping and accumulation exclude. The numbers are the same.",
    )
    reduce_dtype: Annotated[ReduceDtype, _choice(ReduceDtype)] = Field(
        default="fp32", description="Element type in which gradients are reduced over the ranks."
    )


class Batch(NamedTuple):
    """A solved batch: `train` = `micro` · `accumulation` · world size, all in samples but `accumulation` (passes)."""

    train: int
    micro: int
    accumulation: int


class Config(_Block):
    """The whole config. A block that the source leaves out holds its defaults; `optimizer` and `scheduler` are None."""

    train_batch_size: _Positive | None = Field(default=None, description="Samples per optimizer step over all ranks.")
    train_micro_batch_size_per_gpu: _Positive | None = Field(
        default=None, description="Samples per forward and backward pass on one rank."
    )
    gradient_accumulation_steps: _Positive | None = Field(
        default=None, description="Forward and backward passes per optimizer step."
    )
    gradient_clipping: _Amount = Field(default=0.0, description="Largest norm of the whole gradient; 0 does not clip.")
    steps_per_print: Annotated[int, _INTERVAL] = Field(
        default=10, description="Optimizer steps between two progress lines; 0 (or Infinity) prints none."
    )
    wall_clock_breakdown: _Flag = Field(
        default=False, description="Whether to report the seconds spent in each part of a step."
    )
    optimizer: OptimizerConfig | None = Field(
        default=None, description="The optimizer; the caller brings one when absent."
    )
    scheduler: Annotated[SchedulerConfig, Field(discriminator="type")] | None = Field(
        default=None, description="The learning-rate schedule; constant, or the caller's, when absent."
    )
    zero_optimization: ZeroConfig = Field(
        default=ZeroConfig(), description="What is sharded over the ranks, and where it rests."
    )
    aio: AioConfig = Field(default=AioConfig(), description="How transfers are cut and queued.")
    fp16: Fp16Config = Field(default=Fp16Config(), description="Training in fp16.")
    bf16: Bf16Config = Field(default=Bf16Config(), description="Training in bf16.")
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default=ActivationCheckpointingConfig(), description="What happens to saved activations."
    )
    flops_profiler: FlopsProfilerConfig = Field(
        default=FlopsProfilerConfig(), description="A count of floating-point operations."
    )
    infinity: InfinityConfig = Field(default=InfinityConfig(), description="What only infinity knows.")

    ignored_keys = _names(
        """
        aot autotuning checkpoint comet comms_logger communication_data_type compile compression_training
        csv_monitor data_parallel_size data_types dataloader_drop_last disable_allgather dump_state eigenvalue
        fp32_allreduce gradient_predivide_factor graph_harvesting hybrid_engine inference memory_breakdown
        mesh_param nebula pipeline prescale_gradients seq_parallel_communication_data_type sequence_parallel_size
        sparse_attention sparse_gradients tensor_parallel tensorboard timers use_data_before_expert_parallelism
        use_node_local_storage vocabulary_size wandb weight_quantization zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer
        """
    )
    old_names = {"bfloat16": "bf16"}

    feature_keys: ClassVar[frozenset[str]] = _names(
        """
        amp curriculum_learning data_efficiency elasticity progressive_layer_drop quantize_training torch_autocast
        """
    )
    """Blocks that change what is computed once their `enabled` is true: refused then, ignored otherwise."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    _auto: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Dotted names of the keys in the source that exist in DeepSpeed and mean nothing here, in source order."""
        return self._ignored

    @property
    def auto(self) -> tuple[str, ...]:
        """Dotted names of the values that the source leaves to `resolve` by writing "auto"; empty once resolved."""
        return self._auto

    @property
    def batch(self) -> Batch:
        """The three batch sizes as plain integers. Raises ConfigError before `resolve` has solved them."""
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps
        if train is None or micro is None or accumulation is None:
            raise ConfigError("config: the batch sizes are not solved yet; call Config.resolve(world_size=...) first")
        return Batch(train, micro, accumulation)

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """Folders on the drives where parameters or optimizer state rest; empty where neither does."""
        zero = self.zero_optimization
        for block in (zero.offload_param, zero.offload_optimizer):
            if block.device == "nvme" and block.nvme_path is not None:
                return (block.nvme_path,) if isinstance(block.nvme_path, str) else block.nvme_path
        return ()

    @property
    def io_rings(self) -> int:
        """Ring threads to start: the larger of `infinity.rings` and `aio.intra_op_parallelism`."""
        return max(self.infinity.rings, self.aio.intra_op_parallelism)

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
        config = _validated(values, "config")
        config._ignored = self._ignored
        shard_size = config.zero_optimization.mics_shard_size
        if shard_size > 0 and world_size % shard_size:
            raise _config_error(
                "config",
                [f"zero_optimization.mics_shard_size: got {shard_size}, expected a divisor of the {world_size} ranks"],
            )
        return config

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Config:
        auto = (info.context or {}).get("auto", frozenset())
        if lines := list(_find_contradictions(self, auto)):
            raise PydanticCustomError("contradiction", "{lines}", {"lines": "\n".join(lines)})
        return self


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, *, world_size: int) -> Batch:
    """The three batch sizes from those that are given: `train` = `micro` · `accumulation` · `world_size`.

    Two give the third. With `train` alone one pass is accumulated; otherwise what is missing is 1.
    Raises ConfigError, showing the product, when they can't agree.
    """
    given = (train, micro, accumulation)
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = max(1, train // (accumulation * world_size))
    elif accumulation is None:
        accumulation = max(1, train // (micro * world_size))
    product = micro * accumulation * world_size
    if product != train:
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        derived = [name for name, value in zip(names, given[1:], strict=True) if value is None]
        raise _config_error(
            "config",
            [
                f"train_batch_size: got {train}, expected {' · '.join(names)} · world size = "
                f"{micro} · {accumulation} · {world_size} = {product}"
                + (f" ({' and '.join(derived)} derived, rounded down)" if derived else "")
            ],
        )
    return Batch(train, micro, accumulation)


# --- Reading the source ---


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys were given more than once."""

    repeated: tuple[str, ...] = ()


def _read_text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The JSON text of a file or of base64, and the words that name where it came from."""
    path = Path(source)
    origin = str(path)
    try:
        return path.read_bytes().decode("utf-8-sig"), origin
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # a long base64 string is not a valid file name
        if isinstance(source, str) and (text := _decode_base64(source)) is not None:
            return text, "base64 config"
        shown = origin if len(origin) <= 80 else f"{origin[:77]}..."
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{shown}: can't read the config: {reason}; expected a dict, the path of a JSON file, or base64 of JSON"
        ) from None


def _decode_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse_json(text: str, origin: str) -> Mapping[str, Any]:
    try:
        source = json.loads(text, object_pairs_hook=_make_object)
        repeated = list(_find_repeated(source))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: not a config: nested too deeply") from None
    if not isinstance(source, dict):
        raise ConfigError(f"{origin}: got {_shown(source)}, expected a JSON object")
    if repeated:
        raise _config_error(origin, [f"{path}: given more than once, keep one" for path in repeated])
    return source


def _make_object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        made.repeated = tuple(key for key in made if keys.count(key) > 1)
    return made


def _find_repeated(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, _Object):
        yield from (_join(where, key) for key in value.repeated)
        for key, inner in value.items():
            yield from _find_repeated(inner, _join(where, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_repeated(inner, f"{where}[{index}]")


def _read_config(source: Mapping[str, Any], origin: str) -> Config:
    reader = _Reader()
    values = reader.read_block(source, Config)
    config = _validated(values, origin, auto=reader.auto, written=reader.written, problems=reader.problems)
    config._ignored, config._auto = tuple(reader.ignored), tuple(reader.auto)
    return config


class _Reader:
    """Walks a source and sorts its keys: values for the models, autos, ignored keys, and problems."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self.auto: list[str] = []
        self.problems: list[str] = []
        self.written: dict[str, str] = {}  # canonical path -> the path as the user wrote it

    def read_block(self, source: Mapping[Any, Any], model: type[_Block], where: str = "") -> dict[str, Any]:
        """The values that `source` gives to the fields of `model`."""
        if model is ZeroConfig:
            source = self._replace_deprecated(source, where)
        values: dict[str, Any] = {}
        for written, value in source.items():
            if not isinstance(written, str):
                self.problems.append(f"{where or 'config'}: got the key {written!r}, expected a text")
                continue
            name = model.old_names.get(written, written)
            path = _join(where, name)
            if name in model.ignored_keys:
                self.ignored.append(path)
            elif name in model.fixed_keys:
                self._check_fixed(value, path, *model.fixed_keys[name])
            elif model is Config and name in Config.feature_keys:
                self._check_feature(value, path)
            elif name not in model.model_fields or (name == "type" and issubclass(model, _SchedulerBlock)):
                self.problems.append(_explain_unknown(written, where))
            elif value is None:
                continue  # null is the same as leaving the key out
            elif path in self.written:
                self.problems.append(f"{_join(where, written)}: given already as {self.written[path]}, keep one")
            else:
                self.written[path] = _join(where, written)
                self._take(values, name, value, path)
        return values

    def _take(self, values: dict[str, Any], name: str, value: Any, path: str) -> None:
        nested = _NESTED.get(path)
        if isinstance(value, str) and value == "auto":
            self.auto.append(f"{path}.enabled" if nested and "enabled" in nested.model_fields else path)
        elif nested is not None and not isinstance(value, Mapping):
            self.problems.append(f"{self.written[path]}: got {_shown(value)}, expected an object")
        elif nested is not None:
            values[name] = self.read_block(value, nested, path)
        elif path == "optimizer":
            self._take_optimizer(values, value)
        elif path == "scheduler":
            self._take_scheduler(values, value)
        else:
            values[name] = value

    def _take_optimizer(self, values: dict[str, Any], source: Any) -> None:
        read = self._read_typed(source, "optimizer", OptimizerType, "AdamW")
        if read is None:
            return
        kind, params = read
        w_mode = self._pop_flag(params, "adam_w_mode", "optimizer.params.adam_w_mode", default=True)
        found = self.read_block(params, OptimizerConfig, "optimizer.params")
        if kind == "Adam":
            found.setdefault("weight_decay", 0.0)  # the default of the type that is written, before it becomes AdamW
        values["optimizer"] = {**found, "type": "AdamW" if w_mode else kind}

    def _take_scheduler(self, values: dict[str, Any], source: Any) -> None:
        read = self._read_typed(source, "scheduler", SchedulerType, "WarmupLR")
        if read is None:
            return
        kind, params = read
        values["scheduler"] = {**self.read_block(params, _SCHEDULERS[kind], "scheduler.params"), "type": kind}

    def _read_typed(self, source: Any, where: str, types: Any, default: str) -> tuple[str, dict[str, Any]] | None:
        """The type and the params of a `{"type": ..., "params": {...}}` block; None when its type is of no use."""
        if not isinstance(source, Mapping):
            self.problems.append(f"{where}: got {_shown(source)}, expected an object")
            return None
        for key in source:
            if key == "legacy_fusion" and where == "optimizer":
                self.ignored.append(f"{where}.{key}")
            elif key not in ("type", "params"):
                self.problems.append(_explain_unknown(str(key), where))
        params = source.get("params")
        if params is not None and not isinstance(params, Mapping) and params != "auto":
            self.problems.append(f"{where}.params: got {_shown(params)}, expected an object")
        known = dict(params) if isinstance(params, Mapping) else {}
        kind, rule = source.get("type"), _choice(types)
        if kind == "auto":
            return default, known
        try:
            return str(rule.read(kind)), known
        except ValueError:
            got = "missing" if kind is None else f"got {_shown(kind)}"
            self.problems.append(f"{where}.type: {got}, expected {rule.wanted}")
            return None

    def _replace_deprecated(self, source: Mapping[str, Any], where: str) -> dict[str, Any]:
        """`source` with the switches that came before the offload blocks turned into those blocks."""
        current = dict(source)
        pin_memory, used = current.pop("cpu_offload_use_pin_memory", None), False
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            path = _join(where, old)
            if not self._pop_flag(current, old, path, default=False):
                continue
            used = True
            block = current.get(new)
            if isinstance(block, Mapping) and block.get("device", "cpu") != "cpu":
                self.problems.append(
                    f"{path}: got true together with {where}.{new}.device {_shown(block['device'])}, keep the latter"
                )
            elif block is None or isinstance(block, Mapping):
                pinned = {} if pin_memory is None else {"pin_memory": pin_memory}
                current[new] = {**pinned, **(block or {}), "device": "cpu"}
        if "cpu_offload_use_pin_memory" in source and not used:
            self.ignored.append(_join(where, "cpu_offload_use_pin_memory"))
        return current

    def _pop_flag(self, source: dict[str, Any], key: str, path: str, *, default: bool) -> bool:
        value = source.pop(key, None)
        if value is None or value == "auto":
            return default
        try:
            return bool(_FLAG.read(value))
        except ValueError:
            self.problems.append(f"{path}: got {_shown(value)}, expected true or false")
            return default

    def _check_fixed(self, value: Any, path: str, wanted: bool, reason: str) -> None:
        if value not in (None, "auto") and (
            not isinstance(value, (bool, str)) or str(value).lower() != str(wanted).lower()
        ):
            self.problems.append(f"{path}: got {_shown(value)}, expected {str(wanted).lower()}: {reason}")

    def _check_feature(self, value: Any, path: str) -> None:
        enabled = value.get("enabled") if isinstance(value, Mapping) else value
        if enabled is True or (isinstance(enabled, str) and enabled.lower() == "true"):
            self.problems.append(
                f"{path}.enabled: got true, expected false: it changes what is computed, and infinity does not do it"
            )
        else:
            self.ignored.append(path)


_OTHER_NAMES = {"max_grad_norm": "gradient_clipping", "learning_rate": "lr", "max_lr": "warmup_max_lr"}
"""What other tools call some of the keys, for the error that names the key."""


def _explain_unknown(written: str, where: str) -> str:
    """The error line for a key that exists nowhere, or not here, with the nearest name that does."""
    path = _join(where, written)
    known = _known_paths()
    if path in known:
        return f"{path}: unknown key for this type, remove it"
    elsewhere = [other for other in known if other.rpartition(".")[2] == _OTHER_NAMES.get(written, written)]
    if 1 <= len(elsewhere) <= 2:
        return f"{path}: unknown key here, it belongs at {' or '.join(elsewhere)}"
    here = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == where}
    anywhere = {other.rpartition(".")[2]: other for other in reversed(known)}
    for names in (here, anywhere):
        if near := difflib.get_close_matches(written, names, n=1, cutoff=0.6):
            return f"{path}: unknown key, did you mean {names[near[0]]}?"
    return f"{path}: unknown key, remove it"


@functools.cache
def _known_paths() -> tuple[str, ...]:
    """Dotted paths of every key that is accepted, those of the models first."""
    fields: list[str] = []
    others: list[str] = ["optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"]
    others += ["optimizer.params.adam_w_mode", "optimizer.legacy_fusion"]
    others += [
        f"zero_optimization.{name}" for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
    ]
    for where, model in _blocks():
        typed = where in ("optimizer.params", "scheduler.params")
        fields += [_join(where, name) for name in model.model_fields if not (typed and name == "type")]
        others += [_join(where, name) for name in (*sorted(model.ignored_keys), *model.old_names, *model.fixed_keys)]
    others += sorted(Config.feature_keys)
    return tuple(dict.fromkeys((*fields, *others)))


_NESTED: dict[str, type[_Block]] = {
    "zero_optimization": ZeroConfig,
    "zero_optimization.offload_param": OffloadParamConfig,
    "zero_optimization.offload_optimizer": OffloadOptimizerConfig,
    "aio": AioConfig,
    "infinity": InfinityConfig,
    "bf16": Bf16Config,
    "fp16": Fp16Config,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "flops_profiler": FlopsProfilerConfig,
}


def _blocks() -> Iterator[tuple[str, type[_Block]]]:
    """Every block with the dotted path of its keys in the source."""
    yield "", Config
    yield from _NESTED.items()
    yield "optimizer.params", OptimizerConfig
    for scheduler in _SCHEDULERS.values():
        yield "scheduler.params", scheduler


# --- Checking ---


def _validated(
    values: dict[str, Any],
    origin: str,
    *,
    auto: Sequence[str] = (),
    written: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
) -> Config:
    """The Config of `values`, or a ConfigError with `problems` and all that is wrong with them."""
    lines = list(problems)
    try:
        config = Config.model_validate(values, context={"auto": frozenset(auto)})
    except ValidationError as error:
        lines += _explain(error, written or {})
        raise _config_error(origin, lines) from None
    if lines:
        raise _config_error(origin, lines)
    return config


def _explain(error: ValidationError, written: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        kind, context = problem["type"], problem.get("ctx", {})
        if kind == "contradiction":
            lines += str(context["lines"]).split("\n")
            continue
        path = _source_path([str(part) for part in problem["loc"]])
        wanted = f"expected {context['wanted']}" if kind == "unwanted" else problem["msg"]
        lines.append(f"{written.get(path, path)}: got {_shown(problem['input'])}, {wanted}")
    return lines


def _source_path(location: list[str]) -> str:
    """The dotted path in the source of a model's field: optimizer and scheduler keep all but their type in `params`."""
    if location[0] == "scheduler" and len(location) > 1 and location[1] in _SCHEDULERS:
        location = ["scheduler", *location[2:]]
    if location[0] in ("optimizer", "scheduler") and len(location) > 1 and location[1] != "type":
        location = [location[0], "params", *location[1:]]
    return ".".join(location)


def _find_contradictions(config: Config, auto: frozenset[str]) -> Iterator[str]:
    """Error lines for values that are fine alone and can't work together; what is still "auto" is given the benefit."""
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
    if config.scheduler is not None:
        yield from _find_scheduler_contradictions(config.scheduler, auto)


def _find_scheduler_contradictions(scheduler: SchedulerConfig, auto: frozenset[str]) -> Iterator[str]:
    for name in scheduler.required_keys:
        path = f"scheduler.params.{name}"
        if getattr(scheduler, name) is None and path not in auto:
            yield f'{path}: missing, expected a number from the config or, for "auto", from the caller'
    if isinstance(scheduler, OneCycleConfig):
        decays = scheduler.decay_lr_rate > 0 or (scheduler.cycle_momentum and scheduler.decay_mom_rate > 0)
        if decays and not scheduler.decay_step_size and "scheduler.params.decay_step_size" not in auto:
            yield "scheduler.params.decay_step_size: got 0 together with a decay rate, expected at least 1"


def _config_error(origin: str, lines: Sequence[str]) -> ConfigError:
    counted = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError("\n".join((f"{origin}: {counted}", *(f"  {line}" for line in lines))))


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


# --- Filling "auto" ---


def _check_resolve_arguments(world_size: int, hidden_size: int | None, caller: Mapping[str, Any]) -> None:
    for name, value in (("world_size", world_size), ("hidden_size", hidden_size)):
        if value is not None and value < 1:
            raise ConfigError(f"Config.resolve: {name}: got {value}, expected an integer of at least 1")
    fillable = {name for path in _known_paths() for name in _caller_names(path)}
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
    if sum(other.rpartition(".")[2] == leaf for other in _known_paths()) == 1:
        names.append(leaf)
    return tuple(names)


def _from_caller(path: str, caller: Mapping[str, Any]) -> Any:
    return next((caller[name] for name in _caller_names(path) if caller.get(name) is not None), None)


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
    known = set(_known_paths()) - {"optimizer", "scheduler", *_NESTED}  # a block has no value of its own
    for path in sorted(
        known.intersection(auto)
    ):  # the optimizer's lr comes before the scheduler's warmup_max_lr, which may follow it
        value = _from_caller(path, caller)
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
    checked = _validated({name: values[name] for name in names if name in values}, "config")
    sizes: list[int | None] = [getattr(checked, name) for name in names]
    for index, name in enumerate(names):
        if sizes[index] is None and name not in auto and sum(size is not None for size in sizes) < 2:
            given = _validated({name: caller[name]}, "config") if caller.get(name) is not None else None
            sizes[index] = getattr(given, name, None)
    batch = solve_batch(sizes[0], sizes[1], sizes[2], world_size=world_size)
    return dict(zip(names, batch, strict=True))


# --- The reference ---

_REFERENCE_INTRO = """\
# The training config

<!-- Written by `python -m infinity.config > docs/config.md`; change infinity/config.py instead of this file. -->

infinity reads the JSON that DeepSpeed users own: `infinity.config.load_config` takes a dict, the path of a JSON file,
or base64 of the JSON. Every key is optional unless it says otherwise.

- Booleans may be the strings "true" and "false", integers may be written as `1e9` or `"40M"`, and byte counts as
  `"512MiB"`. `null` is the same as leaving the key out.
- `"auto"` may stand for any value. `Config.resolve(world_size=..., hidden_size=..., lr=..., ...)` fills it from the
  caller's arguments by name; what nobody fills takes the default below.
- `train_batch_size` = `train_micro_batch_size_per_gpu` · `gradient_accumulation_steps` · number of ranks. Two give the
  third; what can't be derived is 1.
- A key that exists in DeepSpeed and means nothing here is accepted and listed in `Config.ignored`. A key that exists
  nowhere is an error, with the nearest name suggested.
"""


def render_reference() -> str:
    """docs/config.md: every block with its keys, what they may be, their defaults and their meaning."""
    parts = [_REFERENCE_INTRO, *_render_block("Top level", "", Config)]
    for path, model in _NESTED.items():
        parts += _render_block(f"`{path}`", path, model)
    parts += _render_block("`optimizer`", "optimizer", OptimizerConfig)
    for name, scheduler in _SCHEDULERS.items():
        parts += _render_block(f"`scheduler` of type {name}", "scheduler", scheduler)
    return "\n".join(parts)


def _render_block(title: str, path: str, model: type[_Block]) -> list[str]:
    lines = [f"## {title}", "", " ".join((model.__doc__ or "").split()), ""]
    lines += ["| Key | Value | Default | Meaning |", "|---|---|---|---|"]
    for name in model.model_fields:
        lines.append(_render_field(name, path, model))
    lines.append("")
    if model.old_names:
        lines += ["Old names: " + ", ".join(f"`{old}` for `{new}`" for old, new in model.old_names.items()) + ".", ""]
    if model.fixed_keys:
        fixed = (f"`{key}` {str(value).lower()} ({why})" for key, (value, why) in model.fixed_keys.items())
        lines += ["Accepted with one value only: " + ", ".join(fixed) + ".", ""]
    if model is Config:
        features = ", ".join(f"`{key}`" for key in sorted(Config.feature_keys))
        lines += [f"Ignored unless their `enabled` is true, which is an error: {features}.", ""]
    if model.ignored_keys:
        lines += ["Accepted and ignored: " + ", ".join(f"`{key}`" for key in sorted(model.ignored_keys)) + ".", ""]
    return lines


def _render_field(name: str, path: str, model: type[_Block]) -> str:
    field = model.model_fields[name]
    key = f"params.{name}" if path in ("optimizer", "scheduler") and name != "type" else name
    default = field.get_default(call_default_factory=True)
    if isinstance(default, _Block) or name in ("optimizer", "scheduler"):
        wanted, shown = "an object", ""
    elif path == "scheduler" and name == "type":
        wanted, shown = f'"{default}"', ""
    else:
        wanted = _find_wanted(field.metadata, field.annotation)
        shown = "" if default is None else f"`{json.dumps(default)}`"
    return f"| `{key}` | {wanted} | {shown} | {field.description} |"


def _find_wanted(metadata: Sequence[Any], annotation: Any) -> str:
    """The words of the rule on a field, which sits inside the annotation where the field may be absent."""
    for candidate in (*metadata, *(part for inner in get_args(annotation) for part in get_args(inner))):
        if isinstance(candidate, _Rule):
            return candidate.wanted
    raise AssertionError(f"a field without a rule: {annotation}")


if __name__ == "__main__":
    sys.stdout.write(render_reference())
