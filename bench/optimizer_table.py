"""The table of docs/small_moments.md: compares steps of several optimizers and dtypes of their moments.

    python bench/optimizer_table.py --nvme-path /local_nvme --rounds 4 --save
    python bench/optimizer_table.py --params 40M --seq 64 --ways AdamW,AdamW:8bit,Muon

Each way, an optimizer and optionally a dtype of its moments, is measured by `infinity-bench step` in a process of its
own, with plain PyTorch with the same optimizer in memory, and the drive. The ways take turns, in an order that changes
from round to round; figures are medians over the rounds. Prints a table in Markdown and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from results import machine, save

from infinity.cli.arguments import count
from infinity.cli.program import run_program
from infinity.cli.step import OPTIMIZERS, norm
from infinity.schedule.scheme import MOMENT_BYTES_OF

FIGURES = (
    "seconds",
    "torch_in_memory_seconds",
    "drive_seconds",
    "cpu_seconds_per_step",
    "read_bytes_per_param",
    "written_bytes_per_param",
    "arena_bytes",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", default="200M", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=count, default=1, help="sequences (default: %(default)s)")
    parser.add_argument("--seq", type=count, default=16, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--clipping", type=norm, default=0.0, help="norm; 0 does not clip (default: %(default)s)")
    parser.add_argument("--ways", type=ways, default="AdamW,AdamW:bf16,AdamW:8bit", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=4, help="(default: %(default)s)")
    parser.add_argument("--nvme-path", default=str(Path(__file__).resolve().parent.parent / ".nvme"))
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/optimizer_table.jsonl")
    parser.set_defaults(func=run)
    return run_program(parser, None)


def ways(text: str) -> list[tuple[str, str]]:
    """Parse optimizers and dtypes of their moments."""
    pairs = [(name, dtype or "fp32") for name, _, dtype in (way.partition(":") for way in text.split(","))]
    for name, dtype in pairs:
        if name not in OPTIMIZERS or dtype not in MOMENT_BYTES_OF:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(OPTIMIZERS)}, and after a colon one of {', '.join(MOMENT_BYTES_OF)}, got {text!r}"
            )
    return pairs


def run(options: argparse.Namespace) -> int:
    measured: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    order = random.Random(0)
    for number in range(options.rounds):
        for way in order.sample(options.ways, len(options.ways)):
            measured[way].append(step(options, *way))
            seconds = measured[way][-1]["seconds"]
            print(f"round {number + 1} of {options.rounds}, {' '.join(way)}: {seconds:.3f} s", file=sys.stderr)
    medians = {
        " ".join(way): {figure: statistics.median(result[figure] for result in measured[way]) for figure in FIGURES}
        for way in options.ways
    }
    show(medians, next(iter(measured.values()))[0]["params"])
    line = {
        "bench": "optimizer_table",
        **machine(),
        "params": options.params,
        "tokens": f"{options.batch_size}x{options.seq}",
        "clipping": options.clipping,
        "rounds": options.rounds,
        "ways": medians,
    }
    print(json.dumps(line))
    if options.save:
        save("optimizer_table", line)
    return 0


def step(options: argparse.Namespace, optimizer: str, dtype: str) -> dict[str, Any]:
    """Return the result of `infinity-bench step` for one way."""
    command = [sys.executable, "-m", "infinity.cli.bench", "step", "--json", "-", "--params", options.params]
    command += [options.nvme_path, "--batch-size", str(options.batch_size), "--seq", str(options.seq)]
    command += ["--clipping", str(options.clipping), "--optimizer", optimizer, "--moments-dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def show(medians: dict[str, dict[str, float]], numel: int) -> None:
    columns = (
        "",
        "step",
        "faster",
        "plain PyTorch",
        "drive time",
        "over lower bound",
        "read",
        "written",
        "state",
    )
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    first = next(iter(medians.values()))["seconds"]
    for name, of_way in medians.items():
        longer = max(of_way["torch_in_memory_seconds"], of_way["drive_seconds"])
        cells = (
            name,
            f"{of_way['seconds']:.2f} s",
            f"{first / of_way['seconds']:.2f} x",
            f"{of_way['torch_in_memory_seconds']:.2f} s",
            f"{of_way['drive_seconds']:.2f} s",
            f"{of_way['seconds'] / longer:.2f}",
            f"{of_way['read_bytes_per_param']:.2f} B",
            f"{of_way['written_bytes_per_param']:.2f} B",
            f"{of_way['arena_bytes'] / numel:.2f} B",
        )
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
