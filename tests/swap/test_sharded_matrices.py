"""Matrices that all ranks update together: what fails on one, and copies of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "sharded_matrices.py"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "ranks"), [("fails", 2), pytest.param("copies", 4, marks=pytest.mark.long)])
def test_ranks_that_update_together(what: str, ranks: int, forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), what, ranks=ranks)
    assert done.stdout.count("as promised") - done.stdout.count("NOT as promised") == ranks, done.stdout
    assert not list(nvme_path.iterdir())
