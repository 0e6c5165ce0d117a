"""Models that transformers and bitsandbytes have saved in 8 and 4 bits, read where they are: as what they decode to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: tools/test_integration.sh transformers")

import bitsandbytes.functional
import peft
import transformers as hf

import infinity
from infinity.cli import ckpt
from infinity.runtime.inference import empty_model

WAYS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, scales in 8 bits": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
}


@pytest.fixture(params=WAYS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(2)
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    how = hf.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **WAYS[request.param])
    coded = hf.LlamaForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=how, dtype=torch.bfloat16, device_map="cpu"
    )
    coded.save_pretrained(tmp_path / "coded")
    decoded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    for name, module in coded.named_modules():
        if hasattr(module.weight if hasattr(module, "weight") else None, "quant_state"):
            values = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            decoded.get_submodule(name).weight.data = values.to(torch.bfloat16)
        elif hasattr(getattr(module, "weight", None), "SCB"):
            scales = module.weight.SCB.unsqueeze(1).mul(1.0 / 127.0)
            decoded.get_submodule(name).weight.data = module.weight.data.to(torch.bfloat16).mul_(scales)
    decoded.save_pretrained(tmp_path / "decoded")
    return tmp_path


def test_it_generates_and_trains_as_its_decoded_values_do(folder: Path, one_rank: None, nvme_path: Path) -> None:
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    plain = hf.LlamaForCausalLM.from_pretrained(folder / "decoded", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        expected = plain(tokens).logits
    with infinity.init_inference(empty_model(folder / "coded"), weights=folder / "coded") as engine:
        assert torch.equal(engine(tokens).logits, expected)
        stored = sum(file.stat().st_size for file in (folder / "coded").glob("*.safetensors"))
        assert engine.swap is not None
        assert engine.swap.stats().read_bytes < 1.05 * stored + (64 << 10)
    losses = []
    for name, device in (("coded", "nvme"), ("decoded", "none")):
        torch.manual_seed(0)
        with infinity.init_empty():
            model = peft.get_peft_model(empty_model(folder / name), peft.LoraConfig(target_modules="all-linear"))
        config = {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_param": {"device": device}},
        }
        trained, *_ = infinity.initialize(model=model, weights=folder / name, config=config)
        with trained:
            losses.append([])
            for _ in range(3):
                loss = trained(input_ids=tokens, labels=tokens).loss
                trained.backward(loss)
                trained.step()
                losses[-1].append(loss.item())
            if trained.swap is not None:
                assert trained.swap.stats().written_bytes == 0
                trained.module.save_pretrained(folder / "adapter")
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_adapters_are_not_merged_into_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = peft.get_peft_model(
        empty_model(folder / "decoded").to_empty(device="cpu"), peft.LoraConfig(target_modules=["q_proj"])
    )
    model.save_pretrained(folder / "adapter")
    assert ckpt.main(["merge", str(folder / "coded"), str(folder / "adapter"), str(folder / "merged")]) == 1
    assert "in 4 or 8 bits" in capsys.readouterr().err
    assert not (folder / "merged").exists()
