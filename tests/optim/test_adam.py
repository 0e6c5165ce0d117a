"""What the arithmetic promises: torch's own numbers, bit for bit, however the tensors are cut into sub-groups."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.optim import AdamSettings, adam_
from infinity.store.layout import SHARD_ALIGN

STEPS = 4
HYPER: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0},
    "large": {"lr": 0.3, "weight_decay": 0.5, "betas": (0.5, 0.9), "eps": 1e-3},
    "maximize": {"maximize": True},
    "no memory": {"betas": (0.0, 0.0)},
}


class State:
    """Masters and their Adam state, with gradients drawn from a seed."""

    def __init__(self, *sizes: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.masters = [torch.randn(size, generator=self.generator) for size in sizes]
        self.exp_avgs = [torch.zeros(size) for size in sizes]
        self.exp_avg_sqs = [torch.zeros(size) for size in sizes]

    def grads(self) -> list[torch.Tensor]:
        return [torch.randn(m.numel(), generator=self.generator) * 0.1 for m in self.masters]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.masters, *self.exp_avgs, *self.exp_avg_sqs]


def settings_of(*, decoupled: bool, fused: bool | None, **hyper: Any) -> AdamSettings:
    chosen = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False, **hyper}
    return AdamSettings(decoupled_weight_decay=decoupled, fused=fused, **chosen)


def equal_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("oracle", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("hyper", HYPER)
def test_steps_equal_torchs_optimizer_bit_for_bit(
    oracle: type[torch.optim.AdamW | torch.optim.Adam], fused: bool | None, hyper: str
) -> None:
    ours, theirs = State(1, 63, 1000), State(1, 63, 1000)
    chosen = settings_of(decoupled=oracle is torch.optim.AdamW, fused=fused, **HYPER[hyper])
    parameters = [torch.nn.Parameter(master) for master in theirs.masters]
    optimizer = oracle(
        parameters,
        lr=chosen.lr,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        maximize=chosen.maximize,
        fused=fused,
    )
    steps = [torch.zeros(()) for _ in parameters]
    for done in range(STEPS):
        adam_(
            chosen,
            masters=ours.masters,
            grads=ours.grads(),
            exp_avgs=ours.exp_avgs,
            exp_avg_sqs=ours.exp_avg_sqs,
            steps=steps,
        )
        for parameter, grad in zip(parameters, theirs.grads(), strict=True):
            parameter.grad = grad
        optimizer.step()
        assert [float(step) for step in steps] == [done + 1.0] * 3
        assert equal_bits(ours.masters, [p.data for p in parameters])
        for name, moments in (("exp_avg", ours.exp_avgs), ("exp_avg_sq", ours.exp_avg_sqs)):
            assert equal_bits(moments, [optimizer.state[p][name] for p in parameters])


@given(
    size=st.integers(1, 2000),
    places=st.sets(st.integers(1, 30), max_size=5),
    fused=st.booleans(),
    decoupled=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=settings.default.max_examples * 3 // 5)
def test_cutting_where_a_vector_ends_changes_no_bit(
    size: int, places: set[int], fused: bool, decoupled: bool, seed: int
) -> None:
    check_cuts(size, [SHARD_ALIGN * place for place in places], settings_of(decoupled=decoupled, fused=fused), seed)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [70_001, 200_003])
def test_cutting_changes_no_bit_where_threads_share_the_work(size: int, fused: bool) -> None:
    """Threads cut a tensor too, and elsewhere."""
    check_cuts(size, [64, 33_344, 64_000], settings_of(decoupled=True, fused=fused), seed=1)


def check_cuts(size: int, places: list[int], chosen: AdamSettings, seed: int) -> None:
    cuts = [0, *sorted(place for place in places if place < size), size]
    whole, cut = State(size, seed=seed), State(size, seed=seed)

    def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[start:end] for start, end in pairwise(cuts)]

    whole_steps = [torch.zeros(())]
    cut_steps = [torch.zeros(()) for _ in cuts[1:]]
    for _ in range(STEPS):
        adam_(
            chosen,
            masters=whole.masters,
            grads=whole.grads(),
            exp_avgs=whole.exp_avgs,
            exp_avg_sqs=whole.exp_avg_sqs,
            steps=whole_steps,
        )
        adam_(
            chosen,
            masters=parts(cut.masters[0]),
            grads=parts(cut.grads()[0]),
            exp_avgs=parts(cut.exp_avgs[0]),
            exp_avg_sqs=parts(cut.exp_avg_sqs[0]),
            steps=cut_steps,
        )
    assert equal_bits(whole.tensors(), cut.tensors())
    assert [float(step) for step in cut_steps] == [STEPS] * len(cut_steps)


def test_nothing_to_step_is_no_error() -> None:
    adam_(settings_of(decoupled=True, fused=False), masters=[], grads=[], exp_avgs=[], exp_avg_sqs=[], steps=[])
