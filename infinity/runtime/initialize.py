"""Floor 5. `initialize`: the one place that constructs the whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from infinity.config import Config, OptimizerConfig, load_config
from infinity.errors import ConfigError
from infinity.runtime.engine import Engine
from infinity.runtime.live import LiveParameters, choose_wrap
from infinity.runtime.lr_schedules import make_lr_scheduler
from infinity.runtime.materialize import (
    InitFn,
    check_initializable,
    initialize_values,
    load_weights,
    meta_parameters,
    stored_names,
)
from infinity.runtime.process_group import ensure_process_group
from infinity.runtime.storage import choose_storage
from infinity.swap import PagedAdam, SwapManager
from infinity.swap.fsdp2 import is_sharded
from infinity.swap.names import parameter_names, parameters_by_name
from infinity.swap.together import together

log = logging.getLogger("infinity")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    init_fn: InitFn | None = None,
    auto: Mapping[str, Any] | None = None,
) -> tuple[Engine, torch.optim.Optimizer, Any, Any]:
    """Put a model under the training config: shard it, page it, make optimizer, schedule and data loader.

    Args:
        args: an object with `deepspeed_config`, read when `config` is None.
        model: an nn.Module, on the CPU or built on the meta device (`infinity.init_empty`). It is changed in place.
        optimizer: a fresh torch AdamW or Adam over the model's parameters, or None: the config's.
        model_parameters: parameters or parameter groups to train; all that require a gradient where None.
        training_data: a dataset; a DataLoader over it is returned.
        lr_scheduler: a function of the optimizer that makes one (needed where `initialize` makes the optimizer), a made
            one where no optimizer is replaced, or None: the config's. `engine.step` steps it, unless it is a
            ReduceLROnPlateau: that is stepped by you, with your metric.
        collate_fn: for that DataLoader.
        config: a dict, a path to JSON, or base64 of JSON (`config_params` is its older name).
        weights: safetensors (file or folder) from which the parameters are set, each rank reading only its rows.
        init_fn: called with each module that was built on the meta device, to give values to its parameters.
        auto: values for what the config leaves "auto", by the names that `Config.resolve` takes, such as `lr=3e-4`.
        distributed_port, mpu, dist_init_required: accepted for compatibility, without meaning here.

    Returns (engine, optimizer, data loader or None, lr scheduler or None).

    A collective. Raises ConfigError, StoreError, BudgetError, IoError or CheckpointError before the first step, on all ranks
    when on one; nothing is left behind.
    """
    if model is None:
        raise ConfigError("initialize needs model=")
    source = config if config is not None else config_params
    source = source if source is not None else getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError("initialize needs config=: a dict, a path to JSON, or base64 of JSON")
    with ExitStack() as undo:
        close_group = ensure_process_group()
        undo.callback(close_group)
        with together():
            settled = load_config(source).resolve(
                world_size=dist.get_world_size(), hidden_size=_hidden_size(model), **(auto or {})
            )
            _check_supported(settled, model, init_fn, weights)
            groups = _trained_names(model, model_parameters, optimizer)
        _report_ignored(settled)
        swap, live = _shard_and_page(model, settled, undo)
        with together():
            _give_values(model, swap, weights, init_fn)
            made = _make_optimizer(model, settled, optimizer, groups, swap)
            replaced = optimizer is not None and made is not optimizer
            schedule = _make_schedule(settled, lr_scheduler, made, replaced=replaced)
            loader = _make_loader(training_data, settled, collate_fn)
        engine = Engine(
            module=model,
            optimizer=made,
            lr_scheduler=schedule,
            training_dataloader=loader,
            config=settled,
            swap=swap,
            live=live,
            compute_dtype=_compute_dtype(settled),
            on_close=close_group,
        )
        undo.pop_all()
    return engine, made, loader, schedule


def _check_supported(
    config: Config, model: nn.Module, init_fn: InitFn | None, weights: str | os.PathLike[str] | None
) -> None:
    if config.fp16.enabled:
        raise ConfigError('fp16 needs loss scaling, which infinity does not have yet: use "bf16": {"enabled": true}')
    if config.zero_optimization.mics_shard_size > 0 or config.zero_optimization.zero_hpz_partition_size > 1:
        raise ConfigError("mics_shard_size and zero_hpz_partition_size (HSDP) are not supported yet: leave them out")
    if weights is not None and not Path(weights).exists():
        raise ConfigError(f"weights={os.fspath(weights)!r}: no such file or folder")
    if is_sharded(model):
        raise ConfigError(
            "the model is sharded already, by fully_shard or by an earlier initialize: build it anew and pass that; a model "
            "that you shard yourself is paged with SwapManager.page(model)"
        )
    if scalars := [names[0] for parameter, names in parameter_names(model).items() if parameter.dim() == 0]:
        raise ConfigError(f"parameter {scalars[0]} has no dimension that could be sharded: give it the shape (1,)")
    check_initializable(model, init_fn, stored_names(weights) if weights is not None else None)
    _mixed_residency(config)


def _mixed_residency(config: Config) -> tuple[bool, bool]:
    """(parameters on NVMe, optimizer state on NVMe). Raises ConfigError where they name different paths."""
    parameters, state = config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer
    both = parameters.device == state.device == "nvme"
    if both and _absolute(parameters.nvme_path) != _absolute(state.nvme_path):
        raise ConfigError(
            f"offload_param.nvme_path ({parameters.nvme_path}) and offload_optimizer.nvme_path ({state.nvme_path}) differ: "
            "infinity keeps both in one arena, so that one write stores them; name one path"
        )
    return parameters.device == "nvme", state.device == "nvme"


def _absolute(paths: str | tuple[str, ...] | None) -> list[Path]:
    return [Path(path).absolute() for path in ([paths] if isinstance(paths, str) else paths or ())]


def _report_ignored(config: Config) -> None:
    if dist.get_rank() != 0:
        return
    if config.ignored:
        log.info("config keys without meaning here: %s", ", ".join(config.ignored))
    if later := _set_but_not_acted_on(config):
        log.info("config keys that are not acted on yet: %s", ", ".join(later))


_NOT_YET = {
    "wall_clock_breakdown",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_module_granularity_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.reduce_bucket_size",
    "activation_checkpointing.cpu_checkpointing",
    "flops_profiler.enabled",
}
"""Keys that will mean something here, and don't yet."""


def _set_but_not_acted_on(config: Config) -> list[str]:
    found = []
    for path in sorted(_NOT_YET):
        *blocks, key = path.split(".")
        block: Any = config
        for name in blocks:
            block = getattr(block, name)
        if key in block.model_fields_set and getattr(block, key) not in (False, None):
            found.append(path)
    return found


def _trained_names(
    model: nn.Module, model_parameters: Iterable[Any] | None, optimizer: Any
) -> list[tuple[dict[str, Any], list[str]]]:
    """Parameter groups as (settings, names): sharding puts other objects in the parameters' place."""
    names = parameter_names(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        source: list[Any] = optimizer.param_groups
    elif model_parameters is not None:
        source = list(model_parameters)
    else:
        source = [parameter for parameter in names if parameter.requires_grad]
    if not source:
        raise ConfigError("there is nothing to train: no parameter requires a gradient")
    grouped = source if isinstance(source[0], dict) else [{"params": source}]
    found = []
    for group in grouped:
        members = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        if any(member not in names for member in members):
            raise ConfigError("model_parameters or the optimizer hold a parameter that the model doesn't have")
        settings = {key: value for key, value in group.items() if key != "params"}
        found.append((settings, [names[member][0] for member in members]))
    return found


def _shard_and_page(
    model: nn.Module, config: Config, undo: ExitStack
) -> tuple[SwapManager | None, LiveParameters | None]:
    """fully_shard each group and the root; hand what rests on NVMe to a swap manager; set what stays gathered.

    What can be known to be too small is refused before the model is sharded, which can't be undone.
    """
    zero = config.zero_optimization
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    with together():
        classes = None if config.infinity.wrap == "auto" else config.infinity.wrap
        wrap, outline, notes = choose_wrap(model, classes, zero)
    swap = None
    if any(_mixed_residency(config)):
        swap = _page(model, config, mesh, wrap, notes, undo)
    else:
        _shard(model, config, mesh, wrap)
    live = None
    if zero.stage >= 3:
        live = LiveParameters(outline, zero, micro_batches=config.batch.accumulation, ranks=mesh.size())
        notes += live.notes
    if dist.get_rank() == 0:
        for note in notes:
            log.info(note)
    return swap, live


def _page(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    wrap: Sequence[nn.Module],
    notes: list[str],
    undo: ExitStack,
) -> SwapManager:
    """A swap manager that holds the model, which it shards; what the machine refused is added to `notes`."""
    zero, own = config.zero_optimization, config.infinity
    nvme_parameters, nvme_state = _mixed_residency(config)
    dtype = _compute_dtype(config)
    placing: dict[str, Any] = {
        "sub_group_size": None if zero.sub_group_size == "auto" else zero.sub_group_size,
        "resident_numel_below": zero.stage3_param_persistence_threshold,
        "resident_numel_max": zero.offload_param.max_in_cpu,
        "cache_bytes": config.infinity.host_cache_bytes,
        "hold_parameters": not nvme_parameters,
        "hold_state": not nvme_state,
    }
    with together():
        storage = choose_storage(config)
        swap = SwapManager(
            config.nvme_paths, host_bytes_max=own.pinned_bytes_max, lock_memory=own.lock_memory, **storage.options
        )
        undo.callback(swap.close)
        swap.check_fits(model, wrap, ranks=mesh.size(), dtype=dtype, **placing)
    _shard(model, config, mesh, wrap)
    prefetch = zero.stage3_prefetch_bucket_size
    swap.page(model, look_ahead_bytes=None if prefetch == "auto" else prefetch * dtype.itemsize, **placing)
    notes += [*storage.notes, *swap.notes]
    return swap


def _shard(model: nn.Module, config: Config, mesh: DeviceMesh, wrap: Sequence[nn.Module]) -> None:
    """fully_shard each of `wrap` and the root, with the config's policies."""
    zero = config.zero_optimization
    _to_fp32_masters(model, mesh)
    dtype = _compute_dtype(config)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype is torch.float32 else dtype,
        reduce_dtype=torch.float32 if config.infinity.reduce_dtype == "fp32" else torch.bfloat16,
    )
    _, nvme_state = _mixed_residency(config)
    host = zero.offload_param.device == "cpu" and mesh.device_type != "cpu" and not nvme_state
    offload = CPUOffloadPolicy(pin_memory=zero.offload_param.pin_memory) if host else OffloadPolicy()
    for module in wrap:
        reshard = zero.stage >= 3
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    reshard_root = None if zero.stage >= 3 else False  # None: FSDP2 keeps the root group from forward to backward
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard_root)


def _to_fp32_masters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters in fp32, where FSDP2 wants them: on the mesh's device, or on the meta device still."""
    model.float()
    if mesh.device_type == "cuda" and not any(p.is_meta for p in model.parameters()):
        model.cuda()


def _give_values(
    model: nn.Module,
    swap: SwapManager | None,
    weights: str | os.PathLike[str] | None,
    init_fn: InitFn | None,
) -> None:
    """Fill what was built on the meta device; set everything from `weights` where they are given."""
    if swap is not None:
        paged = swap.paged
        blank = {shard.name for shard in paged.shards if not shard.filled}
    else:
        blank = meta_parameters(model)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if swap is None and blank:
        _allocate(model, device)
    if blank and weights is None:
        initialize_values(model, blank, device, init_fn)
    elif weights is not None:
        initialize_values(model, set(), device, init_fn, stored_names(weights))  # buffers
        load_weights(model, weights)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the shards of a model on the meta device, buffers aside."""
    buffers = {module: dict(module._buffers) for module in model.modules()}
    model.to_empty(device=device)
    for module, kept in buffers.items():
        module._buffers.update(kept)


def _make_optimizer(
    model: nn.Module,
    config: Config,
    given: Any,
    groups: list[tuple[dict[str, Any], list[str]]],
    swap: SwapManager | None,
) -> torch.optim.Optimizer:
    """The optimizer over the sharded parameters: paged where there is a swap manager."""
    parameters = parameters_by_name(model)
    regrouped = [{**settings, "params": [parameters[name] for name in names]} for settings, names in groups]
    if callable(given) and not isinstance(given, torch.optim.Optimizer):
        if swap is not None:
            raise ConfigError(
                "with NVMe, pass a torch.optim.AdamW or Adam instead of a function, or name it in the config"
            )
        made: torch.optim.Optimizer = given(regrouped)
        return made
    if isinstance(given, torch.optim.Optimizer):
        if type(given) not in (torch.optim.AdamW, torch.optim.Adam):
            raise ConfigError(f"optimizer {type(given).__name__} can't be sharded here: pass torch.optim.AdamW or Adam")
        if given.state:
            raise ConfigError("pass an optimizer that has not stepped yet; its state can't follow the parameters")
        defaults = dict(given.defaults)
        defaults["decoupled_weight_decay"] = isinstance(given, torch.optim.AdamW)
    else:
        chosen = config.optimizer or OptimizerConfig()
        defaults = {
            "lr": chosen.lr,
            "betas": chosen.betas,
            "eps": chosen.eps,
            "weight_decay": chosen.weight_decay,
            "fused": config.infinity.fused,
            "decoupled_weight_decay": chosen.type == "AdamW",
        }
    if swap is not None:
        wanted = ("lr", "betas", "eps", "weight_decay", "maximize", "fused", "decoupled_weight_decay")
        return PagedAdam(regrouped, swap=swap, **{key: defaults[key] for key in wanted if key in defaults})
    return torch.optim.Adam(regrouped, **{key: value for key, value in defaults.items() if value is not None})


def _make_schedule(config: Config, given: Any, optimizer: torch.optim.Optimizer, *, replaced: bool) -> Any:
    if given is None:
        return make_lr_scheduler(config.scheduler, optimizer) if config.scheduler is not None else None
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    if getattr(given, "optimizer", None) is not optimizer:
        raise ConfigError(
            "the lr_scheduler belongs to an optimizer that initialize replaced: pass a function of the optimizer instead, "
            "lr_scheduler=lambda optimizer: ..."
        )
    return given


def _make_loader(data: Any, config: Config, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    if data is None:
        return None
    sampler: Any = DistributedSampler(data, shuffle=False) if dist.get_world_size() > 1 else None
    return DataLoader(data, batch_size=config.batch.micro, sampler=sampler, collate_fn=collate_fn, drop_last=True)


def _compute_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def _hidden_size(model: nn.Module) -> int | None:
    """Of models that carry a config, for the "auto" values that are computed from it."""
    described = getattr(model, "config", None)
    for name in ("hidden_size", "n_embd", "d_model"):
        size = getattr(described, name, None)
        if isinstance(size, int):
            return size
    return None
