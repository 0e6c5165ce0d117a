"""A model that is only run gives what it gives in memory, and reads in each round what the pool has no room for."""

from __future__ import annotations

import itertools
from pathlib import Path

import adapted
import pytest
import torch
from adapted import Case
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import infinity
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.unsharded import UnshardedMemory

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
    # Of the four blocks of 2 MiB, this holds one from round to round beside those that come and go.
    tight, read = run(weights, "nvme", "15MiB", rounds=8)
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


def where_it_computes(engine: infinity.InferenceEngine, seen: list[bool], stop_at: int = -1) -> None:
    """Note for each block whether its weight is in the pool while it runs; `stop_at`: raise in that one."""
    assert engine.swap is not None and engine.swap._machinery is not None
    pool = engine.swap._machinery.pool
    begin = pool.bytes.data_ptr()

    def look(number: int, module: torch.nn.Module) -> None:
        address = module.first.base.weight.data_ptr()
        seen.append(begin <= address < begin + pool.nbytes)
        if number == stop_at:
            raise ValueError("in the middle of a block")

    for number, block in enumerate(engine.module.blocks):
        block.norm.register_forward_pre_hook(lambda module, args, n=number, b=block: look(n, b))


@pytest.mark.usefixtures("one_rank")
def test_a_block_computes_where_it_is_staged_and_an_exception_takes_that_back(nvme_path: Path) -> None:
    weights = adapted.save(nvme_path, CASE)
    expected, _ = run(weights, "none", rounds=4)
    with infinity.init_empty():
        model = adapted.Model(CASE.width)
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "infinity": {"wrap": ["Block"], "pinned_bytes_max": "15MiB"},
    }
    with infinity.init_inference(model, config, weights=weights) as engine:
        losses = [engine(adapted.tokens(0)).item()]  # the first gather makes the parameter
        seen: list[bool] = []
        where_it_computes(engine, seen)
        losses.append(engine(adapted.tokens(1)).item())
        assert seen == [True] * adapted.BLOCKS
        where_it_computes(engine, [], stop_at=2)
        with pytest.raises(ValueError, match="in the middle"):
            engine(adapted.tokens(2))
        assert isinstance(engine.module.blocks[2].first.base.weight, DTensor)  # nothing is lent any more
        for block in engine.module.blocks:
            block.norm._forward_pre_hooks.clear()
        losses += [engine(adapted.tokens(number)).item() for number in (2, 3)]
        assert engine.swap is not None and not any(group.in_use for group in engine.swap.paging.paged.groups)
    assert losses == expected


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
    """What a group's forward may do with its frozen weight beside computing with it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = torch.nn.Parameter(torch.empty(512, 512))
        self.none = torch.nn.Parameter(torch.empty(0, 512))
        self.view: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "saves":
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                self.view = (x @ self.weight.t()).square().sum()
        elif self.how == "holds":
            self.view = self.weight.t()
        elif self.how == "writes":
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
@pytest.mark.parametrize("how", ["saves", "holds"])
def test_a_view_that_would_outlive_what_is_lent_is_refused(how: str, nvme_path: Path) -> None:
    x = torch.ones(2, 512)
    with using(how, nvme_path / "weights") as engine:
        engine(x)  # the first gather copies
        with pytest.raises(InfinityError, match=r"a view of a frozen weight of shape .* is held"):
            engine(x)
        for module in engine.module:
            module.how, module.view = "", None
        first = engine(x)
        assert torch.equal(engine(x), first)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lent", [0, 4])
def test_a_forward_that_writes_into_a_weight_is_refused_and_nothing_is_lost(lent: int, nvme_path: Path) -> None:
    x = torch.ones(2, 512)
    with using("", nvme_path / "weights", "auto" if lent else TIGHT) as engine:
        made = [engine(x) for _ in range(2)]
        assert lent_groups(engine) == lent
        for _ in range(2):
            engine.module[1].how = "writes"
            with pytest.raises(InfinityError, match=r"1\.weight was changed while it was gathered"):
                engine(x)
            engine.module[1].how = ""
            made += [engine(x) for _ in range(2)]
    assert all(torch.equal(made[0], other) for other in made)


def lent_groups(engine: infinity.InferenceEngine) -> int:
    assert engine.swap is not None
    return sum(group.in_use for group in engine.swap.paging.paged.groups)


@pytest.mark.usefixtures("one_rank")
def test_where_the_pool_holds_the_model_each_group_is_gathered_once(nvme_path: Path) -> None:
    weights = adapted.save(nvme_path, CASE)
    expected, _ = run(weights, "none", rounds=8)
    with infinity.init_empty():
        model = adapted.Model(CASE.width)
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "infinity": {"wrap": ["Block"]},
    }
    with infinity.init_inference(model, config, weights=weights) as engine:
        assert engine.swap is not None
        gathers: list[str] = []
        lap = engine.swap.paging.parameters
        begin = lap._begin
        lap._begin = lambda shard, *args: (gathers.append(shard.group.name), begin(shard, *args))[1]
        losses = [engine(adapted.tokens(0)).item(), engine(adapted.tokens(1)).item()]
        gathers.clear()
        seen: list[bool] = []
        where_it_computes(engine, seen)
        losses.append(engine(adapted.tokens(2)).item())
        assert seen == [True] * adapted.BLOCKS and not gathers

        # An exception: nothing of what isn't being computed with is copied, and nothing is lost.
        where_it_computes(engine, [], stop_at=2)
        copies: list[int] = []
        fill = UnshardedMemory.fill
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                UnshardedMemory, "fill", lambda self, write: (copies.append(self.nbytes), fill(self, write))[1]
            )
            with pytest.raises(ValueError, match="in the middle"):
                engine(adapted.tokens(3))
            for block in engine.module.blocks:
                block.norm._forward_pre_hooks.clear()
            losses.append(engine(adapted.tokens(3)).item())
        large = 2 * CASE.width * CASE.width * 2
        assert copies.count(large) == 2 and len(set(gathers)) >= adapted.BLOCKS  # those of one block
        losses.append(engine(adapted.tokens(4)).item())

        # With gradients, autograd keeps views: what is lent is freed first.
        inputs = torch.randn(2, 256, CASE.width, requires_grad=True)
        made = engine.module.blocks[1](inputs)
        made.float().square().mean().backward()
        assert inputs.grad is not None and inputs.grad.isfinite().all()
        losses.append(engine(adapted.tokens(5)).item())

        # So is it for a look at the values.
        values = engine.module.state_dict()
        assert lent_groups(engine) == 0 and len(values) > 4
        gathers.clear()
        losses += [engine(adapted.tokens(number)).item() for number in (6, 7)]
        assert len(set(gathers)) > adapted.BLOCKS and lent_groups(engine) >= adapted.BLOCKS
    assert losses == expected


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pinned", [TIGHT, "auto"])
def test_what_is_gathered_by_hand_is_not_lent(nvme_path: Path, pinned: str) -> None:
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
        made: list[torch.Tensor] = []
        engine.module[2].register_forward_pre_hook(lambda *_: engine.close())
        engine.module[2].register_forward_hook(lambda module, args, output: made.append(output))
        with pytest.raises(InfinityError, match="closed"):
            engine(x)
    assert made and expected.isfinite().all() and made[0].isfinite().all()
