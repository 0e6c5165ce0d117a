"""Compares the I/O engine with fio and with DeepSpeed's aio_handle, on one drive in one interleaved run.

    python bench/aio.py /local_nvme --rounds 7
    python bench/aio.py /local_nvme --deepspeed-python ../ds/bin/python      # a Python that has deepspeed and its async_io

Each is first searched for its best settings (blocks, depth, and fio's jobs, our rings, DeepSpeed's threads), for reads,
writes and the mix. The best few of each then run in every round, in an order that changes. Ratios are of medians. CPU
time is measured in longer runs of the winners, since fio counts its own in whole milliseconds per job. All use the same
file, random data, direct I/O, and huge pages and registered buffers if the kernel gives them. Random transfers of 4 to
64 KiB, thousands per call, follow. Prints tables and, last, one JSON line; --save appends it to
bench/results/aio.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from results import machine, save

from infinity._aio import Engine
from infinity.aio import IoEngine, IoSettings, PinnedPool, Priority, Request, probe
from infinity.cli.sweep.fio import Fio, find_fio, version_of
from infinity.drive.measure import DriveTest, Trial, Workload
from infinity.store.arena import Arena
from infinity.store.run_folder import RunFolder
from infinity.units import GIB, KIB, MIB, format_bytes, parse_bytes

BLOCKS = (MIB, 4 * MIB, 8 * MIB, 16 * MIB)
DEPTHS = (8, 16, 32, 128)
THREADS = (1, 2, 4)
IN_FLIGHT_BYTES_MAX = 256 * MIB
FINALISTS = 3
SMALL = (4 * KIB, 16 * KIB, 64 * KIB)
SMALL_DEPTH = 64

Run = Callable[[Workload, IoSettings, float], Trial]


class DeepSpeed:
    """A worker under another Python; `rings` of the settings are its threads."""

    def __init__(self, python: str, folder: str, nbytes: int) -> None:
        worker = Path(__file__).with_name("aio_deepspeed.py")
        self._process = subprocess.Popen(
            [python, str(worker), str(Path(folder) / "deepspeed"), str(nbytes)],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        assert self._process.stdin and self._process.stdout
        order = {
            "workload": workload.value,
            "block_bytes": settings.block_bytes,
            "queue_depth": settings.queue_depth,
            "threads": settings.rings,
            "seconds": seconds,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"deepspeed's worker ended with status {self._process.wait()}: does async_io build there?")
        return Trial(workload, settings, **json.loads(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def candidates(name: str, blocks: Iterable[int], depths: Iterable[int], threads: Iterable[int]) -> list[IoSettings]:
    settings = [IoSettings(name, *three) for three in itertools.product(blocks, depths, threads)]
    return [one for one in settings if one.in_flight_bytes <= IN_FLIGHT_BYTES_MAX]


def find_finalists(
    runs: dict[str, Run], grids: dict[str, list[IoSettings]], seconds: float
) -> dict[Workload, list[IoSettings]]:
    """Return the best few settings of each competitor for each workload, after two short trials of each."""
    finalists: dict[Workload, list[IoSettings]] = {}
    for workload in Workload:
        finalists[workload] = []
        for name, grid in grids.items():
            rates = {s: max(runs[name](workload, s, seconds).bytes_per_s for _ in range(2)) for s in grid}
            finalists[workload] += sorted(grid, key=lambda s: -rates[s])[:FINALISTS]
            print(f"  searched {name} for {workload.value}", file=sys.stderr)
    return finalists


def play_rounds(
    runs: dict[str, Run], finalists: dict[Workload, list[IoSettings]], rounds: int, seconds: float
) -> dict[Workload, dict[str, Any]]:
    """Return the best of each competitor: of the settings within 1 % of its best median, that with least CPU time."""
    trials: dict[tuple[Workload, IoSettings], list[Trial]] = defaultdict(list)
    for number in range(rounds):
        for workload, contenders in finalists.items():
            for settings in random.sample(contenders, len(contenders)):
                trials[workload, settings].append(runs[settings.backend](workload, settings, seconds))
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    best: dict[Workload, dict[str, Any]] = {workload: {} for workload in Workload}
    for workload, contenders in finalists.items():
        rows = {settings: summary(settings, trials[workload, settings]) for settings in contenders}
        for name in runs:
            rows_of_name = [rows[settings] for settings in contenders if settings.backend == name]
            near = max(row["gib_per_s"] for row in rows_of_name) * 0.99
            fast = [row for row in rows_of_name if row["gib_per_s"] >= near]
            best[workload][name] = min(fast, key=lambda row: row["cpu_seconds_per_gib"])
    return best


def measure_cpu(runs: dict[str, Run], best: dict[Workload, dict[str, Any]], rounds: int, seconds: float) -> None:
    """Set the CPU seconds per GiB of each winner: all CPU time over all bytes of `rounds` long, interleaved trials."""
    for workload, by_name in best.items():
        totals = {name: [0.0, 0.0] for name in by_name}
        for _, (name, one) in itertools.product(range(rounds), by_name.items()):
            settings = IoSettings(name, one["block_bytes"], one["queue_depth"], one["threads"])
            trial = runs[name](workload, settings, seconds)
            totals[name][0] += trial.cpu_seconds
            totals[name][1] += trial.nbytes / GIB
        for name, (cpu_seconds, gib) in totals.items():
            by_name[name]["cpu_seconds_per_gib"] = round(cpu_seconds / gib, 5)
        print(f"  CPU of {workload.value}", file=sys.stderr)


def summary(settings: IoSettings, trials: list[Trial]) -> dict[str, Any]:
    return {
        "gib_per_s": round(statistics.median(trial.bytes_per_s for trial in trials) / GIB, 3),
        "min": round(min(trial.bytes_per_s for trial in trials) / GIB, 3),
        "max": round(max(trial.bytes_per_s for trial in trials) / GIB, 3),
        "cpu_seconds_per_gib": round(statistics.median(trial.cpu_seconds_per_gib for trial in trials), 5),
        "block_bytes": settings.block_bytes,
        "queue_depth": settings.queue_depth,
        "threads": settings.rings,
    }


def report(best: dict[Workload, dict[str, Any]], reference: str) -> dict[str, Any]:
    """Print a table; return everything with ratios to the reference."""
    result: dict[str, Any] = {}
    print(f"\n{'':>14}{'GB/s':>8}{'min':>7}{'max':>7}{'ratio':>7}{'CPU ms/GiB':>12}  block  depth x threads")
    for workload, by_name in best.items():
        print(workload.value)
        against = by_name[reference]["gib_per_s"]
        for name, one in by_name.items():
            one["ratio"] = round(one["gib_per_s"] / against, 3)
            print(
                f"{name:>14}{one['gib_per_s'] * GIB / 1e9:8.2f}{one['min'] * GIB / 1e9:7.2f}{one['max'] * GIB / 1e9:7.2f}"
                f"{one['ratio']:7.3f}"
                f"{one['cpu_seconds_per_gib'] * 1e3:12.2f}  {format_bytes(one['block_bytes'])}  "
                f"{one['queue_depth']} x {one['threads']}"
            )
        result[workload.value] = by_name
    return result


class Small:
    """Random transfers of a few KiB, thousands per call."""

    def __init__(self, folder: RunFolder, backend: str) -> None:
        self.pool = PinnedPool(64 * MIB)
        self.pool.bytes.random_()
        self.engine = IoEngine(self.pool)
        self.arena = Arena(folder, self.engine, name=f"small-{backend}")
        self.nbytes = GIB
        self.arena.reserve([self.nbytes], "the file of small transfers")
        self.lease = self.pool.lease(64 * MIB)
        for at in range(0, self.nbytes, self.lease.nbytes):
            write = Request("write", self.arena.file, at, self.lease, 0, self.lease.nbytes, Priority.DEMAND)
            self.engine.wait(self.engine.start([write]))
        self.core = Engine(backend=backend, queue_depth=SMALL_DEPTH, slab=self.pool.slab)

    def run(self, operation: str, size: int, seconds: float) -> tuple[float, float]:
        """Return (transfers per second, CPU seconds per million)."""
        count = self.lease.nbytes // size
        places = np.random.default_rng().permutation(self.nbytes // size)[:count]
        slab, file = self.pool.slab, self.arena.file
        requests = [
            (operation, file, place * size, slab, i * size, size, Priority.DEMAND)
            for i, place in enumerate(places.tolist())
        ]
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        done = 0
        while time.perf_counter() - began < seconds:
            for transfer in self.core.start_batch(requests):
                transfer.wait()
            done += count
        elapsed = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return done / elapsed, cpu / done * 1e6

    def close(self) -> None:
        self.core.close()
        self.engine.close()
        self.arena.close()


def fio_small(program: str, test: DriveTest, operation: str, size: int, seconds: float) -> tuple[float, float]:
    options = {
        "name": "small", "filename": f"/proc/{os.getpid()}/fd/{test.descriptor}", "rw": f"rand{operation}",
        "bs": size, "size": GIB, "iodepth": SMALL_DEPTH, "ioengine": "io_uring", "direct": 1, "fixedbufs": 1,
        "registerfiles": 1, "time_based": 1, "runtime": f"{round(seconds * 1000)}ms", "thread": 1, "norandommap": 1,
        "iodepth_batch_complete_min": 1, "iodepth_batch_complete_max": SMALL_DEPTH, "allow_file_create": 0,
        "output-format": "json",
    }  # fmt: skip
    command = [program, *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return job[operation]["iops"], cpu / job[operation]["total_ios"] * 1e6


def measure_small(path: Path, test: DriveTest, program: str, backends: list[str], rounds: int) -> dict[str, Any]:
    """Return medians over the rounds, per operation, size and competitor."""
    folder = RunFolder(path)
    latencies: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
    try:
        competitors = {name: Small(folder, name) for name in backends}
        for _, operation, size in itertools.product(range(rounds), ("read", "write"), SMALL):
            for name, one in competitors.items():
                latencies[operation, size, name].append(one.run(operation, size, 0.5))
            latencies[operation, size, "fio"].append(fio_small(program, test, operation, size, 0.5))
        for one in competitors.values():
            one.close()
    finally:
        folder.close()
    result: dict[str, Any] = {}
    print(f"\n{'random':>14}{'KiB':>6}" + "".join(f"{name + ' kIOPS':>18}" for name in [*backends, "fio"]))
    for operation, size in itertools.product(("read", "write"), SMALL):
        row: dict[str, Any] = {}
        for name in [*backends, "fio"]:
            values = latencies[operation, size, name]
            row[name] = {
                "kiops": round(statistics.median(rate for rate, _ in values) / 1e3, 1),
                "cpu_seconds_per_million": round(statistics.median(cpu for _, cpu in values), 2),
            }
        result[f"{operation}_{size // KIB}kib"] = row
        print(f"{operation:>14}{size // KIB:6}" + "".join(f"{row[name]['kiops']:18.1f}" for name in row))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("4GiB"), help="file size (default: 4GiB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement in a round")
    parser.add_argument("--search-seconds", type=float, default=0.3, help="duration of each trial in the search")
    parser.add_argument("--cpu-seconds", type=float, default=8.0, help="duration of three runs for the CPU time")
    parser.add_argument("--deepspeed-python", help="a Python with deepspeed, to measure its aio_handle")
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/aio.jsonl")
    args = parser.parse_args()
    program = find_fio()
    backends = [name for name, available, _ in probe() if available]
    with DriveTest(args.path, nbytes=args.size) as test, tempfile.TemporaryDirectory(dir=args.path) as scratch:
        test.fill()
        fio = Fio(program, test, "io_uring" if "io_uring" in backends else "libaio")
        runs: dict[str, Run] = {"fio": fio.run}
        grids = {"fio": candidates("fio", BLOCKS, DEPTHS, THREADS[:2])}
        for name in backends:
            runs[name] = test.run
            grids[name] = [s for s in candidates(name, BLOCKS, DEPTHS[:3], THREADS[:2]) if test.fits(s)]
        deepspeed = DeepSpeed(args.deepspeed_python, scratch, GIB) if args.deepspeed_python else None
        try:
            if deepspeed:
                runs["deepspeed"] = deepspeed.run
                grids["deepspeed"] = candidates("deepspeed", BLOCKS[:3], DEPTHS[1:], THREADS)
            finalists = find_finalists(runs, grids, args.search_seconds)
            best = play_rounds(runs, finalists, args.rounds, args.seconds)
            measure_cpu(runs, best, 3, args.cpu_seconds)
            large = report(best, "fio")
        finally:
            if deepspeed:
                deepspeed.close()
        small = measure_small(args.path, test, program, backends, args.rounds)
    line = {"bench": "aio", **machine(), "fio": version_of(program), "rounds": args.rounds, "size_bytes": args.size}
    line |= {"large": large, "small": small}
    print(json.dumps(line))
    if args.save:
        save("aio", line)


if __name__ == "__main__":
    main()
