"""Live parameters in training: the bound holds at every gather, kept groups are read once, and no bit changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import live_parameters as scene
import pytest
import torch
from staying import staying
from torch import nn

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("name", scene.CASES)
def test_the_bound_holds_and_no_bit_changes(name: str, nvme_path: Path) -> None:
    scene.check(name, str(nvme_path))


@pytest.mark.slow
@pytest.mark.parametrize("cases", [[], pytest.param(["all"], marks=pytest.mark.long)])
def test_the_bound_holds_on_two_ranks(cases: list[str], forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(Path(scene.__file__), str(nvme_path), *cases)
    assert done.stdout.count("the bound held") == 2, done.stdout


@pytest.mark.parametrize("kept", [0, 2, scene.BLOCKS])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_group_that_stays_gathered_is_read_once(kept: int, accumulation: int, nvme_path: Path) -> None:
    """12 bytes per parameter and step where it is kept, 14 where it isn't; 2 per micro-batch less or more. (Updated in the
    backward it is read for that again.)"""
    reuse = max(0, 2 * (kept - 1) * scene.BLOCK_NUMEL) if kept else 0
    case = scene.Case("auto", reuse or (1 if kept else 0), 0, accumulation=accumulation, update="forward")
    torch.manual_seed(0)
    with staying(0.0):
        engine, *_ = infinity.initialize(model=scene.Model(), config=scene.settings(case, str(nvme_path)))
    with engine:
        assert engine.live is not None
        plan, groups = engine.live.plan, engine.live.outline.groups
        assert plan.reshard_after_forward.count(False) == 1 + kept
        gathers = [plan.gathers(group, micro_batches=accumulation) for group in range(len(groups))]
        assert engine.swap is not None
        foreseen, _ = engine.swap.step_bytes(gathers=engine.live.gathers)
    expected = sum(2 * each.numel * times for each, times in zip(groups, gathers, strict=True))
    with staying(0.0):
        _, _, reads = scene.train(case, str(nvme_path))
    if kept == 0:  # the last group's bytes are still staged when its backward comes, the next use there is
        expected -= 2 * scene.BLOCK_NUMEL * accumulation
    per_step = expected + (12 - 2) * scene.MODEL_NUMEL  # the first gather after a step takes what was updated
    if kept == scene.BLOCKS and accumulation == 1:
        assert per_step == 12 * scene.MODEL_NUMEL
    assert sum(reads[1:]) == per_step * (scene.STEPS - 1)
    assert foreseen == (12 - 2) * scene.MODEL_NUMEL + sum(
        2 * each.numel * n for each, n in zip(groups, gathers, strict=True)
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_an_evaluation_between_backward_and_step_leaves_nothing_stale(stage: int, nvme_path: Path) -> None:
    losses = []
    for evaluated in (False, True):
        settings = scene.settings(scene.Case(offload="none"), str(nvme_path))
        settings["zero_optimization"]["stage"] = stage
        torch.manual_seed(0)
        engine, *_ = infinity.initialize(model=scene.Model(), config=settings)
        x = torch.arange(8)[None]
        with engine:
            for _ in range(3):
                loss = engine(x).float().square().mean()
                engine.backward(loss)
                if evaluated:
                    scene.evaluate(engine, x)
                engine.step()
                losses += [loss.item(), engine.get_global_grad_norm()]
    assert losses[:6] == losses[6:]


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(infinity.ConfigError) as caught:
        infinity.initialize(model=scene.Model(), config=settings)
    return str(caught.value)


def test_a_bound_too_small_for_one_group_names_the_group_and_the_wrap_that_does(nvme_path: Path) -> None:
    bound = scene.ROOT_NUMEL + scene.BLOCK_NUMEL // 2
    settings = scene.settings(scene.Case(bound, wrap=("Mlp",)), str(nvme_path))
    text = refused(settings)
    assert f"group blocks.0 has {scene.BLOCK_NUMEL} elements" in text
    assert f"root group of {scene.ROOT_NUMEL} elements" in text
    assert f"a bound of {scene.LEAST}" in text
    assert '"infinity": {"wrap": ["Mlp", "Linear"]} is fine enough' in text
    settings["infinity"]["wrap"] = ["Mlp", "Linear"]
    infinity.initialize(model=scene.Model(), config=settings)[0].close()


def test_a_bound_that_no_wrap_satisfies_names_the_one_that_would_do(nvme_path: Path) -> None:
    text = refused(scene.settings(scene.Case(scene.ROOT_NUMEL - 1), str(nvme_path)))
    assert f"no finer wrap fits, or set a bound of {scene.LEAST}" in text
    infinity.initialize(model=scene.Model(), config=scene.settings(scene.Case(scene.LEAST), str(nvme_path)))[0].close()


def test_finer_wrapping_is_said(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bound = scene.ROOT_NUMEL + scene.BLOCK_NUMEL // 2
    with caplog.at_level(logging.INFO, "infinity"):
        engine, *_ = infinity.initialize(model=scene.Model(), config=scene.settings(scene.Case(bound), str(nvme_path)))
    with engine:
        assert engine.live is not None
        assert len(engine.live.outline.groups) == 1 + 2 * scene.BLOCKS
    assert 'wrapping finer, like "infinity": {"wrap": ["Mlp", "Linear"]}' in caplog.text


def test_groups_that_stay_gathered_are_said(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        settings = scene.settings(scene.Case(10**9, 10**9), str(nvme_path))
        infinity.initialize(model=scene.Model(), config=settings)[0].close()
    assert "6 of 6 groups, 196.6k elements, stay gathered from forward to backward" in caplog.text
    assert "not acted on" not in caplog.text


def test_what_is_gathered_ahead_follows_a_new_path_once_it_is_taken_again(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = scene.Case(prefetch=scene.BLOCK_NUMEL)
    engine, *_ = infinity.initialize(model=scene.Model(), config=scene.settings(case, str(nvme_path)))
    x = torch.arange(8)[None]
    followed = []
    with engine, caplog.at_level(logging.INFO, "infinity"):
        assert engine.live is not None
        for without in ((), (1,), (1,), (2,), (1,), (3,), (3,)):
            engine.backward(engine(x, without).float().square().mean())
            engine.step()
            followed.append(engine.live.plan.forward_prefetch[1:5])
    every, other, another = ((2,), (3,), (4,), (5,)), ((3,), (), (4,), (5,)), ((2,), (3,), (5,), ())
    assert followed == [every, every, other, other, other, other, another]
    assert caplog.text.count("another path than planned") == 1


class OddBlock(nn.Module):
    """Uses the parameters of torch's attention, which calls none of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.parts = nn.ModuleDict({"up": nn.Linear(64, 256), "down": nn.Linear(256, 64)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.parts["down"](self.parts["up"](x).relu())


def test_finer_wrapping_leaves_whole_what_nobody_calls(nvme_path: Path) -> None:
    settings = scene.settings(scene.Case(2 * 64 * 256), str(nvme_path))
    engine, *_ = infinity.initialize(model=nn.Sequential(nn.Sequential(OddBlock(), OddBlock())), config=settings)
    with engine, scene.sampled() as sampler:
        engine.backward(engine(torch.randn(1, 4, 64)).float().square().mean())
        engine.step()
        assert sampler.peak <= 2 * 64 * 256
