"""The table "Why not just ..." of the README: steps within a limit of memory, by what one could use instead.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results import save
from step import checked, make_parser, measure

from infinity.cli.arguments import count
from infinity.cli.program import run_program
from infinity.cli.step import norm
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", default="200M", help="(default: %(default)s)")
    parser.add_argument("--memory-limit", default="1GiB", help="(default: %(default)s)")
    parser.add_argument("--pinned-bytes-max", default="128MiB", help="of infinity (default: %(default)s)")
    parser.add_argument("--batch-size", type=count, default=2, help="sequences (default: %(default)s)")
    parser.add_argument("--context", type=count, default=128, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--clipping", type=norm, default=0.0, help="norm; 0 does not clip (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--swap",
        type=checked(parse_bytes, at_least=1 << 20),
        help="size of the swap space (default: 20 bytes per parameter)",
    )
    parser.add_argument("--deepspeed-python", help="as for bench/step.py; without it DeepSpeed is left out")
    parser.add_argument("--nvme-path", default=str(Path(__file__).resolve().parent.parent / ".nvme"))
    parser.add_argument("--save", action="store_true", help="append the line to bench/results/alternatives.jsonl")
    parser.set_defaults(func=run)
    return run_program(parser, None)


def run(options: argparse.Namespace) -> int:
    """Measure; print the table."""
    Path(options.nvme_path).mkdir(parents=True, exist_ok=True)
    arguments = ["--ways", ",".join(name for name in NAMES if name != "deepspeed"), "--alone"]
    for name in ("params", "memory_limit", "pinned_bytes_max", "batch_size", "context", "clipping", "rounds"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    for name in ("nvme_path", "deepspeed_python"):
        if getattr(options, name):
            arguments += [f"--{name.replace('_', '-')}", getattr(options, name)]
    nbytes = parse_bytes(options.swap) if options.swap else 20 * parse_count(options.params)
    with swap_space(Path(options.nvme_path) / "swap", nbytes):
        line = {**measure(make_parser().parse_args(arguments)), "bench": "alternatives", "swap_bytes": nbytes}
    rows = [COLUMNS, ("---",) * len(COLUMNS), *rows_of(line["ways"])]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(json.dumps(line))
    if options.save:
        save("alternatives", line)
    return 0


def rows_of(ways: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return the rows of the table. A way that was left out did not fit."""
    ours, plain = ways["auto"], ways["torch"]
    for way, name in NAMES.items():
        if way not in ways:
            continue
        if (measured := ways[way]) is None:
            yield name, "the kernel ends it", "", "", ""
            continue
        same = "" if plain is None else "yes" if measured["loss"] == plain["loss"] else "no"
        over = "" if ours is None else f"{measured['seconds'] / ours['seconds']:.2f}"
        yield name, f"{measured['seconds']:.2f}", over, f"{measured['peak_rss_gib']:.1f} GiB", same


@contextlib.contextmanager
def swap_space(path: Path, nbytes: int) -> Iterator[None]:
    """Have swap space in a file for the length of the block. Raises InfinityError."""
    try:
        for command in (
            ["fallocate", "--length", str(nbytes), str(path)],
            ["chmod", "600", str(path)],
            ["mkswap", str(path)],
            ["swapon", str(path)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True)
        yield
    except subprocess.CalledProcessError as error:
        raise InfinityError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
    finally:
        subprocess.run(["swapoff", str(path)], check=False, capture_output=True)
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
