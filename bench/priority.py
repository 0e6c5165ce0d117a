"""Measures the latency of demand reads during write-back: on an idle drive, with priorities, and without.

    python bench/priority.py /local_nvme --rounds 7

The queue is kept full of long writes; single reads at random places come in between. Every round measures the idle
drive, reads that overtake (DEMAND) and reads that queue (the writes' priority), and the bandwidth of the writes in
each. Prints a table and, last, one JSON line; --save appends it to bench/results/priority.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path

import torch
from results import machine, save

from infinity.aio import IoEngine, Lease, PinnedPool, Priority, Request, Transfer
from infinity.store.arena import Arena
from infinity.store.run_folder import RunFolder
from infinity.units import KIB, MIB, parse_bytes

CHUNK_BYTES = 64 * MIB
WRITES = 4
READ_EVERY_SECONDS = 0.004


class Drive:
    """A file of random data, an engine, and the writes that keep it busy."""

    def __init__(self, folder: RunFolder, args: argparse.Namespace) -> None:
        self.read_bytes = args.read_bytes
        self.pool = PinnedPool((WRITES + 1) * CHUNK_BYTES)
        self.pool.bytes.view(torch.int64).random_()
        self.engine = IoEngine(
            self.pool, backend=args.backend, block_bytes=args.block_bytes, queue_depth=args.queue_depth
        )
        self.arena = Arena(folder, self.engine, name="priority.arena")
        self.chunks = args.size // CHUNK_BYTES
        self.arena.reserve([CHUNK_BYTES] * self.chunks, "the test file")
        self.leases: list[Lease] = [self.pool.lease(CHUNK_BYTES) for _ in range(WRITES)]
        self.target = self.pool.lease(CHUNK_BYTES)
        for chunk in range(self.chunks):
            self.engine.wait([self.write(chunk, 0)])

    def write(self, chunk: int, lease: int) -> Transfer:
        at = chunk % self.chunks * CHUNK_BYTES
        return self._start("write", at, self.leases[lease], CHUNK_BYTES, Priority.WRITE_BACK)

    def read(self, priority: Priority) -> Transfer:
        places = self.chunks * CHUNK_BYTES // self.read_bytes
        return self._start("read", random.randrange(places) * self.read_bytes, self.target, self.read_bytes, priority)

    def _start(self, operation: str, at: int, lease: Lease, nbytes: int, priority: Priority) -> Transfer:
        return self.engine.start([Request(operation, self.arena.file, at, lease, 0, nbytes, priority)])[0]

    def run(self, seconds: float, priority: Priority, *, busy: bool) -> tuple[list[float], float]:
        """Return latencies of single reads (seconds), and bytes per second of concurrent writes."""
        under_way: deque[Transfer] = deque()
        if busy:
            under_way.extend(self.write(i, i) for i in range(WRITES))
        written = self.engine.written_bytes
        began = time.perf_counter()
        latencies = []
        started = WRITES
        while time.perf_counter() - began < seconds:
            asked = time.perf_counter()
            self.read(priority).wait()
            latencies.append(time.perf_counter() - asked)
            while under_way and under_way[0].done:  # the queue never runs dry: a chunk takes longer than a pause
                under_way.popleft()
                under_way.append(self.write(started, started % WRITES))
                started += 1
            time.sleep(READ_EVERY_SECONDS)
        rate = (self.engine.written_bytes - written) / (time.perf_counter() - began)
        self.engine.wait(list(under_way))
        return latencies, rate

    def close(self) -> None:
        self.engine.close()
        self.arena.close()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("4GiB"), help="file size (default: 4GiB)")
    parser.add_argument("--read-bytes", type=parse_bytes, default=256 * KIB, help="of a demand read (default: 256KiB)")
    parser.add_argument("--block-bytes", type=parse_bytes, default=MIB)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/priority.jsonl")
    args = parser.parse_args()
    cases = {
        "idle": (Priority.DEMAND, False),
        "with priorities": (Priority.DEMAND, True),
        "without": (Priority.WRITE_BACK, True),
    }
    latencies: dict[str, list[float]] = {name: [] for name in cases}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    folder = RunFolder(args.path)
    try:
        drive = Drive(folder, args)
        for _ in range(args.rounds):
            for name, (priority, busy) in cases.items():
                seconds, rate = drive.run(args.seconds, priority, busy=busy)
                latencies[name] += seconds
                rates[name].append(rate)
        backend = drive.engine.backend
        drive.close()
    finally:
        folder.close()
    print(
        f"{'reads of ' + str(args.read_bytes // KIB) + ' KiB':>18} {'p50 ms':>8} {'p99 ms':>8} {'reads':>7} {'writes GB/s':>12}"
    )
    result = {}
    for name, values in latencies.items():
        p50, p99 = percentile(values, 0.5) * 1e3, percentile(values, 0.99) * 1e3
        rate = statistics.median(rates[name]) / 1e9
        print(f"{name:>18} {p50:8.2f} {p99:8.2f} {len(values):7} {rate:12.2f}")
        result[name.replace(" ", "_")] = {"p50_ms": p50, "p99_ms": p99, "reads": len(values), "write_gb_per_s": rate}
    settings = {"backend": backend, "block_bytes": args.block_bytes, "queue_depth": args.queue_depth}
    line = {
        "bench": "priority",
        **machine(),
        **settings,
        "read_bytes": args.read_bytes,
        "rounds": args.rounds,
        **result,
    }
    print(json.dumps(line))
    if args.save:
        save("priority", line)


if __name__ == "__main__":
    main()
