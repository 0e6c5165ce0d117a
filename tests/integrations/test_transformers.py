"""transformers' Trainer on our engine: the numbers of the plain Trainer, evaluation, checkpoints, generation.

Parity is in fp32, where both do the same arithmetic. On two ranks that holds without clipping and accumulation: DDP sums the
micro-batches before it reduces them, and takes the norm of the whole gradient in another order than of its shards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import launch
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "integrations"))

import trainer_llama
from trainer_llama import Sentences, config_for, make_model
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from infinity import init_empty
from infinity.errors import ConfigError
from infinity.integrations.transformers import InfinityTrainer, InfinityTrainingArguments

launch.import_also(
    "accelerate", "safetensors.torch", "transformers.trainer", "transformers.models.llama.modeling_llama"
)


@pytest.fixture
def run(forked_ranks: Any, nvme_path: Path, tmp_path: Path) -> Any:
    def train(*arguments: str, ranks: int = 1, output: str = "output", under: Any = forked_ranks) -> dict[str, Any]:
        figures = tmp_path / "figures.json"
        places = ("--nvme-path", str(nvme_path), "--output", str(tmp_path / output), "--json", str(figures))
        under(Path(trainer_llama.__file__), *places, *arguments, ranks=ranks)
        found: dict[str, Any] = json.loads(figures.read_text())
        return found

    return train


def losses(figures: dict[str, Any]) -> list[float]:
    return [line.get("loss", line.get("eval_loss")) for line in figures["history"]]


def logged(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything that was logged but times."""
    keys = ("loss", "eval_loss", "grad_norm", "learning_rate", "step")
    return [{key: line.get(key) for key in keys} for line in figures["history"]]


def test_numbers_are_the_plain_trainers_and_a_run_can_be_resumed(run: Any, tmp_path: Path, nvme_path: Path) -> None:
    ours = run()
    plain = run("--plain", output="plain")
    assert logged(ours) == logged(plain)
    assert ours["generated"] == plain["generated"] == [[*range(5, 17)]]
    assert len(losses(ours)) == 12 + 3
    shutil.rmtree(tmp_path / "output" / "checkpoint-12")
    assert logged(run("--resume")) == logged(ours)
    assert not list(nvme_path.iterdir())


def test_a_resumed_run_has_the_batches_that_are_left(nvme_path: Path, tmp_path: Path) -> None:
    """Groups of one length are drawn when an epoch begins, with the random numbers of that time."""
    settings = {"train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    found = []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        trainer = make_trainer(nvme_path, tmp_path, logging_steps=1, **settings)
        trainer.train(resume_from_checkpoint=resume)
        found.append(logged({"history": trainer.state.log_history[:-1]}))
        trainer.close()
    assert found[0] == found[1]


def test_micro_batches_that_take_turns_give_the_plain_trainers_numbers(run: Any, tmp_path: Path) -> None:
    plain, ours = run("--plain", "--accumulate", "4", output="plain"), run("--split", "--accumulate", "4")
    assert logged(ours) == logged(plain)
    assert ours["generated"] == plain["generated"]
    shutil.rmtree(tmp_path / "output" / "checkpoint-12")
    assert logged(run("--split", "--accumulate", "4", "--resume")) == logged(ours)
    on_two = [run(*split, "--accumulate", "2", ranks=2, output="two") for split in (["--split"], [])]
    assert losses(on_two[0]) == pytest.approx(
        losses(on_two[1]), rel=1e-5
    )  # each step has the samples, each rank others


class _Doubling(InfinityTrainer):
    """Computes its loss itself, as TRL's trainers do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss: torch.Tensor = 2 * outputs.loss + 0 * outputs.logits.sum()
        return loss


def test_a_loss_of_a_subclass_is_computed_part_by_part(nvme_path: Path, tmp_path: Path) -> None:
    norms = []
    for split in (1, "auto"):
        config = config_for(nvme_path) | {"infinity": {"micro_batches": split}}
        settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
        trainer = make_trainer(nvme_path, tmp_path, config=config, kind=_Doubling, **settings)
        trainer.train()
        norms.append([line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line])
        trainer.close()
    assert norms[0] == norms[1]


def with_two_adapters() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")
    settings: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    model = peft.get_peft_model(make_model(), peft.LoraConfig(**settings, modules_to_save=["lm_head"]))
    model.add_adapter("other", peft.LoraConfig(**settings))
    return model


@pytest.mark.parametrize("make", [make_model, with_two_adapters])
def test_label_smoothing_gives_the_plain_trainers_numbers(make: Any, nvme_path: Path, tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    found = []
    for kind, split in ((InfinityTrainer, "auto"), (InfinityTrainer, 1), (Trainer, 1)):
        config = config_for(nvme_path) | {"infinity": {"micro_batches": split}}
        trainer = make_trainer(nvme_path, tmp_path, model=make(), kind=kind, config=config, logging_steps=1, **settings)
        trainer.train()
        found.append(logged({"history": trainer.state.log_history[:-1]}))
        if kind is InfinityTrainer:
            trainer.close()
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3


def test_two_ranks_give_the_plain_trainers_losses(run: Any) -> None:
    exact = ("--max-grad-norm", "1000", "--accumulate", "1")
    ours, plain = run(*exact, ranks=2), run("--plain", *exact, ranks=2, output="plain")
    assert losses(ours) == losses(plain)
    assert ours["generated"] == plain["generated"]


def test_a_checkpoint_of_two_ranks_is_resumed_by_one(run: Any, tmp_path: Path) -> None:
    whole = run("--accumulate", "1", "--steps", "6", ranks=2)
    more = run("--accumulate", "1", "--steps", "7", "--resume")
    assert losses(more)[:7] == losses(whole)[:7]  # of six steps and an evaluation, as the checkpoint tells
    assert losses(more)[7] < losses(whole)[0]
    assert (tmp_path / "output" / "checkpoint-7").is_dir()


def test_bf16_trains_under_torchrun(run: Any, torchrun: Any) -> None:
    found = losses(run("--bf16", "--evaluate-first", under=torchrun))
    assert found[-1] < found[0]


def make_trainer(
    nvme_path: Path,
    output: Path,
    *,
    model: Any = None,
    config: Any = None,
    kind: Any = InfinityTrainer,
    **settings: Any,
) -> InfinityTrainer:
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "save_strategy": "no",
        **settings,
    }
    arguments = InfinityTrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        report_to=[],
        deepspeed=config or config_for(nvme_path),
        **settings,
    )
    data = {"train_dataset": Sentences(64, 1), "eval_dataset": Sentences(16, 2)}
    trainer: InfinityTrainer = kind(model=model or make_model(), args=arguments, **data)
    return trainer


def test_what_is_saved_is_what_from_pretrained_loads(nvme_path: Path, tmp_path: Path) -> None:
    trainer = make_trainer(nvme_path, tmp_path)
    try:
        trainer.train()
        before = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(tmp_path / "saved"))
    finally:
        trainer.close()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is LlamaForCausalLM
    again = make_trainer(nvme_path, tmp_path, model=loaded)
    try:
        assert again.evaluate()["eval_loss"] == before
    finally:
        again.close()


@pytest.mark.parametrize("make", [make_model, with_two_adapters])
def test_the_best_model_is_loaded_from_a_folder_of_the_model_only(make: Any, nvme_path: Path, tmp_path: Path) -> None:
    """The first evaluation is the best, as the learning rate is far too high."""
    best = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    settings = {"max_steps": 4, "learning_rate": 1.0, "lr_scheduler_type": "constant", "save_steps": 2, **best}
    found = []
    for kind in (InfinityTrainer, Trainer):
        trainer = make_trainer(
            nvme_path, tmp_path / kind.__name__, model=make(), kind=kind, **settings, save_strategy="steps"
        )
        trainer.train()
        evaluated = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        found.append((evaluated, trainer.evaluate()["eval_loss"]))
        if kind is InfinityTrainer:
            trainer.close()
    assert found[0] == found[1]
    assert found[0][1] == min(found[0][0]) < found[0][0][-1]


@pytest.mark.parametrize(("block", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), (None, torch.float32)])
def test_a_saved_model_says_in_which_dtype_it_is(
    block: str | None, dtype: torch.dtype, nvme_path: Path, tmp_path: Path
) -> None:
    blocks = {block: {"enabled": True}} if block else {}
    trainer = make_trainer(nvme_path, tmp_path, config=config_for(nvme_path) | blocks)
    try:
        trainer.save_model(str(tmp_path / "saved"))
    finally:
        trainer.close()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert loaded.config.dtype == loaded.lm_head.weight.dtype == dtype


def test_autos_are_filled_from_the_arguments(nvme_path: Path, tmp_path: Path) -> None:
    config = {
        **config_for(nvme_path),
        "train_batch_size": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    settings = {
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.7,
        "warmup_steps": 2,
        "max_steps": 5,
        "logging_steps": 1,
    }
    trainer = make_trainer(nvme_path, tmp_path, config=config, gradient_accumulation_steps=3, **settings)
    try:
        trainer.train()
        assert trainer.engine is not None
        settled = trainer.engine.config
        (group,) = trainer.engine.optimizer.param_groups
        assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-6, 0.1)
        assert (settled.gradient_clipping, settled.batch.train, settled.batch.accumulation) == (0.7, 12, 3)
        assert settled.scheduler is not None
        assert settled.scheduler.total_num_steps == 5
        rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
        assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)  # two steps of warmup
        assert max(rates) == 1e-3
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("reduce_lr_on_plateau", {"threshold": 0.1, "threshold_mode": "abs"}),
        ("greedy", {"min_lr": 1e-5}),
    ],
)
def test_a_schedule_driven_by_a_metric_steps_after_evaluations(
    kind: str, options: dict[str, Any], nvme_path: Path, tmp_path: Path
) -> None:
    options = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, **options}}
    settings = {"max_steps": 6, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **options}
    found = []
    for trainer in (InfinityTrainer, Trainer):
        trained = make_trainer(nvme_path, tmp_path, kind=trainer, **settings)
        trained.train()
        found.append(logged({"history": trained.state.log_history[:-1]}))
        if trainer is InfinityTrainer:
            trained.close()
    assert found[0] == found[1]
    assert len({line["learning_rate"] for line in found[0]}) > 2, "it changes"


def test_muon_from_the_config_trains_as_in_memory(nvme_path: Path, tmp_path: Path) -> None:
    found = []
    for place in ({}, {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}):
        config = config_for(nvme_path)
        config["zero_optimization"] |= place
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01, "weight_decay": "auto"}}
        torch.manual_seed(0)
        trainer = make_trainer(nvme_path, tmp_path, config=config, logging_steps=1, max_grad_norm=0.5)
        try:
            trainer.train()
            assert trainer.engine is not None
            kinds = {group["use_muon"]: group for group in trainer.engine.optimizer.param_groups}
            assert kinds[True]["weight_decay"] == kinds[False]["weight_decay"] == 0.1
            found.append([(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line])
        finally:
            trainer.close()
    assert found[0] == found[1] and len({loss for loss, _ in found[0]}) == 3


def test_a_model_on_the_meta_device_is_filled_from_files(nvme_path: Path, tmp_path: Path) -> None:
    reference = make_model()
    reference.save_pretrained(tmp_path / "weights")
    with init_empty():
        empty = LlamaForCausalLM(reference.config)
    arguments = InfinityTrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        per_device_eval_batch_size=8,
        deepspeed=config_for(nvme_path),
    )
    trainer = InfinityTrainer(model=empty, args=arguments, eval_dataset=Sentences(16, 2), weights=tmp_path / "weights")
    try:
        batch = torch.stack([line["input_ids"] for line in Sentences(16, 2)])
        expected = reference(input_ids=batch, labels=batch).loss.item()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    finally:
        trainer.close()


def test_callbacks_see_gradients_norm_and_the_engine(nvme_path: Path, tmp_path: Path) -> None:
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            seen.append((state.global_step, keywords["optimizer"].param_groups[0]["lr"]))

    trainer = make_trainer(nvme_path, tmp_path)
    trainer.add_callback(Watch())
    try:
        trainer.train()
    finally:
        trainer.close()
    assert [step for step, _ in seen] == [1, 2, 3]


def test_contradictions_are_refused(nvme_path: Path, tmp_path: Path) -> None:
    config = {**config_for(nvme_path), "gradient_accumulation_steps": 2}
    trainer = make_trainer(nvme_path, tmp_path, config=config)
    with pytest.raises(ConfigError, match=r'gradient_accumulation_steps is 2.*write "auto"'):
        trainer.train()
    with pytest.raises(ConfigError, match="deepspeed="):
        InfinityTrainer(model=make_model(), args=InfinityTrainingArguments(output_dir=str(tmp_path), use_cpu=True))


def test_the_engine_knows_of_every_forward(nvme_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Trainer calls the model, not the engine, which keeps activations elsewhere and times what runs."""
    activations = {"offload_activations": {"device": "nvme", "bytes_min": 4096, "buffer_bytes": "4MiB"}}
    config = {**config_for(nvme_path), "infinity": activations, "wall_clock_breakdown": True}
    losses = []
    for settled in (config_for(nvme_path), config):
        trainer = make_trainer(nvme_path, tmp_path, config=settled, logging_steps=1)
        try:
            trainer.train()
            losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
            assert trainer.engine is not None
            moves = trainer.engine.activations
        finally:
            trainer.close()
    assert losses[0] == losses[1]
    assert moves is not None
    assert moves.moved > 0
    timed = re.findall(r"time \(ms\) \| fwd: (\d+\.\d\d)", capsys.readouterr().out)
    assert len(timed) == 3
    assert all(float(milliseconds) > 0 for milliseconds in timed)
