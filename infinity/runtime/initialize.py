"""`initialize`: constructs an engine with everything that it needs."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from infinity.checkpoint.commits import open_run, restore_arena, unpaged_state_of
from infinity.config import Config, load_config
from infinity.config.optimizers import MuonConfig
from infinity.errors import ConfigError
from infinity.fsdp2.first_values import InitFn
from infinity.fsdp2.gathered import with_memory
from infinity.fsdp2.placements import ranks_alike
from infinity.fsdp2.routes import Routes
from infinity.optim.adam import MOMENTS as ADAM_MOMENTS
from infinity.optim.hosted import Stepper
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.ranks.peers import Peers
from infinity.ranks.process_group import ensure_process_group
from infinity.runtime.console import show_log
from infinity.runtime.engine import Engine
from infinity.runtime.meshes import Grid, check_splits, given_grid
from infinity.runtime.monitors import check_monitors, make_monitors
from infinity.runtime.optimizers import (
    Groups,
    make_early,
    make_optimizer,
    make_schedule,
    split_for_muon,
    stepper_for,
    trained_names,
)
from infinity.runtime.parts import Parts
from infinity.runtime.pipeline import PipelineModule, Ties
from infinity.runtime.prepare import check_alike, check_supported, drawing_alike, give_values, grid_of, shard_and_page
from infinity.runtime.pretrained import save_as_pretrained
from infinity.runtime.resolved import Resolved, compute_device, report_config, resolve
from infinity.runtime.stages import check_groups, check_stages, stages_of

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
    mesh: DeviceMesh | None = None,
    auto: Mapping[str, Any] | None = None,
    resume: bool | Literal["must"] = False,
) -> tuple[Engine, Any, Any, Any]:
    """Prepare a model for training by the config: shard it, page it, make optimizer, schedule and data loader.

    Args:
        args: an object with `deepspeed_config`, read if `config` is None.
        model: an nn.Module, on the CPU or built on the meta device (`infinity.init_empty`). It is changed in place. All ranks
            build the same model; rank 0 gives the values of its parameters and buffers.
        optimizer: a torch optimizer over the model's parameters that has not stepped, a function that makes one from parameter
            groups, or None: the config's. Without either, the model can be run, not trained. With offload (cpu or nvme) it
            must be Adam, AdamW, SGD or another elementwise optimizer, and is replaced by another object.
        model_parameters: parameters or parameter groups to train; None takes all that require a gradient.
        training_data: a dataset, for which a DataLoader is returned. Each rank gets its share, in an order drawn with seed 0
            (`loader.sampler.set_epoch(n)` draws another).
        lr_scheduler: a function that makes one from the optimizer, a schedule of the optimizer that is passed (it follows the
            replacement), or None: the config's. `engine.step` steps it, except a ReduceLROnPlateau: you step that one, with
            your metric.
        collate_fn: for that DataLoader.
        config: a dict, a path to JSON, JSON text, or base64 of JSON (`config_params` is its older name).
        weights: safetensors (a file, an index.json of several, or a folder with either) with the parameters of the model, or
            of a submodule that has all parameters or PEFT's adapters; each rank reads only its rows. With parameters on NVMe,
            frozen ones stay in these files and are read from there in each step: the files must not change
            (docs/frozen_weights.md).
        init_fn: called with each module that was built on the meta device, parts first, to initialise its parameters or, if
            it has none, those of its parts.
        mesh: of a model whose parameters are split already (tensor parallel): all ranks in named dimensions, those of the
            split last (docs/parallelism.md).
        auto: values for "auto" in the config, by the names that `Config.resolve` takes, such as `lr=3e-4`.
        resume: continue from the last committed step of a run with `infinity.durability` "step": `engine.global_steps` steps
            are done, and parameters, optimizer state, schedule and random numbers are restored (nothing is drawn; `weights`
            and `init_fn` only fill buffers). If nothing is committed, training starts, with a log line; "must" raises
            CheckpointError instead.
        distributed_port, mpu, dist_init_required, mesh_param: accepted for compatibility, without effect.

    Returns (engine, optimizer or None, data loader or None, lr scheduler or None).

    A collective. Raises ConfigError, StoreError, BudgetError, IoError or CheckpointError before the first step, on all ranks
    if on one, and leaves nothing behind.
    """
    if model is None:
        raise ConfigError("initialize needs model=")
    sources = (config, config_params, getattr(args, "deepspeed_config", None))
    source = next((given for given in sources if given is not None), None)
    if source is None:
        raise ConfigError("initialize needs config=: a dict, a path to JSON, or base64 of JSON")
    with with_memory(), ExitStack() as undo:
        close_group = ensure_process_group()
        undo.callback(close_group)
        show_log()
        with raise_on_all_ranks():
            check_supported(model, init_fn, weights)
            grid = given_grid(model, mesh)
            asked = _understand(source, model, optimizer, model_parameters, grid, weights, auto or {})
        grid = grid or grid_of(asked.resolved)
        check_alike(model, weights, ranks_alike(grid.data))
        if grid.pipe is not None:
            check_groups(len(asked.groups), grid.pipe)
        if dist.get_rank() == 0:
            report_config(asked.config)
        run = open_run(asked.config.nvme_paths, asked.resolved.run_name, resume=resume)
        if run is not None:
            undo.callback(run.give_up)
        stays = weights if asked.config.infinity.checkpoint_format != "arena" else None  # an arena has the whole model
        resolved, swap, live, activations = shard_and_page(model, asked.resolved, run, stays, undo, grid)
        peers, routes = _make_peers(model, resolved.copy_ranks, grid)
        undo.callback(peers.close)
        with drawing_alike(dist.get_rank(grid.pipe) if grid.pipe is not None else 0), raise_on_all_ranks():
            unpaged_state = None
            if run is not None and run.resumed is not None:
                unpaged_state = unpaged_state_of(run.resumed)
                if swap is not None:
                    restore_arena(run.resumed, swap)
            give_values(model, resolved, swap, weights, init_fn, unpaged_state)
            made = make_optimizer(model, asked.config, asked.optimizer, asked.groups, swap, asked.stepper)
            schedule = make_schedule(asked.config, lr_scheduler, made, asked.optimizer)
        ties = Ties(model, grid.pipe)
        ties.share_values()
        parts = Parts(
            module=model,
            optimizer=made,
            lr_scheduler=schedule,
            resolved=resolved,
            swap=swap,
            run=run,
            live=live,
            activations=activations,
            routes=routes,
            peers=peers,
            grid=grid,
            ties=ties,
        )
        engine = Engine(parts, close_group)
        save_as_pretrained(engine)
        with raise_on_all_ranks():
            if training_data is not None:
                engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
            if unpaged_state is not None:
                engine.resume(unpaged_state)
            monitors = make_monitors(asked.config)
            undo.callback(monitors.close)
            engine.report_to(monitors)
        undo.pop_all()
    return engine, made if resolved.trains else None, engine.training_dataloader, schedule


class _Asked(NamedTuple):
    """The training that the arguments describe.

    optimizer: the user's, or a function that makes it; None for the config's. stepper: steps the paged parameters of an
    optimizer that is not infinity's own.
    """

    config: Config
    optimizer: Any
    groups: Groups
    stepper: Stepper | None
    resolved: Resolved


def _understand(
    source: Any,
    model: nn.Module,
    optimizer: Any,
    parameters: Any,
    grid: Grid | None,
    weights: object,
    auto: Mapping[str, Any],
) -> _Asked:
    """Read the arguments before anything is changed. Raises ConfigError for contradictions."""
    described = getattr(model, "config", None)  # that of Hugging Face's models
    sizes = (getattr(described, name, None) for name in ("hidden_size", "n_embd", "d_model"))
    hidden_size = next((size for size in sizes if isinstance(size, int)), None)
    stages = stages_of(model)
    ranks = dist.get_world_size() // stages if grid is None else grid.data.size()
    config = load_config(source).resolve(world_size=ranks, hidden_size=hidden_size, **auto)
    check_stages(model, config, mesh=grid, weights=weights)
    check_splits(model, config, grid)
    check_monitors(config)
    stepper = early = None
    if config.offloads:
        optimizer = early = make_early(model, optimizer, parameters)
    groups = trained_names(model, parameters, optimizer)
    if config.offloads:
        stepper = stepper_for(config, early, groups)
        if stepper is not None and (dtype := config.infinity.moments_dtype) != "fp32":
            raise ConfigError(
                f"infinity.moments_dtype {dtype} is only for Adam and AdamW: leave it out for {stepper.kind}"
            )
    if optimizer is None and isinstance(config.optimizer, MuonConfig):
        groups = split_for_muon(groups, model, config.optimizer, fused=config.infinity.fused)
    resolved = resolve(
        config,
        ranks=dist.get_world_size() // stages,
        numel=sum(p.numel() for p in model.parameters()),
        moments=stepper.moments if stepper is not None else ADAM_MOMENTS,
        matrices=frozenset(name for settings, names in groups if settings.get("use_muon") for name in names),
        tied=frozenset(model.copies()) if isinstance(model, PipelineModule) else frozenset(),
        trains=optimizer is not None or config.optimizer is not None,
        grid=grid,
        stages=stages,
        device_type=compute_device().type,
    )
    return _Asked(config, optimizer, groups, stepper, resolved)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` (accepted) and `--deepspeed_config FILE`, which `initialize(args=...)` reads. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "the training config, in DeepSpeed's JSON")
    group.add_argument("--deepspeed", action="store_true", help="accepted: the training runs through infinity")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the training config (JSON)")
    return parser


def _make_peers(model: nn.Module, copy_ranks: int, grid: Grid) -> tuple[Peers, Routes | None]:
    """Return the other ranks of a sharded model, and the checker of their common path through it; None if each rank gathers
    alone."""
    assert dist.group.WORLD is not None
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    of_meshes = (group for mesh in meshes for group in mesh.get_all_groups())
    all_groups = (dist.group.WORLD, *of_meshes, *([grid.pipe] if grid.pipe is not None else []))
    groups = {group.group_name: group for group in all_groups}
    first = dist.get_rank() // copy_ranks * copy_ranks
    gathering = range(first, first + copy_ranks)
    peers = Peers([*groups.values()], gathering, are_stages=grid.pipe is not None)
    if copy_ranks == 1:
        return peers, None
    return peers, Routes(model, gathering, dist.distributed_c10d._get_default_store(), peers.hear)
