"""What looking ahead promises: the soonest groups first, each once, never more bytes than may be held; and from forward to
backward no way of holding groups reads less."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, combinations, count
from typing import Any

from chosen_anew import groups_to_stage
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.schedule.readahead import LookAhead, ReadAhead, Use, cycle_read_bytes, in_turn, plan_look_ahead

group_bytes = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def read_bytes(cycle: Sequence[int], unit_bytes: Sequence[int], reads: Sequence[int], held: int) -> int:
    """Where each use of a unit reads the same, and as much may be held after each."""
    found = cycle_read_bytes(cycle, [reads[unit] for unit in cycle], (), (unit_bytes, held))
    assert found == read_bytes_choosing_anew(cycle, unit_bytes, reads, held)
    return found


def read_bytes_choosing_anew(cycle: Sequence[int], unit_bytes: Sequence[int], reads: Sequence[int], held: int) -> int:
    """The same, as it is defined."""
    total = 0
    stayed: set[int] = set()
    for place, unit in enumerate(cycle):
        total += reads[unit] if unit not in stayed else 0
        stayed = {*stayed, unit} & {*groups_to_stage(cycle[place + 1 :], unit_bytes, held)}
    return total


def chosen_of(upcoming: Iterable[int], sizes: Sequence[int], bytes_max: int) -> list[int]:
    ahead = LookAhead((Use(float(place), unit) for place, unit in enumerate(upcoming)), (sizes, bytes_max))
    ahead.fit()
    return [*ahead]


@given(data=st.data(), sizes=group_bytes, look_ahead_bytes=st.integers(0, 200))
def test_what_is_chosen_is_the_longest_beginning_that_fits(
    data: st.DataObject, sizes: list[int], look_ahead_bytes: int
) -> None:
    upcoming = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    distinct = list(dict.fromkeys(upcoming))
    chosen = chosen_of(upcoming, sizes, look_ahead_bytes)
    assert chosen == distinct[: len(chosen)]
    assert sum(sizes[group] for group in chosen) <= look_ahead_bytes or len(chosen) == 1  # the next one always
    if len(chosen) < len(distinct):
        assert sum(sizes[group] for group in distinct[: len(chosen) + 1]) > look_ahead_bytes


def test_a_group_that_does_not_fit_is_not_passed_over() -> None:
    assert chosen_of([0, 1, 2], [10, 100, 10], 50) == [0]


def test_a_group_used_twice_is_paid_once() -> None:
    assert chosen_of([0, 1, 0, 1, 2], [10, 10, 10], 30) == [0, 1, 2]


def test_what_comes_after_the_limit_is_not_looked_at() -> None:
    assert chosen_of(count(), range(1, 1000), 6) == [0, 1, 2]


def test_the_next_group_is_chosen_even_where_nothing_fits() -> None:
    assert chosen_of([2, 1], [5, 5, 5], 0) == [2]


def test_without_a_prediction_nothing_is_chosen() -> None:
    assert chosen_of([], [1], 100) == []


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


def use_at(place: float, unit: int) -> Use[int]:
    """~unit stands for a unit that is needed until it is done."""
    return Use(place, max(unit, ~unit), until_done=unit < 0)


class Followed:
    """What comes of some units, and a look-ahead that follows it while uses pass and updates are done."""

    def __init__(self, entries: list[tuple[int, int]], limits: Sequence[tuple[Sequence[int], int]]) -> None:
        self.entries, self.limits = sorted(entries, key=lambda entry: entry[0]), limits
        self.now: list[int] = []
        self.done: set[int] = set()
        self.pulled = 0
        self.ahead = LookAhead(self.coming(), *limits)
        self.place = 0

    def coming(self) -> Any:
        for place, unit in list(self.entries):
            self.pulled += 1
            yield use_at(float(place), unit)

    def chosen_anew(self) -> list[int]:
        rest = [*self.now, *(unit for place, unit in self.entries if place >= self.place)]
        chosen: Sequence[int] = [max(unit, ~unit) for unit in rest if unit >= 0 or ~unit not in self.done]
        for unit_bytes, bytes_max in self.limits:
            chosen = groups_to_stage(chosen, unit_bytes, bytes_max)
        return [*chosen]


@settings(max_examples=400)
@given(data=st.data(), sizes=group_bytes, bounds=st.tuples(st.integers(0, 200), st.integers(0, 200)))
def test_what_is_followed_is_what_would_be_chosen_anew(
    data: st.DataObject, sizes: list[int], bounds: tuple[int, int]
) -> None:
    """Whatever passes, is needed now or is done, and told of it is exactly what changed."""
    units = st.integers(-len(sizes), len(sizes) - 1)
    entries = data.draw(st.lists(st.tuples(st.integers(0, 8), units), max_size=25))
    others = data.draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)))
    followed = Followed(entries, [(sizes, bounds[0]), (others, bounds[1])])
    told: dict[int, int | None] = {}
    for event in data.draw(st.lists(st.sampled_from(["pass", "now", "done", "look"]), max_size=25)):
        if event == "pass":
            followed.place, followed.now = data.draw(st.integers(followed.place, 9)), []
            followed.ahead.advance(followed.place)
        elif event == "now":
            followed.now = data.draw(
                st.lists(units.filter(lambda unit: unit >= 0 or ~unit not in followed.done), max_size=4)
            )
            followed.ahead.advance(followed.place, [use_at(0, unit) for unit in followed.now])
        elif event == "done":
            unit = data.draw(st.integers(0, len(sizes) - 1))
            followed.done.add(unit)
            followed.ahead.done(unit)
        told |= {unit: followed.ahead.needed(unit) for unit in followed.ahead.fit()}
        assert list(followed.ahead) == followed.chosen_anew()
        assert {unit: needed for unit, needed in told.items() if needed is not None} == {
            unit: followed.ahead.needed(unit) for unit in followed.ahead
        }


def test_what_is_followed_is_looked_at_once() -> None:
    """And no farther than its bytes reach."""
    followed = Followed([(place, place) for place in range(1000)], [([1] * 1000, 100)])
    for place in range(1000):
        followed.ahead.advance(place)
        followed.ahead.fit()
        assert followed.pulled == min(place + 101, 1000)


def turns(groups: int, micro_batches: int) -> list[int]:
    """Forward and backward of so many micro-batches."""
    return [*range(groups), *reversed(range(groups))] * micro_batches


@given(groups=st.integers(1, 5), micro_batches=st.integers(1, 2), held=st.integers(1, 5))
def test_from_forward_to_backward_no_way_of_holding_groups_reads_less(
    groups: int, micro_batches: int, held: int
) -> None:
    cycle = turns(groups, micro_batches)
    ones = [1] * groups
    assert read_bytes(cycle, ones, ones, held) == fewest_reads(cycle, held)


def fewest_reads(cycle: Sequence[int], held: int) -> int:
    """Over all ways of holding up to `held` groups in addition to the one in use."""
    found: dict[frozenset[int], int] = {frozenset(): 0}
    for group in cycle:
        reached: dict[frozenset[int], int] = {}
        for here, reads in found.items():
            after = here | {group}
            keepable = chain.from_iterable(combinations(after, n) for n in range(min(held, len(after)) + 1))
            for kept in map(frozenset, keepable):
                reached[kept] = min(reached.get(kept, 10**9), reads + (group not in here))
        found = reached
    return min(found.values())


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8), data=st.data())
def test_what_is_lost_where_a_group_fits_in_part_is_less_than_that_group(sizes: list[int], data: st.DataObject) -> None:
    """Compared with the most that held bytes can spare: one for each byte held where the order turns round."""
    look_ahead_bytes = data.draw(st.integers(max(sizes), sum(sizes) + 10))
    spared = 2 * sum(sizes) - read_bytes(turns(len(sizes), 1), sizes, sizes, look_ahead_bytes)
    most = min(look_ahead_bytes, sum(sizes))
    assert most - max(sizes) < spared <= most


def test_what_is_read_may_be_less_than_what_is_held() -> None:
    """A group that is cached in part takes a whole lease."""
    assert read_bytes([0, 1, 1, 0], [10, 10], [4, 10], 0) == 4 + 10 + 4
    assert read_bytes([0, 1, 1, 0], [10, 10], [4, 10], 20) == 14
    assert read_bytes([], [10, 10], [4, 10], 20) == 0


# In time: see [Note: As early as the bytes allow]. A drive reads a byte in a moment; a use begins when its group is there and
# the use before it is over; a group takes room from the beginning of its read to the beginning of its use.


def begins_of_the_policy(sizes: Sequence[int], computes: Sequence[int], look_ahead_bytes: int) -> list[int]:
    """When each use begins if reads start in the order that `plan_look_ahead` gives, as early as it allows."""
    ends = plan_look_ahead(range(len(sizes)), sizes, look_ahead_bytes)
    begins: list[int] = []
    drive_free = 0
    for use, nbytes in enumerate(sizes):
        first = next(place for place, end in enumerate(ends) if end > use)  # so many uses have begun when it may start
        started = max(drive_free, begins[first - 1] if first else 0)
        drive_free = started + nbytes
        over = begins[-1] + computes[use - 1] if begins else 0
        begins.append(max(drive_free, over))
    return begins


def earliest_begins(sizes: Sequence[int], computes: Sequence[int], room: int, *, in_pieces: bool) -> list[int]:
    """For each use, the earliest begin over all ways to order and time the reads that never hold more than `room` bytes of
    groups whose use has not begun; the next group may always be read. `in_pieces`: byte by byte, by turns."""
    best = [10**9] * len(sizes)
    todo = [(0, tuple(0 for _ in sizes), 0, 0, -1)]
    """Moments: now, bytes read of each group, uses begun, when the last of them is over, and what is being read."""
    seen = set(todo)
    while todo:
        now, read, begun, over, reading = todo.pop()
        while begun < len(sizes) and over <= now and read[begun] == sizes[begun]:
            best[begun] = min(best[begun], now)
            over = now + computes[begun]
            begun += 1
        if begun == len(sizes):
            continue
        if reading >= 0 and (in_pieces or read[reading] == sizes[reading]):
            reading = -1
        choices = [reading] if reading >= 0 else [-1, *(g for g in range(begun, len(sizes)) if read[g] < sizes[g])]
        for choice in choices:
            after = tuple(n + (g == choice) for g, n in enumerate(read))
            held = [g for g in range(begun, len(sizes)) if after[g]]
            taken = sum(after[g] if in_pieces else sizes[g] for g in held)
            if taken > room and held != [begun]:
                continue
            state = (now + 1, after, begun, over, choice)
            if state not in seen and now <= sum(sizes) + sum(computes):
                seen.add(state)
                todo.append(state)
    return best


@settings(deadline=None)
@given(size=st.integers(1, 3), computes=st.lists(st.integers(0, 5), min_size=1, max_size=4), room=st.integers(0, 9))
def test_no_way_to_order_and_time_reads_of_one_size_lets_any_use_begin_earlier(
    size: int, computes: list[int], room: int
) -> None:
    sizes = [size] * len(computes)
    assert begins_of_the_policy(sizes, computes, room) == earliest_begins(sizes, computes, room, in_pieces=False)


@settings(deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), room=st.integers(0, 6))
def test_with_one_group_more_to_hold_no_use_begins_later_than_with_any_reads_in_pieces(
    data: st.DataObject, sizes: list[int], room: int
) -> None:
    computes = data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    ours = begins_of_the_policy(sizes, computes, room + max(sizes))
    any_way = earliest_begins(sizes, computes, room, in_pieces=True)
    assert all(one <= other for one, other in zip(ours, any_way, strict=True))


def test_a_large_group_before_a_small_one_can_be_on_time_where_the_order_of_need_is_not() -> None:
    """Why the note says "of one size"; and that one group more to hold makes up for it."""
    sizes, computes, room = [1, 1, 1, 4], [6, 3, 0, 0], 5
    ours = begins_of_the_policy(sizes, computes, room)
    other = earliest_begins(sizes, computes, room, in_pieces=False)
    assert other[:3] == ours[:3]
    assert other[3] < ours[3]
    assert begins_of_the_policy(sizes, computes, room + max(sizes)) == other


@given(data=st.data(), units=st.lists(st.integers(0, 9), unique=True, max_size=8))
def test_the_unit_on_nvme_that_is_needed_soonest_is_read_next(data: st.DataObject, units: list[int]) -> None:
    """Units that were dropped since are read again, those before the place are not."""
    held: set[int] = set()
    ahead = ReadAhead[int](held, int)
    following = in_turn(units)
    ahead.follow(following)
    for place in range(len(units)):
        following.advance(place)
        ahead.fit()
        left = [unit for unit in units[place:] if unit not in held]
        for unit in ahead.to_read():
            assert unit == left.pop(0)
            held.add(unit)
            ahead.stage(unit)
        assert left == []
        for unit in data.draw(st.lists(st.sampled_from(units), unique=True)):
            if unit in ahead.staged:
                ahead.staged.discard(unit)
                held.remove(unit)
                ahead.unstage(unit)
