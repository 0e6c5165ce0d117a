"""Under faults at random, whatever the seed: the right answer or an error in words; never a wrong number, a hang or a leak."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
import torch
from campaign import Report, engines_fail, plan_for, run, seeds
from scene import STEPS, make, step, weights
from worse_drives import needs_test_build

import infinity

TENSORS = 16
OPERATIONS = 40
SAVED_STEP = 2


@needs_test_build
@pytest.mark.timeout(0)  # each seed has its own alarm
def test_plain_tensors_come_back_as_they_were_stored(nvme_path: Path) -> None:
    report = Report("plain tensors")

    def one(seed: int) -> str:
        with engines_fail(plan_for(seed, blocks=60)) as fault_counts:
            swap = infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB", block_bytes=16 << 10, queue_depth=4)
            outcome = use_tensors(swap, random.Random(seed))
            if not closes(swap):
                outcome = "error"
            report.faults.update(fault_counts())
        assert not list(nvme_path.iterdir())
        return outcome

    run(report, seeds(16), one)


def use_tensors(swap: infinity.SwapManager, draw: random.Random) -> str:
    """Anything in any order; a tensor that can be read holds what was stored last. Whether all went well."""
    stored: dict[str, torch.Tensor] = {}
    outcome = "right"
    for number in range(OPERATIONS):
        names = sorted(stored)
        name = draw.choice(names) if names else ""
        act = draw.choice(["register", "use", "use", "update", "update", "prefetch", "flush", "fail"])
        try:
            if len(stored) < TENSORS and (act == "register" or not names):
                value = torch.full((draw.randrange(1, 300_000),), float(number))
                swap.tensors.register(f"tensor {number}", value)
                stored[f"tensor {number}"] = value
            elif act == "use":
                with swap.tensors.use(name) as tensor:
                    assert torch.equal(tensor, stored[name]), f"{name} is wrong"
            elif act == "update":
                with swap.tensors.update(name) as tensor:
                    assert torch.equal(tensor, stored[name]), f"{name} is wrong"
                    tensor.add_(1)
                    stored[name] = tensor.clone()
            elif act == "prefetch":
                swap.tensors.prefetch(name)
            elif act == "flush":
                swap.flush()
            elif act == "fail":  # an update that the user breaks off changes nothing
                with contextlib.suppress(ZeroDivisionError), swap.tensors.update(name) as tensor:
                    tensor.zero_()
                    raise ZeroDivisionError
        except infinity.InfinityError as error:
            outcome = told(error)
    assert swap._open().pool.leased_bytes == sum(
        entry.chunk.lease.nbytes for entry in swap._tensors.by_name.values() if entry.chunk.lease is not None
    )
    return outcome


def told(error: infinity.InfinityError) -> str:
    """The outcome of an error that says something."""
    assert str(error).strip(), f"{type(error).__name__} without a word"
    return "error"


def closes(swap: infinity.SwapManager) -> bool:
    """Whether closing told of no failure; either way nothing is left in the pool."""
    pool = swap._open().pool
    try:
        swap.close()
    except infinity.IoError:
        return False
    finally:
        assert pool.leased_bytes == 0
    return True


@needs_test_build
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("one_rank")
def test_training_gives_the_right_losses_or_an_error(nvme_path: Path, tmp_path: Path) -> None:
    report = Report("training")
    with make(None) as engine:  # the same in memory
        expected = [step(engine, number) for number in range(STEPS)]
        last = weights(engine)
    with make(nvme_path) as engine:
        for number in range(SAVED_STEP):
            step(engine, number)
        engine.save_checkpoint(tmp_path / "saved", tag="whole")

    def one(seed: int) -> str:
        with engines_fail(plan_for(seed, blocks=400)) as fault_counts:
            outcome = train(seed)
            report.faults.update(fault_counts())
        assert not list(nvme_path.iterdir())
        return outcome

    def train(seed: int) -> str:
        try:
            engine = make(nvme_path)
        except infinity.InfinityError as error:
            return told(error) + " at the start"
        assert engine.swap is not None
        pool = engine.swap._open().pool
        try:
            return train_or_resume(engine)
        finally:
            with contextlib.suppress(infinity.IoError):
                engine.close()
            assert pool.leased_bytes == 0

    def train_or_resume(engine: infinity.Engine) -> str:
        try:
            go_on(engine, 0)
            engine.save_checkpoint(tmp_path / "tried", tag="last")
        except infinity.InfinityError as error:
            told(error)
        else:
            return "right"
        try:
            engine.load_checkpoint(tmp_path / "saved", tag="whole")
            go_on(engine, SAVED_STEP)
        except infinity.InfinityError as error:
            return told(error) + " in training"
        return "right after loading"

    def go_on(engine: infinity.Engine, first: int) -> None:
        for number in range(first, STEPS):
            loss = step(engine, number)
            assert loss == expected[number], f"the loss of step {number} is {loss} instead of {expected[number]}"
        found = weights(engine)
        assert all(torch.equal(found[name], last[name]) for name in last), "a weight is wrong"

    run(report, seeds(8, share=0.1), one)
