"""State that outlives a forward: each kind is found when it changes, named, and set back."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.fsdp2.kept_state import KeptState

CALLS = 0
SEEN: list[int] = []


class Counts:
    def __init__(self) -> None:
        self.number = 0
        self.names = {"a": [1]}


class Model(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.length = 0, 1000
        self.losses: list[Any] = []
        self.window = collections.deque([1, 2], maxlen=2)
        self.chosen, self.table = {1, 2}, {"a": {"b": torch.ones(2)}}
        self.counts, self.array = Counts(), np.ones(3)
        self.of_python, self.of_numpy = random.Random(0), np.random.default_rng(0)
        self.of_torch = torch.Generator()
        self.register_buffer("mean", torch.tensor([1.0, float("nan")]))
        self.inner = nn.BatchNorm1d(2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 0
        return hidden * len(SEEN)


def test_each_kind_of_state_is_found_and_set_back() -> None:
    model, count, hooked = Model(), 0, [0]

    def loss(output: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return output

    def add_call() -> None:
        global CALLS
        CALLS += 1

    model.inner.register_forward_hook(lambda module, args, output: hooked.append(1))
    kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "attribute steps of the model": (lambda: setattr(model, "steps", 1), lambda: model.steps),
        "attribute new of the model": (lambda: setattr(model, "new", 1), lambda: hasattr(model, "new")),
        "attribute training of inner": (model.inner.eval, lambda: model.inner.training),
        "attribute losses of": (lambda: model.losses.append(torch.ones(1)), lambda: len(model.losses)),
        "attribute window of": (lambda: model.window.append(3), lambda: [*model.window]),
        "attribute chosen of": (lambda: model.chosen.add(3), lambda: {*model.chosen}),
        "attribute table of": (lambda: model.table["a"]["b"].add_(1), lambda: model.table["a"]["b"].tolist()),
        "attribute counts of": (lambda: setattr(model.counts, "number", 1), lambda: model.counts.number),
        "attribute counts of the model": (
            lambda: model.counts.names["a"].append(2),
            lambda: model.counts.names["a"][:],
        ),
        "attribute array of": (lambda: model.array.fill(2), model.array.tolist),
        "attribute of_python of": (model.of_python.random, model.of_python.getstate),
        "attribute of_numpy of": (model.of_numpy.random, lambda: str(model.of_numpy.bit_generator.state)),
        "attribute of_torch of": (
            lambda: torch.rand(1, generator=model.of_torch),
            lambda: model.of_torch.get_state().tolist(),
        ),
        "buffer mean": (lambda: model.mean.data[:1].mul_(2), lambda: str(model.mean)),  # leaves no trace
        "buffer inner.running_mean": (lambda: model.inner.running_mean.add_(1), lambda: str(model.inner.running_mean)),
        "Model.calls": (lambda: setattr(Model, "calls", 1), lambda: Model.calls),
        "global variable CALLS": (add_call, lambda: CALLS),
        "global variable SEEN": (lambda: SEEN.append(1), lambda: [*SEEN]),
        "a variable of a hook of inner (hooked)": (lambda: hooked.append(1), lambda: [*hooked]),
        "a variable of the loss function (count)": (lambda: loss(torch.ones(1)), lambda: count),
        "the state of Python's random numbers": (random.random, random.getstate),
        "the state of NumPy's random numbers": (np.random.rand, lambda: str(np.random.get_state())),
    }
    for words, (change, look) in kinds.items():
        state, before = KeptState(model, [model.inner], [loss]), look()
        model.length = int("1000")  # another object, and equal
        assert state.differs([]) is None, words
        change()
        assert look() != before, words
        assert str(state.differs([])).startswith(words), (words, state.differs([]))
        state.restore()
        assert look() == before, words


def test_a_group_is_looked_at_by_itself() -> None:
    model = Model()
    model.more = nn.BatchNorm1d(2)
    state = KeptState(model, [model.inner, model.more])
    model.inner.momentum = 0.5
    assert state.changed([model.more]) is None
    assert state.changed([model.inner]) == state.changed() == "attribute momentum of inner is changed by a forward"


def test_a_tensor_that_is_too_large_for_a_copy_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.fsdp2.kept_state._COPIED_BYTES_MAX", 0)
    model = Model()
    state = KeptState(model)
    model.inner.running_mean.add_(1)
    with pytest.raises(infinity.InfinityError, match=r"buffer inner.running_mean is changed.*too large to restore"):
        state.restore()
