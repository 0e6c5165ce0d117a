"""Checks, shards and pages the model that the user built, and gives it its values."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from infinity.activations.saved_tensors import Activations, make_activations
from infinity.config import Config
from infinity.device import ReusedMemory
from infinity.drive.choice import StorageChoice, choose_storage
from infinity.errors import ConfigError, StoreError
from infinity.fsdp2.adapters import check_adapters, left_to_model
from infinity.fsdp2.coroutines import RandomState
from infinity.fsdp2.experts import expert_modules, routed_experts, split_experts
from infinity.fsdp2.first_values import InitFn, check_initializable, initialize_values, meta_parameters
from infinity.fsdp2.gathered import remember_sharded
from infinity.fsdp2.guarded import carry_hooks, guard
from infinity.fsdp2.live import LiveParameters, choose_wrap
from infinity.fsdp2.materialize import fingerprint, load_weights, stored_names
from infinity.fsdp2.names import parameter_names
from infinity.fsdp2.placements import ranks_alike
from infinity.fsdp2.running_statistics import keep_statistics_in_fp32
from infinity.fsdp2.scalars import hold_as_rows
from infinity.fsdp2.sharded_tensor import name_parameters
from infinity.fsdp2.sharding import is_sharded, local_of
from infinity.ranks.all_ranks import (
    first_of_ranks,
    from_all_ranks,
    from_first_rank,
    raise_on_all_ranks,
    take_from_first_rank,
)
from infinity.runtime.expert_parallel import own_experts
from infinity.runtime.meshes import Grid, check_same_batches, make_grid, split_by_plan
from infinity.runtime.resolved import Resolved, compute_device
from infinity.schedule.live import keeps_all
from infinity.schedule.scheme import APART, late_update
from infinity.store.durable import DurableRun
from infinity.swap import SwapManager
from infinity.swap.options import second_slot_bytes
from infinity.units import format_bytes

log = logging.getLogger("infinity")


def check_supported(model: nn.Module, init_fn: InitFn | None, weights: str | os.PathLike[str] | None) -> None:
    """Raise ConfigError or CheckpointError for an unsupported model, or unsupported weights."""
    if weights is not None and not Path(weights).exists():
        raise ConfigError(f"weights={os.fspath(weights)!r}: no such file or folder")
    if is_sharded(model):
        raise ConfigError(
            "the model is sharded already, by fully_shard or by an earlier initialize: pass a newly built one; to page a model "
            "that you shard yourself, call SwapManager.page(model)"
        )
    for parameter, names in parameter_names(model).items():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {names[0]} has no shape before the first forward of its lazy module: run the model once before "
                "initialize, or build it with its sizes"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {names[0]} is trained in {parameter.dtype}, and infinity updates fp32 masters: keep its real and "
                "imaginary parts in the last dimension of a real parameter (torch.view_as_real), and take "
                "torch.view_as_complex of that in the forward"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"parameter {names[0]} has strides {parameter.stride()} at shape {tuple(parameter.shape)}, and sharding needs "
                "contiguous rows: make it contiguous (p.data = p.data.contiguous()) before initialize"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} makes sparse gradients, which are not reduced: set its sparse=False, which gives the "
                "same gradient, dense"
            )
    if weights is not None:
        check_adapters(model)
    check_initializable(model, init_fn, stored_names(weights) if weights is not None else None)


def check_alike(
    model: nn.Module, weights: str | os.PathLike[str] | None, group: dist.ProcessGroup | None = None
) -> None:
    """Raise ConfigError, on all ranks, if one rank's model or files of `weights` differ from those of the first rank of
    `group` (None: all ranks). A collective."""
    with raise_on_all_ranks():
        built = {name: _described(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        files = fingerprint(weights) if weights is not None else None
    first_rank, first_built, first_files = from_first_rank((dist.get_rank(), built, files), group)
    with raise_on_all_ranks():
        for name in {**first_built, **built}:
            here, there = built.get(name, "missing"), first_built.get(name, "missing")
            if here != there:
                raise ConfigError(
                    f"{name} is {here} here and {there} on rank {first_rank}: build the same model on all ranks; rank "
                    f"{first_rank} gives the values"
                )
        if [*built] != [*first_built]:
            raise ConfigError(
                f"the model has its parameters in another order here than on rank {first_rank}: build them in the same order"
            )
        if files != first_files:
            raise ConfigError(
                f"the files of weights={os.fspath(weights or '')!r} differ from those of rank 0: copy the same files to every "
                "host"
            )


def _described(tensor: torch.Tensor) -> str:
    words = (
        f"{'trained' if tensor.requires_grad else 'not trained'}, {str(tensor.dtype).removeprefix('torch.')} of shape "
    )
    return f"{words}{tuple(tensor.shape)}{', on the meta device' if tensor.is_meta else ''}"


@contextmanager
def drawing_alike(stage: int = 0) -> Iterator[None]:
    """Draw initial values in the block as the first rank does, because each rank keeps its rows of them; other ones in each
    `stage` of a pipeline. A rank with another seed then continues with its own random numbers. A collective at its
    beginning."""
    here, first = RandomState.now(), from_first_rank(RandomState.now())
    if stage:
        with first.within():
            first = RandomState.seeded(int(torch.randint(2**62, ())) + stage)
    with nullcontext() if torch.equal(here.cpu, first.cpu) else first.within():
        yield


def grid_of(resolved: Resolved) -> Grid:
    """Return the ranks by dimension, as the config and the model say. A collective."""
    sizes = {"shard_ranks": resolved.shard_ranks, "tensor_ranks": resolved.tensor_ranks, "stages": resolved.stages}
    return make_grid(compute_device().type, **sizes, expert_ranks=resolved.expert_ranks)


def shard_and_page(
    model: nn.Module,
    resolved: Resolved,
    run: DurableRun | None,
    weights: str | os.PathLike[str] | None,
    undo: ExitStack,
    grid: Grid | None = None,
) -> tuple[Resolved, SwapManager | None, LiveParameters | None, Activations | None]:
    """Shard each group and the root, page what is offloaded, and decide what stays gathered.

    Raises for memory or space that is too small before the model is sharded, which can't be undone. Returns `resolved` with the
    update timing for which there is room. grid: None for that of `grid_of`.
    """
    if grid is None:
        grid = grid_of(resolved)
    if grid.tensor is not None:
        split_by_plan(model, grid.tensor)
    owned = own_experts(model, grid.experts["experts"]) if grid.experts is not None else []
    hold_as_rows(model)
    if resolved.compute_dtype is not torch.float32:
        keep_statistics_in_fp32(model)
    blocks = split_experts(model, stored_names(weights)) if weights is not None and not owned else 0
    classes = resolved.config.infinity.wrap
    if grid.pipe is not None and classes != "auto":  # each stage has some of them
        here = {type(module).__name__ for module in model.modules()}
        elsewhere = set().union(*from_all_ranks(here, grid.pipe)) - here
        classes = tuple(name for name in classes if name not in elsewhere)
    with raise_on_all_ranks():
        wrap, outline, notes = choose_wrap(model, None if classes == "auto" else classes, resolved.live)
    wrap = [*(expert for expert in (*expert_modules(model), *owned) if expert not in wrap), *wrap]
    mesh_of = partial(_mesh_of, grid, frozenset(owned))
    if blocks:
        notes.append(
            f"the experts of {blocks} blocks are groups of their own, which are read when tokens are routed to them"
        )
    swap = None
    if resolved.paging is not None:
        with raise_on_all_ranks():
            storage = choose_storage(resolved.config, weights)
            notes += storage.notes
            for warning in storage.warnings if dist.get_rank() == 0 else ():
                log.warning(warning)
            swap = _make_swap(resolved.config, storage, run)
            undo.callback(swap.close)
        resolved, told = _fit(model, wrap, resolved, mesh_of, swap, weights)
        notes += told
    _shard_model(model, resolved, mesh_of, wrap)
    if swap is not None:
        with raise_on_all_ranks() if grid.pipe is not None else nullcontext():
            paging = swap.page(model, resolved.paging, weights=weights)
        notes += swap.notes
        second = second_slot_bytes(paging.paged.layout, paging.options)
        if second and run is None:
            notes.append(
                f"speculative updates in the backward use {format_bytes(second)} more NVMe space (infinity.update)"
            )
    else:
        name_parameters(model)
    if resolved.tensor_ranks > 1:
        check_same_batches(model, resolved.tensor_ranks)
    if hasattr(model, "generate"):  # PEFT's calls a part of the model, whose embedding the root gathers
        register_fsdp_forward_method(model, "generate")
    live = None
    if resolved.config.zero_optimization.stage >= 3:
        passes = resolved.config.passes
        live = LiveParameters(outline, resolved.live, micro_batches=passes, ranks=resolved.shard_ranks)
        notes += live.notes
        if swap is not None and swap.paging.parameters.ahead is not None:
            ahead = swap.paging.parameters.ahead
            ahead.bytes_max = min(ahead.bytes_max, live.spare_numel * resolved.compute_dtype.itemsize)
    activations, activation_notes = make_activations(resolved.activations, swap, compute_device())
    if dist.get_rank() == 0:
        for note in [*notes, *activation_notes, *resolved.notes]:
            log.info(note)
    remember_sharded(model)
    return resolved, swap, live, activations


def _fit(
    model: nn.Module,
    wrap: Sequence[nn.Module],
    resolved: Resolved,
    mesh_of: MeshOf,
    swap: SwapManager,
    weights: str | os.PathLike[str] | None,
) -> tuple[Resolved, list[str]]:
    """Raise as `SwapManager.page` if memory or space is too small. Where the config says "auto", gradients for which memory
    lacks wait on NVMe instead, and speculative updates that lack space or effect on one rank are switched off on all. A
    collective."""
    resolved = _keep_gathered(model, resolved, swap)
    resolved, notes = _bound_gradients(model, resolved, swap)
    assert resolved.paging is not None
    check = partial(
        swap.check_fits,
        model,
        wrap,
        ranks=resolved.copy_ranks,
        ranks_of=lambda module: (mesh_of(module).size(-1), mesh_of(module).get_local_rank(mesh_of(module).ndim - 1)),
        dtype=resolved.compute_dtype,
        weights=weights,
    )
    unasked = resolved.config.infinity.update == "auto" and resolved.paging.speculative
    why = None
    with raise_on_all_ranks():
        try:
            has_effect = check(options=resolved.paging, unasked=unasked)
            why = "" if unasked and not has_effect else None
        except StoreError as error:
            if not unasked:
                raise
            why = str(error)
    why = first_of_ranks(why)
    if why is not None:
        late = late_update(resolved.paging.for_ranks(resolved.copy_ranks).updates_are_collective)
        paging = replace(resolved.paging, update=late, speculative=False)
        resolved = replace(resolved, paging=paging)
        notes += [f'infinity.update "auto" is "{late}" here: {why}'] if why else []
        with raise_on_all_ranks():
            check(options=paging)
    return resolved, notes


def _keep_gathered(model: nn.Module, resolved: Resolved, swap: SwapManager) -> Resolved:
    """Let all groups stay gathered for a step of several micro-batches, where `keeps_all` says so and the config nothing."""
    paging, zero, parameters = resolved.paging, resolved.config.zero_optimization, [*model.parameters()]
    assert paging is not None
    alone = compute_device().type == "cpu" and resolved.copy_ranks == 1 and zero.stage == 3
    unasked = zero.stage3_max_reuse_distance == zero.stage3_max_live_parameters == "auto"
    all_trained = all(parameter.requires_grad for parameter in parameters)
    if not (alone and unasked and all_trained and resolved.config.passes > 1):
        return resolved
    numel = sum(parameter.numel() for parameter in parameters)
    if not keeps_all(numel, resolved.compute_dtype.itemsize + paging.gradient_dtype.itemsize, swap.memory_bytes):
        return resolved
    live = replace(resolved.live, max_reuse_distance=2 * numel)
    return replace(resolved, live=live, paging=replace(paging, keeps_gathered=True))


def _bound_gradients(model: nn.Module, resolved: Resolved, swap: SwapManager) -> tuple[Resolved, list[str]]:
    """Bound the memory of waiting gradients if the config leaves that open and they lack room. A collective."""
    paging, infinity = resolved.paging, resolved.config.infinity
    assert paging is not None
    if infinity.gradient_bytes_max != "auto" or infinity.keep_grad or not resolved.config.uses_nvme:
        return resolved, []
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    waiting = trained * paging.gradient_dtype.itemsize // resolved.copy_ranks
    waiting //= 1 if paging.all_gradients_wait else APART
    room = min(from_all_ranks(swap.room_for_gradients))
    if waiting <= room:
        return resolved, []
    paging = replace(paging, gradient_bytes_max=int(room))
    note = (
        f"{format_bytes(waiting)} of gradients don't fit in half of the available memory with the pinned pool: those "
        f"beyond {format_bytes(int(room))} wait on NVMe (infinity.gradient_bytes_max)"
    )
    return replace(resolved, paging=paging), [note]


MeshOf = Callable[[nn.Module], DeviceMesh]
"""Returns the mesh over which FSDP2 is to shard a module."""


def _mesh_of(grid: Grid, owned: Collection[nn.Module], module: nn.Module) -> DeviceMesh:
    return grid.experts["owners"] if grid.experts is not None and module in owned else grid.data


def _shard_model(model: nn.Module, resolved: Resolved, mesh_of: MeshOf, wrap: Sequence[nn.Module]) -> None:
    """Apply fully_shard to each of `wrap` and the root, over fp32 masters with the values of the first rank. One group at a
    time is on the device; paged groups leave it at once, so that the model may be larger than its memory."""
    model.float()
    hooked = {n: p for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks}
    mesh = mesh_of(model)
    take_from_first_rank(model.buffers(), compute_device(), ranks_alike(mesh))
    for module in model.modules():  # parts, which their first owner has
        parts = [local_of(p) for p in module.parameters(recurse=False) if isinstance(p, DTensor)]
        for group in mesh_of(module).get_all_groups() if parts else ():
            take_from_first_rank(parts, compute_device(), group)

    def shard(module: nn.Module, reshard_after_forward: bool | int | None) -> None:
        unsharded = (parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
        take_from_first_rank(unsharded, compute_device(), ranks_alike(mesh))
        name, policy = type(module).__name__, resolved.mixed_precision
        fully_shard(module, mesh=mesh_of(module), mp_policy=policy, reshard_after_forward=reshard_after_forward)
        type(module).__name__ = name  # which FSDP2 changes, and by which transformers picks a loss
        if resolved.paging is not None and mesh.device_type != "cpu":
            module._apply(lambda t: t.cpu() if isinstance(t, DTensor) and not t.is_meta else t)

    for module in wrap:
        shard(module, reshard_after_forward=resolved.reshard_after_forward)
    for experts in routed_experts(model):
        experts.ranks = mesh.get_group(mesh.ndim - 1) if mesh.size(-1) > 1 else None
    # None: FSDP2 keeps the root group from forward to backward.
    shard(model, reshard_after_forward=None if resolved.config.zero_optimization.stage >= 3 else False)
    sharded = dict(model.named_parameters())
    for name, parameter in hooked.items():
        carry_hooks(parameter, sharded[name])


def _make_swap(config: Config, storage: StorageChoice, run: DurableRun | None) -> SwapManager:
    zero, infinity = config.zero_optimization, config.infinity
    place = "nvme" if config.uses_nvme else "cpu"
    blocks = [block for block in (zero.offload_param, zero.offload_optimizer) if block.device == place]
    return SwapManager(
        config.nvme_paths,
        pinned_bytes_max=infinity.pinned_bytes_max,
        io=storage.io,
        bandwidths=storage.bandwidths,
        lock_memory=infinity.lock_memory,
        pin_memory=all(block.pin_memory for block in blocks),
        checksums=infinity.checksums,
        run=run,
    )


def give_values(
    model: nn.Module,
    resolved: Resolved,
    swap: SwapManager | None,
    weights: str | os.PathLike[str] | None,
    init_fn: InitFn | None,
    unpaged_state: dict[str, Any] | None,
) -> None:
    """Initialise what was built on the meta device; set everything from `weights` if given.

    unpaged_state: state of the commit from which the run resumes; then its parameters and buffers are left alone.
    """
    device = compute_device()
    if swap is not None:
        blank = {shard.name for shard in swap.paged.shards if not shard.filled}
    else:
        blank = meta_parameters(model)
        if blank:  # allocate the shards, but no buffers
            buffers = {module: dict(module._buffers) for module in model.modules()}
            model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
            for module, real in buffers.items():
                module._buffers.update(real)
    if unpaged_state is not None:
        initialize_values(model, set(), device, init_fn, frozenset(unpaged_state["buffers"]))
    elif blank and weights is None:
        initialize_values(model, blank, device, init_fn)
    elif weights is not None:
        stored = stored_names(weights)
        left = left_to_model(model, stored, blank)
        initialize_values(model, {*left.drawn}, device, init_fn, stored, later=blank)
        foreign = swap.paged.foreign_names if swap is not None else frozenset()
        load_weights(model, weights, but=foreign | left.drawn | left.have_values)
    if swap is None:
        guard(model, ReusedMemory())
