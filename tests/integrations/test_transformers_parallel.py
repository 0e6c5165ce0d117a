"""Models of transformers that are split by their own plans: the numbers of the same split in memory, and of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import split_models

SCRIPT = Path(split_models.__file__)


def test_training_equals_the_same_split_in_memory(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), ranks=4)
    assert done.stdout.count("equal") == 4 * (1 + len(split_models.MODELS)), done.stdout
    assert not list(nvme_path.iterdir())
