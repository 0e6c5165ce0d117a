"""Mixtures of experts: only experts that tokens go to are read, and the numbers are those of transformers in memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")

import mixtures
import peft
import transformers as hf
from mixtures import EXPERT_BYTES, EXPERTS, LAYERS, MIXTURES, OPTIONS, tokens
from safetensors.torch import save_file

import infinity
from infinity.errors import ConfigError
from infinity.fsdp2.experts import RoutedExperts


@pytest.mark.parametrize("pinned", ["auto", "8MiB"])
@pytest.mark.parametrize("name", MIXTURES)
def test_generation_reads_the_experts_that_tokens_go_to(
    name: str, pinned: str, one_rank: None, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = mixtures.save(name, nvme_path / "weights")
    plain = hf.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval()
    plain.set_experts_implementation("eager")
    expected = plain.generate(tokens(0), **OPTIONS)
    chosen: list[set[int]] = []
    choose = RoutedExperts._chosen

    def note(self: RoutedExperts, routes: torch.Tensor) -> list[int]:
        numbers = choose(self, routes)
        chosen.append({*numbers})
        return numbers

    monkeypatch.setattr(RoutedExperts, "_chosen", note)
    made, read = mixtures.generated(weights, name, pinned)
    assert torch.equal(made, expected)
    assert len(chosen) == LAYERS * OPTIONS["max_new_tokens"]
    per_token = [after - before for before, after in itertools.pairwise([0, *read])]
    whole = EXPERTS * LAYERS * EXPERT_BYTES
    if pinned == "auto":  # each once, when a token comes to it for the first time
        used = sum(len(set().union(*chosen[layer::LAYERS])) for layer in range(LAYERS))
        assert per_token[-1] < 2 * EXPERT_BYTES
        assert used * EXPERT_BYTES <= sum(per_token) < used * 1.3 * EXPERT_BYTES + whole / 3
    else:
        for number, nbytes in enumerate(per_token[2:], 2):
            used = sum(map(len, chosen[number * LAYERS : (number + 1) * LAYERS]))
            assert nbytes <= used * 1.2 * EXPERT_BYTES < whole


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", MIXTURES)
def test_lora_over_frozen_experts_trains_as_in_memory(
    name: str, micro_batches: int, one_rank: None, nvme_path: Path
) -> None:
    weights = mixtures.save(name, nvme_path / "weights")
    losses = mixtures.train(weights, name, in_files=True, micro_batches=micro_batches)
    assert losses == mixtures.train(weights, name, in_files=False, micro_batches=micro_batches)
    assert len(set(losses)) == len(losses)


def test_files_that_hold_all_experts_as_one_are_read_so(one_rank: None, nvme_path: Path) -> None:
    weights = mixtures.save("qwen3", nvme_path / "weights")
    plain = hf.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval()
    plain.set_experts_implementation("eager")
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.state_dict().items()}, nvme_path / "fused.safetensors"
    )
    made, _ = mixtures.generated(nvme_path / "fused.safetensors", "qwen3")
    assert torch.equal(made, plain.generate(tokens(0), **OPTIONS))


def test_adapters_on_experts_are_refused(one_rank: None, nvme_path: Path) -> None:
    weights = mixtures.save("qwen3", nvme_path / "weights")
    with infinity.init_empty():
        model = peft.get_peft_model(mixtures.build("qwen3"), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ConfigError, match="the experts of this mixture have adapters"):
        infinity.initialize(model=model, weights=weights, config=mixtures.config("nvme"))


@pytest.mark.slow
def test_two_ranks_gather_the_experts_of_either(forked_ranks: Any, nvme_path: Path) -> None:
    for name in MIXTURES:
        mixtures.save(name, nvme_path / name)
    forked_ranks(Path(mixtures.__file__), str(nvme_path), ranks=2)


@pytest.mark.usefixtures("one_rank")
def test_experts_that_are_trained_stay_one_tensor(nvme_path: Path) -> None:
    weights = mixtures.save("qwen3", nvme_path / "weights")
    model = hf.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    engine, *_ = infinity.initialize(model=model, config=mixtures.config("none"))
    assert not any(isinstance(module, RoutedExperts) for module in engine.module.modules())
    engine.close()
