"""Floor 11. `initialize`: the one place that constructs the whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from infinity.activations.choice import make_activations
from infinity.activations.saved_tensors import Activations
from infinity.checkpoint.commits import Commits, open_run, restore_arena, unpaged_state_of
from infinity.config import Config, ZeroConfig, load_config
from infinity.drive.choice import choose_storage
from infinity.errors import ConfigError
from infinity.fsdp2.first_values import InitFn, check_initializable, initialize_values, meta_parameters
from infinity.fsdp2.gathered import remember_sharded
from infinity.fsdp2.live import LiveParameters, choose_wrap
from infinity.fsdp2.materialize import load_weights, stored_names
from infinity.fsdp2.routes import Routes
from infinity.fsdp2.scalars import hold_as_rows
from infinity.fsdp2.sharding import is_sharded
from infinity.optim.adam import MOMENTS as ADAM_MOMENTS
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.ranks.peers import Peers
from infinity.ranks.process_group import ensure_process_group
from infinity.runtime.console import show_words
from infinity.runtime.engine import Engine
from infinity.runtime.optimizers import make_early, make_optimizer, make_schedule, stepper_for, trained_names
from infinity.runtime.pretrained import save_as_pretrained
from infinity.schedule.gradients import gradient_itemsize
from infinity.schedule.scheme import choose_update, state_bytes
from infinity.store import DurableRun
from infinity.swap import SwapManager
from infinity.swap.options import PagingOptions

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
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    init_fn: InitFn | None = None,
    auto: Mapping[str, Any] | None = None,
    resume: bool | Literal["must"] = False,
) -> tuple[Engine, torch.optim.Optimizer, Any, Any]:
    """Put a model under the training config: shard it, page it, make optimizer, schedule and data loader.

    Args:
        args: an object with `deepspeed_config`, read when `config` is None.
        model: an nn.Module, on the CPU or built on the meta device (`infinity.init_empty`). It is changed in place.
        optimizer: a fresh torch optimizer over the model's parameters, a function of parameter groups that makes one, or None:
            the config's. With NVMe it is Adam, AdamW, SGD or another one that updates each element by itself, and another
            object takes its place; else it is kept.
        model_parameters: parameters or parameter groups to train; all that require a gradient where None.
        training_data: a dataset; a DataLoader over it is returned, each rank's share in an order that is drawn with seed 0
            (`loader.sampler.set_epoch(n)` draws another).
        lr_scheduler: a function of the optimizer that makes one, a made one of the optimizer that is passed (it follows where
            another takes its place), or None: the config's. `engine.step` steps it, unless it is a ReduceLROnPlateau: that is
            stepped by you, with your metric.
        collate_fn: for that DataLoader.
        config: a dict, a path to JSON, or base64 of JSON (`config_params` is its older name).
        weights: safetensors (a file, an index.json of several, or a folder with either) from which the parameters are set,
            each rank reading only its rows.
        init_fn: called with each module that was built on the meta device, to give values to its parameters.
        auto: values for what the config leaves "auto", by the names that `Config.resolve` takes, such as `lr=3e-4`.
        resume: go on from the last committed step of a run with `infinity.durability` "step": parameters, optimizer state,
            schedule and random numbers are what they were (no first values are drawn, `weights` and `init_fn` only fill
            buffers), and `engine.global_steps` tells where. Starts anew, and says so, where nothing is committed; "must" raises
            CheckpointError there, for a run that has begun.
        distributed_port, mpu, dist_init_required, mesh_param: accepted for compatibility, without meaning here.

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
        show_words()
        with raise_on_all_ranks():
            settled = load_config(source).resolve(
                world_size=dist.get_world_size(), hidden_size=_hidden_size(model), **(auto or {})
            )
            _check_supported(settled, model, init_fn, weights)
            stepper = None
            if settled.nvme_paths:
                optimizer = early = make_early(model, optimizer, model_parameters)
            groups = trained_names(model, model_parameters, optimizer)
            if settled.nvme_paths:
                stepper = stepper_for(settled, early, groups)
        _report_ignored(settled)
        run = open_run(settled, resume=resume)
        if run is not None:
            undo.callback(run.give_up)
        resumed = run.resumed if run is not None else None
        moments = stepper.moments if stepper is not None else ADAM_MOMENTS
        swap, live, activations = _shard_and_page(model, settled, moments, run, undo)
        remember_sharded(model)
        gathering = _ranks_gathering(settled)
        peers = Peers(_groups_of(model), gathering)
        undo.callback(peers.close)
        routes = _watch_routes(model, gathering, peers)
        with raise_on_all_ranks():
            unpaged_state = unpaged_state_of(resumed) if resumed is not None else None
            if resumed is not None and swap is not None:
                restore_arena(resumed, swap)
            _give_values(model, swap, weights, init_fn, unpaged_state)
            made = make_optimizer(model, settled, optimizer, groups, swap, stepper)
            schedule = make_schedule(settled, lr_scheduler, made, optimizer)
            loader = _make_loader(training_data, settled, collate_fn)
        engine = Engine(
            module=model,
            optimizer=made,
            lr_scheduler=schedule,
            training_dataloader=loader,
            config=settled,
            swap=swap,
            live=live,
            activations=activations,
            routes=routes,
            commits=Commits(run, swap) if run is not None and swap is not None else None,
            peers=peers,
            compute_dtype=_compute_dtype(settled),
            on_close=close_group,
        )
        save_as_pretrained(engine)
        if unpaged_state is not None:
            with raise_on_all_ranks():
                engine.resume(unpaged_state)
        undo.pop_all()
    return engine, made, loader, schedule


def _check_supported(
    config: Config, model: nn.Module, init_fn: InitFn | None, weights: str | os.PathLike[str] | None
) -> None:
    if _secondary_ranks(config) is not None and config.nvme_paths:
        raise ConfigError(
            "zero_hpz_partition_size keeps a second sharding of the parameters in the memory of the device, which is not "
            "paged: leave it out, or leave parameters and optimizer state off NVMe"
        )
    if weights is not None and not Path(weights).exists():
        raise ConfigError(f"weights={os.fspath(weights)!r}: no such file or folder")
    if is_sharded(model):
        raise ConfigError(
            "the model is sharded already, by fully_shard or by an earlier initialize: build it anew and pass that; a model "
            "that you shard yourself is paged with SwapManager.page(model)"
        )
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
        log.info("config keys that are not acted on: %s", ", ".join(later))
    if config.dump_state:
        log.info("config: %s", config.model_dump_json(indent=2))


_NOT_YET = {
    "zero_optimization.reduce_bucket_size",
}
"""Keys with a meaning that is not carried out here; docs/config.md says why."""


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


def _shard_and_page(
    model: nn.Module, config: Config, moments: tuple[str, ...], run: DurableRun | None, undo: ExitStack
) -> tuple[SwapManager | None, LiveParameters | None, Activations | None]:
    """fully_shard each group and the root; hand what rests on NVMe to a swap manager; set what stays gathered.

    What can be known to be too small is refused before the model is sharded, which can't be undone.
    """
    zero = config.zero_optimization
    mesh = _make_mesh(zero)
    hold_as_rows(model)
    with raise_on_all_ranks():
        classes = None if config.infinity.wrap == "auto" else config.infinity.wrap
        wrap, outline, notes = choose_wrap(model, classes, zero)
    swap = None
    if any(_mixed_residency(config)):
        swap = _page(model, config, mesh, wrap, moments, run, notes, undo)
    else:
        _shard(model, config, mesh, wrap)
    live = None
    if zero.stage >= 3:
        live = LiveParameters(
            outline,
            zero,
            micro_batches=config.batch.accumulation,
            ranks=mesh.size(-1),
            second_sharding=_secondary_ranks(config) is not None,
        )
        notes += live.notes
        if swap is not None and swap.device_ahead is not None:
            ahead = swap.device_ahead
            ahead.bytes_max = min(ahead.bytes_max, live.spare_numel * _compute_dtype(config).itemsize)
    activations, said = make_activations(config, swap, _torch_device())
    notes += [*said, *_notes_on(config, mesh)]
    if dist.get_rank() == 0:
        for note in notes:
            log.info(note)
    return swap, live, activations


def _make_mesh(zero: ZeroConfig) -> DeviceMesh:
    """All ranks in one dimension; or copies of the model by the ranks that one copy is sharded over."""
    kind, ranks, shards = _device_type(), dist.get_world_size(), zero.mics_shard_size
    if shards in (-1, ranks):
        return init_device_mesh(kind, (ranks,))
    return init_device_mesh(kind, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


def _groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups of a sharded model's collectives, that of all ranks first."""
    assert dist.group.WORLD is not None
    groups = {dist.group.WORLD.group_name: dist.group.WORLD}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        for group in parameter.device_mesh.get_all_groups():
            groups.setdefault(group.group_name, group)
        break  # all are sharded over the same mesh
    return [*groups.values()]


def _ranks_gathering(config: Config) -> range:
    """The ranks over which this rank's copy of the model is sharded."""
    shards = config.zero_optimization.mics_shard_size
    ranks = dist.get_world_size() if shards == -1 else shards
    first = dist.get_rank() // ranks * ranks
    return range(first, first + ranks)


def _watch_routes(model: nn.Module, gathering: range, peers: Peers) -> Routes | None:
    """What holds the ranks to one way through the model; None where one rank gathers alone."""
    if len(gathering) == 1:
        return None
    return Routes(model, gathering, dist.distributed_c10d._get_default_store(), peers.hear)


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _torch_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _secondary_ranks(config: Config) -> int | None:
    """Ranks that parameters are sharded over between forward and backward; None where that is as before."""
    zero = config.zero_optimization
    ranks = zero.mics_shard_size if zero.mics_shard_size > 0 else dist.get_world_size()
    wanted = zero.zero_hpz_partition_size
    return wanted if zero.stage >= 3 and 1 < wanted < ranks else None


def _notes_on(config: Config, mesh: DeviceMesh) -> list[str]:
    """What the config asks for that comes out otherwise than its words."""
    zero = config.zero_optimization
    found = []
    if zero.stage in (0, 1) and mesh.size(-1) > 1:
        found.append(
            f"zero_optimization.stage {zero.stage} is carried out as stage 2: gradients and optimizer state are sharded too, "
            "which takes less memory and gives the same numbers"
        )
    if zero.offload_optimizer.ratio < 1 and zero.offload_optimizer.device != "nvme":
        found.append(
            "offload_optimizer.ratio has no effect here: only with device nvme does a part of the state stay in host memory"
        )
    on_host = "cpu" in (zero.offload_param.device, zero.offload_optimizer.device)
    if on_host and mesh.device_type == "cpu":
        found.append("offload to cpu has no effect here: the CPU is the device that computes")
    return found


def _page(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    wrap: Sequence[nn.Module],
    moments: tuple[str, ...],
    run: DurableRun | None,
    notes: list[str],
    undo: ExitStack,
) -> SwapManager:
    """A swap manager that holds the model, which it shards; what the machine refused is added to `notes`."""
    zero, own, activations = config.zero_optimization, config.infinity, config.infinity.offload_activations
    nvme_parameters, nvme_state = _mixed_residency(config)
    dtype = _compute_dtype(config)
    prefetch = zero.stage3_prefetch_bucket_size
    options = PagingOptions(
        sub_group_size=None if zero.sub_group_size == "auto" else zero.sub_group_size,
        param_persistence_threshold=zero.stage3_param_persistence_threshold,
        model_persistence_threshold=zero.stage3_model_persistence_threshold,
        max_in_cpu=zero.offload_param.max_in_cpu,
        host_cache_bytes=_cache_bytes(config, model, mesh, len(moments)),
        prefetch_bucket_size=None if prefetch == "auto" else prefetch,
        update=choose_update(
            own.update,
            clipping=config.gradient_clipping > 0,
            accumulation=config.batch.accumulation,
            loss_scaling=config.fp16.enabled,
            keep_grad=own.keep_grad,
        ),
        master_weights=own.master_weights,
        hold_parameters=not nvme_parameters,
        hold_state=not nvme_state,
        gradient_dtype=_gradient_dtype(config),
        gradient_bytes_max=None if own.gradient_bytes_max == "auto" else own.gradient_bytes_max,
        activation_buffer_bytes=activations.buffer_bytes if activations.device == "nvme" else 0,
        moments=moments,
    )
    with raise_on_all_ranks():
        storage = choose_storage(config)
        swap = SwapManager(
            config.nvme_paths,
            pinned_bytes_max=own.pinned_bytes_max,
            io=storage.io,
            bandwidths=storage.bandwidths,
            lock_memory=own.lock_memory,
            pin_memory=_pins(zero),
            direct=config.aio.use_gds,
            checksums=own.checksums,
            run=run,
        )
        undo.callback(swap.close)
        swap.check_fits(model, wrap, ranks=mesh.size(-1), dtype=dtype, options=options)
    _shard(model, config, mesh, wrap)
    swap.page(model, options)
    notes += [*storage.notes, *swap.notes]
    return swap


def _pins(zero: ZeroConfig) -> bool:
    """Whether nothing that rests on NVMe was asked not to pass through memory that is pinned for the GPU."""
    return all(block.pin_memory for block in (zero.offload_param, zero.offload_optimizer) if block.device == "nvme")


def _gradient_dtype(config: Config) -> torch.dtype:
    """How gradients wait for their update: in 16 bits where these hold all of them, unless they are to be seen."""
    if config.infinity.keep_grad:
        return torch.float32
    dtype, reduced_in_16_bits = _compute_dtype(config), config.infinity.reduce_dtype == "bf16"
    itemsize = gradient_itemsize(
        ranks=dist.get_world_size(),
        micro_batches=config.batch.accumulation,
        reduced_in_16_bits=reduced_in_16_bits,
        computed_in_16_bits=dtype.itemsize == 2,
    )
    if itemsize == 4:
        return torch.float32
    return torch.bfloat16 if reduced_in_16_bits else dtype


def _cache_bytes(config: Config, model: nn.Module, mesh: DeviceMesh, moments: int) -> int:
    """What stays in host memory from step to step: as asked for in bytes, or as a share of the optimizer's state."""
    whole_bytes = state_bytes(moments) * sum(p.numel() for p in model.parameters()) // mesh.size(-1)
    offload = config.zero_optimization.offload_optimizer
    kept = (1.0 - offload.ratio) * whole_bytes if offload.device == "nvme" else 0.0
    return max(config.infinity.host_cache_bytes, int(kept))


def _shard(model: nn.Module, config: Config, mesh: DeviceMesh, wrap: Sequence[nn.Module]) -> None:
    """fully_shard each of `wrap` and the root, with the config's policies."""
    zero = config.zero_optimization
    _to_fp32_masters(model, mesh)
    dtype = _compute_dtype(config)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype is torch.float32 else dtype,
        reduce_dtype=torch.float32 if config.infinity.reduce_dtype == "fp32" else torch.bfloat16,
    )
    offload = _offload_policy(config, mesh)
    reshard: bool | int = _secondary_ranks(config) or zero.stage >= 3
    for module in wrap:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    reshard_root = None if zero.stage >= 3 else False  # None: FSDP2 keeps the root group from forward to backward
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard_root)


def _offload_policy(config: Config, mesh: DeviceMesh) -> OffloadPolicy:
    """Host memory for what the config sends to the cpu: masters, gradients and state, which FSDP2 keeps in one place."""
    zero = config.zero_optimization
    on_host = [block for block in (zero.offload_param, zero.offload_optimizer) if block.device == "cpu"]
    if mesh.device_type == "cpu" or config.nvme_paths or not on_host:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=all(block.pin_memory for block in on_host))


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
    unpaged_state: dict[str, Any] | None,
) -> None:
    """Fill what was built on the meta device; set everything from `weights` where they are given.

    `unpaged_state`: what a commit holds that is gone on from; then parameters and buffers that are in it are left to that.
    """
    if swap is not None:
        paged = swap.paged
        blank = {shard.name for shard in paged.shards if not shard.filled}
    else:
        blank = meta_parameters(model)
    device = _torch_device()
    if swap is None and blank:
        _allocate(model, device)
    if unpaged_state is not None:
        initialize_values(model, set(), device, init_fn, frozenset(unpaged_state["buffers"]))
    elif blank and weights is None:
        initialize_values(model, blank, device, init_fn)
    elif weights is not None:
        initialize_values(model, set(), device, init_fn, stored_names(weights))  # buffers
        load_weights(model, weights)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the shards of a model that are on the meta device, buffers aside."""
    buffers = {module: dict(module._buffers) for module in model.modules()}
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for module, kept in buffers.items():
        module._buffers.update(kept)


def _make_loader(data: Any, config: Config, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    if data is None:
        return None
    shuffled: Any = DistributedSampler(data) if hasattr(data, "__getitem__") else None  # the order that DeepSpeed draws
    drop_last = config.dataloader_drop_last
    return DataLoader(data, batch_size=config.batch.micro, sampler=shuffled, collate_fn=collate_fn, drop_last=drop_last)


def _compute_dtype(config: Config) -> torch.dtype:
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def _hidden_size(model: nn.Module) -> int | None:
    """Of models that carry a config, for the "auto" values that are computed from it."""
    described = getattr(model, "config", None)
    for name in ("hidden_size", "n_embd", "d_model"):
        size = getattr(described, name, None)
        if isinstance(size, int):
            return size
    return None
