"""Measures the update of a model in host memory, and the memory's bandwidth, in one interleaved run.

    python bench/host_update.py --params 200M --rounds 7

A model is paged in host memory without a drive. Each round gives every parameter a gradient in fp32 and times `step()`:
gradients in, new compute parameters out. An element moves 28 bytes with a split master and Adam: 4 of gradient, 4 of compute
parameter and remainder read and 4 written, 8 of moments read and 8 written. `memory` reads and writes as many elements
once. `torch` is its fused AdamW over fp32 masters, with the bf16 copy that FSDP2's offload makes of them: 34 bytes.
Figures are medians. Prints a table and, last, one JSON line; --save appends it to bench/results/host_update.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from results import machine, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import infinity
from infinity.cli.arguments import checked_value, count
from infinity.cli.program import run_program
from infinity.units import parse_count

WIDTH = 4096
BYTES = {"memory": 8, "infinity": 28, "torch": 34}
"""Bytes per element that a way moves."""


def ways(numel: int) -> dict[str, Callable[[], None]]:
    """Return functions that take a step of each way, for about `numel` elements."""
    layers = max(1, numel // WIDTH**2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    swap = infinity.SwapManager([])
    swap.page(model, infinity.PagingOptions(hold_parameters=True, hold_state=True))
    paged = infinity.PagedAdamW(model.parameters(), swap=swap, fused=True)
    grads = [torch.randn(WIDTH, WIDTH) for _ in range(layers)]

    def infinity_step() -> None:
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            data = parameter.data
            assert isinstance(data, DTensor)
            parameter.grad = DTensor.from_local(grad, data.device_mesh, data.placements, run_check=False)
        paged.step()
        paged.zero_grad()

    masters = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(layers)]
    copies = [torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(layers)]
    adam = torch.optim.AdamW(masters, fused=True)
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad

    def torch_step() -> None:
        adam.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)

    passed = [torch.randn(WIDTH, WIDTH) for _ in range(layers)]
    return {
        "memory": lambda: torch._foreach_add_(passed, 1.0),
        "infinity": infinity_step,
        "torch": torch_step,
    }


def measure(args: argparse.Namespace) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    numel = args.params // WIDTH**2 * WIDTH**2
    seconds: dict[str, list[float]] = {}
    steps = ways(numel)
    for number in range(args.rounds + 2):
        for way, step in steps.items():
            began = perf_counter()
            step()
            if number >= 2:  # the first ones create state and map memory
                seconds.setdefault(way, []).append(perf_counter() - began)
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    rates = {way: BYTES[way] * numel / median / 1e9 for way, median in medians.items()}
    for way, median in medians.items():
        print(f"{way:10} {median:8.4f} s {rates[way]:7.1f} GB/s, {rates[way] / rates['memory']:.2f} of the memory's")
    line: dict[str, Any] = {"bench": "host_update", **machine(), "params": numel, "rounds": args.rounds}
    line |= {"threads": torch.get_num_threads(), "seconds": medians, "gb_per_s": rates}
    print(json.dumps(line))
    if args.save:
        save("host_update", line)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    params = checked_value(parse_count, at_least=WIDTH**2)
    parser.add_argument("--params", type=params, default=parse_count("200M"), help='such as "200M" (the default)')
    parser.add_argument("--rounds", type=count, default=7, help="rounds, after two not counted (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="append the JSON line to bench/results/host_update.jsonl")
    parser.set_defaults(func=measure)
    return run_program(parser, None)


if __name__ == "__main__":
    sys.exit(main())
