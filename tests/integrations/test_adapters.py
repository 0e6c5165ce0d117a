"""Adapters of PEFT on frozen weights that stay in the files of the model below: bits, bytes, and what PEFT loads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")

import peft
from hugging_face import SHIPPED, differences, make_engine, train, weights

import infinity
from infinity.errors import ConfigError

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
