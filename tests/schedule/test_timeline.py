"""What a timeline promises: lanes in which nothing overlaps, and figures that add up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.timeline import (
    Interval,
    Moved,
    common,
    compute_between,
    measured_events,
    one_after_another,
    summarize,
    total,
    united,
    without,
)

ticks = st.integers(0, 40)
spans = st.lists(st.tuples(ticks, ticks).map(lambda ends: (float(min(ends)), float(max(ends)))), max_size=12)


def inside(spans: list[tuple[float, float]], place: float) -> bool:
    return any(start < place < end for start, end in spans)


@given(spans, spans)
def test_spans_are_sets_of_instants(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> None:
    a, b = united(left), united(right)
    assert all(one[1] < other[0] for one, other in pairwise(a))
    for place in (tick + 0.5 for tick in range(40)):
        assert inside(a, place) == inside(left, place)
        assert inside(common(a, b), place) == (inside(left, place) and inside(right, place))
        assert inside(without(a, b), place) == (inside(left, place) and not inside(right, place))


@given(spans)
def test_a_lane_holds_one_transfer_at_a_time_and_is_busy_when_the_drive_was(found: list[tuple[float, float]]) -> None:
    moved = [Moved(0, False, str(k), start, end, k) for k, (start, end) in enumerate(found)]
    laid = one_after_another(moved)
    assert {each.name: each.nbytes for each in laid} == {each.name: each.nbytes for each in moved}
    assert all(0 <= each.start <= each.end for each in laid)
    assert all(one.end <= other.start for one, other in pairwise(laid))
    before, after = (united((each.start, each.end) for each in some) for some in (moved, laid))
    assert total(before) == total(after) == total(common(before, after))


def test_what_nobody_noted_is_compute_of_the_part_it_lies_in() -> None:
    noted = [Interval("step", "forward", 1, 4), Interval("step", "backward", 4, 8)]
    noted += [Interval("gather", "g", 2, 3), Interval("update", "u", 2.5, 3), Interval("stall", "s", 3.5, 5)]
    assert compute_between(noted, 9) == [
        Interval("compute", "between", 0, 1),
        Interval("compute", "forward", 1, 2),
        Interval("compute", "forward", 3, 3.5),
        Interval("compute", "backward", 5, 8),
        Interval("compute", "between", 8, 9),
    ]


def test_without_parts_it_is_just_compute() -> None:
    assert compute_between([Interval("stall", "s", 0, 1)], 3) == [Interval("compute", "compute", 1, 3)]


def test_io_is_hidden_behind_work_or_waited_for() -> None:
    noted = [Interval("gather", "g", 0, 6), Interval("stall", "s", 1, 3), Interval("update", "u", 3, 5)]
    moved = [Moved(0, False, "a", 0, 2, 10), Moved(0, True, "b", 1, 4, 20), Moved(1, False, "a", 7, 8, 5)]
    found = summarize(noted, moved, seconds=10, steps=1, drives=2)
    assert (found.hidden_io_seconds, found.exposed_io_seconds, found.stall_seconds) == (3, 2, 2)
    assert (found.gather_seconds, found.update_seconds, found.compute_seconds) == (2, 2, 4)
    first, second = found.drives
    assert (first.read_bytes, first.written_bytes) == (10, 20)
    assert (first.read_share, first.write_share, first.busy_share) == pytest.approx((0.2, 0.3, 0.4))
    assert (second.read_bytes, second.written_bytes, second.busy_share) == (5, 0, pytest.approx(0.1))
    assert list(found.in_words()) == ["drive 0 busy", "drive 1 busy", "I/O hidden, exposed"]


def test_the_events_have_a_row_per_drive_and_direction_first() -> None:
    moved = [Moved(0, True, "b", 1, 4, 20), Moved(0, False, "a", 0, 2, 10, waited=0.5)]
    events = measured_events([Interval("stall", "s", 1, 3)], moved, process=3)
    rows = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert rows == ["drive 0 read", "drive 0 write", "stall"]
    assert {each["pid"] for each in events} == {3}
    read = next(each for each in events if each["name"] == "a")
    assert (read["ts"], read["dur"], read["args"]) == (0, 2e6, {"bytes": 10, "queued_ms": 500})
