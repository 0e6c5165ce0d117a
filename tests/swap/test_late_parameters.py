"""What becomes of gradients if parameters join an optimizer later, and of those that an exception or a user keeps."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import batch, sharded
from torch import nn

import infinity
from infinity import PagingOptions
from infinity.swap.gradient_lap import GradientLap

pytestmark = pytest.mark.usefixtures("one_rank")
WAYS: dict[str, dict[str, Any]] = {
    "step": {"update": "step"},
    "forward": {"update": "forward", "gradient_dtype": torch.bfloat16},
    "backward": {"update": "backward"},
}


def backward(model: nn.Module, number: int) -> None:
    model(batch(number)).float().square().mean().backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    model.reshard()  # type: ignore[operator]
    return [p.detach().full_tensor() + 0 for p in model.parameters()]  # type: ignore[attr-defined]


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(map(torch.equal, weights(ours), weights(theirs)))


def paged(swap: infinity.SwapManager, way: str) -> nn.Module:
    model = sharded()
    swap.page(model, PagingOptions(param_persistence_threshold=0, sub_group_size=2048, **WAYS[way]))
    return model


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_added_later_are_trained_from_then_on(way: str, nvme_path: Path) -> None:
    def train(model: nn.Module, make: Any) -> None:
        parameters = [*model.parameters()]
        optimizer = make(parameters[:4])
        for number in range(4):
            if number == 2:
                optimizer.add_param_group({"params": parameters[4:]})
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()

    memory = sharded()
    train(memory, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = paged(swap, way)
        train(model, lambda parameters: infinity.PagedAdamW(parameters, swap=swap, lr=1e-2))
        assert same(model, memory)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_is_unfrozen_later_is_trained_and_its_hook_is_called(way: str, nvme_path: Path) -> None:
    called: list[int] = []

    def train(model: nn.Module, make: Any) -> None:
        late = model.blocks[1].weight  # type: ignore[index, union-attr]
        late.register_post_accumulate_grad_hook(lambda parameter: called.append(1))
        late.requires_grad_(False)
        optimizer = make(model.parameters())
        late.requires_grad_(True)
        for number in range(3):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()

    memory = sharded()
    train(memory, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = paged(swap, way)
        called.clear()
        train(model, lambda parameters: infinity.PagedAdamW(parameters, swap=swap, lr=1e-2))
        assert len(called) == 3
        assert same(model, memory)


def test_a_micro_batch_that_was_interrupted_is_repeated(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = sharded()
    theirs = torch.optim.AdamW(memory.parameters(), lr=1e-2)
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = paged(swap, "forward")
        ours = infinity.PagedAdamW(model.parameters(), swap=swap, lr=1e-2)
        for trained in (memory, model):
            backward(trained, 0)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(GradientLap, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                backward(model, 1)
        for trained, optimizer in ((memory, theirs), (model, ours)):
            backward(trained, 1)
            optimizer.step()
        assert same(model, memory)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_model_whose_gradients_are_shown_is_collected(way: str, stepped: bool, nvme_path: Path) -> None:
    swap = infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB")
    model = paged(swap, way)
    optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=1e-2)
    backward(model, 0)
    if stepped:
        optimizer.step()
    left = [weakref.ref(each) for each in (swap, swap.paged, model, optimizer)]
    del swap, model, optimizer
    for _ in range(3):
        gc.collect()
    assert [each() for each in left] == [None] * 4
    assert not [*nvme_path.iterdir()]


def test_a_thread_that_looked_leaves_the_training_to_another(nvme_path: Path) -> None:
    looks, ends = threading.Semaphore(0), threading.Event()
    seen: list[int] = []

    def look() -> None:
        looks.acquire()
        seen.append(len(model.state_dict()))
        looked.set()
        ends.wait(60)  # it lives on

    looked = threading.Event()
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = paged(swap, "forward")
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=1e-2)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        thread = threading.Thread(target=look)
        thread.start()
        looks.release()
        assert looked.wait(60) and seen
        block = model.blocks[0]  # type: ignore[index]
        block(torch.ones(4, 64)).float().square().mean().backward()  # no forward of the whole model
        ends.set()
        thread.join()
