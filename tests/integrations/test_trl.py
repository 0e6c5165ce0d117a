"""TRL's trainers on our engine: everything that they log is what they log in memory, bit for bit, in fp32 on one rank.

On two ranks it is what they log if sums over ranks are taken in the order of FSDP2 instead of DDP.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import launch
import pytest

pytest.importorskip("trl", reason="trl is not installed: tools/test_integration.sh trl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "integrations"))

import trl_fsdp2_order
import trl_llama
from safetensors.torch import load_file

launch.import_also("trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "transformers.models.llama.modeling_llama")

KINDS = [*trl_llama.CLASSES]


@pytest.fixture
def run(forked_ranks: Any, nvme_path: Path, tmp_path: Path) -> Any:
    def train(kind: str, *arguments: str, ranks: int = 1, script: Any = trl_llama) -> list[dict[str, Any]]:
        log = tmp_path / "log.json"
        places = ("--nvme-path", str(nvme_path), "--output", str(tmp_path / "output"), "--json", str(log))
        forked_ranks(Path(script.__file__), kind, *places, *arguments, ranks=ranks)
        assert not list(nvme_path.iterdir())
        lines: list[dict[str, Any]] = json.loads(log.read_text())
        return lines

    return train


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [line.get("loss", line.get("eval_loss")) for line in log if "loss" in line or "eval_loss" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_logged_and_saved_is_what_trl_gives_in_memory(kind: str, run: Any, tmp_path: Path) -> None:
    plain = run(kind, "--plain")
    saved = load_file(tmp_path / "output" / "final" / "model.safetensors")
    assert run(kind, "--from-files") == plain
    again = load_file(tmp_path / "output" / "final" / "model.safetensors")
    assert all((saved[name] == again[name]).all() for name in saved)
    assert len({line["grad_norm"] for line in plain if "grad_norm" in line}) == 4


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_model_in_memory_is_paged_and_may_be_left_out_after_precomputing(kind: str, run: Any) -> None:
    plain = run(kind, "--plain")
    assert run(kind) == plain
    assert run(kind, "--precompute") == plain


def test_adapters_switched_off_are_the_reference_model(run: Any) -> None:
    assert run("dpo", "--lora", "--from-files") == run("dpo", "--lora", "--plain")


@pytest.mark.parametrize(("kind", "more"), [("sft", ()), ("reward", ()), ("dpo", ("--precompute",))])
def test_micro_batches_that_take_turns_give_trl_s_numbers(kind: str, more: tuple[str, ...], run: Any) -> None:
    assert run(kind, "--split", *more) == run(kind, "--plain", *more)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_completions_that_take_turns_give_trl_s_first_step(kind: str, run: Any) -> None:
    """Later completions are drawn with other random numbers."""
    split, plain = run(kind, "--split"), run(kind, "--plain")
    assert split[0] == plain[0]


@pytest.mark.parametrize(
    ("kind", "why"), [("kto", "KTO compares the samples"), ("distillation", "runs the backbone and the head")]
)
def test_losses_that_cannot_be_split_are_refused(kind: str, why: str, run: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"{why}.* so a batch can't be split"):
        run(kind, "--split")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_trl_s_losses(kind: str, run: Any) -> None:
    exact = ("--accumulate", "1", "--max-grad-norm", "1000")
    assert losses(run(kind, *exact, ranks=2)) == losses(run(kind, "--plain", *exact, ranks=2))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_all_that_trl_logs_with_sums_in_the_order_of_fsdp2(kind: str, run: Any) -> None:
    """With accumulation and clipping."""
    assert run(kind, ranks=2) == run(kind, "--plain", ranks=2, script=trl_fsdp2_order)
