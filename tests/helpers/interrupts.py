"""Exceptions at any line of infinity's own code, and a training that catches them and continues.

Afterwards its numbers equal those of an uninterrupted run. Or it is rejected with an error, and the last commit or
checkpoint can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import scene
import torch
from staying import share_of, staying

import infinity

OURS = str(Path(infinity.__file__).parent) + os.sep
FSDP2 = str(Path(torch.__file__).parent / "distributed" / "fsdp") + os.sep
STEPS = 4
SAVED_STEP = 1


@dataclass(frozen=True)
class Training:
    """One way to train `scene.Model`; `place`: "memory" or "nvme"; `schedule`: of `train_batch`; "loop"; "rounds" of two
    micro-batches at once; or "split", a loop over batches that the engine splits."""

    place: str = "memory"
    update: str = "auto"
    durable: bool = False
    accumulation: int = 1
    clipping: float = 0.0
    cached: bool = False
    activations: bool = False
    schedule: str = "loop"

    @property
    def oracle(self) -> Training:
        """The same held in memory."""
        schedule = "loop" if self.schedule == "loop" else "horizontal"
        return Training("memory", accumulation=self.accumulation, clipping=self.clipping, schedule=schedule)

    def config(self, folder: Path) -> dict[str, Any]:
        config = scene.config(folder if self.place == "nvme" else None, scene.Way(self.update, self.clipping))
        config |= {"gradient_accumulation_steps": self.accumulation}
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
        if self.schedule == "split":
            config |= {"gradient_accumulation_steps": 1}
            config["infinity"] |= {"micro_batches": self.accumulation}
        elif self.schedule == "rounds":
            config["infinity"] |= {"schedule": "vertical", "micro_batches_at_once": 2}
        elif self.schedule != "loop":
            config["infinity"] |= {"schedule": self.schedule}
        if self.durable:
            config["infinity"] |= {"durability": "step"}
        if self.cached:
            config["infinity"] |= {"host_cache_bytes": 100_000}
        if self.activations:
            config["infinity"] |= {"offload_activations": {"device": "nvme", "bytes_min": 100, "buffer_bytes": "1MiB"}}
        return config

    @staticmethod
    def drawn(draw: random.Random) -> Training:
        """Any of them."""
        clipping = draw.choice([0.0, 0.5, 7.0])
        accumulation = draw.choice([1, 1, 2])
        if draw.random() < 0.15:
            return Training(accumulation=accumulation, clipping=clipping)
        update = draw.choice(["step", "forward", "backward"])
        if update == "backward" and draw.random() < 0.5:
            clipping, accumulation = 0.0, 1
        durable = draw.random() < 0.4
        cached = not durable and draw.random() < 0.25
        activations = not durable and draw.random() < 0.25
        schedule = draw.choice(["loop", "loop", "vertical", "auto", "rounds", "split"])
        if schedule != "loop":
            accumulation = 4 if schedule == "rounds" else draw.choice([2, 3])
        return Training("nvme", update, durable, accumulation, clipping, cached, activations, schedule)

    @property
    def acts(self) -> list[str]:
        """What one step does, in order."""
        if self.schedule != "loop":
            return ["evaluate", "train"]
        passes = [f"{act} {number}" for number in range(self.accumulation) for act in ("forward", "backward")]
        exact = (
            self.clipping == 0.0 and self.accumulation == 1
        )  # else the step accepts or discards what the backward did
        between = [] if self.update == "backward" and exact else ["evaluate between"]
        return ["evaluate", *passes, *between, "step"]


class Run:
    """One training: an engine, and what its steps gave."""

    def __init__(self, training: Training, folder: Path, *, resume: bool = False) -> None:
        self.training = training
        torch.manual_seed(0)
        config = training.config(folder)
        with staying(share_of(training)):
            self.engine, *_ = infinity.initialize(model=scene.Model(), config=config, resume=resume)
        self.losses: dict[tuple[int, str], float] = {}
        self._loss = torch.zeros(())

    def act(self, act: str) -> None:
        """One act of the step that is due."""
        engine, number = self.engine, self.engine.global_steps
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * number + len(act)))
        if act.startswith("forward"):
            self._loss = engine(x).float().square().mean()
            self.losses[number, act] = self._loss.item()
        elif act.startswith("backward"):
            engine.backward(self._loss)
        elif act == "step":
            engine.step()
        elif act == "train" and self.training.schedule == "split":
            whole = {"x": torch.cat([x + k for k in range(self.training.accumulation)])}
            engine.backward(engine.loss_in_parts(lambda f, x: f(x).float().square().mean(), whole, summed=False))
            engine.step()
        elif act == "train":
            data = iter([(x + k, None) for k in range(self.training.accumulation)])
            mean = engine.train_batch(data, loss_fn=lambda y, _: y.float().square().mean())
            self.losses[number, act] = mean.item()
        else:
            engine.eval()
            try:
                with torch.no_grad():
                    self.losses[number, act] = engine(x).float().square().mean().item()
            finally:
                engine.train()

    def step(self) -> None:
        """One step."""
        for act in self.training.acts:
            self.act(act)

    def finish(self) -> Result:
        """All steps that are left; what came of them."""
        while self.engine.global_steps < STEPS:
            self.step()
        return Result(dict(self.losses), scene.weights(self.engine))


@dataclass(frozen=True)
class Result:
    losses: dict[tuple[int, str], float]
    weights: dict[str, torch.Tensor]

    def check(self, expected: Result) -> None:
        """Raises AssertionError where a number of it is another than expected; some steps may be of another run."""
        assert self.losses.keys() <= expected.losses.keys()
        for key, loss in self.losses.items():
            assert loss == expected.losses[key], f"the loss of step {key[0]}, {key[1]}"
        assert self.weights.keys() == expected.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, expected.weights[name]), f"weight {name}"


class Lines:
    """Counts the lines of a package that run in its block, and raises `error` at one of them (None: at none)."""

    def __init__(
        self, package: str, at: int | None = None, error: Callable[[], BaseException] = KeyboardInterrupt
    ) -> None:
        self.seen = 0
        self.where = ""
        self._package, self._at, self._error = package, at, error

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._package) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self._at:
                self.where = f"{frame.f_code.co_filename.removeprefix(self._package)}:{frame.f_lineno}"
                raise self._error()
        return self._line


_results: dict[Training, Result] = {}
_lines: dict[tuple[Training, int, str, str], int] = {}


def expected(training: Training, folder: Path) -> Result:
    """Of a run that nothing interrupts, held in memory."""
    oracle = training.oracle
    if oracle not in _results:
        run = Run(oracle, folder)
        _results[oracle] = run.finish()
        run.engine.close()
    return _results[oracle]


def lines(training: Training, step: int, act: str, package: str, folder: Path) -> int:
    """How many lines of a package an act runs in a run that nothing interrupts."""
    if (training, 0, "step", package) not in _lines:
        run = Run(training, folder)
        while (number := run.engine.global_steps) < STEPS:
            for each in training.acts:
                counter = Lines(package)
                with counter.traced():
                    run.act(each)
                _lines[training, number, each, package] = counter.seen
            if number + 1 == SAVED_STEP and not training.durable:
                run.engine.save_checkpoint(folder / "checkpoint of the count")
        run.engine.close()
        remove_run(folder)
    return _lines[training, step, act, package]


def remove_run(folder: Path) -> None:
    """What a durable run and its checkpoints leave."""
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def trial(seed: int, folder: Path, tell: Callable[[str], None] = lambda line: None) -> str:
    """One training that is interrupted once; the outcome in a word. Raises AssertionError for a number that is wrong."""
    draw = random.Random(seed)
    training = Training.drawn(draw)
    right = expected(training, folder)
    number, act = draw.randrange(SAVED_STEP, STEPS), draw.choice(training.acts)
    package = FSDP2 if draw.random() < 0.25 else OURS
    at = draw.randrange(1, 1 + lines(training, number, act, package, folder))
    kind = KeyboardInterrupt if draw.random() < 0.8 else MemoryError
    injected = Lines(package, at, kind)
    run = Run(training, folder)
    try:
        while run.engine.global_steps < SAVED_STEP:
            run.step()
        if not training.durable:
            run.engine.save_checkpoint(folder)
        while run.engine.global_steps < number:
            run.step()
        outcome = "finished"
        try:
            for each in training.acts:
                with injected.traced() if each == act else contextlib.nullcontext():
                    run.act(each)
        except kind:
            outcome = "went on"
        tell(f"seed {seed}: {training}, step {number}, {act}, line {at} ({injected.where}): {kind.__name__}")
        try:
            if outcome == "went on":
                run.engine.zero_grad()
            result = run.finish()
        except infinity.InfinityError as error:
            refusal = str(error)
            assert len(refusal.split()) > 5, "a refusal without words"
            tell(f"  refused: {type(error).__name__}: {refusal}")
            outcome = "refused"
            if training.durable:
                with contextlib.suppress(infinity.InfinityError):
                    run.engine.close()
                run = Run(training, folder, resume=True)
            else:
                run.engine.load_checkpoint(folder)
            result = run.finish()
        result.check(right)
    finally:
        with contextlib.suppress(infinity.InfinityError):
            run.engine.close()
        remove_run(folder)
    return outcome


if __name__ == "__main__":
    import logging

    logging.getLogger("infinity").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for one in range(int(sys.argv[2]), int(sys.argv[3])):
        place = Path(sys.argv[1]) / f"seed-{one}"
        place.mkdir(parents=True)
        print(trial(one, place, print), flush=True)
        place.rmdir()
