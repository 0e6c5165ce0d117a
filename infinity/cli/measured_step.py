"""The training steps that `infinity-bench step` times, and their lower bound.

[Note: The lower bound of a measured step]
The lower bound is the longer of two times, both measured in the rounds of the step: a step of plain PyTorch with the
same model in memory (`plain_torch`), and the drive time for the step's bytes at the mixed rate. Neither depends on the
step's own time, so a step that copies, faults or waits too much is far above it. Step time less stalls is no bound: it
counts all other delays as compute, so the ratio to it is near 1 however slow the step is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.cli.arguments import values_of
from infinity.cli.plain_torch import PlainStep, PlainTorch, Usage, peak_rss_bytes, plain_process
from infinity.cli.plan.here import measure_machine
from infinity.cli.program import without_interrupts
from infinity.cli.synthetic import Transformer, make_training, shape_for, tokens
from infinity.cli.training import work_from
from infinity.drive.choice import choose_storage
from infinity.drive.measure import DriveTest, Workload
from infinity.errors import InfinityError
from infinity.plan.machine import Machine
from infinity.plan.planner import plan_step
from infinity.plan.strategy import STRATEGIES
from infinity.plan.transformer import Transformer as Shape
from infinity.schedule.timeline import TraceSummary
from infinity.store.run_folder import make_writable
from infinity.units import MIB, format_count

_DRIVE_FILE_BYTES = 256 * MIB
_DRIVE_POOL_BYTES = 64 * MIB
_DRIVE_SECONDS = 0.15
"""Seconds of a trial of each kind, in every round."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.01},
    "Adam": {"adam_w_mode": False},
    "SGD": {"momentum": 0.9},
}


@dataclasses.dataclass(frozen=True)
class Round:
    """Measurements of one round; `plain` is None if plain PyTorch was left out."""

    step: dict[str, Any]
    plain: PlainStep | None
    rates: dict[Workload, float]


def plain_process_of(options: argparse.Namespace) -> contextlib.AbstractContextManager[Connection]:
    shape = shape_for(options.params, seq=options.seq)
    return plain_process(
        functools.partial(make_training, shape, options.batch_size),
        shape=shape,
        samples=options.batch_size,
        clipping=options.clipping,
        micro_batches=options.accumulation,
        optimizer=options.optimizer,
    )


def measure(options: argparse.Namespace, plain_orders: Connection) -> tuple[dict[str, Any], TraceSummary | None]:
    """Train for `warmup` and `steps` steps; returns (the JSON of this command, summary of the trace if one was
    taken)."""
    # Progress goes to stderr if stdout is for the JSON.
    show = functools.partial(print, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)
    shape = shape_for(options.params, seq=options.seq)
    make_writable(options.path)
    # Before the steps, so that it is a prediction.
    machine = _measure_machine(options, shape, show)
    work = work_from(options, shape, checkpointing=False)
    with _make_engine(options, shape) as engine:
        show(f"{format_count(engine.numel)} parameters, {shape.layers} layers of hidden size {shape.hidden}")
        for number in range(options.warmup):
            step = _step(engine, options)
            show(f"warming up, step {number + 1} of {options.warmup}: {step['seconds']:.2f} s")
        rounds = _rounds(engine, options, PlainTorch(plain_orders, show), show)
        traced = None
        if options.trace is not None:
            engine.start_trace()
            _step(engine, options)
            traced = engine.stop_trace(options.trace)
        stats = engine.swap_stats()
        assert stats is not None and engine.swap is not None
        planned_bytes, backend = engine.swap.step_bytes(), engine.swap.backend
        numel = engine.shard_numel
    everything = next(s for s in STRATEGIES if (s.parameters, s.optimizer) == ("nvme", "nvme"))
    pool_bytes = stats.pinned_bytes - stats.cached_bytes
    plan = plan_step(work, machine, everything, pinned_bytes=pool_bytes, cache_bytes=stats.cached_bytes)
    return {
        "params": numel,
        **values_of(shape, "layers hidden"),
        **values_of(options, "batch_size accumulation schedule seq clipping optimizer moments_dtype"),
        **values_of(work.scheme, "master_weights update"),
        "memory_limit_bytes": options.memory_limit,
        **summarize(rounds, planned_bytes=planned_bytes, numel=numel, backend=backend),
        "predicted_seconds": plan.simulated.seconds if plan.simulated is not None else None,
        **values_of(stats, "pinned_bytes arena_bytes"),
        "cache_bytes": stats.cached_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
        "trace": dataclasses.asdict(traced) if traced is not None else None,
    }, traced


def _measure_machine(options: argparse.Namespace, shape: Shape, show: Callable[[str], None]) -> Machine:
    """Run `measure_machine` in its own process: its heap would count against --memory-limit."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with without_interrupts():
            measured = pool.submit(_machine_and_lines, options.path, shape, options.batch_size)
        try:
            machine, lines = measured.result()
        except BrokenProcessPool:
            raise InfinityError(
                "the process that measured this machine was killed, probably out of memory: raise --memory-limit"
            ) from None
    for line in lines:
        show(line)
    return machine


def _machine_and_lines(path: Path, shape: Shape, samples: int) -> tuple[Machine, list[str]]:
    lines: list[str] = []
    return measure_machine(path, shape, samples=samples, report=lines.append), lines


def _rounds(
    engine: infinity.Engine, options: argparse.Namespace, plain: PlainTorch, show: Callable[[str], None]
) -> list[Round]:
    """Take the timed steps, each with one of plain PyTorch and a trial of the drive at the engine's settings."""
    rounds = []
    io = choose_storage(engine.config).io
    with DriveTest(options.path, nbytes=_DRIVE_FILE_BYTES, pool_bytes=_DRIVE_POOL_BYTES) as drive:
        drive.fill()
        for _ in range(options.warmup):
            plain.step()
        for number in range(options.steps):
            step = _step(engine, options)
            plain_step = plain.step()
            rates = {workload: drive.run(workload, io, _DRIVE_SECONDS).bytes_per_s for workload in Workload}
            rounds.append(Round(step, plain_step, rates))
            in_memory = f", plain PyTorch in memory {plain_step.seconds:.2f} s" if plain_step is not None else ""
            show(f"round {number + 1} of {options.steps}: {step['seconds']:.2f} s{in_memory}")
    return rounds


def summarize(rounds: Sequence[Round], *, planned_bytes: tuple[int, int], numel: int, backend: str) -> dict[str, Any]:
    """Return medians over the rounds: [Note: The lower bound of a measured step].

    planned_bytes: (read, written) in a step by its plan. The smaller of planned and moved bytes counts: the pool may
    save some, and some may be moved twice.
    """
    steps = [measured.step for measured in rounds]
    median = {key: _median(step[key] for step in steps) or 0.0 for key in steps[0]}
    rates = {workload: statistics.median(measured.rates[workload] for measured in rounds) for workload in Workload}
    moved_bytes = median["read_bytes"], median["written_bytes"]
    drive_seconds = sum(map(min, planned_bytes, moved_bytes)) / rates[Workload.MIXED]
    plain = [measured.plain for measured in rounds if measured.plain is not None]
    plain = plain if len(plain) == len(rounds) else []  # it ended early
    torch_seconds = _median(step.seconds for step in plain)
    lower_bound = max(torch_seconds or 0.0, drive_seconds)
    return {
        "steps": steps,
        "seconds": median["seconds"],
        "torch_in_memory_seconds": torch_seconds,
        "drive_seconds": drive_seconds,
        "lower_bound_seconds": lower_bound,
        # None if everything is cached and plain PyTorch was left out.
        "over_lower_bound": median["seconds"] / lower_bound if lower_bound > 0 else None,
        "cpu_seconds_per_step": median["cpu_seconds"],
        "minor_faults_per_step": median["minor_faults"],
        "torch_in_memory_cpu_seconds_per_step": _median(step.usage.cpu_seconds for step in plain),
        "torch_in_memory_minor_faults_per_step": _median(step.usage.minor_faults for step in plain),
        "torch_in_memory_peak_rss_bytes": plain[-1].peak_rss_bytes if plain else None,
        "read_bytes_per_param": moved_bytes[0] / numel,
        "written_bytes_per_param": moved_bytes[1] / numel,
        "drive": {"backend": backend, **{f"{workload.value}_bytes_per_s": rate for workload, rate in rates.items()}},
    }


def _median(values: Iterable[float]) -> float | None:
    return statistics.median(known) if (known := list(values)) else None


def _make_engine(options: argparse.Namespace, shape: Shape) -> infinity.Engine:
    drive = {"device": "nvme", "nvme_path": str(options.path)}
    config = {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": options.clipping,
        "optimizer": {"type": options.optimizer, "params": _SETTINGS.get(options.optimizer, {})},
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "infinity": {
            **values_of(options, "pinned_bytes_max master_weights moments_dtype update schedule"),
            "host_cache_bytes": options.cache,
            "gradient_bytes_max": "auto" if options.gradient_memory is None else options.gradient_memory,
        },
    }
    torch.manual_seed(0)
    with infinity.init_empty():
        model = Transformer(shape)
    return infinity.initialize(model=model, config=config)[0]


def _step(engine: infinity.Engine, options: argparse.Namespace) -> dict[str, Any]:
    micro_batches = [tokens(options.batch_size, options.seq) for _ in range(options.accumulation)]
    before, used_before = engine.swap_stats(), Usage.now()
    began = time.perf_counter()
    engine.train_batch(iter(micro_batches))
    assert engine.swap is not None and before is not None
    engine.swap.stager.settle_all()
    seconds = time.perf_counter() - began
    after, used = engine.swap_stats(), Usage.now().since(used_before)
    moved = {
        name: getattr(after, name) - getattr(before, name) for name in ("read_bytes", "written_bytes", "stall_seconds")
    }
    return {"seconds": seconds, **used._asdict(), **moved}
