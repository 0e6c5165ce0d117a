"""The dimensions over which ranks share a model: stages of a pipeline, inside of them those of FSDP2, then that of tensor
parallelism.

Ranks that share a tensor dimension get the same batch, and are neighbours. Parameters are split over it before
`fully_shard`, by the user or by the model's own plan: [Note: Parts and shards] in infinity/fsdp2/placements.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_leaves

from infinity.config import Config
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.names import parameter_names
from infinity.fsdp2.placements import STAGE
from infinity.ranks.all_ranks import from_all_ranks
from infinity.runtime.expert_parallel import check_experts, stacked_experts

_BY_HAND = "split the model by torch's parallelize_module and pass mesh= to initialize"


@dataclass(frozen=True)
class Grid:
    """The ranks by dimension. data: for `fully_shard`: shards, or replicas and shards. tensor: for `split_by_plan`; None if
    nothing is to be split. experts: the same ranks for experts, (owners of the same ones, those that share a block); None if
    each rank computes with all. pipe: this rank and those of other stages that get the same batches; None without stages."""

    data: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    pipe: dist.ProcessGroup | None = None

    @property
    def shard_ranks(self) -> int:
        """Over how many ranks FSDP2 shards."""
        return self.data.size(-1)

    @property
    def tensor_ranks(self) -> int:
        """How many ranks get the same batch."""
        return dist.get_world_size() // self.data.size()


def given_grid(model: nn.Module, mesh: DeviceMesh | None) -> Grid | None:
    """Return the grid that the user's mesh describes; None without one. Raises ConfigError for a mesh that doesn't fit."""
    split = {name: p.device_mesh for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if mesh is None:
        for name, over in split.items():
            raise ConfigError(
                f"parameter {name} is split over {over} already: pass mesh= to initialize, the mesh of all ranks of which "
                "that is a dimension"
            )
        return None
    if mesh.mesh.flatten().tolist() != [*range(dist.get_world_size())]:
        raise ConfigError(
            f"{mesh} has not all {dist.get_world_size()} ranks in their order: make it by init_device_mesh"
        )
    names = mesh.mesh_dim_names or ()
    used = {name for over in split.values() for name in over.mesh_dim_names or ("without a name",)}
    data = tuple(name for name in names if name not in used)
    if not used <= {*names} or names[: len(data)] != data or len(data) not in (1, 2):
        raise ConfigError(
            f"{mesh}: expected one or two dimensions for fully_shard (shards, or replicas and shards), and after them those "
            f"over which parameters are split ({', '.join(sorted(used)) or 'none here'})"
        )
    return Grid(mesh[data])


def make_grid(kind: str, *, shard_ranks: int, tensor_ranks: int, expert_ranks: int, stages: int = 1) -> Grid:
    """Return the grid of all ranks. A collective."""
    if stages > 1:
        mesh = init_device_mesh(kind, (stages, shard_ranks), mesh_dim_names=("pipe", STAGE))
        return Grid(mesh[STAGE], pipe=mesh["pipe"].get_group())
    replicas = dist.get_world_size() // (shard_ranks * tensor_ranks)
    sizes = {"replicate": replicas, "shard": shard_ranks, "tensor": tensor_ranks}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh, experts = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes)), None
    if expert_ranks > 1:
        owners = shard_ranks // expert_ranks
        experts = init_device_mesh(kind, (owners, expert_ranks), mesh_dim_names=("owners", "experts"))
    data = tuple(name for name in sizes if name != "tensor")
    return Grid(mesh[data], mesh["tensor"] if tensor_ranks > 1 else None, experts)


def check_splits(model: nn.Module, config: Config, grid: Grid | None) -> None:
    """Raise ConfigError if the model can't be split as the config says. grid: of a mesh that the user passed."""
    for key, ranks, check in (
        ("tensor_parallel.autotp_size", config.tensor_parallel.ranks, _check_plan),
        ("expert_parallel.autoep_size", config.expert_parallel.ranks, check_experts),
    ):
        if ranks > 1 and grid is not None:
            raise ConfigError(f"{key}: leave it out with mesh=, which says what is split")
        if ranks > 1:
            check(model, ranks)


def check_same_batches(model: nn.Module, tensor_ranks: int) -> None:
    """Make the first forward raise InfinityError, on all ranks, unless neighbours that split the model have the same inputs."""

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook.remove()
        of_ranks = from_all_ranks(digest_of((args, kwargs)))
        for first in range(0, len(of_ranks), tensor_ranks):
            if len({*of_ranks[first : first + tensor_ranks]}) > 1:
                raise InfinityError(
                    f"ranks {first} to {first + tensor_ranks - 1} split the model and need the same batches, but got different "
                    f"ones: use DistributedSampler(data, ranks // {tensor_ranks}, rank // {tensor_ranks}), or the loader of "
                    "initialize(training_data=...)"
                )

    hook = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)


def digest_of(values: Any) -> str:
    """Return a hash of the tensors in `values`."""
    seen = hashlib.blake2b()
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            seen.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


_STYLES: Mapping[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), lambda: ColwiseParallel(output_layouts=Replicate())),
    **dict.fromkeys(("rowwise_rep", "embedding_rowwise"), lambda: RowwiseParallel(input_layouts=Replicate())),
    # A norm of each head: (batch, tokens, heads, width), of which each rank has some heads.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""torch's way for each of transformers' names for whole modules."""


def _check_plan(model: nn.Module, ranks: int) -> None:
    """Raise ConfigError if `split_by_plan` can't split a model over so many ranks."""
    _styles(model)
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(
                f"tensor_parallel.autotp_size: got {ranks}, expected a divisor of the model's {name}, {heads}"
            )


def split_by_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model over `mesh` as its `tp_plan` says, as transformers' models have it. Tied parameters stay tied. A
    collective."""
    styles = _styles(model)
    tied = {names: p for p, names in parameter_names(model).items() if len(names) > 1}
    parallelize_module(model, mesh, styles)
    for names in tied:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, first)


def _styles(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return torch's style by name of a module. Raises ConfigError if the plan has others, or there is none."""
    planned: Any = getattr(model, "get_base_model", lambda: model)()  # of PEFT
    kind, plan = type(planned).__name__, getattr(planned, "tp_plan", None)
    if not plan:
        raise ConfigError(
            f"tensor_parallel.autotp_size: {kind} has no tp_plan, as transformers' models have: {_BY_HAND}"
        )
    styles: dict[str, str] = {}
    names = {module: name for name, module in model.named_modules()}
    for name, module in planned.named_modules():
        if (style := plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))) is not None:
            for part in _parts(module, style):
                styles[names[part]] = style if _is_splittable(part, style) else type(part).__name__
    unknown = sorted(f"{name} ({style})" for name, style in {**plan, **styles}.items() if style not in _STYLES)
    if unknown or not styles:
        first = "split its experts by expert_parallel.autoep_size, or " if stacked_experts(planned) else ""
        raise ConfigError(
            f"tensor_parallel.autotp_size: the tp_plan of {kind} splits {', '.join(unknown[:3]) or 'none of its modules'}, "
            f"which infinity can't do: {first}{_BY_HAND}"
        )
    return {name: _STYLES[style]() for name, style in styles.items()}


def _parts(module: Any, style: str) -> list[nn.Module]:
    """Return what is split of a module. Of LoRA's two matrices one is split, as the base is: the one at its split side."""
    if not hasattr(module, "base_layer"):
        return [module]
    adapters = module.lora_B if style.startswith("colwise") else module.lora_A
    others = [*module.lora_embedding_A, *getattr(module, "lora_magnitude_vector", ())]
    return [module if others else module.base_layer, *adapters.values()]


def _is_splittable(module: nn.Module, style: str) -> bool:
    is_norm = _STYLES.get(style) is _STYLES["replicated_with_grad_allreduce"]
    return is_norm or type(module) in (nn.Linear, nn.Embedding)
