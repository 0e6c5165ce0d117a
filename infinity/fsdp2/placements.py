"""Where a rank's shard of a parameter lies in the whole.

[Note: Parts and shards]
Tensor and expert parallelism split parameters before `fully_shard`, and FSDP2 shards each rank's part by rows. So a
part is to FSDP2, and to everything that is paged, what the whole parameter is otherwise. In the mesh of the sharded
DTensor, FSDP2's dimensions come first (replicas, if any, then shards), those of the earlier split after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

STAGE = "stage"
"""Name of the only dimension of the mesh over which FSDP2 shards a stage of a pipeline."""


def ranks_alike(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the ranks that have the same parameters, sharded over `mesh`: those of a stage; None for all ranks."""
    return mesh.get_group() if mesh.mesh_dim_names == (STAGE,) else None


def shard_ranks(sharded: DTensor) -> tuple[int, int]:
    """Return the number of ranks over which FSDP2 shards a parameter (or its part), and this rank's number."""
    dim = _shard_dim(sharded)
    return sharded.device_mesh.size(dim), sharded.device_mesh.get_local_rank(dim)


def copy_ranks(sharded: DTensor | DTensorSpec) -> int:
    """Return the number of ranks that share one copy of a parameter."""
    mesh = sharded.device_mesh
    return mesh.size() // mesh.size(0) if _shard_dim(sharded) else mesh.size()


def part_of(parameter: torch.Tensor, *, sharded: bool = True) -> tuple[torch.Size, int]:
    """Return the shape of what FSDP2 gathers, and its first row in the whole: [Note: Parts and shards]. `sharded`: False
    before `fully_shard`."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, 0
    ours = _shard_dim(parameter) + 1 if sharded else 0
    shape, start = _place(parameter, [Replicate()] * ours + [*parameter.placements[ours:]])
    return torch.Size(shape), start[0] if start else 0


def has_whole_rows(parameter: torch.Tensor) -> bool:
    """Return True if this rank's rows of the parameter, if any, are whole ones."""
    return not isinstance(parameter, DTensor) or parameter._local_tensor.shape[1:] == parameter.shape[1:]


def place_in_whole(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return this rank's place in the whole tensor, by dimension; all of it if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = _place(tensor, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def is_by_rows(sharded: DTensor) -> bool:
    """Return True if FSDP2 shards the parameter, or its part, by rows, and its rows are where the DTensor says."""
    dim = _shard_dim(sharded)
    rows = sharded.placements[dim] if dim < sharded.device_mesh.ndim else None
    if not isinstance(rows, (Shard, _StridedShard)) or rows.dim != 0:
        return False
    return _place(sharded, sharded.placements)[0] == tuple(sharded._local_tensor.shape) or not sharded.numel()


def as_sharded(local: torch.Tensor, like: DTensor | DTensorSpec) -> DTensor:
    """Return the tensor of which each rank has `local`, sharded as `like`."""
    spec = like._spec if isinstance(like, DTensor) else like
    assert spec.tensor_meta is not None
    if spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def _shard_dim(sharded: DTensor | DTensorSpec) -> int:
    return int(isinstance(sharded.placements[0], Replicate))


def _place(tensor: DTensor, placements: Sequence[Placement]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a shard with these placements, and its place in the whole."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
