"""Train a model that does not fit: 1 B parameters under a hard limit of 4 GiB, then plain PyTorch under the same.

python examples/does_not_fit.py                               three steps; needs 13 to 21 GiB on the drive
python examples/does_not_fit.py --params 200M --limit 2GiB    a smaller model
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from infinity.cli.arguments import check_file
from infinity.cli.memory_limit import MemoryLimit, memory_limit
from infinity.device import cpu_multiplies_fast_in
from infinity.errors import ConfigError, InfinityError
from infinity.units import format_bytes, format_count, parse_bytes, parse_count

HERE = Path(__file__).resolve().parent
STATE_BYTES = 12
"""Bytes per parameter on the drive: compute parameter, remainder, two moments."""
WRITTEN_TWICE = 1.1
"""Ratio of written bytes to state above which a step has written some of it twice."""
IN_MEMORY_BYTES = 18
"""Bytes per parameter of plain PyTorch: the bf16 model, and in fp32 the master, its gradient, two moments."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", default="1B", help="parameters of the model (default: %(default)s)")
    parser.add_argument("--limit", default="4GiB", help="memory limit of the training (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--pinned-bytes-max",
        help="pinned memory, within the limit (default: an eighth, or a quarter on a CPU that computes in fp32)",
    )
    parser.add_argument("--context", type=int, default=256, help="tokens of the sequence (default: %(default)s)")
    parser.add_argument(
        "--nvme-path",
        type=Path,
        default=HERE.parent / ".nvme",
        help="folder on the drive (default: .nvme in the checkout)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    try:
        args.numel, args.limit_bytes = parse_count(args.params), parse_bytes(args.limit)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console(highlight=False, soft_wrap=True)
    check_file(args.json, "--json: ")
    try:
        args.nvme_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--nvme-path {args.nvme_path}: can't be made ({error.strerror}): name a folder") from None
    needed, free = int(1.1 * STATE_BYTES * args.numel), shutil.disk_usage(args.nvme_path).free
    if needed > free:
        console.print(
            f"left out: the states of {args.params} parameters take {format_bytes(needed)} in {args.nvme_path}, and "
            f"{format_bytes(free)} are free there; --nvme-path names another drive, --params a smaller model",
            style="yellow",
        )
        return 0
    console.print(
        f"{args.params} parameters take {args.steps} steps within {args.limit} of memory, with {format_bytes(needed)} or more "
        f"in {args.nvme_path}; then the same runs in memory. About {1 + 4 * args.numel / 1e9:.0f} minutes on two cores."
    )
    with memory_limit(args.limit_bytes) as limit, tempfile.TemporaryDirectory() as scratch:
        console.rule(f"{args.params} parameters, {args.steps} steps within {args.limit} ({limit.in_words})")
        result = Path(scratch, "result.json")
        status = limit.run(training(args, *memory_of(args), "--json", result))
        if status != 0:
            console.print(f"the training ended {in_words(status)}", style="red")
            return 130 if status in (130, -signal.SIGINT) else 1
        summary = json.loads(result.read_text())
        console.rule(f"the same held in memory, within the same {args.limit}")
        began = time.perf_counter()
        in_memory = limit.run(training(args, "--in-memory"))
        if in_memory in (130, -signal.SIGINT):
            return 130
        summary["in_memory_ended"] = in_words(in_memory)
        summary["in_memory_ended_seconds"] = time.perf_counter() - began
    show(console, args, limit, summary)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


def memory_of(args: argparse.Namespace) -> list[object]:
    """Return the options for the pool and, in fp32, for the gradients, which then have 4 bytes."""
    if torch.cuda.is_available() or cpu_multiplies_fast_in(torch.bfloat16):
        return ["--pinned-bytes-max", args.pinned_bytes_max or args.limit_bytes // 8]
    pinned = args.pinned_bytes_max or args.limit_bytes // 4
    return ["--pinned-bytes-max", pinned, "--gradient-bytes-max", args.limit_bytes // 8]


def training(args: argparse.Namespace, *more: object) -> list[str]:
    words = [sys.executable, HERE / "train_lm.py", "--params", args.params, "--steps", args.steps, "--batch-size", 1]
    words += ["--context", args.context, "--nvme-path", args.nvme_path, "--no-compare", *more]
    return [str(word) for word in words]


def in_words(status: int) -> str:
    """Describe how a process ended."""
    if status == -signal.SIGKILL:
        return "by the kernel, out of memory"
    if status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with exit status {status}" if status else "well"


def show(console: Console, args: argparse.Namespace, limit: MemoryLimit, summary: dict[str, Any]) -> None:
    losses = [step["loss"] for step in summary["steps"]]
    table = Table(
        "", "infinity", "held in memory", title=f"{format_count(summary['params'])} parameters", show_lines=False
    )
    needed = format_bytes(IN_MEMORY_BYTES * summary["params"])
    ended = summary["in_memory_ended"]
    table.add_row("memory allowed", f"{args.limit}: {limit.in_words}", "the same")
    table.add_row("memory at most", format_bytes(summary["peak_rss_bytes"]), f"{needed} and activations (computed)")
    table.add_row("on NVMe", format_bytes(summary["nvme_bytes"]), "–")
    table.add_row(
        f"{len(losses)} steps",
        f"{summary['step_seconds']:.1f} s each, losses {', '.join(f'{loss:.3f}' for loss in losses)}",
        f"ended {ended} after {summary['in_memory_ended_seconds']:.0f} s",
    )
    moved = summary["read_bytes_per_param"], summary["written_bytes_per_param"]
    table.add_row("moved per parameter", f"{moved[0]:.1f} B read, {moved[1]:.1f} B written a step", "–")
    if (bound := summary["drive_seconds"]) is not None:
        table.add_row("drive time for the same bytes", f"{bound:.1f} s", "–")
    console.print(table)
    in_fp32 = "--gradient-bytes-max" in memory_of(args)
    gradient_bytes = (4 if in_fp32 else 2) * summary["params"]
    reasons = ["weights have 4 bytes instead of 2, as this CPU computes in fp32: 16 B read"] if in_fp32 else []
    if summary["gradient_bytes"] < 0.9 * gradient_bytes:
        reasons.append(
            f"most gradients, {gradient_bytes // summary['params']} B per parameter, are written and read again, as "
            f"{args.limit} has no room for them"
        )
    if moved[1] > WRITTEN_TWICE * STATE_BYTES:
        reasons.append(
            "these first steps are clipped, so their speculative updates are discarded and made again: later steps of "
            "a run move less"
        )
    if reasons:
        console.print(f"A step in bf16 whose gradients stay in memory reads 14 B. Here {'; and '.join(reasons)}.")
    console.print()
    if ended != "well":
        console.print(
            f"In memory, within {args.limit}: ended {ended}, after {summary['in_memory_ended_seconds']:.0f} s."
        )
    else:
        console.print(f"In memory, the same fits within {args.limit}: ask for more --params.")
    console.print(
        f"With infinity, within {args.limit}: {len(losses)} steps, peak {format_bytes(summary['peak_rss_bytes'])}.",
        style="bold",
    )
    console.print(
        f"Next: infinity-bench plan {args.nvme_path} --params 8B says what trains on this machine; docs/quickstart.md "
        "shows how to train your own model."
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InfinityError as error:
        sys.exit(str(error))
