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
from infinity.units import DAY_SECONDS, format_seconds

MODELS = ("1B", "3B", "8B", "32B", "70B", "405B", "1T")


class Asked(NamedTuple):
    """A machine, by the name of its preset, and the models that are planned on it. `seqs`: tokens of a sequence, for each of
    TOKENS."""

    preset: str
    about: str
    seqs: tuple[int, int]
    models: tuple[str, ...]


TOKENS = (131_072, 8_192)
"""Of a step."""

MACHINES = (
    Asked("laptop", "a laptop that computes on its CPU", (512, 512), MODELS[:3]),
    Asked("rtx4090-gen4", "one RTX 4090, 64 GB of memory and one Gen4 drive", (2048, 2048), MODELS[:5]),
    Asked("dgx-a100", "DGX A100, 8 GPUs of 80 GB", (2048, 1024), MODELS[2:]),
    Asked("8xh200-gen5", "8 H200 and 8 Gen5 drives", (2048, 1024), MODELS[2:]),
)

HEAD = """\
# Which model on which machine

For each machine and model the fastest step of 131 072 and of 8 192 tokens that fits, as `infinity-bench plan --tokens-per-step`
finds it by simulating steps with the product's own policies: full training with AdamW in bf16, clipped; and LoRA of rank 16 on
frozen weights that stay in their files. Ask for yours, which the plan measures first:

    infinity-bench plan /local_nvme --params 8B --tokens-per-step 131072

Nothing below was measured on these machines. **Hardware really tried:** [one H100](gpu.md#what-an-h100-showed), with up to 3 B
parameters, and [x86-64 CPUs of two cores with a virtual NVMe drive](performance.md), with up to 1 B.
"""

WAITING = {"none": (), "cpu": ("activations on the host",), "nvme": ("activations on NVMe",)}
"""Where saved activations wait, in words."""

COLUMNS = (
    "tokens a step",
    "model",
    "model states on",
    "micro-batches",
    "GPU",
    "host",
    "NVMe",
    "step",
    "tokens/s",
    "of its bound",
    "hours per billion tokens",
    "MB written per token",
    "SSD lifetime",
    "LoRA: step",
)


def main() -> int:
    print(page())
    return 0


def page() -> str:
    """All of docs/machines.md."""
    return "\n".join([HEAD, *(part for asked in MACHINES for part in section(asked)), FOOT])


FOOT = """\
Micro-batches: "16 of 4, 8 at once" are 16 micro-batches of 4 sequences on each GPU, of which 8 pass through a group of the
model before its next group. GPU, host and NVMe are the memory that a rank needs of each at its peak; on a CPU the host's is
all. The bound of a step is its arithmetic, or its bytes over what the drives give, whichever takes longer. Drives last so
long if training never stops; they are rated for one drive write per day over five years. LoRA writes nothing. What each
figure is made of is in [plan.md](plan.md)."""


def section(asked: Asked) -> list[str]:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [row(model, asked, number) for number in range(len(TOKENS)) for model in asked.models]
    commands = [f"    infinity-bench {' '.join(words)}" for words in (command("8B", asked, 0), command("8B", asked, 1))]
    return [
        f"## {asked.about[0].upper()}{asked.about[1:]}\n",
        *commands,
        "",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
    ]


def command(model: str, asked: Asked, number: int) -> list[str]:
    step = ["--seq", str(asked.seqs[number]), "--tokens-per-step", str(TOKENS[number])]
    return ["plan", "--preset", asked.preset, "--params", model, *step]


def planned(words: list[str]) -> dict[str, Any]:
    """What the plan says, as JSON."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        infinity_bench([*words, "--json", "-"])
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def row(model: str, asked: Asked, number: int) -> tuple[str, ...]:
    """A model's row."""
    plan = planned(command(model, asked, number))
    tokens = thousands(TOKENS[number])
    lora = next(way for way in plan["frozen"] if way["name"].startswith("LoRA"))
    lora_step = format_seconds(lora["seconds"], digits=2) if lora["fits"] else "–"
    if plan["chosen"] is None:
        return tokens, model, "don't fit", *["–"] * 10, lora_step
    chosen = next(way for way in plan["strategies"] if way["name"] == plan["chosen"])
    memory = [sum(tier.values()) for tier in chosen["memory_bytes_per_rank"].values()]
    places = [plan["chosen"].partition(", ")[2] or "the GPUs"]
    if chosen["offload_param"] == "nvme" and plan["gradient_bytes_max"] is not None:
        places.append("some gradients too" if plan["gradient_bytes_max"] else "gradients too")
    days = chosen["drive_days"]
    return (
        tokens,
        model,
        ", ".join([*places, *WAITING[plan["offload_activations"]]]).replace("optimizer on", "the optimizer on"),
        f"{plan['accumulation']} of {plan['batch']}, {plan['micro_batches_at_once']} at once",
        *(gigabytes(nbytes) for nbytes in memory),
        format_seconds(chosen["step_seconds"], digits=2),
        thousands(chosen["tokens_per_s"]),
        f"{chosen['lower_bound_seconds'] / chosen['step_seconds']:.0%} of {chosen['bound'].removeprefix('the ')}",
        thousands(chosen["hours_per_billion_tokens"]),
        megabytes(chosen["written_bytes_per_token"] / 1e6) if days else "–",
        format_seconds(days * DAY_SECONDS, digits=2) if days else "–",
        lora_step,
    )


def megabytes(number: float) -> str:
    return f"{number:.2g}" if number < 10 else thousands(number)


def thousands(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def gigabytes(nbytes: float) -> str:
    if nbytes >= 1e12:
        return f"{nbytes / 1e12:.1f} TB"
    return f"{nbytes / 1e9:.0f} GB" if nbytes >= 1e9 else "–" if nbytes == 0 else "< 1 GB"


if __name__ == "__main__":
    sys.exit(main())
