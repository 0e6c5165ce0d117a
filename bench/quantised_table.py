"""The quantised files of docs/frozen_weights.md: generation and LoRA steps on them and on bf16, bound by the drive.

    python bench/quantised_table.py --drive-limit none,0.8GB --lines bench/results/quantised.jsonl
    python bench/quantised_table.py --layers 16 --pool-share 0.5 --rounds 1 --formats bf16,fp8

Writes a Llama with layers of 38 million parameters as files of random codes in each format. In every round a fresh
process per format generates some tokens from one prompt, and takes a few LoRA steps on a short batch. The order of
formats changes. The pool holds the same share of the files in each format, so each token and each pass read the other
layers again. --drive-limit repeats all of it with a drive that gives at most so many bytes per second (as root).

Prints medians over the rounds in Markdown, and appends a JSON line per format and limit to the file of --lines. "Drive
time" is that of direct sequential reads of the same bytes by infinity's I/O engine, measured in the same rounds. The
lines also have the time in which the computing thread waited for the drive, and the CPU time of all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from drive_limit import drive_limit
from results import machine
from safetensors.torch import save_file

from infinity.store.formats.coded_matrix import CodedMatrix
from infinity.units import parse_bytes

HERE = Path(__file__).resolve().parent
TOKENS, STEPS = 6, 4

Parts = dict[str, torch.Tensor]


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, 2e-3, dtype=dtype)


def of_compressed_tensors(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "format": form, "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def int_words(rows: int, columns: int) -> torch.Tensor:
    return noise(rows, 4 * columns).view(torch.int32)


def gptq(rows: int, columns: int, order: torch.Tensor) -> Parts:
    return {
        "qweight": int_words(columns // 8, rows),
        "qzeros": int_words(columns // 128, rows // 8),
        "scales": scales(columns // 128, rows, dtype=torch.float16),
        "g_idx": (order // 128).to(torch.int32),
    }


FORMATS: dict[str, tuple[dict[str, Any] | None, Callable[[int, int], Parts]]] = {
    "bf16": (None, lambda rows, columns: {"weight": torch.randn(rows, columns).mul_(0.02).bfloat16()}),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda rows, columns: {
            "weight": noise(rows, columns).bitwise_and_(0xBF).view(torch.float8_e4m3fn),
            "weight_scale_inv": scales(-(-rows // 128), -(-columns // 128), dtype=torch.float32),
        },
    ),
    "int4": (
        of_compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
        lambda rows, columns: {
            "weight_packed": int_words(rows, columns // 8),
            "weight_scale": scales(rows, columns // 128),
            "weight_shape": torch.tensor([rows, columns]),
        },
    ),
    "mxfp4": (
        of_compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        lambda rows, columns: {
            "weight_packed": noise(rows, columns // 2),
            "weight_scale": torch.full((rows, columns // 32), 118, dtype=torch.uint8),
        },
    ),
    "nvfp4": (
        of_compressed_tensors("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda rows, columns: {
            "weight_packed": noise(rows, columns // 2),
            "weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([500.0]),
        },
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        lambda rows, columns: gptq(rows, columns, torch.arange(columns)),
    ),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
        lambda rows, columns: gptq(rows, columns, torch.randperm(columns)),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        lambda rows, columns: {
            "qweight": int_words(columns, rows // 8),
            "qzeros": int_words(columns // 128, rows // 8),
            "scales": scales(columns // 128, rows, dtype=torch.float16),
        },
    ),
}


def make_files(folder: Path, layers: int, how: str) -> int:
    """Write the model, and return the number of its parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    quantization, encode = FORMATS[how]
    sizes = {"vocab_size": 256, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=12, num_key_value_heads=12)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    folder.mkdir()
    config.save_pretrained(folder)
    if quantization is not None:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**described, "quantization_config": quantization}))
    tensors: Parts = {}
    files: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(files.values())):05d}.safetensors"
        save_file(tensors, folder / name)
        files.update(dict.fromkeys(tensors, name))
        tensors.clear()

    for name, shape in shapes.items():
        if len(shape) == 2 and ".layers." in name:
            module = name.removesuffix("weight")
            tensors |= {module + part: tensor for part, tensor in encode(*shape).items()}
        else:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16) * 0.02
        if sum(tensor.nbytes for tensor in tensors.values()) > 512 << 20:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return sum(shape.numel() for shape in shapes.values())


class Meter:
    """The times at which rounds ended, and the counters of an engine then."""

    def __init__(self, swap: Any) -> None:
        self._swap, self._rounds = swap, list[dict[str, float]]()
        self._decode_seconds = 0.0
        compiled = CodedMatrix.decode_compiled

        def timed(*arguments: Any, **options: Any) -> None:
            began = time.perf_counter()
            compiled(*arguments, **options)
            self._decode_seconds += time.perf_counter() - began

        CodedMatrix.decode_compiled = timed  # type: ignore[method-assign]

    def note(self, *_: Any, **__: Any) -> None:
        stats, cpu = self._swap.stats(), time.process_time()
        self._rounds.append(
            {
                "seconds": time.perf_counter(),
                "bytes": stats.read_bytes,
                "waited_seconds": stats.stall_seconds,
                "decode_seconds": self._decode_seconds,
                "cpu_seconds": cpu,
            }
        )

    def medians(self, of: str) -> dict[str, float]:
        """Return the medians per round, without the first one."""
        pairs = [*pairwise(self._rounds)]
        medians = {key: statistics.median(after[key] - before[key] for before, after in pairs) for key in pairs[0][0]}
        return {f"{of}_{key}": median for key, median in medians.items()}


def measure(folder: str, pool_bytes: str) -> dict[str, Any]:
    """Measure generation and LoRA steps, in a process of its own."""
    import peft

    import infinity
    from infinity.runtime.inference import counting, empty_model

    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "infinity": {"pinned_bytes_max": int(pool_bytes)},
    }
    with infinity.init_inference(empty_model(folder), config, weights=folder) as engine:
        tokens = Meter(engine.swap)
        prompt = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        engine.generate(prompt, stopping_criteria=[counting(tokens.note)], **options)
    with infinity.init_empty():
        model = peft.get_peft_model(empty_model(folder), peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    lora = config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    trained, *_ = infinity.initialize(model=model, weights=folder, config=lora)
    with trained:
        steps = Meter(trained.swap)
        batch = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1))
        for _ in range(STEPS):
            trained.backward(trained(input_ids=batch, labels=batch).loss)
            trained.step()
            steps.note()
    return tokens.medians("token") | steps.medians("step")


@dataclass
class Files:
    """A model in one format."""

    folder: Path
    numel: int
    pool_share: float
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By limit of the drive: those of each round."""

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def measure(self, enter: Callable[[], None] | None) -> dict[str, Any]:
        pool_bytes = int(self.pool_share * self.nbytes) + (8 << 20)
        return answer_of([__file__, "--worker", str(self.folder), str(pool_bytes)], enter)

    def drive_rate(self, enter: Callable[[], None] | None) -> float:
        """Measure how fast the drive gives these files (bytes per second)."""
        order = json.dumps({"way": "drive", "folder": str(self.folder)})
        return float(answer_of([str(HERE / "generation_worker.py"), order], enter)["bytes_per_s"])

    def medians(self, limit: str) -> dict[str, float]:
        rounds = self.figures[limit]
        return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def answer_of(arguments: list[str], enter: Callable[[], None] | None) -> dict[str, Any]:
    command = [sys.executable, *arguments]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter).stdout
    read: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return read


def table(models: dict[str, Files], limit: str, rate: float) -> list[str]:
    """Return the rows in Markdown."""
    lines = [
        f"\nThe drive gives {rate / 1e9:.2f} GB/s (limit: {limit}).\n",
        "| format | bytes per parameter | read per token | drive time | a token | of it decoding | bf16 over it | "
        "drive time of a LoRA step | a LoRA step | bf16 over it |",
        "|" + "---|" * 10,
    ]
    base = models["bf16"].medians(limit) if "bf16" in models else None
    for how, files in models.items():
        row = files.medians(limit)
        gains = [f"{base[key] / row[key]:.2f}" if base else "" for key in ("token_seconds", "step_seconds")]
        lines.append(
            f"| {how} | {files.nbytes / files.numel:.2f} | {row['token_bytes'] / 1e9:.2f} GB | "
            f"{row['token_bytes'] / rate:.2f} s | {row['token_seconds']:.2f} s | {row['token_decode_seconds']:.2f} s | "
            f"{gains[0]} | {row['step_bytes'] / rate:.2f} s | {row['step_seconds']:.2f} s | {gains[1]} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--pool-share", type=float, default=0.27, help="pinned memory over the bytes of the files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", default=",".join(FORMATS), help="a subset of " + ",".join(FORMATS))
    parser.add_argument("--drive-limit", default="none", help="bytes per second, or none; 'none,1GB' for both")
    parser.add_argument("--nvme-path", type=Path, default=HERE.parent / ".nvme")
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(measure(*asked.worker)))
        return
    limits = asked.drive_limit.split(",")
    asked.nvme_path.mkdir(parents=True, exist_ok=True)
    rates: dict[str, list[float]] = {limit: [] for limit in limits}
    with tempfile.TemporaryDirectory(prefix="quantised-", dir=asked.nvme_path) as made:
        models = {}
        for how in asked.formats.split(","):
            folder = Path(made) / how
            models[how] = Files(folder, make_files(folder, asked.layers, how), asked.pool_share)
        for number in range(asked.rounds):
            for limit in limits:
                with contextlib.ExitStack() as stack:
                    enter = None
                    if limit != "none":
                        try:
                            enter = stack.enter_context(drive_limit(asked.nvme_path, parse_bytes(limit)))
                        except OSError as error:
                            sys.exit(f"--drive-limit needs root and a control group for block I/O: {error}")
                    in_turn = [*models.items()]
                    rates[limit].append(in_turn[0][1].drive_rate(enter))
                    if limit != "none" and rates[limit][-1] > 1.2 * parse_bytes(limit):
                        sys.exit(f"the kernel does not limit direct reads: {rates[limit][-1] / 1e9:.2f} GB/s")
                    for how, files in in_turn[number % len(in_turn) :] + in_turn[: number % len(in_turn)]:
                        figures = files.measure(enter)
                        files.figures.setdefault(limit, []).append(figures)
                        print(f"round {number + 1}, {limit}, {how}: {figures}", file=sys.stderr, flush=True)
        for limit in limits:
            rate = statistics.median(rates[limit])
            if asked.lines:
                with asked.lines.open("a") as lines:
                    for how, files in models.items():
                        known = {"format": how, "params": files.numel, "file_bytes": files.nbytes}
                        known |= {"pool_share": asked.pool_share, "drive_limit": limit, "drive_bytes_per_s": rate}
                        row = {**known, **files.medians(limit), "rounds": files.figures[limit], "machine": machine()}
                        print(json.dumps(row), file=lines)
            print("\n".join(table(models, limit, rate)))


if __name__ == "__main__":
    main()
