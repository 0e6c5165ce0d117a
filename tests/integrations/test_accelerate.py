"""A loop written for accelerate on our engine: its own Accelerator's losses, evaluation and resumed state, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import launch
import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: tools/test_integration.sh accelerate")
pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh accelerate")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "integrations"))

import accelerate_llama
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from trainer_llama import Sentences, config_for, make_model
from transformers.optimization import GreedyLR

from infinity.errors import ConfigError
from infinity.integrations.accelerate import InfinityAccelerator

launch.import_also("accelerate", "transformers.models.llama.modeling_llama")

SCRIPT = Path(accelerate_llama.__file__)


def write_config(tmp_path: Path, nvme_path: Path, **more: Any) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config_for(nvme_path), "bf16": {"enabled": False}, **more}))
    return path


@pytest.fixture
def run(forked_ranks: Any, tmp_path: Path) -> Any:
    def train(*arguments: str, output: str = "output") -> dict[str, Any]:
        figures = tmp_path / "figures.json"
        forked_ranks(SCRIPT, "--output", str(tmp_path / output), "--json", str(figures), *arguments, ranks=1)
        found: dict[str, Any] = json.loads(figures.read_text())
        return found

    return train


def test_a_loop_gives_accelerate_s_numbers_and_its_state_can_be_loaded(
    run: Any, tmp_path: Path, nvme_path: Path
) -> None:
    plain = run("--plain", output="plain")
    config = ("--config", str(write_config(tmp_path, nvme_path, gradient_clipping=1.0)))
    assert run(*config) == plain
    saved, expected = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("output", "plain"))
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    resumed = run(*config, "--resume")
    assert resumed["steps"] == plain["steps"][8:]
    assert resumed["evaluated"] == plain["evaluated"][1:]
    assert not list(nvme_path.iterdir())


def test_two_ranks_of_accelerate_launch_give_its_losses(tmp_path: Path, nvme_path: Path) -> None:
    """Norms of shards are summed in another order than those of whole gradients."""
    config = write_config(tmp_path, nvme_path, gradient_clipping=1000.0)
    found = []
    for more in (("--plain",), ()):
        figures = tmp_path / "figures.json"
        exact = ("--accumulate", "1", "--max-grad-norm", "1000", "--output", str(tmp_path), "--json", str(figures))
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        variables = {**os.environ, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
        subprocess.run([*launcher, str(SCRIPT), *exact, *more], env=variables, check=True, timeout=600)
        figured = json.loads(figures.read_text())
        found.append(([step[:2] for step in figured["steps"]], figured["evaluated"]))
    assert found[0] == found[1]


def test_optimizer_and_schedule_of_the_config_are_filled_from_the_dummies(nvme_path: Path) -> None:
    config = {
        **config_for(nvme_path),
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    accelerator = InfinityAccelerator(cpu=True, config=config)
    model = make_model()
    optimizer = DummyOptim(model.parameters(), lr=1e-3, weight_decay=0.1)
    loader = DataLoader(Sentences(16, 1), batch_size=2)  # type: ignore[arg-type]
    schedule = DummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=2)
    engine, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    try:
        assert accelerator.gradient_accumulation_steps == 2
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        rates = []
        for batch in loader:
            with accelerator.accumulate(engine):
                accelerator.backward(engine(**batch).loss)
                rates.append(schedule.get_last_lr()[0])
        assert engine.global_steps == 4
        assert max(rates) == 1e-3
        with pytest.raises(ConfigError, match="set gradient_clipping in the config"):
            accelerator.clip_grad_norm_(engine.parameters(), 0.5)
        with pytest.raises(ConfigError, match="one model"):
            accelerator.prepare(make_model())
    finally:
        accelerator.end_training()


def test_a_schedule_that_is_no_torch_class_moves_the_engine_s_rate(nvme_path: Path) -> None:
    accelerator = InfinityAccelerator(cpu=True, config=config_for(nvme_path))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = GreedyLR(optimizer, patience=0, factor=0.5, min_lr=1e-5)
    engine, _, schedule = accelerator.prepare(model, optimizer, schedule)
    try:
        for metric in (1.0, 2.0):
            schedule.step(metric)
            assert engine.get_lr() == schedule.get_last_lr() == [2e-3 / metric]
    finally:
        accelerator.end_training()
