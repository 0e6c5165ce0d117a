"""Arena checkpoints of several ranks, and of a process that is killed, or just ends:
`arena_checkpoints.py SCENE NVME CHECKPOINTS [INSTANT]`.

Used by the tests, under torchrun or by itself.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import durable_training
import torch
import torch.distributed as dist
from durable_training import CASES, Case, Outcome, config, differences, step, weights

import infinity
from infinity.checkpoint import arena as checkpoint_arena
from infinity.checkpoint import draft as checkpoint_draft
from infinity.store import arena_copy as copying

SAVED, END = 2, 4
CASE = CASES["forward"]


def make(path: Path, case: Case, *, shards: int = -1) -> infinity.Engine:
    torch.manual_seed(0)
    settings = config(path, case, durability="none", checkpoint_format="arena")
    settings["zero_optimization"]["mics_shard_size"] = shards
    return infinity.initialize(model=durable_training.Model(case), config=settings)[0]


def masters(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights(engine).items() if "norm" not in name}


def save(nvme: Path, folder: Path) -> None:
    """Save, and go on from it with the same ranks: where the state lies alike, and where it doesn't."""
    with make(nvme, CASE) as engine:
        while engine.global_steps < SAVED:
            step(engine)
        saved = masters(engine)
        engine.save_checkpoint(folder, tag="two", client_state={"rank": dist.get_rank()})
        expected = go_on(engine)
    wrong = []
    for case in (CASE, replace(CASE, sub_group_size=2048, master="full")):
        with make(nvme, case) as engine:
            _, state = engine.load_checkpoint(folder)
            assert state == {"rank": dist.get_rank()}
            wrong += differences(expected, go_on(engine))
    with make(nvme, CASE, shards=1) as engine:  # two of everything: stored once
        step(engine)
        replicated = masters(engine)
        engine.save_checkpoint(folder / "replicas", tag="one")
        expected = go_on(engine)
    stored = sorted(each.name for each in (folder / "replicas" / "one").iterdir())
    assert stored == ["manifest.json", "rank0.arena", "rank0.record", "rank1.record"]
    for shards in (1, 2):
        with make(nvme, CASE, shards=shards) as engine:
            engine.load_checkpoint(folder / "replicas")
            found = masters(engine)
            wrong += [name for name in replicated if not torch.equal(replicated[name], found[name])]
            wrong += differences(expected, go_on(engine)) if shards == 1 else []  # sums are of other slots otherwise
    if dist.get_rank() == 0:
        torch.save(saved, folder / "saved.pt")
    print(f"rank {dist.get_rank()}: {wrong[:3] or 'equal'}", flush=True)


def load(nvme: Path, folder: Path) -> None:
    """Load what another number of ranks saved: the same masters, and moments with which they go on."""
    with make(nvme, CASE) as engine:
        engine.load_checkpoint(folder)
        assert engine.global_steps == SAVED
        found = masters(engine)
        saved = torch.load(folder / "saved.pt", weights_only=True)
        wrong = [name for name in saved if not torch.equal(saved[name], found[name])]
        moments = moments_of(engine)
        engine.save_checkpoint(folder, tag=f"by-{dist.get_world_size()}")
        engine.finish_checkpoint()
        step(engine)
        engine.load_checkpoint(folder)
        wrong += [name for name, moment in moments_of(engine).items() if not torch.equal(moment, moments[name])]
        assert any(moment.any() for moment in moments.values())
    print(f"rank {dist.get_rank()}: {wrong[:3] or 'equal'}", flush=True)


def moments_of(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in engine.optimizer.state.get(parameter, {}):
                found[f"{name} {moment}"] = engine.optimizer.state[parameter][moment].full_tensor() + 0
    return found


def go_on(engine: infinity.Engine) -> Outcome:
    losses = []
    while engine.global_steps < END:
        losses.append(step(engine))
    return losses, weights(engine)


def left(nvme: Path, folder: Path) -> None:
    """The program ends right after the save, as argv[4] says, and nothing is copied before its exit functions run."""
    may = threading.Event()
    copy_source = copying.Copying._copy_source

    def hold_up(own: copying.Copying, *arguments: Any) -> None:
        may.wait(60)
        copy_source(own, *arguments)

    engine = make(nvme, CASE)
    step(engine)
    engine.save_checkpoint(folder, tag="good")
    engine.finish_checkpoint()
    step(engine)
    copying.Copying._copy_source = hold_up  # type: ignore[method-assign]
    assert engine.save_checkpoint(folder, tag="next", client_state={"rank": dist.get_rank()})
    engine.global_steps += 1  # what comes after the save
    atexit.register(may.set)
    if sys.argv[4] == "one is gone" and dist.get_rank() == 1:
        os._exit(0)
    if sys.argv[4] == "error":
        raise ZeroDivisionError
    dist.destroy_process_group()


INSTANTS = {
    "piece": (copying, "_put"),
    "record": (checkpoint_arena, "write_durably"),
    "manifest": (checkpoint_draft, "write_durably"),
    "name": (checkpoint_draft, "sync"),
    "latest": (checkpoint_draft, "_rename_latest"),
}
"""Before what a save is killed."""


def killed(nvme: Path, folder: Path) -> None:
    """Killed in the middle of a save, with a whole checkpoint there."""
    engine = make(nvme, CASE)
    step(engine)
    engine.save_checkpoint(folder, tag="good")
    engine.finish_checkpoint()

    def kill(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    step(engine)
    module, name = INSTANTS[sys.argv[4]]
    if module is not checkpoint_draft:
        setattr(module, name, kill)
    engine.save_checkpoint(folder, tag="next")
    setattr(module, name, kill)
    engine.finish_checkpoint()


if __name__ == "__main__":
    if "ALONE_SECONDS" in os.environ and sys.argv[4] == "one is gone":
        checkpoint_arena.ALONE_SECONDS_MIN = float(os.environ["ALONE_SECONDS"])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    if dist.is_initialized():
        dist.destroy_process_group()
