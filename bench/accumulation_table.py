"""The table of docs/train_batch.md: steps of several micro-batches, vertical and horizontal.

    python bench/accumulation_table.py --nvme-path /local_nvme --deepspeed-python ../ds/bin/python
    python bench/accumulation_table.py --params 200M --accumulation 1,8 --clipping 1e9 --lines never.jsonl

Measures every number of micro-batches in turn, as bench/step.py does, and appends a JSON line for each to the file of
--lines. Lines that the file already has are not measured again. Prints the rows of the table last, in Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from results import RESULTS
from step import make_parser, measure
from step_summary import show
from step_table import lines_of, listed, micro_batch

from infinity.cli.arguments import count
from infinity.cli.program import run_program
from infinity.cli.step import norm

COLUMNS = (
    "micro-batches",
    "plain PyTorch in memory",
    "vertical, drive time",
    "vertical",
    "horizontal",
    "over vertical",
    "DeepSpeed over vertical",
    "B / parameter, vertical",
    "B / parameter, horizontal",
    "tokens/s, vertical / horizontal",
    "B written / token, vertical",
    "peak GiB, vertical / horizontal",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", default="200M", help="(default: %(default)s)")
    parser.add_argument(
        "--micro-batch", type=micro_batch, default="1x64", help="sequences x tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--accumulation", type=listed(count), default="1,2,4,8,16", help="micro-batches (default: %(default)s)"
    )
    parser.add_argument("--clipping", type=norm, default=0.0, help="norm; 0 does not clip (default: %(default)s)")
    parser.add_argument("--deepspeed-python", help="as for bench/step.py; without it DeepSpeed's column is empty")
    parser.add_argument("--rounds", type=count, default=4, help="rounds per line (default: %(default)s)")
    parser.add_argument("--nvme-path", default=str(Path(__file__).resolve().parent.parent / ".nvme"))
    parser.add_argument("--lines", type=Path, default=RESULTS / "accumulation.jsonl", help="(default: %(default)s)")
    parser.set_defaults(func=run)
    return run_program(parser, None)


def run(options: argparse.Namespace) -> int:
    """Measure what is missing; print the rows."""
    done = {key_of(line): line for line in lines_of(options.lines)}
    keys = []
    for accumulation in options.accumulation:
        order = order_of(options, accumulation)
        keys.append(key_of(vars(order)))
        if keys[-1] not in done:
            print(f"{accumulation} micro-batches", file=sys.stderr)
            done[keys[-1]] = {**measure(order), "asked": order.params}
            show(done[keys[-1]]["ways"])
            with options.lines.open("a") as file:
                file.write(json.dumps(done[keys[-1]]) + "\n")
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row_of(done[key]) for key in keys)]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return 0


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a line, or of the options of bench/step.py."""
    asked = line.get("asked", line["params"])
    return asked, line["batch_size"], line["context"], line["accumulation"], line["clipping"]


def order_of(options: argparse.Namespace, accumulation: str) -> argparse.Namespace:
    """Return the options of bench/step.py for one line."""
    sequences, tokens = options.micro_batch
    values = {
        "--params": options.params,
        "--batch-size": sequences,
        "--context": tokens,
        "--accumulation": accumulation,
    }
    values |= {"--clipping": options.clipping, "--ways": "torch,auto-vertical,auto", "--rounds": options.rounds}
    values |= {"--nvme-path": options.nvme_path}
    values |= {"--deepspeed-python": options.deepspeed_python} if options.deepspeed_python else {}
    return make_parser().parse_args([str(word) for pair in values.items() for word in pair])


def row_of(line: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one line; bytes as requested of the kernel's block layer."""
    ways = line["ways"]
    vertical, horizontal, plain, deepspeed = (ways.get(n) for n in ("auto-vertical", "auto", "torch", "deepspeed"))
    tokens = line["batch_size"] * line["context"] * line["accumulation"]
    written = vertical["disk_written_bytes_per_param"] * line["params"]

    def moved(way: dict[str, Any]) -> str:
        return f"{way['disk_read_bytes_per_param']:.1f} + {way['disk_written_bytes_per_param']:.1f}"

    return (
        str(line["accumulation"]),
        f"{plain['seconds']:.2f} s" if plain else "",
        f"{vertical['drive_seconds']:.2f} s",
        f"{vertical['seconds']:.2f} s",
        f"{horizontal['seconds']:.2f} s",
        f"{horizontal['seconds'] / vertical['seconds']:.2f}",
        f"{vertical['deepspeed_over_this']:.2f}" if deepspeed else "",
        moved(vertical),
        moved(horizontal),
        f"{tokens / vertical['seconds']:.0f} / {tokens / horizontal['seconds']:.0f}",
        f"{written / tokens / 1e6:.2f} MB",
        f"{vertical['peak_rss_gib']:.2f} / {horizontal['peak_rss_gib']:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
