"""Every stage and mesh against the same training by torch alone, bit for bit. Runs in the process of the tests, and as a
script of several ranks: `stages.py FOLDER NAME ...`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import infinity
from infinity.fsdp2.sharding import reshards_to_fewer_ranks

MICRO_BATCHES = 8
Outcome = tuple[list[float], list[torch.Tensor]]

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 1, state on the cpu": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "stage 2": {"stage": 2},
    "stage 2, state on the cpu": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "stage 3": {"stage": 3},
    **{
        f"stage 3, parameters on {parameters}, state on {state}": {
            "stage": 3,
            "offload_param": {"device": parameters},
            "offload_optimizer": {"device": state},
        }
        for parameters in ("none", "cpu", "nvme")
        for state in ("none", "cpu", "nvme")
        if (parameters, state) != ("none", "none")
    },
    "half the state on nvme": {"stage": 3, "offload_optimizer": {"device": "nvme", "ratio": 0.5}},
}
REPLICAS: dict[str, dict[str, Any]] = {
    "replicas": {"stage": 3, "mics_shard_size": 2},
    "replicas of stage 2": {"stage": 2, "mics_shard_size": 2},
    "whole replicas": {"stage": 3, "mics_shard_size": 1},
    "replicas on nvme": {
        "stage": 3,
        "mics_shard_size": 2,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme"},
    },
}
SECONDARY: dict[str, dict[str, Any]] = {"a second sharding": {"stage": 3, "zero_hpz_partition_size": 2}}


def model(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def with_engine(zero: dict[str, Any], folder: str, *, bf16: bool, accumulation: int, clipping: float) -> Outcome:
    zero = {**zero, "stage3_param_persistence_threshold": 0}
    for name in ("offload_param", "offload_optimizer"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name] = {**zero[name], "nvme_path": folder}
    config = {
        "bf16": {"enabled": bf16},
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "infinity": {"pinned_bytes_max": "16MiB"},
    }
    engine, *_ = infinity.initialize(model=model(), config=config)
    losses = []
    with engine:
        assert reshards_to_fewer_ranks(engine.module[1][0]) == ("zero_hpz_partition_size" in zero)
        for step in range(MICRO_BATCHES):
            loss = engine(batch(step)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, [p.data.full_tensor().clone() + 0 for p in engine.parameters()]


def with_torch(wrapped: nn.Module, *, accumulation: int, clipping: float) -> Outcome:
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(MICRO_BATCHES):
        loss = wrapped(batch(step)).float().square().mean()
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            if clipping:
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clipping)
            optimizer.step()
            optimizer.zero_grad()
    return losses, [full(p.data) for p in wrapped.parameters()]


def full(data: Any) -> torch.Tensor:
    return data.full_tensor() if hasattr(data, "full_tensor") else data


def ddp() -> nn.Module:
    """Nothing sharded, nothing of ours."""
    return DistributedDataParallel(model())


def fsdp2(*, dims: tuple[int, ...], reshard: bool | int, bf16: bool) -> nn.Module:
    names = ("replicate", "shard")[-len(dims) :]
    arguments: dict[str, Any] = {"mesh": init_device_mesh("cpu", dims, mesh_dim_names=names)}
    if bf16:
        arguments["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plain = model()
    for block in plain[1]:
        fully_shard(block, reshard_after_forward=reshard, **arguments)
    return fully_shard(plain, **arguments)


def differences(expected: Outcome, got: Outcome) -> list[str]:
    found = [f"loss {i}: {a!r}, {b!r}" for i, (a, b) in enumerate(zip(expected[0], got[0], strict=True)) if a != b]
    return found + [f"weight {i}" for i, (a, b) in enumerate(zip(expected[1], got[1], strict=True)) if not a.equal(b)]


def check(folder: str, names: list[str]) -> None:
    """Raises AssertionError naming the case and what differs."""
    ranks = dist.get_world_size()
    # DDP adds up in another order: accumulated gradients, and the squares of their norm.
    plain: dict[str, Any] = {"accumulation": 1, "clipping": 0.0} if ranks > 1 else {"accumulation": 2, "clipping": 0.1}
    expected = with_torch(ddp(), **plain)
    assert expected[0][0] != expected[0][-2]  # it learns
    for name in names:
        if name in CASES:
            wrong = differences(expected, with_engine(CASES[name], folder, bf16=False, **plain))
        else:
            zero = {**REPLICAS, **SECONDARY}[name]
            shards = zero.get("mics_shard_size", ranks)
            reshard = zero.get("zero_hpz_partition_size", True)
            dims = (ranks,) if shards == ranks else (ranks // shards, shards)
            whole: dict[str, Any] = {"accumulation": 2, "clipping": 0.1}
            stock = with_torch(fsdp2(dims=dims, reshard=reshard, bf16=True), **whole)
            wrong = differences(stock, with_engine(zero, folder, bf16=True, **whole))
        assert not wrong, f"{name}: {wrong[:5]}"
        print(f"rank {dist.get_rank()}, {name}: equal", flush=True)


def check_refusal(folder: str) -> None:
    """A second sharding lies in the memory of the device, which doesn't go with NVMe."""
    zero = {**SECONDARY["a second sharding"], "offload_param": {"device": "nvme"}}
    with pytest.raises(infinity.ConfigError, match="second sharding"):
        with_engine(zero, folder, bf16=True, accumulation=1, clipping=0.0)
    print(f"rank {dist.get_rank()}: refused", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check(sys.argv[1], sys.argv[2:])
    if dist.get_world_size() == 4:
        check_refusal(sys.argv[1])
    dist.destroy_process_group()
