"""Hugging Face's models as they are shipped, in tiny: how each is built, and what one is given in a step.

Run by several ranks (`hugging_face.py NVME_PATH OUTPUT MODEL ...`), it trains each on NVMe and in memory, and says whether they
agree; what was on NVMe it saves to the folder OUTPUT/MODEL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

import infinity

STEPS = 3

Batch = dict[str, torch.Tensor]

_DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_DEEP = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}


def _tokens(draw: torch.Generator, count: int = 8) -> torch.Tensor:
    return torch.randint(3, 64, (2, count), generator=draw)


def _language(draw: torch.Generator) -> Batch:
    tokens = _tokens(draw)
    return {"input_ids": tokens, "labels": tokens}


def _whisper(draw: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=draw), "labels": _tokens(draw)}


def _pictures(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=draw)


def _vit(draw: torch.Generator) -> Batch:
    return {"pixel_values": _pictures(draw), "labels": torch.randint(0, 4, (2,), generator=draw)}


def _clip(draw: torch.Generator) -> Batch:
    tokens = torch.cat([_tokens(draw, 7), torch.full((2, 1), 2)], dim=1)
    return {"input_ids": tokens, "pixel_values": _pictures(draw)}


@dataclass(frozen=True)
class Shipped:
    """A model by the names of its classes, the values of its config, and its batches."""

    kind: str
    config: str
    values: dict[str, Any]
    batch: Callable[[torch.Generator], Batch] = _language
    arguments: dict[str, Any] | None = None
    """Arguments of each forward, in addition to the batch."""

    def build(self) -> nn.Module:
        """With first values, unless within `infinity.init_empty`."""
        config: Any = getattr(hf, self.config)(**self.values)
        model: nn.Module = getattr(hf, self.kind)(config)
        return model


SHIPPED = {
    "llama": Shipped("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen2": Shipped("Qwen2ForCausalLM", "Qwen2Config", {**_DECODER, "tie_word_embeddings": True}),
    "gemma2": Shipped("Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "query_pre_attn_scalar": 8}),
    "gpt2": Shipped("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "bert": Shipped("BertForMaskedLM", "BertConfig", {**_ENCODER, "vocab_size": 64}),
    "bart": Shipped("BartForConditionalGeneration", "BartConfig", {**_DEEP, "max_position_embeddings": 32}),
    "whisper": Shipped(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_DEEP, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        _whisper,
    ),
    "vit": Shipped("ViTForImageClassification", "ViTConfig", {**_ENCODER, "image_size": 16, "num_labels": 4}, _vit),
    "mixtral": Shipped("MixtralForCausalLM", "MixtralConfig", {**_DECODER, **_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": Shipped(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_DECODER, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    ),
    "clip": Shipped(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {
                **_ENCODER,
                "vocab_size": 64,
                "max_position_embeddings": 16,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "vision_config": {**_ENCODER, "image_size": 16, "patch_size": 8},
            "projection_dim": 16,
        },
        _clip,
        {"return_loss": True},
    ),
    "mamba": Shipped(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    ),
    "t5": Shipped(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
}


def config_for(nvme_path: Path | None, **keys: Any) -> dict[str, Any]:
    """All of it on NVMe, or in memory where there is no path."""
    place = {"device": "nvme", "nvme_path": str(nvme_path)} if nvme_path else {"device": "none"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 100,
        },
        **keys,
    }


def make_engine(
    name: str, nvme_path: Path | None, *, model: nn.Module | None = None, **options: Any
) -> infinity.Engine:
    """`model`: else the shipped one, with the values that seed 0 draws."""
    torch.manual_seed(0)
    if model is None:
        model = SHIPPED[name].build()
    keys = options.pop("config", {})
    engine, *_ = infinity.initialize(model=model, config=config_for(nvme_path, **keys), **options)
    return engine


def train(engine: infinity.Engine, name: str, *, steps: int = STEPS) -> list[tuple[float, float | None]]:
    """(loss, gradient norm) of each step; no two ranks have the same data."""
    shipped = SHIPPED[name]
    draw = torch.Generator().manual_seed(7 + dist.get_rank())
    torch.manual_seed(1)  # dropout's
    history = []
    for _ in range(steps):
        loss = engine(**shipped.batch(draw), **(shipped.arguments or {})).loss
        engine.backward(loss)
        engine.step()
        history.append((loss.item(), engine.get_global_grad_norm()))
    return history


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    """All masters, whole. A collective."""
    return {name: p.full_tensor() + 0 for name, p in engine.named_parameters()}


def outcome(
    name: str, nvme_path: Path | None, *, saved: Path | None = None
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What a few steps of training come to; the model is saved where a folder is given."""
    with make_engine(name, nvme_path) as engine:
        history = train(engine, name)
        if saved is not None:
            engine.module.save_pretrained(saved)
        return history, weights(engine)


def differences(
    ours: tuple[list[Any], dict[str, torch.Tensor]], theirs: tuple[list[Any], dict[str, torch.Tensor]]
) -> list[str]:
    """What isn't the same bit for bit."""
    found = [] if ours[0] == theirs[0] else [f"losses and norms {ours[0]} and {theirs[0]}"]
    assert ours[1].keys() == theirs[1].keys()
    return found + [name for name, value in ours[1].items() if not torch.equal(value, theirs[1][name])]


def main() -> None:
    dist.init_process_group("gloo")
    place, output = map(Path, sys.argv[1:3])
    for name in sys.argv[3:]:
        found = differences(outcome(name, place, saved=output / name), outcome(name, None))
        print(f"{name} {'differs: ' + ', '.join(found) if found else 'equal'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
