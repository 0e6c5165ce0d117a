"""What the trace promises: a cycle that was seen once is predicted, a change costs one cycle, and nothing ever fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.readahead import Trace

cycles = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def follow(trace: Trace, cycle: list[int]) -> list[bool]:
    """Use the groups of one cycle; for each, whether it was the one predicted."""
    hits = []
    for group in cycle:
        hits.append(next(trace.upcoming(), None) == group)
        trace.use(group)
    trace.end_cycle()
    return hits


def test_nothing_is_predicted_before_a_whole_cycle_was_seen() -> None:
    trace = Trace()
    for group in (0, 1, 2, 1):
        assert not trace.cycle
        assert list(trace.upcoming()) == []
        trace.use(group)
    trace.end_cycle()
    assert trace.cycle
    assert trace.mispredictions == 0
    assert list(trace.upcoming()) == [0, 1, 2, 1]


@given(cycles)
def test_same_cycle_again_is_predicted_use_by_use(cycle: list[int]) -> None:
    trace = Trace()
    follow(trace, cycle)
    for _ in range(3):
        assert follow(trace, cycle) == [True] * len(cycle)
    assert trace.mispredictions == 0


@given(cycles)
def test_upcoming_is_the_rest_of_this_cycle_and_if_asked_one_more(cycle: list[int]) -> None:
    trace = Trace()
    follow(trace, cycle)
    for done, group in enumerate(cycle):
        assert list(trace.upcoming()) == cycle[done:]
        assert list(trace.upcoming(into_next=True)) == cycle[done:] + cycle
        trace.use(group)
    assert list(trace.upcoming()) == []
    assert list(trace.upcoming(into_next=True)) == cycle


@given(before=cycles, disturbed=cycles, after=cycles)
def test_trace_heals_within_one_cycle(before: list[int], disturbed: list[int], after: list[int]) -> None:
    trace = Trace()
    follow(trace, before)
    follow(trace, disturbed)
    follow(trace, after)
    mispredictions = trace.mispredictions
    assert follow(trace, after) == [True] * len(after)
    assert trace.mispredictions == mispredictions


@given(first=cycles, second=cycles)
def test_a_change_of_path_is_counted_and_the_same_path_is_not(first: list[int], second: list[int]) -> None:
    trace = Trace()
    follow(trace, first)
    follow(trace, second)
    assert (trace.mispredictions > 0) == (first != second)


def test_a_use_left_out_costs_one_misprediction_and_the_place_is_found_again() -> None:
    trace = Trace()
    follow(trace, [0, 1, 2, 3, 4])
    assert follow(trace, [0, 1, 3, 4]) == [True, True, False, True]
    assert trace.mispredictions == 1


def test_an_unknown_use_is_recorded_and_the_place_is_kept() -> None:
    trace = Trace()
    follow(trace, [0, 1, 2])
    assert follow(trace, [0, 9, 1, 2]) == [True, False, True, True]
    assert trace.mispredictions == 1
    assert follow(trace, [0, 9, 1, 2]) == [True] * 4


def test_a_cycle_that_stops_early_is_a_misprediction() -> None:
    trace = Trace()
    follow(trace, [0, 1, 2])
    assert follow(trace, [0, 1]) == [True, True]
    assert trace.mispredictions == 1


def test_an_empty_cycle_changes_nothing() -> None:
    trace = Trace()
    trace.end_cycle()
    assert not trace.cycle
    follow(trace, [0, 1, 2])
    trace.end_cycle()
    assert list(trace.upcoming()) == [0, 1, 2]
    assert trace.mispredictions == 0


def test_an_interruption_excuses_the_cycle_it_falls_in_and_the_next() -> None:
    trace = Trace()
    told = []
    for path, interrupted in (([0, 1], False), ([1, 0], False), ([0, 1], True), ([1, 0], False), ([0, 1], False)):
        if interrupted:
            trace.interrupt()
        for group in path:
            trace.use(group)
        told.append(trace.end_cycle())
    assert told == [False, True, False, False, True]
    assert trace.mispredictions > 0


def interrupted(trace: Trace, path: list[int]) -> None:
    trace.interrupt()
    for group in path:
        trace.use(group)
    assert not trace.end_cycle()


def test_an_interrupted_cycle_is_an_exception_until_it_comes_again() -> None:
    trace = Trace()
    follow(trace, [0, 1, 2])
    interrupted(trace, [1, 2])
    assert list(trace.upcoming()) == [0, 1, 2]
    assert follow(trace, [0, 1, 2]) == [True] * 3
    interrupted(trace, [1, 2])
    interrupted(trace, [1, 2])
    assert list(trace.upcoming()) == [1, 2]


@given(before=cycles, after=cycles)
def test_an_interrupted_trace_heals_within_two_cycles(before: list[int], after: list[int]) -> None:
    trace = Trace()
    follow(trace, before)
    interrupted(trace, after)
    interrupted(trace, after)
    assert follow(trace, after) == [True] * len(after)


def test_used_is_about_the_cycle_that_goes_on() -> None:
    trace = Trace()
    trace.use(3)
    assert trace.used(3)
    assert not trace.used(4)
    trace.end_cycle()
    assert not trace.used(3)


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=60))
def test_whatever_comes_is_taken(events: list[int | None]) -> None:
    """None ends a cycle. Nothing raises, and what is predicted was used in the cycle that ended last."""
    trace = Trace()
    recorded: list[int] = []
    last: list[int] = []
    for event in events:
        if event is None:
            trace.end_cycle()
            last, recorded = recorded or last, []
        else:
            trace.use(event)
            recorded.append(event)
        ahead = list(trace.upcoming(into_next=True))
        assert ahead[len(ahead) - len(last) :] == last
        rest = ahead[: len(ahead) - len(last)]
        assert rest == last[len(last) - len(rest) :]
        assert bool(trace.cycle) == bool(last)
        assert {group for group in range(5) if trace.used(group)} == set(recorded)
