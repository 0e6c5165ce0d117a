"""The table of the README: compares a step of infinity with plain PyTorch in memory, the drive, and DeepSpeed.

    python bench/step_table.py --nvme-path /local_nvme --deepspeed-python ../ds/bin/python
    python bench/step_table.py --params 200M --micro-batches 1x64,2x128 --clipping 1e9 --lines never.jsonl
    python bench/step_table.py --params 1B --micro-batches 1x256 --clipping 1e9 --memory-limit 4GiB --pinned-bytes-max 512MiB

Measures every size, micro-batch and norm of clipping in turn, as bench/step.py does, and appends a JSON line for each
to the file of --lines. Lines that the file already has are not measured again, so the same command resumes where it was
stopped; give another file, or remove it, to measure all again. Prints the rows of the table last, in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from results import RESULTS
from step import make_parser, measure
from step_summary import show

from infinity.cli.arguments import count
from infinity.cli.program import run_program
from infinity.cli.step import norm
from infinity.host_memory import available_bytes
from infinity.units import format_count, parse_count

BYTES_PER_PARAMETER = 80
"""For plain PyTorch, infinity and DeepSpeed, all in memory at once: if less is available, one runs at a time."""

COLUMNS = (
    "parameters",
    "tokens",
    "clipped at",
    "within",
    "plain PyTorch in memory",
    "drive time",
    "infinity",
    "over lower bound",
    "DeepSpeed",
    "over infinity",
    "CPU s, infinity / plain",
    "minor faults, infinity / plain",
    "peak GiB, infinity / plain / DeepSpeed",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", type=listed(parse_count), default="200M,1B", help="(default: %(default)s)")
    parser.add_argument(
        "--micro-batches",
        type=listed(micro_batch),
        default="1x16,1x64,2x128,4x256,8x512",
        help="sequences x tokens of each (default: %(default)s)",
    )
    parser.add_argument(
        "--clipping", type=listed(norm), default="0,1", help="norms; 0 does not clip (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of compute (default: %(default)s)")
    parser.add_argument("--memory-limit", help="as for bench/step.py, which never limits plain PyTorch")
    parser.add_argument("--pinned-bytes-max", default="auto", help="as for bench/step.py (default: %(default)s)")
    parser.add_argument("--way", default="auto", help="infinity's way of bench/step.py (default: %(default)s)")
    parser.add_argument("--deepspeed-python", help="as for bench/step.py; without it DeepSpeed's columns are empty")
    parser.add_argument("--rounds", type=count, default=7, help="rounds per line (default: %(default)s)")
    parser.add_argument("--nvme-path", default=str(Path(__file__).resolve().parent.parent / ".nvme"))
    parser.add_argument("--drive-file", default="2GiB", help="as for bench/step.py (default: %(default)s)")
    parser.add_argument("--lines", type=Path, default=RESULTS / "step_table.jsonl", help="(default: %(default)s)")
    parser.set_defaults(func=run)
    return run_program(parser, None)


def listed(check: Any) -> Any:
    """Return an argparse type: comma-separated values, each checked and kept as given."""

    def parse(text: str) -> list[str]:
        for value in (values := text.split(",")):
            try:
                check(value)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        return values

    return parse


def micro_batch(text: str) -> tuple[int, int]:
    """Parse (sequences, tokens of each). Raises ValueError."""
    sequences, _, tokens = text.partition("x")
    if not (sequences.isdecimal() and tokens.isdecimal() and int(sequences) > 0 and int(tokens) > 1):
        raise ValueError(f"expected sequences x tokens such as 2x128, got {text!r}")
    return int(sequences), int(tokens)


def run(options: argparse.Namespace) -> int:
    """Measure what is missing; print the rows."""
    done = {key_of(line): line for line in lines_of(options.lines)}
    keys = []
    for params, batch, clipping in itertools.product(options.params, options.micro_batches, options.clipping):
        order = order_of(options, params, micro_batch(batch), clipping)
        keys.append(key_of(vars(order)))
        if keys[-1] in done:
            continue
        print(
            f"{params}, {batch} tokens, clipped at {clipping}" + ", one process at a time" * order.alone,
            file=sys.stderr,
        )
        done[keys[-1]] = {**measure(order), "asked": order.params}
        show(done[keys[-1]]["ways"])
        with options.lines.open("a") as file:
            file.write(json.dumps(done[keys[-1]]) + "\n")
    print("\n".join(table_of([done[key] for key in keys], options.way)))
    return 0


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a line, or of the options of bench/step.py."""
    ways = {*line["ways"], *(["deepspeed"] if line.get("deepspeed_python") else [])}
    asked = line.get("asked", line["params"]), line.get("dtype", "bf16")
    memory = line.get("memory_limit"), line.get("pinned_bytes_max", "auto")
    return *asked, line["batch_size"], line["context"], line["clipping"], *memory, frozenset(ways)


def order_of(options: argparse.Namespace, params: str, batch: tuple[int, int], clipping: str) -> argparse.Namespace:
    """Return the options of bench/step.py for one line."""
    values = {"--params": params, "--batch-size": batch[0], "--context": batch[1], "--clipping": clipping}
    values |= {"--ways": f"torch,{options.way}", "--rounds": options.rounds, "--nvme-path": options.nvme_path}
    values |= {"--drive-file": options.drive_file, "--dtype": options.dtype}
    values |= {"--deepspeed-python": options.deepspeed_python} if options.deepspeed_python else {}
    values |= {"--memory-limit": options.memory_limit} if options.memory_limit else {}
    values |= {"--pinned-bytes-max": options.pinned_bytes_max}
    alone = BYTES_PER_PARAMETER * parse_count(params) > (available_bytes() or 0)
    words = [str(word) for pair in values.items() for word in pair]
    return make_parser().parse_args([*words, *["--alone"] * alone])


def table_of(lines: list[dict[str, Any]], way: str) -> list[str]:
    """Return the table in Markdown, a row for each line."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row_of(line, way) for line in lines)]
    return [f"| {' | '.join(row)} |" for row in rows]


def row_of(line: dict[str, Any], way: str) -> tuple[str, ...]:
    """Return the cells of one line; empty for a way that was not measured, or was left out."""
    ours, plain, deepspeed = (line["ways"].get(name) or {} for name in (way, "torch", "deepspeed"))

    def cell(values: dict[str, Any], name: str, form: str) -> str:
        return form.format(values[name]) if name in values else ""

    def both(*ways: dict[str, Any], name: str, form: str) -> str:
        return " / ".join(cell(values, name, form) or "–" for values in ways)

    return (
        format_count(line["params"]),
        f"{line['batch_size']} × {line['context']}",
        f"{line['clipping']:g}" if line["clipping"] else "no",
        line.get("memory_limit") or "",
        cell(plain, "seconds", "{:.2f} s" + " (from a quarter of its blocks)" * ("times_multiplied_by" in plain)),
        cell(ours, "drive_seconds", "{:.2f} s"),
        cell(ours, "seconds", "{:.2f} s"),
        cell(ours, "over_lower_bound", "{:.2f}"),
        cell(deepspeed, "seconds", "{:.2f} s"),
        cell(ours, "deepspeed_over_this", "{:.2f}"),
        both(ours, plain, name="cpu_seconds", form="{:.2f}"),
        both(ours, plain, name="minor_faults", form="{:.0f}"),
        both(ours, plain, deepspeed, name="peak_rss_gib", form="{:.2f}"),
    )


if __name__ == "__main__":
    sys.exit(main())
