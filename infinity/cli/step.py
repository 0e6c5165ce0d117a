"""`infinity-bench step`: times real training steps of a synthetic transformer from a drive, and their lower bound.

Checks its options, trains (`measured_step`), then prints. Its files on the drive have no name and are gone when it ends.
With --memory-limit it runs itself again as a child within the limit, and gives that child the connection to plain
PyTorch's process, which has no limit.
"""

from __future__ import annotations

import argparse
import logging
import math
import signal
import statistics
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import add_json, add_path, check_files, checked_value, count, whole_number, write_json
from infinity.cli.memory_limit import memory_limit
from infinity.cli.program import signals_held, usage_checked
from infinity.cli.training import add_training
from infinity.errors import InfinityError
from infinity.schedule.pinned import ACCESS_BYTES
from infinity.units import GIB, format_bytes, parse_bytes, parse_count

if TYPE_CHECKING:
    from infinity.schedule.timeline import TraceSummary

MEMORY_LIMIT_MIN = GIB

POOL_BYTES_MIN = 2 * ACCESS_BYTES

OPTIMIZERS = ("AdamW", "Adam", "SGD", "Muon")

SUMMARY = "time real training steps from a drive"
DESCRIPTION = """\
Train a synthetic transformer from a drive for a few steps. Prints step time, bytes moved, stalls and the lower bound:
the longer of a step of plain PyTorch in memory and the drive time for the same bytes, all measured in turns."""

EPILOG = """\
examples:
  infinity-bench step /local_nvme --params 200M
  infinity-bench step /local_nvme --params 1B --batch-size 1 --memory-limit 5GiB --pinned-bytes-max 512MiB --json step.json

exit code: 0 when done; 1 if it could not run, with the reason; 2 for wrong usage.
docs/step.md says what is measured, and lists the keys of --json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    params = checked_value(parse_count, at_least=10_000)
    add("--params", type=params, default=40_000_000, metavar="COUNT", help='such as "200M" (default: 40M)')
    add_path(parser, "folder on the drive (default: the current one)")
    add("--steps", type=count, default=5, metavar="N", help="steps to time (default: 5)")
    add("--warmup", type=count, default=5, metavar="N", help="warm-up steps before them (default: 5)")
    seq = checked_value(whole_number, at_least=2)
    add("--seq", type=seq, default=256, metavar="N", help="tokens per sequence (default: 256)")
    add_training(parser, batch_size=4, schedule="vertical", optimizers=OPTIMIZERS, cache=0)
    add("--clipping", type=norm, metavar="NORM", help="largest norm of the gradient; 0 does not clip (default: 1.0)")
    text = 'pinned memory, including its cache, such as "512MiB" (default: auto)'
    add("--pinned-bytes-max", default="auto", metavar="BYTES", help=text)
    limit = checked_value(parse_bytes, at_least=MEMORY_LIMIT_MIN)
    text = 'memory limit of the training, such as "4GiB"; plain PyTorch has none (default: none)'
    add("--memory-limit", type=limit, metavar="BYTES", help=text)
    add("--plain-orders", type=int, help=argparse.SUPPRESS)  # of the child within the limit: a file descriptor
    add_json(parser)
    text = "take one more step, and write a timeline of the drives and the training thread, for ui.perfetto.dev"
    add("--trace", type=Path, metavar="FILE", help=text)


def run(options: argparse.Namespace) -> int:
    options.path = options.path or Path()
    with usage_checked():
        if options.no_clipping and options.clipping:
            raise ValueError(f"--no-clipping contradicts --clipping {options.clipping:g}: leave one of them out")
        if options.clipping is None:
            options.clipping = 0.0 if options.no_clipping else 1.0
        options.no_clipping = options.clipping == 0
        if options.pinned_bytes_max != "auto" and parse_bytes(options.pinned_bytes_max) < POOL_BYTES_MIN:
            raise ValueError(
                f"--pinned-bytes-max {options.pinned_bytes_max} is below the minimum of "
                f"{format_bytes(POOL_BYTES_MIN)}: raise it, or leave it out"
            )
        check_files(options, "json", "trace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with signals_held():  # torch may lose a Ctrl-C while it loads
        from infinity.cli.measured_step import measure, plain_process_of

    if options.plain_orders is not None:
        result, traced = measure(options, Connection(options.plain_orders))
    else:
        with plain_process_of(options) as plain:
            if options.memory_limit is not None:
                return _run_within(options.memory_limit, plain)
            result, traced = measure(options, plain)
    if options.json != "-":
        _print(result, traced)
    if options.json is not None:
        write_json(result, options.json)
    return 0


def _run_within(limit_bytes: int, plain: Connection) -> int:
    """Run this command again as a child within a memory limit."""
    with memory_limit(limit_bytes) as limit:
        command = [sys.executable, "-m", f"{__package__}.bench", *sys.argv[1:], "--plain-orders", str(plain.fileno())]
        status = limit.run(command, pass_fds=[plain.fileno()])
    if status == -signal.SIGKILL:
        raise InfinityError(
            f"the kernel killed the training: it takes more than --memory-limit {format_bytes(limit_bytes)} "
            f"({limit.in_words}): raise it, or lower --pinned-bytes-max, --gradient-memory, --batch-size or --params"
        )
    return status if status >= 0 else 128 - status


def norm(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a norm such as 1.0, or 0 not to clip, got {text!r}")
    return value


def _plain_in_words(result: dict[str, Any]) -> str:
    if result["torch_in_memory_seconds"] is None:
        return "left out"
    return (
        f"{result['torch_in_memory_seconds']:.3f} s, {result['torch_in_memory_cpu_seconds_per_step']:.3f} CPU seconds, "
        f"{result['torch_in_memory_minor_faults_per_step']:.0f} minor faults a step"
    )


def _lower_bound_in_words(result: dict[str, Any]) -> str:
    if result["over_lower_bound"] is None:
        return "none: nothing moved, and plain PyTorch was left out"
    which = "the longer of the two" if result["torch_in_memory_seconds"] is not None else "the drive time alone"
    return f"{result['lower_bound_seconds']:.3f} s, {which}; a step takes {result['over_lower_bound']:.2f} times it"


def _predicted(result: dict[str, Any]) -> str:
    seconds = result["predicted_seconds"]
    if seconds is None:
        return "the planner finds no configuration that fits here"
    return f"{seconds:.3f} s by the planner; the measured step is {result['seconds'] / seconds - 1:+.0%} from it"


def _print(result: dict[str, Any], traced: TraceSummary | None) -> None:
    from infinity.cli.tables import print_facts

    seconds = [step["seconds"] for step in result["steps"]]
    stall = statistics.median(step["stall_seconds"] for step in result["steps"])
    drive = result["drive"]
    limit = result["memory_limit_bytes"]
    within = f", shared libraries included, within a limit of {format_bytes(limit)}" if limit is not None else ""
    facts = {
        "step": f"{result['seconds']:.3f} s, median of {len(seconds)} ({min(seconds):.3f} to {max(seconds):.3f})",
        "waiting for the drive": f"{stall:.3f} s",
        "plain PyTorch in memory": _plain_in_words(result),
        "drive time for the same bytes": f"{result['drive_seconds']:.3f} s",
        "lower bound": _lower_bound_in_words(result),
        "CPU seconds, minor faults": f"{result['cpu_seconds_per_step']:.3f}, {result['minor_faults_per_step']:.0f} a step",
        "predicted": _predicted(result),
        "moved per parameter": f"{result['read_bytes_per_param']:.2f} B read, "
        f"{result['written_bytes_per_param']:.2f} B written",
        "drive": f"{drive['read_bytes_per_s'] / 1e9:.2f} GB/s read, {drive['write_bytes_per_s'] / 1e9:.2f} GB/s written, "
        f"{drive['mixed_bytes_per_s'] / 1e9:.2f} GB/s mixed, through {drive['backend']}",
        **(traced.in_words() if traced is not None else {}),
        "pinned memory": format_bytes(result["pinned_bytes"]),
        "on the drive": format_bytes(result["arena_bytes"]),
        "peak resident memory": format_bytes(result["peak_rss_bytes"]) + within,
    }
    print_facts(facts)
