"""Compares striping by bandwidth over drives of unequal speed with equal stripes and with each drive alone.

    python bench/striping.py /nvme0 /nvme1
    python bench/striping.py /local_nvme/a /local_nvme/b --limits 400MB,100MB      # one drive, slowed down to look like two

--limits needs a test build of infinity (`make setup-test`).

Every round reads and writes the same bytes each way. `ideal` is the sum of the drives' rates alone in that round.
Prints a table and, last, one JSON line; --save appends it to bench/results/striping.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from results import machine, save

from infinity import _aio
from infinity.aio import IoEngine, PinnedPool, Priority, Request
from infinity.store.arena import Arena, step_bandwidth
from infinity.store.run_folder import RunFolder
from infinity.units import MIB, parse_bytes

CHUNK_BYTES = 64 * MIB


class Layout:
    """An arena over some of the drives, and one lease to move it through."""

    def __init__(
        self,
        paths: Sequence[Path],
        bandwidths: Sequence[float],
        nbytes: int,
        stack: ExitStack,
    ) -> None:
        folders = [RunFolder(path) for path in paths]
        for folder in folders:
            stack.callback(folder.close)
        pool = PinnedPool(CHUNK_BYTES)
        self.engine = IoEngine(pool, drives=len(folders))
        stack.callback(self.engine.close)
        self.arena = Arena(folders, self.engine, name="striping.arena", bandwidths=bandwidths)
        stack.callback(self.arena.close)
        self.lease = pool.lease(CHUNK_BYTES)
        self.lease.view(torch.int64).random_()
        self.nbytes = nbytes
        self.arena.reserve([nbytes], "the test file")
        self.move("write")

    def move(self, operation: str) -> float:
        """Move all bytes once; return the bytes per second."""
        began = time.perf_counter()
        for at in range(0, self.nbytes, CHUNK_BYTES):
            request = Request(operation, self.arena.file, at, self.lease, 0, CHUNK_BYTES, Priority.DEMAND)
            self.engine.wait(self.engine.start([request]))
        return self.nbytes / (time.perf_counter() - began)


def slow_down(paths: Sequence[Path], bytes_per_s: Sequence[float]) -> None:
    """Limit the rate of the files under each path. Exits without a test build, which this needs."""
    make_worse = getattr(_aio, "make_worse", None)
    if make_worse is None:
        raise SystemExit("striping: error: --limits needs a test build of infinity: make setup-test")
    limits = [(rate, 0.0, str(path.absolute())) for path, rate in zip(paths, bytes_per_s, strict=True)]
    make_worse(limits, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", help="folders on the drives")
    parser.add_argument("--limits", default="", help="bytes per second of each, to slow drives down; 0 for no limit")
    parser.add_argument(
        "--size", type=parse_bytes, default=parse_bytes("256MiB"), help="bytes per round (default: 256MiB)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/striping.jsonl")
    args = parser.parse_args()
    given = [float(parse_bytes(text)) for text in args.limits.split(",") if text]
    if given:
        slow_down(args.paths, given)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    size = max(CHUNK_BYTES, args.size // CHUNK_BYTES * CHUNK_BYTES)
    with ExitStack() as stack:
        layouts = {str(path): Layout([path], [1.0], size, stack) for path in args.paths}
        alone = [step_bandwidth(one.move("read"), one.move("write")) for one in layouts.values()]
        layouts["equal stripes"] = Layout(args.paths, [1.0] * len(alone), size, stack)
        layouts["by bandwidth"] = Layout(args.paths, alone, size, stack)
        for _ in range(args.rounds):
            for operation in ("read", "write"):
                for name, layout in layouts.items():
                    rates[name, operation].append(layout.move(operation))
                singles = [rates[str(path), operation][-1] for path in args.paths]
                rates["ideal", operation].append(sum(singles))
        shares = [round(share, 3) for _, share in layouts["by bandwidth"].arena.shares]
        drives = layouts["by bandwidth"].engine.drives
    result: dict[str, dict[str, float]] = {}
    print(f"{'MB/s':>30}{'read':>10}{'write':>10}")
    for name in [*layouts, "ideal"]:
        result[name] = {way: round(statistics.median(rates[name, way]) / 1e6, 1) for way in ("read", "write")}
        print(f"{name[-30:]:>30}{result[name]['read']:10.1f}{result[name]['write']:10.1f}")
    ratio = {way: round(result["by bandwidth"][way] / result["ideal"][way], 3) for way in ("read", "write")}
    print(f"{'by bandwidth / ideal':>30}{ratio['read']:10.3f}{ratio['write']:10.3f}")
    per_drive = [[round(d.read_bytes_per_s / 1e6, 1), round(d.write_bytes_per_s / 1e6, 1)] for d in drives]
    line = {"bench": "striping", **machine(), "limits_bytes_per_s": given, "rounds": args.rounds, "shares": shares}
    line |= {"mb_per_s": {name.rsplit("/", 1)[-1]: row for name, row in result.items()}, "ratio_to_ideal": ratio}
    line |= {"read_write_mb_per_s_of_each_drive": per_drive}
    print(json.dumps(line))
    if args.save:
        save("striping", line)


if __name__ == "__main__":
    main()
