"""What residency promises: no way of caching makes a step move less, and never more bytes stay than there is memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.plan.estimate import Part, candidates_of
from infinity.schedule.residency import (
    UNITS_READ_AHEAD,
    Candidate,
    choose_resident,
    choose_staying,
    choose_to_stay,
    moved_bytes,
)
from infinity.schedule.scheme import Scheme

# A byte of memory holds one of these: nothing worth mentioning, what the arena holds, what the arena doesn't hold, or nothing
# while the arena holds something stale (which may only be overwritten).
AWAY, CLEAN, DIRTY, STALE = range(4)

State = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A small step, a byte per item: in which passes each copy is gathered, which copies are trained, how many bytes of state
    there are in addition, each of which belongs to one of the copies."""

    scheme: Scheme
    passes: int
    copies: tuple[tuple[frozenset[int], bool], ...]
    states: int

    @property
    def items(self) -> int:
        return len(self.copies) + self.states

    @property
    def candidates(self) -> list[Candidate]:
        copies = [
            Candidate(1, 1, self.scheme.compute_reads(len(passes)) if trained else len(passes), int(trained))
            for passes, trained in self.copies
        ]
        return [*copies, *(Candidate(1, 1, 1, 1) for _ in range(self.states))]

    @property
    def events(self) -> list[tuple[int, str]]:
        """(item, "read", "write" or "update"), in the order of the step: zigzag passes, with updates where the scheme has
        them, or the optimizer after them."""
        updating = {"forward": 0, "backward": self.passes - 1, "step": None}[self.scheme.update]
        found = []
        for each in range(self.passes):
            order = range(len(self.copies)) if each % 2 == 0 else reversed(range(len(self.copies)))
            for item in order:
                gathers, trained = self.copies[item]
                updated = each == updating and trained
                made_or_brought = updated and (self.scheme.compute_is_state() or self.scheme.update == "forward")
                if each in gathers and not made_or_brought:
                    found.append((item, "read"))
                if updated:
                    found += self.update_of(item)
                elif each == updating:
                    found += [(state, "update") for state in self.states_of(item)]
        if updating is None:
            for item, (_, trained) in enumerate(self.copies):
                found += self.update_of(item) if trained else [(state, "update") for state in self.states_of(item)]
        return found

    def states_of(self, item: int) -> list[int]:
        return [len(self.copies) + k for k in range(self.states) if k % len(self.copies) == item]

    def update_of(self, item: int) -> list[tuple[int, str]]:
        of_copy = (item, "update" if self.scheme.compute_is_state() else "write")
        return [*((state, "update") for state in self.states_of(item)), of_copy]


schemes = st.builds(Scheme, st.sampled_from(["split", "full"]), st.sampled_from(["step", "forward", "backward"]))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    scheme = draw(schemes)
    passes = 2 if scheme.update == "backward" else draw(st.sampled_from([2, 2, 4]))
    every, forward = frozenset(range(passes)), frozenset(range(0, passes, 2))
    made = scheme == Scheme("full", "forward") and passes == 2  # gathered in forward alone, it is never read
    reading = draw(st.lists(st.sampled_from([every] if made else [every, every, forward]), min_size=1, max_size=3))
    every_pass_reads_all = scheme.compute_is_state() == (scheme.update != "step")
    may_be_frozen = forward not in reading and (every_pass_reads_all or scheme == Scheme("full", "backward"))
    copies = tuple((read, not may_be_frozen or draw(st.booleans())) for read in reading)
    return Step(scheme, passes, copies, draw(st.integers(0, 4 - len(copies))))


@settings(max_examples=2 * settings.default.max_examples)
@given(step=steps(), cache_bytes=st.integers(0, 3))
def test_no_way_of_caching_makes_a_step_move_less(step: Step, cache_bytes: int) -> None:
    moved = moved_bytes(step.candidates, choose_resident(step.candidates, cache_bytes))
    assert sum(moved) == least_moved_in_a_step(step, cache_bytes)


def least_moved_in_a_step(step: Step, cache_bytes: int) -> Fraction:
    """Over all endless schedules of the step repeated: the least mean cycle (Karp 1978) over what the memory holds at its
    beginning."""
    first = tuple(AWAY for _ in range(step.items))
    number = {first: 0}
    edges: list[tuple[int, int, int]] = []
    todo = [first]
    for start in todo:
        for end, cost in _after_a_step(step, start, cache_bytes).items():
            if end not in number:
                number[end] = len(number)
                todo.append(end)
            edges.append((number[start], number[end], cost))
    never = 10**9
    count = len(number)
    cheapest = [[0] + [never] * (count - 1)]
    for _ in range(count):
        row = [never] * count
        for start, end, cost in edges:
            row[end] = min(row[end], cheapest[-1][start] + cost)
        cheapest.append(row)
    means = [
        max(Fraction(cheapest[count][v] - cheapest[k][v], count - k) for k in range(count) if cheapest[k][v] < never)
        for v in range(count)
        if cheapest[count][v] < never
    ]
    return min(means)


def _after_a_step(step: Step, start: State, cache_bytes: int) -> dict[State, int]:
    """Every state the memory can be in after one step from `start`, and the least that it costs to get there."""
    found = {start: 0}
    events = step.events
    for at, (item, kind) in enumerate(events):
        dead = set()  # overwritten before it is read again
        for each in range(step.items):
            following = next((k for i, k in (*events[at + 1 :], *events[: at + 1]) if i == each), None)
            if following == "write":
                dead.add(each)
        reached: dict[State, int] = {}
        for state, cost in found.items():
            if kind != "write":
                assert state[item] != STALE
                cost += state[item] == AWAY
            here = max(state[item], CLEAN) if kind == "read" else DIRTY
            used = (*state[:item], here, *state[item + 1 :])
            for kept, paid in _forget(used, dead):
                if sum(each in (CLEAN, DIRTY) for each in kept) <= cache_bytes:
                    reached[kept] = min(reached.get(kept, 10**9), cost + paid)
        found = reached
    return found


def _forget(state: State, dead: set[int]) -> Iterator[tuple[State, int]]:
    """`state` after forgetting any of the bytes in memory, and the cost of writing those that would be lost."""
    here = [item for item, each in enumerate(state) if each in (CLEAN, DIRTY)]
    for gone in chain.from_iterable(combinations(here, n) for n in range(len(here) + 1)):
        kept, cost = list(state), 0
        for item in gone:
            lost = state[item] == DIRTY
            cost += lost and item not in dead
            kept[item] = STALE if lost and item in dead else AWAY
        yield tuple(kept), cost


candidates = st.lists(
    st.builds(Candidate, st.integers(0, 20), st.integers(1, 50), st.integers(0, 5), st.integers(0, 1)), max_size=6
)


@given(candidates=candidates, cache_bytes=st.integers(0, 3000))
def test_what_stays_fits_and_is_there(candidates: list[Candidate], cache_bytes: int) -> None:
    resident = choose_resident(candidates, cache_bytes)
    assert sum(kept * each.unit_bytes for kept, each in zip(resident, candidates, strict=True)) <= cache_bytes
    assert all(0 <= kept <= each.units for kept, each in zip(resident, candidates, strict=True))
    unused = [k for k, each in zip(resident, candidates, strict=True) if not each.reads and not each.writes]
    assert not any(unused)  # nothing that moves no bytes takes memory


@given(candidates=candidates, cache_bytes=st.integers(0, 3000))
def test_no_room_is_left_that_would_hold_a_unit_of_what_moves(candidates: list[Candidate], cache_bytes: int) -> None:
    resident = choose_resident(candidates, cache_bytes)
    left = cache_bytes - sum(kept * each.unit_bytes for kept, each in zip(resident, candidates, strict=True))
    for kept, each in zip(resident, candidates, strict=True):
        assert kept == each.units or left < each.unit_bytes or not (each.reads or each.writes)


@given(candidates=candidates)
def test_memory_for_everything_leaves_nothing_to_move(candidates: list[Candidate]) -> None:
    enough = sum(each.units * each.unit_bytes for each in candidates)
    assert moved_bytes(candidates, choose_resident(candidates, enough)) == (0, 0)


def test_copies_come_before_state() -> None:
    copies, frozen, state = Candidate(10, 2, 2, 1), Candidate(10, 2, 2, 0), Candidate(10, 12, 1, 1)
    assert choose_resident([state, frozen, copies], 52) == [1, 10, 10]


def test_the_first_of_equals_stays() -> None:
    alike = Candidate(3, 10, 2, 1)
    assert choose_resident([alike, alike, alike], 45) == [3, 1, 0]


def test_equals_that_are_read_once_stay_in_even_shares() -> None:
    state = [Candidate(units, 10, 1, 1) for units in (4, 8, 4)]
    assert choose_resident(state, 80) == [2, 4, 2]
    assert choose_resident(state, 105) == [3, 5, 2]  # what is left over goes to the first
    assert choose_resident(state, 1000) == [4, 8, 4]


@given(scheme=schemes, gathers=st.integers(2, 6))
def test_trained_copies_come_before_other_state(scheme: Scheme, gathers: int) -> None:
    copies, state = candidates_of(Part(10, gathers), scheme)
    enough = copies.units
    chosen = choose_resident([state, copies], enough)
    if copies.reads > 1:
        assert chosen == [0, enough]


@given(numel=st.integers(0, 1000), micro_batches=st.integers(1, 3))
def test_the_planner_s_candidates_are_the_sums_of_the_design(numel: int, micro_batches: int) -> None:
    """With single bytes as units."""
    part = Part(numel, 2 * micro_batches)
    full = Candidate(2 * numel, 1, 2 * micro_batches, 1), Candidate(12 * numel, 1, 1, 1)
    assert candidates_of(part, Scheme("full", "step")) == full
    split = Candidate(2 * numel, 1, 2 * micro_batches, 1), Candidate(10 * numel, 1, 1, 1)
    assert candidates_of(part, Scheme("split", "forward")) == split


@given(sizes=st.lists(st.integers(1, 50), max_size=20), room=st.integers(0, 600))
def test_what_stays_leaves_room_for_reading_ahead_unless_all_stays(sizes: list[int], room: int) -> None:
    stay = choose_to_stay(sizes, room)
    if sum(sizes) <= room:
        assert stay == [*range(len(sizes))]
    else:
        assert sum(sizes[place] for place in stay) <= max(0, room - UNITS_READ_AHEAD * max(sizes))


@given(
    units=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=20),
    room=st.integers(0, 600),
)
def test_what_spares_most_reads_stays_first(units: list[tuple[int, int]], room: int) -> None:
    sizes, spared = [size for size, _ in units], [reads for _, reads in units]
    staying = choose_staying(sizes, spared, room)
    useful = [place for place, (size, reads) in enumerate(units) if size and reads]
    total_bytes = sum(sizes[place] for place in staying)
    assert staying == sorted({*staying} & {*useful})
    assert total_bytes <= room
    if sum(sizes[place] for place in useful) <= room:
        assert staying == useful
    for place in useful:
        more = sum(sizes[other] for other in useful if spared[other] >= spared[place])
        if more <= room:
            assert place in staying
    even = choose_staying([1] * 12, [2] * 12, 4)
    assert even == [2, 5, 8, 11]
