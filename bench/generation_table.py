"""The table of docs/frozen_weights.md: generation from a model's files, plain PyTorch, DeepSpeed, and the drive.

    python bench/generation_table.py --nvme-path /local_nvme --deepspeed-python ../ds/bin/python --lora
    python bench/generation_table.py --params 200M --pools 300MiB,auto --rounds 1 --lines never.jsonl

Creates the model (examples/made_model.py). Every round then starts a new process for each way, in turn: the drive, the
ways in an order that changes, and the drive again. The page cache holds none of the model's files when a process
starts. All generate greedily from one prompt, and the first token counts for the start alone. The drive's rate is that
of direct sequential reads of the same files by infinity's I/O engine, at the block size and queue depth of generation.
A first round, which loads programs into the page cache and builds DeepSpeed's extensions, isn't counted.

--lora also takes a few steps of examples/finetune_lora.py in every round. It compares the time to the first step with
the imports and one read of the files: directly, and by safetensors into memory.

Appends a JSON line for each size to the file of --lines. Lines that the file already has are not measured again. Prints
the rows of the tables last, in Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

from generation_worker import weight_files  # noqa: E402
from made_model import made_model  # noqa: E402
from results import RESULTS, machine  # noqa: E402
from step_summary import Row, median  # noqa: E402
from step_table import lines_of, listed  # noqa: E402

from infinity.cli.arguments import checked_value, count, whole_number  # noqa: E402
from infinity.cli.plain_torch import PROCESS_BYTES  # noqa: E402
from infinity.cli.program import run_program  # noqa: E402
from infinity.host_memory import available_bytes  # noqa: E402
from infinity.store.foreign import read_header  # noqa: E402
from infinity.units import GIB, format_bytes, format_count, parse_bytes, parse_count  # noqa: E402

COLUMNS = (
    "parameters",
    "pinned",
    "GB read per token",
    "plain PyTorch in memory",
    "drive time for these bytes",
    "infinity",
    "over the longer",
    "DeepSpeed",
    "over infinity",
    "GB read per token, DeepSpeed",
    "start s, infinity / plain / DeepSpeed",
    "peak GiB, infinity / plain / DeepSpeed",
    "tokens of plain PyTorch, infinity / DeepSpeed",
)

LORA_COLUMNS = (
    "parameters",
    "pinned",
    "start to first step",
    "imports",
    "files once, directly",
    "over imports and that",
    "files once, safetensors",
    "over imports and that",
    "B read / frozen parameter and step",
    "B written, steps after the first / process",
    "peak GiB",
)


class LeftOut(Exception):
    """Why a way can't run here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", type=listed(parse_count), default="1B", help="sizes (default: %(default)s)")
    parser.add_argument(
        "--pools",
        type=listed(pool_size),
        default="800MiB,1.4GiB,auto",
        help="infinity's pinned memory, a row for each (default: %(default)s)",
    )
    parser.add_argument("--prompt", type=count, default=8, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=checked_value(whole_number, at_least=2),
        default=12,
        help="tokens to generate (default: %(default)s)",
    )
    parser.add_argument(
        "--deepspeed-python",
        help="a Python that has deepspeed and transformers, to generate with ZeRO-Inference (needs libaio-dev)",
    )
    parser.add_argument(
        "--lora", nargs="?", const="auto", type=pool_size, help="also start LoRA, in this much pinned memory (auto)"
    )
    parser.add_argument("--rounds", type=count, default=7, help="rounds, after one not counted (default: %(default)s)")
    parser.add_argument("--nvme-path", type=Path, default=HERE.parent / ".nvme")
    parser.add_argument("--lines", type=Path, default=RESULTS / "generation.jsonl", help="(default: %(default)s)")
    parser.set_defaults(func=run)
    return run_program(parser, None)


def pool_size(text: str) -> str:
    """Check a size as text, or "auto" (an argparse type). Raises ValueError."""
    if text != "auto":
        parse_bytes(text)
    return text


def run(options: argparse.Namespace) -> int:
    """Measure what is missing; print the rows."""
    done = {key_of(line): line for line in lines_of(options.lines)}
    keys = []
    for params in options.params:
        asked = {name: getattr(options, name) for name in ("pools", "prompt", "tokens", "lora")}
        asked |= {"asked": params, "deepspeed": bool(options.deepspeed_python)}
        keys.append(key_of(asked))
        if keys[-1] not in done:
            done[keys[-1]] = {"bench": "generation", **machine(), **asked, **measure(options, params)}
            with options.lines.open("a") as file:
                file.write(json.dumps(done[keys[-1]]) + "\n")
    lines = [done[key] for key in keys]
    print_table(COLUMNS, [row_of(line, name) for line in lines for name in line["pools"]])
    if options.lora:
        print_table(LORA_COLUMNS, [lora_row_of(line) for line in lines])
    return 0


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a line, or of one to measure."""
    names = ("asked", "prompt", "tokens", "deepspeed", "lora")
    return *(line[name] for name in names), tuple(line["pools"])


def measure(options: argparse.Namespace, params: str) -> dict[str, Any]:
    """Create the model, and take all rounds. Returns the medians of each way."""
    numel = parse_count(params)
    place = argparse.Namespace(params=numel, bits=16, nvme_path=options.nvme_path)
    with made_model(place, lambda text: print(text, file=sys.stderr)) as (folder, _):
        os.sync()
        order = {"folder": str(folder), "prompt": options.prompt, "tokens": options.tokens, **sizes_of(folder)}
        ways = (
            [f"infinity {name}" for name in options.pools] + ["torch"] + ["deepspeed"] * bool(options.deepspeed_python)
        )
        ways += [f"lora {options.lora}", "load"] if options.lora else []
        rows = [take_round(options, order, ways, number) for number in range(options.rounds + 1)][1:]
    rows = [{name: row[name] for name in ("drive", *ways)} for row in rows]
    drive = {name: rows[-1]["drive"][name] for name in ("backend", "block_bytes", "queue_depth", "rings")}
    rates = [round(row["drive"]["bytes_per_s"] / 1e9, 4) for row in rows]
    return {
        "params": order["numel"],
        "rounds": options.rounds,
        "drive": drive | {"gb_per_s": median(rates), "min_max_gb_per_s": [min(rates), max(rates)]},
        "ways": {way: summarize(rows, way) for way in ways},
    }


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the parameters of the model, of a layer, and of the largest tensor."""
    tensors: dict[str, Any] = {}
    for path in weight_files({"folder": folder}):
        tensors |= read_header(path)
    numels = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    layer = sum(numel for name, numel in numels.items() if ".layers.0." in name)
    return {"numel": sum(numels.values()), "layer_numel": layer, "largest_numel": max(numels.values())}


def take_round(options: argparse.Namespace, order: dict[str, Any], ways: list[str], number: int) -> Row:
    """Return the cost of each way; a way that can't run here is removed from `ways`, with a line that says why."""
    first = number % len(ways)
    drives = [answer_of(options, order, "drive")]
    row: Row = {}
    for way in [*ways[first:], *ways[:first]]:
        try:
            row[way] = answer_of(options, order, way)
        except LeftOut as reason:
            print(f"{way} is left out: {reason}", file=sys.stderr)
            ways.remove(way)
    drives.append(answer_of(options, order, "drive"))
    rate = statistics.harmonic_mean(drive["bytes_per_s"] for drive in drives)
    row["drive"] = {
        **drives[0],
        "bytes_per_s": rate,
        "once_seconds": statistics.mean(drive["once_seconds"] for drive in drives),
    }
    times = ", ".join(f"{way} {row[way]['seconds']:.3f} s" for way in ways if "seconds" in row[way])
    print(
        f"{f'round {number}' if number else 'warming up'}: {times} per token, drive {rate / 1e9:.2f} GB/s",
        file=sys.stderr,
    )
    return row


def answer_of(options: argparse.Namespace, order: dict[str, Any], way: str) -> dict[str, Any]:
    """Run the worker of `way` and return its answer. Raises LeftOut for a way to compare with, else SystemExit."""
    name, _, pool = way.partition(" ")
    compared = name in ("torch", "deepspeed")
    if name == "torch" and (needed := 2 * order["numel"] + PROCESS_BYTES) > (available_bytes() or needed):
        raise LeftOut(f"it takes {format_bytes(needed)}, and {format_bytes(available_bytes() or 0)} are available")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    python = sys.executable
    if name == "deepspeed":
        python = options.deepspeed_python
        environment |= {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    forget_pages(order)
    with tempfile.TemporaryDirectory(prefix="swap-", dir=options.nvme_path) as swap_folder:
        order = {**order, "way": name, "pool": pool, "swap_folder": swap_folder, "began": time.monotonic()}
        worker = subprocess.run(
            [python, str(HERE / "generation_worker.py"), json.dumps(order)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    if worker.returncode:
        last = (worker.stderr.strip().splitlines() or [""])[-1]
        reason = f"its process ended with status {worker.returncode}: {last}"
        raise LeftOut(reason) if compared else SystemExit(f"{way}: {reason}")
    answer: dict[str, Any] = json.loads(worker.stdout)
    return answer


def forget_pages(order: dict[str, Any]) -> None:
    """Drop the model's files from the page cache, so that every process reads them from the drive."""
    for path in weight_files(order):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def summarize(rows: list[Row], way: str) -> dict[str, Any]:
    """Return medians over the rounds; every ratio is taken within its round first."""
    answers = [row[way] for row in rows]
    numbers = [name for name, value in answers[0].items() if isinstance(value, (int, float))]
    summary: dict[str, Any] = {name: median(answer[name] for answer in answers) for name in numbers}
    summary["peak_rss_gib"] = round(summary.pop("peak_rss_bytes") / GIB, 2)
    if way.startswith("lora"):
        for name in ("drive", "load"):
            once = [row[name]["once_seconds"] for row in rows]
            bounds = [answer["import_seconds"] + seconds for answer, seconds in zip(answers, once, strict=True)]
            summary[f"{name}_once_seconds"] = median(once)
            summary[f"first_step_over_{name}"] = median(
                answer["first_step_seconds"] / bound for answer, bound in zip(answers, bounds, strict=True)
            )
    if "tokens" not in answers[0]:
        return summary
    summary["min_max_seconds"] = [round(pick(answer["seconds"] for answer in answers), 4) for pick in (min, max)]
    summary["tokens"] = answers[0]["tokens"]
    drive = [
        answer["read_bytes_per_token"] / row["drive"]["bytes_per_s"] for answer, row in zip(answers, rows, strict=True)
    ]
    summary["drive_seconds"] = median(drive)
    if "torch" in rows[0]:
        plain = [row["torch"] for row in rows]
        longer = [max(one["seconds"], seconds) for one, seconds in zip(plain, drive, strict=True)]
        summary["over_longer"] = median(one["seconds"] / bound for one, bound in zip(answers, longer, strict=True))
        summary["same_tokens"] = all(a["tokens"] == b["tokens"] for a, b in zip(answers, plain, strict=True))
    if "deepspeed" in rows[0]:
        summary["deepspeed_over_this"] = median(row["deepspeed"]["seconds"] / row[way]["seconds"] for row in rows)
    return summary


def print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table in Markdown."""
    print("\n".join(f"| {' | '.join(row)} |" for row in [columns, ("---",) * len(columns), *rows]))


def row_of(line: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the cells of one pool; empty for a way that was not measured, or was left out."""
    ours, plain, deepspeed = (line["ways"].get(way) or {} for way in (f"infinity {name}", "torch", "deepspeed"))

    def cell(values: dict[str, Any], key: str, form: str, scale: float = 1.0) -> str:
        return form.format(values[key] / scale) if key in values else ""

    def all_of(key: str, form: str) -> str:
        return " / ".join(cell(values, key, form) or "–" for values in (ours, plain, deepspeed))

    same = {True: "yes", False: "no", None: "–"}
    return (
        format_count(line["params"]),
        f"{name} ({format_bytes(int(ours['pinned_bytes']))})" if name == "auto" else name,
        cell(ours, "read_bytes_per_token", "{:.2f}", 1e9),
        cell(plain, "seconds", "{:.3f} s"),
        cell(ours, "drive_seconds", "{:.3f} s"),
        cell(ours, "seconds", "{:.3f} s"),
        cell(ours, "over_longer", "{:.2f}"),
        cell(deepspeed, "seconds", "{:.3f} s"),
        cell(ours, "deepspeed_over_this", "{:.2f}") if deepspeed else "",
        cell(deepspeed, "read_bytes_per_token", "{:.2f}", 1e9),
        all_of("start_seconds", "{:.1f}"),
        all_of("peak_rss_gib", "{:.2f}"),
        " / ".join(same[values.get("same_tokens")] for values in (ours, deepspeed)),
    )


def lora_row_of(line: dict[str, Any]) -> tuple[str, ...]:
    lora = line["ways"][f"lora {line['lora']}"]
    return (
        format_count(line["params"]),
        format_bytes(int(lora["pinned_bytes"])),
        f"{lora['first_step_seconds']:.2f} s",
        f"{lora['import_seconds']:.2f} s",
        f"{lora['drive_once_seconds']:.2f} s",
        f"{lora['first_step_over_drive']:.2f}",
        f"{lora['load_once_seconds']:.2f} s",
        f"{lora['first_step_over_load']:.2f}",
        f"{lora['read_bytes_per_frozen_param']:.2f}",
        f"{lora['written_bytes']:.0f} / {lora['process_written_bytes']:.0f}",
        f"{lora['peak_rss_gib']:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
