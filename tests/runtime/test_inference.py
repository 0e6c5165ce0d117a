"""A model that is only run gives what it gives in memory, and reads in each round what the pool has no room for."""

from __future__ import annotations

import itertools
from pathlib import Path

import adapted
import pytest
import torch
from adapted import Case
from safetensors.torch import save_file

import infinity
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.sharding import reshard

CASE = Case(width=512)


def run(weights: Path, device: str, pinned: int | str = "auto", rounds: int = 6) -> tuple[list[float], list[int]]:
    """The loss of each round, and the bytes that it read."""
    with infinity.init_empty():
        model = adapted.Model(CASE.width)
    config = {
        "bf16": {"enabled": True},
        "aio": {"block_size": 16384},
        "zero_optimization": {"stage": 3, "offload_param": {"device": device}},
        "infinity": {"wrap": ["Block"], "pinned_bytes_max": pinned},
    }
    losses, read = [], [0]
    with infinity.init_inference(model, config, weights=weights) as engine:
        for number in range(rounds):
            losses.append(engine(adapted.tokens(number)).item())
            read.append(engine.swap.stats().read_bytes if engine.swap is not None else 0)
        if engine.swap is not None:
            assert engine.swap.stats().written_bytes == engine.swap.stats().arena_bytes == 0
    return losses, [after - before for before, after in itertools.pairwise(read)]


@pytest.mark.usefixtures("one_rank")
def test_it_gives_what_it_gives_in_memory_and_keeps_what_there_is_room_for(nvme_path: Path) -> None:
    weights = adapted.save(nvme_path, CASE)
    whole = (weights / "model.safetensors").stat().st_size
    expected, _ = run(weights, "none")
    assert len(set(expected)) == len(expected)
    roomy, read = run(weights, "nvme")
    assert roomy == expected
    assert whole * 0.9 < read[0] < 1.1 * whole and sum(read[1:]) == 0
    # Of the four blocks of 2 MiB, this keeps one from round to round; the others come and go.
    tight, read = run(weights, "nvme", "14MiB", rounds=8)
    assert tight[:6] == expected
    assert 0 < sum(read[4:]) < 0.9 * 4 * whole


@pytest.mark.usefixtures("one_rank")
def test_a_closed_engine_and_a_model_without_generate_are_refused(nvme_path: Path) -> None:
    weights = adapted.save(nvme_path, CASE)
    with infinity.init_empty():
        model = adapted.Model(CASE.width)
    engine = infinity.init_inference(model, weights=weights)
    with pytest.raises(ConfigError, match=r"Model has no generate\(\)"):
        engine.generate(adapted.tokens(0))
    engine.close()
    engine.close()
    with pytest.raises(InfinityError, match="the engine is closed"):
        engine(adapted.tokens(0))
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("one_rank")
def test_evaluation_between_forward_and_backward_leaves_what_autograd_saved(nvme_path: Path) -> None:
    case = Case()
    weights = adapted.save(nvme_path, case)
    losses = []
    for evaluates in (False, True):
        engine = adapted.make(case, weights, str(nvme_path))
        losses.append([])
        for number in range(4):
            loss = engine(adapted.tokens(number))
            if evaluates:
                with torch.no_grad():
                    engine(adapted.tokens(number + 10))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        engine.close()
    assert losses[0] == losses[1]


class Uses(torch.nn.Module):
    """Uses of a frozen weight in a group's forward, other than computing with it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = torch.nn.Parameter(torch.empty(512, 512))
        self.none = torch.nn.Parameter(torch.empty(0, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "writes":
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x @ self.weight


TIGHT = "10MiB"
"""Too little for all of `using`'s model."""


def using(how: str, weights: Path, pinned: str = TIGHT) -> infinity.InferenceEngine:
    torch.manual_seed(4)
    tensors = {f"{i}.weight": torch.randn(512, 512) / 16 for i in range(4)}
    weights.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {f"{i}.none": torch.empty(0, 512) for i in range(4)}, weights / "model.safetensors")
    with infinity.init_empty():
        model = torch.nn.Sequential(*(Uses(how) for _ in range(4)))
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "infinity": {"wrap": ["Uses"], "pinned_bytes_max": pinned},
    }
    return infinity.init_inference(model, config, weights=weights)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pinned", [TIGHT, "auto"])
def test_a_forward_that_writes_into_a_weight_is_refused_and_nothing_is_lost(pinned: str, nvme_path: Path) -> None:
    x = torch.ones(2, 512)
    with using("", nvme_path / "weights", pinned) as engine:
        made = [engine(x) for _ in range(2)]
        for _ in range(2):
            engine.module[1].how = "writes"
            with pytest.raises(InfinityError, match=r"1\.weight was changed while gathered"):
                engine(x)
            engine.module[1].how = ""
            made += [engine(x) for _ in range(2)]
    assert all(torch.equal(made[0], other) for other in made)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pinned", [TIGHT, "auto"])
def test_what_is_gathered_by_hand_keeps_its_elements(nvme_path: Path, pinned: str) -> None:
    x = torch.ones(2, 512)
    with using("", nvme_path / "weights", pinned) as engine:
        expected = engine(x), engine(x)
        for module in engine.module:
            with torch.no_grad():
                module.unshard()
            inputs = x.clone().requires_grad_()
            with torch.enable_grad():
                made = module(inputs)
            engine(x)  # takes all leases in turn
            made.sum().backward()
            weight = module.weight.full_tensor()
            assert torch.allclose(inputs.grad, weight.sum(1).expand(2, -1), rtol=1e-4, atol=1e-4)
        assert torch.equal(engine(x), expected[1])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pinned", [TIGHT, "auto"])
def test_an_engine_that_is_closed_in_a_forward_says_so(nvme_path: Path, pinned: str) -> None:
    x = torch.ones(2, 512)
    with using("", nvme_path / "weights", pinned) as engine:
        expected = engine(x)
        engine(x)
        engine.module[2].register_forward_pre_hook(lambda *_: engine.close())
        with pytest.raises(InfinityError, match=r"closed|sharded"):
            engine(x)
    assert expected.isfinite().all()


@pytest.mark.usefixtures("one_rank")
def test_what_was_written_to_a_frozen_weight_where_it_is_staged_is_void(nvme_path: Path) -> None:
    x = torch.ones(2, 512)
    with using("", nvme_path / "weights", "auto") as engine:
        expected = engine(x)
        with torch.no_grad():
            engine.module[1].unshard()
            engine.module[1].weight.mul_(0.5)
            with pytest.raises(InfinityError, match=r"1\.weight was changed while gathered"):
                reshard(engine.module)
        assert torch.equal(engine(x), expected)
