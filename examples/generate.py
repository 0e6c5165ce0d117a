"""Generate text with a model that may be larger than memory; its weights are streamed from the downloaded files.

python examples/generate.py --model DIR --prompt "Once upon"     a model of Hugging Face: config.json, safetensors, tokenizer
python examples/generate.py --params 1B                          a temporary one with random weights
python examples/generate.py --model DIR --pinned-bytes-max 2GiB  in a fixed amount of pinned memory

Needs transformers, and says how to install it if it is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from made_model import VOCABULARY, add_model_arguments, check_model, made_model
from rich.console import Console
from rich.live import Live

import infinity
from infinity.extras import needs
from infinity.runtime.inference import counting, empty_model
from infinity.units import format_bytes


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Ctrl-C ends the run. The model's files are never written to.",
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", help="text to continue; several are generated at once")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--pinned-bytes-max",
        default="auto",
        help='pinned host memory, such as "2GiB" (default: auto, as much of the model as fits half of the free memory)',
    )
    parser.add_argument("--in-memory", action="store_true", help="hold all weights in memory instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tokens, bytes and seconds there")
    asked = parser.parse_args(argv)
    if asked.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {asked.tokens}")
    check_model(parser, asked)
    asked.prompt = asked.prompt or ["def main():"]
    return asked


class Texts:
    """Conversion of text and tokens: by the model's tokenizer, or as bytes for a model created here."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.tokenizer: Any = None
        if asked.model is not None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
            self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token

    def encode(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        if self.tokenizer is not None:
            return dict(self.tokenizer(prompts, return_tensors="pt", padding=True))
        length = max(len(prompt.encode()) for prompt in prompts)
        rows = [list(prompt.encode().rjust(length)) for prompt in prompts]
        tokens = torch.tensor(rows) % VOCABULARY
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def decode(self, tokens: torch.Tensor) -> list[str]:
        if self.tokenizer is not None:
            return list(self.tokenizer.batch_decode(tokens, skip_special_tokens=True))
        return [bytes(row).decode(errors="replace") for row in tokens.tolist()]


def run(asked: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Generate, print, and return the figures."""
    texts = Texts(asked, folder)
    inputs = texts.encode(asked.prompt)
    place = {"device": "none"} if asked.in_memory else {"device": "nvme"}
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": place},
        "infinity": {} if asked.in_memory else {"pinned_bytes_max": asked.pinned_bytes_max},
    }
    with infinity.init_inference(empty_model(folder), config, weights=folder) as engine, Live(console=console) as live:
        swap = engine.swap
        numel = sum(p.numel() for p in engine.module.parameters())
        times, reads, stalls = [time.perf_counter()], [0], [0.0]

        def note(rounds: int) -> None:
            times.append(time.perf_counter())
            stats = swap.stats() if swap is not None else None
            reads.append(stats.read_bytes if stats is not None else 0)
            stalls.append(stats.stall_seconds if stats is not None else 0.0)
            seconds = times[-1] - times[-2]
            live.update(
                f"token {rounds}/{asked.tokens}  {len(asked.prompt) / seconds:.2f} tokens/s  "
                f"read {format_bytes(reads[-1] - reads[-2])} at {(reads[-1] - reads[-2]) / seconds / 1e9:.2f} GB/s  "
                f"waited {(stalls[-1] - stalls[-2]) / seconds:.0%} for the drive"
            )

        made = engine.generate(
            **inputs,
            max_new_tokens=asked.tokens,
            min_new_tokens=asked.tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[counting(note)],
        )
        new = made[:, inputs["input_ids"].shape[1] :]
        pinned = swap.stats().pinned_bytes if swap is not None else 0
    for prompt, text in zip(asked.prompt, texts.decode(new), strict=True):
        console.print(
            f"[bold]{prompt}[/bold]{text}" if asked.model is not None else "(the weights are random: no text)"
        )
    steady = [after - before for before, after in itertools.pairwise(times[2:])] or [times[-1] - times[-2]]
    read = [after - before for before, after in itertools.pairwise(reads[2:])] or [reads[-1] - reads[-2]]
    return {
        "parameters": numel,
        "tokens": new.tolist(),
        "first_token_seconds": times[1] - times[0],
        "seconds_per_token_batch": statistics.median(steady),
        "read_bytes_per_param": statistics.mean(read) / numel,
        "pinned_bytes": pinned,
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main(argv: list[str] | None = None) -> int:
    asked = parse_arguments(argv)
    console = Console(highlight=False)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with needs("transformers"):
            import transformers  # noqa: F401
        given = contextlib.nullcontext((asked.model, 0.0))
        with given if asked.model is not None else made_model(asked, console.print) as (folder, _):
            figures = run(asked, folder, console)
    except infinity.InfinityError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngenerate: ended by Ctrl-C; the model's files are as they were", file=sys.stderr)
        return 130
    console.print(
        f"{figures['seconds_per_token_batch']:.3f} s per round of {len(asked.prompt)} token(s), "
        f"{figures['read_bytes_per_param']:.2f} bytes read per parameter in it; {format_bytes(figures['pinned_bytes'])} "
        f"pinned, peak resident memory {format_bytes(figures['peak_rss_bytes'])}"
    )
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
