"""Stages 0 to 3, every mix of places, and meshes of replicas: the numbers of torch alone (DDP, or FSDP2 on the same mesh)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import stages

import infinity

SCRIPT = Path(stages.__file__)


@pytest.mark.usefixtures("one_rank")
def test_every_stage_equals_torch_alone(nvme_path: Path) -> None:
    stages.check(str(nvme_path), list(stages.CASES))
    assert not list(nvme_path.iterdir())


@pytest.mark.slow
def test_every_stage_equals_torch_alone_on_two_ranks(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), *stages.CASES, "whole replicas")
    assert done.stdout.count("equal") == 2 * (len(stages.CASES) + 1), done.stdout
    assert not list(nvme_path.iterdir())


@pytest.mark.slow
def test_meshes_of_four_ranks_equal_fsdp2_on_the_same_mesh(forked_ranks: Any, nvme_path: Path) -> None:
    names = [*stages.REPLICAS, *stages.SECONDARY]
    done = forked_ranks(SCRIPT, str(nvme_path), *names, ranks=4)
    assert done.stdout.count("equal") == 4 * len(names), done.stdout
    assert done.stdout.count("refused") == 4, done.stdout
    assert not list(nvme_path.iterdir())


@pytest.mark.usefixtures("one_rank")
def test_what_comes_out_otherwise_than_its_words_is_said(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        zero = stages.CASES["stage 2, state on the cpu"]
        stages.with_engine(zero, str(nvme_path), bf16=True, accumulation=1, clipping=0.0)
    assert "offload_optimizer.ratio has no effect" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_a_ratio_keeps_its_part_of_the_state_in_host_memory(nvme_path: Path) -> None:
    written = {}
    for ratio in (1.0, 0.5):
        place = {"device": "nvme", "nvme_path": str(nvme_path)}
        zero = {"stage": 3, "offload_param": place, "offload_optimizer": {**place, "ratio": ratio}}
        config = {
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = infinity.initialize(model=stages.model(512), config=config)
        with engine:
            assert engine.swap is not None
            written[ratio] = engine.swap.step_bytes(micro_batches=1)[1]
    assert 0.4 < written[0.5] / written[1.0] < 0.7
