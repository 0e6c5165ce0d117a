"""What the simulator promises: never faster than the bounds, no byte lost, more bandwidth never hurts, and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import BudgetError
from infinity.plan.estimate import Part, step_bytes
from infinity.plan.machine import DriveSpeed
from infinity.plan.resources import Simulated
from infinity.plan.simulator import simulate
from infinity.plan.step import Pause, Program, Step, SubGroup, Use
from infinity.schedule.scheme import Scheme

B = 10**9
TOLERANCE = 1e-6


def step_of(program: Program, group_bytes: list[int], **options: Any) -> Step:
    return Step(program=program, group_bytes=group_bytes, **options)


def forward_and_backward(
    group_bytes: list[int], *, look_ahead_bytes: int, pool_bytes: int, overlap_gathers: bool = True, **of_use: Any
) -> Step:
    """Every group once in order and once back, read for each where it isn't staged any more."""
    order = [*range(len(group_bytes)), *reversed(range(len(group_bytes)))]
    uses = [Use(group, read_bytes=group_bytes[group], **of_use) for group in order]
    return step_of(
        uses,
        group_bytes,
        look_ahead_bytes=look_ahead_bytes,
        pool_bytes=pool_bytes,
        overlap_gathers=overlap_gathers,
    )


def updates_of(step: Step) -> list[SubGroup]:
    return [item for item in step.program if isinstance(item, SubGroup)]


def uses_of(step: Step) -> list[Use]:
    return [item for item in step.program if isinstance(item, Use)]


rates = st.floats(1.0, 1000.0)
mixed_shares = st.one_of(st.none(), st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)))


@st.composite
def drives(draw: st.DrawFn) -> DriveSpeed:
    read, write, both = draw(rates), draw(rates), draw(mixed_shares)
    return DriveSpeed(read, write, None if both is None else (both[0] * read, both[1] * write))


links = st.one_of(st.just(math.inf), rates)
seconds = st.one_of(st.just(0.0), st.floats(0.001, 10.0))


@st.composite
def sub_groups(draw: st.DrawFn, **of_update: int) -> list[SubGroup]:
    numbers = st.tuples(st.integers(0, 200), st.integers(0, 200), seconds, st.integers(0, 100))
    return [
        SubGroup(read, write, read + write, update, copy, **of_update)
        for read, write, update, copy in draw(st.lists(numbers, max_size=3))
    ]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Uses, each with updates before or after it or neither; then a pause, and updates after it."""
    group_bytes = draw(st.lists(st.integers(0, 200), min_size=1, max_size=6))
    program: list[Use | SubGroup | Pause] = []
    for group in draw(st.lists(st.integers(0, len(group_bytes) - 1), max_size=10)):
        if draw(st.booleans()):
            program += draw(sub_groups(into=group))
        use = Use(
            group,
            read_bytes=draw(st.integers(0, group_bytes[group])),
            compute_bytes=draw(st.integers(0, 100)),
            gather_seconds=draw(seconds),
            exchange_seconds=draw(seconds),
            compute_seconds=draw(seconds),
            reduce_seconds=draw(seconds),
            gradient_bytes=draw(st.integers(0, 100)),
            live_bytes=draw(st.integers(0, 100)),
        )
        program.append(use)
        if draw(st.booleans()):
            program += draw(sub_groups(after=len(program) - 1))
    if draw(st.booleans()):
        program += [Pause(draw(seconds), draw(st.booleans())), *draw(sub_groups()), *draw(sub_groups())]
    largest = max((item.lease_bytes for item in program if isinstance(item, SubGroup)), default=0)
    return step_of(
        program,
        group_bytes,
        look_ahead_bytes=draw(st.integers(0, 600)),
        sub_groups_ahead=draw(st.integers(1, 4)),
        pool_bytes=draw(st.integers(0, 1000)) + 3 * largest + 3 * max(group_bytes),
        overlap_gathers=draw(st.booleans()),
    )


def thread_of(step: Step) -> float:
    """Seconds for which the training thread is busy with other work than computation."""
    return sum(
        item.seconds if isinstance(item, Pause) else item.update_seconds
        for item in step.program
        if not isinstance(item, Use)
    )


@given(step=steps(), drive=drives(), link=links)
def test_no_step_is_faster_than_its_lower_bounds(step: Step, drive: DriveSpeed, link: float) -> None:
    result = simulate(step, drive, link)
    lower_bounds = [
        sum(use.exchange_seconds + use.compute_seconds for use in uses_of(step)),
        thread_of(step),
        drive.lower_bound_seconds(result.read_bytes, result.written_bytes),
        sum(use.gather_seconds + use.exchange_seconds + use.reduce_seconds for use in uses_of(step)),
        result.to_device_bytes / link,
        result.to_host_bytes / link,
    ]
    assert result.seconds >= max(lower_bounds) * (1 - TOLERANCE)


@given(step=steps(), drive=drives(), link=links)
def test_every_byte_is_moved_and_the_pool_is_never_overdrawn(step: Step, drive: DriveSpeed, link: float) -> None:
    result = simulate(step, drive, link)
    assert result.written_bytes == sum(sub.write_bytes for sub in updates_of(step))
    assert result.to_device_bytes == sum(use.compute_bytes for use in uses_of(step)) + sum(
        sub.compute_bytes for sub in updates_of(step)
    )
    assert result.to_host_bytes == sum(use.gradient_bytes for use in uses_of(step))
    stepped = sum(sub.read_bytes for sub in updates_of(step))
    assert result.read_bytes >= stepped
    assert result.pool_bytes_peak <= step.pool_bytes
    live = [use.live_bytes for use in uses_of(step)]
    assert max(live, default=0) <= result.live_bytes_peak <= sum(live)
    assert 0 <= result.stall_seconds <= result.seconds
    assert 0 <= result.gradient_seconds <= result.seconds


@given(step=steps(), drive=drives(), link=links)
def test_a_resource_does_one_thing_at_a_time_and_the_drive_moves_what_it_says(
    step: Step, drive: DriveSpeed, link: float
) -> None:
    result = simulate(step, drive, link)
    by_resource: dict[str, list[tuple[float, float]]] = {}
    for resource, _, start, end in result.timeline:
        assert 0 <= start <= end <= result.seconds
        by_resource.setdefault(resource, []).append((start, end))
    for intervals in by_resource.values():
        for one, other in pairwise(sorted(intervals)):
            assert other[0] >= one[1] * (1 - TOLERANCE)
    if drive.mixed is None:
        expected = {
            "read": result.read_bytes / drive.read_bytes_per_s,
            "write": result.written_bytes / drive.write_bytes_per_s,
        }
        for way, seconds in expected.items():
            busy = sum(end - start for start, end in by_resource.get(way, []))
            assert busy == pytest.approx(seconds, rel=1e-6, abs=1e-9)


@given(step=steps(), drive=drives(), link=links, factor=st.floats(1.0, 10.0))
def test_a_machine_that_is_faster_in_everything_is_faster_by_as_much(
    step: Step, drive: DriveSpeed, link: float, factor: float
) -> None:
    """In everything at once: one part alone that is quicker may delay another, as in any schedule."""

    def quicker(seconds: float) -> float:
        return seconds / factor

    both = drive.mixed
    faster = DriveSpeed(
        drive.read_bytes_per_s * factor,
        drive.write_bytes_per_s * factor,
        None if both is None else (both[0] * factor, both[1] * factor),
    )
    program = [
        item._replace(
            gather_seconds=quicker(item.gather_seconds),
            exchange_seconds=quicker(item.exchange_seconds),
            compute_seconds=quicker(item.compute_seconds),
            reduce_seconds=quicker(item.reduce_seconds),
        )
        if isinstance(item, Use)
        else item._replace(update_seconds=quicker(item.update_seconds))
        if isinstance(item, SubGroup)
        else item._replace(seconds=quicker(item.seconds))
        for item in step.program
    ]
    quick = replace(step, program=program)
    slow_seconds = simulate(step, drive, link).seconds
    assert simulate(quick, faster, link * factor).seconds == pytest.approx(slow_seconds / factor, rel=1e-4, abs=1e-6)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    read=rates,
    factor=st.floats(1.0, 20.0),
    compute=st.floats(0.0, 5.0),
)
def test_a_faster_drive_alone_is_never_slower_where_only_reads_compete(
    sizes: list[int], read: float, factor: float, compute: float
) -> None:
    step = forward_and_backward(sizes, look_ahead_bytes=0, pool_bytes=5 * max(sizes), compute_seconds=compute)
    slow = simulate(step, DriveSpeed(read, 1.0)).seconds
    fast = simulate(step, DriveSpeed(read * factor, 1.0)).seconds
    assert fast <= slow * (1 + TOLERANCE)


def test_reads_hide_behind_compute_but_for_the_first() -> None:
    step = forward_and_backward([10] * 4, look_ahead_bytes=10, pool_bytes=50, compute_seconds=3.0)
    result = simulate(step, DriveSpeed(10.0, 1.0))
    assert result.seconds == pytest.approx(1 + 8 * 3)
    assert result.stall_seconds == pytest.approx(1)
    assert result.read_bytes == 70  # the last group of the forward is the first of the backward


def test_compute_hides_behind_reads_but_for_the_last() -> None:
    step = forward_and_backward([10] * 4, look_ahead_bytes=10, pool_bytes=50, compute_seconds=0.25)
    result = simulate(step, DriveSpeed(10.0, 1.0))
    assert result.seconds == pytest.approx(7 * 1 + 0.25)


def test_what_fits_is_read_once() -> None:
    step = forward_and_backward([10] * 4, look_ahead_bytes=40, pool_bytes=60, compute_seconds=1.0)
    assert simulate(step, DriveSpeed(10.0, 1.0)).read_bytes == 40


def test_gathers_that_cannot_overlap_add_up() -> None:
    step = forward_and_backward(
        [10] * 3, look_ahead_bytes=100, pool_bytes=100, compute_seconds=2.0, gather_seconds=1.0, reduce_seconds=0.5
    )
    alone = simulate(replace(step, overlap_gathers=False), DriveSpeed(1e9, 1.0))
    assert alone.seconds == pytest.approx(6 * 3.5)
    overlapped = simulate(step, DriveSpeed(1e9, 1.0))
    assert overlapped.seconds == pytest.approx(1 + 6 * 2 + 0.5)


def test_the_three_deep_pipeline_takes_its_slowest_part() -> None:
    program = [Pause(), *[SubGroup(12, 14, 14, 0.5)] * 50]
    step = step_of(program, [], pool_bytes=4 * 14)
    in_turns = simulate(step, DriveSpeed(12.0, 14.0))
    assert in_turns.seconds == pytest.approx(50 * 2 + 0.5, rel=0.02)
    overlapped = simulate(step, DriveSpeed(12.0, 14.0, mixed=(12.0, 14.0)))
    assert overlapped.seconds == pytest.approx(50 * 1 + 1.5, rel=0.02)
    slow_update = replace(step, program=[Pause(), *[SubGroup(12, 14, 14, 5.0)] * 50])
    assert simulate(slow_update, DriveSpeed(12.0, 14.0)).seconds == pytest.approx(1 + 50 * 5 + 1)


@pytest.mark.parametrize(("reads_go_on", "seconds"), [(False, 10 + 4 + 0.5 + 1), (True, 10 + 0.5 + 4)])
def test_what_the_pool_holds_is_read_before_the_pause(reads_go_on: bool, seconds: float) -> None:
    """Ten uses that read nothing, of a second each; then four updates of half a second, each read and written in one. Where two
    are read before, the writes are what takes longest; else the reads."""
    program = [*[Use(0, compute_seconds=1.0)] * 10, Pause(reads_go_on=reads_go_on), *[SubGroup(10, 10, 10, 0.5)] * 4]
    step = step_of(program, [0], look_ahead_bytes=20, pool_bytes=30, overlap_gathers=False)
    result = simulate(step, DriveSpeed(10.0, 10.0, mixed=(10.0, 10.0)))
    before = [interval for interval in result.timeline if interval.resource == "read" and interval.end <= 10]
    assert len(before) == 2 * reads_go_on
    assert result.read_bytes == 40
    assert result.seconds == pytest.approx(seconds)


def test_a_demand_interrupts_a_write() -> None:
    """The first is written from 2 s on, when the second has been read; the third is demanded half a second later."""
    subs = [SubGroup(10, 100, 10, 0.5), SubGroup(10, 0, 10, 0.5), SubGroup(10, 0, 10, 0.5)]
    result = simulate(step_of([Pause(), *subs], [], pool_bytes=30), DriveSpeed(10.0, 10.0))
    reads = [interval for interval in result.timeline if interval.resource == "read"]
    writes = [interval for interval in result.timeline if interval.resource == "write"]
    assert max(interval.end for interval in reads) == pytest.approx(3.5)
    assert [edge for one in writes for edge in (one.start, one.end)] == pytest.approx([2, 2.5, 3.5, 13])
    assert result.seconds == pytest.approx(13)


def test_updates_in_the_forward_hide_their_transfers_behind_compute() -> None:
    """Each use takes 3 s, its update 1 s of the thread; reading and writing a sub-group takes 2 s."""
    program: list[Use | SubGroup | Pause] = []
    for group in range(10):
        program += [SubGroup(10, 10, 20, 1.0, into=group), Use(group, compute_seconds=3.0)]
    step = step_of(program, [5] * 10, look_ahead_bytes=30, pool_bytes=100, overlap_gathers=False)
    result = simulate(step, DriveSpeed(10.0, 10.0))
    assert result.read_bytes == result.written_bytes == 100
    assert result.seconds == pytest.approx(1 + 10 * (1 + 3))
    assert result.stall_seconds == pytest.approx(1)
    overlapped = simulate(replace(step, overlap_gathers=True), DriveSpeed(10.0, 10.0))
    assert overlapped.seconds == pytest.approx(1 + 1 + 10 * 3)  # the thread updates while the device computes


def test_updates_in_the_backward_wait_for_their_gradients_and_not_for_all() -> None:
    program: list[Use | SubGroup | Pause] = []
    for group in range(10):
        program += [Use(group, compute_seconds=3.0, gradient_bytes=10), SubGroup(10, 10, 20, 1.0, after=2 * group)]
    step = step_of(program, [0] * 10, look_ahead_bytes=30, pool_bytes=100)
    result = simulate(step, DriveSpeed(10.0, 10.0), link_bytes_per_s=100.0)
    updates = [interval for interval in result.timeline if interval.resource == "update"]
    copies = [interval for interval in result.timeline if interval.resource == "to_host"]
    assert [one.start for one in updates] == pytest.approx([one.end for one in copies])
    assert updates[0].start == pytest.approx(3.1)
    assert result.stall_seconds == 0


def test_what_is_wanted_soon_is_not_dropped_while_a_write_gives_room() -> None:
    """The pool holds four: two wait for their updates when the third use asks for the room that two writes take."""
    program: list[Use | SubGroup | Pause] = []
    for group in range(8):
        program += [SubGroup(10, 100, 20, 0.1, into=group), Use(group, compute_seconds=0.1)]
    step = step_of(program, [10] * 8, look_ahead_bytes=60, pool_bytes=90)
    result = simulate(step, DriveSpeed(10.0, 10.0))
    assert result.read_bytes == 80


def test_a_copy_that_is_made_keeps_its_room_until_it_is_used() -> None:
    """The pool holds the group and one sub-group: what was read ahead for later uses goes first."""
    program = [*[SubGroup(10, 10, 20, 1.0, into=0)] * 4, Use(0), Use(1, read_bytes=10)]
    step = step_of(program, [10, 10], look_ahead_bytes=1000, pool_bytes=30)
    result = simulate(step, DriveSpeed(10.0, 10.0))
    assert result.pool_bytes_peak == 30
    assert result.written_bytes == 40
    with pytest.raises(BudgetError, match="sub-groups"):
        simulate(replace(step, pool_bytes=29), DriveSpeed(10.0, 10.0))


def test_seventy_billion_parameters() -> None:
    """1120 GB read, 980 GB written; on drives of 48/26 GB/s that is 61 s in turns, and 37.7 s where they overlap fully.

    The gathers come before the updates and can't overlap with their writes, which the second figure leaves out of account.
    """
    groups = 80
    numel = 70 * B // groups
    order = [*range(groups), *reversed(range(groups))]
    program = [
        *(Use(group, read_bytes=2 * numel) for group in order),
        Pause(),
        *[SubGroup(12 * numel, 14 * numel, 14 * numel)] * groups,
    ]
    step = step_of(program, [2 * numel] * groups, sub_groups_ahead=8, pool_bytes=64 * 16 * numel)
    read, written = step_bytes(Part(70 * B), Scheme("full", "step"))
    assert (read, written) == (1120 * B, 980 * B)
    in_turns = simulate(step, DriveSpeed(48 * B, 26 * B))
    assert in_turns.read_bytes == pytest.approx(read, rel=0.015)
    assert in_turns.written_bytes == written
    assert in_turns.seconds == pytest.approx(61.0, rel=0.01)
    overlapped = DriveSpeed(48 * B, 26 * B, mixed=(48 * B, 26 * B))
    assert simulate(step, overlapped).seconds == pytest.approx(37.7 + 280 / 48, rel=0.02)
    assert overlapped.lower_bound_seconds(read, written) == pytest.approx(37.7, abs=0.05)


@pytest.mark.parametrize("of_groups", [True, False])
def test_a_pool_too_small_is_named_and_not_waited_for(of_groups: bool) -> None:
    if of_groups:
        step = forward_and_backward([100], look_ahead_bytes=0, pool_bytes=50)
    else:
        step = step_of([Pause(), SubGroup(100, 100, 100)], [], pool_bytes=50)
    with pytest.raises(BudgetError, match=r"50 bytes can't hold the .*groups.* 100 bytes: raise the pinned budget"):
        simulate(step, DriveSpeed(1.0, 1.0))


def test_an_empty_step_takes_no_time() -> None:
    assert simulate(step_of([], [], pool_bytes=0), DriveSpeed(1.0, 1.0)) == Simulated()


def test_ten_thousand_groups_are_simulated_use_by_use() -> None:
    step = forward_and_backward([10] * 10_000, look_ahead_bytes=50, pool_bytes=100, compute_seconds=2.0)
    result = simulate(step, DriveSpeed(10.0, 1.0))
    assert result.seconds == pytest.approx(1 + 20_000 * 2)
    assert sum(interval.resource == "compute" for interval in result.timeline) == 20_000
