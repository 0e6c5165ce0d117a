"""The commit record: which bytes of the arena are one rank's state after a step, and the state that is not there.

No torch here, and no I/O: bytes in, a checked record out. Anybody may have written the file, so every field is checked.

    infinity-commit 5 SHA-256 LENGTH LENGTH LENGTH LENGTH LENGTH        one line; the hash covers all that follows it
    commit (JSON) | arena layout (JSON) | ties (int32) | unpaged state (the runtime's bytes) | sums (CRC-32C of the pages)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from infinity.store.files import parse_json
from infinity.store.layout import MOMENTS, Layout
from infinity.store.layout import Field as LayoutField
from infinity.units import GIB

VERSION = 5
SUM_BYTES = 4
"""Bytes of the checksum of a page."""
RECORD_BYTES_MAX = 16 * GIB
"""Largest record that is read. The sums are a thousandth of a rank's state, so that may have 16 TiB."""

_FIRST_LINE = re.compile(rb"infinity-commit (\d{1,9}) ([0-9a-f]{64})" + 5 * rb" (\d{1,15})" + rb"\n")
_LINE_BYTES_MAX = 192

MomentsDtype = Literal["float32", "bfloat16", "uint8"]

_Count = Annotated[int, Field(ge=0, le=2**62)]
_Bits = Annotated[str, Field(pattern=r"^[01]*$")]
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")]


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of the model. shape: of the whole parameter. numel: elements of this rank's shard. resident: see `Shard`."""

    name: str
    shape: tuple[_Count, ...]
    group: _Count
    numel: _Count
    trained: bool
    resident: bool
    whole: bool = False


@dataclass(frozen=True)
class StoredSubGroup:
    """A sub-group as the layout cut it: see `SubGroup`."""

    space: _Count
    start: _Count
    numel: _Count
    trained: bool
    compute_itemsize: _Count
    split: bool


@dataclass(frozen=True, kw_only=True)
class ArenaLayout:
    """How the state of one rank lies in its arena. It must be the same where the arena is read again.

    Attributes:
        rank, ranks: this rank's number, and how many there are. shards: over how many of them each parameter is sharded.
        compute_dtype: dtype in which parameters are gathered.
        pattern, stripe_bytes, arena_bytes: how the bytes are spread over the drives.
        moments: the optimizer's names for its numbers per element, in the order of the fields.
        matrix_moments: how many of these, the last ones, are of whole matrices, which have no others.
        moments_dtype: of all of them; uint8 for codes with scales.
    """

    rank: _Count
    ranks: Annotated[int, Field(ge=1, le=2**31)]
    shards: Annotated[int, Field(ge=1, le=2**31)]
    compute_dtype: str
    pattern: tuple[_Count, ...]
    stripe_bytes: Annotated[int, Field(ge=1, le=2**40)]
    arena_bytes: _Count
    parameters: tuple[StoredParameter, ...]
    sub_groups: tuple[StoredSubGroup, ...]
    moments: Annotated[tuple[_Name, ...], Field(max_length=len(MOMENTS))]
    matrix_moments: Annotated[int, Field(ge=0, le=len(MOMENTS))]
    moments_dtype: MomentsDtype

    def moments_of(self, *, whole: bool) -> dict[str, LayoutField]:
        """The fields of what the optimizer keeps of each element, by its names: of whole matrices, or of the others."""
        named = list(zip(self.moments, MOMENTS, strict=False))
        others = len(named) - self.matrix_moments
        return dict(named[others:] if whole else named[:others])

    @cached_property
    def as_json(self) -> bytes:
        """The section of this layout in every record of the run."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The head of a record.

    Attributes:
        sequence: number of the commit, counted over all launches of the run.
        launch: of which launch it is; the same on all ranks.
        arena: identity of the arena files it is about.
        step: optimizer steps taken.
        slots: per sub-group, which of its two slots holds its state.
        filled, stepped: per parameter, whether it has values, and moments.
        ties: per sub-group, its count of the record's ties.
    """

    sequence: Annotated[int, Field(ge=1, le=2**62)]
    launch: _Id
    arena: _Id
    step: _Count
    slots: _Bits
    filled: _Bits
    stepped: _Bits
    ties: tuple[_Count, ...]

    @property
    def identity(self) -> tuple[int, str]:
        """The same on all ranks that made this commit, and different for every other commit."""
        return self.sequence, self.launch


@dataclass(frozen=True)
class Record:
    """A whole record. `ties`: int32, little-endian, sub-group by sub-group. `unpaged_state`: as the runtime encoded it.
    `sums`: checksums of the pages of the state, sub-group by sub-group, as `File.checksums`; empty where none are kept."""

    commit: Commit
    layout: ArenaLayout
    ties: bytes
    unpaged_state: bytes
    sums: bytes = b""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        head = json.dumps(asdict(self.commit), separators=(",", ":")).encode()
        sections = (head, self.layout.as_json, self.ties, self.unpaged_state, self.sums)
        lengths = " ".join(str(len(section)) for section in sections)
        return f"infinity-commit {VERSION} {_hash(sections)} {lengths}\n".encode() + b"".join(sections)


def parse_record(content: bytes, layout: ArenaLayout | None = None) -> Record:
    """Parse `content`. A record with the given `layout`, if any, shares that object. Raises ValueError saying what is wrong."""
    line = _FIRST_LINE.match(content[:_LINE_BYTES_MAX])
    if line is None:
        raise ValueError("it does not begin as a commit record does")
    if int(line[1]) != VERSION:
        raise ValueError(f"it has format {int(line[1])}, and this version of infinity reads format {VERSION}")
    lengths = [int(length) for length in line.groups()[2:]]
    if len(content) != line.end() + sum(lengths):
        raise ValueError(f"it has {len(content)} bytes instead of {line.end() + sum(lengths)}")
    sections = []
    at = line.end()
    for length in lengths:
        sections.append(content[at : at + length])
        at += length
    if _hash(sections) != line[2].decode():
        raise ValueError("its bytes are not those that were written (SHA-256)")
    head, layout_json, ties, unpaged_state, sums = sections
    if layout is None or layout_json != layout.as_json:
        layout = parse_json(ArenaLayout, layout_json)
    record = Record(parse_json(Commit, head), layout, ties, unpaged_state, sums)
    _check_counts(record)
    return record


def _hash(sections: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for section in sections:
        digest.update(len(section).to_bytes(8, "little"))
        digest.update(section)
    return digest.hexdigest()


def _check_counts(record: Record) -> None:
    commit, layout = record.commit, record.layout
    if not len(commit.slots) == len(commit.ties) == len(layout.sub_groups):
        raise ValueError(f"it has slots for {len(commit.slots)} sub-groups where there are {len(layout.sub_groups)}")
    if not len(commit.filled) == len(commit.stepped) == len(layout.parameters):
        raise ValueError(f"it has flags for {len(commit.filled)} parameters where there are {len(layout.parameters)}")
    if 4 * sum(commit.ties) != len(record.ties):
        raise ValueError(f"it holds {len(record.ties)} bytes of ties, and counts {sum(commit.ties)} of 4 bytes")
    if not layout.pattern:
        raise ValueError("it names no drive")


def describe(
    layout: Layout,
    shapes: Sequence[Sequence[int]],
    *,
    rank: int,
    ranks: int,
    shards: int,
    compute_dtype: str,
    moments: Sequence[str] = ("exp_avg", "exp_avg_sq"),
    matrix_moments: Sequence[str] = (),
    moments_dtype: str = "float32",
) -> ArenaLayout:
    """The arena layout of a model with `layout`, without its drives. `shapes`: of the whole parameters, in the order of the
    layout's shards."""
    return ArenaLayout(
        rank=rank,
        ranks=ranks,
        shards=shards,
        compute_dtype=compute_dtype,
        pattern=(0,),
        stripe_bytes=1,
        arena_bytes=0,
        parameters=tuple(
            StoredParameter(
                shard.name, tuple(shape), shard.group, shard.numel, shard.trained, shard.resident, shard.whole
            )
            for shard, shape in zip(layout.shards, shapes, strict=True)
        ),
        sub_groups=tuple(
            StoredSubGroup(sub.space, sub.start, sub.numel, sub.trained, sub.compute_itemsize, sub.split)
            for sub in layout.sub_groups
        ),
        moments=(*moments, *matrix_moments),
        matrix_moments=len(matrix_moments),
        moments_dtype=cast(MomentsDtype, moments_dtype),
    )


def differences(there: ArenaLayout, here: ArenaLayout) -> Iterator[str]:
    """Messages: why state committed with layout `there` can't be read with layout `here`. Drives may differ."""
    if there.ranks != here.ranks:
        yield f"it was made by {_ranks(there.ranks)}, and there are {here.ranks} now: a checkpoint can be loaded by any number"
        return
    if there.shards != here.shards:
        yield f"it was sharded over {there.shards} ranks, and is over {here.shards} now: set mics_shard_size as it was"
        return
    if there.rank != here.rank:
        yield f"it is rank {there.rank}'s, and this is rank {here.rank}"
        return
    if there.compute_dtype != here.compute_dtype:
        yield f"parameters were gathered in {there.compute_dtype}, and are in {here.compute_dtype} now"
    if there.moments != here.moments:
        before, now = kept_in_words(there.moments), kept_in_words(here.moments)
        yield f"its optimizer kept {before}, and keeps {now} now: use the one of that run"
    if there.moments_dtype != here.moments_dtype:
        yield (
            f"its moments are {there.moments_dtype}, and are {here.moments_dtype} now: set infinity.moments_dtype as it was; "
            "a checkpoint can be loaded into another one"
        )
    theirs = {parameter.name: parameter for parameter in there.parameters}
    ours = {parameter.name: parameter for parameter in here.parameters}
    for complaint, names in (
        ("it has no", ours.keys() - theirs.keys()),
        ("the model has no", theirs.keys() - ours.keys()),
    ):
        if names:
            yield f"{complaint} {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
    changed = [(theirs[name], param) for name, param in ours.items() if theirs.get(name, param) != param]
    for old, new in changed[:3]:
        yield f"{new.name} {_change(old, new)}"
    if not changed and there.parameters != here.parameters and theirs.keys() == ours.keys():
        yield "its parameters come in another order"
    elif there.parameters == here.parameters and there.sub_groups != here.sub_groups:
        yield (
            "its sub-groups are cut or kept in another way: set zero_optimization.sub_group_size, infinity.pinned_bytes_max "
            "and infinity.master_weights as they were"
        )


def kept_in_words(moments: Iterable[str]) -> str:
    """The numbers that an optimizer keeps per element, for messages."""
    return " and ".join(moments) or "nothing"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _change(before: StoredParameter, now: StoredParameter) -> str:
    if before.shape != now.shape:
        return f"had shape {before.shape}, and has {now.shape} now"
    if before.trained != now.trained:
        return "was trained, and is frozen now" if before.trained else "was frozen, and is trained now"
    if before.resident != now.resident:
        return "was kept in host memory, or is now: set stage3_param_persistence_threshold and max_in_cpu as they were"
    if before.whole != now.whole:
        return "was updated by Muon, and isn't now" if before.whole else "is updated by Muon now, and wasn't"
    if before.group != now.group:
        return f"was in group {before.group}, and is in group {now.group} now: set infinity.wrap as it was"
    return f"had {before.numel} elements on this rank, and has {now.numel} now"


def bits(values: Sequence[Any]) -> str:
    """Truth values as the text of a record."""
    return "".join("1" if value else "0" for value in values)
