"""Times a checkpoint in either format, and a copy of as many bytes on the same drive with direct I/O.

    python bench/checkpoint.py /local_nvme --params 200M --rounds 5

Every round takes a step without a checkpoint, then saves as "dcp", as "arena" alone, as "arena" while steps run, and
copies a file of as many bytes. `blocked`: duration of the call; `total`: time until the checkpoint had its name. Prints
a table and, last, one JSON line; --save appends it to bench/results/checkpoint.jsonl.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import machine, save

import infinity
from infinity.aio import File
from infinity.cli.synthetic import VOCABULARY, Transformer, shape_for
from infinity.store.arena import read_into
from infinity.units import MIB, parse_bytes, parse_count

PIECE_BYTES = 4 * MIB


def make(path: Path, numel: int, pinned_bytes: int) -> tuple[infinity.Engine, torch.Tensor]:
    place = {"device": "nvme", "nvme_path": str(path)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"pinned_bytes_max": pinned_bytes, "checkpoint_keep": 1},
    }
    engine, *_ = infinity.initialize(model=Transformer(shape_for(numel, seq=127)), config=config)
    return engine, torch.randint(0, VOCABULARY, (1, 128))


def step(engine: infinity.Engine, tokens: torch.Tensor) -> float:
    began = time.perf_counter()
    engine.backward(engine(tokens))
    engine.step()
    return time.perf_counter() - began


def saving(
    engine: infinity.Engine, folder: Path, form: str, step_meanwhile: Callable[[], float] | None = None
) -> dict[str, float]:
    """Return the seconds of the call, until the checkpoint was there, and of each step meanwhile."""
    began = time.perf_counter()
    engine.save_checkpoint(folder, tag=form, format=form)
    blocked = time.perf_counter() - began
    steps = []
    while step_meanwhile is not None and engine._checkpoints.saving is not None:
        steps.append(step_meanwhile())
    engine.finish_checkpoint()
    seconds = {"blocked": blocked, "total": time.perf_counter() - began}
    return seconds | ({"step_beside": statistics.mean(steps)} if steps else {})


def copying(source: Path, target: Path) -> float:
    """Return the seconds to copy a file with direct I/O, piece by piece, and to sync it."""
    began = time.perf_counter()
    target.unlink(missing_ok=True)
    target.touch()
    buffer = mmap.mmap(-1, PIECE_BYTES)
    nbytes = source.stat().st_size
    with File(str(source), read_only=True) as read, File(str(target)) as written:
        written.reserve(nbytes)
        for at in range(0, nbytes, PIECE_BYTES):
            piece = memoryview(buffer)[: min(PIECE_BYTES, nbytes - at)]
            read_into(read, piece, at)
            os.pwritev(written.fileno(), [piece], at)
        written.sync()
    return time.perf_counter() - began


def parsed(text: str, **defaults: Any) -> argparse.Namespace:
    """Return the options, and make the folder."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--params", type=parse_count, help=f"model size (default: {defaults['params']})")
    parser.add_argument("--pinned-bytes", type=parse_bytes)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--note", default="", help="stored with the numbers: what else the machine did")
    parser.add_argument("--save", action="store_true", help="append the result to bench/results")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    args.path.mkdir(parents=True, exist_ok=True)
    return args


def shown(numel: int, seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the spread of the seconds by name, printed as a table."""
    print(f"{numel / 1e6:.0f} M parameters, seconds: {'':18} min   median      max")
    spread = {}
    for name, values in seconds.items():
        spread[name] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        print(f"{name:>46} {min(values):7.3f} {statistics.median(values):8.3f} {max(values):8.3f}")
    return spread


def main() -> None:
    args = parsed(__doc__, params="200M", pinned_bytes="512MiB", rounds=5)
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.path))
    seconds: dict[str, list[float]] = {}
    nbytes = {}
    try:
        engine, tokens = make(folder, args.params, args.pinned_bytes)
        with engine:
            step(engine, tokens)
            for _ in range(args.rounds):
                taken = {"step": step(engine, tokens)}
                for name, form, step_meanwhile in (
                    ("dcp", "dcp", None),
                    ("arena", "arena", None),
                    ("arena_beside_steps", "arena", lambda: step(engine, tokens)),
                ):
                    saved = saving(engine, folder / "saved", form, step_meanwhile)
                    taken |= {f"{name}_{part}": value for part, value in saved.items()}
                    nbytes[form] = sum(file.stat().st_size for file in (folder / "saved" / form).iterdir())
                taken["copy"] = copying(folder / "saved" / "arena" / "rank0.arena", folder / "copy")
                (folder / "copy").unlink()
                for name, value in taken.items():
                    seconds.setdefault(name, []).append(value)
            numel = engine.numel
    finally:
        shutil.rmtree(folder)
    line = {
        "bench": "checkpoint",
        **machine(),
        "params": numel,
        "rounds": args.rounds,
        "nbytes": nbytes,
        "seconds": shown(numel, seconds),
    }
    line |= {"note": args.note} if args.note else {}
    if args.save:
        save("checkpoint", line)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
