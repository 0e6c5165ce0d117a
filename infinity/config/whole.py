"""The whole config: its keys, the contradictions among them, and how "auto" and the batch sizes are resolved."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from infinity.config import blocks
from infinity.config.blocks import Block
from infinity.config.optimizers import (
    OPTIMIZERS,
    SCHEDULERS,
    OneCycleConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
)
from infinity.config.rules import Amount, Flag, Interval, Positive, config_error, join, names_of, shown
from infinity.errors import ConfigError

_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Batch(NamedTuple):
    """A solved batch: `train` = `micro` · `accumulation` · ranks with batches of their own, all in samples but
    `accumulation` (passes)."""

    train: int
    micro: int
    accumulation: int


class Config(Block):
    """The whole config. A block that the source leaves out holds its defaults; `optimizer` and `scheduler` are None.

    `communication_data_type`, fp32 or bf16, is read as `infinity.reduce_dtype`; fp16, in which a sum could overflow, is
    ignored.
    """

    train_batch_size: Positive | None = None
    """Samples per optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per forward and backward pass on one rank."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-batches per optimizer step, each a forward and a backward."""
    gradient_clipping: Amount = 1.0
    """Largest norm of the whole gradient; 0 does not clip. In DeepSpeed: 0 unless set, before 0.19.8."""
    steps_per_print: Interval = 10
    """Optimizer steps between two progress lines; 0 (or Infinity) prints none. In DeepSpeed: Prints none unless set, by
    a logger of its own; here by the logger named infinity, at level INFO."""
    wall_clock_breakdown: Flag = False
    """Whether to print the milliseconds of forward, backward and step, of every micro-batch and of every step. Waits
    for the device around each. In DeepSpeed: Prints the parts of backward too."""
    dump_state: Flag = False
    """Whether to print the whole config, as it was understood, at the start. In DeepSpeed: Prints the state of its
    engine."""
    dataloader_drop_last: Flag = False
    """Whether the loader that `initialize(training_data=...)` returns leaves out a last batch that is not full."""
    optimizer: Annotated[OptimizerConfig, Field(discriminator="type")] | None = None
    """The optimizer; the caller brings one when absent. Without either, a model can be run, not trained."""
    scheduler: Annotated[SchedulerConfig, Field(discriminator="type")] | None = None
    """The learning-rate schedule; constant, or the caller's, when absent."""
    zero_optimization: blocks.ZeroConfig = blocks.ZeroConfig()
    """What is sharded over the ranks, and where it is stored."""
    aio: blocks.AioConfig = blocks.AioConfig()
    """How transfers are cut and queued."""
    infinity: blocks.InfinityConfig = blocks.InfinityConfig()
    """Settings that DeepSpeed does not have."""
    tensor_parallel: blocks.TensorParallelConfig = blocks.TensorParallelConfig()
    """Ranks that split each matrix."""
    expert_parallel: blocks.ExpertParallelConfig = blocks.ExpertParallelConfig()
    """Ranks that share the experts of a block."""
    bf16: blocks.Bf16Config = blocks.Bf16Config()
    """Training in bf16."""
    fp16: blocks.Fp16Config = blocks.Fp16Config()
    """Training in fp16."""
    activation_checkpointing: blocks.ActivationCheckpointingConfig = blocks.ActivationCheckpointingConfig()
    """What happens to saved activations."""
    flops_profiler: blocks.FlopsProfilerConfig = blocks.FlopsProfilerConfig()
    """A count of floating-point operations."""
    tensorboard: blocks.TensorboardConfig = blocks.TensorboardConfig()
    """Figures of every step for TensorBoard."""
    csv_monitor: blocks.CsvMonitorConfig = blocks.CsvMonitorConfig()
    """Figures of every step as text."""
    wandb: blocks.WandbConfig = blocks.WandbConfig()
    """Figures of every step at Weights & Biases."""
    comet: blocks.CometConfig = blocks.CometConfig()
    """Figures of steps at Comet."""

    ignored_keys = names_of(
        """
        aot autotuning checkpoint comms_logger compile
        data_parallel_size data_types datastates_ckpt disable_allgather disable_python_gc eigenvalue
        fp32_allreduce gradient_predivide_factor graph_harvesting hybrid_engine inference log_level memory_breakdown
        mesh_param nebula pipeline prescale_gradients seq_parallel_communication_data_type
        sparse_attention sparse_gradients timers use_data_before_expert_parallelism
        use_node_local_storage vocabulary_size weight_quantization zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer
        """
    )
    old_names: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}
    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {
        "gradient_allreduce_op": ("mean", "gradients are averaged over the ranks"),
        "managed_gradient_accumulation": (True, "the engine counts the backwards of a step"),
    }

    feature_keys = names_of(
        """
        amp compression_training curriculum_learning data_efficiency elasticity
        progressive_layer_drop quantize_training sequence_parallel_size torch_autocast
        """
    )

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
    def micro_batches_at_once(self) -> int:
        """Micro-batches of a step that take turns in the vertical schedule. Raises ConfigError as `batch`."""
        asked = self.infinity.micro_batches_at_once
        return self.batch.accumulation if asked == "auto" else asked

    @property
    def passes(self) -> int:
        """Forwards, and backwards, that a step may have. Raises ConfigError as `batch`."""
        at_once = self.micro_batches_at_once if self.infinity.schedule == "vertical" else 1
        return self.batch.accumulation // at_once

    @property
    def offloads(self) -> bool:
        """True if parameters or optimizer state are kept in host memory or on drives, from where infinity pages them."""
        zero = self.zero_optimization
        return {zero.offload_param.device, zero.offload_optimizer.device} != {"none"}

    @property
    def uses_nvme(self) -> bool:
        zero = self.zero_optimization
        return "nvme" in (zero.offload_param.device, zero.offload_optimizer.device)

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """Folders on the drives; empty if none is needed, as for frozen parameters in files of the user."""
        zero = self.zero_optimization
        for block in (zero.offload_param, zero.offload_optimizer):
            if block.device == "nvme" and block.nvme_path is not None:
                return (block.nvme_path,) if isinstance(block.nvme_path, str) else block.nvme_path
        return ()

    @property
    def io_rings(self) -> int:
        return max(self.infinity.rings, self.aio.intra_op_parallelism)

    def resolve(self, *, world_size: int, hidden_size: int | None = None, **caller: Any) -> Config:
        """A copy with the batch sizes solved and every "auto" filled.

        `caller` fills an "auto" by the name of its key (`lr=3e-4`), or of its block and key where several blocks have
        such a key (`offload_param_device="cpu"`; `bf16=True` for `bf16.enabled`); None counts as not given.
        `hidden_size` (elements) gives the bucket sizes that the caller does not. An "auto" that neither fills
        keeps its default.

        Raises ConfigError when the batch sizes contradict each other or the filled values break a rule, and when
        `caller` has a name that belongs to no key.
        """
        _check_resolve_arguments(world_size, hidden_size, caller)
        values = self.model_dump(exclude_unset=True)
        _fill_autos(values, self.auto, hidden_size, caller)
        config = validated(values, "config")
        if world_size % (tensor_ranks := config.tensor_parallel.ranks):
            problem = f"tensor_parallel.autotp_size: got {tensor_ranks}, expected a divisor of the {world_size} ranks"
            raise config_error("config", [problem])
        world_size //= tensor_ranks
        batch = solve_batch(*(getattr(config, name) for name in _BATCH_SIZES), world_size=world_size)
        config = config.model_copy(update=dict(zip(_BATCH_SIZES, batch, strict=True)))
        config._ignored = self.ignored
        if lines := list(_find_contradictions_of_step(config, batch.accumulation, world_size)):
            raise config_error("config", lines)
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
            got = f'{path}.device: got "cpu" with zero_optimization.stage 0, which shards nothing'
            yield f"{got}; set zero_optimization.stage to 1, 2 or 3"
    if config.fp16.enabled and config.bf16.enabled:
        yield "fp16.enabled: got true together with bf16.enabled true, set one of the two to false"
    sgd = config.optimizer
    if isinstance(sgd, SGDConfig) and sgd.nesterov and (not sgd.momentum or sgd.dampening):
        yield "optimizer.params.nesterov: got true, which needs momentum above 0 and dampening 0"
    if config.infinity.durability == "step":
        yield from _find_durability_contradictions(config)
    if config.infinity.checkpoint_format == "arena" and config.uses_nvme and not config.nvme_paths:
        yield 'infinity.checkpoint_format: got "arena" without a place on NVMe; set zero_optimization.offload_param.nvme_path'
    elif config.infinity.checkpoint_format == "arena" and not config.offloads:
        yield (
            'infinity.checkpoint_format: got "arena" while nothing is offloaded, of which it is a copy; set '
            "zero_optimization.offload_param.device or offload_optimizer.device to nvme or cpu, or leave it out"
        )
    if (ranks := config.expert_parallel.ranks) > 1:
        yield from _find_expert_contradictions(config, f"expert_parallel.autoep_size: got {ranks}")
    yield from _find_activation_contradictions(config)
    if config.infinity.micro_batches > 1 and config.infinity.schedule == "horizontal":
        yield 'infinity.micro_batches: got more than 1 with infinity.schedule "horizontal"; set that to "auto"'
    if config.infinity.keep_grad and config.infinity.gradient_bytes_max != "auto":
        yield (
            f"infinity.keep_grad: got true with infinity.gradient_bytes_max {config.infinity.gradient_bytes_max}, beyond which "
            'gradients wait on NVMe and are not readable; set that to "auto", or this to false'
        )
    if config.scheduler is not None:
        yield from _find_scheduler_contradictions(config.scheduler, auto)


def _find_contradictions_of_step(config: Config, accumulation: int, world_size: int) -> Iterator[str]:
    """Yield what is wrong with a config whose batch is solved."""
    path = "infinity.micro_batches"
    if (parts := config.infinity.micro_batches) > 1 and accumulation > 1:
        yield (
            f"{path}: got {parts} with gradient_accumulation_steps {accumulation}, but it splits the batch of a whole "
            "step; set one of the two to 1"
        )
    if parts > 1 and config.infinity.micro_batches_at_once != "auto":
        yield f"{path}_at_once: remove it, as all {parts} parts of infinity.micro_batches are at once"
    if accumulation % (at_once := config.micro_batches_at_once):
        yield f"{path}_at_once: got {at_once}, expected a divisor of the {accumulation} micro-batches of a step"
    path, zero = "zero_optimization", config.zero_optimization
    ranks = zero.mics_shard_size if zero.mics_shard_size > 0 else world_size
    if world_size % ranks:
        yield f"{path}.mics_shard_size: got {ranks}, expected a divisor of the {world_size} ranks"
    if ranks % (expert_ranks := config.expert_parallel.ranks):
        expected = f"a divisor of the {ranks} ranks that share a copy"
        yield f"expert_parallel.autoep_size: got {expert_ranks}, expected {expected}"
    if ranks % (second := zero.zero_hpz_partition_size):
        expected = f"a divisor of the {ranks} ranks that a copy is sharded over"
        yield f"{path}.zero_hpz_partition_size: got {second}, expected {expected}"


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


def _find_expert_contradictions(config: Config, got: str) -> Iterator[str]:
    """An arena's record has one number of ranks for all parameters, and replicas one mesh."""
    zero = config.zero_optimization
    for name, is_set in (
        ("tensor_parallel.autotp_size", config.tensor_parallel.ranks > 1),
        ('infinity.durability "step"', config.infinity.durability == "step"),
        ('infinity.checkpoint_format "arena"', config.infinity.checkpoint_format == "arena"),
        ("zero_optimization.mics_shard_size", zero.mics_shard_size > 0),
        ("zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size > 1),
    ):
        if is_set:
            yield f"{got} with {name}, which infinity can't combine; leave one of the two out"


def _find_activation_contradictions(config: Config) -> Iterator[str]:
    path = "infinity.offload_activations.device"
    if config.infinity.offload_activations.device != "nvme":
        return
    if config.uses_nvme and not config.nvme_paths:
        yield f'{path}: got "nvme" without a place on NVMe; set zero_optimization.offload_param.nvme_path'
    elif not config.uses_nvme:
        yield (
            f'{path}: got "nvme" while no parameters or optimizer state are on NVMe, so no drive is open for activations; set '
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


def validated(
    values: dict[str, Any],
    origin: str,
    *,
    auto: Sequence[str] = (),
    written: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
) -> Config:
    """The config with these values. Raises ConfigError with `problems` and all that is wrong with the values."""
    lines = list(problems)
    try:
        config = Config.model_validate(values, context={"auto": frozenset(auto)})
    except ValidationError as error:
        lines += _explain(error, written or {})
    if lines:
        raise config_error(origin, lines)
    return config


def _explain(error: ValidationError, written: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        kind, context = problem["type"], problem.get("ctx", {})
        if kind == "contradiction":
            lines += str(context["lines"]).split("\n")
            continue
        location = [str(part) for part in problem["loc"]]
        if location[0] in ("optimizer", "scheduler"):  # they keep all but their type in `params`
            location[1:2] = ["params"]  # pydantic has the type there
        path = ".".join(location)
        wanted = f"expected {context['wanted']}" if kind == "unwanted" else problem["msg"]
        lines.append(f"{written.get(path, path)}: got {shown(problem['input'])}, {wanted}")
    return lines


@functools.cache
def known_paths() -> tuple[str, ...]:
    fields: list[str] = []
    others = ["optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"]
    others += ["optimizer.params.adam_w_mode", "optimizer.legacy_fusion", "communication_data_type"]
    others += [f"zero_optimization.cpu_offload{suffix}" for suffix in ("", "_param", "_use_pin_memory")]
    models: list[tuple[str, type[Block]]] = [("", Config), *NESTED.items()]
    models += [("optimizer.params", model) for model in OPTIMIZERS.values()]
    models += [("scheduler.params", model) for model in SCHEDULERS.values()]
    for where, model in models:
        fields += [join(where, name) for name in model.model_fields if name != "type"]
        others += [join(where, name) for name in (*sorted(model.ignored_keys), *model.old_names, *model.fixed_keys)]
    others += sorted(Config.feature_keys)
    return tuple(dict.fromkeys((*fields, *others)))


def _find_nested(model: type[Block], where: str) -> Iterator[tuple[str, type[Block]]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Block):
            path = join(where, name)
            yield path, field.annotation
            yield from _find_nested(field.annotation, path)


NESTED: dict[str, type[Block]] = dict(_find_nested(Config, ""))
"""The blocks in which keys lie, by their dotted paths; all but optimizer and scheduler, whose keys depend on the type."""


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
    for name in _BATCH_SIZES:  # two sizes give the third, in any trainer
        if caller.get(name) is not None and sum(values.get(size) is not None for size in _BATCH_SIZES) < 2:
            values.setdefault(name, caller[name])


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = [part for part in path.split(".") if part != "params"]
    for block in parents:
        values = values.setdefault(block, {})
    values[leaf] = value


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, *, world_size: int) -> Batch:
    """The three batch sizes from the known ones. Two give the third. With `train` alone one pass is accumulated;
    otherwise missing sizes are 1. Raises ConfigError, showing the product, when they contradict each other."""
    derived = [name for name, value in zip(_BATCH_SIZES[1:], (micro, accumulation), strict=True) if value is None]
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
        problem = f"train_batch_size: got {train}, expected {' · '.join(_BATCH_SIZES[1:])} · world size = "
        problem += f"{micro} · {accumulation} · {world_size} = {product}"
        problem += f" ({' and '.join(derived)} derived, rounded down)" if derived else ""
        raise config_error("config", [problem])
    return Batch(train, micro, accumulation)
