"""Adapters of PEFT on frozen weights that stay in the files of the model below: bits, bytes, and what PEFT loads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")

import hugging_face
import peft
from hugging_face import SHIPPED, differences, make_engine, train, weights

import infinity
from infinity.errors import ConfigError
from infinity.runtime.inference import counting, empty_model

IN_MEMORY = {"device": "none"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    model: Any = SHIPPED["llama"].build()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    return tmp_path / "base"


def adapted(*, empty: bool, **options: Any) -> Any:
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"], **options}
    if not empty:
        return peft.get_peft_model(SHIPPED["llama"].build(), peft.LoraConfig(**settings))
    with infinity.init_empty():
        return peft.get_peft_model(SHIPPED["llama"].build(), peft.LoraConfig(**settings))


@pytest.mark.parametrize("state_on_nvme", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"init_lora_weights": "gaussian"}, {"modules_to_save": ["lm_head"]}], ids=["", "gaussian", "head"]
)
def test_trains_as_in_memory(
    options: dict[str, Any], state_on_nvme: bool, base: Path, one_rank: None, nvme_path: Path, tmp_path: Path
) -> None:
    outcomes = []
    for path in (nvme_path, None):
        model = adapted(empty=True, **options)
        own = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(path)}}}
        config = {} if state_on_nvme or path is None else {"config": own}
        with make_engine("llama", path, model=model, weights=base, **config) as engine:
            first = weights(engine)
            outcomes.append((train(engine, "llama"), weights(engine)))
            if engine.swap is not None:
                frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
                assert engine.swap.paged.foreign_names == frozen
                assert (engine.swap.stats().arena_bytes == 0) is not state_on_nvme
            assert any(first[name].any() for name in first if "lora_A" in name)
            assert not any(first[name].any() for name in first if "lora_B" in name)
            engine.module.save_pretrained(tmp_path / "adapter")
    assert not differences(*outcomes)
    assert not list(nvme_path.iterdir())
    kind: Any = getattr(__import__("transformers"), SHIPPED["llama"].kind)
    loaded = peft.PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, outcomes[0][1][name]), name


def test_adapters_that_need_the_values_of_the_model_are_refused(base: Path, one_rank: None, nvme_path: Path) -> None:
    model = adapted(empty=True)
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ConfigError, match=r"init_lora_weights='pissa' needs the values of the model"):
        make_engine("llama", nvme_path, model=model, weights=base)
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("pinned", ["auto", "9MiB"])
def test_text_is_generated_as_in_memory(
    name: str, pinned: str, one_rank: None, nvme_path: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model: Any = SHIPPED[name].build()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    kind: Any = getattr(hugging_face.hf, SHIPPED[name].kind)
    prompt = torch.arange(1, 9).view(2, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    expected = plain.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    rounds: list[int] = []
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "infinity": {"pinned_bytes_max": pinned},
    }
    before = sorted(tmp_path.rglob("*"))
    with infinity.init_inference(empty_model(tmp_path), config, weights=tmp_path) as engine:
        stopping = [counting(rounds.append)]
        made = engine.generate(prompt, attention_mask=torch.ones_like(prompt), stopping_criteria=stopping, **options)
        assert engine.swap is not None
        assert engine.swap.stats().written_bytes == 0
    assert torch.equal(made, expected)
    assert rounds == [*range(1, 7)]
    assert sorted(tmp_path.rglob("*")) == before
