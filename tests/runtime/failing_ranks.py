"""Two ranks of which one fails where the other doesn't: `failing_ranks.py WHAT FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import durable_training as training
import torch.distributed as dist
from durable_training import Case, make, step

import infinity


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


def main() -> None:
    dist.init_process_group("gloo")
    {"client_state": client_state}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
