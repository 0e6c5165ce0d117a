"""Floor 11. A model under FSDP2, as resolved: its mesh, its groups, and what holds its ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from infinity.fsdp2.routes import Routes
from infinity.ranks.peers import Peers
from infinity.runtime.resolved import Resolved


def compute_device() -> torch.device:
    """Where models compute."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def make_mesh(shard_ranks: int) -> DeviceMesh:
    """All ranks in one dimension; or copies of the model by the ranks that one copy is sharded over."""
    kind, ranks = compute_device().type, dist.get_world_size()
    if shard_ranks == ranks:
        return init_device_mesh(kind, (ranks,))
    return init_device_mesh(kind, (ranks // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))


def shard_model(model: nn.Module, resolved: Resolved, mesh: DeviceMesh, wrap: Sequence[nn.Module]) -> None:
    """fully_shard each of `wrap` and the root, over fp32 masters."""
    model.float()
    if mesh.device_type == "cuda" and not any(p.is_meta for p in model.parameters()):
        model.cuda()
    shard = partial(fully_shard, mesh=mesh, mp_policy=resolved.mixed_precision, offload_policy=resolved.offload_policy)
    for module in wrap:
        shard(module, reshard_after_forward=resolved.reshard_after_forward)
    # None: FSDP2 keeps the root group from forward to backward.
    shard(model, reshard_after_forward=None if resolved.config.zero_optimization.stage >= 3 else False)


def make_peers(model: nn.Module, shard_ranks: int) -> tuple[Peers, Routes | None]:
    """The other ranks of a sharded model, and what holds the ranks to one way through it; None where one rank gathers alone."""
    first = dist.get_rank() // shard_ranks * shard_ranks
    gathering = range(first, first + shard_ranks)
    peers = Peers(_process_groups(model), gathering)
    if shard_ranks == 1:
        return peers, None
    return peers, Routes(model, gathering, dist.distributed_c10d._get_default_store(), peers.hear)


def _process_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups of a sharded model's collectives, that of all ranks first."""
    assert dist.group.WORLD is not None
    parameter = next(model.parameters())  # all are sharded over the same mesh
    assert isinstance(parameter, DTensor)
    groups = {group.group_name: group for group in (dist.group.WORLD, *parameter.device_mesh.get_all_groups())}
    return [*groups.values()]
