"""Trains a model within a quarter of the memory that plain PyTorch takes, and compares every loss with it.

    python bench/learned.py --nvme-path /local_nvme --save
    python bench/learned.py --draw      # the picture of the last saved run, docs/pictures/learned.svg

Both train a GPT over bytes on the sources of Python's standard library, of which every 20th file is held out, in bf16
with AdamW and activation checkpointing. Plain PyTorch runs first, in memory without a limit. infinity then runs with all
states on NVMe in a control group whose limit is a quarter of plain PyTorch's peak. Prints one JSON line; --save appends
it to bench/results/learned.jsonl and draws the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpt import GPT, GPTConfig, config_for  # noqa: E402
from results import RESULTS, machine, save  # noqa: E402

from infinity.cli.arguments import checked_value, count  # noqa: E402
from infinity.cli.memory_limit import MemoryLimit, memory_limit  # noqa: E402
from infinity.cli.plain_torch import OPTIMIZERS, PlainTraining, peak_rss_bytes  # noqa: E402
from infinity.cli.program import run_program  # noqa: E402
from infinity.errors import InfinityError  # noqa: E402
from infinity.units import MIB, format_count, parse_count  # noqa: E402

PICTURE = HERE.parent / "docs" / "pictures" / "learned.svg"
HELD_OUT_BATCHES = 16
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}

WARM_UP_STEPS = 30
"""Steps over which the learning rate grows linearly to that of ADAMW."""

Step = Callable[[torch.Tensor, float], float]
"""Trains on a batch of (batch, context + 1) bytes with a learning rate, and returns its loss."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--params",
        type=checked_value(parse_count, at_least=1),
        default="124M",
        help="size of the model (default: %(default)s)",
    )
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--batch-size", type=count, default=2)
    parser.add_argument("--context", type=count, default=128)
    parser.add_argument("--pinned-bytes-max", default="84MiB", help="infinity's pinned pool (default: %(default)s)")
    parser.add_argument("--nvme-path", default=str(HERE.parent / ".nvme"))
    parser.add_argument("--save", action="store_true", help="append the result and draw the picture")
    parser.add_argument("--draw", action="store_true", help="draw the last saved result; train nothing")
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "ORDER"), help=argparse.SUPPRESS)
    parser.set_defaults(func=run)
    return run_program(parser, None)


def run(args: argparse.Namespace) -> int:
    if args.worker:
        way, order = args.worker
        print(json.dumps(trained(way, json.loads(order))), flush=True)
        return 0
    if not args.draw:
        line = measure(args)
        print(json.dumps(line))
        if not args.save:
            return 0
        save("learned", line)
    PICTURE.write_text(picture(last_result()))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train both ways, one after the other, on the same batches. Returns the JSON line of results."""
    Path(args.nvme_path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-learned-", dir=args.nvme_path) as folder:
        order = {name: getattr(args, name) for name in ("params", "context", "pinned_bytes_max")}
        order |= {"nvme_path": folder, "batches": str(Path(folder, "batches.pt"))}
        torch.save(batches_of_text(args), order["batches"])
        plain = worker_result("plain", order, MemoryLimit("none"))
        limit_bytes = plain["peak_rss_bytes"] // 4
        with memory_limit(limit_bytes) as limit:
            within = worker_result("infinity", order, limit)
    unequal = sum(a != b for a, b in zip(plain["losses"], within["losses"], strict=True))
    line = {"bench": "learned", **machine(), "memory_limit": limit_bytes, "limit": limit.in_words}
    line |= {name: getattr(args, name) for name in ("steps", "batch_size", "context", "pinned_bytes_max")}
    line |= {"params": within["numel"], "unequal_losses": unequal, "losses": within["losses"]}
    for name, way in (("plain", plain), ("infinity", within)):
        line[name] = {key: value for key, value in way.items() if key != "losses"}
    return line


def worker_result(way: str, order: dict[str, Any], limit: MemoryLimit) -> dict[str, Any]:
    """Train one way in a process of its own. Raises InfinityError if it fails."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", way, json.dumps(order)]
    with tempfile.TemporaryFile("w+") as answer:
        if status := limit.run(command, stdout=answer):
            raise InfinityError(f"{way}: the training ended with status {status}")
        answer.seek(0)
        result: dict[str, Any] = json.loads(answer.read().splitlines()[-1])
    return result


def batches_of_text(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return random pieces of the text, (batches, batch, context + 1) uint8, to train on and held out."""
    from train_lm import read_text

    generator = torch.Generator().manual_seed(0)
    drawn = {}
    for name, text, number in zip(("train", "held_out"), read_text(None), (args.steps, HELD_OUT_BATCHES), strict=True):
        starts = torch.randint(0, len(text) - args.context, (number * args.batch_size,), generator=generator)
        pieces = torch.stack([text[start : start + args.context + 1] for start in starts.tolist()])
        drawn[name] = pieces.view(number, args.batch_size, args.context + 1)
    return drawn


def trained(way: str, order: dict[str, Any]) -> dict[str, Any]:
    """Train one way in this process. Returns its losses, times and peak memory."""
    batches = torch.load(order["batches"])
    torch.manual_seed(0)
    model, step, numel = {"plain": plain_way, "infinity": infinity_way}[way](order, batches["train"].shape[1])
    before, losses, seconds = held_out_loss(model, batches["held_out"]), [], []
    for number, batch in enumerate(batches["train"]):
        began = time.perf_counter()
        losses.append(step(batch, ADAMW["lr"] * min(1.0, (number + 1) / WARM_UP_STEPS)))
        seconds.append(time.perf_counter() - began)
        if number % 20 == 0:
            print(f"{way}: step {number}, loss {losses[-1]:.3f}, {seconds[-1]:.2f} s", file=sys.stderr)
    after = held_out_loss(model, batches["held_out"])
    return {
        "numel": numel,
        "losses": losses,
        "held_out_loss": [before, after],
        "seconds": sum(seconds),
        "step_seconds": statistics.median(seconds),
        "peak_rss_bytes": peak_rss_bytes() - library_bytes(),
    }


def library_bytes() -> int:
    """Return the resident bytes of files, those of the libraries, which a control group does not count if another
    process has read them first."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["RssFile"].split()[0])


def plain_way(order: dict[str, Any], batch_size: int) -> tuple[torch.nn.Module, Step, int]:
    """Return plain PyTorch's training in memory."""
    made: list[torch.optim.Optimizer] = []

    def adamw(masters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(masters, **ADAMW, fused=True))
        return made[0]

    OPTIMIZERS["AdamW"] = adamw
    training = PlainTraining(GPT(shape_of(order)), clipping=0)

    def step(batch: torch.Tensor, lr: float) -> float:
        made[0].param_groups[0]["lr"] = lr
        loss = loss_of(training.model, batch)
        training.backward(loss)
        training.step()
        return loss.item()

    return training.model, step, training.numel


def infinity_way(order: dict[str, Any], batch_size: int) -> tuple[torch.nn.Module, Step, int]:
    """Return the training with all states on NVMe."""
    import torch.distributed as dist

    import infinity

    place = {"device": "nvme", "nvme_path": order["nvme_path"]}
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"pinned_bytes_max": order["pinned_bytes_max"]},
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with infinity.init_empty():
        model = GPT(shape_of(order))
    engine, optimizer, *_ = infinity.initialize(model=model, config=config)

    def step(batch: torch.Tensor, lr: float) -> float:
        optimizer.param_groups[0]["lr"] = lr
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return engine, step, engine.numel


def shape_of(order: dict[str, Any]) -> GPTConfig:
    return config_for(order["params"], order["context"], checkpoint_activations=True)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    text = batch.long()
    return F.cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())


def held_out_loss(model: torch.nn.Module, batches: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def last_result() -> dict[str, Any]:
    line: dict[str, Any] = json.loads((RESULTS / "learned.jsonl").read_text().splitlines()[-1])
    return line


def picture(line: dict[str, Any]) -> str:
    """Return an SVG of the losses: a wide pale line for plain PyTorch, and infinity's on it. Raises InfinityError if one
    loss differs, as one line could not show both."""
    if line["unequal_losses"]:
        raise InfinityError(f"{line['unequal_losses']} losses differ: there is no common curve to draw")
    width, height, left, right, top, bottom = 760, 340, 56, 20, 44, 46
    losses = line["losses"]
    highest = math.ceil(max(losses))

    def x(step: float) -> float:
        return left + (width - left - right) * step / len(losses)

    def y(loss: float) -> float:
        return height - bottom - (height - top - bottom) * loss / highest

    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses, 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#4c5a68" role="img" aria-labelledby="title">',
        '<title id="title">Training loss at each step, the same for plain PyTorch and for infinity</title>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for loss in range(highest + 1):
        parts.append(f'<path d="M{left} {y(loss):.1f}H{width - right}" stroke="#e3e8ed"/>')
        parts.append(f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, len(losses) + 1, max(1, len(losses) // 6)):
        parts.append(f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{x(len(losses) / 2):.1f}" y="{height - 8}" text-anchor="middle">step</text>')
    drawn = (("#f3b982", 6.0, "plain", "plain PyTorch"), ("#2f6fb7", 1.5, "infinity", "infinity"))
    for number, (color, stroke, way, name) in enumerate(drawn):
        mark = left + 12 + 350 * number
        label = f"{name}: peak {line[way]['peak_rss_bytes'] / MIB:.0f} MiB, {line[way]['step_seconds']:.2f} s per step"
        style = f'fill="none" stroke="{color}" stroke-width="{stroke}" stroke-linejoin="round"'
        parts.append(f'<polyline points="{points}" {style}/>')
        parts.append(f'<path d="M{mark} 22h24" {style}/><text x="{mark + 32}" y="26">{label}</text>')
    caption = f"training loss of {format_count(line['params'])} parameters"
    parts.append(f'<text x="{width - right}" y="{top + 16}" text-anchor="end">{caption}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
