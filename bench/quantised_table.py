"""The quantised files of docs/frozen_weights.md: generation and LoRA steps on them and on bf16, bound by the drive.

    python bench/quantised_table.py --nvme-path /local_nvme --lines bench/results/quantised.jsonl
    python bench/quantised_table.py --layers 16 --pool-share 0.5 --rounds 1 --formats bf16,fp8

Writes a Llama with layers of 38 million parameters as files of random codes in each format. In every round a fresh
process per format generates some tokens from one prompt, and takes a few LoRA steps on a short batch. The order of
formats changes. The pool holds the same share of the files in each format, so each token and each pass read the other
layers again. Prints medians over the rounds in Markdown, and appends a JSON line per format to the file of --lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from results import machine
from safetensors.torch import save_file

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
        lambda rows, columns: {
            "qweight": int_words(columns // 8, rows),
            "qzeros": int_words(columns // 128, rows // 8),
            "scales": scales(columns // 128, rows, dtype=torch.float16),
            "g_idx": (torch.arange(columns) // 128).to(torch.int32),
        },
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


def measure(folder: str, pool_bytes: str) -> dict[str, Any]:
    """Measure generation and LoRA steps, in a process of its own."""
    import peft

    import infinity
    from infinity.runtime.inference import empty_model

    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "infinity": {"pinned_bytes_max": int(pool_bytes)},
    }
    times: list[float] = []
    reads: list[int] = []
    with infinity.init_inference(empty_model(folder), config, weights=folder) as engine:
        assert engine.swap is not None
        swap = engine.swap

        def note(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.monotonic())
            reads.append(swap.stats().read_bytes)
            return torch.zeros(len(tokens), dtype=torch.bool)

        prompt = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        engine.generate(prompt, stopping_criteria=[note], **options)
    token_seconds = statistics.median(after - before for before, after in pairwise(times))
    token_bytes = reads[-1] - reads[-2]
    with infinity.init_empty():
        model = peft.get_peft_model(empty_model(folder), peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    lora = config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    trained, *_ = infinity.initialize(model=model, weights=folder, config=lora)
    times, reads = [], []
    with trained:
        assert trained.swap is not None
        batch = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1))
        for _ in range(STEPS):
            trained.backward(trained(input_ids=batch, labels=batch).loss)
            trained.step()
            times.append(time.monotonic())
            reads.append(trained.swap.stats().read_bytes)
    return {
        "token_seconds": token_seconds,
        "token_bytes": token_bytes,
        "step_seconds": statistics.median(after - before for before, after in pairwise(times)),
        "step_bytes": reads[-1] - reads[-2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pool-share", type=float, default=0.25, help="pinned memory over the bytes of the files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", default=",".join(FORMATS), help="a subset of " + ",".join(FORMATS))
    parser.add_argument("--nvme-path", type=Path, default=HERE.parent / ".nvme")
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(measure(*asked.worker)))
        return
    names = asked.formats.split(",")
    asked.nvme_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quantised-", dir=asked.nvme_path) as made:
        numels = {how: make_files(Path(made) / how, asked.layers, how) for how in names}
        sizes = {how: sum(f.stat().st_size for f in (Path(made) / how).glob("*.safetensors")) for how in names}
        pools = {how: str(int(asked.pool_share * size) + (8 << 20)) for how, size in sizes.items()}
        figures: dict[str, list[dict[str, Any]]] = {how: [] for how in names}
        for number in range(asked.rounds):
            for how in names[number % len(names) :] + names[: number % len(names)]:
                command = [sys.executable, __file__, "--worker", str(Path(made) / how), pools[how]]
                answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                figures[how].append(json.loads(answer.splitlines()[-1]))
                print(f"round {number + 1}, {how}: {figures[how][-1]}", file=sys.stderr, flush=True)
    rows = {how: {key: statistics.median(one[key] for one in figures[how]) for key in figures[how][0]} for how in names}
    if asked.lines:
        with asked.lines.open("a") as lines:
            for how, row in rows.items():
                known = {"format": how, "params": numels[how], "file_bytes": sizes[how], "pool_share": asked.pool_share}
                print(json.dumps({**known, **row, "rounds": figures[how], "machine": machine()}), file=lines)
    print(
        "| format | bytes per parameter in the files | read per token | s per token | bf16 over it | LoRA step | over it |"
    )
    print("|---|---|---|---|---|---|---|")
    base = rows.get("bf16")
    for how, row in rows.items():
        gains = [f"{base[key] / row[key]:.2f}" if base else "" for key in ("token_seconds", "step_seconds")]
        per_parameter = sizes[how] / numels[how]
        print(
            f"| {how} | {per_parameter:.3f} | {row['token_bytes'] / 1e9:.2f} GB | {row['token_seconds']:.3f} | {gains[0]} | "
            f"{row['step_seconds']:.3f} s | {gains[1]} |"
        )


if __name__ == "__main__":
    main()
