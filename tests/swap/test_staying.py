"""What groups promise that stay staged from step to step: FSDP2's numbers, and no memory kept."""

from __future__ import annotations

import gc
import os
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blocks import Model, batch, sharded
from torch import nn

import infinity
from infinity import PagingOptions
from infinity.errors import InfinityError

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 6
WAYS = {
    "speculative": PagingOptions(update="backward", speculative=True, param_persistence_threshold=0),
    "backward": PagingOptions(update="backward", param_persistence_threshold=0),
    "forward": PagingOptions(update="forward", param_persistence_threshold=0),
    "step, some resident": PagingOptions(update="step", param_persistence_threshold=100),
    "full masters, backward": PagingOptions(update="backward", param_persistence_threshold=0, master_weights="full"),
    "full masters, forward": PagingOptions(update="forward", param_persistence_threshold=0, master_weights="full"),
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    look: Callable[[int], object] | None = None,
    steps: range = range(STEPS),
) -> list[float]:
    losses = []
    for number in steps:
        if isinstance(optimizer, infinity.PagedAdamW):
            optimizer.expect(1.0)
        loss = model(batch(number)).float().square().mean()
        if look is not None:
            look(number)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().full_tensor() + 0 for p in model.parameters()]  # type: ignore[attr-defined]


def write_in_forward(model: nn.Module, write: Callable[[torch.Tensor], object]) -> None:
    """In the third forward of the second block its weight is written to."""
    calls = []
    block = model.blocks[1]  # type: ignore[index]

    def before(module: nn.Module, args: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                write(module.weight)  # type: ignore[arg-type]

    block.register_forward_pre_hook(before)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_writes_into_a_weight_is_refused_and_nothing_is_lost(way: str, nvme_path: Path) -> None:
    memory = sharded()
    expected = train(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, WAYS[way])
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=1e-2)
        write_in_forward(model, lambda weight: weight.mul_(3))
        assert train(model, optimizer, steps=range(2)) == expected[:2]
        with pytest.raises(InfinityError, match=r"blocks\.1\..*weight was changed while gathered"):
            model(batch(2))
        assert train(model, optimizer, steps=range(2, STEPS)) == expected[2:]
        for ours, theirs in zip(weights(model), weights(memory), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fused", [(False, True), (True, False)])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_stepped_otherwise_than_their_neighbours_have_their_numbers(
    way: str, fused: tuple[bool, bool], nvme_path: Path
) -> None:
    def groups(model: nn.Module) -> list[dict[str, object]]:
        matrices, vectors = (
            [p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)
        )
        return [{"params": matrices, "fused": fused[0]}, {"params": vectors, "fused": fused[1], "weight_decay": 0.1}]

    memory = sharded()
    expected = train(memory, torch.optim.AdamW(groups(memory), lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, WAYS[way])
        assert train(model, infinity.PagedAdamW(groups(model), swap=swap, lr=1e-2)) == expected
        for ours, theirs in zip(weights(model), weights(memory), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_weights_set_between_forward_and_backward_are_set(way: str, nvme_path: Path) -> None:
    def halve(model: nn.Module, number: int) -> None:
        if number == 2:
            with torch.no_grad():
                model.reshard()  # type: ignore[operator]
                for parameter in model.blocks[2].parameters():  # type: ignore[index, union-attr]
                    parameter.mul_(0.5)

    memory = sharded()
    expected = train(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2), lambda number: halve(memory, number))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, WAYS[way])
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=1e-2)
        assert train(model, optimizer, lambda number: halve(model, number)) == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["speculative", "step, some resident"])
def test_a_forked_child_is_refused_in_words_wherever_it_would_use_the_model(way: str, nvme_path: Path) -> None:
    """Between steps, after an evaluation, and between a forward and its backward, when the root is gathered."""
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, WAYS[way])
        swap.tensors.register("plain", torch.ones(8))
        swap.tensors.prefetch("plain")

        def use_plain() -> None:
            with swap.tensors.use("plain") as tensor:
                tensor.sum()

        uses = {
            "forward": lambda: model(batch(0)),
            "a group": lambda: model.blocks[1](torch.ones(2, 64)),  # type: ignore[index, operator]
            "weight": lambda: model.first.weight.sum(),  # type: ignore[union-attr, operator]
            "state_dict": lambda: model.state_dict()["blocks.1.weight"].sum(),
            "plain tensor": use_plain,
        }
        with torch.no_grad():
            assert _refused_in_child(uses) == [*uses]
            model(batch(0))
            assert _refused_in_child(uses) == [*uses]
        loss = model(batch(0)).float().square().mean()
        del uses["weight"]  # gathered still, in memory that the child has a copy of
        assert _refused_in_child(uses) == [*uses]
        loss.backward()


def _refused_in_child(uses: dict[str, Callable[[], object]]) -> list[str]:
    """Those of `uses` that are refused in a child that is forked now, as it is one."""
    reads, writes = os.pipe()
    gc.collect()  # gloo's groups of earlier tests: destroying one in a forked child is a segmentation fault
    child = os.fork()
    if child == 0:
        refused = []
        for name, use in uses.items():
            try:
                use()
            except Exception as error:
                refused += [name] if "forked" in str(error) else []
                traceback.print_exc()
        gc.collect()  # what a child drops is its own matter
        os.write(writes, ",".join(refused).encode())
        os._exit(0)
    os.close(writes)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with os.fdopen(reads) as file:
        return file.read().split(",")


def test_the_pool_goes_while_the_model_lives_on(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, WAYS["backward"])
        model(batch(0)).float().square().mean().backward()  # the root stays gathered until then
        model(batch(1))
        slab = weakref.ref(swap._open().pool.slab)
        assert slab() is not None
    gc.collect()
    assert slab() is None
    assert isinstance(model, Model)
