"""`infinity-bench step`: times real training steps of a synthetic transformer from a drive, and their lower bound.

Checks its options, trains, then prints. Its files on the drive have no name and are gone when it ends.

[Note: The lower bound of a measured step]
It is the longer of two times, both measured in the rounds of the step: that of plain PyTorch, which holds the same model in
memory (`plain_torch`), and that of the step's bytes at the rate that the drive gives while it reads and writes. Neither knows
what the step took, so a step that copies, faults or waits too much stands far above it. The step less its waiting would be no
such figure: whatever held the step up would count as compute, and the ratio to it would be near 1 however slow the step is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import (
    add_json,
    add_path,
    add_schedule,
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
    from infinity.cli.plain_torch import PlainStep
    from infinity.drive.measure import DriveTest, Workload
    from infinity.plan.machine import Machine
    from infinity.plan.transformer import Transformer as Shape
    from infinity.plan.work import Work
    from infinity.schedule.timeline import TraceSummary

POOL_BYTES_MIN = 2 * ACCESS_BYTES
"""Smallest pool of any model; that of a given model is known once it is built."""

_DRIVE_FILE_BYTES = 256 * MIB
_DRIVE_POOL_BYTES = 64 * MIB
_DRIVE_SECONDS = 0.15
"""Of a trial of each kind, in every round."""


OPTIMIZERS = ("AdamW", "Adam", "SGD", "Muon")
_SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.01},
    "Adam": {"adam_w_mode": False},
    "SGD": {"momentum": 0.9},
}

_DESCRIPTION = """\
Train a synthetic transformer from a drive for a few steps, and print the time of a step, the bytes it moved and how long it
waited, with the lower bound: the longer of a step of plain PyTorch in memory and of what the bytes take at the bandwidth that
the drive gave, all measured in turns."""

_EPILOG = """\
examples:
  infinity-bench step /local_nvme --params 200M
  infinity-bench step /local_nvme --params 1B --batch-size 1 --pinned-bytes-max 512MiB --json step.json

exit code: 0 when done; 1 where it could not run, with the reason; 2 for wrong usage.
docs/step.md says what is measured, and lists the keys of --json."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `step` to the commands of `infinity-bench`."""
    parser = subparsers.add_parser(
        "step",
        help="time real training steps from a drive",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--params", type=checked_value(parse_count, at_least=10_000), default=40_000_000, help='such as "200M" (40M)'
    )
    add_path(parser, "folder on the drive (default: the current one)")
    parser.add_argument("--steps", type=count, default=5, help="steps to time (default: 5)")
    parser.add_argument("--warmup", type=count, default=5, help="steps before them (default: 5)")
    parser.add_argument("--batch-size", type=count, default=4, help="sequences per micro-batch (default: 4)")
    parser.add_argument(
        "--seq", type=checked_value(whole_number, at_least=2), default=256, help="tokens per sequence (default: 256)"
    )
    parser.add_argument(
        "--accumulation", type=count, default=1, metavar="N", help="micro-batches per step (default: 1)"
    )
    add_schedule(parser, default="vertical")
    add_scheme(parser)
    parser.add_argument(
        "--clipping", type=norm, metavar="NORM", help="largest norm of the gradient; 0 does not clip (default: 1.0)"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW", help="of the training (default: AdamW)")
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
    options.path = options.path or Path()
    try:
        if options.no_clipping and options.clipping:
            raise ValueError(f"--no-clipping does not go with --clipping {options.clipping:g}: leave one of them out")
        if options.clipping is None:
            options.clipping = 0.0 if options.no_clipping else 1.0
        options.no_clipping = options.clipping == 0
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


def norm(text: str) -> float:
    """A type for argparse: the largest norm of a gradient; 0 does not clip."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a norm such as 1.0, or 0 not to clip, got {text!r}")
    return value


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], TraceSummary | None]:
    """Train for `warmup` and `steps` steps; returns (the JSON of this command, summary of the trace if one was taken)."""
    from infinity.cli.plain_torch import plain_torch
    from infinity.cli.plan.here import measure_machine
    from infinity.cli.synthetic import make_training, shape_for
    from infinity.plan.work import Work, moments_of
    from infinity.store.run_folder import make_writable

    shape = shape_for(options.params, seq=options.seq)
    make_writable(options.path)
    # Before the steps, so that it is a prediction.
    report = functools.partial(_show, options)
    machine = measure_machine(options.path, shape, samples=options.batch_size, report=report)
    scheme = scheme_from(options, accumulation=options.accumulation, schedule=options.schedule)
    scheme = dataclasses.replace(scheme, moments=moments_of(options.optimizer, shape))
    work = Work(
        shape,
        samples=options.batch_size,
        micro_batches=options.accumulation,
        schedule=options.schedule,
        checkpointing=False,
        clipping=not options.no_clipping,
        scheme=scheme,
        muon=options.optimizer == "Muon",
        gradient_bytes_max=options.gradient_memory,
        unasked=options.update == "auto",
    )
    with _engine(options, shape) as engine:
        _show(options, f"{format_count(engine.numel)} parameters, {shape.layers} layers of hidden size {shape.hidden}")
        for number in range(options.warmup):
            step = _step(engine, options)
            _show(options, f"warming up, step {number + 1} of {options.warmup}: {step['seconds']:.2f} s")
        make = functools.partial(make_training, shape, options.batch_size)
        limits = {
            "shape": shape,
            "samples": options.batch_size,
            "clipping": options.clipping,
            "micro_batches": options.accumulation,
            "optimizer": options.optimizer,
        }
        with _drive_test(options) as drive, plain_torch(make, report=report, **limits) as plain:
            if plain is not None:
                for _ in range(options.warmup):
                    plain.step()
            rounds = []
            for number in range(options.steps):
                step = _step(engine, options)
                rounds.append(Round(step, plain.step() if plain is not None else None, _rates(drive, engine)))
                _show(options, f"round {number + 1} of {options.steps}: {rounds[-1].in_words()}")
        traced = None
        if options.trace is not None:
            engine.start_trace()
            _step(engine, options)
            traced = engine.stop_trace(options.trace)
        stats = engine.swap_stats()
        assert stats is not None and engine.swap is not None
        planned_bytes, backend = engine.swap.step_bytes(), engine.swap.backend
        numel = engine.shard_numel
    return {
        "params": numel,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "batch_size": options.batch_size,
        "accumulation": options.accumulation,
        "schedule": options.schedule,
        "seq": options.seq,
        "clipping": options.clipping,
        "optimizer": options.optimizer,
        "moments_dtype": options.moments_dtype,
        "master_weights": scheme.master_weights,
        "update": scheme.update,
        **summarize(rounds, planned_bytes=planned_bytes, numel=numel, backend=backend),
        "predicted_seconds": _predicted_seconds(
            work, machine, pinned_bytes=stats.pinned_bytes - stats.cached_bytes, cache_bytes=stats.cached_bytes
        ),
        "pinned_bytes": stats.pinned_bytes,
        "cache_bytes": stats.cached_bytes,
        "arena_bytes": stats.arena_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "trace": dataclasses.asdict(traced) if traced is not None else None,
    }, traced


@dataclasses.dataclass(frozen=True)
class Round:
    """What was measured in turn: a step from the drive, one of plain PyTorch (None: left out), and the drive's bytes/s for each
    workload."""

    step: dict[str, Any]
    plain: PlainStep | None
    rates: dict[Workload, float]

    def in_words(self) -> str:
        plain = f", plain PyTorch in memory {self.plain.seconds:.2f} s" if self.plain is not None else ""
        return f"{self.step['seconds']:.2f} s{plain}"


def summarize(rounds: Sequence[Round], *, planned_bytes: tuple[int, int], numel: int, backend: str) -> dict[str, Any]:
    """Medians over the rounds, and what a step is held to: [Note: The lower bound of a measured step].

    planned_bytes: read and written in a step by its plan. Where the pool spared some of them, those that were moved count;
    where some were moved twice, those of the plan.
    """
    from infinity.drive.measure import Workload

    steps = [measured.step for measured in rounds]
    median = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    rates = {workload: statistics.median(measured.rates[workload] for measured in rounds) for workload in Workload}
    moved_bytes = median["read_bytes"], median["written_bytes"]
    drive_seconds = sum(map(min, planned_bytes, moved_bytes)) / rates[Workload.MIXED]
    plain = [measured.plain for measured in rounds if measured.plain is not None]
    plain = plain if len(plain) == len(rounds) else []  # it ended on the way
    torch_seconds = statistics.median(step.seconds for step in plain) if plain else None
    lower_bound = max(torch_seconds or 0.0, drive_seconds)
    return {
        "steps": steps,
        "seconds": median["seconds"],
        "torch_in_memory_seconds": torch_seconds,
        "drive_seconds": drive_seconds,
        "lower_bound_seconds": lower_bound,
        "over_lower_bound": median["seconds"] / lower_bound
        if lower_bound > 0
        else None,  # all cached, and none to compare with
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
    """None where there are no values."""
    return statistics.median(known) if (known := list(values)) else None


def _predicted_seconds(work: Work, machine: Machine, *, pinned_bytes: int, cache_bytes: int) -> float | None:
    """Seconds of a step on `machine` with everything on NVMe, by the planner; None where it says that it can't run."""
    from infinity.plan.planner import plan_step
    from infinity.plan.strategy import STRATEGIES

    everything = next(s for s in STRATEGIES if (s.parameters, s.optimizer) == ("nvme", "nvme"))
    plan = plan_step(work, machine, everything, pinned_bytes=pinned_bytes, cache_bytes=cache_bytes)
    return plan.simulated.seconds if plan.simulated is not None else None


@contextmanager
def _engine(options: argparse.Namespace, shape: Shape) -> Iterator[infinity.Engine]:
    import torch

    import infinity
    from infinity.cli.synthetic import Transformer

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
            "pinned_bytes_max": options.pinned_bytes_max,
            "host_cache_bytes": options.cache,
            "master_weights": options.master_weights,
            "moments_dtype": options.moments_dtype,
            "update": options.update,
            "schedule": options.schedule,
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


def _step(engine: infinity.Engine, options: argparse.Namespace) -> dict[str, Any]:
    """One step, its last writes included."""
    from infinity.cli.plain_torch import Usage

    micro_batches = [_tokens(options) for _ in range(options.accumulation)]
    before, used_before = engine.swap_stats(), Usage.now()
    began = time.perf_counter()
    engine.train_batch(iter(micro_batches))
    assert engine.swap is not None and before is not None
    engine.swap.stager.settle_all()
    seconds = time.perf_counter() - began
    after, used = engine.swap_stats(), Usage.now().since(used_before)
    assert after is not None
    return {
        "seconds": seconds,
        **used._asdict(),
        "read_bytes": after.read_bytes - before.read_bytes,
        "written_bytes": after.written_bytes - before.written_bytes,
        "stall_seconds": after.stall_seconds - before.stall_seconds,
    }


def _tokens(options: argparse.Namespace) -> Any:
    from infinity.cli.synthetic import tokens

    return tokens(options.batch_size, options.seq)


def _drive_test(options: argparse.Namespace) -> DriveTest:
    from infinity.drive.measure import DriveTest

    test = DriveTest(options.path, nbytes=_DRIVE_FILE_BYTES, pool_bytes=_DRIVE_POOL_BYTES)
    test.fill()
    return test


def _rates(drive: DriveTest, engine: infinity.Engine) -> dict[Workload, float]:
    """What the drive gives now, driven as the engine drives it (bytes per second)."""
    from infinity.drive.choice import choose_storage
    from infinity.drive.measure import Workload

    io = choose_storage(engine.config).io
    return {workload: drive.run(workload, io, _DRIVE_SECONDS).bytes_per_s for workload in Workload}


def _plain_in_words(result: dict[str, Any]) -> str:
    if result["torch_in_memory_seconds"] is None:
        return "left out"
    return (
        f"{result['torch_in_memory_seconds']:.3f} s, {result['torch_in_memory_cpu_seconds_per_step']:.3f} CPU seconds, "
        f"{result['torch_in_memory_minor_faults_per_step']:.0f} minor faults a step"
    )


def _lower_bound_in_words(result: dict[str, Any]) -> str:
    """[Note: The lower bound of a measured step]"""
    if result["over_lower_bound"] is None:
        return "none: nothing moved, and plain PyTorch was left out"
    which = "the longer of the two" if result["torch_in_memory_seconds"] is not None else "by the drive alone"
    return f"{result['lower_bound_seconds']:.3f} s, {which}; a step takes {result['over_lower_bound']:.2f} times it"


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
    drive = result["drive"]
    rows = {
        "step": f"{result['seconds']:.3f} s, median of {len(seconds)} ({min(seconds):.3f} to {max(seconds):.3f})",
        "of it waiting for the drive": f"{stall:.3f} s",
        "plain PyTorch in memory": _plain_in_words(result),
        "its bytes, by the drive": f"{result['drive_seconds']:.3f} s",
        "lower bound": _lower_bound_in_words(result),
        "CPU seconds, minor faults": f"{result['cpu_seconds_per_step']:.3f}, {result['minor_faults_per_step']:.0f} a step",
        "predicted": _predicted(result),
        "moved per parameter": f"{result['read_bytes_per_param']:.2f} B read, "
        f"{result['written_bytes_per_param']:.2f} B written",
        "drive": f"{drive['read_bytes_per_s'] / 1e9:.2f} GB/s read, {drive['write_bytes_per_s'] / 1e9:.2f} GB/s written, "
        f"{drive['mixed_bytes_per_s'] / 1e9:.2f} GB/s mixed, through {drive['backend']}",
        **(traced.in_words() if traced is not None else {}),
        "pinned memory": format_bytes(result["pinned_bytes"]),
        "on the drive": format_bytes(result["arena_bytes"]),
        "peak resident memory": format_bytes(result["peak_rss_bytes"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
