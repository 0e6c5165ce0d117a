"""Training steps on one GPU: in its own memory, with host memory, with NVMe; tokens per second beside the drives' lower bound.

    python bench/gpu_step.py --params 1B,7B --ways device,host,nvme --nvme-path /local_nvme --save

Each size and way runs in a process of its own; one that doesn't fit says so and the rest go on. Prints a table and a JSON line
per run; with --save these are appended to bench/results/gpu_step.jsonl. Without a GPU it rehearses on the CPU: give it small
sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
WAYS = ("device", "host", "nvme")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--params", default="1B", help="sizes, with commas between (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas between (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="that count, after two that don't")
    parser.add_argument("--pinned-bytes-max", default="auto")
    parser.add_argument("--timeout-seconds", type=float, default=240.0, help="of one run")
    parser.add_argument("--nvme-path", default=str(HERE.parent / ".nvme"))
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(measure(json.loads(asked.worker))))
        return 0
    lines = []
    for size in asked.params.split(","):
        for way in asked.ways.split(","):
            order = {**vars(asked), "params": size, "way": way}
            lines.append(run(order, asked.timeout_seconds))
            print(json.dumps(lines[-1]), flush=True)
            if asked.save and "failed" not in lines[-1]:
                from results import save

                save("gpu_step", lines[-1])
    show(lines)
    return 0 if any("failed" not in line for line in lines) else 1


def run(order: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """One size, one way, in a process of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(order)]
    label = {"params": order["params"], "way": order["way"]}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {**label, "failed": f"no end after {timeout_seconds:g} s"}
    if done.returncode != 0:
        return {**label, "failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """What a step takes (seconds, bytes), and what it could."""
    import torch
    from gpt import GPT, config_for
    from results import machine

    import infinity
    from infinity.drive.measure import measure_drive
    from infinity.units import MIB, parse_count

    on_gpu = torch.cuda.is_available()
    where = {"device": "none"}
    if order["way"] != "device":
        where = {"device": "cpu"} if order["way"] == "host" else {"device": "nvme", "nvme_path": order["nvme_path"]}
    config = {
        "train_micro_batch_size_per_gpu": order["batch_size"],
        "bf16": {"enabled": True},
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where},
        "infinity": {"pinned_bytes_max": order["pinned_bytes_max"]},
    }
    torch.manual_seed(0)
    with infinity.init_empty():
        model = GPT(config_for(parse_count(order["params"]), order["context"], checkpoint_activations=True))
    engine = infinity.initialize(model=model, config=config)[0]
    size = order["batch_size"], order["context"] + 1
    batch = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0)).to(engine.device)
    seconds = []
    for _ in range(2 + order["steps"]):
        began = time.perf_counter()
        logits = engine(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        if engine.swap is not None:
            engine.swap.stager.settle_all()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    taken = statistics.median(seconds[2:])
    tokens = order["batch_size"] * order["context"]
    line = {"what": "gpu_step", "params": order["params"], "way": order["way"], "numel": engine.numel}
    line |= {"device": torch.cuda.get_device_name() if on_gpu else "none: rehearsed on the CPU", **machine()}
    line |= {
        "seconds": taken,
        "tokens_per_s": tokens / taken,
        "batch_size": order["batch_size"],
        "context": order["context"],
    }
    if on_gpu:
        line["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    if engine.swap is not None:
        rates = measure_drive(order["nvme_path"], nbytes=256 * MIB, rounds=2)
        lower_bound = engine.step_lower_bound_seconds(
            compute_seconds=0.0, read_bytes_per_s=rates.read_bytes_per_s, write_bytes_per_s=rates.write_bytes_per_s
        )
        ahead = engine.swap.paging.parameters.ahead
        line |= {
            "drive_lower_bound_seconds": lower_bound,
            "share_of_drive_lower_bound": lower_bound / taken,
            "step_bytes": engine.swap.step_bytes(),
        }
        line |= {
            "pinned_bytes": engine.swap.stats().pinned_bytes,
            "late_copies": ahead.late if ahead is not None else None,
        }
    engine.close()
    return line


def show(lines: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("parameters", "way", "s per step", "tokens/s", "of the lower bound", "peak on the device")
    for line in lines:
        if "failed" in line:
            table.add_row(line["params"], line["way"], line["failed"], "", "", "")
            continue
        share, peak = line.get("share_of_drive_lower_bound"), line.get("peak_device_bytes")
        cells = [f"{line['seconds']:.2f}", f"{line['tokens_per_s']:.0f}", "" if share is None else f"{share:.0%}"]
        table.add_row(line["params"], line["way"], *cells, "" if peak is None else f"{peak / 2**30:.1f} GiB")
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
