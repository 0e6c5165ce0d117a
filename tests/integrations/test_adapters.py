"""Adapters of PEFT on frozen weights that stay in the files of the model below: bits, bytes, and what PEFT loads again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")

import hugging_face
import peft
from hugging_face import SHIPPED, differences, make_engine, train, weights
from torch import nn

import infinity
from infinity.cli import ckpt
from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.transformers import InfinityTrainer, InfinityTrainingArguments
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


class WithHead(nn.Module):
    """A model of PEFT inside another module, as a LightningModule holds it, next to a trained part."""

    def __init__(self) -> None:
        super().__init__()
        self.language = adapted(empty=True)
        torch.manual_seed(11)
        self.scale = nn.Linear(64, 1)
        self.peft_config = peft.LoraConfig()  # what the user keeps says nothing

    def forward(self, **batch: torch.Tensor) -> Any:
        output = self.language(**batch)
        output.loss = output.loss + self.scale(output.logits).square().mean()
        return output


def test_a_model_inside_another_trains_as_in_memory(
    base: Path, one_rank: None, nvme_path: Path, tmp_path: Path
) -> None:
    outcomes, saved = [], []
    for device in ("nvme", "none"):
        model = WithHead()
        head = model.scale.weight.detach().clone()
        config = {"zero_optimization": {"stage": 3, "offload_param": {"device": device}}}
        with make_engine("llama", None, model=model, weights=base, config=config) as engine:
            assert torch.equal(weights(engine)["scale.weight"], head)
            outcomes.append((train(engine, "llama"), weights(engine)))
            if engine.swap is not None:
                frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
                assert engine.swap.paged.foreign_names == frozen
                assert engine.swap.stats().written_bytes == engine.swap.stats().arena_bytes == 0
            engine.module.language.save_pretrained(tmp_path / device)  # type: ignore[operator, union-attr]
        saved.append((tmp_path / device / "adapter_model.safetensors").read_bytes())
    assert not differences(*outcomes)
    assert saved[0] == saved[1]
    kind: Any = getattr(hugging_face.hf, SHIPPED["llama"].kind)
    loaded = peft.PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), tmp_path / "nvme")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, outcomes[0][1][f"language.{name}"]), name


def test_adapters_that_need_the_values_of_the_model_are_refused(base: Path, one_rank: None, nvme_path: Path) -> None:
    model = adapted(empty=True)
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ConfigError, match=r"init_lora_weights='pissa' changes the base weights"):
        make_engine("llama", nvme_path, model=model, weights=base)
    model.peft_config["default"].init_lora_weights = False
    with pytest.raises(ConfigError, match=r"adapters on the meta device need .* not False"):
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


def run_example(name: str, *arguments: object, figures: Path) -> dict[str, Any]:
    script = Path(__file__).resolve().parents[2] / "examples" / name
    command = [sys.executable, str(script), *map(str, arguments), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    read: dict[str, Any] = json.loads(figures.read_text())
    return read


@pytest.mark.slow
def test_the_example_fine_tunes_as_in_memory_and_writes_nothing(nvme_path: Path, tmp_path: Path) -> None:
    asked = ("--params", "3M", "--steps", 3, "--context", 32, "--nvme-path", nvme_path)
    ours = run_example("finetune_lora.py", *asked, "--save", tmp_path / "adapter", figures=tmp_path / "ours")
    memory = run_example("finetune_lora.py", *asked, "--in-memory", figures=tmp_path / "memory")
    assert ours["losses"] == memory["losses"]
    assert len(set(ours["losses"])) == 3
    assert ours["written_bytes"] == ours["arena_bytes"] == 0
    assert ours["read_bytes_per_frozen_param"] <= 4.1
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not list(nvme_path.iterdir())


@pytest.mark.slow
def test_the_example_generates_as_in_memory(nvme_path: Path, tmp_path: Path) -> None:
    asked = ("--params", "3M", "--tokens", 5, "--prompt", "if", "--prompt", "while", "--nvme-path", nvme_path)
    ours = run_example("generate.py", *asked, figures=tmp_path / "ours")
    memory = run_example("generate.py", *asked, "--in-memory", figures=tmp_path / "memory")
    assert ours["tokens"] == memory["tokens"]
    assert [len(row) for row in ours["tokens"]] == [5, 5]
    assert not list(nvme_path.iterdir())


def test_the_trainer_trains_adapters_and_saves_them(
    base: Path, one_rank: None, nvme_path: Path, tmp_path: Path
) -> None:
    data = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8)]
    settings: Any = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "bf16": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
    }
    logged = []
    for device in ("nvme", "none"):
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3, "offload_param": {"device": device}},
        }
        arguments = InfinityTrainingArguments(output_dir=str(tmp_path / device), deepspeed=config, **settings)
        torch.manual_seed(0)
        trainer = InfinityTrainer(model=adapted(empty=True), args=arguments, weights=base, train_dataset=data)
        try:
            trainer.train()
            trainer.save_model()
            logged.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
            assert trainer.engine is not None
            if trainer.engine.swap is not None:
                assert trainer.engine.swap.stats().written_bytes == 0
        finally:
            trainer.close()
    assert logged[0] == logged[1]
    assert len(set(logged[0])) == 3
    saved = [(tmp_path / device / "adapter_model.safetensors").read_bytes() for device in ("nvme", "none")]
    assert saved[0] == saved[1]
    assert not (tmp_path / "nvme" / "config.json").exists()


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "r": 4}, {"modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}}],
    ids=["", "rank-stabilised", "patterns"],
)
def test_a_merged_model_is_that_of_peft(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    kind: Any = getattr(hugging_face.hf, SHIPPED["llama"].kind)
    model = kind.from_pretrained(base, dtype=torch.bfloat16)
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"], **options}
    with_adapter = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **settings))
    with_adapter.float()
    with_adapter.save_pretrained(tmp_path / "adapter")
    assert ckpt.main(["merge", str(base), str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    fresh = kind.from_pretrained(base, dtype=torch.bfloat16)
    merged = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload()
    found = kind.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).state_dict()
    expected = merged.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    untouched = kind.from_pretrained(base, dtype=torch.bfloat16).state_dict()
    assert any(not torch.equal(found[name], untouched[name]) for name in found)


def test_what_cannot_be_merged_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = SHIPPED["llama"].build()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], use_dora=True)).save_pretrained(
        tmp_path / "dora"
    )
    qwen: Any = SHIPPED["qwen2"].build()
    peft.get_peft_model(qwen, peft.LoraConfig(target_modules=["o_proj"], r=3)).save_pretrained(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for folder, words in (
        ("dora", "has use_dora"),
        ("empty", "is not an adapter saved by PEFT"),
        ("none", "is not an adapter"),
    ):
        assert ckpt.main(["merge", str(base), str(tmp_path / folder), str(tmp_path / "out")]) == 1
        assert words in capsys.readouterr().err
    assert ckpt.main(["merge", str(base), str(tmp_path / "other"), str(base)]) == 1
    assert "holds a model already" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def first_losses(model: Any, weights: Path | None, path: Path | None, name: str = "llama") -> list[Any]:
    with make_engine(name, path, model=model, weights=weights) as engine:
        return train(engine, name, steps=2)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_saved_adapters_and_trained_copies_keep_their_values(
    name: str, one_rank: None, nvme_path: Path, tmp_path: Path
) -> None:
    """Of qwen2 the head is tied to the embedding: its file has one of the two."""
    torch.manual_seed(3)
    kind: Any = getattr(hugging_face.hf, SHIPPED[name].kind)
    SHIPPED[name].build().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    settings: Any = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    trained = peft.get_peft_model(
        kind.from_pretrained(tmp_path / "base"), peft.LoraConfig(init_lora_weights=False, **settings)
    )
    with torch.no_grad():
        trained.base_model.model.lm_head.modules_to_save["default"].weight.mul_(3.0)
    trained.save_pretrained(tmp_path / "adapter")

    def again() -> Any:
        below = kind.from_pretrained(tmp_path / "base")
        return peft.PeftModel.from_pretrained(below, tmp_path / "adapter", is_trainable=True)

    expected = first_losses(again(), None, None, name)
    assert first_losses(again(), tmp_path / "base", nvme_path, name) == expected
    fresh = peft.get_peft_model(kind.from_pretrained(tmp_path / "base"), peft.LoraConfig(**settings))
    with infinity.init_empty():
        empty = peft.get_peft_model(SHIPPED[name].build(), peft.LoraConfig(**settings))
    in_memory = first_losses(fresh, None, None, name)
    assert first_losses(empty, tmp_path / "base", nvme_path, name)[0][0] == in_memory[0][0]  # nothing of A shows
    assert in_memory[0][0] != expected[0][0]


def test_what_would_train_another_model_is_refused(base: Path, one_rank: None, nvme_path: Path) -> None:
    kind: Any = getattr(hugging_face.hf, SHIPPED["llama"].kind)
    below = kind.from_pretrained(base, dtype=torch.float32)
    pissa = peft.get_peft_model(below, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights="pissa"))
    with pytest.raises(ConfigError, match="'pissa' changes the base weights"):
        make_engine("llama", nvme_path, model=pissa, weights=base)
    with infinity.init_empty():
        norms = peft.get_peft_model(SHIPPED["llama"].build(), peft.LNTuningConfig(target_modules=["input_layernorm"]))
    with pytest.raises(CheckpointError, match=r"missing .*ln_tuning_layers"):
        make_engine("llama", nvme_path, model=norms, weights=base)
    assert not list(nvme_path.iterdir())


def test_adapters_can_be_run(base: Path, one_rank: None) -> None:
    kind: Any = getattr(hugging_face.hf, SHIPPED["llama"].kind)
    prompt = torch.arange(1, 9).view(2, 4)
    torch.manual_seed(5)
    plain = adapted(empty=False, init_lora_weights=False)
    adapters = {name: p for name, p in plain.state_dict().items() if "lora_" in name}
    plain.load_state_dict({**peft_state(kind.from_pretrained(base, dtype=torch.float32)), **adapters}, strict=False)
    expected = plain.to(torch.bfloat16).eval()(input_ids=prompt).logits
    torch.manual_seed(5)
    with infinity.init_inference(adapted(empty=False, init_lora_weights=False), weights=base) as engine:
        assert torch.equal(engine(input_ids=prompt).logits, expected)


def peft_state(model: Any) -> dict[str, torch.Tensor]:
    """The values of a model under the names that PEFT gives them."""
    names = {name: name for name in model.state_dict()}
    for name in names:
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            names[name] = name.replace(".weight", ".base_layer.weight")
    return {f"base_model.model.{names[name]}": value for name, value in model.state_dict().items()}
