"""The table "Why not just swap space" of docs/performance.md: steps within a limit of memory, by other means.

    python bench/alternatives.py --nvme-path /local_nvme --deepspeed-python ../ds/bin/python --save
    python bench/alternatives.py --params 1B --memory-limit 4.4GiB --rounds 2

Each way steps the same model alone, in a control group with the limit; plain PyTorch in memory has none, and is the
reference for losses. Swap space is a file on the same drive, which is made for the run (as root). Prints the table in
Markdown and, last, one JSON line; --save appends that to bench/results/alternatives.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results import save
from step import checked, make_parser, measure

from infinity.cli.program import run_program
from infinity.errors import InfinityError
from infinity.units import parse_bytes, parse_count

NAMES = {
    "torch": "plain PyTorch, without a limit",
    "torch-swapped": "plain PyTorch with swap space on the same drive",
    "torch-mapped": "plain PyTorch, states in memory-mapped files (`torch.from_file`)",
    "fsdp2": "FSDP2 with `CPUOffloadPolicy`",
    "deepspeed": "DeepSpeed ZeRO-3, all on NVMe",
    "auto": "infinity",
}
COLUMNS = ("", "seconds a step", "over infinity", "peak resident memory", "loss as plain PyTorch's")


def main() -> int:
    parser = make_parser("alternatives")
    parser.description = __doc__.split("\n\n")[0]
    parser.add_argument(
        "--swap",
        type=checked(parse_bytes, at_least=1 << 20),
        help="size of the swap space (default: 20 bytes per parameter)",
    )
    parser.set_defaults(
        func=run,
        ways=",".join(way for way in NAMES if way != "deepspeed"),
        params="200M",
        memory_limit="1GiB",
        pinned_bytes_max="128MiB",
        batch_size=2,
        context=128,
        clipping=0.0,
        rounds=4,
        alone=True,
    )
    return run_program(parser, None)


def run(options: argparse.Namespace) -> int:
    """Measure; print the table."""
    Path(options.nvme_path).mkdir(parents=True, exist_ok=True)
    nbytes = parse_bytes(options.swap) if options.swap else 20 * parse_count(options.params)
    with swap_space(options.nvme_path, nbytes) if "torch-swapped" in options.ways else contextlib.nullcontext():
        line = {**measure(options), "bench": "alternatives", "swap_bytes": nbytes}
    rows = [COLUMNS, ("---",) * len(COLUMNS), *rows_of(line["ways"])]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(json.dumps(line))
    if options.save:
        save("alternatives", line)
    return 0


def rows_of(ways: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return the rows of the table. Standard error has the reason why a way was left out."""
    ours, plain = ways.get("auto"), ways.get("torch")
    for way in ways:
        name = NAMES.get(way, way)
        if (measured := ways[way]) is None:
            yield name, "left out", "", "", ""
            continue
        same = ""
        if plain is not None and "times_multiplied_by" not in plain:  # else that was a shorter model
            same = "yes" if measured["loss"] == plain["loss"] else "no"
        over = "" if ours is None else f"{measured['seconds'] / ours['seconds']:.2f}"
        yield name, f"{measured['seconds']:.2f}", over, f"{measured['peak_rss_gib']:.1f} GiB", same


@contextlib.contextmanager
def swap_space(folder: str, nbytes: int) -> Iterator[None]:
    """Have swap space in a new file for the length of the block. Raises InfinityError, or OSError without the tools."""
    with tempfile.NamedTemporaryFile(prefix="infinity-bench-swap-", dir=folder) as file:
        try:
            for command in (["fallocate", "--length", str(nbytes)], ["mkswap"], ["swapon"]):
                subprocess.run([*command, file.name], check=True, capture_output=True, text=True)
            yield
        except subprocess.CalledProcessError as error:
            raise InfinityError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        finally:
            subprocess.run(["swapoff", file.name], check=False, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
