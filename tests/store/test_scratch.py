"""What scratch extents promise: no byte is taken twice, and the arena grows to the most that was taken at once, and no more."""

from __future__ import annotations

from typing import cast

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.errors import StoreError
from infinity.store.arena import Arena, Extent, Scratch

PAGE = 4096


class EndlessArena:
    """Reserves, and stores nothing."""

    def __init__(self, pages_max: int = 1 << 30) -> None:
        self.nbytes = 0
        self._bytes_max = pages_max * PAGE

    def reserve(self, sizes: list[int], what: str) -> list[Extent]:
        extents = []
        end = self.nbytes
        for size in sizes:
            extents.append(Extent(end, size))
            end += size
        if end > self._bytes_max:
            raise StoreError(28, what)
        self.nbytes = end
        return extents


class ScratchMachine(RuleBasedStateMachine):
    """While others reserve extents of the same arena in between."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = EndlessArena()
        self.scratch = Scratch(cast(Arena, self.arena), "the test")
        self.taken: list[list[Extent]] = []
        self.others: list[Extent] = []
        self.pages_max = 0

    @rule(nbytes=st.integers(1, 9 * PAGE))
    def take(self, nbytes: int) -> None:
        extents = self.scratch.take(nbytes)
        assert nbytes <= sum(extent.nbytes for extent in extents) < nbytes + PAGE
        self.taken.append(extents)
        self.pages_max = max(self.pages_max, sum(extent.nbytes for extents in self.taken for extent in extents) // PAGE)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.scratch.give_back(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @rule(pages=st.integers(1, 3))
    def another_reserves(self, pages: int) -> None:
        self.others += self.arena.reserve([pages * PAGE], "another")

    @invariant()
    def no_byte_is_taken_twice(self) -> None:
        extents = sorted([*self.others, *(e for extents in self.taken for e in extents)], key=lambda e: e.offset)
        end = 0
        for extent in extents:
            assert extent.offset >= end and extent.offset % PAGE == extent.nbytes % PAGE == 0 < extent.nbytes
            end = extent.offset + extent.nbytes
        assert end <= self.arena.nbytes

    @invariant()
    def it_holds_the_most_that_was_taken_at_once(self) -> None:
        assert self.scratch.nbytes == self.pages_max * PAGE
        assert self.arena.nbytes == self.scratch.nbytes + sum(extent.nbytes for extent in self.others)

    def teardown(self) -> None:
        for extents in self.taken:
            self.scratch.give_back(extents)
        if self.pages_max and not self.others:
            assert len(self.scratch.take(self.pages_max * PAGE)) == 1, "what was given back is one range again"


TestScratch = ScratchMachine.TestCase
TestScratch.settings = hypothesis.settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_the_drive_has_no_room_for_is_not_taken() -> None:
    scratch = Scratch(cast(Arena, EndlessArena(pages_max=4)), "the test")
    extents = scratch.take(3 * PAGE)
    with pytest.raises(StoreError, match="the test"):
        scratch.take(2 * PAGE)
    assert scratch.nbytes == 3 * PAGE
    scratch.give_back(extents)
    assert len(scratch.take(4 * PAGE)) == 1
