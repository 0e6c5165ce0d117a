"""Floor 17. `infinity-bench step`: times real training steps of a synthetic transformer from a drive, and their lower bound.

Checks its options, trains, then prints. Its files on the drive have no name and are gone when it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import (
    add_json,
    add_scheme,
    check_file,
    checked_value,
    count,
    scheme_from,
    size_or_none,
    whole_number,
    write_json,
)
from infinity.schedule.pinned import ACCESS_BYTES
from infinity.units import MIB, format_bytes, format_count, parse_bytes, parse_count

if TYPE_CHECKING:
    import infinity
    from infinity.plan.estimate import Work
    from infinity.plan.machine import Machine
    from infinity.plan.transformer import Transformer as Shape
    from infinity.schedule.timeline import TraceSummary

POOL_BYTES_MIN = 2 * ACCESS_BYTES
"""Smallest pool of any model; that of a given model is known once it is built."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `step` to the commands of `infinity-bench`."""
    parser = subparsers.add_parser(
        "step",
        help="time real training steps from a drive",
        description="Train a synthetic transformer from a drive for a few steps, and print the time of a step, the bytes it "
        "moved and how long it waited, with the lower bound: the longer of compute and of what the bytes take at "
        "the bandwidth that the drive gave in the same run.",
    )
    parser.add_argument(
        "--params", type=checked_value(parse_count, at_least=10_000), default=40_000_000, help='such as "200M" (40M)'
    )
    parser.add_argument("--nvme-path", type=Path, default=Path(), help="folder on the drive (default: the current one)")
    parser.add_argument("--steps", type=count, default=5, help="steps to time (default: 5)")
    parser.add_argument("--warmup", type=count, default=2, help="steps before them (default: 2)")
    parser.add_argument("--batch-size", type=count, default=4, help="sequences per step (default: 4)")
    parser.add_argument(
        "--seq", type=checked_value(whole_number, at_least=2), default=256, help="tokens per sequence (default: 256)"
    )
    add_scheme(parser)
    parser.add_argument("--pinned-bytes-max", default="auto", help='pinned memory, such as "512MiB" (default: auto)')
    parser.add_argument(
        "--cache",
        type=size_or_none,
        default=0,
        metavar="BYTES",
        help="part of it that keeps compute parameters and optimizer state from step to step (default: 0)",
    )
    parser.add_argument(
        "--gradient-memory",
        type=size_or_none,
        metavar="BYTES",
        help="host memory in which gradients wait for their update; what doesn't fit waits on NVMe (default: all)",
    )
    add_json(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="take one more step, and write what the drives and the training thread did in it when, for ui.perfetto.dev",
    )
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Train and print: 0 when done, 2 for options that can't be met. Raises InfinityError."""
    try:
        scheme_from(options)
        if options.pinned_bytes_max != "auto" and parse_bytes(options.pinned_bytes_max) < POOL_BYTES_MIN:
            raise ValueError(
                f"--pinned-bytes-max {options.pinned_bytes_max} is below the least that works, "
                f"{format_bytes(POOL_BYTES_MIN)}: raise it, or leave it out"
            )
        check_file(options.json, "--json: ")
        check_file(options.trace, "--trace: ")
    except ValueError as error:
        print(f"infinity-bench step: error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    result, traced = measure(options)
    if options.json != "-":
        _print(result, traced)
    if options.json is not None:
        write_json(result, options.json)
    return 0


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], TraceSummary | None]:
    """Train for `warmup` and `steps` steps; returns (the JSON of this command, summary of the trace if one was taken)."""
    from infinity.cli.plan.here import measure_machine
    from infinity.cli.synthetic import shape_for
    from infinity.drive.measure import measure_drive
    from infinity.plan.estimate import Work
    from infinity.store.run_folder import make_writable

    shape = shape_for(options.params, seq=options.seq)
    make_writable(options.nvme_path)
    # Before the steps, so that it is a prediction.
    report = functools.partial(_show, options)
    machine = measure_machine(options.nvme_path, shape, samples=options.batch_size, report=report)
    scheme = scheme_from(options)
    work = Work(
        shape,
        samples=options.batch_size,
        checkpointing=False,
        clipping=not options.no_clipping,
        scheme=scheme,
        gradient_bytes_max=options.gradient_memory,
    )
    with _engine(options, shape) as engine:
        _show(options, f"{format_count(engine.numel)} parameters, {shape.layers} layers of hidden size {shape.hidden}")
        steps = []
        for number in range(options.warmup + options.steps):
            steps.append(_step(engine, _tokens(options)))
            _show(options, f"step {number + 1} of {options.warmup + options.steps}: {steps[-1]['seconds']:.2f} s")
        steps = steps[options.warmup :]
        traced = None
        if options.trace is not None:
            engine.start_trace()
            _step(engine, _tokens(options))
            traced = engine.stop_trace(options.trace)
        rates = measure_drive(options.nvme_path, nbytes=128 * MIB, rounds=3)
        compute = statistics.median(step["seconds"] - step["stall_seconds"] for step in steps)
        lower_bound = engine.step_lower_bound_seconds(
            compute_seconds=compute,
            read_bytes_per_s=rates.read_bytes_per_s,
            write_bytes_per_s=rates.write_bytes_per_s,
        )
        stats = engine.swap_stats()
        assert stats is not None
        numel = engine.shard_numel
    return {
        "params": numel,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "batch_size": options.batch_size,
        "seq": options.seq,
        "master_weights": scheme.master_weights,
        "update": scheme.update,
        "steps": steps,
        "seconds": statistics.median(step["seconds"] for step in steps),
        "compute_seconds": compute,
        "lower_bound_seconds": lower_bound,
        "floor_seconds": lower_bound,  # deprecated
        "predicted_seconds": _predicted_seconds(
            work, machine, pinned_bytes=stats.pinned_bytes - stats.cached_bytes, cache_bytes=stats.cached_bytes
        ),
        "read_bytes_per_param": statistics.median(step["read_bytes"] for step in steps) / numel,
        "written_bytes_per_param": statistics.median(step["written_bytes"] for step in steps) / numel,
        "drive": {
            "backend": rates.backend,
            "read_bytes_per_s": rates.read_bytes_per_s,
            "write_bytes_per_s": rates.write_bytes_per_s,
        },
        "pinned_bytes": stats.pinned_bytes,
        "cache_bytes": stats.cached_bytes,
        "arena_bytes": stats.arena_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "trace": dataclasses.asdict(traced) if traced is not None else None,
    }, traced


def _predicted_seconds(work: Work, machine: Machine, *, pinned_bytes: int, cache_bytes: int) -> float | None:
    """Seconds of a step on `machine` with everything on NVMe, by the planner; None where it says that it can't run."""
    from infinity.plan.estimate import STRATEGIES
    from infinity.plan.planner import plan_step

    everything = next(s for s in STRATEGIES if (s.parameters, s.optimizer) == ("nvme", "nvme"))
    plan = plan_step(work, machine, everything, pinned_bytes=pinned_bytes, cache_bytes=cache_bytes)
    return plan.simulated.seconds if plan.simulated is not None else None


@contextmanager
def _engine(options: argparse.Namespace, shape: Shape) -> Iterator[infinity.Engine]:
    import torch

    import infinity
    from infinity.cli.synthetic import Transformer

    drive = {"device": "nvme", "nvme_path": str(options.nvme_path)}
    config = {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0 if options.no_clipping else 1.0,
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "infinity": {
            "pinned_bytes_max": options.pinned_bytes_max,
            "host_cache_bytes": options.cache,
            "master_weights": options.master_weights,
            "update": options.update,
            "gradient_bytes_max": "auto" if options.gradient_memory is None else options.gradient_memory,
        },
    }
    torch.manual_seed(0)
    with infinity.init_empty():
        model = Transformer(shape)
    engine, *_ = infinity.initialize(model=model, config=config)
    try:
        yield engine
    finally:
        engine.close()


def _step(engine: infinity.Engine, tokens: Any) -> dict[str, Any]:
    """One step, its last writes included."""
    before = engine.swap_stats()
    began = time.perf_counter()
    engine.backward(engine(tokens))
    engine.step()
    assert engine.swap is not None and before is not None
    engine.swap.stager.settle_all()
    seconds = time.perf_counter() - began
    after = engine.swap_stats()
    assert after is not None
    return {
        "seconds": seconds,
        "read_bytes": after.read_bytes - before.read_bytes,
        "written_bytes": after.written_bytes - before.written_bytes,
        "stall_seconds": after.stall_seconds - before.stall_seconds,
    }


def _tokens(options: argparse.Namespace) -> Any:
    """A batch of token numbers, (batch size, seq + 1)."""
    import torch

    from infinity.cli.synthetic import VOCABULARY

    return torch.randint(VOCABULARY, (options.batch_size, options.seq + 1))


def _predicted(result: dict[str, Any]) -> str:
    seconds = result["predicted_seconds"]
    if seconds is None:
        return "the planner says that this model can't run here"
    return f"{seconds:.3f} s by the planner; the measured step is {result['seconds'] / seconds - 1:+.0%} from it"


def _show(options: argparse.Namespace, line: str) -> None:
    """Print progress, on stderr where stdout is for the JSON."""
    print(line, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)


def _print(result: dict[str, Any], traced: TraceSummary | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    seconds = [step["seconds"] for step in result["steps"]]
    stall = statistics.median(step["stall_seconds"] for step in result["steps"])
    bound = result["lower_bound_seconds"]
    drive = result["drive"]
    rows = {
        "step": f"{result['seconds']:.3f} s, median of {len(seconds)} ({min(seconds):.3f} to {max(seconds):.3f})",
        "of it waiting": f"{stall:.3f} s",
        "lower bound": f"{bound:.3f} s; a step takes {result['seconds'] / bound:.2f} times it",
        "predicted": _predicted(result),
        "compute": f"{result['compute_seconds']:.3f} s (the step less its waiting)",
        "moved per parameter": f"{result['read_bytes_per_param']:.2f} B read, "
        f"{result['written_bytes_per_param']:.2f} B written",
        "drive": f"{drive['read_bytes_per_s'] / 1e9:.2f} GB/s read, {drive['write_bytes_per_s'] / 1e9:.2f} GB/s written, "
        f"through {drive['backend']}",
        **(traced.in_words() if traced is not None else {}),
        "pinned memory": format_bytes(result["pinned_bytes"]),
        "on the drive": format_bytes(result["arena_bytes"]),
        "peak resident memory": format_bytes(result["peak_rss_bytes"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
