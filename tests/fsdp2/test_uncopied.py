"""Gradients over one rank stay where autograd left them, and are torch's to whoever looks at them or changes them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from infinity.errors import InfinityError
from infinity.fsdp2.buffers import reuse_buffers
from infinity.fsdp2.private import COPIES_IN
from infinity.fsdp2.sharding import local_of, sharded_groups
from infinity.fsdp2.uncopied import UncopiedBuffer, UncopiedGradient, elements_of

pytestmark = pytest.mark.usefixtures("one_rank")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Pair:
    """A model of stock FSDP2, and its twin of which gradients are not copied."""

    def __init__(self, policy: MixedPrecisionPolicy = BF16) -> None:
        torch.manual_seed(0)
        self.stock = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
        self.ours = copy.deepcopy(self.stock)
        for model in (self.stock, self.ours):
            fully_shard(model, mp_policy=policy)
        self.buffers = reuse_buffers(sharded_groups(self.ours), alone=True, copies=False)

    def backward(self, seed: int = 0) -> None:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        for model in (self.stock, self.ours):
            model(x).float().square().sum().backward()

    def each(self, do: Callable[[nn.Module], object]) -> None:
        do(self.stock)
        do(self.ours)

    def grads(self, model: nn.Module) -> list[torch.Tensor]:
        return [local_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

    def check(self) -> None:
        """Found in fp32 by whoever asks for elements, and by any operation of torch."""
        ours, stock = self.grads(self.ours), self.grads(self.stock)
        assert len(ours) == 4
        for here, there in zip(ours, stock, strict=True):
            assert here.dtype is torch.float32
            assert here.shape == there.shape
            assert torch.equal(elements_of(here).float(), there.reshape(-1))
            assert torch.equal(here + 0, there)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in (self.ours, self.stock)]
        assert torch.equal(*(norm.full_tensor() for norm in norms if isinstance(norm, DTensor)))


@pytest.mark.parametrize(("dtype", "lies"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
def test_they_lie_where_autograd_left_them(dtype: torch.dtype, lies: torch.dtype) -> None:
    pair = Pair(MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    made = pair.buffers.made
    pair.backward()
    assert {type(grad) for grad in pair.grads(pair.ours)} == {UncopiedGradient}
    assert {elements_of(grad).dtype for grad in pair.grads(pair.ours)} == {lies}
    assert pair.buffers.made <= made + 1, "for the gather alone"
    pair.check()


def test_a_second_backward_is_added_in_fp32() -> None:
    pair = Pair()
    for seed in range(3):
        pair.backward(seed)
        pair.check()


def test_micro_batches_that_are_summed_before_the_reduction() -> None:
    pair = Pair()
    for last in (False, True):
        for model in (pair.stock, pair.ours):
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(last)
        pair.backward(int(last))
    assert {type(grad) for grad in pair.grads(pair.ours)} == {UncopiedGradient}
    pair.check()


def test_what_is_changed_in_place_stays_changed() -> None:
    pair = Pair()
    pair.backward()
    pair.each(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    pair.check()
    pair.each(lambda model: torch._foreach_mul_([local_of(p.grad) for p in model.parameters()], 3.0))
    pair.check()
    pair.each(lambda model: [p.grad.detach().mul_(0.5) for p in model.parameters()])
    pair.check()
    pair.backward(1)
    pair.check()


def test_what_a_hook_kept_is_not_changed() -> None:
    pair = Pair(MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32))
    kept: list[torch.Tensor] = []
    pair.ours.unshard()
    pair.ours[0].weight.register_hook(kept.append)
    pair.backward()
    expected = [grad.clone() for grad in kept]
    pair.backward(1)
    pair.each(lambda model: torch._foreach_mul_([local_of(p.grad) for p in model.parameters()], 3.0))
    pair.check()
    assert len(kept) == 2
    assert torch.equal(kept[0], expected[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_gradient_divide_factor(3.0),
        lambda model: model.set_all_reduce_hook(lambda output: output.mul_(2.0)),
        lambda model: model.set_force_sum_reduction_for_comms(True),
    ],
    ids=["divided", "hook", "summed"],
)
def test_a_reduction_of_another_kind_gives_what_it_gives(change: Callable[[nn.Module], object]) -> None:
    pair = Pair()
    pair.each(change)
    pair.backward()
    pair.check()


@pytest.mark.parametrize("reduced", [torch.bfloat16, torch.float16])
def test_a_reduction_that_rounds_is_copied(reduced: torch.dtype) -> None:
    pair = Pair(MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduced))
    pair.backward()
    assert {type(grad) for grad in pair.grads(pair.ours)} == {torch.Tensor}
    pair.check()


@pytest.mark.parametrize("copy_in", sorted(COPIES_IN, key=str), ids=str)
def test_a_buffer_keeps_none_of_what_it_has_given_out(copy_in: Callable[..., None]) -> None:
    buffer = UncopiedBuffer.make(10, lambda: torch.empty(10))
    gradients = [torch.ones(4).bfloat16(), torch.full((2, 3), 2.0).bfloat16()]
    alive = [weakref.ref(gradient) for gradient in gradients]
    copy_in(gradients, dim=0, num_chunks=1, out=buffer.view(1, -1))
    given = [torch.as_strided(buffer, (4,), (1,), 0), torch.as_strided(buffer, (2, 3), (3, 1), 4)]
    del gradients
    assert [elements_of(gradient).sum().item() for gradient in given] == [4.0, 12.0]
    del given
    assert [gradient() for gradient in alive] == [None, None]
    with pytest.raises(InfinityError, match="after its gradients were handed out"):
        buffer.sum()


def test_a_gradient_with_other_strides_is_copied() -> None:
    buffer = UncopiedBuffer.make(6, lambda: torch.empty(6))
    transposed = torch.arange(6.0).view(2, 3).T
    torch.ops.fsdp.chunk_cat([transposed], dim=0, num_chunks=1, out=buffer.view(1, -1))
    given = torch.as_strided(buffer, (3, 2), (2, 1), 0)
    assert type(given) is torch.Tensor
    assert torch.equal(given, transposed)


def test_a_negative_view_is_copied() -> None:
    buffer = UncopiedBuffer.make(2, lambda: torch.empty(2))
    negative = torch._neg_view(torch.tensor([1.0, 2.0]))
    torch.ops.fsdp.chunk_cat([negative], dim=0, num_chunks=1, out=buffer.view(1, -1))
    assert torch.as_strided(buffer, (2,), (1,), 0).tolist() == [-1.0, -2.0]


def test_of_what_has_no_memory_nobody_gets_the_address() -> None:
    gradient = UncopiedGradient.make(torch.ones(3).bfloat16())
    for tensor in (gradient, UncopiedBuffer.make(3, lambda: torch.empty(3))):
        with pytest.raises(RuntimeError):
            tensor.data_ptr()
    assert gradient.share_memory_().tolist() == [1.0, 1.0, 1.0]


def test_any_other_tensor_may_be_added() -> None:
    gradient = UncopiedGradient.make(torch.ones(3).bfloat16())
    gradient += torch.full((1,), 2.0)
    assert gradient.tolist() == [3.0, 3.0, 3.0]


def test_a_view_across_gradients_is_of_a_copy() -> None:
    buffer = UncopiedBuffer.make(4, lambda: torch.empty(4))
    torch.ops.fsdp.chunk_cat([torch.ones(2), torch.zeros(2)], dim=0, num_chunks=1, out=buffer.view(1, -1))
    assert torch.as_strided(buffer, (2,), (1,), 1).tolist() == [1.0, 0.0]
    assert (buffer * 2).tolist() == [2.0, 2.0, 0.0, 0.0]
