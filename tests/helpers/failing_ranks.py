"""Two ranks of which one fails where the other doesn't: `failing_ranks.py WHAT FOLDER`."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import durable_training as training
import torch
import torch.distributed as dist
from durable_training import Case, Crash, make, step

import infinity
from infinity.deepspeed.tensor_fragment import safe_get_full_fp32_param, safe_get_full_optimizer_state
from infinity.fsdp2.sharding import gathered_groups, reshard
from infinity.ranks import peers
from infinity.swap.stager import Stager


def error_of(does: Any, *arguments: Any) -> str:
    """In words, and without the rank that a restated error begins with."""
    try:
        does(*arguments)
    except infinity.InfinityError as error:
        return f"{type(error).__name__}: {error}".replace("rank 1: ", "")
    return "none"


def same_everywhere(words: str) -> bool:
    everywhere = [""] * dist.get_world_size()
    dist.all_gather_object(everywhere, words)
    return len({*everywhere}) == 1


def client_state(folder: Path) -> None:
    """Rank 1 gives what can't be stored, to a step and to a commit; both are repeated with what can be."""
    dist.init_process_group("gloo")
    case = Case()
    bad = {"batches": object()} if dist.get_rank() == 1 else {"batches": 1}
    with make(folder / "whole", case, durability="none") as engine:
        expected = [step(engine) for _ in range(3)]
    with make(folder, case) as engine:
        engine.backward(engine(training.batch(0, 0)).square().sin().mean())
        engine.client_state = bad
        words = error_of(engine.step)
        assert "client_state can't be stored" in words, words
        assert same_everywhere(words) and engine.global_steps == 0
        engine.client_state = {"batches": 1}
        engine.step()
        words = error_of(engine.commit, bad)
        assert "client_state can't be stored" in words, words
        assert same_everywhere(words) and engine.client_state == {"batches": 1}
        assert step(engine) == expected[1]
    with make(folder, case, resume=True) as engine:
        assert engine.global_steps == 2 and engine.client_state == {"batches": 2}
        assert step(engine) == expected[2]
    print(f"rank {dist.get_rank()}: the same words, and went on", flush=True)
    dist.destroy_process_group()


def fail_on(engine: infinity.Engine, where: str) -> None:
    """From here on the read that `where` needs fails: in its pass, once."""
    acquire, failed = Stager.acquire, []
    running = []

    def acquiring(stager: Stager, chunk: Any, *arguments: Any, **named: Any) -> Any:
        if running and not failed:
            failed.append(chunk.name)
            raise infinity.IoError(f"{chunk.name}: no read today", errno.EIO)
        return acquire(stager, chunk, *arguments, **named)

    if where == "forward":
        engine.module.blocks[1].register_forward_pre_hook(lambda *_: running.append(True), prepend=True)
    elif where == "backward":
        engine.module.blocks[2].down.register_full_backward_hook(lambda *_: running.append(True))
    else:
        engine.optimizer.register_step_pre_hook(lambda *_: running.append(True))
    Stager.acquire = acquiring


def transfers(folder: Path) -> None:
    """A read of rank 1 fails in the pass that the third argument names, before the way to update. Both ranks end with the
    same error, until the job is started again."""
    where, update = sys.argv[3].split("-")
    case = Case(update=update, threshold=0)
    with make(folder / "whole", case, durability="none") as engine:
        expected = [step(engine) for _ in range(3)]
    acquire = Stager.acquire
    engine = make(folder, case)
    assert [step(engine), step(engine)] == expected[:2]
    rank = dist.get_rank()
    if rank == 1:
        fail_on(engine, where)
    words = error_of(take_steps, engine)
    print(f"rank {rank}: {words}", flush=True)
    Stager.acquire = acquire
    assert "no read today" in words, words
    assert "the ranks have parted, because a pass failed on rank 1" in error_of(step, engine)
    assert "the ranks have parted" in error_of(engine.commit)
    engine.close()  # and the process group, which is its own
    with make(folder, case, resume="must") as engine:
        assert step(engine) == expected[engine.global_steps - 1]


def take_steps(engine: infinity.Engine) -> None:
    for _ in range(3):
        step(engine)


def everywhere(folder: Path) -> None:
    """An error at the same place of all ranks leaves them in step."""
    with make(folder, Case(), durability="none") as engine:
        hook = engine.module.blocks[1].register_forward_hook(raise_crash)
        with contextlib.suppress(Crash):
            step(engine)
        hook.remove()
        assert not engine.peers.parted
        step(engine)
        print(f"rank {dist.get_rank()}: not parted", flush=True)


def gathered(folder: Path) -> None:
    """An error that comes on all ranks in the same place parts them where something is gathered on one of them only: the next
    pass would not gather it with the other."""
    with make(folder, Case(), durability="none") as engine:
        step(engine)
        engine(training.batch(1, 0))  # one that a backward may follow keeps the root gathered
        assert gathered_groups(engine.module)
        if dist.get_rank() == 1:
            reshard(engine.module)
        with contextlib.suppress(ValueError):
            engine.backward(torch.ones(2))
        words = error_of(step, engine)
        assert "the ranks have parted" in words, words
        print("parted", flush=True)


def apart(folder: Path) -> None:
    """Rank 1 repeats its step while rank 0 continues, or closes, as after an exception that came in rank 1's own lines. No
    number is given out, and both end soon, whatever their operations made of each other's bytes."""
    for begins_anew_after in ("forward", "backward"):
        engine = make(folder, Case(), durability="none")
        step(engine)
        loss = engine(training.batch(1, 0)).square().sin().mean()
        if begins_anew_after == "backward":
            engine.backward(loss)
        if dist.get_rank() == 1:
            engine.zero_grad()
            words = error_of(engine, training.batch(1, 0))
        elif begins_anew_after == "forward":
            words = error_of(engine.backward, loss)
        else:
            words = error_of(engine.step)
        assert "the ranks are in different passes" in words, words
        assert "the ranks have parted" in error_of(step, engine)
        engine.close()
    engine = make(folder, Case())
    step(engine)
    if dist.get_rank() == 1:
        try:
            raise Crash
        except Crash:
            engine.close()
    else:
        words = error_of(engine.close)
        assert "rank 0 in a close of step 1.1, rank 1 in a close after an error of step 1.1" in words, words
    print("told", flush=True)


def reads_alone(folder: Path) -> None:
    """Rank 0 alone makes a call that all ranks must make, while rank 1 takes a step: both are told."""
    calls: list[Callable[[infinity.Engine], Any]] = [
        lambda engine: engine.save_16bit_model(folder / "model"),
        lambda engine: engine._zero3_consolidated_16bit_state_dict(),
        lambda engine: next(engine.named_weights()),
        lambda engine: safe_get_full_fp32_param(next(engine.parameters())),
        lambda engine: safe_get_full_optimizer_state(next(engine.parameters()), "exp_avg"),
        lambda engine: engine.finish_checkpoint(),
    ]
    for call in calls:
        engine = make(folder, Case(), durability="none")
        step(engine)
        engine.save_checkpoint(folder / "checkpoints", format="arena")
        words = error_of(call if dist.get_rank() == 0 else step, engine)
        assert "the ranks are in different passes" in words, words
        assert "the ranks have parted" in error_of(step, engine)
        engine.close()
    print("told", flush=True)


def closed(folder: Path) -> None:
    """After a close, with which the process group has ended."""
    engine = make(folder, Case(), durability="none")
    engine.close()
    calls: list[Callable[[infinity.Engine], Any]] = [
        lambda engine: engine(torch.ones(4, 64)),
        lambda engine: engine.save_16bit_model(folder / "model"),
        lambda engine: engine.save_checkpoint(folder / "checkpoints"),
    ]
    for call in calls:
        assert "is closed" in error_of(call, engine)
    print("told", flush=True)


def served_no_more(folder: Path) -> None:
    """Rank 0, which serves the store, is gone before rank 1 closes, or when it has all but closed: nothing is amiss."""
    when, durability = sys.argv[3:5]
    engine = make(folder, Case(), durability=durability)
    step(engine)
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        if when == "before":
            wait_for_its_end(store)
        else:
            check_names, checked = peers.Peers._check_names, []

            def checking(*arguments: Any) -> None:
                checked.append(True)
                if len(checked) == 2:  # at the end of the pass
                    wait_for_its_end(store)
                check_names(*arguments)

            peers.Peers._check_names = checking
    engine.close()
    print("closed", flush=True)


def wait_for_its_end(store: dist.Store) -> None:
    with contextlib.suppress(dist.DistError):
        while True:
            store.check(["any"])
            time.sleep(0.01)


def raise_crash(*_: Any) -> None:
    raise Crash


def main() -> None:
    peers.GRACE_SECONDS = 1.0
    globals()[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
