"""Compares the update kernel with torch's sequence of operations and with DeepSpeedCPUAdam, in one interleaved run.

    python bench/adam.py --rounds 7
    python bench/adam.py --deepspeed-python ../ds/bin/python      # a Python that has deepspeed and its cpu_adam

Every way updates the same number of elements, sub-group by sub-group: it scales the fp32 gradients, does one step of
AdamW, and leaves a bf16 copy of the new weights. Those called "alone" only do the step. The order of the ways changes
from round to round; figures are medians. GB/s counts the bytes that a way must move, however often it moves them: 28
per element for masters split into copy and remainder (26 with bf16 gradients, 20 with bf16 moments, 16 with 8-bit
ones), 30 for masters in full, 28 for the step alone. `memory` is a pass over one field of the same memory, read and
written. Prints a table and, last, one JSON line; --save appends it to bench/results/adam.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from adam_deepspeed import BETAS, EPS, GRAD_SCALE, LR, WEIGHT_DECAY, field
from results import machine, save

from infinity.optim import AdamSettings, adam_, kernel
from infinity.optim.coded_moments import BLOCK_NUMEL, blocks_of
from infinity.optim.kernel import GradPiece

SETTINGS = AdamSettings(LR, BETAS, EPS, WEIGHT_DECAY, decoupled_weight_decay=True, maximize=False, fused=True)
STEP = 10
SECONDS_MIN = 0.1  # per measurement; a way is repeated until it has taken this long
MUST_MOVE = {
    "kernel split": 28,
    "kernel split, bf16 gradients": 26,
    "kernel split, bf16 moments": 20,
    "kernel split, 8-bit moments": 16,
    "kernel full": 30,
    "torch split": 28,
    "torch": 30,
    "torch Adam alone": 28,
    "deepspeed": 30,
    "deepspeed Adam alone": 28,
    "memory": 8,
}

Way = Callable[[], float]
_TIE = 0x8000


def split(master: torch.Tensor, compute_param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Do what kernel.split does, with torch's own operations."""
    bits = master.view(torch.int32)
    compute_param.copy_(master)
    remainder.copy_(bits)  # keeps the lower 16 bits
    tied = (remainder == _TIE - 0x10000).nonzero().squeeze(1)
    rounded_up = compute_param.view(torch.int16)[tied] != (bits[tied] >> 16).to(torch.int16)
    return tied[rounded_up].to(torch.int32)


def join(compute_param: torch.Tensor, remainder: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    low = remainder.to(torch.int32) & 0xFFFF
    rounded_up = low > _TIE
    rounded_up[ties] = True
    bits = (compute_param.view(torch.int16).to(torch.int32) - rounded_up.to(torch.int32)) << 16
    return (bits | low).view(torch.float32)


class Sets:
    """A working set of elements, and the ways to update it."""

    def __init__(self, numel: int, sub_group_numel: int) -> None:
        self.numel, self.sub_group_numel = numel, sub_group_numel
        self.master, self.grad, self.exp_avg, self.exp_avg_sq = (field(numel, torch.float32) for _ in range(4))
        self.exp_avg_sq.abs_()
        self.grad16 = field(numel, torch.bfloat16)
        self.moments16 = field(numel, torch.bfloat16), field(numel, torch.bfloat16).abs_()
        self.codes = [field(numel, torch.float32).mul_(40).add_(127).to(torch.uint8) for _ in range(2)]
        self.scales = torch.full((2 * blocks_of(numel),), 1e-3)
        self.copy = field(numel, torch.bfloat16)
        self.remainder = field(numel, torch.int16)
        self.ties = {
            place.start: split(self.master[place], self.copy[place], self.remainder[place]) for place in self.places()
        }
        self.ways: dict[str, Callable[[slice], None]] = {
            "kernel split": self.kernel_split,
            "kernel split, bf16 gradients": self.kernel_split16,
            "kernel split, bf16 moments": self.kernel_small_moments,
            "kernel split, 8-bit moments": self.kernel_coded_moments,
            "kernel full": self.kernel_full,
            "torch split": self.torch_split,
            "torch": self.torch,
            "torch Adam alone": self.torch_alone,
            "memory": self.memory,
        }

    def places(self) -> list[slice]:
        return [
            slice(start, min(start + self.sub_group_numel, self.numel))
            for start in range(0, self.numel, self.sub_group_numel)
        ]

    def run(self, way: str) -> float:
        update = self.ways[way]
        began = perf_counter()
        for place in self.places():
            update(place)
        return perf_counter() - began

    def kernel_split(
        self,
        at: slice,
        grad: torch.Tensor | None = None,
        moments: tuple[torch.Tensor, torch.Tensor] | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        exp_avg, exp_avg_sq = moments or (self.exp_avg, self.exp_avg_sq)
        self.ties[at.start] = kernel.update(
            SETTINGS,
            step=STEP,
            grad_scale=GRAD_SCALE,
            pieces=[GradPiece(0, self.grad[at] if grad is None else grad[at], key=1, place=at.start)],
            exp_avg=exp_avg[at],
            exp_avg_sq=exp_avg_sq[at],
            scales=scales,
            compute_param=self.copy[at],
            remainder=self.remainder[at],
            ties=self.ties[at.start],
        )

    def kernel_split16(self, at: slice) -> None:
        self.kernel_split(at, self.grad16)

    def kernel_small_moments(self, at: slice) -> None:
        self.kernel_split(at, moments=self.moments16)

    def kernel_coded_moments(self, at: slice) -> None:
        scales = self.scales[2 * at.start // BLOCK_NUMEL : 2 * blocks_of(at.stop)]
        self.kernel_split(at, moments=(self.codes[0], self.codes[1]), scales=scales)

    def kernel_full(self, at: slice) -> None:
        kernel.update(
            SETTINGS,
            step=STEP,
            grad_scale=GRAD_SCALE,
            pieces=[GradPiece(0, self.grad[at])],
            exp_avg=self.exp_avg[at],
            exp_avg_sq=self.exp_avg_sq[at],
            master=self.master[at],
            compute_param=self.copy[at],
        )
        # From now on the copy belongs to the full master. With the old remainder, later ways compute useless values, in
        # the same time.

    def torch_split(self, at: slice) -> None:
        master = join(self.copy[at], self.remainder[at], self.ties[at.start])
        self.step_of_torch(master, at)
        self.ties[at.start] = split(master, self.copy[at], self.remainder[at])

    def torch(self, at: slice) -> None:
        self.step_of_torch(self.master[at], at)
        self.copy[at].copy_(self.master[at])

    def step_of_torch(self, master: torch.Tensor, at: slice) -> None:
        self.grad[at].mul_(1.0)  # takes as long as any other scale, and keeps the gradients
        self.torch_alone(at, master)

    def torch_alone(self, at: slice, master: torch.Tensor | None = None) -> None:
        adam_(
            SETTINGS,
            masters=[self.master[at] if master is None else master],
            grads=[self.grad[at]],
            exp_avgs=[self.exp_avg[at]],
            exp_avg_sqs=[self.exp_avg_sq[at]],
            steps=[torch.tensor(STEP - 1.0)],
        )

    def memory(self, at: slice) -> None:
        self.master[at].mul_(1.0)


class DeepSpeed:
    """A worker under another Python."""

    def __init__(self, python: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("adam_deepspeed.py"))],
            env={
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": str(threads),
                "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, way: str, numel: int, sub_group_numel: int) -> float:
        assert self._process.stdin and self._process.stdout
        order = {"way": way, "numel": numel, "sub_group_numel": sub_group_numel}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"deepspeed's worker ended with status {self._process.wait()}: does cpu_adam build there?")
        return float(json.loads(answer)["seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def play_rounds(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after one warm-up of each."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            taken = []
            while not taken or sum(taken) < SECONDS_MIN:
                taken.append(ways[name]())
            seconds[name].append(statistics.median(taken))
    return seconds


def measure(numel: int, threads: int, sub_group_numel: int, rounds: int, deepspeed: DeepSpeed | None) -> dict[str, Any]:
    """Measure and print a table; return its rows."""
    torch.set_num_threads(threads)
    sets = Sets(numel, sub_group_numel)
    ways: dict[str, Way] = {name: lambda name=name: sets.run(name) for name in sets.ways}
    if deepspeed:
        ways["deepspeed"] = lambda: deepspeed.run("all", numel, sub_group_numel)
        ways["deepspeed Adam alone"] = lambda: deepspeed.run("alone", numel, sub_group_numel)
    seconds = play_rounds(ways, rounds)
    rows = {}
    print(f"\n{f'{numel / 1e6:g} M elements, threads: {threads}':>34}{'ns/element':>12}{'min':>8}{'max':>8}{'GB/s':>8}")
    for name in [name for name in MUST_MOVE if name in seconds]:
        low, middle, high = (of(seconds[name]) / numel * 1e9 for of in (min, statistics.median, max))
        rows[name] = {"ns_per_element": round(middle, 4), "min": round(low, 4), "max": round(high, 4)}
        rows[name]["gb_per_s"] = round(MUST_MOVE[name] / middle, 2)
        print(f"{name:>34}{middle:12.3f}{low:8.3f}{high:8.3f}{rows[name]['gb_per_s']:8.1f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numels", type=int, nargs="+", default=[1 << 20, 16 << 20, 200_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sub-group-numel", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deepspeed-python", help="a Python with deepspeed, to measure its DeepSpeedCPUAdam")
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/adam.jsonl")
    args = parser.parse_args()
    line = {"bench": "adam", **machine(), "instructions": kernel.INSTRUCTIONS[0], "rounds": args.rounds}
    line |= {"sub_group_numel": args.sub_group_numel, "load_before": round(os.getloadavg()[0], 1)}
    results = {}
    for threads in args.threads:
        deepspeed = DeepSpeed(args.deepspeed_python, threads) if args.deepspeed_python else None
        try:
            for numel in args.numels:
                rows = measure(numel, threads, args.sub_group_numel, args.rounds, deepspeed)
                results[f"{numel} elements, {threads} threads"] = rows
        finally:
            if deepspeed:
                deepspeed.close()
    if not kernel.matches_torch(SETTINGS):
        print("this torch rounds differently: the kernel would not be used here", file=sys.stderr)
    line |= {"load_after": round(os.getloadavg()[0], 1), "ways": results}
    print(json.dumps(line))
    if args.save:
        save("adam", line)


if __name__ == "__main__":
    main()
