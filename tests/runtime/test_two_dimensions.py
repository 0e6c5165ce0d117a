"""Tensor and expert parallelism over paged FSDP2, on 2 x 2 ranks: the numbers of the same parallelism in memory."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import killed_mesh
import pytest
import two_dimensions

SCRIPT = Path(two_dimensions.__file__)
LONG = ("matrices and micro-batches", "pipelines", "modules per expert")
MARKS = {"engine": (), **dict.fromkeys(LONG, pytest.mark.long)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in two_dimensions.CASES]
)
def test_training_equals_the_same_split_in_memory(forked_ranks: Any, nvme_path: Path, name: str) -> None:
    done = forked_ranks(SCRIPT, str(nvme_path), name, ranks=4)
    assert done.stdout.count("equal") == 4, done.stdout
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize(
    "places",
    [pytest.param(["commit"], marks=pytest.mark.slow), pytest.param(["forward", "save"], marks=pytest.mark.long)],
)
def test_a_training_that_is_killed_continues_there_and_on_other_meshes(
    forked_ranks: Any, nvme_path: Path, places: list[str]
) -> None:
    """The kill ends all ranks at once; from then on, the numbers of torch alone on the same mesh."""

    def run(do: str, ranks: int = 4) -> None:
        done = forked_ranks(Path(killed_mesh.__file__), str(nvme_path), do, ranks=ranks)
        assert done.stdout.count("equal") == ranks, done.stdout

    run("memory")
    for place in places:
        died = forked_ranks(Path(killed_mesh.__file__), str(nvme_path), place, ranks=4, check=False)
        assert died.returncode == -signal.SIGKILL, died.stdout
        run("resume")
    run("elsewhere")
    run("elsewhere", ranks=2)
