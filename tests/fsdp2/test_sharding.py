"""What is asked of an FSDP2 model before it is paged, in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import infinity
from infinity.fsdp2.sharding import sharded_groups


@pytest.fixture
def _four_ranks() -> Iterator[None]:
    """This process believes to be one of four; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_four_ranks")
def test_resharding_over_fewer_ranks_is_refused(nvme_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    with (
        infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap,
        pytest.raises(infinity.ConfigError, match=r"reshard_after_forward=<number of ranks> .* pass True or False"),
    ):
        swap.page(model)
    assert all(type(p.data._local_tensor) is torch.Tensor for p in model.parameters())


@pytest.mark.usefixtures("_four_ranks")
@pytest.mark.parametrize(("root", "gathers"), [(None, 1), (False, 1), (True, 2)])
def test_what_stays_gathered_until_backward_is_gathered_once(root: bool | None, gathers: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=root)
    found = {group.name: group.gathers for group in sharded_groups(model)}
    assert found == {"root": gathers, "0": 2, "1": 1}
