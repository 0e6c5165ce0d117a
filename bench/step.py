"""One training step beside what it could be, each way in a process of its own, interleaved in one run.

    python bench/step.py --params 40M --rounds 5 --nvme-path /local_nvme
    python bench/step.py --params 200M --ways memory,forward,backward,step,step-full --deepspeed-python ../ds/bin/python
    python bench/step.py --params 200M --ways memory,backward,backward-cached --host-cache 2GiB
    python bench/step.py --params 200M --ways backward,backward-durable,forward,forward-durable
    python bench/step.py --params 200M --batch-size 1 --clipping 0 --ways step-phase,step-phase-unchecked

Every round steps the same model each way, one after the other, and measures the drive before and after each. Prints a table
and, last, one JSON line; with --save the line is appended to bench/results/step.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent

from results import machine, save  # noqa: E402

from infinity.aio import IoSettings  # noqa: E402
from infinity.cli.arguments import checked_value, count, whole_number  # noqa: E402
from infinity.cli.program import run_program  # noqa: E402
from infinity.config import load_config  # noqa: E402
from infinity.drive.choice import choose_storage  # noqa: E402
from infinity.drive.measure import FILE_BYTES_MIN, DriveTest, Workload  # noqa: E402
from infinity.plan.lower_bound import DriveSpeed, forward_lower_bound_seconds  # noqa: E402
from infinity.units import GIB, MIB, parse_bytes, parse_count  # noqa: E402

UPDATES = ("backward", "forward", "step")
VARIANTS = ("", "-full", "-cached", "-spilled", "-unchecked", "-durable")
WAYS = (
    "memory",
    *(update + variant for update in UPDATES for variant in VARIANTS),
    "backward-speculative",
    "step-phase",
    "step-phase-unchecked",
)
"""In memory, or with the update then; with masters in full; with --host-cache; with all gradients on NVMe; without checksums;
with every step committed; in the backward with --clipping, for the step to accept; with the optimizer's transfers alone before
and after each step, which then begins cold; these without checksums, as fio and others move them."""

DRIVE_SECONDS = 0.7
WARM_UP_ROUNDS = 2
"""Not counted, whenever the processes have just started."""

_ORDERED = ("batch_size", "context", "clipping", "backend", "pinned_bytes_max", "host_cache", "mmap_threshold")
"""Arguments that the workers get."""


class Worker:
    """A process that steps one way when asked to."""

    def __init__(self, way: str, order: dict[str, Any], python: str) -> None:
        self.way = way
        self._nvme_path = order["nvme_path"]
        environment = dict(os.environ)
        if order["mmap_threshold"] is not None:
            environment["MALLOC_MMAP_THRESHOLD_"] = str(order["mmap_threshold"])
        if way == "deepspeed":
            environment["DS_ACCELERATOR"] = "cpu"
        self._process = subprocess.Popen(
            [python, str(HERE / "step_worker.py"), json.dumps({**order, "way": way})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, who ends it
        )
        self._answer()

    def step(self) -> dict[str, Any]:
        """Take a step; what it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._answer())
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        left = Path(self._nvme_path) / f"infinity-durable-bench-{self._process.pid}"
        shutil.rmtree(left, ignore_errors=True)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker for {self.way} ended with status {self._process.wait()}")
        return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--params",
        type=checked(parse_count, at_least=1),
        default="40M",
        help="size of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--ways", default="memory,backward,forward,step", help=f"of {', '.join(WAYS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--deepspeed-python", help="a Python that has deepspeed, to step its ZeRO-Infinity, too (libaio-dev is needed)"
    )
    parser.add_argument("--batch-size", type=count, default=4)
    parser.add_argument("--context", type=count, default=256)
    parser.add_argument(
        "--clipping",
        type=float,
        default=1.0,
        help="of gradients; none where updates are in the backward and not speculative",
    )
    parser.add_argument(
        "--rounds", type=count, default=7, help="rounds, after two that are not counted (default: %(default)s)"
    )
    parser.add_argument(
        "--redraw",
        type=checked_value(whole_number, at_least=0),
        default=0,
        help="after so many rounds start all processes and make all files anew, as where a file lies on a drive is worth some "
        "percent; never where 0 (default: %(default)s)",
    )
    parser.add_argument("--backend", default="auto", help="auto, io_uring, linux_aio or threads")
    parser.add_argument("--pinned-bytes-max", default="auto", help='such as "256MiB" (default: %(default)s)')
    parser.add_argument("--host-cache", default="0", help='of the "-cached" ways, such as "2GiB"')
    parser.add_argument(
        "--mmap-threshold",
        type=int,
        help="bytes; blocks of memory that large go back to the kernel when they are freed, in all ways (glibc)",
    )
    parser.add_argument("--nvme-path", default=str(HERE.parent / ".nvme"))
    parser.add_argument(
        "--drive-file",
        type=checked(parse_bytes, at_least=FILE_BYTES_MIN),
        default="2GiB",
        help="size of the file that the drive is measured with (default: %(default)s); with a large one it may give less",
    )
    parser.add_argument("--save", action="store_true", help="append the JSON line to bench/results/step.jsonl")
    parser.set_defaults(func=lambda args: measure(args, parser))
    return run_program(parser, None)


def checked(parse: Callable[[str], int], *, at_least: int) -> Callable[[str], str]:
    """A type for argparse: a number in words, checked, and kept as it was given for the JSON line."""
    check = checked_value(parse, at_least=at_least)

    def checked(text: str) -> str:
        check(text)
        return text

    return checked


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Step each way, round after round; show and print what it took."""
    ways = args.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: {unknown[0]} is none of {', '.join(WAYS)}")

    Path(args.nvme_path).mkdir(parents=True, exist_ok=True)
    order = {name: getattr(args, name) for name in _ORDERED}
    order |= {"numel": parse_count(args.params), "nvme_path": str(Path(args.nvme_path).resolve())}
    pythons = dict.fromkeys(ways, sys.executable)
    if args.deepspeed_python:
        pythons["deepspeed"] = args.deepspeed_python
    rows: list[dict[str, Any]] = []
    drive_first = False
    while len(rows) < args.rounds:
        rows += take_rounds(args, order, pythons, done=len(rows), drive_first=drive_first)
        drive_first = not drive_first
    results = {way: summarize(rows, way) for way in pythons}
    show(results)
    line = {"bench": "step", **machine(), "params": rows[0][ways[0]]["numel"], "ways": results}
    line |= {name: getattr(args, name) for name in ("rounds", "redraw", "drive_file", *_ORDERED)}
    drives = [row[way]["drive"] for row in rows for way in results]
    line |= {"drive_gb_per_s": [median(rates[k] / 1e9 for rates in drives) for k in range(len(Workload))]}
    print(json.dumps(line))
    if args.save:
        save("step", line)
    return 0


def take_rounds(
    args: argparse.Namespace, order: dict[str, Any], pythons: dict[str, str], *, done: int, drive_first: bool
) -> list[dict[str, Any]]:
    """What each way took, round by round, after `done` of them: as many as one place on the drive is for.

    `drive_first`: make the drive's test file before the workers make theirs.
    """
    rows: list[dict[str, Any]] = []
    rounds = min(args.redraw or args.rounds, args.rounds - done)
    with contextlib.ExitStack() as stack:
        if drive_first:
            drive = filled_drive(args, stack)
        workers = [
            stack.enter_context(contextlib.closing(Worker(way, order, python))) for way, python in pythons.items()
        ]
        if not drive_first:
            drive = filled_drive(args, stack)
        settings = choose_storage(load_config(drive_config(args))).io  # as the workers' is driven
        before = rates_of(drive, settings)
        for number in range(rounds + WARM_UP_ROUNDS):
            row: dict[str, Any] = {}
            for worker in workers:
                row[worker.way] = worker.step()
                after = rates_of(drive, settings, row[worker.way]["step"] if "-phase" in worker.way else DRIVE_SECONDS)
                row[worker.way]["drive"] = [statistics.harmonic_mean(pair) for pair in zip(before, after, strict=True)]
                before = after
            counted = number >= WARM_UP_ROUNDS
            times = ", ".join(f"{worker.way} {row[worker.way]['seconds']:.3f} s" for worker in workers)
            rates = " / ".join(f"{rate / 1e9:.2f}" for rate in before)
            name = f"round {done + number - WARM_UP_ROUNDS + 1}" if counted else "warming up"
            print(f"{name}: {times}, drive {rates} GB/s", file=sys.stderr)
            if counted:
                rows.append(row)
    return rows


def filled_drive(args: argparse.Namespace, stack: contextlib.ExitStack) -> DriveTest:
    """The drive's test file, written once; closed with the stack."""
    drive = stack.enter_context(DriveTest(args.nvme_path, nbytes=parse_bytes(args.drive_file)))
    drive.fill()
    return drive


def drive_config(args: argparse.Namespace) -> dict[str, Any]:
    """The part of the workers' config that says how the drive is driven."""
    place = {"device": "nvme", "nvme_path": args.nvme_path}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": place},
        "infinity": {"backend": args.backend},
    }


def rates_of(drive: DriveTest, settings: IoSettings, mixed_seconds: float = DRIVE_SECONDS) -> list[float]:
    """Bytes/s of reads, of writes, and of both at once in equal parts.

    `mixed_seconds`: for how long both. What a long phase is held to must be as long: a drive that is slow now and then is
    seldom caught at it by a short trial.
    """
    seconds = {Workload.MIXED: max(mixed_seconds, DRIVE_SECONDS)}
    return [drive.run(workload, settings, seconds.get(workload, DRIVE_SECONDS)).bytes_per_s for workload in Workload]


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def summarize(rows: list[dict[str, Any]], way: str) -> dict[str, Any]:
    """Medians over the rounds; every ratio is taken within its round first."""
    steps = [row[way] for row in rows]
    summary: dict[str, Any] = {
        part: median(step[part] for step in steps)
        for part in ("seconds", "forward", "backward", "step", "cpu_seconds", "ring_cpu_seconds")
        if part in steps[0]
    }
    summary["min_max_seconds"] = [round(pick(step["seconds"] for step in steps), 4) for pick in (min, max)]
    summary["peak_rss_gib"] = round(steps[-1]["peak_rss_bytes"] / GIB, 2)
    summary["loss"] = steps[-1]["loss"]
    numel = steps[0]["numel"]
    for name in ("disk_read_bytes", "disk_written_bytes"):
        if name in steps[0]:
            summary[f"{name}_per_param"] = median(step[name] / numel for step in steps)
    if "memory" in rows[0]:
        summary["over_memory"] = median(row[way]["seconds"] / row["memory"]["seconds"] for row in rows)
    update, _, variant = way.partition("-")
    if variant and update in rows[0]:
        summary[f"over_{update}"] = median(row[way]["seconds"] / row[update]["seconds"] for row in rows)
    if "deepspeed" in rows[0]:
        summary["deepspeed_over_this"] = median(row["deepspeed"]["seconds"] / row[way]["seconds"] for row in rows)
    if (without := f"{way}-unchecked") in rows[0]:
        for part in ("seconds", "step", "cpu_seconds"):
            if part in steps[0]:
                summary[f"{part}_over_unchecked"] = median(row[way][part] / row[without][part] for row in rows)
    if "ring_cpu_seconds" in steps[0] and without in rows[0]:
        extra = [row[way]["ring_cpu_seconds"] - row[without]["ring_cpu_seconds"] for row in rows]
        summary["ring_cpu_beyond_unchecked"] = median(extra)
        summary["of_all_cpu"] = median(
            more / row[without]["cpu_seconds"] for more, row in zip(extra, rows, strict=True)
        )
    if "step_bytes" not in steps[0]:
        return summary
    for name in ("read_bytes", "written_bytes"):
        summary[f"{name}_per_param"] = median(step[name] / numel for step in steps)
    summary["stall_seconds"] = median(step["stall_seconds"] for step in steps)
    summary["pinned_mib"] = round(steps[-1]["pinned_bytes"] / MIB)
    summary["drive_seconds"] = median(drive_seconds(row, way) for row in rows)
    if "memory" in rows[0]:
        lower_bounds = [max(drive_seconds(row, way), row["memory"]["seconds"]) for row in rows]
        summary["over_lower_bound"] = median(
            row[way]["seconds"] / lower_bound for row, lower_bound in zip(rows, lower_bounds, strict=True)
        )
    if "memory" in rows[0] and update == "forward":
        summary["over_forward_lower_bound"] = median(
            row[way]["seconds"] / forward_lower_bound(row, way) for row in rows
        )
    if update == "step" and variant not in ("full", "spilled"):  # as much is read as written, both at once
        optimizer = [step["step"] for step in steps]
        on_drive = [2 * step["step_bytes"][1] / step["drive"][2] for step in steps]
        summary |= ratio("optimizer_over_drive", optimizer, on_drive)
        if steps[0]["phases"]:
            transfers = [statistics.mean(step["phases"]) for step in steps]
            summary |= ratio("optimizer_over_transfers", optimizer, transfers)
            summary |= ratio("transfers_over_drive", transfers, on_drive)
            summary |= ratio("optimizer_over_moved", optimizer, [phase_seconds(row, way) for row in rows])
            summary["drive_busy_share"] = median(step["busy_share"] for step in steps)
    return summary


def ratio(name: str, seconds: list[float], others: list[float]) -> dict[str, float]:
    """The median over the rounds of the ratio within each, and the ratio of what all rounds took together."""
    pairs = zip(seconds, others, strict=True)
    return {name: median(a / b for a, b in pairs), f"{name}_in_all": round(sum(seconds) / sum(others), 4)}


def drive_seconds(row: dict[str, Any], way: str) -> float:
    """What the bytes of a step take at the drive's bandwidth of that round."""
    read_bytes_per_s, write_bytes_per_s, _ = row[way]["drive"]
    return DriveSpeed(read_bytes_per_s, write_bytes_per_s).lower_bound_seconds(*row[way]["step_bytes"])


def phase_seconds(row: dict[str, Any], way: str) -> float:
    """What the bytes that were moved within the optimizer's phase take at the drive's bandwidth of that round: as many as were
    both read and written, at once; the rest alone. State that the backward read ahead is not among them."""
    read, written = row[way]["phase_bytes"]
    read_rate, write_rate, mixed_rate = row[way]["drive"]
    both = min(read, written)
    return float(2 * both / mixed_rate + (read - both) / read_rate + (written - both) / write_rate)


def forward_lower_bound(row: dict[str, Any], way: str) -> float:
    """What a step can't go below whose updates wait for the next forward, with the compute of a step in memory."""
    return forward_lower_bound_seconds(
        state_bytes=row[way]["step_bytes"][1],
        pool_bytes=row[way]["pinned_bytes"],
        read_bytes_per_s=row[way]["drive"][0],
        write_bytes_per_s=row[way]["drive"][1],
        forward_seconds=row["memory"]["forward"] + row["memory"]["step"],
        backward_seconds=row["memory"]["backward"],
    )


def show(results: dict[str, dict[str, Any]]) -> None:
    """A table for people, on standard error."""
    columns = {
        "step s": "seconds",
        "forward": "forward",
        "backward": "backward",
        "optimizer": "step",
        "stall": "stall_seconds",
        "/ memory": "over_memory",
        "/ lower bound": "over_lower_bound",
        "/ forward's": "over_forward_lower_bound",
        "optimizer / drive": "optimizer_over_drive",
        "/ moved": "optimizer_over_moved",
        "/ transfers": "optimizer_over_transfers",
        "/ unchecked": "step_over_unchecked",
        "B read": "disk_read_bytes_per_param",
        "B written": "disk_written_bytes_per_param",
        "peak GiB": "peak_rss_gib",
        "CPU s": "cpu_seconds",
        "DeepSpeed /": "deepspeed_over_this",
    }
    columns = {title: key for title, key in columns.items() if any(key in values for values in results.values())}
    table = Table("way", *columns)
    for way, values in results.items():
        table.add_row(way, *(f"{values[key]:.3g}" if key in values else "" for key in columns.values()))
    Console(stderr=True, width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
