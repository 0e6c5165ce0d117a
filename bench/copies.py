"""Measures copies between pinned host memory and the device, and cudaMemcpyAsync with torch's own pinned memory.

    python bench/copies.py --bytes 256MiB --rounds 9

"ours" is what a training step does: StreamDevice over the pool's slab, or a buffer. Both ways alternate within each
round. Prints one JSON line; --save appends it to bench/results/copies.jsonl. Without a GPU it rehearses on the CPU,
memory to memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from results import machine, save

from infinity.aio import PinnedPool
from infinity.device import HostBuffers, device_for
from infinity.units import parse_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--bytes", type=parse_bytes, default=parse_bytes("256MiB"), help="size of one copy (default: 256MiB)"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="append the line to bench/results/copies.jsonl")
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    line = {"what": "copies", "bytes": asked.bytes, "device": name_of_device(), **machine()}
    line |= measure(asked.bytes, asked.rounds, torch.device("cuda" if on_gpu else "cpu"))
    print(json.dumps(line))
    if asked.save:
        save("copies", line)
    return 0


def name_of_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none: rehearsed on the CPU"


def measure(nbytes: int, rounds: int, where: torch.device) -> dict[str, object]:
    """Return the bytes per second of each way (median of the rounds), and its share of cudaMemcpyAsync alone."""
    device = device_for(where)
    pool = PinnedPool(nbytes)
    refused = device.register(pool.slab)
    staged = pool.lease(nbytes).view(torch.uint8)
    buffer = HostBuffers(device, pin=True).lend(nbytes, torch.uint8)
    there = torch.empty(nbytes, dtype=torch.uint8, device=where)
    plain = torch.empty(nbytes, dtype=torch.uint8, pin_memory=where.type == "cuda")

    def take() -> None:
        in_flight = device.start_h2d(staged)
        in_flight.on_device()
        in_flight.copy_event.wait()

    ways: dict[str, Callable[[], object]] = {
        "ours_in": take,
        "alone_in": lambda: there.copy_(plain, non_blocking=True),
        "ours_out": lambda: device.start_d2h(there, buffer.tensor).wait(),
        "alone_out": lambda: plain.copy_(there, non_blocking=True),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            settle(where)
            began = time.perf_counter()
            run()
            settle(where)
            if number:
                seconds[way].append(time.perf_counter() - began)
    results: dict[str, object] = {
        f"{way}_bytes_per_s": nbytes / statistics.median(taken) for way, taken in seconds.items()
    }
    for side in ("in", "out"):
        share = statistics.median(seconds[f"alone_{side}"]) / statistics.median(seconds[f"ours_{side}"])
        results[f"{side}_share_of_alone"] = round(share, 3)
    return results | {"refused": refused}


def settle(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
