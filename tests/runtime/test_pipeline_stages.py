"""Stages of a PipelineModule over paged FSDP2, on 2 x 2 ranks: the numbers of the same pipeline in memory, by torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipeline_stages
import pytest

from infinity.runtime.pipeline import _bounds

SCRIPT = Path(pipeline_stages.__file__)


MARKS = {"training": (), "timings": pytest.mark.long, "shapes": pytest.mark.long, "checkpoints": pytest.mark.long}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in pipeline_stages.CASES]
)
def test_training_equals_the_same_stages_in_memory(forked_ranks: Any, nvme_path: Path, name: str) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), name, ranks=4)
    assert done.stdout.count("equal") == 4, done.stdout
    assert not list(nvme_path.iterdir())


def test_stages_have_even_shares_of_the_layers() -> None:
    assert _bounds([1, 1, 1, 1, 1], 2) == [0, 2, 5]
    assert _bounds([5, 1, 1, 1, 1, 1, 5], 3) == [0, 1, 6, 7]
    assert _bounds([0, 9, 0, 9, 0], 2) in ([0, 2, 5], [0, 3, 5])
    assert _bounds([7, 7], 2) == [0, 1, 2]
