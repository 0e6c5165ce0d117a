"""What the layout promises: every element of every shard has one place, and the places make large aligned transfers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.store.layout import (
    BLOCK_NUMEL,
    MOMENTS,
    SHARD_ALIGN,
    SPACE_ALIGN,
    Cached,
    Field,
    Layout,
    PartKey,
    Shard,
    plan_layout,
)
from infinity.units import align_up

PAGE = 4096


@dataclass(frozen=True)
class Plan:
    layout: Layout
    groups: int
    numel_max: int
    compute_itemsize: int
    moment_itemsize: int

    @property
    def align(self) -> int:
        return BLOCK_NUMEL if self.moment_itemsize == 1 else SHARD_ALIGN


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    groups = draw(st.integers(1, 4))
    sizes = st.one_of(st.integers(0, 300), st.integers(0, 4 * SPACE_ALIGN), st.integers(1, 30).map(lambda n: n * 1024))
    shards = []
    for i in range(draw(st.integers(0, 12))):
        group, numel, trained = draw(st.integers(0, groups - 1)), draw(sizes), draw(st.booleans())
        whole = trained and draw(st.booleans())
        shards.append(Shard(f"p{i}", group, numel, trained, draw(st.booleans()), whole=whole))
    numel_max = draw(st.integers(SPACE_ALIGN, 8 * SPACE_ALIGN))
    compute_itemsize = draw(st.sampled_from([0, 2, 4]))
    moment_itemsize = draw(st.sampled_from([4, 1]))
    layout = plan_layout(
        shards,
        groups=groups,
        sub_group_numel_max=numel_max,
        compute_itemsize=compute_itemsize,
        matrix_moments=1,
        moment_itemsize=moment_itemsize,
    )
    return Plan(layout, groups, numel_max, compute_itemsize, moment_itemsize)


@given(plans())
def test_every_element_lies_in_exactly_one_piece(plan: Plan) -> None:
    layout = plan.layout
    found: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(layout.shards))}
    for sub in layout.sub_groups:
        for piece in sub.pieces:
            found[piece.shard].append((piece.start, piece.numel))
            space, first = layout.place[piece.shard]
            assert sub.space == space
            assert sub.start + piece.offset == first + piece.start  # both ways lead to the same element of the space
            assert 0 <= piece.offset and piece.offset + piece.numel <= sub.numel
    for i, shard in enumerate(layout.shards):
        end = 0
        for start, numel in sorted(found[i]):
            assert start == end and numel > 0
            end += numel
        assert end == shard.numel


@given(plans())
def test_shards_of_a_space_do_not_overlap_and_start_aligned(plan: Plan) -> None:
    layout = plan.layout
    for space, numel in enumerate(layout.space_numel):
        end = 0
        filled = [i for i, shard in enumerate(layout.shards) if shard.numel]  # an empty one overlaps nothing
        members = sorted((layout.place[i][1], i) for i in filled if layout.place[i][0] == space)
        for first, i in members:
            assert end <= first and first % plan.align == 0
            end = max(end, first + layout.shards[i].numel)
        assert end <= numel


@given(plans())
def test_sub_groups_fill_their_space_within_the_limit(plan: Plan) -> None:
    layout = plan.layout
    assert [sub.index for sub in layout.sub_groups] == list(range(len(layout.sub_groups)))
    assert [sub for cuts in layout.by_space for sub in cuts] == list(layout.sub_groups)
    for space, cuts in enumerate(layout.by_space):
        end = 0
        for sub in cuts:
            assert (sub.space, sub.start) == (space, end)
            assert 0 < sub.numel <= plan.numel_max or (sub.whole and len(sub.pieces) == 1)
            assert sub.start % SPACE_ALIGN == 0 and sub.numel % SPACE_ALIGN == 0
            end += sub.numel
        assert end == layout.space_numel[space]


@given(plans())
def test_shards_are_cut_only_where_a_vector_ends(plan: Plan) -> None:
    for sub in plan.layout.sub_groups:
        for piece in sub.pieces:
            assert piece.start % plan.align == 0 and piece.offset % plan.align == 0
            if piece.start + piece.numel < plan.layout.shards[piece.shard].numel:
                assert piece.numel % plan.align == 0


@given(plans())
def test_trained_and_frozen_never_share_a_sub_group(plan: Plan) -> None:
    for sub in plan.layout.sub_groups:
        assert {plan.layout.shards[piece.shard].trained for piece in sub.pieces} <= {sub.trained}
        expected = (Field.MOMENT_3,) if sub.whole else (Field.MOMENT_1, Field.MOMENT_2)
        assert tuple(name for name in sub.fields if name in MOMENTS) == (expected if sub.trained else ())
        assert (Field.SCALES in sub.fields) == (sub.trained and plan.moment_itemsize == 1)
        assert Field.MASTER in sub.fields
        assert (Field.COMPUTE in sub.fields) == (plan.compute_itemsize > 0 and sub.space != plan.groups)


@given(plans())
def test_whole_matrices_are_in_one_piece_among_their_like(plan: Plan) -> None:
    for sub in plan.layout.sub_groups:
        assert {plan.layout.shards[piece.shard].whole for piece in sub.pieces} <= {sub.whole}
        for piece in sub.pieces if sub.whole else ():
            assert piece.numel == plan.layout.shards[piece.shard].numel


@given(plans())
def test_fields_are_whole_pages_and_fill_the_extent(plan: Plan) -> None:
    for sub in plan.layout.sub_groups:
        end = 0
        for which in sub.fields:
            assert sub.field_offset(which) == end
            assert end % PAGE == 0
            numel = sub.numel if which is not Field.SCALES else sub.numel // BLOCK_NUMEL * (1 if sub.whole else 2)
            end += -(-numel * sub.itemsize(which) // PAGE) * PAGE
        assert end == sub.nbytes and end % PAGE == 0
        for which in set(Field) - set(sub.fields):
            with pytest.raises(KeyError, match=which.value):
                sub.field_offset(which)
    assert plan.layout.nbytes == sum(sub.nbytes for sub in plan.layout.sub_groups)
    assert plan.layout.sub_group_bytes_max == max((s.nbytes for s in plan.layout.sub_groups if s.trained), default=0)


@given(plans())
def test_copies_read_one_behind_the_other_give_back_the_flat_space(plan: Plan) -> None:
    """What a gather does: the copy fields of a group, in order, without a gap; a shard that was cut is whole again."""
    layout = plan.layout
    for space, cuts in enumerate(layout.by_space):
        flat: list[tuple[int, int] | None] = []
        for sub in cuts:
            field: list[tuple[int, int] | None] = [None] * sub.numel
            for piece in sub.pieces:
                for k in (0, piece.numel - 1):
                    field[piece.offset + k] = (piece.shard, piece.start + k)
            flat += field
        assert len(flat) == layout.space_numel[space]
        for i, (where, first) in enumerate(layout.place):
            if where == space and layout.shards[i].numel:
                assert flat[first] == (i, 0)
                assert flat[first + layout.shards[i].numel - 1] == (i, layout.shards[i].numel - 1)


@given(plans())
def test_a_space_is_a_group_and_the_last_one_is_of_the_resident(plan: Plan) -> None:
    layout = plan.layout
    assert len(layout.space_numel) == len(layout.by_space) == plan.groups + 1
    assert layout.resident_space == plan.groups
    for shard, (space, _) in zip(layout.shards, layout.place, strict=True):
        assert space == (layout.resident_space if shard.resident else shard.group)


@given(plans())
def test_waste_is_bounded(plan: Plan) -> None:
    """Less than the alignment per shard, or SPACE_ALIGN where it is whole, and SPACE_ALIGN per part of a space."""
    layout = plan.layout
    for space, numel in enumerate(layout.space_numel):
        members = [s for s, (where, _) in zip(layout.shards, layout.place, strict=True) if where == space]
        parts = len({(shard.trained, shard.whole) for shard in members})
        waste = numel - sum(shard.numel for shard in members)
        aligned = sum((SPACE_ALIGN if shard.whole else plan.align) - 1 for shard in members)
        assert 0 <= waste <= aligned + parts * (SPACE_ALIGN - 1)


@given(plans())
def test_cuts_of_a_part_are_few_and_even(plan: Plan) -> None:
    limit = plan.numel_max // SPACE_ALIGN * SPACE_ALIGN
    for cuts in plan.layout.by_space:
        for trained in (True, False):
            sizes = [sub.numel for sub in cuts if sub.trained is trained and not sub.whole]
            assert len(sizes) == -(-sum(sizes) // limit)
            assert len(set(sizes[:-1])) <= 1 and all(size <= sizes[0] for size in sizes)


@given(plans())
def test_same_shards_make_the_same_layout(plan: Plan) -> None:
    again = plan_layout(
        plan.layout.shards,
        groups=plan.groups,
        sub_group_numel_max=plan.numel_max,
        compute_itemsize=plan.compute_itemsize,
        matrix_moments=1,
        moment_itemsize=plan.moment_itemsize,
    )
    assert again == plan.layout


def test_sub_group_of_bf16_is_fourteen_bytes_per_element() -> None:
    layout = plan_layout([Shard("p", 0, SPACE_ALIGN)], groups=1, sub_group_numel_max=SPACE_ALIGN, compute_itemsize=2)
    (sub,) = layout.sub_groups
    assert sub.fields == (Field.COMPUTE, Field.MASTER, Field.MOMENT_1, Field.MOMENT_2)
    assert [sub.field_offset(which) for which in sub.fields] == [0, 4096, 12288, 20480]
    assert sub.nbytes == 14 * SPACE_ALIGN


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("moments", range(len(MOMENTS) + 1))
def test_a_moment_is_four_bytes_per_element(moments: int, split: bool) -> None:
    shards = [Shard("w", 0, 4096), Shard("frozen", 0, 4096, trained=False)]
    layout = plan_layout(
        shards, groups=1, sub_group_numel_max=4096, compute_itemsize=2, split_master=split, moments=moments
    )
    trained, frozen = layout.sub_groups
    assert trained.fields[1:] == (Field.REMAINDER if split else Field.MASTER, *MOMENTS[:moments])
    assert trained.nbytes == 4096 * ((4 if split else 6) + 4 * moments)
    assert frozen.fields == (Field.COMPUTE, Field.MASTER)


def test_a_coded_moment_is_a_byte_and_its_scale() -> None:
    numel = 1 << 17
    layout = plan_layout(
        [Shard("w", 0, numel - 600), Shard("b", 0, 300)],
        groups=1,
        sub_group_numel_max=2 * numel,
        compute_itemsize=2,
        split_master=True,
        moment_itemsize=1,
    )
    (sub,) = layout.sub_groups
    assert [piece.offset for piece in sub.pieces] == [0, numel - 512]  # the next block
    assert sub.fields == (Field.COMPUTE, Field.REMAINDER, Field.MOMENT_1, Field.MOMENT_2, Field.SCALES)
    assert sub.nbytes == sub.numel * 6 + -(-sub.numel // 256 * 8 // PAGE) * PAGE
    assert [sub.first_scale(name) for name in MOMENTS[:2]] == [0, sub.numel // 256]


def test_sub_group_below_the_least_is_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match="at least 2048 elements, got 2047"):
        plan_layout([], groups=1, sub_group_numel_max=SPACE_ALIGN - 1, compute_itemsize=2)


def test_state_that_is_held_leaves_the_extent_to_the_copies() -> None:
    shards = [Shard("p", 0, SPACE_ALIGN), Shard("kept", 0, SPACE_ALIGN, resident=True)]
    layout = plan_layout(shards, groups=1, sub_group_numel_max=SPACE_ALIGN, compute_itemsize=2, hold_state=True)
    assert [sub.on_nvme for sub in layout.sub_groups] == [(Field.COMPUTE,), ()]
    assert (layout.nbytes, layout.sub_group_bytes_max) == (2 * SPACE_ALIGN, 2 * SPACE_ALIGN)


def bytes_of_elements(layout: Layout) -> int:
    """Without what rounds fields up to pages."""
    return sum(sub.field_numel(name) * sub.itemsize(name) for sub in layout.sub_groups for name in sub.fields)


@given(plan=plans(), data=st.data())
def test_what_is_cached_is_the_beginning_of_a_part_field_by_field(plan: Plan, data: st.DataObject) -> None:
    """The cached fields cover just the elements that were asked for; every element has its place, as without a cache."""
    ends: dict[PartKey, list[int]] = {}
    """Where what is cached of a part may end: anywhere, or between whole matrices."""
    for sub in plan.layout.sub_groups:
        of_part = ends.setdefault(PartKey(sub.space, sub.trained, sub.whole), [0])
        if sub.whole:
            first = of_part[-1]
            of_part += [align_up(first + piece.offset + piece.numel, SPACE_ALIGN) for piece in sub.pieces]
        else:
            of_part += range(of_part[-1] + SPACE_ALIGN, of_part[-1] + sub.numel + 1, SPACE_ALIGN)
    cached = {key: Cached(*(data.draw(st.sampled_from(of_part)) for _ in range(2))) for key, of_part in ends.items()}
    layout = plan_layout(
        plan.layout.shards,
        groups=plan.groups,
        sub_group_numel_max=plan.numel_max,
        compute_itemsize=plan.compute_itemsize,
        matrix_moments=1,
        moment_itemsize=plan.moment_itemsize,
        cached=cached,
    )
    assert (layout.place, layout.space_numel) == (plan.layout.place, plan.layout.space_numel)
    assert bytes_of_elements(layout) == bytes_of_elements(plan.layout)
    both_bytes = layout.nbytes + layout.cached_bytes
    if plan.moment_itemsize == 1:  # fields of codes end with a page, so other cuts take more or less
        assert bytes_of_elements(layout) <= both_bytes <= plan.layout.nbytes + PAGE * 3 * len(layout.sub_groups)
    else:
        assert both_bytes == plan.layout.nbytes
    for key, asked in cached.items():
        members = [sub for sub in layout.by_space[key.space] if (sub.trained, sub.whole) == (key.trained, key.whole)]
        first = members[0].start
        for sub in members:
            assert sub.numel <= plan.numel_max or len(sub.pieces) == 1
            assert set(sub.cached) | set(sub.on_nvme) == set(sub.fields)
            for which in sub.fields:
                end = first + (asked.gathered_numel if which is sub.gathered else asked.state_numel)
                assert (which in sub.cached) == (sub.start < end)
                assert sub.start >= end or sub.start + sub.numel <= end  # never in part


@given(plans(), st.sampled_from([2, 4]))
def test_gradients_have_whole_pages_of_their_own_behind_the_state(plan: Plan, itemsize: int) -> None:
    spilled = dict.fromkeys(range(0, plan.groups, 2), itemsize)
    layout = plan_layout(
        plan.layout.shards,
        groups=plan.groups,
        sub_group_numel_max=plan.numel_max,
        compute_itemsize=plan.compute_itemsize,
        matrix_moments=1,
        moment_itemsize=plan.moment_itemsize,
        gradient_itemsizes=spilled,
    )
    for before, sub in zip(plan.layout.sub_groups, layout.sub_groups, strict=True):
        expected = spilled.get(sub.space, 0) if sub.trained else 0
        assert sub.gradient_bytes == sub.numel * expected
        assert sub.gradient_bytes % PAGE == sub.nbytes % PAGE == 0
        assert sub.nbytes == before.nbytes and sub.lease_bytes == sub.nbytes + sub.gradient_bytes
    assert layout.nbytes == plan.layout.nbytes
    assert layout.sub_group_bytes_max == max((sub.lease_bytes for sub in layout.sub_groups if sub.trained), default=0)
