"""What a checkpoint's arena file holds: each element of each parameter at one place; the impossible is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.checkpoint.snapshot import Snapshot, rows_of
from infinity.store.commit import ArenaLayout, describe
from infinity.store.layout import MOMENTS, Field, Shard, plan_layout

SHAPES = st.lists(
    st.tuples(st.tuples(st.integers(1, 40), st.integers(1, 300)), st.integers(0, 2), st.booleans(), st.booleans()),
    min_size=1,
    max_size=8,
)


def place_of(
    drawn: list[tuple[tuple[int, int], int, bool, bool]],
    ranks: int,
    cut: int,
    split: bool,
    kept: int = 2,
    itemsize: int = 4,
) -> ArenaLayout:
    used = sorted({group for _, group, _, _ in drawn})
    shards, shapes = [], []
    for number, (shape, group, trained, resident) in enumerate(drawn):
        numel = -(-shape[0] // ranks) * shape[1]
        shards.append(Shard(f"p{number}", used.index(group), numel, trained, resident))
        shapes.append(shape)
    limit = 2048 * cut
    layout = plan_layout(
        shards,
        groups=len(used),
        sub_group_numel_max=limit,
        compute_itemsize=2,
        split_master=split,
        moments=kept,
        moment_itemsize=itemsize,
    )
    names = [f"kept{number}" for number in range(kept)]
    dtype = {4: "float32", 2: "bfloat16", 1: "uint8"}[itemsize]
    of_ranks = {"rank": 0, "ranks": ranks, "shards": ranks}
    return describe(layout, shapes, **of_ranks, compute_dtype="bfloat16", moments=names, moments_dtype=dtype)


@given(
    drawn=SHAPES,
    ranks=st.integers(1, 4),
    cut=st.integers(1, 4),
    split=st.booleans(),
    kept=st.integers(0, 4),
    itemsize=st.sampled_from([4, 2, 1]),
)
def test_every_element_has_one_place(
    drawn: list,  # type: ignore[type-arg]
    ranks: int,
    cut: int,
    split: bool,
    kept: int,
    itemsize: int,
) -> None:
    place = place_of(drawn, ranks, cut, split, kept, itemsize)
    snapshot = Snapshot(place)
    assert snapshot.nbytes == sum(sub.nbytes for sub in snapshot.sub_groups)
    taken = set()
    for number, parameter in enumerate(place.parameters):
        at = 0
        for sub, first, count in snapshot.pieces(number, 0, parameter.numel):
            assert 0 <= first < first + count <= sub.numel
            for which in MOMENTS[:kept] if sub.trained else (Field.MASTER,):
                nbytes = sub.itemsize(which)
                begin = snapshot.field_offset(sub, which) + nbytes * first
                assert begin + nbytes * count <= snapshot.nbytes
                taken.add((begin, begin + nbytes * count))
            at += count
        assert at == parameter.numel
    ends = sorted(taken)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))


@given(rows=st.integers(0, 50), row=st.integers(1, 9), ranks=st.integers(1, 8))
def test_rows_of_all_ranks_make_up_the_parameter(rows: int, row: int, ranks: int) -> None:
    at = 0
    for rank in range(ranks):
        first, end = rows_of((rows, row), rank, ranks)
        assert first == at <= end
        assert end - first <= math.ceil(rows / ranks) * row
        at = end
    assert at == rows * row


PLACE = place_of([((30, 300), 0, True, False), ((10, 10), 0, False, False), ((5, 8), 1, True, True)], 2, 1, True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sub_groups": PLACE.sub_groups[:-1]}, "don't make up space"),
        ({"moments": ("exp_avg", "exp_avg")}, "a moment is in it twice"),
        ({"sub_groups": (*PLACE.sub_groups, PLACE.sub_groups[-1])}, "more sub-groups than"),
        ({"sub_groups": (replace(PLACE.sub_groups[0], numel=2**40), *PLACE.sub_groups[1:])}, "can't have 10995116"),
        ({"sub_groups": (replace(PLACE.sub_groups[0], numel=100), *PLACE.sub_groups[1:])}, "can't have 100 elements"),
        (
            {"sub_groups": (replace(PLACE.sub_groups[0], compute_itemsize=3), *PLACE.sub_groups[1:])},
            "compute parameters of 3 bytes",
        ),
        ({"compute_dtype": "float16"}, "can't have split masters"),
        ({"compute_dtype": "int8"}, "gathered in int8"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"parameters": (replace(PLACE.parameters[0], numel=7), *PLACE.parameters[1:])}, "can't have 7 elements"),
        ({"parameters": (replace(PLACE.parameters[0], group=2**60), *PLACE.parameters[1:])}, "can't be in group"),
        ({"parameters": (PLACE.parameters[0], *PLACE.parameters[:2])}, "twice"),
        ({"parameters": (replace(PLACE.parameters[0], shape=()), *PLACE.parameters[1:])}, r"of shape \(\)"),
    ],
)
def test_what_can_not_be_is_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Snapshot(replace(PLACE, **changed))  # type: ignore[arg-type]
