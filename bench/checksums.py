"""Measures the throughput of page checksums, by every method of this processor, in the CPU time of one thread.

    python bench/checksums.py --rounds 7

Each round sums pages in memory, and pages in the caches. Prints one JSON line (GB/s, medians); --save appends
it to bench/results/checksums.jsonl. The cost in a step: `bench/step.py --ways forward,forward-unchecked`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from results import machine, save

from infinity._aio import PinnedSlab, crc32c_ways, page_checksums
from infinity.units import MIB

COLD_BYTES = 256 * MIB
HOT_BYTES = MIB // 4


def rate(pages: memoryview, repeats: int, way: str) -> float:
    """Return the GB/s of one thread that sums `pages` `repeats` times."""
    began = time.thread_time()
    for _ in range(repeats):
        page_checksums(pages, way=way)
    return len(pages) * repeats / (time.thread_time() - began) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="append the JSON line to bench/results/checksums.jsonl")
    args = parser.parse_args()
    slab = PinnedSlab(COLD_BYTES)
    torch.frombuffer(slab, dtype=torch.int64).random_()
    cold = memoryview(slab)
    hot = cold[:HOT_BYTES]
    rates_of: dict[str, dict[str, list[float]]] = {way: {"memory": [], "cache": []} for way in crc32c_ways()}
    for _ in range(args.rounds):
        for way, rates in rates_of.items():
            nbytes = COLD_BYTES // (16 if way == "table" else 1)
            rates["memory"].append(rate(cold[:nbytes], 1, way))
            rates["cache"].append(rate(hot, nbytes // HOT_BYTES, way))
    medians = {
        way: {where: round(statistics.median(measured), 2) for where, measured in rates.items()}
        for way, rates in rates_of.items()
    }
    line = {"bench": "checksums", **machine(), "rounds": args.rounds, "gb_per_s": medians}
    print(json.dumps(line))
    if args.save:
        save("checksums", line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
