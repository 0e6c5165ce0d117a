"""Training scripts that read their arguments with HfArgumentParser, run from the command line with `--deepspeed`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import launch
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "integrations"))

import clm_script
import sft_script
from trainer_llama import config_for, make_model
from transformers import HfArgumentParser, LlamaForCausalLM

from infinity.integrations.transformers import InfinityTrainingArguments

launch.import_also(
    "accelerate", "safetensors.torch", "transformers.trainer", "transformers.models.llama.modeling_llama"
)

COMMON = ("--use_cpu", "--report_to", "none", "--logging_steps", "1", "--save_strategy", "no")


@pytest.fixture
def given(nvme_path: Path, tmp_path: Path) -> dict[str, str]:
    """What a user has: a config, weights, a text."""
    make_model().save_pretrained(tmp_path / "weights")
    (tmp_path / "ds.json").write_text(json.dumps(config_for(nvme_path)))
    (tmp_path / "text.txt").write_text("0123456789 abcdefgh\n" * 128)
    return {
        "config": str(tmp_path / "ds.json"),
        "weights": str(tmp_path / "weights"),
        "text": str(tmp_path / "text.txt"),
    }


@pytest.mark.parametrize("form", ["file", "text", "dict"])
@pytest.mark.parametrize("kind", [InfinityTrainingArguments, sft_script.Arguments])
def test_the_config_is_a_file_json_text_or_a_dict(kind: Any, form: str, given: dict[str, str], tmp_path: Path) -> None:
    parser = HfArgumentParser(kind)
    common = ["--output_dir", str(tmp_path / "out"), "--use_cpu"]
    text = Path(given["config"]).read_text()
    if form == "dict":
        dicts = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "deepspeed": json.loads(text)}
        (arguments,) = parser.parse_dict(dicts)
    else:
        given_as = given["config"] if form == "file" else text
        (arguments,) = parser.parse_args_into_dataclasses([*common, "--deepspeed", given_as])
    assert arguments.deepspeed is None  # transformers' own way to DeepSpeed stays closed
    assert arguments.infinity_config == {"file": given["config"], "text": text, "dict": json.loads(text)}[form]
    (without,) = parser.parse_args_into_dataclasses(common)
    assert without.infinity_config is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_like_run_clm(given: dict[str, str], tmp_path: Path, forked_ranks: Any, ranks: int) -> None:
    out = tmp_path / "out"
    arguments = (*COMMON, "--model_name_or_path", given["weights"], "--train_file", given["text"])
    whole = (*arguments, "--deepspeed", given["config"], "--do_train", "--do_eval", "--learning_rate", "3e-3")
    forked_ranks(Path(clm_script.__file__), *whole, "--num_train_epochs", "1", "--output_dir", str(out), ranks=ranks)
    results = json.loads((out / "all_results.json").read_text())
    assert results["eval_loss"] < results["train_loss"]
    assert type(LlamaForCausalLM.from_pretrained(out)) is LlamaForCausalLM
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 80 // 8 // ranks


def test_a_script_whose_arguments_are_a_json_file(given: dict[str, str], tmp_path: Path, forked_ranks: Any) -> None:
    arguments = {
        "model_name_or_path": given["weights"],
        "train_file": given["text"],
        "deepspeed": json.loads(Path(given["config"]).read_text()),
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "do_train": True,
        "max_steps": 2,
        "report_to": "none",
    }
    (tmp_path / "run.json").write_text(json.dumps(arguments))
    forked_ranks(Path(clm_script.__file__), str(tmp_path / "run.json"), ranks=1)
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["train_loss"] > 0


def test_a_script_like_trl_s_sft(given: dict[str, str], tmp_path: Path, torchrun: Any) -> None:
    out = tmp_path / "out"
    arguments = (*COMMON, "--model_name_or_path", given["weights"], "--dataset_name", given["text"])
    form = ("--deepspeed", Path(given["config"]).read_text(), "--model_init_kwargs", '{"dtype": "float32"}')
    torchrun(Path(sft_script.__file__), *arguments, *form, "--max_steps", "6", "--output_dir", str(out), ranks=2)
    lines = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert all(0 <= line["mean_token_accuracy"] <= 1 for line in lines if "loss" in line)
    assert type(LlamaForCausalLM.from_pretrained(out)) is LlamaForCausalLM
