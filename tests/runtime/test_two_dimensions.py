"""Tensor and expert parallelism over paged FSDP2, on 2 x 2 ranks: the numbers of the same parallelism in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import two_dimensions

SCRIPT = Path(two_dimensions.__file__)


@pytest.mark.parametrize(
    "name", [name if name == "engine" else pytest.param(name, marks=pytest.mark.slow) for name in two_dimensions.CASES]
)
def test_training_equals_the_same_split_in_memory(forked_ranks: Any, nvme_path: Path, name: str) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), name, ranks=4)
    assert done.stdout.count("equal") == 4, done.stdout
    assert not list(nvme_path.iterdir())
