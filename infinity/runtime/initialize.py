"""Floor 11. `initialize`: the one place that constructs the whole."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from infinity.activations.saved_tensors import Activations, make_activations
from infinity.checkpoint.commits import Commits, open_run, restore_arena, unpaged_state_of
from infinity.config import Config, load_config
from infinity.drive.choice import StorageChoice, choose_storage
from infinity.errors import ConfigError, StoreError
from infinity.fsdp2.first_values import InitFn, check_initializable, initialize_values, meta_parameters
from infinity.fsdp2.gathered import remember_sharded
from infinity.fsdp2.live import LiveParameters, choose_wrap
from infinity.fsdp2.materialize import adapters_beside, load_weights, stored_names
from infinity.fsdp2.routes import Routes
from infinity.fsdp2.scalars import hold_as_rows
from infinity.fsdp2.sharding import is_sharded
from infinity.fsdp2.vertical import Vertical
from infinity.optim.adam import MOMENTS as ADAM_MOMENTS
from infinity.ranks.all_ranks import first_of_ranks, raise_on_all_ranks
from infinity.ranks.peers import Peers
from infinity.ranks.process_group import ensure_process_group
from infinity.runtime.console import show_words
from infinity.runtime.engine import Engine
from infinity.runtime.in_memory import InMemory, NoCommits, Storage, Updater
from infinity.runtime.optimizers import (
    make_early,
    make_optimizer,
    make_schedule,
    stepper_for,
    trained_names,
)
from infinity.runtime.pretrained import save_as_pretrained
from infinity.runtime.resolved import Resolved, compute_device, report_config, resolve
from infinity.store.durable import DurableRun
from infinity.swap import PagedOptimizer, SwapManager
from infinity.swap.speculation import second_slot_bytes
from infinity.units import format_bytes

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
            each rank reading only its rows. Frozen ones stay there, where parameters rest on NVMe: each step reads them
            from these files, which must not change meanwhile (docs/frozen_weights.md).
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
            _check_supported(model, init_fn, weights)
            stepper = None
            if settled.uses_nvme:
                optimizer = early = make_early(model, optimizer, model_parameters)
            groups = trained_names(model, model_parameters, optimizer)
            if settled.uses_nvme:
                stepper = stepper_for(settled, early, groups)
            resolved = resolve(
                settled,
                ranks=dist.get_world_size(),
                numel=sum(p.numel() for p in model.parameters()),
                moments=stepper.moments if stepper is not None else ADAM_MOMENTS,
                device_type=compute_device().type,
            )
        if dist.get_rank() == 0:
            report_config(settled)
        run = open_run(settled.nvme_paths, resolved.run_name, resume=resume)
        if run is not None:
            undo.callback(run.give_up)
        resumed = run.resumed if run is not None else None
        stays = weights if settled.infinity.checkpoint_format != "arena" else None  # which holds all of the model
        resolved, swap, live, activations = _shard_and_page(model, resolved, run, stays, undo)
        remember_sharded(model)
        peers, routes = _make_peers(model, resolved.shard_ranks)
        undo.callback(peers.close)
        with raise_on_all_ranks():
            unpaged_state = unpaged_state_of(resumed) if resumed is not None else None
            if resumed is not None and swap is not None:
                restore_arena(resumed, swap)
            _give_values(model, swap, weights, init_fn, unpaged_state)
            made = make_optimizer(model, settled, optimizer, groups, swap, stepper)
            schedule = make_schedule(settled, lr_scheduler, made, optimizer)
            loader = _make_loader(training_data, settled, collate_fn)
        updater: Updater
        storage: Storage
        if swap is not None:
            assert isinstance(made, PagedOptimizer)
            updater, storage = made, swap
        else:
            updater = storage = InMemory(model, made)
        engine = Engine(
            module=model,
            optimizer=made,
            lr_scheduler=schedule,
            training_dataloader=loader,
            resolved=resolved,
            swap=swap,
            storage=storage,
            updater=updater,
            commits=Commits(run, swap) if run is not None and swap is not None else NoCommits(),
            live=live,
            activations=activations,
            routes=routes,
            vertical=Vertical(model),
            peers=peers,
            on_close=close_group,
        )
        save_as_pretrained(engine)
        if unpaged_state is not None:
            with raise_on_all_ranks():
                engine.resume(unpaged_state)
        undo.pop_all()
    return engine, made, loader, schedule


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` (accepted) and `--deepspeed_config FILE`, which `initialize(args=...)` reads. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "the training config, in DeepSpeed's JSON")
    group.add_argument("--deepspeed", action="store_true", help="accepted: the training runs through infinity")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the training config (JSON)")
    return parser


def _check_supported(model: nn.Module, init_fn: InitFn | None, weights: str | os.PathLike[str] | None) -> None:
    if weights is not None and not Path(weights).exists():
        raise ConfigError(f"weights={os.fspath(weights)!r}: no such file or folder")
    if is_sharded(model):
        raise ConfigError(
            "the model is sharded already, by fully_shard or by an earlier initialize: build it anew and pass that; a model "
            "that you shard yourself is paged with SwapManager.page(model)"
        )
    check_initializable(model, init_fn, stored_names(weights) if weights is not None else None)


def _shard_and_page(
    model: nn.Module,
    resolved: Resolved,
    run: DurableRun | None,
    weights: str | os.PathLike[str] | None,
    undo: ExitStack,
) -> tuple[Resolved, SwapManager | None, LiveParameters | None, Activations | None]:
    """fully_shard each group and the root; hand what rests on NVMe to a swap manager; set what stays gathered.

    What can be known to be too small is refused before the model is sharded, which can't be undone. Returns `resolved` with the
    update timing that there is room for.
    """
    mesh = _make_mesh(resolved.shard_ranks)
    hold_as_rows(model)
    with raise_on_all_ranks():
        wrap, outline, notes = choose_wrap(model, resolved.wrap, resolved.live)
    swap = None
    if resolved.paging is not None:
        with raise_on_all_ranks():
            storage = choose_storage(resolved.config, weights)
            notes += storage.notes
            swap = _make_swap(resolved.config, storage, run)
            undo.callback(swap.close)
        resolved, told = _fit(model, wrap, resolved, swap, weights)
        notes += told
    _shard_model(model, resolved, mesh, wrap)
    if swap is not None:
        paging = swap.page(model, resolved.paging, weights=weights)
        notes += swap.notes
        if paging.options.speculative and run is None:
            second = format_bytes(second_slot_bytes(paging.paged.layout, paging.options))
            notes.append(
                f"updates are made in the backward, ahead of the step, in {second} more on NVMe (infinity.update)"
            )
    live = None
    if resolved.config.zero_optimization.stage >= 3:
        passes = resolved.backwards_per_step
        live = LiveParameters(outline, resolved.live, micro_batches=passes, ranks=resolved.shard_ranks)
        notes += live.notes
        if swap is not None and swap.paging.parameters.ahead is not None:
            ahead = swap.paging.parameters.ahead
            ahead.bytes_max = min(ahead.bytes_max, live.spare_numel * resolved.compute_dtype.itemsize)
    activations, activation_notes = make_activations(resolved.activations, swap, compute_device())
    if dist.get_rank() == 0:
        for note in [*notes, *activation_notes, *resolved.notes]:
            log.info(note)
    return resolved, swap, live, activations


def _fit(
    model: nn.Module,
    wrap: Sequence[nn.Module],
    resolved: Resolved,
    swap: SwapManager,
    weights: str | os.PathLike[str] | None,
) -> tuple[Resolved, list[str]]:
    """Raise what `SwapManager.page` would for want of memory or space; where nobody asked for speculative updates, do without
    them if they lack space or effect, on all ranks if on one. A collective."""
    assert resolved.paging is not None
    check = partial(
        swap.check_fits, model, wrap, ranks=resolved.shard_ranks, dtype=resolved.compute_dtype, weights=weights
    )
    unasked = resolved.config.infinity.update == "auto" and resolved.paging.speculative
    why, notes = None, []
    with raise_on_all_ranks():
        try:
            past_host = resolved.config.aio.use_gds  # where the host doesn't have what it would update in the backward
            has_effect = check(options=resolved.paging, unasked=unasked)
            why = "" if unasked and (past_host or not has_effect) else None
        except StoreError as error:
            if not unasked:
                raise
            why = str(error)
    why = first_of_ranks(why)
    if why is not None:
        paging = replace(resolved.paging, update="forward", speculative=False)
        resolved = replace(resolved, paging=paging)
        notes = [f'infinity.update "auto" is "forward" here: {why}'] if why else []
        with raise_on_all_ranks():
            check(options=paging)
    return resolved, notes


def _make_mesh(shard_ranks: int) -> DeviceMesh:
    """All ranks in one dimension; or copies of the model by the ranks that one copy is sharded over."""
    kind, ranks = compute_device().type, dist.get_world_size()
    if shard_ranks == ranks:
        return init_device_mesh(kind, (ranks,))
    return init_device_mesh(kind, (ranks // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))


def _shard_model(model: nn.Module, resolved: Resolved, mesh: DeviceMesh, wrap: Sequence[nn.Module]) -> None:
    """fully_shard each of `wrap` and the root, over fp32 masters."""
    model.float()
    if mesh.device_type == "cuda" and not any(p.is_meta for p in model.parameters()):
        model.cuda()
    shard = partial(fully_shard, mesh=mesh, mp_policy=resolved.mixed_precision, offload_policy=resolved.offload_policy)
    for module in wrap:
        shard(module, reshard_after_forward=resolved.reshard_after_forward)
    # None: FSDP2 keeps the root group from forward to backward.
    shard(model, reshard_after_forward=None if resolved.config.zero_optimization.stage >= 3 else False)


def _make_peers(model: nn.Module, shard_ranks: int) -> tuple[Peers, Routes | None]:
    """The other ranks of a sharded model, and what holds the ranks to one way through it; None where one rank gathers alone."""
    parameter = next(model.parameters())  # all are sharded over the same mesh
    assert isinstance(parameter, DTensor)
    assert dist.group.WORLD is not None
    groups = {group.group_name: group for group in (dist.group.WORLD, *parameter.device_mesh.get_all_groups())}
    first = dist.get_rank() // shard_ranks * shard_ranks
    gathering = range(first, first + shard_ranks)
    peers = Peers([*groups.values()], gathering)
    if shard_ranks == 1:
        return peers, None
    return peers, Routes(model, gathering, dist.distributed_c10d._get_default_store(), peers.hear)


def _make_swap(config: Config, storage: StorageChoice, run: DurableRun | None) -> SwapManager:
    zero, infinity = config.zero_optimization, config.infinity
    blocks = [block for block in (zero.offload_param, zero.offload_optimizer) if block.device == "nvme"]
    return SwapManager(
        config.nvme_paths,
        pinned_bytes_max=infinity.pinned_bytes_max,
        io=storage.io,
        bandwidths=storage.bandwidths,
        lock_memory=infinity.lock_memory,
        pin_memory=all(block.pin_memory for block in blocks),
        direct=config.aio.use_gds,
        checksums=infinity.checksums,
        run=run,
    )


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
    device = compute_device()
    if swap is not None:
        blank = {shard.name for shard in swap.paged.shards if not shard.filled}
    else:
        blank = meta_parameters(model)
        if blank:
            _allocate(model, device)
    if unpaged_state is not None:
        initialize_values(model, set(), device, init_fn, frozenset(unpaged_state["buffers"]))
    elif blank and weights is None:
        initialize_values(model, blank, device, init_fn)
    elif weights is not None:
        stored = stored_names(weights)
        initialize_values(model, blank & adapters_beside(model, stored), device, init_fn, stored)
        load_weights(model, weights, but=swap.paged.foreign_names if swap is not None else ())


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the shards of a model that are on the meta device, buffers aside."""
    buffers = {module: dict(module._buffers) for module in model.modules()}
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for module, real in buffers.items():
        module._buffers.update(real)


def _make_loader(data: Any, config: Config, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    if data is None:
        return None
    shuffled: Any = DistributedSampler(data) if hasattr(data, "__getitem__") else None  # the order that DeepSpeed draws
    return DataLoader(
        data,
        batch_size=config.batch.micro,
        sampler=shuffled,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
    )


def _hidden_size(model: nn.Module) -> int | None:
    """Of models that carry a config, for the "auto" values that are computed from it."""
    described = getattr(model, "config", None)
    for name in ("hidden_size", "n_embd", "d_model"):
        size = getattr(described, name, None)
        if isinstance(size, int):
            return size
    return None
