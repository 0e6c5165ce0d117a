"""What looking ahead promises: the soonest groups first, each once, and never more bytes than may be held."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.lookahead import groups_to_stage, plan_look_ahead

group_bytes = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(data=st.data(), sizes=group_bytes, look_ahead_bytes=st.integers(0, 200))
def test_what_is_chosen_is_the_longest_beginning_that_fits(
    data: st.DataObject, sizes: list[int], look_ahead_bytes: int
) -> None:
    upcoming = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    distinct = list(dict.fromkeys(upcoming))
    chosen = groups_to_stage(upcoming, sizes, look_ahead_bytes)
    assert chosen == distinct[: len(chosen)]
    assert sum(sizes[group] for group in chosen) <= look_ahead_bytes or len(chosen) == 1  # the next one always
    if len(chosen) < len(distinct):
        assert sum(sizes[group] for group in distinct[: len(chosen) + 1]) > look_ahead_bytes


def test_a_group_that_does_not_fit_is_not_passed_over() -> None:
    assert groups_to_stage([0, 1, 2], [10, 100, 10], 50) == [0]


def test_a_group_used_twice_is_paid_once() -> None:
    assert groups_to_stage([0, 1, 0, 1, 2], [10, 10, 10], 30) == [0, 1, 2]


def test_what_comes_after_the_limit_is_not_looked_at() -> None:
    assert groups_to_stage(count(), range(1, 1000), 6) == [0, 1, 2]


def test_the_next_group_is_chosen_even_where_nothing_fits() -> None:
    assert groups_to_stage([2, 1], [5, 5, 5], 0) == [2]


def test_without_a_prediction_nothing_is_chosen() -> None:
    assert groups_to_stage([], [1], 100) == []


@given(data=st.data(), sizes=group_bytes, look_ahead_bytes=st.integers(0, 200))
def test_a_planned_step_chooses_at_every_place_what_would_be_chosen_there(
    data: st.DataObject, sizes: list[int], look_ahead_bytes: int
) -> None:
    uses = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    ends = plan_look_ahead(uses, sizes, look_ahead_bytes)
    assert len(ends) == len(uses) + 1
    assert ends == sorted(ends)
    for place, end in enumerate(ends):
        ahead = list(dict.fromkeys(uses[place:end]))
        assert ahead == groups_to_stage(uses[place:], sizes, look_ahead_bytes)
