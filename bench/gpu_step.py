"""Times training steps on one GPU, with states in its memory, in host memory and on NVMe, and the drive's lower bound.

    python bench/gpu_step.py --params 1B,7B --ways device,host,nvme --nvme-path /local_nvme --save
    python bench/gpu_step.py --params 1B --ways nvme,deepspeed-nvme,host,deepspeed-host      # where deepspeed is installed

Each size and way runs in a process of its own; one that doesn't fit says so and the others continue. Prints a table and
a JSON line per run; --save appends these to bench/results/gpu_step.jsonl. Without a GPU it rehearses on the CPU: use
small sizes. DeepSpeed runs with the options of bench/step_worker.py.

`compute_seconds` is the time of GPU kernels in a step, `drive_seconds` the drive time for the step's bytes at the mixed
rate, `lower_bound_seconds` the larger of the two. `h2d` and `d2h` are seconds of copies, and of those not overlapped by
compute ("exposed"), from torch's profiler in one more step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.cli.program import run_program

if TYPE_CHECKING:
    from gpt import GPTConfig

    from infinity.schedule.scheme import Scheme

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "examples"), str(HERE.parent / "tests" / "gpu")]
WAYS = ("device", "host", "nvme")
OF_DEEPSPEED = {"deepspeed-host": "cpu", "deepspeed-nvme": "nvme"}  # the way, and where it offloads to


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--params", default="1B", help="sizes, comma-separated (default: %(default)s)")
    parser.add_argument(
        "--ways",
        type=ways,
        default=",".join(WAYS),
        help=f"comma-separated; also {', '.join(OF_DEEPSPEED)} (default: %(default)s)",
    )
    parser.add_argument("--batch-sizes", default="8", help="comma-separated (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="steps that count (default: %(default)s)")
    parser.add_argument("--first-steps", type=int, default=2, help="steps before them (default: %(default)s)")
    parser.add_argument("--device-bytes-max", default=None, help="limit of the GPU's memory, such as 24GiB")
    parser.add_argument("--pinned-bytes-max", default="auto")
    parser.add_argument("--moments-dtype", default="fp32", choices=("fp32", "bf16", "8bit"))
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute activations in the backward (default: %(default)s; DeepSpeed 0.19.8 can't with parameters on NVMe)",
    )
    parser.add_argument(
        "--drive-trial-seconds", type=float, default=3.0, help="each way, to measure the drive (default: %(default)s)"
    )
    parser.add_argument("--drive-file", default="4GiB", help="size of the drive's test file (default: %(default)s)")
    parser.add_argument("--trace-dir", help="folder for traces of one more step of runs on NVMe: see docs/timeline.md")
    parser.add_argument("--timeout-seconds", type=float, default=240.0, help="limit of one run")
    parser.add_argument("--nvme-path", default=str(HERE.parent / ".nvme"))
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.set_defaults(func=measure_all)
    return run_program(parser, None)


def ways(text: str) -> str:
    """Check comma-separated names of ways (an argparse type)."""
    if unknown := {*text.split(",")} - {*WAYS, *OF_DEEPSPEED}:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of {', '.join((*WAYS, *OF_DEEPSPEED))}")
    return text


def measure_all(asked: argparse.Namespace) -> int:
    """Measure each size in each way. Returns 1 if none could be measured."""
    if asked.worker:
        order = json.loads(asked.worker)
        print(json.dumps((measure_deepspeed if order["way"] in OF_DEEPSPEED else measure)(order)))
        return 0
    if asked.trace_dir is not None:
        Path(asked.trace_dir).mkdir(parents=True, exist_ok=True)
    options = {name: value for name, value in vars(asked).items() if name != "func"}
    lines = []
    for size in asked.params.split(","):
        for way, batch_size in itertools.product(asked.ways.split(","), asked.batch_sizes.split(",")):
            order = {**options, "params": size, "way": way, "batch_size": int(batch_size)}
            lines.append(run(order, asked.timeout_seconds))
            print(json.dumps(lines[-1]), flush=True)
            if asked.save and "failed" not in lines[-1]:
                from results import save

                save("gpu_step", lines[-1])
    show(lines)
    return 0 if any("failed" not in line for line in lines) else 1


def run(order: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Measure one size in one way, in a process of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(order)]
    label = {"params": order["params"], "way": order["way"], "batch_size": order["batch_size"]}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {**label, "failed": f"still running after {timeout_seconds:g} s"}
    if done.returncode != 0:
        return {**label, "failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Measure a step (seconds, bytes) and its lower bound."""
    import torch
    from gpt import GPT, config_for

    import infinity
    from infinity.drive.measure import measure_drive
    from infinity.schedule.scheme import MOMENT_BYTES_OF, Scheme
    from infinity.units import parse_bytes, parse_count

    on_gpu = limit_device(order)
    where = {"device": "none"}
    if order["way"] != "device":
        where = {"device": "cpu"} if order["way"] == "host" else {"device": "nvme", "nvme_path": order["nvme_path"]}
    config = {
        "train_micro_batch_size_per_gpu": order["batch_size"],
        "bf16": {"enabled": True},
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where},
        "infinity": {
            "pinned_bytes_max": "auto" if order["way"] == "host" else order["pinned_bytes_max"],
            "moments_dtype": order["moments_dtype"],
        },
    }
    torch.manual_seed(0)
    shape = config_for(parse_count(order["params"]), order["context"], checkpoint_activations=order["checkpointing"])
    with infinity.init_empty():
        model = GPT(shape)
    engine = infinity.initialize(model=model, config=config)[0]
    size = order["batch_size"], order["context"] + 1
    batch = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0)).to(engine.device)

    def step() -> float:
        began = time.perf_counter()
        logits = engine(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        if engine.swap is not None:
            engine.swap.stager.settle_all()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    line = labelled(order, engine.numel, timed(order, step))
    if on_gpu:
        line |= profiled(step)
    line["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if engine.swap is not None and order["way"] == "host":
        line["pinned_bytes"] = engine.swap.stats().pinned_bytes
    elif engine.swap is not None:
        # As long as a step, as drives may be faster in bursts.
        trial = {"nbytes": parse_bytes(order["drive_file"]), "rounds": 1, "seconds": order["drive_trial_seconds"]}
        rates = measure_drive(order["nvme_path"], **trial)
        lower_bound = engine.step_lower_bound_seconds(
            compute_seconds=0.0, read_bytes_per_s=rates.read_bytes_per_s, write_bytes_per_s=rates.write_bytes_per_s
        )
        ahead = engine.swap.paging.parameters.ahead
        line |= {
            "drive_lower_bound_seconds": lower_bound,
            "share_of_drive_lower_bound": lower_bound / line["seconds"],
            "step_bytes": engine.swap.step_bytes(),
        }
        line |= {
            "pinned_bytes": engine.swap.stats().pinned_bytes,
            "late_copies": ahead.late if ahead is not None else None,
        }
        line["drive"] = vars(rates)
        line["drive_seconds"] = sum(line["step_bytes"]) / rates.mixed_bytes_per_s
        if order["trace_dir"] is not None:
            engine.start_trace()
            step()
            engine.stop_trace(Path(order["trace_dir"]) / f"step-{order['params']}-{order['batch_size']}.json")
        line["lower_bound_seconds"] = max(line["drive_seconds"], line.get("compute_seconds", 0.0))
        options = engine.swap.paging.options
        moment_bytes = MOMENT_BYTES_OF[order["moments_dtype"]]
        scheme = Scheme(
            options.master_weights, options.update, moment_bytes=moment_bytes, speculative=options.speculative
        )
        line["planned"] = planned(shape, order["batch_size"], scheme, line["pinned_bytes"], device_is_host=not on_gpu)
    engine.close()
    return line


def measure_deepspeed(order: dict[str, Any]) -> dict[str, Any]:
    """Measure the same model's step in DeepSpeed's ZeRO-3."""
    import torch
    from step_worker import deepspeed_way

    from infinity.units import parse_count

    on_gpu = limit_device(order)
    more = {"numel": parse_count(order["params"]), "accumulation": 1, "clipping": 0.0, "dtype": "bf16"}
    with contextlib.redirect_stdout(sys.stderr):  # it prints its progress
        passes = deepspeed_way({**order, **more, "offload": OF_DEEPSPEED[order["way"]]})
        measured: list[dict[str, Any]] = []

        def step() -> float:
            began = time.perf_counter()
            measured.append(passes())
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        seconds = timed(order, step)
    line = labelled(order, measured[-1]["numel"], seconds)
    return line | {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def limit_device(order: dict[str, Any]) -> bool:
    """Limit this process to the requested GPU memory. Returns True if there is a GPU."""
    import torch

    from infinity.units import parse_bytes

    if torch.cuda.is_available() and order["device_bytes_max"] is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(order["device_bytes_max"]) / total)
    return torch.cuda.is_available()


def timed(order: dict[str, Any], step: Callable[[], float]) -> float:
    """Return the median seconds of the steps that count."""
    seconds = [step() for _ in range(order["first_steps"] + order["steps"])]
    return statistics.median(seconds[order["first_steps"] :])


def labelled(order: dict[str, Any], numel: int, seconds: float) -> dict[str, Any]:
    """Return the measurement's labels, step time and peak GPU memory."""
    import torch
    from results import machine

    on_gpu = torch.cuda.is_available()
    line = {"what": "gpu_step", "params": order["params"], "way": order["way"], "numel": numel}
    line |= {"device": torch.cuda.get_device_name() if on_gpu else "none: rehearsed on the CPU", **machine()}
    tokens = order["batch_size"] * order["context"]
    line |= {"seconds": seconds, "tokens_per_s": tokens / seconds}
    if on_gpu:
        line |= {"peak_device_bytes": torch.cuda.max_memory_allocated(), "device_bytes_max": order["device_bytes_max"]}
    return line | {name: order[name] for name in ("batch_size", "context", "checkpointing", "moments_dtype")}


def profiled(step: Callable[[], float]) -> dict[str, Any]:
    """Return the seconds of kernels and copies in one step."""
    import torch
    from overlap import exposed, length, on_the_gpu
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        taken = step()
    kernels, h2d, d2h = on_the_gpu(profiler.events() or ())
    torch.cuda.synchronize()
    return {
        "profiled_seconds": taken,
        "compute_seconds": length(kernels) / 1e6,
        "h2d": {"seconds": length(h2d) / 1e6, "exposed": exposed(h2d, kernels) / 1e6},
        "d2h": {"seconds": length(d2h) / 1e6, "exposed": exposed(d2h, kernels) / 1e6},
    }


def planned(
    shape: GPTConfig, samples: int, scheme: Scheme, pinned_bytes: int, *, device_is_host: bool
) -> dict[str, int]:
    """Return the bytes per tier that `infinity-bench plan` predicts; `peak_device_bytes` has no CUDA context."""
    from gpt import VOCABULARY

    from infinity.plan.estimate import memory_of
    from infinity.plan.strategy import STRATEGIES
    from infinity.plan.transformer import dense_transformer
    from infinity.plan.work import Work

    model = dense_transformer(
        layers=shape.layers, hidden=shape.hidden_size, heads=shape.heads, seq=shape.context, vocab=VOCABULARY
    )
    work = Work(model, samples=samples, clipping=False, scheme=scheme)
    memory = memory_of(work, STRATEGIES[-1], pinned_bytes=pinned_bytes, device_is_host=device_is_host)
    return {"device": sum(memory.device.values()), "host": sum(memory.host.values()), "nvme": memory.nvme_bytes}


def show(lines: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("parameters", "way", "samples", "s per step", "tokens/s", "of the lower bound", "peak on the device")
    for line in lines:
        if "failed" in line:
            table.add_row(line["params"], line["way"], str(line["batch_size"]), line["failed"], "", "", "")
            continue
        share, peak = line.get("share_of_drive_lower_bound"), line.get("peak_device_bytes")
        cells = [f"{line['seconds']:.2f}", f"{line['tokens_per_s']:.0f}", "" if share is None else f"{share:.0%}"]
        table.add_row(
            line["params"],
            line["way"],
            str(line["batch_size"]),
            *cells,
            "" if peak is None else f"{peak / 2**30:.1f} GiB",
        )
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
