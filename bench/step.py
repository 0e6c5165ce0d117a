"""Compares training steps with their lower bound, each way in a process of its own, interleaved in one run.

    python bench/step.py --params 40M --rounds 5 --nvme-path /local_nvme
    python bench/step.py --params 200M --ways torch,auto,forward,backward,step --deepspeed-python ../ds/bin/python
    python bench/step.py --params 1B --ways torch,auto --alone
    python bench/step.py --params 200M --ways torch,backward,backward-cached --host-cache 2GiB
    python bench/step.py --params 200M --ways backward,backward-durable,forward,forward-durable
    python bench/step.py --params 200M --batch-size 1 --context 64 --accumulation 8 --ways torch,auto,auto-vertical
    python bench/step.py --params 200M --batch-size 1 --clipping 0 --ways step-phase,step-phase-unchecked
    python bench/step.py --params 1B --batch-size 1 --memory-limit 4GiB --pinned-bytes-max 512MiB --ways torch,auto

Every round steps the same model each way in turn, and measures the drive before and after each. Prints a table and,
last, one JSON line; --save appends it to bench/results/step.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
from results import machine, save  # noqa: E402
from step_summary import Row, median, show, summarize  # noqa: E402

from infinity.aio import IoSettings  # noqa: E402
from infinity.cli.arguments import checked_value, count, whole_number  # noqa: E402
from infinity.cli.memory_limit import MemoryLimit, memory_limit  # noqa: E402
from infinity.cli.program import run_program  # noqa: E402
from infinity.cli.step import norm  # noqa: E402
from infinity.config import load_config  # noqa: E402
from infinity.drive.choice import choose_storage  # noqa: E402
from infinity.drive.measure import FILE_BYTES_MIN, DriveTest, Workload  # noqa: E402
from infinity.units import parse_bytes, parse_count  # noqa: E402

UPDATES = ("auto", "backward", "forward", "step")
VARIANTS = ("", "-full", "-cached", "-spilled", "-unchecked", "-durable", "-unclipped", "-vertical")
WAYS = (
    "torch",
    "torch-swapped",
    "torch-mapped",
    "fsdp2",
    "memory",
    "host",
    *(update + variant for update in UPDATES for variant in VARIANTS),
    "step-phase",
    "step-phase-unchecked",
)
"""Plain PyTorch in memory, the reference; within the limit, with swap space, and with states in mapped files; stock
FSDP2 with CPUOffloadPolicy; FSDP2 in memory, the oracle of bits and no reference of time; paged in host
memory; or on NVMe with the update then. With masters in full; with --host-cache; with all gradients on NVMe; without
checksums; with every step committed; without --clipping; with all micro-batches of --accumulation at once. With the
optimizer's transfers alone before and after each step, which then begins cold; these without checksums, like fio's."""

COMPARED = ("torch", "torch-swapped", "torch-mapped", "fsdp2", "deepspeed")
"""Ways to compare with: if one can't run here, a line says so, and the others continue."""

DRIVE_SECONDS = 0.7
WARM_UP_ROUNDS = 5

_ORDERED = (
    "batch_size",
    "context",
    "accumulation",
    "clipping",
    "dtype",
    "backend",
    "pinned_bytes_max",
    "host_cache",
    "mmap_threshold",
)
"""Arguments that the workers get."""


class LeftOut(Exception):
    """Why a way to compare with can't run here."""


class Worker:
    """A process that takes steps of one way on request."""

    def __init__(self, way: str, order: dict[str, Any], python: str, limit: MemoryLimit) -> None:
        """Raises LeftOut."""
        self.way = way
        self._folder = tempfile.TemporaryDirectory(prefix=f"infinity-bench-{way}-", dir=order["nvme_path"])
        environment = dict(os.environ)
        if order["mmap_threshold"] is not None:
            environment["MALLOC_MMAP_THRESHOLD_"] = str(order["mmap_threshold"])
        if way == "deepspeed":
            environment["DS_ACCELERATOR"] = "cpu"
        self._process = subprocess.Popen(
            [
                *limit.command,
                python,
                str(HERE / "step_worker.py"),
                json.dumps({**order, "way": way, "nvme_path": self._folder.name}),
            ],
            preexec_fn=limit.enter,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends it
        )
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self.close)
            if (answer := self._answer()) != "ready\n":
                raise LeftOut(answer.strip())
            unless_ready.pop_all()

    def step(self) -> dict[str, Any]:
        """Take a step and return its measurements. Raises LeftOut."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._answer())
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()  # DeepSpeed's files and a durable run's outlive their process

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            reason = f"the worker for {self.way} ended with status {self._process.wait()}"
            raise LeftOut(f"{reason}: left out") if self.way in COMPARED else SystemExit(reason)
        return line


def main() -> int:
    parser = make_parser()
    parser.set_defaults(func=show_and_save)
    return run_program(parser, None)


def make_parser(results: str = "step") -> argparse.ArgumentParser:
    """Return the parser of the options; --save appends to bench/results/`results`.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--params",
        type=checked(parse_count, at_least=1),
        default="40M",
        help="size of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--ways",
        type=ways_of,
        default="torch,auto,backward,forward,step",
        help=f"of {', '.join(WAYS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--deepspeed-python", help="a Python that has deepspeed, to step its ZeRO-Infinity (needs libaio-dev)"
    )
    parser.add_argument("--batch-size", type=count, default=4)
    parser.add_argument("--context", type=count, default=256)
    parser.add_argument("--accumulation", type=count, default=1, help="micro-batches per step (default: %(default)s)")
    parser.add_argument(
        "--clipping",
        type=norm,
        default=1.0,
        help="largest norm of the gradient; 0 does not clip (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16"), default="bf16", help="dtype of compute, in all ways (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count, default=7, help="rounds, after those that warm up (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up-rounds",
        type=count,
        default=WARM_UP_ROUNDS,
        help="rounds that are not counted after the processes start (default: %(default)s)",
    )
    parser.add_argument(
        "--redraw",
        type=checked_value(whole_number, at_least=0),
        default=0,
        help="restart all processes and recreate all files after this many rounds, as a file's place on the drive is "
        "worth some percent; 0: never (default: %(default)s)",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="one process at a time, for models of which two don't fit into memory: each way takes all rounds (or "
        "--redraw of them) before the next way starts",
    )
    parser.add_argument("--backend", default="auto", help="auto, io_uring, linux_aio or threads")
    parser.add_argument("--pinned-bytes-max", default="auto", help='such as "256MiB" (default: %(default)s)')
    parser.add_argument(
        "--memory-limit",
        type=checked(parse_bytes, at_least=1 << 30),
        help='memory limit of each way that is not in memory, such as "4GiB": a control group of its own',
    )
    parser.add_argument("--host-cache", default="0", help='cache of the "-cached" ways, such as "2GiB"')
    parser.add_argument(
        "--mmap-threshold",
        type=int,
        help="bytes; freed memory blocks of this size return to the kernel, in all ways (glibc)",
    )
    parser.add_argument("--nvme-path", default=str(HERE.parent / ".nvme"))
    parser.add_argument(
        "--drive-file",
        type=checked(parse_bytes, at_least=FILE_BYTES_MIN),
        default="2GiB",
        help="size of the drive's test file (default: %(default)s); a large one may lower its rates",
    )
    parser.add_argument("--save", action="store_true", help=f"append the JSON line to bench/results/{results}.jsonl")
    return parser


def ways_of(text: str) -> list[str]:
    """Check comma-separated ways (an argparse type)."""
    ways = text.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(WAYS)}")
    return ways


def checked(parse: Callable[[str], int], *, at_least: int) -> Callable[[str], str]:
    """Return an argparse type: a number as text, checked, and kept as given for the JSON line."""
    check = checked_value(parse, at_least=at_least)

    def checked(text: str) -> str:
        check(text)
        return text

    return checked


def show_and_save(args: argparse.Namespace) -> int:
    """Measure; show and print the results."""
    line = measure(args)
    show(line["ways"])
    print(json.dumps(line))
    if args.save:
        save("step", line)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Step each way, round after round. Returns the JSON line of results."""
    Path(args.nvme_path).mkdir(parents=True, exist_ok=True)
    order = {name: getattr(args, name) for name in _ORDERED}
    order |= {"numel": parse_count(args.params), "nvme_path": str(Path(args.nvme_path).resolve())}
    pythons = dict.fromkeys(args.ways, sys.executable)
    if args.deepspeed_python:
        pythons["deepspeed"] = args.deepspeed_python
    rows: list[Row] = []
    drive_first = False
    while len(rows) < args.rounds:
        rows += take_rounds(args, order, pythons, done=len(rows), drive_first=drive_first or args.alone)
        drive_first = not drive_first
    steps = [step for row in rows for step in row.values()]
    if not steps:
        raise SystemExit("every way was left out")
    line = {"bench": "step", **machine(), "params": steps[0]["numel"]}
    line |= {"ways": {way: summarize(rows, way) for way in pythons}}
    line |= {
        name: getattr(args, name)
        for name in ("rounds", "warm_up_rounds", "redraw", "alone", "drive_file", "memory_limit", *_ORDERED)
    }
    return line | {"drive_gb_per_s": [median(step["drive"][k] / 1e9 for step in steps) for k in range(len(Workload))]}


def take_rounds(
    args: argparse.Namespace, order: dict[str, Any], pythons: dict[str, str], *, done: int, drive_first: bool
) -> list[Row]:
    """Return the measurements of each way, round by round, after `done` rounds, until files are recreated (--redraw).

    `drive_first`: create the drive's test file before the workers create theirs.
    """
    rows: list[Row] = [{} for _ in range(min(args.redraw or args.rounds, args.rounds - done))]
    with contextlib.ExitStack() as stack:
        limit_bytes = None if args.memory_limit is None else parse_bytes(args.memory_limit)
        drive = filled_drive(args, stack) if drive_first else None
        for ways in [[way] for way in pythons] if args.alone else [list(pythons)]:
            with contextlib.ExitStack() as until_stepped:
                workers = started(ways, order, pythons, limit_bytes, until_stepped)
                drive = drive or filled_drive(args, stack)
                step_in_turns(args, workers, drive, rows, done)
    return rows


def started(
    ways: list[str],
    order: dict[str, Any],
    pythons: dict[str, str],
    limit_bytes: int | None,
    stack: contextlib.ExitStack,
) -> dict[str, Worker]:
    """Start a worker for each way that can run here, in order; closed with the stack. Each has a limit of its own, but
    for ways in memory, which have none."""
    workers: dict[str, Worker] = {}
    for way in sorted(ways, key=lambda way: way == "torch"):  # it checks the memory that the others leave
        with left_out_in_a_line():
            limit = MemoryLimit("none")
            if limit_bytes is not None and way not in ("torch", "memory"):
                limit = stack.enter_context(memory_limit(limit_bytes, swap=way == "torch-swapped"))
            workers[way] = stack.enter_context(contextlib.closing(Worker(way, order, pythons[way], limit)))
    return {way: workers[way] for way in ways if way in workers}


def step_in_turns(
    args: argparse.Namespace, workers: dict[str, Worker], drive: DriveTest, rows: list[Row], done: int
) -> None:
    """Step each way once per round, and add the measurements to `rows`, after the rounds that don't count."""
    settings = choose_storage(load_config(drive_config(args))).io  # as the workers use it
    for _ in range(args.warm_up_rounds):
        print_times("warming up", {way: step for way in [*workers] if (step := stepped(workers, way))})
    before = rates_of(drive, settings)
    for number, row in enumerate(rows, done + 1):
        taken: Row = {}
        for way in [*workers]:
            if not (step := stepped(workers, way)):
                continue
            after = rates_of(drive, settings, step["step"] if "-phase" in way else DRIVE_SECONDS)
            step["drive"] = [statistics.harmonic_mean(pair) for pair in zip(before, after, strict=True)]
            taken[way], before = step, after
        rates = " / ".join(f"{rate / 1e9:.2f}" for rate in before)
        print_times(f"round {number}", taken, f", drive {rates} GB/s")
        row |= taken


def stepped(workers: dict[str, Worker], way: str) -> dict[str, Any] | None:
    """Return a step's measurements; None if this way can't continue, and is left out from then on."""
    with left_out_in_a_line():
        return workers[way].step()
    del workers[way]
    return None


def print_times(name: str, row: Row, more: str = "") -> None:
    times = ", ".join(f"{way} {step['seconds']:.3f} s" for way, step in row.items())
    print(f"{name}: {times}{more}", file=sys.stderr)


@contextlib.contextmanager
def left_out_in_a_line() -> Iterator[None]:
    """Print why a way is left out, and continue."""
    try:
        yield
    except LeftOut as reason:
        print(reason, file=sys.stderr)


def filled_drive(args: argparse.Namespace, stack: contextlib.ExitStack) -> DriveTest:
    """Return the drive's test file, written once; closed with the stack."""
    drive = stack.enter_context(DriveTest(args.nvme_path, nbytes=parse_bytes(args.drive_file)))
    drive.fill()
    return drive


def drive_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the part of the workers' config that sets how the drive is used."""
    place = {"device": "nvme", "nvme_path": args.nvme_path}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": place},
        "infinity": {"backend": args.backend},
    }


def rates_of(drive: DriveTest, settings: IoSettings, mixed_seconds: float = DRIVE_SECONDS) -> list[float]:
    """Return the bytes/s of reads, of writes, and of both at once in equal parts.

    `mixed_seconds`: duration of the mixed trial. It must be as long as the phase that is compared with it: a short
    trial seldom catches a drive that is slow now and then.
    """
    seconds = {Workload.MIXED: max(mixed_seconds, DRIVE_SECONDS)}
    return [drive.run(workload, settings, seconds.get(workload, DRIVE_SECONDS)).bytes_per_s for workload in Workload]


if __name__ == "__main__":
    sys.exit(main())
