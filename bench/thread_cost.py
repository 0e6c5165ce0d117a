"""Measures bookkeeping: CPU seconds of the training thread per step, by number of groups and of sub-groups.

    python bench/thread_cost.py --rounds 3 --nvme-path /local_nvme
    python bench/thread_cost.py --groups 1000 --sub-groups "" --ways stock,memory
    python bench/thread_cost.py --groups "" --sub-groups 10000 --ways backward --profile backward.txt

The models are so small that compute is negligible; the training thread's time is spent on decisions and on starting
transfers. `--groups` are blocks of one small parameter, a sub-group each; `--sub-groups` is their number in ten blocks,
cut as small as possible. The pool holds half of the state, so that staged bytes are evicted and read again. Every way
is a process of its own, and they step in turns; "stock" is FSDP2 with torch's AdamW, without infinity. Prints a table
and, last, one JSON line (medians; a step, and an evaluation of the same model); --save appends it to
bench/results/thread_cost.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import machine, save
from rich.console import Console
from rich.table import Table

WAYS = (
    "stock",
    "memory",
    *(
        update + variant
        for update in ("step", "forward", "backward")
        for variant in ("", "-durable", "-spilled")
        if (update, variant) != ("backward", "-spilled")
    ),
)
"""FSDP2 alone; the engine in memory; or on NVMe with this update timing, with commits, with all gradients on NVMe."""

WIDTH = 64
SUB_GROUP_NUMEL = 2048
STATE_BYTES = 12
"""Bytes per element, with a split master."""
POOL_BYTES_MIN = 9 << 20
BLOCKS_OF_SUB_GROUPS = 10
WARM_UP_STEPS = 2
"""Steps not counted: the first is recorded, and the second begins with a cold pool."""


class Worker:
    """A process that takes steps of one model in one way on request."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends it
        )
        self._answer()

    def ask(self, request: str) -> dict[str, float]:
        """Run "step" or "evaluate". Returns CPU seconds of the training thread by phase, and wall-clock "seconds"."""
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        result: dict[str, float] = json.loads(self._answer())
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for left in Path(self._order["nvme_path"]).glob(f"infinity-*{self._process.pid}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker for {self._order} ended with status {self._process.wait()}")
        return line


def work(order: dict[str, Any]) -> None:
    """Run the worker."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other output out of the answers
    acts = {"step": _measured(order, training=True), "evaluate": _measured(order, training=False)}
    step, evaluate = _made(order)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        act = line.strip()
        profile = cProfile.Profile(time.thread_time) if order["profile"] else contextlib.nullcontext()
        with profile:
            result = acts[act](step if act == "step" else evaluate)
        if order["profile"]:
            with Path(order["profile"]).open("a") as file:
                print(f"{order['way']}: {act}", file=file)
                pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)
        print(json.dumps(result), file=answers, flush=True)
    os._exit(0)


def _measured(order: dict[str, Any], *, training: bool) -> Callable[[Callable[[], list[float]]], dict[str, float]]:
    phases = ("forward", "backward", "step") if training else ("evaluate",)

    def act(run: Callable[[], list[float]]) -> dict[str, float]:
        began = time.perf_counter()
        marks = run()
        seconds = {name: after - before for name, before, after in zip(phases, marks, marks[1:], strict=False)}
        return {**seconds, "cpu_seconds": marks[-1] - marks[0], "seconds": time.perf_counter() - began}

    return act


def _made(order: dict[str, Any]) -> tuple[Callable[[], list[float]], Callable[[], list[float]]]:
    """Return functions that step and evaluate; each returns this thread's CPU clock at start and after each phase."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import infinity

    class Block(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((rows, WIDTH), 0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.linear(x, self.weight).mean(-1, keepdim=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = order["numel"] // order["groups"] // WIDTH
            self.blocks = nn.ModuleList(Block(rows) for _ in range(order["groups"]))
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    batch = torch.randn(1, WIDTH)
    model = Model()
    clock = time.thread_time
    if order["way"] == "stock":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def stock_step() -> list[float]:
            marks = [clock()]
            loss = model(batch).float().square().mean()
            marks.append(clock())
            loss.backward()
            marks.append(clock())
            optimizer.step()
            optimizer.zero_grad()
            return [*marks, clock()]

        def stock_evaluate() -> list[float]:
            began = clock()
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
            return [began, clock()]

        return stock_step, stock_evaluate
    update, _, variant = order["way"].partition("-")
    device = {"device": "none"} if update == "memory" else {"device": "nvme", "nvme_path": order["nvme_path"]}
    ours: dict[str, Any] = {"wrap": ["Block"], "run_name": f"bench-{os.getpid()}"}
    if update != "memory":
        ours |= {"update": update, "pinned_bytes_max": order["pool_bytes"]}
    ours |= {"durable": {"durability": "step"}, "spilled": {"gradient_bytes_max": 0}}.get(variant, {})
    config = {
        "bf16": {"enabled": True},
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": device,
            "offload_optimizer": device,
            "sub_group_size": SUB_GROUP_NUMEL if order["cut"] else "auto",
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": ours,
    }
    engine = infinity.initialize(model=model, config=config)[0]

    def step() -> list[float]:
        marks = [clock()]
        loss = engine(batch).float().square().mean()
        marks.append(clock())
        engine.backward(loss)
        marks.append(clock())
        engine.step()
        return [*marks, clock()]

    def evaluate() -> list[float]:
        began = clock()
        engine.eval()
        with torch.no_grad():
            engine(batch)
        engine.train()
        return [began, clock()]

    return step, evaluate


def order_for(way: str, *, groups: int, sub_groups: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return a worker's order: `groups` groups of one sub-group each, or `sub_groups` sub-groups in a few groups."""
    numel = (sub_groups or groups) * SUB_GROUP_NUMEL
    return {
        "way": way,
        "groups": groups or BLOCKS_OF_SUB_GROUPS,
        "numel": numel,
        "cut": bool(sub_groups),
        "pool_bytes": max(POOL_BYTES_MIN, int(numel * STATE_BYTES * args.pool_share)),
        "nvme_path": args.nvme_path,
        "profile": args.profile,
    }


def measure(args: argparse.Namespace, ways: list[str], **size: int) -> dict[str, dict[str, float]]:
    """Return medians over the rounds, by way."""
    workers: dict[str, Worker] = {}
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    try:
        for way in ways:
            workers[way] = Worker(order_for(way, **{"groups": 0, "sub_groups": 0, **size}, args=args))
        for round_number in range(WARM_UP_STEPS + args.rounds):
            for way, worker in workers.items():
                row = worker.ask("step")
                if round_number >= WARM_UP_STEPS:
                    rows[way].append(row)
        for _ in range(1 + args.rounds):  # the first records the path
            for way, worker in workers.items():
                evaluation = worker.ask("evaluate")["cpu_seconds"]
                rows[way].append({"evaluate": evaluation})
    finally:
        for worker in workers.values():
            worker.close()
    return {way: _medians(measured) for way, measured in rows.items()}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(statistics.median(row[name] for row in rows if name in row), 5) for name in names}


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print a table on standard error."""
    table = Table("size", "way", "CPU s a step", "forward", "backward", "step", "evaluation", "s")
    for size, ways in results.items():
        for way, row in ways.items():
            names = ("cpu_seconds", "forward", "backward", "step", "evaluate", "seconds")
            table.add_row(size, way, *(f"{row[name]:.4g}" for name in names))
    Console(stderr=True, width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--groups", default="25,100,400,1000", help="numbers of groups (default: %(default)s)")
    parser.add_argument("--sub-groups", default="1000,4000,10000", help="numbers of sub-groups (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool-share", type=float, default=0.5, help="share of the state (default: %(default)s)")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="a folder on a drive (default: %(default)s)")
    parser.add_argument("--profile", help="file for cProfile's figures of each step and evaluation")
    parser.add_argument("--save", metavar="WHEN", help="append the JSON line, under this name, to bench/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
    ways = args.ways.split(",")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for groups in filter(None, args.groups.split(",")):
        results[f"{groups} groups"] = measure(args, ways, groups=int(groups))
    for sub_groups in filter(None, args.sub_groups.split(",")):
        results[f"{sub_groups} sub-groups"] = measure(args, ways, sub_groups=int(sub_groups))
    show(results)
    line = {"bench": "thread_cost", **machine(), "rounds": args.rounds, "pool_share": args.pool_share, "found": results}
    if args.save:
        save("thread_cost", {"code": args.save, **line})
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
