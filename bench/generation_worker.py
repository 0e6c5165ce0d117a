"""The worker of bench/generation_table.py: generates text in one way, or reads the model's files, in a new process.
DeepSpeed runs under a Python that has deepspeed, the others under one that has infinity.

Its argument is a JSON object, {"way", "began", "folder", ...}; "began" is the parent's time.monotonic() when it started this
process. It prints one JSON line: the measurements.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from step_worker import HERE, disk_bytes, peak_rss_bytes

DRIVE_SECONDS = 1.5
"""Shortest time that the drive's worker reads; it then finishes the transfer."""

DRIVE_SLOTS = 3
"""Transfers kept in the engine, each as large as what its settings hold in flight: one is on the drive, two wait."""

LORA_STEPS = 8
LORA_STEPS_BEFORE = 3
"""Not counted in the bytes per step: the pool is in its steady state afterwards."""


def infinity_way(order: dict[str, Any]) -> dict[str, Any]:
    """Generate with infinity, from the files."""
    from transformers import AutoModelForCausalLM  # noqa: F401  to be counted among the imports

    import infinity
    from infinity.runtime.inference import empty_model

    imported = time.monotonic()
    folder = order["folder"]
    with infinity.init_inference(empty_model(folder), config_of(order["pool"]), weights=folder) as engine:
        figures = generated(order, imported, engine.generate)
        assert engine.swap is not None
        return figures | {"pinned_bytes": engine.swap.stats().pinned_bytes}


def torch_way(order: dict[str, Any]) -> dict[str, Any]:
    """Generate with plain PyTorch, all weights in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    imported = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(order["folder"], dtype=torch.bfloat16).eval()
    return generated(order, imported, model.generate)


def deepspeed_way(order: dict[str, Any]) -> dict[str, Any]:
    """Generate with DeepSpeed's ZeRO-Inference, weights on NVMe, with options that were fast here: two layers ahead."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29611")
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    imported = time.monotonic()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * order["layer_numel"],
            "stage3_max_live_parameters": 4 * order["layer_numel"],
            "offload_param": {
                "device": "nvme",
                "nvme_path": order["swap_folder"],
                "buffer_count": 32,  # parameters that are read ahead or in use, and some spare
                "buffer_size": order["largest_numel"],
                "pin_memory": True,
            },
        },
        "aio": {"block_size": 8 << 20, "queue_depth": 128, "intra_op_parallelism": 2, "overlap_events": True},
    }
    partitioned_while_loaded = HfDeepSpeedConfig(config)  # as long as it lives
    model = AutoModelForCausalLM.from_pretrained(order["folder"], dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    figures = generated(order, imported, engine.module.eval().generate)
    del partitioned_while_loaded
    return figures


def generated(order: dict[str, Any], imported: float, generate: Callable[..., Any]) -> dict[str, Any]:
    """Generate greedily. Returns medians per token, without the first one."""
    import torch

    prompt = torch.randint(0, 256, (1, order["prompt"]), generator=torch.Generator().manual_seed(0))
    times, reads = [], []

    def note(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        times.append(time.monotonic())
        reads.append(disk_bytes()[0])
        return torch.zeros(tokens.shape[0], dtype=torch.bool)

    with torch.no_grad():
        made = generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=order["tokens"],
            min_new_tokens=order["tokens"],
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note],  # which never stops
        )
    return {
        "seconds": statistics.median(after - before for before, after in pairwise(times)),
        "read_bytes_per_token": statistics.median(after - before for before, after in pairwise(reads)),
        "start_seconds": times[0] - order["began"],
        "import_seconds": imported - order["began"],
        "tokens": made[0, order["prompt"] :].tolist(),
        "threads": torch.get_num_threads(),
    }


def drive_way(order: dict[str, Any]) -> dict[str, Any]:
    """Read the model's files in turn, repeatedly, by infinity's I/O engine at the settings of generation."""
    from infinity.aio import File, IoEngine, PinnedPool, Priority, Request
    from infinity.config import load_config
    from infinity.drive.choice import choose_storage
    from infinity.units import PAGE_BYTES

    settings = choose_storage(load_config(config_of("auto")), order["folder"]).io
    nbytes = max(settings.in_flight_bytes, 4 << 20)
    pool = PinnedPool(DRIVE_SLOTS * nbytes)
    engine = IoEngine(pool, settings)
    leases = [pool.lease(nbytes) for _ in range(DRIVE_SLOTS)]
    files = [File(path, read_only=True) for path in weight_files(order)]
    if not all(file.direct for file in files):
        sys.exit("no direct reads here: that would measure the page cache")
    places = []
    for file in files:
        end = file.size_bytes // PAGE_BYTES * PAGE_BYTES
        places += [(file, offset, min(nbytes, end - offset)) for offset in range(0, end, nbytes)]
    under_way: deque[Any] = deque()
    began = time.perf_counter()
    for (file, offset, length), lease in zip(cycle(places), cycle(leases), strict=False):
        if len(under_way) == DRIVE_SLOTS:
            engine.wait(under_way.popleft())
            if time.perf_counter() - began >= DRIVE_SECONDS:
                break
        under_way.append(engine.start([Request("read", file, offset, lease, 0, length, Priority.PREFETCH)]))
    engine.drain()
    rate = engine.read_bytes / (time.perf_counter() - began)
    return {
        "bytes_per_s": rate,
        "once_seconds": sum(file.size_bytes for file in files) / rate,
        "backend": engine.backend,
        "block_bytes": settings.block_bytes,
        "queue_depth": settings.queue_depth,
        "rings": settings.rings,
    }


def load_way(order: dict[str, Any]) -> dict[str, Any]:
    """Read the model's files into memory once, with safetensors."""
    from safetensors.torch import load_file

    before, began = disk_bytes()[0], time.monotonic()
    held = [load_file(path) for path in weight_files(order)]
    seconds = time.monotonic() - began
    assert held
    return {"once_seconds": seconds, "read_bytes": disk_bytes()[0] - before}


def lora_way(order: dict[str, Any]) -> dict[str, Any]:
    """Train LoRA on the files, with the functions of examples/finetune_lora.py."""
    before_import = time.monotonic() - order["began"]
    import finetune_lora as example
    import peft  # noqa: F401  to be counted among the imports
    import torch.distributed as dist
    import transformers  # noqa: F401

    import_seconds = time.monotonic() - order["began"]

    asked = example.parse_arguments(["--params", "1", "--steps", str(LORA_STEPS), "--pinned-bytes-max", order["pool"]])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(order["folder"])
    with example.make_engine(asked, folder) as engine:
        figures = example.train(asked, engine, example.load_tokens(asked, folder), make_seconds=0.0)
    read = figures["step_read_bytes"][LORA_STEPS_BEFORE:]
    return {
        "first_step_seconds": figures["first_step_seconds"] + before_import,
        "import_seconds": import_seconds,
        "step_seconds": statistics.median(figures["step_seconds"][LORA_STEPS_BEFORE:]),
        "read_bytes_per_frozen_param": statistics.mean(read) / figures["frozen_parameters"],
        "written_bytes": figures["written_bytes"],
        "process_written_bytes": disk_bytes()[1],  # including what imports leave in temporary folders
        "pinned_bytes": figures["pinned_bytes"],
        "losses": figures["losses"],
    }


def config_of(pool: str) -> dict[str, Any]:
    """Return infinity's config with the pinned bytes of `pool`."""
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "infinity": {"pinned_bytes_max": pool},
    }


def weight_files(order: dict[str, Any]) -> list[Path]:
    return sorted(Path(order["folder"]).glob("*.safetensors"))


WAYS = {
    "infinity": infinity_way,
    "torch": torch_way,
    "deepspeed": deepspeed_way,
    "drive": drive_way,
    "load": load_way,
    "lora": lora_way,
}


def main() -> None:
    order = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps a framework's output out of the answer
    if order["way"] != "deepspeed":
        sys.path.insert(0, str(HERE.parent))
    figures = WAYS[order["way"]](order)
    print(json.dumps(figures | {"peak_rss_bytes": peak_rss_bytes()}), file=answers, flush=True)
    os._exit(0)  # some frameworks take long to release what they hold


if __name__ == "__main__":
    main()
