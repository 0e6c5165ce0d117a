"""Shows whether an engine adds the gradients of all micro-batches: the table of docs/reliability.md.

    python bench/accumulated_gradients.py --nvme-path /local_nvme --deepspeed-python ds018/bin/python,ds019/bin/python

Every engine trains the same small model in fp32 on the CPU, for a few steps of several micro-batches, with its
optimizer offloaded. The reference is plain PyTorch in memory. Compared are the gradient norm that each engine reports,
and the parameters after the last step. Prints the table in Markdown and, last, one JSON line; --save appends that to
bench/results/accumulated_gradients.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MICRO_BATCHES, STEPS, LR = 4, 3, 0.1
SECONDS_MAX = 120
"""For one engine. Some versions of DeepSpeed hang with newer versions of torch."""
COLUMNS = ("engine", "version", "gradients", "norm / plain PyTorch's", "largest difference of a weight", "sums")


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        return 0
    sys.path.insert(0, str(HERE.parent))
    from infinity.cli.program import run_program

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--deepspeed-python", default="", help="Pythons that have deepspeed, separated by commas")
    parser.add_argument("--nvme-path", default=str(HERE.parent / ".nvme"))
    parser.add_argument("--save", action="store_true", help="append to bench/results/accumulated_gradients.jsonl")
    parser.set_defaults(func=run)
    return run_program(parser, None)


def run(options: argparse.Namespace) -> int:
    """Train with each engine in a process of its own; print the table."""
    from results import machine, save

    Path(options.nvme_path).mkdir(parents=True, exist_ok=True)
    engines = [(way, sys.executable) for way in ("torch", "fsdp2", "infinity-cpu", "infinity-nvme")]
    pythons = filter(None, options.deepspeed_python.split(","))
    engines += [(way, python) for python in pythons for way in ("deepspeed-2", "deepspeed-2-backwards", "deepspeed-3")]
    outcomes = [trained(way, python, options.nvme_path) for way, python in engines]
    reference = outcomes[0]
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row_of(one, reference) for one in outcomes)]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    line = {"bench": "accumulated_gradients", **machine(), "micro_batches": MICRO_BATCHES, "steps": STEPS}
    line["engines"] = [
        {key: value for key, value in one.items() if key != "weights"} | compared(one, reference) for one in outcomes
    ]
    print(json.dumps(line))
    if options.save:
        save("accumulated_gradients", line)
    return 0


def trained(way: str, python: str, nvme_path: str) -> dict[str, Any]:
    """Return the norms of all steps and the final weights, or why there are none."""
    print(f"{way} by {python}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=nvme_path) as folder:
        output = Path(folder) / "result.json"
        try:
            ended = subprocess.run(
                [python, __file__, "--worker", way, folder, str(output)],
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS_MAX,
            )
        except subprocess.TimeoutExpired:
            return {"way": way, "version": "", "failed": f"no end after {SECONDS_MAX} s"}
        if ended.returncode:
            lines = ended.stderr.strip().splitlines()
            return {"way": way, "version": "", "failed": lines[-1] if lines else f"exit status {ended.returncode}"}
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def compared(one: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return the norm of the first step over the reference's, and the largest difference of a weight."""
    if "failed" in one:
        return {}
    pairs = zip(one["weights"], reference["weights"], strict=True)
    return {
        "norm_over_torch": round(one["norms"][0] / reference["norms"][0], 4),
        "weights_differ_by": max(abs(a - b) for a, b in pairs),
    }


def row_of(one: dict[str, Any], reference: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table. A sum in another order may differ in the last bits."""
    engine, how = NAMES[one["way"]]
    if "failed" in one:
        return engine, one["version"], how, "", "", f"does not run: {one['failed']}"
    result = compared(one, reference)
    differ = result["weights_differ_by"]
    sums = "all, same bits" if differ == 0 else "all" if differ < 1e-5 else "**not all**"
    return engine, one["version"], how, f"{result['norm_over_torch']:.2f}", f"{differ:.0e}" if differ else "0", sums


NAMES = {
    "torch": ("plain PyTorch", "in memory"),
    "fsdp2": ("FSDP2", "`CPUOffloadPolicy`"),
    "infinity-cpu": ("infinity", "optimizer in host memory"),
    "infinity-nvme": ("infinity", "optimizer on NVMe"),
    "deepspeed-2": ("DeepSpeed", "ZeRO-2, optimizer in host memory, `gradient_accumulation_steps`"),
    "deepspeed-2-backwards": ("DeepSpeed", "ZeRO-2, optimizer in host memory, several `backward` calls a step"),
    "deepspeed-3": ("DeepSpeed", "ZeRO-3, optimizer in host memory, `gradient_accumulation_steps`"),
}


def work(way: str, folder: str, output: str) -> None:
    """Train one way, and write the result."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    batches = torch.randn(STEPS, MICRO_BATCHES, 8, 16)
    train = {"torch": in_memory, "fsdp2": by_fsdp2, "infinity": by_infinity, "deepspeed": by_deepspeed}
    version, norms, weights = train[way.partition("-")[0]](model, batches, way, folder)
    result = {"way": way, "version": version, "norms": norms, "weights": weights}
    Path(output).write_text(json.dumps(result))
    os._exit(0)  # some frameworks take long to end


Trained = tuple[str, list[float], list[float]]


def loss_of(output: Any) -> Any:
    return (output - 1).square().mean()


def flat(parameters: Iterator[Any]) -> list[float]:
    import torch

    return torch.cat([parameter.detach().float().flatten() for parameter in parameters]).tolist()


def in_memory(model: Any, batches: Any, way: str, folder: str) -> Trained:
    """Train with plain PyTorch."""
    return "", loop(model, batches), flat(model.parameters())


def by_fsdp2(model: Any, batches: Any, way: str, folder: str) -> Trained:
    """Train with FSDP2 and CPUOffloadPolicy."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    norms = loop(model, batches)
    return "", norms, flat(parameter.full_tensor() for parameter in model.parameters())


def loop(model: Any, batches: Any) -> list[float]:
    """Train with torch's optimizer, and return the norm of each step."""
    import torch

    optimizer, norms = torch.optim.SGD(model.parameters(), lr=LR), []
    for micro_batches in batches:
        for batch in micro_batches:
            (loss_of(model(batch)) / MICRO_BATCHES).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def by_infinity(model: Any, batches: Any, way: str, folder: str) -> Trained:
    """Train with the engine of `infinity.initialize`."""
    sys.path.insert(0, str(HERE.parent))
    import torch

    import infinity

    device = {"device": way.partition("-")[2], "nvme_path": folder}
    config = config_of({"stage": 3, "offload_param": device, "offload_optimizer": device})
    engine = infinity.initialize(model=model, config=config)[0]
    norms = engine_loop(engine, batches)
    weights = {name: weight.clone() for name, weight in engine.named_weights(torch.float32)}
    return infinity.__version__, norms, flat(weights[name] for name, _ in model.named_parameters())


def by_deepspeed(model: Any, batches: Any, way: str, folder: str) -> Trained:
    """Train with DeepSpeed. "-backwards": the caller tells where a step ends."""
    import deepspeed
    import torch

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29612")
    _, stage, *backwards = way.split("-")
    config = config_of({"stage": int(stage), "offload_optimizer": {"device": "cpu"}})
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    if backwards:
        config["gradient_accumulation_steps"] = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    norms = engine_loop(engine, batches, engine.set_gradient_accumulation_boundary if backwards else None)
    if stage == "3":
        with deepspeed.zero.GatheredParameters([*model.parameters()]):
            return deepspeed.__version__, norms, flat(model.parameters())
    return deepspeed.__version__, norms, flat(model.parameters())


def config_of(zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": zero,
    }


def engine_loop(engine: Any, batches: Any, set_boundary: Callable[[bool], None] | None = None) -> list[float]:
    """Train with an engine, and return the norm of each step."""
    norms = []
    for micro_batches in batches:
        for number, batch in enumerate(micro_batches):
            loss = loss_of(engine(batch))
            if set_boundary is not None:
                set_boundary(number == MICRO_BATCHES - 1)
                engine.backward(loss / MICRO_BATCHES)
                continue
            engine.backward(loss)
            engine.step()
        if set_boundary is not None:
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


if __name__ == "__main__":
    sys.exit(main())
