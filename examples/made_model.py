"""Creates a Llama with random weights, in a folder like that of a downloaded model. For examples.

python examples/made_model.py DIR 1B     writes config.json and safetensors in bf16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from infinity import ConfigError
from infinity.cli.arguments import check_file, checked_value
from infinity.units import format_count, parse_count

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY = 256
FILE_BYTES_MAX = 512 << 20
STD = 0.02


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model: a downloaded one, or one to create and where."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a downloaded model: config.json, safetensors"
    )
    params = checked_value(parse_count, at_least=100_000)
    which.add_argument("--params", type=params, help="create a model of this many parameters, such as 200M or 1B")
    parser.add_argument(
        "--bits", type=int, choices=(4, 8, 16), default=16, help="bits of a created model's matrices (4: NF4)"
    )
    parser.add_argument(
        "--nvme-path",
        type=Path,
        default=Path(__file__).resolve().parent.parent / ".nvme",
        help="folder for a created model (default: .nvme in the checkout)",
    )


def check_model(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Exit with a usage error if the folder holds no model, or if the results could not be written at the end."""
    if asked.model is not None and not (asked.model / "config.json").is_file():
        parser.error(f"--model {asked.model}: there is no config.json; name the folder of a downloaded model")
    try:
        if os.environ.get("RANK", "0") == "0":
            check_file(asked.json, "--json: ")
    except ConfigError as error:
        parser.error(str(error))


@contextlib.contextmanager
def made_model(asked: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[tuple[Path, float]]:
    """Yield the folder of a model that is created and finally removed, and the seconds to create it."""
    try:
        asked.nvme_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--nvme-path {asked.nvme_path}: can't be made ({error.strerror}): name a folder") from None
    with tempfile.TemporaryDirectory(prefix="model-", dir=asked.nvme_path) as folder:
        tell(f"writing {format_count(asked.params)} random parameters to {folder}")
        yield Path(folder), make_model(Path(folder), asked.params, asked.bits)


def config_for(numel: int) -> LlamaConfig:
    """Return the shape nearest to `numel` parameters among those about as wide as 128 times their depth."""
    from transformers import LlamaConfig

    shapes = [(layers, 256 * k) for layers in range(2, 81) for k in range(1, 33)]

    def distance(shape: tuple[int, int]) -> float:
        layers, width = shape
        return 20 * abs(math.log(_numel(layers, width) / numel)) + abs(math.log(width / (128 * layers)))

    layers, width = min(shapes, key=distance)
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def _numel(layers: int, width: int) -> int:
    return layers * (2 * width**2 + 2 * width * width // 4 + 12 * width**2 + 2 * width) + width * 257


def make_model(folder: Path, numel: int, bits: int) -> float:
    """Run `write_model` in a separate process with its own memory. Returns the seconds that it took."""
    began = time.time()
    subprocess.run([sys.executable, __file__, str(folder), str(numel), str(bits)], check=True)
    return time.time() - began


def write_model(folder: Path, numel: int, bits: int = 16) -> None:
    """Write config.json and safetensors into `folder`, a file at a time. bits: of a layer's matrices, else 16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_for(numel)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    files: list[list[str]] = []
    waiting: dict[str, torch.Tensor] = {}

    def write() -> None:
        save_file(waiting, folder / f"model-{len(files) + 1:05d}.safetensors", {"format": "pt"})
        files.append([*waiting])
        waiting.clear()

    for name, shape in _shapes(config):
        weight = torch.empty(shape).normal_(0.0, STD, generator=generator) if len(shape) > 1 else torch.ones(shape)
        waiting |= _coded(name, weight.bfloat16(), bits) if "_proj" in name else {name: weight.bfloat16()}
        if sum(tensor.nbytes for tensor in waiting.values()) >= FILE_BYTES_MAX:
            write()
    if waiting:
        write()
    weight_map = {name: f"model-{i + 1:05d}.safetensors" for i, names in enumerate(files) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _coded(name: str, weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Return a matrix as bitsandbytes stores it in safetensors."""
    if bits == 16:
        return {name: weight}
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    if bits == 8:
        codes, scales, _ = int8_vectorwise_quant(weight.half())
        return {name: codes, name.replace(".weight", ".SCB"): scales}
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return {name: codes} | {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}


def _shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = config.hidden_size, config.intermediate_size
    of_keys = width // config.num_attention_heads * config.num_key_value_heads
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.mlp.down_proj.weight", (width, inner)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, width)
        yield f"{prefix}.mlp.up_proj.weight", (inner, width)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        yield f"{prefix}.self_attn.k_proj.weight", (of_keys, width)
        yield f"{prefix}.self_attn.o_proj.weight", (width, width)
        yield f"{prefix}.self_attn.q_proj.weight", (width, width)
        yield f"{prefix}.self_attn.v_proj.weight", (of_keys, width)
    yield "model.norm.weight", (width,)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), parse_count(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 16)
