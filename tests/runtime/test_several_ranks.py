"""What several ranks promise each other: they begin and end together, and fail together, naming the one that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "several_ranks.py"


@pytest.mark.slow
def test_an_engine_after_an_engine_in_one_process(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, "again_and_again", str(nvme_path))
    assert done.stdout.count("made three engines") == 2
    assert not list(nvme_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "words"),
    [("failing_alone", "all were told"), ("writing_rank_fails", "told of the writer's failure")],
)
def test_a_failure_on_one_rank_is_told_to_all(scene: str, words: str, forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, scene, str(nvme_path))
    assert done.stdout.count(words) == 2, done.stdout


@pytest.mark.slow
def test_a_gathered_parameter_is_what_one_rank_made_it(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, "set_by_one", str(nvme_path))
    assert done.stdout.count("set by one") == 2, done.stdout


@pytest.mark.slow
def test_all_ranks_update_ahead_or_none(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, "short_of_space_alone", str(nvme_path))
    assert done.stdout.count("of one mind") == 2, done.stdout


@pytest.mark.slow
def test_batches_of_different_lengths_are_split_into_as_many_parts(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, "split_unevenly", str(nvme_path))
    assert done.stdout.count("as many parts") == 2, done.stdout


@pytest.mark.slow
def test_a_step_of_padding_alone_changes_nothing_beside_it(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, "stepping_padding", str(nvme_path))
    assert done.stdout.count("only what is here") == 2, done.stdout


@pytest.mark.slow
def test_groups_prefetched_far_ahead_need_no_more_of_the_pool(forked_ranks: Any, nvme_path: Path) -> None:
    done = forked_ranks(SCRIPT, "long_prefetch_lists", str(nvme_path))
    assert done.stdout.count("the pool was enough") == 2, done.stdout


@pytest.mark.slow
def test_moments_in_8_bits_are_loaded_over_whatever_was_there(forked_ranks: Any, nvme_path: Path) -> None:
    (nvme_path / "swap").mkdir()
    done = forked_ranks(SCRIPT, "loaded_over_nan", str(nvme_path))
    assert done.stdout.count("as it was") == 2, done.stdout
    done = forked_ranks(SCRIPT, "loaded_over_nan_elsewhere", str(nvme_path), ranks=1)
    assert done.stdout.count("nearly as it was") == 1, done.stdout
