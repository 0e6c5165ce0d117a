#!/usr/bin/env python3
"""docs/machines.md: which model trains on which machine, how fast, and how long its drives last, as `infinity-bench plan` says.

python tools/make_machines_page.py > docs/machines.md
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infinity.cli.bench import main as infinity_bench
from infinity.units import DAY_SECONDS, format_seconds

MODELS = ("1B", "3B", "8B", "32B", "70B", "405B", "1T")

SHAPES: dict[str, dict[str, Any]] = {
    # meta-llama/Llama-3.1-405B
    "llama-3.1-405b.json": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    # moonshotai/Kimi-K2-Base, whose architecture is that of DeepSeek-V3
    "kimi-k2.json": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}
"""The config.json of published models, as far as the plan reads it."""

NAMES = {
    "llama-3.1-405b.json": "405B, dense, as Llama 3.1: planned",
    "kimi-k2.json": "1T, mixture of experts, as Kimi K2: planned",
}


class Asked(NamedTuple):
    """Machines, by the name of their preset, and the models that are planned on them. tokens: of a step. seqs: tokens of a
    sequence, for each of these. models: sizes, or names of SHAPES."""

    preset: str
    about: str
    seqs: tuple[int, int]
    models: tuple[str, ...]
    tokens: tuple[int, int] = (131_072, 8_192)
    nodes: int = 1


MACHINES = (
    Asked("laptop", "a laptop that computes on its CPU", (512, 512), MODELS[:3]),
    Asked("rtx4090-gen4", "one RTX 4090, 64 GB of memory and one Gen4 drive", (2048, 2048), MODELS[:5]),
    Asked("dgx-a100", "DGX A100, 8 GPUs of 80 GB", (2048, 1024), MODELS[2:]),
    Asked("8xh200-gen5", "8 H200 and 8 Gen5 drives", (2048, 1024), MODELS[2:]),
    *(
        Asked("dgx-h100", f"{nodes} DGX H100, {8 * nodes} GPUs", (2048, 512), (*SHAPES,), (1_048_576, 262_144), nodes)
        for nodes in (16, 64)
    ),
)

HEAD = """\
# Which model on which machine

For each machine and model the fastest step that fits, as `infinity-bench plan --tokens-per-step` finds it by simulating
steps with the product's own policies: full training with AdamW in bf16, clipped; and LoRA of rank 16 on frozen weights that
stay in their files. Ask for yours, which the plan measures first:

    infinity-bench plan /local_nvme --params 8B --tokens-per-step 131072

Nothing below was measured on these machines. **Hardware really tried:** [one H100](gpu.md#what-an-h100-showed), with up to 3 B
parameters, and [x86-64 CPUs of two cores with a virtual NVMe drive](performance.md), with up to 1 B.
"""

WAITING = {"none": (), "cpu": ("activations on the host",), "nvme": ("activations on NVMe",)}
"""Where saved activations wait, in words."""

COLUMNS = (
    "tokens a step",
    "model",
    "split",
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
model before its next group. Split: [tensors or experts over so many ranks, or stages](parallelism.md); FSDP2 shards each part
over the other ranks. Without tensors over ranks, or stages, each GPU needs at least one sequence. GPU, host and NVMe are the
memory that a rank needs of each at its peak; on a CPU the host's is all. The bound of a step is its arithmetic, or its
bytes over what the drives give, whichever takes longer. Drives last so long if training never stops; they are rated for one
drive write per day over five years. LoRA writes nothing. What each figure is made of is in [plan.md](plan.md)."""


def section(asked: Asked) -> list[str]:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [row(model, asked, number) for number in range(len(asked.tokens)) for model in asked.models]
    shown = "8B" if "8B" in asked.models else asked.models[-1]
    commands = [f"    infinity-bench {' '.join(command(shown, asked, number))}" for number in (0, 1)]
    return [
        f"## {asked.about[0].upper()}{asked.about[1:]}\n",
        *commands,
        "",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
    ]


def command(model: str, asked: Asked, number: int) -> list[str]:
    of_model = ["--hf-config" if model in SHAPES else "--params", model]
    nodes = ["--nodes", str(asked.nodes)] if asked.nodes > 1 else []
    step = ["--seq", str(asked.seqs[number]), "--tokens-per-step", str(asked.tokens[number])]
    return ["plan", "--preset", asked.preset, *nodes, *of_model, *step]


def planned(words: list[str]) -> dict[str, Any]:
    """What the plan says, as JSON."""
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        for name, values in SHAPES.items():
            (Path(folder) / name).write_text(json.dumps(values))
        with contextlib.redirect_stderr(io.StringIO()):
            infinity_bench([*(f"{folder}/{word}" if word in SHAPES else word for word in words), "--json", "-"])
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def row(model: str, asked: Asked, number: int) -> tuple[str, ...]:
    """A model's row."""
    plan = planned(command(model, asked, number))
    tokens = thousands(asked.tokens[number])
    name = NAMES.get(model, model)
    lora = next(way for way in plan["frozen"] if way["name"].startswith("LoRA"))
    alike = lora["fits"] and lora["tokens"] == asked.tokens[number]  # it has at least one sequence on each rank
    lora_step = format_seconds(lora["seconds"], digits=2) if alike else "–"
    if plan["chosen"] is None:
        return tokens, name, "–", "don't fit", *["–"] * 10, lora_step
    chosen = next(way for way in plan["strategies"] if way["name"] == plan["chosen"])
    memory = [sum(tier.values()) for tier in chosen["memory_bytes_per_rank"].values()]
    places = [plan["chosen"].partition(", ")[2] or "the GPUs"]
    if chosen["offload_param"] == "nvme" and plan["gradient_bytes_max"] is not None:
        places.append("some gradients too" if plan["gradient_bytes_max"] else "gradients too")
    days = chosen["drive_days"]
    splits = {"tensors over {}": "autotp_size", "experts over {}": "autoep_size", "{} stages": "num_stages"}
    return (
        tokens,
        name,
        "".join(words.format(plan[key]) for words, key in splits.items() if plan[key] > 1) or "–",
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
