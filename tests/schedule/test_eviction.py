"""What eviction promises: the unit that costs least goes first, and no other choice of units makes a sequence read less."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from infinity.schedule.readahead import Eviction

UNITS = st.integers(0, 5)
MOMENTS = st.one_of(st.none(), st.integers(-20, 20))


class EvictionMachine(RuleBasedStateMachine):
    """Against the note's words, asked of a list: oldest unwanted, then a write, then the unit needed last."""

    def __init__(self) -> None:
        super().__init__()
        self.eviction: Eviction[int] = Eviction()
        self.staged: list[int] = []
        self.needed: dict[int, int | None] = {}

    def taken(self, moment: int | None, unit: int) -> bool:
        """No two units are needed at one moment."""
        return moment is not None and any(self.needed[other] == moment for other in self.staged if other != unit)

    @rule(unit=UNITS, moment=MOMENTS)
    def add(self, unit: int, moment: int | None) -> None:
        if unit not in self.staged and not self.taken(moment, unit):
            self.eviction.add(unit, moment)
            self.staged.append(unit)
            self.needed[unit] = moment

    @rule(unit=UNITS)
    def take(self, unit: int) -> None:
        if unit in self.staged:
            self.eviction.discard(unit)
            self.staged.remove(unit)

    @rule(unit=UNITS, moment=MOMENTS, times=st.integers(1, 60))
    def need(self, unit: int, moment: int | None, times: int) -> None:
        """Often, so that entries that are out of date are swept out."""
        if not self.taken(moment, unit):
            for _ in range(times):
                self.eviction.need(unit, None)
                self.eviction.need(unit, moment)
            self.needed[unit] = moment

    @rule(moments=st.permutations(range(6)), wanted=st.sets(UNITS))
    def follow(self, moments: list[int], wanted: set[int]) -> None:
        self.needed = {unit: moments[unit] if unit in wanted else None for unit in range(6)}
        self.eviction.need_all(lambda unit: self.needed[unit])

    @rule(lost=st.booleans())
    def lose_entries(self, lost: bool) -> None:
        """An exception in the middle of a change: no unit may be forgotten for ever."""
        if lost:
            self.eviction._unwanted.clear()
            self.eviction._wanted.clear()
            self.eviction.victim(writes_in_flight=False)

    @invariant()
    def goes_by_the_note(self) -> None:
        unwanted = [unit for unit in self.staged if self.needed[unit] is None]
        moments = sorted((moment, unit) for unit in self.staged if (moment := self.needed[unit]) is not None)
        wanted = [unit for _, unit in moments]
        assert list(self.eviction) == self.staged
        assert self.eviction.victim(writes_in_flight=True) == next(iter(unwanted), None)
        assert self.eviction.victim(writes_in_flight=False) == next(iter(unwanted + wanted[::-1]), None)
        odd = [unit for unit in unwanted if unit % 2]
        assert self.eviction.oldest_unwanted(lambda unit: unit % 2 == 1) == next(iter(odd), None)


TestEvictionMachine = EvictionMachine.TestCase


def reads_by_policy(uses: Sequence[int], room: int) -> int:
    """Units read when each use takes its unit and what leaves the pool is the policy's choice."""
    eviction: Eviction[int] = Eviction()
    reads = 0
    for place, unit in enumerate(uses):
        if unit in eviction:
            eviction.discard(unit)
        else:
            reads += 1
            if len([*eviction]) == room:
                victim = eviction.victim(writes_in_flight=False)
                assert victim is not None
                eviction.discard(victim)
        eviction.add(unit, next((later for later in range(place + 1, len(uses)) if uses[later] == unit), None))
    return reads


def fewest_reads(uses: Sequence[int], room: int) -> int:
    """The same over all choices."""
    reached = {frozenset[int](): 0}
    for unit in uses:
        after: dict[frozenset[int], int] = {}
        for staged, reads in reached.items():
            others = staged - {unit}
            choices = [others] if len(others) < room else [frozenset(some) for some in combinations(others, room - 1)]
            for staying in choices:
                state = staying | {unit}
                after[state] = min(after.get(state, len(uses)), reads + (unit not in staged))
        reached = after
    return min(reached.values())


@settings(deadline=None)
@given(uses=st.lists(st.integers(0, 4), max_size=12), room=st.integers(1, 4))
def test_no_choice_of_units_reads_less(uses: list[int], room: int) -> None:
    assert reads_by_policy(uses, room) == fewest_reads(uses, room)
