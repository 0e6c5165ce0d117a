"""Ranks that go different ways through the model's groups all hear of it in words, before anything is gathered wrongly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "routes.py"


@pytest.mark.parametrize(
    ("scene", "place", "ways"),
    [
        ("at_once", "nvme", "rank 0 came to layers.1.experts.0; rank 1 came to layers.1.experts.1"),
        ("at_once", "memory", "rank 0 came to layers.1.experts.0; rank 1 came to layers.1.experts.1"),
        ("known", "nvme", "rank 0 came to layers.1.experts.0; rank 1 came to layers.1.experts.1"),
        ("ended", "nvme", "rank 0 ended the forward; rank 1 came to layers.1.experts.1"),
        ("skipped", "nvme", "rank 1 came to layers.1.experts.2; rank 0 came to layers.1.experts.1"),
    ],
)
def test_all_ranks_say_which_group_which_rank_came_to(
    scene: str, place: str, ways: str, forked_ranks: Any, nvme_path: Path
) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), place, scene, check=False, timeout_seconds=60)
    for rank in (0, 1):
        assert re.search(rf'rank {rank}: the ranks took different routes .*{ways}.*"wrap": \["Layer"', done.stdout), (
            done.stdout
        )


def test_ranks_that_vary_their_way_alike_train(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), "nvme", "alike")
    assert done.stdout.count("nothing left behind") == 2, done.stdout
