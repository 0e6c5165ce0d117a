"""Hugging Face's models as they are shipped: on NVMe they train to the bits of the same training in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")

import hugging_face
import launch
from hugging_face import SHIPPED, differences, make_engine, outcome, train, weights
from transformers import PreTrainedModel

import infinity

launch.import_also("transformers.modeling_utils")


@pytest.mark.parametrize("name", SHIPPED)
def test_trains_as_in_memory(name: str, one_rank: None, nvme_path: Path) -> None:
    ours = outcome(name, nvme_path)
    assert not differences(ours, outcome(name, None))
    assert len({loss for loss, _ in ours[0]}) > 1, "it learns"


@pytest.mark.parametrize("name", SHIPPED)
def test_its_own_initialisation_gives_it_the_same_values(
    name: str, one_rank: None, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built without memory, it draws the numbers that it would have drawn in memory; and trains as in memory."""
    with monkeypatch.context() as patch:  # whose parts would draw before the whole does
        patch.setattr(PreTrainedModel, "init_weights", lambda model: None)
        reference: Any = SHIPPED[name].build()
    torch.manual_seed(0)
    reference.init_weights()
    outcomes = []
    for path in (nvme_path, None):
        with infinity.init_empty():
            empty = SHIPPED[name].build()
        with make_engine(name, path, model=empty) as engine:
            first = weights(engine) | dict(engine.module.named_buffers())
            drawn = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
            assert first.keys() == drawn.keys()
            assert not [k for k, value in drawn.items() if not torch.equal(first[k].flatten(), value.flatten())]
            outcomes.append((train(engine, name, steps=1), weights(engine)))
    assert not differences(*outcomes)


def test_two_ranks_train_as_in_memory_and_save(forked_ranks: Any, nvme_path: Path, tmp_path: Path) -> None:
    names = ("clip", "mamba", "mixtral")
    done = forked_ranks(Path(hugging_face.__file__), str(nvme_path), str(tmp_path), *names)
    assert all(done.stdout.count(f"{name} equal") == 2 for name in names), done.stdout
    for name in names:
        kind = getattr(hugging_face.hf, SHIPPED[name].kind)
        loaded, told = kind.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
        assert all(p.isfinite().all() for p in loaded.parameters())


@pytest.mark.parametrize("on_nvme", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "clip", "mixtral"])
def test_save_pretrained_writes_what_from_pretrained_loads(
    name: str, on_nvme: bool, one_rank: None, nvme_path: Path, tmp_path: Path
) -> None:
    """With tied weights, a scalar, and experts that are stored in another layout."""
    with make_engine(name, nvme_path if on_nvme else None) as engine:
        train(engine, name, steps=1)
        expected = {k: v.bfloat16() for k, v in weights(engine).items()}
        engine.module.save_pretrained(tmp_path, max_shard_size="20KB")
        train(engine, name, steps=1)  # continues
    assert (tmp_path / "model.safetensors.index.json").is_file() and not list(tmp_path.glob(".*"))
    loaded = getattr(hugging_face.hf, SHIPPED[name].kind).from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert not [k for k, value in expected.items() if not torch.equal(found[k].flatten(), value.flatten())]


def test_adapters_of_peft_train_and_are_saved(one_rank: None, nvme_path: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = SHIPPED["llama"].build()
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    outcomes = []
    for path in (nvme_path, None):
        torch.manual_seed(0)
        model = type(base).from_pretrained(tmp_path / "base")  # type: ignore[attr-defined]
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
        with make_engine("llama", path, model=adapted) as engine:
            outcomes.append((train(engine, "llama"), weights(engine)))
            engine.module.save_pretrained(tmp_path / "adapter")
    assert not differences(*outcomes)
    loaded = peft.PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, outcomes[0][1][name]), name
