"""Models of transformers in published formats, and what is done with them. `published_models.py FOLDER` for several ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import published
import torch
import torch.distributed as dist
import transformers as hf
from published import FORMATS
from safetensors.torch import load_file, save_file

import infinity
from infinity.runtime.inference import empty_model

COMMON = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, {"intermediate_size": 512, "num_key_value_heads": 2}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
    "gpt_oss": (
        hf.GptOssConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 192,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
CASES = [
    *(("llama", how) for how in FORMATS),
    *((name, how) for name in ("qwen3_moe", "deepseek_v3") for how in ("fp8, blocks", "int4")),
    ("gpt_oss", "mxfp4"),
]
ON_SEVERAL_RANKS = [
    *(("llama", how) for how in ("fp8, blocks", "int4, zeros", "nvfp4", "gptq", "awq")),
    ("deepseek_v3", "fp8, blocks"),
    ("qwen3_moe", "int4"),
    ("gpt_oss", "mxfp4"),
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def build(name: str) -> Any:
    kind, sizes = MODELS[name]
    return hf.AutoModelForCausalLM.from_config(kind(**COMMON, **sizes, experts_implementation="eager"))


def is_coded(name: str, tensor: torch.Tensor) -> bool:
    return (
        tensor.dim() == 2 and ".layers." in name and not any(part in name for part in ("norm", "mlp.gate.", "router"))
    )


def save(name: str, how: str, folder: Path) -> Path:
    """The model in `folder`/coded, and in `folder`/decoded what the library makes of it, in bf16."""
    torch.manual_seed(5)
    model = build(name)
    for block in model.model.layers:
        if (router := getattr(block.mlp, "gate", None) or getattr(block.mlp, "router", None)) is not None:
            torch.nn.init.normal_(router.weight)  # so that tokens go different ways
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if (parameter == 1).all() else 0.0, 0.1)
    model.to(torch.bfloat16).save_pretrained(folder / "coded")
    tensors = load_file(folder / "coded" / "model.safetensors")
    form = FORMATS.get(how)
    config = form.config if form is not None else {"quant_method": "mxfp4"}
    if form is not None:
        coded = published.encode(tensors, how, is_coded)
    else:
        coded = {}
        for key, tensor in tensors.items():
            if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                coded[key] = tensor
                continue
            parts = [published.mx(expert.float().t().contiguous()) for expert in tensor]
            blocks = torch.stack([part["codes"] for part in parts])
            coded[f"{key}_blocks"] = blocks.view(*blocks.shape[:2], -1, 16)
            coded[f"{key}_scales"] = torch.stack([part["scales"] for part in parts])
    whole = {key: tensor.contiguous() for key, tensor in coded.items()}
    if name == "deepseek_v3":  # as published: a layer that predicts one more token
        whole["model.layers.61.eh_proj.weight"] = torch.ones(3, 4)
    save_file(whole, folder / "coded" / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "coded" / "config.json").read_text())
    (folder / "coded" / "config.json").write_text(json.dumps({**described, "quantization_config": dict(config)}))
    (folder / "decoded").mkdir()
    (folder / "decoded" / "config.json").write_text(json.dumps(described))
    decoded = decoded_by_library(folder / "coded", config["quant_method"]) if "any order" not in how else None
    if decoded is None:  # none that can be had on a CPU, or that still reads it
        decoded = published.decode(whole, how, torch.bfloat16)
    save_file({key: tensor.contiguous() for key, tensor in decoded.items()}, folder / "decoded" / "model.safetensors")
    return folder


def decoded_by_library(folder: Path, method: str) -> dict[str, torch.Tensor] | None:
    """The values that transformers computes with, by names in files."""
    if method not in ("fp8", "compressed-tensors", "mxfp4"):
        return None
    options = {}
    if method == "compressed-tensors":
        options["quantization_config"] = hf.CompressedTensorsConfig(dequantize=True)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return dict(model.state_dict())


def config(device: str) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True},
        "aio": {"block_size": 16384},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": {"device": device}},
    }


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(number))


def generated(folder: Path, device: str) -> tuple[torch.Tensor, int]:
    """The tokens, and the bytes that were read for them."""
    model = empty_model(folder)
    model.set_experts_implementation("eager")
    with infinity.init_inference(model, config(device), weights=folder) as engine:
        made = engine.generate(tokens(0), **OPTIONS)
        return made, engine.swap.stats().read_bytes if engine.swap is not None else 0


def train(folder: Path, device: str) -> list[float]:
    """LoRA on a frozen model: losses."""
    torch.manual_seed(0)
    with infinity.init_empty():
        below = empty_model(folder)
        below.set_experts_implementation("eager")
        model = peft.get_peft_model(below, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["o_proj"]))
    engine, *_ = infinity.initialize(model=model, weights=folder, config=config(device))
    with engine:
        losses = []
        for step in range(3):
            batch = tokens(100 * step + dist.get_rank())
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if engine.swap is not None:
            assert engine.swap.stats().written_bytes == 0
    return losses


def check(folder: Path) -> int:
    """What is done with codes in files is what is done with their values in memory. The bytes that generation read."""
    plain = hf.AutoModelForCausalLM.from_pretrained(folder / "decoded", dtype=torch.bfloat16).eval()
    plain.set_experts_implementation("eager")
    expected = plain.generate(tokens(0), **OPTIONS)
    made, read = generated(folder / "coded", "nvme")
    assert torch.equal(made, expected)
    losses = train(folder / "coded", "nvme")
    assert losses == train(folder / "decoded", "none")
    assert len(set(losses)) == len(losses)
    return read


def main() -> None:
    dist.init_process_group("gloo")
    for name, how in ON_SEVERAL_RANKS:
        check(Path(sys.argv[1]) / f"{name}, {how}")
    dist.destroy_process_group()
    print("equal", flush=True)


if __name__ == "__main__":
    main()
