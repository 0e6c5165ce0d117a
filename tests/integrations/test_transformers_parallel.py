"""Models of transformers split by their own plans, or by experts, against the same split in memory and the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import split_models

SCRIPT = Path(split_models.__file__)


@pytest.mark.parametrize(
    ("what", "count"),
    [
        ("plans", 1 + len(split_models.MODELS)),
        pytest.param("experts", 1 + len(split_models.MIXTURES), marks=pytest.mark.long),
    ],
)
def test_training_equals_the_same_split_in_memory(forked_ranks: Any, nvme_path: Path, what: str, count: int) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), what, ranks=4)
    assert done.stdout.count("equal") == 4 * count, done.stdout
    assert not list(nvme_path.iterdir())
