#!/usr/bin/env python3
"""docs/machines.md: which model trains on which machine, how fast, and how long its drives last, as `infinity-bench plan` says.

python tools/make_machines_page.py > docs/machines.md
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infinity.cli.bench import main as infinity_bench
from infinity.plan.planner import RATED_DAYS
from infinity.units import DAY_SECONDS, format_seconds

MODELS = ("1B", "3B", "8B", "32B", "70B", "405B", "1T")


class Asked(NamedTuple):
    """A machine, by the name of its preset, and how a step is taken on it."""

    preset: str
    about: str
    step: tuple[str, ...]
    in_words: str
    models: tuple[str, ...]


MACHINES = (
    Asked(
        "laptop",
        "a laptop that computes on its CPU",
        ("--batch-size", "8", "--seq", "512"),
        "8 sequences of 512 tokens",
        MODELS[:3],
    ),
    Asked(
        "rtx4090-gen4",
        "one RTX 4090, 64 GB of memory and one Gen4 drive",
        ("--batch-size", "4"),
        "4 sequences of 2 048 tokens",
        MODELS[:5],
    ),
    Asked(
        "dgx-a100",
        "DGX A100, 8 GPUs of 80 GB",
        ("--batch-size", "8"),
        "8 sequences of 2 048 tokens on each GPU",
        MODELS[2:],
    ),
    Asked(
        "8xh200-gen5",
        "8 H200 and 8 Gen5 drives",
        ("--batch-size", "8"),
        "8 sequences of 2 048 tokens on each GPU",
        MODELS[2:],
    ),
)

HEAD = """\
# Which model on which machine

For each machine the fastest way that fits, as `infinity-bench plan` finds it by simulating a step with the product's own
policies: full training with AdamW in bf16, clipped, activations recomputed; and LoRA of rank 16 on frozen weights that stay
in their files. Nothing here was measured on these machines. Ask for yours, which the plan measures first:

    infinity-bench plan /local_nvme --params 8B

Drives last as long as said where training never stops; they are rated for one drive write per day over five years. LoRA
writes nothing.
"""

EASED = {"--gradient-memory 0": "gradients too", "--offload-activations cpu": "activations on the host"}
"""The arguments that the plan adds by itself where a model doesn't fit without, in words."""

COLUMNS = (
    "model",
    "its states are",
    "GPU",
    "host",
    "NVMe",
    "step",
    "tokens/s",
    "at least",
    "read + written",
    "drives last",
    "LoRA: step",
)


def main() -> int:
    print(page())
    return 0


def page() -> str:
    """All of docs/machines.md."""
    return "\n".join([HEAD, *(part for asked in MACHINES for part in section(asked)), FOOT])


FOOT = """\
GPU, host and NVMe are the memory that a rank needs of each at its peak; on a CPU the host's is all. "At least" is the lower
bound of the step: its arithmetic, or its bytes over what the drives give, whichever takes longer. Read and written are the
bytes of all ranks in a step; where there are none, the host cache holds what would be on NVMe. More tokens in a step move no
more bytes: [train_batch.md](train_batch.md). What each figure is made of is in [plan.md](plan.md)."""


def section(asked: Asked) -> list[str]:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(model, asked) for model in asked.models)]
    title = asked.about[0].upper() + asked.about[1:]
    command = f"    infinity-bench plan --preset {asked.preset} {' '.join(asked.step)} --params 8B"
    return [
        f"## {title}\n",
        f"A step is {asked.in_words}:\n",
        f"{command}\n",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
    ]


def planned(model: str, asked: Asked) -> dict[str, Any]:
    """What the plan says of a model of so many parameters, as JSON."""
    output = io.StringIO()
    words = ["plan", "--params", model, "--preset", asked.preset, *asked.step, "--json", "-"]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        infinity_bench(words)
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def row(model: str, asked: Asked) -> tuple[str, ...]:
    """A model's row."""
    plan = planned(model, asked)
    lora = next(way for way in plan["frozen"] if way["name"].startswith("LoRA"))
    lora_step = format_seconds(lora["seconds"], digits=2) if lora["fits"] else "–"
    if plan["chosen"] is None:
        return model, "don't fit", *["–"] * 8, lora_step
    chosen = next(way for way in plan["strategies"] if way["name"] == plan["chosen"])
    memory = [sum(tier.values()) for tier in chosen["memory_bytes_per_rank"].values()]
    moved = chosen["read_bytes_per_rank"] + chosen["written_bytes_per_rank"]
    daily = chosen["drive_writes_per_day"]
    return (
        model,
        ", ".join([plan["chosen"].partition(", ")[2] or "on the GPUs", *(EASED[added] for added in plan["eased"])]),
        *(gigabytes(nbytes) for nbytes in memory),
        format_seconds(chosen["step_seconds"], digits=2),
        f"{chosen['tokens_per_s']:,.0f}".replace(",", " "),
        format_seconds(chosen["lower_bound_seconds"], digits=2),
        gigabytes(moved * plan["machine"]["ranks_per_node"] * plan["machine"]["nodes"]),
        format_seconds(RATED_DAYS * DAY_SECONDS / daily, digits=2) if daily else "–",
        lora_step,
    )


def gigabytes(nbytes: float) -> str:
    if nbytes >= 1e12:
        return f"{nbytes / 1e12:.1f} TB"
    return f"{nbytes / 1e9:.0f} GB" if nbytes >= 1e9 else "–" if nbytes == 0 else "< 1 GB"


if __name__ == "__main__":
    sys.exit(main())
