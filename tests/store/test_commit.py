"""What a commit record promises: it comes back as it was written, or says what is wrong with it; never anything else."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.store.commit import ArenaLayout, Commit, Record, describe, differences, parse_record
from infinity.store.layout import Shard, plan_layout

SHAPES = [(8, 64), (64,), (40, 64)]


def place(*, ranks: int = 1, sub_group_numel_max: int = 2048, names: str = "abc", trained: bool = True) -> ArenaLayout:
    shards = [
        Shard(name, group, 64 * shape[0] if len(shape) > 1 else shape[0], trained)
        for name, shape, group in zip(names, SHAPES, (0, 0, 1), strict=True)
    ]
    layout = plan_layout(shards, groups=2, compute_itemsize=2, sub_group_numel_max=sub_group_numel_max)
    described = describe(layout, SHAPES, rank=0, ranks=ranks, shards=ranks, compute_dtype="bfloat16")
    return dataclasses.replace(described, arena_bytes=1 << 20)


def record(**changed: object) -> Record:
    where = place()
    count = len(where.sub_groups)
    fields = {
        "sequence": 7,
        "launch": "0123456789abcdef",
        "arena": "fedcba9876543210",
        "step": 6,
        "slots": "01" * (count // 2) + "0" * (count % 2),
        "filled": "111",
        "stepped": "110",
        "ties": (3, *[0] * (count - 1)),
    }
    return Record(Commit(**{**fields, **changed}), where, bytes(12), b"anything at all")  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was_written() -> None:
    assert parse_record(record().to_bytes()) == record()


def test_another_optimizer_is_said_in_words() -> None:
    here = dataclasses.replace(place(), moments=())
    assert list(differences(place(), here)) == [
        "its optimizer kept exp_avg and exp_avg_sq, and keeps nothing now: use the one of that run"
    ]
    small = dataclasses.replace(place(), moments_dtype="bfloat16")
    assert list(differences(place(), small)) == [
        "its moments are float32, and are bfloat16 now: set infinity.moments_dtype as it was; a checkpoint can be loaded into "
        "another one"
    ]


@pytest.mark.inputs
@given(st.data())
def test_a_record_that_was_cut_is_refused(data: st.DataObject) -> None:
    whole = record().to_bytes()
    with pytest.raises(ValueError, match=r"bytes instead of|does not begin"):
        parse_record(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.inputs
@given(st.data())
def test_a_record_with_any_bit_flipped_is_refused(data: st.DataObject) -> None:
    content = bytearray(record().to_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=r"."):
        parse_record(bytes(content))


@pytest.mark.inputs
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="begin"):
        parse_record(content)


@pytest.mark.inputs
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(Commit)]),
        st.one_of(st.none(), st.integers(), st.text(max_size=20), st.lists(st.integers(), max_size=3), st.booleans()),
        min_size=1,
    )
)
def test_a_hash_that_is_right_excuses_no_content(changed: dict[str, object]) -> None:
    """An attacker who writes a record can write its hash too."""
    forged = record(**changed).to_bytes()
    with contextlib.suppress(ValueError):
        parsed = parse_record(forged)
        assert parsed.to_bytes() == forged
        assert len(parsed.commit.slots) == len(parsed.layout.sub_groups)


def test_another_version_is_named() -> None:
    newer = record().to_bytes().replace(b"infinity-commit 5 ", b"infinity-commit 6 ", 1)
    with pytest.raises(ValueError, match="format 6, and this version of infinity reads format 5"):
        parse_record(newer)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"slots": "01"}, "slots for 2 sub-groups"),
        ({"filled": "1"}, "flags for 1 parameters"),
        ({"ties": (4, *[0] * (len(place().sub_groups) - 1))}, "12 bytes of ties, and counts 4"),
        ({"slots": "2" * len(place().sub_groups)}, "slots"),
        ({"launch": "../../etc"}, "launch"),
    ],
)
def test_counts_must_agree(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_record(record(**changed).to_bytes())


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (place(ranks=2), "made by 1 rank, and there are 2 now"),
        (place(names="abd"), "it has no d; the model has no c"),
        (place(trained=False), "a was trained, and is frozen now"),
        (place(sub_group_numel_max=4096), "set zero_optimization.sub_group_size"),
        (dataclasses.replace(place(), compute_dtype="float16"), "gathered in bfloat16, and are in float16"),
        (dataclasses.replace(place(), shards=2), "sharded over 1 ranks"),
    ],
)
def test_what_differs_is_said_in_words(here: ArenaLayout, words: str) -> None:
    assert words in "; ".join(differences(place(), here))
    assert not list(differences(here, here))


def test_a_place_is_the_same_after_a_journey() -> None:
    where = parse_record(record().to_bytes()).layout
    assert where == place()
    assert json.loads(where.as_json)["sub_groups"]
