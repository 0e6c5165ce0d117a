"""Compiled blocks, with and without activation checkpointing: paged, they give the bits that they give in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from torch import nn

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_are_paged_bit_for_bit(
    checkpointing: bool, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aot_eager: forward and backward are traced as for any backend, and run without a compiler of C++ or Triton."""
    monkeypatch.setattr(training, "STEPS", 2)
    case = dataclasses.replace(training.CASES["plain"], checkpointing=checkpointing)
    initialize = infinity.initialize

    def compiled(*, model: nn.Module, config: dict[str, Any]) -> Any:
        for block in model.blocks:
            block.inner = torch.compile(block.inner, backend="aot_eager")
        return initialize(model=model, config=config)

    monkeypatch.setattr(infinity, "initialize", compiled)
    assert not training.differences(training.with_engine(case, None), training.with_engine(case, str(nvme_path)))
