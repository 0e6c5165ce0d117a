"""What the pinned sum promises: wherever in the slab the leases in use lie, the next one asked for finds a hole."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule import pinned
from infinity.units import MIB

PAGE = 4096
pages = st.integers(1, 1000).map(lambda count: count * PAGE)


@st.composite
def largest_holes(draw: st.DrawFn, slab_bytes: int, in_use: Sequence[int]) -> int:
    """The largest hole that leases of these sizes leave, laid anywhere in page steps."""
    left = (slab_bytes - sum(in_use)) // PAGE
    edges = sorted(draw(st.lists(st.integers(0, left), min_size=len(in_use), max_size=len(in_use))))
    return PAGE * max(after - before for before, after in zip([0, *edges], [*edges, left], strict=True))


@given(data=st.data(), group=pages, sub_group=pages)
def test_whatever_is_in_use_what_is_asked_for_finds_a_hole(data: st.DataObject, group: int, sub_group: int) -> None:
    budget = pinned.PinnedBudget(pinned.gather_bytes(group), pinned.pipeline_bytes(group, sub_group))
    room = budget.nbytes - budget.access_bytes
    for in_use, asked_for in (
        ((), group),
        ((group,), group),
        ((group,), sub_group),
        ((sub_group,), sub_group),
    ):
        assert data.draw(largest_holes(room, in_use)) >= asked_for


@given(group=pages, sub_group=pages)
def test_a_comfortable_pool_is_more_than_the_least_and_leaves_room_to_look_ahead(group: int, sub_group: int) -> None:
    gather = pinned.gather_bytes(group)
    pool = pinned.comfortable_bytes(gather, sub_group)
    assert pool >= pinned.PinnedBudget(gather, pinned.pipeline_bytes(group, sub_group)).nbytes
    assert pinned.look_ahead_room(pool, group) >= max(6 * group, 4 * sub_group)


@given(group=pages, sub_group=pages, waiting=st.integers(0, 10**9), memory=st.integers(0, 10**10))
def test_what_waits_for_gradients_has_room_as_far_as_memory_goes(
    group: int, sub_group: int, waiting: int, memory: int
) -> None:
    gather = pinned.gather_bytes(group)
    least, roomy, pool = (
        pinned.comfortable_bytes(gather, sub_group, *more) for more in ((), (waiting,), (waiting, memory))
    )
    assert pinned.look_ahead_room(roomy, group) >= waiting
    assert least <= pool <= roomy
    assert pool == least or pool <= memory / 4
    assert pool == roomy or pool > memory / 4 - MIB
