"""What the budget promises: a sum that is enough, known before the start, and errors that name the number that would do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import BudgetError
from infinity.schedule import pinned
from infinity.schedule.pinned import PinnedBudget, gather_bytes
from infinity.store.layout import SPACE_ALIGN
from infinity.swap import plan
from infinity.swap.plan import check_available, check_budget, sub_group_numel_for
from infinity.units import GIB, MIB


@given(pinned_bytes=st.integers(0, 1 << 36), per_element=st.sampled_from([12, 14, 16]))
def test_sub_group_is_the_largest_of_which_a_pipeline_fits(pinned_bytes: int, per_element: int) -> None:
    def pipeline(numel: int) -> int:
        return pinned.PIPELINE_DEPTH * numel * per_element + pinned.ACCESS_BYTES

    numel = sub_group_numel_for(pinned_bytes, per_element)
    assert numel % SPACE_ALIGN == 0
    assert numel == 0 or pipeline(numel) <= pinned_bytes
    assert pipeline(numel + SPACE_ALIGN) > pinned_bytes


@given(group_bytes=st.integers(0, 1 << 34))
def test_gathers_hold_whole_pages_of_each_group(group_bytes: int) -> None:
    need = gather_bytes(group_bytes)
    assert need % (pinned.GROUPS_HELD * 4096) == 0
    assert 0 <= need - pinned.GROUPS_HELD * group_bytes < pinned.GROUPS_HELD * 4096


@given(data=st.data(), pages=st.integers(1, 50))
def test_next_group_finds_a_hole_wherever_the_one_in_use_lies(data: st.DataObject, pages: int) -> None:
    """The reason for GROUPS_HELD: a lease anywhere leaves a hole for one more."""
    total = pinned.GROUPS_HELD * pages
    used = [False] * total
    nbytes = data.draw(st.integers(1, pages))
    at = data.draw(st.integers(0, total - nbytes))
    used[at : at + nbytes] = [True] * nbytes
    holes = "".join("x" if page else "." for page in used).split("x")
    assert max(map(len, holes)) >= pages


def test_sum_is_the_larger_of_two_that_take_turns_and_the_access_buffer() -> None:
    assert PinnedBudget(10 * MIB, 6 * MIB, 4 * MIB).nbytes == 14 * MIB
    assert PinnedBudget(6 * MIB, 10 * MIB, 4 * MIB).nbytes == 14 * MIB


@given(gather=st.integers(0, 1 << 34), pipeline=st.integers(0, 1 << 34), pinned_bytes=st.integers(0, 1 << 35))
def test_what_is_accepted_fits_and_what_is_refused_names_what_would_do(
    gather: int, pipeline: int, pinned_bytes: int
) -> None:
    need = PinnedBudget(gather, pipeline)
    if need.nbytes <= pinned_bytes:
        check_budget(pinned_bytes, need, "layers.0", gather // pinned.GROUPS_HELD)
        return
    with pytest.raises(BudgetError) as caught:
        check_budget(pinned_bytes, need, "layers.0", gather // pinned.GROUPS_HELD)
    numbers = [int(number) for number in re.findall(r"(\d+) bytes", str(caught.value))]
    assert numbers in ([need.nbytes], [gather + need.access_bytes])


def test_group_too_large_is_named() -> None:
    with pytest.raises(BudgetError, match=r"8\.00 MiB is too small for group layers\.7 of 1\.00 GiB.*smaller modules"):
        check_budget(8 * MIB, PinnedBudget(5 * GIB, 0), "layers.7", GIB)


def test_sub_groups_too_large_are_told_apart() -> None:
    with pytest.raises(
        BudgetError, match=r"too small for 3 sub-groups of 10\.00 MiB and a group.*smaller sub_group_size"
    ):
        check_budget(8 * MIB, PinnedBudget(MIB, 31 * MIB), "layers.7", MIB)


def test_pool_beyond_the_ranks_share_of_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda: 8 * GIB)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert plan.memory_of_rank() == 8 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert plan.memory_of_rank() == 2 * GIB
    monkeypatch.setattr(plan, "absent_bytes", lambda: 4 * GIB)  # of a pool that was just made
    assert plan.memory_of_rank() == GIB
    check_available(2 * GIB, 2 * GIB)
    with pytest.raises(
        BudgetError, match=r"3\.00 GiB is more than the 2\.00 GiB of memory that are available to each of the 4 ranks"
    ):
        check_available(3 * GIB, 2 * GIB)


def test_where_nobody_says_what_is_available_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda: None)
    check_available(1 << 60, plan.memory_of_rank())


def test_cache_is_a_line_of_the_sum_and_of_the_errors() -> None:
    assert PinnedBudget(10 * MIB, 6 * MIB, 4 * MIB, cache_bytes=3 * MIB).nbytes == 17 * MIB
    for gather, pipeline in ((20 * MIB, 0), (0, 20 * MIB)):
        need = PinnedBudget(gather, pipeline, cache_bytes=3 * MIB)
        check_budget(27 * MIB, need, "layers.7", MIB)
        with pytest.raises(
            BudgetError, match=rf"with the 3\.00 MiB that stay in it .host_cache_bytes.* {27 * MIB} bytes"
        ):
            check_budget(27 * MIB - 1, need, "layers.7", MIB)
