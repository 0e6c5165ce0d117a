"""What plain PyTorch in memory promises: the same training, in a process of its own, left out in a line where it can't be."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli import plain_torch as module
from infinity.cli.plain_torch import Make, PlainStep, PlainTorch, PlainTraining, plain_process
from infinity.cli.synthetic import Transformer, make_training, shape_of
from infinity.plan.transformer import Transformer as Shape

SHAPE = shape_of(2, 64, seq=16)
MAKE = functools.partial(make_training, SHAPE, 2)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (2, SHAPE.seq + 1), generator=generator) for _ in range(count)]


def losses_of_engine(model: nn.Module, *, clipping: float, accumulation: int) -> list[float]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3},
    }
    losses = []
    with infinity.initialize(model=model, config=config)[0] as engine:
        for batch in batches(6):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def losses_of_plain(model: nn.Module, *, clipping: float, accumulation: int) -> list[float]:
    training = PlainTraining(model, clipping=clipping)
    losses = []
    for number, batch in enumerate(batches(6)):
        loss = training.model(batch)
        training.backward(loss / accumulation)
        if number % accumulation == accumulation - 1:
            training.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("clipping", "accumulation"), [(0.0, 1), (0.0, 2), (0.01, 1)])
def test_it_is_the_same_training(clipping: float, accumulation: int) -> None:
    """Bit for bit where nothing is summed in another order, as the norm of the whole gradient is."""
    torch.manual_seed(3)
    model = Transformer(SHAPE)
    ways = {"clipping": clipping, "accumulation": accumulation}
    plain = losses_of_plain(copy.deepcopy(model), **ways)
    engine = losses_of_engine(model, **ways)
    assert plain == (pytest.approx(engine, rel=1e-3) if clipping else engine)
    assert plain[-1] != plain[0]


@contextlib.contextmanager
def plain_of(make: Make, lines: list[str], *, shape: Shape = SHAPE) -> Iterator[PlainTorch]:
    with plain_process(make, shape=shape, samples=2, clipping=1.0) as orders:
        yield PlainTorch(orders, lines.append)


def test_steps_are_taken_in_a_process_of_its_own() -> None:
    lines: list[str] = []
    ours = torch.ones(1 << 28)  # a GiB, which is none of the other process's
    with plain_of(MAKE, lines) as plain:
        step = plain.step()
        assert isinstance(step, PlainStep) and step.seconds > 0 and step.usage.cpu_seconds > 0
        assert 50 << 20 < step.peak_rss_bytes < 1 << 30
        (process,) = multiprocessing.active_children()
    assert lines == [] and ours[0] == 1
    assert not process.is_alive()


def test_a_model_that_does_not_fit_is_left_out_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = module.PROCESS_BYTES + 18 * SHAPE.numel + SHAPE.activation_bytes(2, SHAPE.layers) + SHAPE.logits_bytes(2)
    monkeypatch.setattr(module, "available_bytes", lambda: needed)
    assert module.why_not(SHAPE, 2) is None
    monkeypatch.setattr(module, "available_bytes", lambda: needed - 1)
    assert "available" in (module.why_not(SHAPE, 2) or "")
    lines: list[str] = []
    with plain_of(MAKE, lines, shape=shape_of(128, 128 * 64, seq=16)) as plain:
        assert plain.step() is None
    assert len(lines) == 1 and "left out" in lines[0] and "available" in lines[0]


def test_a_process_that_is_killed_is_left_out_in_a_line() -> None:
    lines: list[str] = []
    with plain_of(MAKE, lines) as plain:
        assert plain.step() is not None
        multiprocessing.active_children()[0].kill()
        assert plain.step() is None and plain.step() is None
    assert len(lines) == 1 and "left out: its process has ended" in lines[0]


def tell_threads(_: torch.device) -> Any:
    raise RuntimeError(f"on {torch.get_num_threads()} threads")


@pytest.mark.parametrize("threads", [1, 3])
def test_it_computes_on_as_many_threads(threads: int) -> None:
    before, lines = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        with plain_of(tell_threads, lines) as plain:
            assert plain.step() is None
    finally:
        torch.set_num_threads(before)
    assert len(lines) == 1 and f"left out: on {threads} threads" in lines[0]


def test_a_process_that_fails_says_why_in_a_line() -> None:
    lines: list[str] = []
    with plain_of(functools.partial(make_training, SHAPE, -1), lines) as plain:
        assert plain.step() is None
    assert len(lines) == 1 and "left out: " in lines[0] and "negative dimension" in lines[0]
