"""What `infinity-bench plan` counts of a config.json: the parameters that transformers makes of it, and PEFT's adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")

import transformers

from infinity.cli.plan.hf_config import read_hf_config

NARROW = {"num_hidden_layers": 6, "num_experts_per_tok": 4}

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("MixtralConfig", {}),
    ("Qwen3MoeConfig", {"num_hidden_layers": 48, "head_dim": 128}),
    ("Qwen3MoeConfig", {**NARROW, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("Qwen2MoeConfig", {}),
    ("DeepseekV2Config", {**NARROW, "q_lora_rank": None}),
    ("DeepseekV3Config", NARROW),
    ("GptOssConfig", {}),
    ("GptOssConfig", NARROW),
    ("LlamaConfig", {}),
    ("Qwen3Config", {}),
    ("GemmaConfig", {}),
    ("Gemma2Config", {}),
    ("Gemma3TextConfig", {}),
    ("GPT2Config", {}),
    ("GPTBigCodeConfig", {}),
    ("GPTNeoXConfig", {}),
    ("OPTConfig", {}),
    ("Phi3Config", {}),
    ("SmolLM3Config", {}),
]


@pytest.mark.parametrize(("name", "values"), MODELS)
def test_parameters_are_those_of_transformers(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    config = getattr(transformers, name)(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    shape = read_hf_config(tmp_path / "config.json", seq=None)
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("new", [False, True])
def test_falcon_shares_keys_and_values_by_its_own_names(tmp_path: Path, new: bool) -> None:
    config = transformers.FalconConfig(new_decoder_architecture=new, num_kv_heads=1 if new else 71)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    shape = read_hf_config(tmp_path / "config.json", seq=None)
    assert shape.numel == pytest.approx(sum(parameter.numel() for parameter in model.parameters()), rel=1e-4)


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")
    config = transformers.LlamaConfig(num_key_value_heads=8)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"))
    config.save_pretrained(tmp_path)
    shape = read_hf_config(tmp_path / "config.json", seq=None)
    assert shape.adapter_numel(16) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
