"""Gradients over one rank can be taken where autograd left them; all others are what stock FSDP2 makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from infinity.device import ReusedMemory
from infinity.fsdp2.guarded import guard
from infinity.fsdp2.sharding import local_of, set_gradient_handlers

pytestmark = pytest.mark.usefixtures("one_rank")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Pair:
    """A model of stock FSDP2, and its twin whose matrices' gradients are taken before they are reduced."""

    def __init__(self, policy: MixedPrecisionPolicy = BF16) -> None:
        torch.manual_seed(0)
        self.stock = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
        self.ours = copy.deepcopy(self.stock)
        for model in (self.stock, self.ours):
            fully_shard(model, mp_policy=policy)
        guard(self.ours, ReusedMemory())
        self.taken: dict[nn.Parameter, list[torch.Tensor]] = {}
        assert isinstance(self.ours, FSDPModule)
        set_gradient_handlers(self.ours, self.take, lambda share: None)

    def take(self, grads: Mapping[nn.Parameter, torch.Tensor]) -> Collection[nn.Parameter]:
        for parameter, grad in grads.items():
            if parameter.dim() == 2:
                self.taken.setdefault(parameter, []).append(grad)
        return [parameter for parameter in grads if parameter.dim() == 2]

    def each(self, do: Callable[[nn.Module], object]) -> None:
        do(self.stock)
        do(self.ours)

    def backward(self, seed: int = 0) -> None:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        self.each(lambda model: model(x).float().square().sum().backward())

    def check(self) -> None:
        for ours, stock in zip(self.ours.parameters(), self.stock.parameters(), strict=True):
            taken = self.taken.get(ours)
            assert (taken is None) == (ours.grad is not None)
            if taken is None:
                here = local_of(ours.grad)
            else:
                here = torch.zeros(ours.shape)
                for grad in taken:
                    here += grad.float()
            assert torch.equal(here, local_of(stock.grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_are_in_the_dtype_of_autograd(dtype: torch.dtype) -> None:
    pair = Pair(MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    for seed in range(2):
        pair.backward(seed)
        pair.check()
    assert {grad.dtype for grads in pair.taken.values() for grad in grads} == {dtype} and len(pair.taken) == 2


def test_micro_batches_are_summed_before_they_are_offered() -> None:
    pair = Pair()
    for last in (False, True):
        pair.each(lambda model, last=last: model.set_requires_gradient_sync(last))  # type: ignore[misc]
        assert not pair.taken
        pair.backward(int(last))
    pair.check()
    assert {grad.dtype for grads in pair.taken.values() for grad in grads} == {torch.float32}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_gradient_divide_factor(3.0),
        lambda model: model.set_all_reduce_hook(lambda output: output.mul_(2.0)),
    ],
    ids=["divided", "hook"],
)
def test_a_reduction_that_does_more_than_to_copy_is_made(change: Callable[[nn.Module], object]) -> None:
    pair = Pair()
    pair.each(change)
    pair.backward()
    pair.check()
    assert not pair.taken


@pytest.mark.parametrize("reduced", [torch.bfloat16, torch.float16])
def test_a_reduction_that_rounds_is_made(reduced: torch.dtype) -> None:
    pair = Pair(MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduced))
    pair.backward()
    pair.check()
    assert not pair.taken


def test_an_exception_of_whoever_takes_leaves_none_for_the_next_backward() -> None:
    pair = Pair()

    def fail(grads: object) -> Collection[nn.Parameter]:
        raise ValueError("while they are taken")

    assert isinstance(pair.ours, FSDPModule)
    set_gradient_handlers(pair.ours, fail, lambda share: None)
    with pytest.raises(ValueError, match="while they are taken"):
        pair.backward()
    group = pair.ours._get_fsdp_state()._fsdp_param_groups[0]
    assert not group.unreduced()
