"""Hugging Face's models as they are shipped: on NVMe they train to the bits of the same training in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")

import hugging_face
import launch
from hugging_face import SHIPPED, differences, make_engine, outcome, train, weights
from transformers import PreTrainedModel

import infinity

launch.import_also("transformers.modeling_utils")


@pytest.mark.parametrize("name", SHIPPED)
def test_trains_as_in_memory(name: str, one_rank: None, nvme_path: Path) -> None:
    ours = outcome(name, nvme_path)
    assert not differences(ours, outcome(name, None))
    assert len({loss for loss, _ in ours[0]}) > 1, "it learns"


@pytest.mark.parametrize("name", SHIPPED)
def test_its_own_initialisation_gives_it_the_same_values(
    name: str, one_rank: None, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built without memory, it draws the numbers that it would have drawn in memory; and trains as in memory."""
    with monkeypatch.context() as patch:  # whose parts would draw before the whole does
        patch.setattr(PreTrainedModel, "init_weights", lambda model: None)
        reference: Any = SHIPPED[name].build()
    torch.manual_seed(0)
    reference.init_weights()
    outcomes = []
    for path in (nvme_path, None):
        with infinity.init_empty():
            empty = SHIPPED[name].build()
        with make_engine(name, path, model=empty) as engine:
            first = weights(engine) | dict(engine.module.named_buffers())
            drawn = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
            assert first.keys() == drawn.keys()
            assert not [k for k, value in drawn.items() if not torch.equal(first[k].flatten(), value.flatten())]
            outcomes.append((train(engine, name, steps=1), weights(engine)))
    assert not differences(*outcomes)


def test_two_ranks_train_as_in_memory(forked_ranks: Any, nvme_path: Path) -> None:
    names = ("clip", "mamba", "mixtral")
    done = forked_ranks(Path(hugging_face.__file__), str(nvme_path), *names)
    assert all(done.stdout.count(f"{name} equal") == 2 for name in names), done.stdout
