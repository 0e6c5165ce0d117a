"""Exceptions at any line, on one rank of two or on both: `interrupt_ranks.py FOLDER FIRST COUNT` under a launcher.

Each rank catches every exception and continues as long as it may. The results of both equal an uninterrupted run in
memory. Or both are rejected with an error, and a fresh start resumes from the last commit or checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from interrupts import FSDP2, OURS, SAVED_STEP, STEPS, Lines, Result, Run, Training, remove_run

import infinity
from infinity.ranks import peers

RANKS = 2
GROUPS = count()
RIGHT: dict[Training, Result] = {}


def main() -> None:
    torch.set_num_threads(1)
    peers.GRACE_SECONDS = 1.0
    folder, first, seeds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("localhost", port, RANKS, is_master=rank == 0, wait_for_workers=False)
    for seed in range(first, first + seeds):
        outcome = in_a_thread(Trial(seed, folder / f"seed {seed}", rank, store).run)
        if rank == 0:
            os.write(1, f"outcome {outcome}\n".encode())


def in_a_thread(run: Callable[[], str]) -> str:
    """An exception that a trace raises as a handler begins stays in `sys.exc_info()` as long as the thread lives, which no
    signal's does; what closes an engine asks there whether an error is being handled."""
    outcomes, errors = [], []

    def running() -> None:
        try:
            outcomes.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=running)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return outcomes[0]


class Trial:
    """One seed, as one rank sees it."""

    def __init__(self, seed: int, folder: Path, rank: int, store: dist.Store) -> None:
        self._draw = random.Random(seed)
        self.seed, self._folder, self._rank, self._store = seed, folder, rank, store
        folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> str:
        """The outcome in a word."""
        draw = self._draw
        training = Training.drawn(draw)
        if training.oracle not in RIGHT:
            with self._group():
                expected = Run(training.oracle, self._folder)
                RIGHT[training.oracle] = expected.finish()
                expected.engine.close()
        number, act = draw.randrange(SAVED_STEP, STEPS), draw.choice(training.acts)
        package = FSDP2 if draw.random() < 0.2 else OURS
        outcome = self._interrupted(training, number, act, package, self._share())
        if outcome == "refused":
            with self._group():
                run = Run(training, self._folder, resume=training.durable)
                if not training.durable:
                    run.engine.load_checkpoint(self._folder)
                self._result = run.finish()
                run.engine.close()
        self._result.check(RIGHT[training.oracle])
        self._store.set(f"outcome {self.seed} {self._rank}", outcome)
        other = self._store.get(f"outcome {self.seed} {1 - self._rank}").decode()
        assert other == outcome, f"seed {self.seed}: rank {self._rank} {outcome}, the other {other}"
        if self._rank == 0:
            remove_run(self._folder)
        return outcome

    def _share(self) -> float | None:
        """How much of the act has run when the exception comes; None on a rank to which none comes."""
        who, share = self._draw.choice(["one", "both", "both, elsewhere"]), self._draw.random()
        one = self._draw.randrange(RANKS)
        if who == "both, elsewhere":
            return random.Random(100 * self.seed + self._rank).random()
        return share if who == "both" or self._rank == one else None

    def _interrupted(self, training: Training, number: int, act: str, package: str, share: float | None) -> str:
        """What became of the run: "went on", or "refused"."""
        with self._group(), contextlib.ExitStack() as closing:
            run = Run(training, self._folder)
            closing.callback(_close, run)
            counted = Lines(package)
            try:
                while (step := run.engine.global_steps) < number:
                    if step == SAVED_STEP and not training.durable:
                        run.engine.save_checkpoint(self._folder)
                    for each in training.acts:
                        with counted.traced() if (step, each) == (number - 1, act) else contextlib.nullcontext():
                            run.act(each)
                if number == SAVED_STEP and not training.durable:
                    run.engine.save_checkpoint(self._folder)
                injected = Lines(package, None if share is None else 1 + int(share * counted.seen))
                try:
                    for each in training.acts:
                        with injected.traced() if each == act else contextlib.nullcontext():
                            run.act(each)
                except KeyboardInterrupt:
                    run.engine.zero_grad()
                self._result = run.finish()
            except infinity.InfinityError as error:
                refusal = str(error)
                assert len(refusal.split()) > 3, "a refusal without words"
                return "refused"
            except RuntimeError as error:  # the other one was ended by its last pass, and this one only looks
                if "Connection closed" not in str(error):
                    raise
                return "refused"
        return "went on"

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        store = dist.PrefixStore(f"group {next(GROUPS)}", self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=RANKS)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _close(run: Run) -> None:
    with contextlib.suppress(Exception):  # the ranks may have parted
        run.engine.close()


if __name__ == "__main__":
    main()
