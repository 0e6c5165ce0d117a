"""kill -9 at any instant, one rank of two too, and injected faults: a durable training resumes from its last committed step.

What it computes after that is what it would have computed, to the last bit. `INFINITY_KILLS` is how often a training is killed
at random (5 by default, more in `make torture`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import scene
import torch
import torch.distributed as dist
from campaign import Report, engines_fail, plan_for, run, seeds
from children import Nursery
from worse_drives import needs_test_build

import infinity

KILLS = int(os.environ.get("INFINITY_KILLS", "3"))
STEPS = 12
PATIENCE_SECONDS = 20
DEADLY = ("after its name", "after the older went") if KILLS < 50 else tuple(scene.INSTANTS)
"""The instants of a commit at which one rank of two is killed."""
WAYS = ("step", "forward", "backward", "speculative", "vertical", "Muon", "8-bit")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that are killed
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The losses of the same training held in memory, to the last bit, by the way of a step (they clip at different norms).
    Small moments are never in memory: for them, those of an uninterrupted run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = {}
        for way in WAYS:
            path = tmp_path_factory.mktemp("whole") if scene.WAYS[way].moments != "fp32" else None
            with scene.make(path, way) as engine:
                found[way] = [scene.step(engine, number).hex() for number in range(STEPS)]
        return found
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


class Trainings:
    """One training after another in the same folder, on one rank or two."""

    def __init__(self, nursery: Nursery, path: Path, way: str, ranks: int = 1) -> None:
        self.nursery, self.path, self.way, self.ranks = nursery, path, way, ranks

    def start(self, *, die: str = "", dying: int = 0) -> list[int]:
        """Its processes, by rank; `die`: where the one of rank `dying` kills itself."""
        common = [str(self.path), "--durable", "--way", self.way, "--steps", str(STEPS)]
        common += ["--ranks", str(self.ranks), "--port", str(free_port())]
        return [
            self.nursery.start(*common, "--rank", str(rank), *(["--die", die] if die and rank == dying else []))
            for rank in range(self.ranks)
        ]

    def end(self) -> list[str]:
        """Wait until all have ended: what they said."""
        return [line for _ in range(self.ranks) for line in self.nursery.until("end")]

    def losses(self) -> dict[int, set[str]]:
        """Go on to the last step, and by step: the losses that the ranks say."""
        self.start()
        found: dict[int, set[str]] = {}
        lines = self.end()
        for words in (line.split() for line in lines if line.startswith("step ")):
            found.setdefault(int(words[1]), set()).add(words[2])
        assert [line.split()[2] for line in lines if line.startswith("end ")] == ["0"] * self.ranks, lines
        return found

    def check(self, expected: list[str], *, at_least: int = 0) -> int:
        """Resume and check the end. Returns the step at which it resumed."""
        found = self.losses()
        first = min(found, default=STEPS)
        assert first >= at_least, f"at step {first} where {at_least} had been committed"
        assert found == {number: {expected[number]} for number in range(first, STEPS)}
        return first


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_killed_at_every_instant_of_a_commit(nursery: Nursery, nvme_path: Path, expected: dict[str, list[str]]) -> None:
    told = Counter[str]()
    for (number, instant), way in zip(enumerate(scene.INSTANTS), itertools.cycle(WAYS)):
        trainings = Trainings(nursery, nvme_path / str(number), way)
        trainings.start(die=f"{instant.replace(' ', '_')}:3")
        assert trainings.end()[-1].endswith(f" {-signal.SIGKILL}")
        committed = 3 if number >= list(scene.INSTANTS).index("after its name") else 2
        assert trainings.check(expected[way]) == committed, instant
        told[way] += 1
        shutil.rmtree(trainings.path)
    print(f"\nkilled at {len(scene.INSTANTS)} instants of a commit: all went on bit for bit {dict(told)}")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_killed_at_any_instant(nursery: Nursery, nvme_path: Path, expected: dict[str, list[str]]) -> None:
    draw = random.Random(0)
    began = time.monotonic()
    Trainings(nursery, nvme_path / "whole", "forward").start()
    nursery.until("step")
    stepping = time.monotonic()
    nursery.until("end")
    start_seconds, step_seconds = stepping - began, time.monotonic() - stepping
    resumed = Counter[int]()
    killed = 0
    for number in itertools.count():
        if killed >= KILLS:
            break
        trainings = Trainings(nursery, nvme_path / str(number), WAYS[number % len(WAYS)])
        committed = 0
        for _ in range(draw.randint(1, 3)):  # a resumed run may be killed again
            (process,) = trainings.start()
            lines = nursery.until("step", "end") if number % 4 else []
            time.sleep(draw.uniform(0, step_seconds if number % 4 else start_seconds))
            kill(process)
            if not lines or not lines[-1].startswith("end "):
                lines += trainings.end()
            killed += lines[-1].endswith(f" {-signal.SIGKILL}")  # it may have ended before
            said = [int(line.split()[1]) for line in lines if line.startswith("step ")]
            committed = max([committed, *said])  # the last loss is printed when the step before it is committed
        first = trainings.check(expected[trainings.way], at_least=committed)
        resumed[first] += 1
        shutil.rmtree(trainings.path)
    print(
        f"\nkilled {killed} times, {sum(resumed.values())} trainings: all went on bit for bit, by their step "
        f"{dict(sorted(resumed.items()))}"
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", ["forward", "Muon"])
def test_one_rank_of_two_killed(way: str, nursery: Nursery, nvme_path: Path) -> None:
    """In the middle of a commit, where the other rank may have made it or not; and at random, INFINITY_KILLS / 8 times."""
    draw = random.Random(1)
    said = Trainings(nursery, nvme_path / "whole", way, ranks=2).losses()
    expected = {number: next(iter(found)) for number, found in said.items()}
    assert len(said) == STEPS
    assert all(len(found) == 1 for found in said.values())  # both ranks see the whole batch
    resumed = Counter[int]()
    killed = 0
    for number in itertools.count():
        if killed >= len(DEADLY) + KILLS // 8:
            break
        die = DEADLY[number] if number < len(DEADLY) else ""
        trainings = Trainings(nursery, nvme_path / str(number), way, ranks=2)
        processes = trainings.start(die=die and f"{die.replace(' ', '_')}:3", dying=number % 2)
        lines = []
        if not die:
            for _ in range(draw.randint(1, STEPS)):
                lines += nursery.until("step", "end")
            time.sleep(draw.uniform(0, 0.05))
            kill(processes[number % 2])
        # What is left of a pair ends by itself, where it hears of it: it is not waited for longer than this.
        timer = threading.Timer(PATIENCE_SECONDS, kill, [processes[1 - number % 2]])
        timer.start()
        while sum(line.startswith("end ") for line in lines) < len(processes):
            lines += nursery.until("end")
        timer.cancel()
        ends = dict(line.split()[1:] for line in lines if line.startswith("end "))
        killed += ends[str(processes[number % 2])] == str(-signal.SIGKILL)  # it may have ended before
        found = trainings.losses()
        first = min(found, default=STEPS)
        assert found == {step: {expected[step]} for step in range(first, STEPS)}, f"after {die or 'a kill'}"
        assert not die or first in (2, 3)
        resumed[first] += 1
        shutil.rmtree(trainings.path)
    print(f"\nkilled one rank of two {killed} times: both went on bit for bit, by step {dict(sorted(resumed.items()))}")


@needs_test_build
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("one_rank")
def test_faults_leave_a_committed_step_to_go_on_from(nvme_path: Path, expected: dict[str, list[str]]) -> None:
    report = Report("durable training")
    ways = ("step", "forward", "vertical")
    last = {}
    for way in ways:
        with scene.make(None, way) as engine:
            for number in range(scene.STEPS):
                scene.step(engine, number)
            last[way] = scene.weights(engine)

    def one(seed: int) -> str:
        path = nvme_path / str(seed)
        way = ways[seed % len(ways)]
        first, outcome = 0, "right"
        with engines_fail(plan_for(seed, blocks=400)) as fault_counts:
            try:
                with make(path, way) as engine:
                    first = engine.global_steps
                    go_on(engine, expected[way])
            except infinity.InfinityError:
                outcome = "resumed after an error"
            faults = fault_counts()
            report.faults.update(faults)
        try:
            with make(path, way) as engine:
                assert engine.global_steps >= first
                go_on(engine, expected[way])
                found = scene.weights(engine)
                assert all(torch.equal(found[name], value) for name, value in last[way].items()), "a weight is wrong"
        except infinity.IntegrityError:  # a committed page that the drive lost or damaged, and that was not read since
            assert faults["lost"] + faults["corrupt"], "nothing was lost, and yet it is not there"
            outcome = "told that the drive lost a commit"
        shutil.rmtree(path)
        return outcome

    def make(path: Path, way: str) -> infinity.Engine:
        return scene.make(path, way, resume=True, durability="step")

    def go_on(engine: infinity.Engine, right: list[str]) -> None:
        while engine.global_steps < scene.STEPS:
            number = engine.global_steps
            loss = scene.step(engine, number).hex()
            assert loss == right[number], f"the loss of step {number} is {loss} instead of {right[number]}"

    run(report, seeds(3, share=0.1), one)
