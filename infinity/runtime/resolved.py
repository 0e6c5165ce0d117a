"""Decides all consequences of a training config, once and purely."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from infinity.activations.saved_tensors import ActivationOptions
from infinity.config import Config, ZeroConfig
from infinity.device import why_slow
from infinity.errors import ConfigError
from infinity.fsdp2.live import LiveOptions
from infinity.optim.muon import MATRIX_MOMENTS
from infinity.runtime.meshes import Grid
from infinity.schedule.scheme import MOMENT_BYTES_OF, choose_update, state_bytes
from infinity.schedule.spilling import gradient_itemsize
from infinity.swap.options import MOMENT_DTYPES, PagingOptions

log = logging.getLogger("infinity")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The meaning of a config for one model on these ranks. Fields have the names of their config keys."""

    config: Config
    """The config without "auto" values."""
    compute_dtype: torch.dtype
    """dtype of gathered parameters and of compute."""
    mixed_precision: MixedPrecisionPolicy
    trains: bool
    """True if there is an optimizer; else the model is only run."""
    shard_ranks: int
    """Number of ranks over which each copy of the model is sharded: a divisor of all."""
    tensor_ranks: int
    """Number of ranks that split each parameter before, and get the same batch."""
    expert_ranks: int
    """Number of ranks that share the experts of a block, each of which is whole on one of them."""
    stages: int
    """Number of stages of a pipeline, each of which has a part of the model; 1 if every rank has all of it."""
    reshard_after_forward: bool | int
    """As for `fully_shard`; a number of ranks keeps a second sharding from forward to backward."""
    live: LiveOptions
    """Bounds of what is gathered at a time."""
    paging: PagingOptions | None
    """Options for paging to host memory or NVMe; None if nothing is offloaded."""
    run_name: str | None
    """Name of a durable run, whose steps are committed; None if the run is not durable."""
    activations: ActivationOptions
    notes: tuple[str, ...]
    """Settings that are applied differently from the config, one line each."""

    @property
    def copy_ranks(self) -> int:
        """Number of ranks that share a copy of the model."""
        return self.shard_ranks * self.tensor_ranks

    @cached_property
    def updates_in_backward(self) -> bool:
        """True if groups are updated in the backward, finally or speculatively."""
        return self.paging is not None and self.paging.update == "backward"


def resolve(
    config: Config,
    *,
    ranks: int,
    numel: int,
    moments: tuple[str, ...],
    matrices: frozenset[str] = frozenset(),
    tied: frozenset[str] = frozenset(),
    trains: bool = True,
    grid: Grid | None = None,
    stages: int = 1,
    device_type: str,
) -> Resolved:
    """Decide everything that follows from a config without "auto" values.

    Args:
        ranks: number of ranks of the training, or of one of its `stages`.
        numel: elements of the model.
        moments: names of the optimizer's state per element. matrices: names of the parameters that Muon updates.
        tied: names of the parameters of which other stages have copies.
        trains: True if the config or the caller names an optimizer.
        grid: of a mesh that the user passed.
        device_type: type of the compute device, "cpu" or "cuda".

    Raises ConfigError for settings that exclude each other.
    """
    zero, infinity = config.zero_optimization, config.infinity
    if grid is not None and zero.mics_shard_size not in (-1, grid.shard_ranks):
        raise ConfigError(
            f"zero_optimization.mics_shard_size: got {zero.mics_shard_size}, and mesh= shards over {grid.shard_ranks} ranks: "
            "leave it out"
        )
    tensor_ranks = config.tensor_parallel.ranks if grid is None else grid.tensor_ranks
    ranks //= tensor_ranks
    shard_ranks = ranks if zero.mics_shard_size == -1 else zero.mics_shard_size
    if grid is not None:
        shard_ranks = grid.shard_ranks
    second_ranks = zero.zero_hpz_partition_size
    has_second_sharding = zero.stage >= 3 and 1 < second_ranks < shard_ranks
    if has_second_sharding and config.offloads:
        raise ConfigError(
            "zero_hpz_partition_size keeps a second sharding of the parameters in the memory of the device, which is not "
            "paged: leave it out, or leave offload_param and offload_optimizer at none"
        )
    _check_one_arena(zero)
    if tensor_ranks > 1 and infinity.checkpoint_format == "arena":
        raise ConfigError(
            'infinity.checkpoint_format: got "arena", whose checkpoints hold whole parameters, which are split here: use '
            '"dcp"'
        )
    if tensor_ranks > 1 and has_second_sharding:
        raise ConfigError(
            f"zero_hpz_partition_size: got {second_ranks}, and FSDP2 can't do that to parameters that are split: leave it out"
        )
    if infinity.moments_dtype != "fp32" and not config.offloads:
        raise ConfigError(
            f"infinity.moments_dtype {infinity.moments_dtype} is for optimizer state that infinity steps: set "
            "offload_optimizer to nvme or cpu, or leave moments_dtype out"
        )
    compute_dtype = _compute_dtype(config)
    return Resolved(
        config=config,
        compute_dtype=compute_dtype,
        mixed_precision=MixedPrecisionPolicy(
            param_dtype=None if compute_dtype is torch.float32 else compute_dtype,
            reduce_dtype=torch.float32 if infinity.reduce_dtype == "fp32" else torch.bfloat16,
        ),
        trains=trains,
        shard_ranks=shard_ranks,
        tensor_ranks=tensor_ranks,
        expert_ranks=config.expert_parallel.ranks,
        stages=stages,
        reshard_after_forward=second_ranks if has_second_sharding else zero.stage >= 3,
        live=LiveOptions.of(zero, second_sharding=has_second_sharding),
        paging=_paging_options(config, ranks, shard_ranks * tensor_ranks, numel, moments, matrices, tied)
        if config.offloads
        else None,
        run_name=infinity.run_name if infinity.durability == "step" else None,
        activations=_activation_options(config),
        notes=tuple(_notes(config, shard_ranks, device_type, compute_dtype)),
    )


def compute_device() -> torch.device:
    """Return the device on which models compute."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def report_config(config: Config) -> None:
    """Log the keys of a config that have no effect, and with `dump_state` all of it."""
    if config.ignored:
        log.info("config keys without meaning here: %s", ", ".join(config.ignored))
    if "reduce_bucket_size" in config.zero_optimization.model_fields_set:  # docs/config.md says why
        log.info("config keys that are not acted on: zero_optimization.reduce_bucket_size")
    if "gradient_clipping" not in config.model_fields_set:
        log.info(
            "gradient_clipping is %g, as the config doesn't set it: DeepSpeed's default since 0.19.8; 0 does not clip",
            config.gradient_clipping,
        )
    if config.dump_state:
        log.info("config: %s", config.model_dump_json(indent=2))


def _check_one_arena(zero: ZeroConfig) -> None:
    parameters, state = zero.offload_param, zero.offload_optimizer

    def absolute(paths: str | tuple[str, ...] | None) -> list[Path]:
        return [Path(path).absolute() for path in ([paths] if isinstance(paths, str) else paths or ())]

    both = parameters.device == state.device == "nvme"
    if both and absolute(parameters.nvme_path) != absolute(state.nvme_path):
        raise ConfigError(
            f"offload_param.nvme_path ({parameters.nvme_path}) and offload_optimizer.nvme_path ({state.nvme_path}) differ: "
            "infinity keeps both in one arena, so that one write stores them; name one path"
        )


def _compute_dtype(config: Config) -> torch.dtype:
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def _paging_options(
    config: Config,
    ranks: int,
    copy_ranks: int,
    numel: int,
    moments: tuple[str, ...],
    matrices: frozenset[str],
    tied: frozenset[str],
) -> PagingOptions:
    zero, infinity = config.zero_optimization, config.infinity
    activations, offload = infinity.offload_activations, zero.offload_optimizer
    prefetch = zero.stage3_prefetch_bucket_size
    cached_share = 1.0 - offload.ratio if offload.device == "nvme" else 0.0  # of the optimizer's state
    element_bytes = state_bytes(len(moments), MOMENT_BYTES_OF[infinity.moments_dtype])
    gradient_bytes_max = None
    if infinity.gradient_bytes_max != "auto" and config.uses_nvme:  # without NVMe, host memory has them all
        gradient_bytes_max = infinity.gradient_bytes_max
    update, speculative = choose_update(
        infinity.update,
        clipping=config.gradient_clipping > 0,
        accumulation=config.passes,
        loss_scaling=config.fp16.enabled,
        keep_grad=infinity.keep_grad,
        collective=bool(matrices) and copy_ranks > 1,
    )
    return PagingOptions(
        sub_group_size=None if zero.sub_group_size == "auto" else zero.sub_group_size,
        param_persistence_threshold=zero.stage3_param_persistence_threshold,
        model_persistence_threshold=zero.stage3_model_persistence_threshold,
        max_in_cpu=zero.offload_param.max_in_cpu,
        host_cache_bytes=max(infinity.host_cache_bytes, int(cached_share * element_bytes * numel / copy_ranks)),
        prefetch_bucket_size=None if prefetch == "auto" else prefetch,
        update=update,
        speculative=speculative,
        master_weights=infinity.master_weights,
        hold_parameters=zero.offload_param.device != "nvme",
        hold_state=offload.device != "nvme",
        keep_on_device=zero.offload_param.device == "none" and not config.uses_nvme,
        gradient_dtype=_gradient_dtype(config, ranks),
        gradient_bytes_max=gradient_bytes_max,
        activation_buffer_bytes=activations.buffer_bytes if activations.device == "nvme" else 0,
        moments=moments,
        moments_dtype=MOMENT_DTYPES[infinity.moments_dtype],
        matrices=matrices,
        tied=tied,
        matrix_moments=MATRIX_MOMENTS if matrices else (),
    )


def _gradient_dtype(config: Config, ranks: int) -> torch.dtype:
    """Return the dtype of gradients that wait for their update: 16 bits if that is exact, unless `keep_grad` shows them."""
    dtype, reduced_in_16_bits = _compute_dtype(config), config.infinity.reduce_dtype == "bf16"
    itemsize = gradient_itemsize(
        ranks=ranks,
        micro_batches=config.batch.accumulation * config.infinity.micro_batches,
        reduced_in_16_bits=reduced_in_16_bits,
        computed_in_16_bits=dtype.itemsize == 2,
    )
    if config.infinity.keep_grad or itemsize == 4:
        return torch.float32
    return torch.bfloat16 if reduced_in_16_bits else dtype


def _activation_options(config: Config) -> ActivationOptions:
    zero, asked = config.zero_optimization, config.infinity.offload_activations
    checkpointed = asked.device == "none" and config.activation_checkpointing.cpu_checkpointing
    blocks = [block for block in (zero.offload_param, zero.offload_optimizer) if block.device != "none"]
    return ActivationOptions(
        device="cpu" if checkpointed else asked.device,
        bytes_min=asked.bytes_min,
        host_bytes_max=None if asked.host_bytes_max == "auto" else asked.host_bytes_max,
        pin_memory=all(block.pin_memory for block in blocks),
    )


def _notes(config: Config, shard_ranks: int, device_type: str, compute_dtype: torch.dtype) -> Iterator[str]:
    zero, infinity = config.zero_optimization, config.infinity
    if zero.stage in (0, 1) and shard_ranks > 1:
        yield (
            f"zero_optimization.stage {zero.stage} is carried out as stage 2: gradients and optimizer state are sharded too, "
            "which takes less memory and gives the same numbers"
        )
    if zero.offload_optimizer.ratio < 1 and zero.offload_optimizer.device != "nvme":
        yield "offload_optimizer.ratio has no effect here: only with device nvme does a part of the state stay in host memory"
    bounds = ["infinity.host_cache_bytes"] if infinity.host_cache_bytes > 0 else []
    bounds += ["infinity.gradient_bytes_max"] if infinity.gradient_bytes_max != "auto" else []
    if config.offloads and not config.uses_nvme and bounds:
        yield f"{' and '.join(bounds)} without effect here: host memory holds everything, as nothing is on NVMe"
    if device_type == "cpu" and (why := why_slow(compute_dtype)) is not None:
        yield f'{why}; with "enabled": false in its block the model computes in fp32'
