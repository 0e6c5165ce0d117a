"""A training on a mesh of 2 x 2 ranks that kill -9 ends, and that continues there or on another mesh. A script of several
ranks: `killed_mesh.py FOLDER DO`.

memory: trains by torch alone, and saves its own checkpoint after FIRST steps. One of PLACES: trains, and kills all ranks there.
resume: continues from the last commit, on the same mesh. elsewhere: continues from the last checkpoint, on four ranks without a
split, or on two that both split the model.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from two_dimensions import Layer, Outcome, batch, check, clip, config, gpt, make, shard, split_gpt, whole

import infinity
from infinity.checkpoint import dcp as checkpoints

FIRST, LAST, END = 2, 3, 6
"""Steps before the checkpoint, before the step or save that is killed, and of the whole training."""
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (Layer, "forward"),
    "commit": (Path, "rename"),
    "save": (checkpoints, "write_durably"),
}
"""Whose call rank 1 doesn't come back from."""


def rows(step: int, data: DeviceMesh) -> torch.Tensor:
    """This rank's rows of the step's batch, which is the same on all meshes."""
    return torch.cat([batch(step, 0), batch(step, 1)]).chunk(data.size())[data.get_local_rank()]


def settings(folder: str, mesh: DeviceMesh, **own: Any) -> dict[str, Any]:
    asked = config(folder, "backward", 0.5) | {"train_micro_batch_size_per_gpu": 4 // mesh["data"].size()}
    asked["infinity"] |= {"wrap": ["Layer"], **own}
    return asked


def by_torch(model: nn.Module, mesh: DeviceMesh, first: int, place: str) -> Outcome:
    """Train to the end, after the step FIRST from the checkpoint in `place`, or writing it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(first, END):
        if step == FIRST:
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            (dcp.save if first == 0 else dcp.load)(state, checkpoint_id=place)
            for of_parameter in optimizer.state.values():
                of_parameter["step"].fill_(FIRST)
        loss = model(rows(step, mesh["data"]))
        loss.backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, whole(model)


def train(engine: infinity.Engine, mesh: DeviceMesh, end: int) -> Outcome:
    losses = []
    while engine.global_steps < end:
        loss = engine(rows(engine.global_steps, mesh["data"]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: values.clone() for name, values in whole(engine.module).items()}


def kill_at(owner: Any, name: str) -> None:
    """From now on, this call on rank 1 ends all ranks at once, in any of their lines."""
    original = getattr(owner, name)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            os.killpg(0, signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)


def die(folder: str, mesh: DeviceMesh, place: str) -> None:
    engine = make(split_gpt(mesh), settings(folder, mesh, durability="step"), mesh=mesh)
    train(engine, mesh, FIRST)
    engine.save_checkpoint(f"{folder}/checkpoints")
    train(engine, mesh, LAST)
    kill_at(*PLACES[place])
    if place == "save":
        engine.save_checkpoint(f"{folder}/checkpoints")
    train(engine, mesh, LAST + 1)
    raise AssertionError("not killed")


def resume(folder: str, mesh: DeviceMesh) -> None:
    expected: Outcome = torch.load(f"{folder}/expected{dist.get_rank()}.pt")
    with make(split_gpt(mesh), settings(folder, mesh, durability="step"), mesh=mesh, resume="must") as engine:
        first = engine.global_steps
        assert LAST - 1 <= first <= LAST
        losses, values = train(engine, mesh, END)
    check((expected[0][first:], expected[1]), (losses, values), "the run that continued")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/infinity-durable-run")


def continue_elsewhere(folder: str, mesh: DeviceMesh, *, split: bool) -> None:
    def build() -> nn.Module:
        return split_gpt(mesh) if split else gpt()

    expected = by_torch(shard(build(), mesh), mesh, FIRST, f"{folder}/by torch")
    with make(build(), settings(folder, mesh), mesh=mesh if split else None) as engine:
        engine.load_checkpoint(f"{folder}/checkpoints")
        assert engine.global_steps == FIRST
        check(expected, train(engine, mesh, END), f"the run that continued elsewhere, on {mesh}")


def main(folder: str, do: str) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
    if do == "memory":
        outcome = by_torch(shard(split_gpt(mesh), mesh), mesh, 0, f"{folder}/by torch")
        torch.save(outcome, f"{folder}/expected{dist.get_rank()}.pt")
    elif do in PLACES:
        die(folder, mesh, do)
    elif do == "resume":
        resume(folder, mesh)
    elif ranks == 4:
        continue_elsewhere(folder, init_device_mesh("cpu", (4,), mesh_dim_names=("data",)), split=False)
    else:
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "tensor"))
        continue_elsewhere(folder, mesh, split=True)
    print(f"rank {dist.get_rank()}, {do}: equal", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()
