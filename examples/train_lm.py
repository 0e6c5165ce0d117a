"""Train a byte-level language model whose parameters and optimizer state are on NVMe.

python examples/train_lm.py                          40 M parameters on the source of Python's standard library
python examples/train_lm.py --params 1B --steps 3    a larger model
python examples/train_lm.py --in-memory              the same training without offload: the oracle
torchrun --nproc-per-node 2 examples/train_lm.py     sharded over two ranks
python examples/train_lm.py --durability step --resume      resumes exactly where it was killed
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import resource
import shutil
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison import Comparison
from gpt import GPT, GPTConfig, config_for
from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import infinity
from infinity.cli.plain_torch import Usage
from infinity.device import cpu_multiplies_fast_in, why_slow
from infinity.units import format_bytes, format_count, parse_bytes, parse_count

HERE = Path(__file__).resolve().parent
TEXT_BYTES_MAX = 32 << 20
HELD_OUT_BATCHES = 4
PROMPTS = ("def ", "class ", "import ")
SAMPLE_BYTES = 96


def some_path(text: str) -> Path:
    """Parse a path. An empty one is rejected: it is an unset variable, not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Ctrl-C ends the run; without --durability step that frees the space on the drive.",
    )
    parser.add_argument(
        "--config",
        default=HERE / "train_lm.json",
        type=some_path,
        help="training config, a DeepSpeed-style JSON (default: %(default)s)",
    )
    parser.add_argument(
        "--params", default="40M", help="parameters of the model, such as 40M, 200M or 1B (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 100, or 5 above 150M parameters)")
    parser.add_argument(
        "--data", type=some_path, help="a text file or a folder (default: the source of Python's standard library)"
    )
    parser.add_argument(
        "--nvme-path", type=some_path, help="folder on the drive (default: the config's, or .nvme in the checkout)"
    )
    parser.add_argument("--in-memory", action="store_true", help="the same training without offload")
    parser.add_argument(
        "--pinned-bytes-max", help="pinned host memory per rank, such as 256MiB (default: the config's)"
    )
    parser.add_argument(
        "--gradient-bytes-max",
        help="host memory for waiting gradients; the others wait on the drive (default: the config's)",
    )
    parser.add_argument("--batch-size", type=int, help="sequences per rank and micro-batch, if the config says auto")
    parser.add_argument("--context", type=int, default=256, help="bytes per sequence (default: %(default)s)")
    parser.add_argument(
        "--checkpoint-activations", action="store_true", help="recompute each block in the backward pass"
    )
    parser.add_argument(
        "--lr", type=float, help="learning rate, if the config says auto (default: 4 / (hidden size * blocks))"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of initial values, batches and samples (default: %(default)s)"
    )
    parser.add_argument("--save", type=some_path, metavar="DIR", help="write a checkpoint there at the end")
    parser.add_argument(
        "--durability",
        choices=("none", "step"),
        help="step: every step survives the process, on the drive (default: the config's, or none)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        type=some_path,
        metavar="DIR",
        help="resume from the latest checkpoint there; without DIR from the last step of a run with --durability step, "
        "or start it",
    )
    parser.add_argument(
        "--no-compare",
        action="store_true",
        help="don't time plain PyTorch in memory, which takes 18 bytes per parameter",
    )
    parser.add_argument("--sample", action="store_true", help="sample text at the end; good text needs --steps 2000")
    parser.add_argument("--json", type=some_path, metavar="FILE", help="write every step and the summary there")
    parser.add_argument(
        "--trace",
        type=some_path,
        metavar="FILE",
        help="write a timeline of rank 0's last step, for ui.perfetto.dev",
    )
    args = parser.parse_args(argv)
    if args.trace and args.in_memory:
        parser.error("--trace: a training held in memory has no timeline")
    try:
        args.numel = parse_count(args.params)
    except ValueError as error:
        parser.error(f"--params: {error}")
    for option in ("pinned_bytes_max", "gradient_bytes_max"):
        if getattr(args, option) is not None:
            try:
                setattr(args, option, parse_bytes(getattr(args, option)))
            except ValueError as error:
                parser.error(f"--{option.replace('_', '-')}: {error}")
    if args.numel < 100_000:
        parser.error("--params: at least 100k")
    if args.context < 8:
        parser.error("--context: at least 8")
    if args.steps is None:
        args.steps = 100 if args.numel <= 150_000_000 else 5
    if args.steps < 1:
        parser.error("--steps: at least 1")
    if args.batch_size is None:
        args.batch_size = 4 if args.numel <= 150_000_000 else 1
    return args


def block_of(config: Any, *path: str) -> dict[str, Any]:
    """Return a block of the config to change in place; an empty one if it is missing or invalid (see initialize)."""
    for name in path:
        config = config.get(name)
        if not isinstance(config, dict):
            return {}
    block: dict[str, Any] = config
    return block


def training_config(args: argparse.Namespace, shape: GPTConfig) -> dict[str, Any]:
    """Return the config file with its autos filled from the command line, and the device of --in-memory."""
    try:
        config: Any = json.loads(args.config.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise infinity.ConfigError(f"{args.config}: can't read the config ({reason})") from None
    except json.JSONDecodeError as error:
        raise infinity.ConfigError(f"{args.config}, line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise infinity.ConfigError(f"{args.config}: expected a JSON object, found {type(config).__name__}")
    if config.get("train_micro_batch_size_per_gpu") == "auto":
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    of_bf16 = block_of(config, "bf16")
    if of_bf16.get("enabled") == "auto":
        fast = torch.cuda.is_available() or cpu_multiplies_fast_in(torch.bfloat16)
        of_bf16["enabled"] = fast or args.numel < 1_000_000  # small models are fast either way
    lr = 4 / (shape.hidden_size * shape.layers) if args.lr is None else args.lr
    warmup = max(10, args.steps // 10)
    fill = {"lr": lr, "total_num_steps": max(args.steps, 2 * warmup), "warmup_num_steps": warmup}
    for block in ("optimizer", "scheduler"):
        values = block_of(config, block, "params")
        values.update({key: fill[key] for key in values if values[key] == "auto" and key in fill})
    for block in ("offload_param", "offload_optimizer"):
        place = block_of(config, "zero_optimization", block)
        if args.in_memory and place:
            place.clear()
            place["device"] = "none"
        elif place.get("device") == "nvme" and (args.nvme_path or place.get("nvme_path") in (None, "auto")):
            place["nvme_path"] = str(args.nvme_path or HERE.parent / ".nvme")
    overrides = {
        "pinned_bytes_max": args.pinned_bytes_max,
        "gradient_bytes_max": args.gradient_bytes_max,
        "durability": args.durability,
    }
    for key, value in overrides.items():
        if value is not None:
            config.setdefault("infinity", {})
            block_of(config, "infinity")[key] = value
    if "infinity" in config:  # the config's value if the command line has none, for the last message
        args.durability = block_of(config, "infinity").get("durability")
    checked: dict[str, Any] = config
    return checked


def check_writable(args: argparse.Namespace) -> None:
    """Raise ConfigError now if --save, --json or --trace would fail after the training."""
    try:
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.save).close()
        for file in filter(None, (args.json, args.trace)):
            fresh = not file.exists()
            file.open("a").close()
            if fresh:
                file.unlink()
    except OSError as error:
        raise infinity.ConfigError(
            f"--save, --json or --trace: can't write {error.filename} ({error.strerror})"
        ) from None


def check_room(engine: infinity.Engine, folder: Path) -> None:
    """Raise ConfigError now if there is too little space for the checkpoint: masters and moments in fp32."""
    momentum = getattr(engine.config.optimizer, "momentum", None)
    moments = 2 if momentum is None else int(momentum > 0)
    needed, usage = 4 * (1 + moments) * engine.numel, shutil.disk_usage(folder)
    if usage.total and needed > usage.free:  # some file systems don't count
        raise infinity.ConfigError(
            f"--save {folder}: the checkpoint takes {format_bytes(needed)}, and {format_bytes(usage.free)} are free there: "
            f"free {format_bytes(needed - usage.free)} more, or save elsewhere"
        )


def read_text(path: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (training bytes, held-out bytes) as uint8: every 20th file is held out, or the end of a single one."""
    root = path or Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        raw = torch.frombuffer(bytearray(root.read_bytes()[:TEXT_BYTES_MAX]), dtype=torch.uint8)
        cut = len(raw) * 19 // 20
        return raw[:cut], raw[cut:]
    if not root.is_dir():
        raise infinity.ConfigError(f"--data {root}: no such file or folder")
    pattern = "*.py" if path is None else "*"
    files = sorted(f for f in root.rglob(pattern) if f.is_file() and "site-packages" not in f.parts)
    parts = (bytearray(), bytearray())
    for number, file in enumerate(files):
        if len(parts[0]) >= TEXT_BYTES_MAX:
            break
        parts[number % 20 == 19].extend(file.read_bytes())
    if not parts[0]:
        raise infinity.ConfigError(f"--data {root}: no text in it")
    if not parts[1]:
        cut = len(parts[0]) * 19 // 20
        parts = (parts[0][:cut], parts[0][cut:])
    return torch.frombuffer(parts[0], dtype=torch.uint8), torch.frombuffer(parts[1], dtype=torch.uint8)


def batch_of(
    text: torch.Tensor, size: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `size` random pieces of the text, and the byte after each of their bytes (int64)."""
    starts = torch.randint(0, len(text) - context - 1, (size,), generator=generator)
    pieces = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(engine: infinity.Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = engine(batch[0])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[1].to(logits.device).flatten())


def held_out_loss(engine: infinity.Engine, text: torch.Tensor, args: argparse.Namespace) -> float:
    """Return the mean loss over a few fixed batches, the same on every rank."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    engine.eval()
    with torch.no_grad():
        losses = [
            loss_of(engine, batch_of(text, engine.train_micro_batch_size_per_gpu(), args.context, generator)).item()
            for _ in range(HELD_OUT_BATCHES)
        ]
    engine.train()
    return statistics.mean(losses)


def sample(engine: infinity.Engine, args: argparse.Namespace) -> list[str]:
    """Return a line of text for each prompt; every new byte is a forward of the whole model, from the drive."""
    generator = torch.Generator().manual_seed(args.seed)
    width = max(map(len, PROMPTS))
    tokens = torch.stack(
        [torch.frombuffer(bytearray(p.rjust(width, "\n"), "ascii"), dtype=torch.uint8) for p in PROMPTS]
    )
    tokens = tokens.long()
    engine.eval()
    with torch.no_grad():
        for _ in range(SAMPLE_BYTES):
            logits = engine(tokens[:, -args.context :])[:, -1].float().cpu() / 0.7
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    engine.train()
    return [bytes(row.tolist()).decode("utf-8", "replace").strip("\n") for row in tokens]


def measure_drive(path: str, console: Console) -> infinity.DriveRates | None:
    """Measure the drive; None if it has no room for the measurement."""
    try:
        return infinity.measure_drive(path)
    except infinity.StoreError as error:
        console.print(f"the drive is not measured, and the lower bound omits it ({error})", style="yellow")
        return None


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(
    engine: infinity.Engine, text: torch.Tensor, args: argparse.Namespace, console: Console, comparison: Comparison
) -> list[dict[str, Any]]:
    """Take the steps, with progress. Returns a record of each."""
    rank = dist.get_rank()
    records: list[dict[str, Any]] = []
    accumulation = engine.gradient_accumulation_steps()
    steady = False  # the first step also allocates buffers and records the trace, and may have nothing to update
    with progress_bar(console, enabled=rank == 0) as report:
        for step in range(engine.global_steps, args.steps):
            used_before = Usage.now()
            traces = args.trace is not None and rank == 0 and step == args.steps - 1
            if traces:
                engine.start_trace()
                engine.restart_clock()
            loss = 0.0
            for micro in range(accumulation):
                seed = ((args.seed * 1_000_003 + step) * 1009 + micro) * 997 + rank
                generator = torch.Generator().manual_seed(seed)
                micro_loss = loss_of(
                    engine, batch_of(text, engine.train_micro_batch_size_per_gpu(), args.context, generator)
                )
                engine.backward(micro_loss)
                loss += micro_loss.item() / accumulation
            gradient_bytes = engine.gradient_bytes
            engine.step()
            took = engine.step_stats
            assert took is not None
            records.append(
                {
                    "step": step + 1,
                    "loss": loss,
                    "seconds": took.seconds,
                    "read_bytes": took.read_bytes,
                    "written_bytes": took.written_bytes,
                    "stall_seconds": took.stall_seconds,
                    "gradient_bytes": gradient_bytes,
                    **Usage.now().since(used_before)._asdict(),
                    "steady": steady,
                }
            )
            steady = True
            if traces:
                trace = engine.stop_trace(args.trace)
                records[-1]["trace"] = dataclasses.asdict(trace)
            report(step + 1, args.steps, records[-1])
            if traces:
                for name, words in trace.in_words().items():
                    console.print(f"{name}: {words}", highlight=False, soft_wrap=True)
            if comparison.step_after(len(records)):
                engine.restart_clock()
                steady = False  # the next step does not share the drive with this one's last writes
    return records


class progress_bar:
    """A live bar on a terminal, with the figures below it; else a line at intervals."""

    def __init__(self, console: Console, *, enabled: bool) -> None:
        self.console = console
        self.enabled = enabled
        self.bar: Progress | None = None
        self.live: Live | None = None

    def __enter__(self) -> Any:
        if self.enabled and self.console.is_terminal:
            self.bar = Progress(
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=None)
            self.live = Live(Group(self.bar, Text("first step ...")), console=self.console)
            self.live.start()
        return self.report

    def __exit__(self, *exception: object) -> None:
        if self.live is not None:
            self.live.stop()

    def report(self, step: int, steps: int, record: dict[str, Any]) -> None:
        seconds = record["seconds"]
        text = (
            f"loss {record['loss']:.3f}  {seconds:.2f} s/step  read {rate(record['read_bytes'] / seconds)}  "
            f"write {rate(record['written_bytes'] / seconds)}  stall {record['stall_seconds']:.2f} s  "
            f"resident {format_bytes(rss_bytes())}"
        )
        if self.bar is not None and self.live is not None:
            self.bar.update(self.task, completed=step, total=steps)
            self.live.update(Group(self.bar, Text(text)))
        elif self.enabled and (step <= 3 or step % max(1, steps // 20) == 0 or step == steps):
            self.console.print(f"step {step:4d}/{steps}  {text}", highlight=False, soft_wrap=True)


def summarize(
    engine: infinity.Engine,
    args: argparse.Namespace,
    records: list[dict[str, Any]],
    facts: dict[str, Any],
    rates: infinity.DriveRates | None,
    comparison: Comparison,
) -> dict[str, Any]:
    """Return the closing figures of this rank; `show` names them."""
    shard_numel = engine.shard_numel
    steady = [r for r in records if r["steady"]] or records
    timed = ("seconds", "stall_seconds", "cpu_seconds", "minor_faults")
    median = {key: statistics.median(r[key] for r in steady) for key in timed}
    moved = {key: statistics.mean(r[key] for r in records[1:] or records) for key in ("read_bytes", "written_bytes")}
    stats = engine.swap_stats()
    on_drive = None
    if engine.swap is not None and rates is not None:
        on_drive = sum(map(min, engine.swap.step_bytes(), moved.values())) / rates.mixed_bytes_per_s
    plain = comparison.summary()
    bounds = [seconds for seconds in (plain["torch_in_memory_seconds"], on_drive) if seconds]
    peak = peak_rss_bytes()
    gradients = max(r["gradient_bytes"] for r in records)
    pinned = stats.pinned_bytes if stats is not None else 0
    return {
        **facts,
        "params": engine.numel,
        "ranks": dist.get_world_size(),
        "in_memory": args.in_memory,
        "backend": engine.swap.backend if engine.swap is not None else None,
        "nvme_bytes": stats.arena_bytes if stats is not None else 0,
        "step_seconds": median["seconds"],
        "stall_seconds": median["stall_seconds"],
        **plain,
        "drive_seconds": on_drive,
        "lower_bound_seconds": max(bounds) if bounds else None,
        "cpu_seconds_per_step": median["cpu_seconds"],
        "minor_faults_per_step": median["minor_faults"],
        "read_bytes_per_param": moved["read_bytes"] / shard_numel,
        "written_bytes_per_param": moved["written_bytes"] / shard_numel,
        "peak_rss_bytes": peak,
        "baseline_rss_bytes": facts["baseline_rss_bytes"],
        "pinned_bytes": pinned,
        "gradient_bytes": gradients,
        "in_memory_bytes": peak if stats is None else peak - pinned - gradients + 16 * shard_numel,
        "drive": None
        if rates is None
        else {
            "read_bytes_per_s": rates.read_bytes_per_s,
            "write_bytes_per_s": rates.write_bytes_per_s,
            "mixed_bytes_per_s": rates.mixed_bytes_per_s,
        },
        "steps": records,
    }


def show(console: Console, summary: dict[str, Any]) -> None:
    """Print the summary as a table."""

    def size(name: str) -> str:
        return format_bytes(summary[name])

    losses = [record["loss"] for record in summary["steps"]]
    first, last = summary["held_out_loss_first"], summary["held_out_loss_last"]
    named = ("baseline_rss_bytes", "pinned_bytes", "gradient_bytes")
    other_bytes = format_bytes(max(0, summary["peak_rss_bytes"] - sum(summary[name] for name in named)))
    seconds = summary["step_seconds"]
    rows = [
        ("parameters", format_count(summary["params"])),
        ("training loss", f"{losses[0]:.3f} at first, {losses[-1]:.3f} at last"),
        ("held-out loss", f"{first:.3f} before, {last:.3f} after ({last / math.log(2):.2f} bits per byte)"),
        ("peak resident memory", size("peak_rss_bytes")),
        ("  Python, torch and the text", size("baseline_rss_bytes")),
        ("  gradients", size("gradient_bytes")),
        ("  live groups and activations", other_bytes),
        ("step, median", f"{seconds:.2f} s, {summary['stall_seconds']:.2f} s of it waiting for the drive"),
        (
            "  its CPU time, minor faults",
            f"{summary['cpu_seconds_per_step']:.2f} s, {summary['minor_faults_per_step']:.0f}",
        ),
    ]
    if not summary["in_memory"]:
        moved = summary["read_bytes_per_param"], summary["written_bytes_per_param"]
        drive = summary["drive"]
        rows.insert(5, ("  pinned pool", size("pinned_bytes")))
        rows.insert(3, ("on NVMe", f"{size('nvme_bytes')}, through {summary['backend']}"))
        rows.insert(4, ("moved per parameter and step", f"{moved[0]:.2f} B read, {moved[1]:.2f} B written"))
        plain_seconds, on_drive = summary["torch_in_memory_seconds"], summary["drive_seconds"]
        if plain_seconds is not None:
            used, faults = (summary[f"torch_in_memory_{name}_per_step"] for name in ("cpu_seconds", "minor_faults"))
            rows.append(
                ("plain PyTorch in memory", f"{plain_seconds:.2f} s, {size('torch_in_memory_peak_rss_bytes')} resident")
            )
            rows.append(("  its CPU time, minor faults", f"{used:.2f} s, {faults:.0f}"))
        else:
            words = f"left out; {size('in_memory_bytes')} resident (computed: 16 B of state and gradients, no pool)"
            rows.append(("plain PyTorch in memory", words))
        if drive is not None:
            read, write, mixed = (rate(drive[f"{kind}_bytes_per_s"]) for kind in ("read", "write", "mixed"))
            rows.append(("drive, measured before", f"{read} read, {write} write, {mixed} mixed"))
            rows.append(("  time for the step's bytes", f"{on_drive:.2f} s at its mixed rate"))
        if (bound := summary["lower_bound_seconds"]) is not None:
            which = (
                "the longer of the two"
                if plain_seconds is not None and drive is not None
                else "the one that was measured"
            )
            rows.append(("lower bound", f"{bound:.2f} s, {which}: a step takes {seconds / bound:.2f} times it"))
    table = Table(title=f"rank 0 of {summary['ranks']}" if summary["ranks"] > 1 else None, show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in summary.get("samples", []):
        console.rule(style="dim")
        console.print(line, markup=False, highlight=False)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    shape = config_for(args.numel, args.context, checkpoint_activations=args.checkpoint_activations)
    config = training_config(args, shape)
    if args.resume is True and args.durability != "step":
        raise infinity.ConfigError(
            "--resume without a folder resumes a run of --durability step: add that, or name the folder of a checkpoint"
        )
    if reports_here():
        check_writable(args)
    text, held_out = read_text(args.data)
    if min(len(text), len(held_out)) <= args.context + 1:
        raise infinity.ConfigError(f"the text is shorter than two sequences of {args.context} bytes")
    console.print(
        f"GPT of {format_count(shape.numel)} parameters: {shape.layers} blocks, hidden size {shape.hidden_size}; "
        f"{format_bytes(len(text))} of text",
        highlight=False,
    )
    in_fp32 = not torch.cuda.is_available() and not block_of(config, "bf16").get("enabled")
    if in_fp32 and (why := why_slow(torch.bfloat16)) is not None:
        console.print(f"computes in fp32: {why}", highlight=False)
    baseline = rss_bytes()
    offloads = [block_of(config, "zero_optimization", block) for block in ("offload_param", "offload_optimizer")]
    path = next((place["nvme_path"] for place in offloads if place.get("device") == "nvme"), None)
    torch.manual_seed(args.seed)
    with infinity.init_empty():
        model = GPT(shape)
    engine, _, _, _ = infinity.initialize(model=model, config=config, resume=args.resume is True)
    with engine:
        if args.save and reports_here():
            check_room(engine, args.save)
        if args.resume and args.resume is not True:
            if engine.load_checkpoint(args.resume)[0] is None:
                raise infinity.CheckpointError(f"{args.resume} holds no checkpoint: name a folder that --save wrote to")
            console.print(f"resumed at step {engine.global_steps}")
        rates = measure_drive(path, console) if path is not None else None
        first = held_out_loss(engine, held_out, args)
        engine.restart_clock()
        with Comparison(engine, shape, args, console) as comparison:
            records = train(engine, text, args, console, comparison)
        if not records:
            raise infinity.ConfigError(f"the run is already at step {engine.global_steps}: raise --steps")
        facts: dict[str, Any] = {
            "held_out_loss_first": first,
            "held_out_loss_last": held_out_loss(engine, held_out, args),
            "baseline_rss_bytes": baseline,
            "seed": args.seed,
        }
        if args.save:
            try:
                engine.save_checkpoint(args.save)
            except infinity.CheckpointError as error:
                facts["save_failed"] = str(error)  # the results are printed all the same
        if args.sample:
            console.print("sampling ...")
            facts["samples"] = sample(engine, args)
        return summarize(engine, args, records, facts, rates, comparison)


def reports_here() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console(quiet=not reports_here())
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, show_time=False, show_level=False)],
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.perf_counter()
    try:
        summary = run(args, console)
    except KeyboardInterrupt:
        durable = args.durability == "step"
        console.print(
            f"interrupted: {'--resume continues' if durable else 'the space on the drive is freed'}", style="yellow"
        )
        return 130
    except infinity.InfinityError as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 1
    summary["total_seconds"] = time.perf_counter() - began
    show(console, summary)
    failed = summary.get("save_failed", "")
    if args.json and reports_here():
        try:
            args.json.write_text(json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            failed = f"{failed}; " * bool(failed) + f"can't write {args.json} ({error.strerror})"
    if failed:
        print(f"train_lm: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
