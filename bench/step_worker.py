"""The worker of bench/step.py: trains in one way, in a process of its own. infinity and plain PyTorch run under its
Python, DeepSpeed under one that has deepspeed.

Its argument is a JSON object, {"way", "params", "batch_size", "context", "clipping", "nvme_path", ...}. It prints
"ready", or why it can't run here. It answers each line on standard input with a JSON line: a step's measurements,
including its writes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

GIB = 1 << 30

Step = Callable[[], dict[str, Any]]


class LeftOut(Exception):
    """Why this way can't run here."""


def torch_way(order: dict[str, Any]) -> Step:
    """Return the step of plain PyTorch in memory ("torch"), the reference. If the model doesn't fit, one with a quarter
    of its blocks is used, and times are multiplied by the ratio of parameters. Raises LeftOut if that doesn't fit.

    "torch-swapped" doesn't look at memory: its limit does not count the system's swap space. "torch-mapped" has
    masters, gradients and moments in files that are mapped into memory (torch.from_file).
    """
    sys.path.insert(0, str(HERE.parent))
    import torch
    from gpt import GPT, VOCABULARY, config_for

    from infinity.cli.plain_torch import PlainTraining, end_first_without_memory, why_not
    from infinity.plan.transformer import dense_transformer

    whole = config_for(order["numel"], order["context"])
    variant = order["way"].partition("-")[2]
    for config in (whole, replace(whole, layers=max(1, whole.layers // 4))):
        sizes = {"layers": config.layers, "hidden": config.hidden_size, "heads": config.heads, "seq": config.context}
        reason = why_not(dense_transformer(**sizes, vocab=VOCABULARY), order["batch_size"])
        if variant or reason is None:
            break
    else:
        raise LeftOut(f"plain PyTorch in memory is left out: {reason}")
    scale = whole.numel / config.numel
    end_first_without_memory()
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[order["dtype"]]
    with mapped_files(Path(order["nvme_path"])) if variant == "mapped" else contextlib.nullcontext():
        training = PlainTraining(GPT(config), clipping=order["clipping"], dtype=dtype)
    batches = _batches(order)

    def backward(loss: Any) -> None:
        training.backward(loss / len(batches))

    return lambda: {
        **_timed(training.model, backward, training.step, batches),
        "numel": whole.numel,
        "scale": scale,
    }


@contextlib.contextmanager
def mapped_files(folder: Path) -> Iterator[None]:
    """Have parameters that are made in the block in files, and from then on all that `torch.zeros_like` makes of them:
    gradients and moments."""
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    numbers, mapped = itertools.count(), set[torch.nn.Parameter]()

    def mapped_like(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        path, numel = folder / f"{next(numbers)}.mapped", tensor.numel()
        return torch.from_file(str(path), shared=True, size=numel, dtype=tensor.dtype).view(tensor.shape)

    def hook(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter not in mapped:  # a tied one is registered twice
            parameter = torch.nn.Parameter(mapped_like(parameter.data).copy_(parameter.data))
            mapped.add(parameter)
        return parameter

    torch.zeros_like = mapped_like  # type: ignore[assignment]
    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def fsdp2_way(order: dict[str, Any]) -> Step:
    """Return the step of stock FSDP2 whose parameters, gradients and moments are offloaded to host memory ("fsdp2").
    Raises LeftOut for fp16, which needs another loop."""
    if order["dtype"] != "bf16":
        raise LeftOut("FSDP2 is left out: it is compared in bf16 only")
    import torch
    import torch.distributed as dist
    from gpt import GPT, config_for
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    model = GPT(config_for(order["numel"], order["context"]))
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mesh": mesh,
    }
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = _batches(order)

    def backward(loss: Any) -> None:
        (loss / len(batches)).backward()

    def update() -> None:
        if order["clipping"] > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), order["clipping"])
        optimizer.step()
        optimizer.zero_grad()

    numel = sum(p.numel() for p in model.parameters())
    return lambda: _timed(model, backward, update, batches) | {"numel": numel}


def infinity_way(order: dict[str, Any]) -> Step:
    """Return the step on the device ("memory"), in host memory ("host"), or on NVMe with updates as infinity chooses
    ("auto"), in "step", "forward" or "backward". "-full" stores masters in full, "-cached" part of the state in host
    memory, "-spilled" gradients on NVMe, "-unchecked" has no checksums, "-durable" commits every step, "-unclipped"
    does not clip, "-vertical" trains all micro-batches at once, "-phase" moves all state before and after each step,
    like the optimizer without its arithmetic. A way may have several of these."""
    sys.path.insert(0, str(HERE.parent))
    import torch
    import torch.distributed as dist
    from gpt import GPT, config_for

    import infinity

    update, *variants = order["way"].split("-")
    place = {"memory": "none", "host": "cpu"}.get(update, "nvme")
    device = {"device": place, "nvme_path": order["nvme_path"]}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": order["batch_size"],
        "gradient_accumulation_steps": order["accumulation"],
        order["dtype"]: {"enabled": True},
        "gradient_clipping": 0.0 if "unclipped" in variants else order["clipping"],
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
        "infinity": {
            "backend": order["backend"],
            "pinned_bytes_max": order["pinned_bytes_max"] if place == "nvme" else "auto",
            **({"update": update} if place == "nvme" else {}),
            **{key: value for variant in variants for key, value in _VARIANTS.get(variant, {}).items()},
            **({"host_cache_bytes": order["host_cache"]} if "cached" in variants else {}),
        },
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    with infinity.init_empty():
        model = GPT(config_for(order["numel"], order["context"]))
    try:
        engine = infinity.initialize(model=model, config=config)[0]
    except infinity.InfinityError as error:  # a full drive, a pool too small: the traceback would not help
        sys.exit(str(error))
    batches = _batches(order)

    def phase() -> float:
        """Return the seconds of an optimizer step's transfers without arithmetic."""
        assert engine.swap is not None
        began = time.perf_counter()
        engine.swap.paged.updates.defer({sub: lambda lease: None for sub in engine.swap.paged.sub_groups})
        engine.swap.paging.finish_updates()
        engine.swap.stager.settle_all()
        return time.perf_counter() - began

    def step() -> dict[str, Any]:
        phases = [phase()] if "phase" in variants else []
        before = engine.swap_stats()
        began = time.perf_counter()
        measured: dict[str, Any] = {}
        if "vertical" in variants:
            loss = engine.train_batch(iter([(batch[:, :-1], batch) for batch in batches]), loss_fn=_loss).item()
        else:
            loss, measured = _passes(engine, engine.backward, batches)
        if "phase" in variants:
            engine.start_trace()
        between = engine.swap_stats()
        backward = time.perf_counter()
        if "vertical" not in variants:
            engine.step()
        if engine.swap is not None:
            engine.swap.stager.settle_all()
        ended = time.perf_counter()
        after = engine.swap_stats()
        measured |= {"step": ended - backward, "seconds": ended - began}
        measured |= {"loss": loss, "numel": engine.numel, "phases": phases}
        if before is not None and after is not None and engine.swap is not None:
            measured |= {name: getattr(after, name) - getattr(before, name) for name in _COUNTERS}
            measured["step_bytes"] = engine.swap.step_bytes()
            measured["pinned_bytes"] = after.pinned_bytes
        if between is not None and after is not None and "phase" in variants:  # nothing was in flight when it began
            measured["phase_bytes"] = [
                getattr(after, name) - getattr(between, name) for name in ("read_bytes", "written_bytes")
            ]
        if "phase" in variants:
            measured["busy_share"] = engine.stop_trace().drives[0].busy_share
            phases.append(phase())
        return measured

    return step


_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"master_weights": "full"},
    "spilled": {"gradient_bytes_max": 0},
    "unchecked": {"checksums": False},
    "durable": {"durability": "step"},
    "vertical": {"schedule": "vertical"},
}

_TIMES = {"seconds", "forward", "backward", "step", "cpu_seconds", "minor_faults"}
"""Times of a step, multiplied if a shorter model was stepped."""

_COUNTERS = ("read_bytes", "written_bytes", "stall_seconds")


def deepspeed_way(order: dict[str, Any]) -> Step:
    """Return the step of DeepSpeed's ZeRO-3 with all state on NVMe ("deepspeed"), with options that were fast here.

    `order["offload"]`: "cpu" keeps it in host memory. `order["checkpointing"]`: recompute activations in the backward.
    """
    import deepspeed
    import torch
    from gpt import GPT, config_for

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29611")
    torch.manual_seed(0)
    shape = config_for(order["numel"], order["context"], checkpoint_activations=order.get("checkpointing", False))
    model = GPT(shape)
    largest = max(p.numel() for p in model.parameters())
    place = {"device": order.get("offload", "nvme"), "nvme_path": order["nvme_path"], "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": order["batch_size"],
        "gradient_accumulation_steps": order["accumulation"],
        "gradient_clipping": order["clipping"],
        order["dtype"]: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": order.get("sub_group_size", 100_000_000),
            # Gathered parameters must fit its buffers. 200 M are within this, as within its defaults.
            "stage3_max_live_parameters": 250_000_000,
            "stage3_max_reuse_distance": 250_000_000,
            "offload_param": {
                **place,
                "buffer_count": order.get("buffer_count", 32),
                "buffer_size": max(largest, 1 << 20),
                "max_in_cpu": 0,
            },
            "offload_optimizer": {**place, "buffer_count": 13, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 8 << 20, "queue_depth": 128, "intra_op_parallelism": 2, "overlap_events": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = [batch.to(engine.device) for batch in _batches(order)]

    def backward(loss: Any) -> None:
        engine.backward(loss)
        if len(batches) > 1:
            engine.step()  # DeepSpeed counts micro-batches there

    def update() -> None:
        if len(batches) == 1:
            engine.step()

    numel = sum(p.ds_numel for p in model.parameters())
    return lambda: _timed(engine, backward, update, batches) | {"numel": numel}


def _batches(order: dict[str, Any]) -> list[Any]:
    """Return the micro-batches of every step."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = order["batch_size"], order["context"] + 1
    return [torch.randint(0, 256, shape, generator=generator) for _ in range(order["accumulation"])]


def _timed(model: Any, backward: Callable[[Any], Any], update: Callable[[], Any], batches: list[Any]) -> dict[str, Any]:
    """Take a step: the passes of `_passes`, then `update`. Returns its mean loss and its seconds."""
    began = time.perf_counter()
    loss, passes = _passes(model, backward, batches)
    middle = time.perf_counter()
    update()
    ended = time.perf_counter()
    return passes | {"step": ended - middle, "seconds": ended - began, "loss": loss}


def _passes(model: Any, backward: Callable[[Any], Any], batches: list[Any]) -> tuple[float, dict[str, Any]]:
    """Run forward and backward of each micro-batch in turn. Returns the mean loss, and the seconds of both."""
    import torch

    losses, seconds = [], {"forward": 0.0, "backward": 0.0}
    for batch in batches:
        began = time.perf_counter()
        loss = _loss(model(batch[:, :-1]), batch)
        middle = time.perf_counter()
        backward(loss)
        seconds["forward"] += middle - began
        seconds["backward"] += time.perf_counter() - middle
        losses.append(loss.detach())
    return torch.stack(losses).mean().item(), seconds


def _loss(logits: Any, batch: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process read and wrote, by the kernel's block layer."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def usage() -> tuple[float, int]:
    """Return this process's CPU seconds (user and kernel) and minor faults so far, over all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_minflt


def peak_rss_bytes() -> int:
    """Return the largest resident size of this process. getrusage would return its parent's, if larger."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])


def ring_cpu_seconds() -> float:
    """Return the CPU seconds of the I/O engine's ring threads, which submit transfers and compute checksums."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().startswith("inf-ring"):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def main() -> None:
    order = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps a framework's output out of the answers
    try:
        ways = {"torch": torch_way, "deepspeed": deepspeed_way, "fsdp2": fsdp2_way}
        step = ways.get(order["way"].partition("-")[0], infinity_way)(order)
    except LeftOut as reason:
        print(reason, file=answers, flush=True)
        return
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        before, (cpu_before, faults_before), rings_before = disk_bytes(), usage(), ring_cpu_seconds()
        measured = step()
        after, (cpu, faults) = disk_bytes(), usage()
        if not measured.get("phases"):  # whose times are not the step's
            measured |= {
                "cpu_seconds": cpu - cpu_before,
                "minor_faults": faults - faults_before,
                "ring_cpu_seconds": ring_cpu_seconds() - rings_before,
            }
            measured |= {"disk_read_bytes": after[0] - before[0], "disk_written_bytes": after[1] - before[1]}
        for name in _TIMES & measured.keys():
            measured[name] *= measured.get("scale", 1)
        measured["peak_rss_bytes"] = peak_rss_bytes()
        print(json.dumps(measured), file=answers, flush=True)
    os._exit(0)  # the drive's files are no longer needed, and some frameworks take long to release them


if __name__ == "__main__":
    main()
