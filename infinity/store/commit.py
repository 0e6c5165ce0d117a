"""Floor 4. The record of a commit: which bytes of the arena are one rank's state after a step, and what lies outside of it.

No torch here, and no I/O: bytes in, a checked record out. It is read as what it is, a file that anybody may have written.

    infinity-commit 3 SHA-256 LENGTH LENGTH LENGTH LENGTH LENGTH        one line, the hash is over all that follows it
    header (JSON) | place (JSON) | ties (int32) | outside (what the runtime encoded) | sums (CRC-32C of the pages)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from infinity.store.layout import MOMENTS, Layout
from infinity.units import GIB

VERSION = 3
_READ = (1, 2, VERSION)
"""Formats that are read. In the first one the runtime's own bytes were larger; the first two have older names of fields."""
_OLDER_NAMES = {
    b'"copy_dtype":': b'"compute_dtype":',
    b'"copy_itemsize":': b'"compute_itemsize":',
    b'"halves":': b'"slots":',
}
"""As they stand in JSON, where a quotation mark inside of a text has a backslash before it."""

SUM_BYTES = 4
"""Of the checksum of a page."""
RECORD_BYTES_MAX = 16 * GIB
"""Of what is read as a record: the sums are a thousandth of a rank's state, which may be 16 TiB then."""

_FIRST_LINE = re.compile(rb"infinity-commit (\d{1,9}) ([0-9a-f]{64})" + 5 * rb" (\d{1,15})" + rb"\n")
_LINE_BYTES_MAX = 192

_Count = Annotated[int, Field(ge=0, le=2**62)]
_Bits = Annotated[str, Field(pattern=r"^[01]*$")]
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")]
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of the model: its name and whole shape, its group, and where its shard's elements are."""

    name: str
    shape: tuple[_Count, ...]
    group: _Count
    numel: _Count
    trained: bool
    resident: bool


@dataclass(frozen=True)
class StoredSubGroup:
    """A sub-group as the layout cut it."""

    space: _Count
    start: _Count
    numel: _Count
    trained: bool
    compute_itemsize: _Count
    split: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """How the state of one rank lies in its arena: what must be alike where it is read again.

    Attributes:
        rank, ranks: whose it is, of how many; `shards`: over how many of them each parameter is sharded.
        compute_dtype: in which parameters are gathered.
        pattern, stripe_bytes, arena_bytes: how the bytes are spread over the drives.
        moments: what the optimizer keeps of each element, by its own names, in the order of the fields. Records that don't say
            are older, and Adam's.
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
    moments: Annotated[tuple[_Name, ...], Field(max_length=len(MOMENTS))] = ("exp_avg", "exp_avg_sq")

    @cached_property
    def as_json(self) -> bytes:
        """What stands in every record of the run."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The head of a record.

    Attributes:
        sequence: counts the commits of a run, over all its launches.
        launch: which launch made it, alike on all ranks.
        arena: which arena files it speaks of.
        step: optimizer steps that had been taken.
        slots: by sub-group, the slot of its pair that holds its state.
        filled, stepped: by parameter, whether it was given values, and moments.
        ties: by sub-group, how many of the numbers in the record's ties are its own.
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
        """The same on all ranks that made this commit, and of no other."""
        return self.sequence, self.launch


@dataclass(frozen=True)
class Record:
    """A whole record. `ties`: int32, little-endian, sub-group by sub-group. `unpaged_state`: the runtime's own bytes.
    `sums`: what each page of the state must hold, sub-group by sub-group, as `File.checksums` gives it; empty
    where none are kept."""

    commit: Commit
    place: Place
    ties: bytes
    unpaged_state: bytes
    sums: bytes = b""

    def to_bytes(self) -> bytes:
        """What stands in the file."""
        head = json.dumps(asdict(self.commit), separators=(",", ":")).encode()
        sections = (head, self.place.as_json, self.ties, self.unpaged_state, self.sums)
        lengths = " ".join(str(len(each)) for each in sections)
        return f"infinity-commit {VERSION} {_hash(sections)} {lengths}\n".encode() + b"".join(sections)


def parse_record(content: bytes, place: Place | None = None) -> Record:
    """The record that `content` is, whose place may be `place`. Raises ValueError saying what is wrong."""
    found = _FIRST_LINE.match(content[:_LINE_BYTES_MAX])
    if found is None:
        raise ValueError("it does not begin as a commit record does")
    if int(found[1]) not in _READ:
        formats = " and ".join(map(str, _READ))
        raise ValueError(f"it has format {int(found[1])}, and this version of infinity reads formats {formats}")
    lengths = [int(length) for length in found.groups()[2:]]
    if len(content) != found.end() + sum(lengths):
        raise ValueError(f"it has {len(content)} bytes instead of {found.end() + sum(lengths)}")
    sections = []
    at = found.end()
    for length in lengths:
        sections.append(content[at : at + length])
        at += length
    if _hash(sections) != found[2].decode():
        raise ValueError("its bytes are not those that were written (SHA-256)")
    head, described, ties, unpaged_state, sums = sections
    if int(found[1]) < VERSION:
        head, described = _renamed(head), _renamed(described)
    if place is None or described != place.as_json:
        place = _parse(Place, described)
    record = Record(_parse(Commit, head), place, ties, unpaged_state, sums)
    _check_counts(record)
    return record


def _renamed(described: bytes) -> bytes:
    for older, name in _OLDER_NAMES.items():
        described = described.replace(older, name)
    return described


def _hash(sections: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for each in sections:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each)
    return digest.hexdigest()


def _parse(kind: type[_T], content: bytes) -> _T:
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None


def _check_counts(record: Record) -> None:
    commit, place = record.commit, record.place
    if not len(commit.slots) == len(commit.ties) == len(place.sub_groups):
        raise ValueError(f"it speaks of {len(commit.slots)} sub-groups where there are {len(place.sub_groups)}")
    if not len(commit.filled) == len(commit.stepped) == len(place.parameters):
        raise ValueError(f"it speaks of {len(commit.filled)} parameters where there are {len(place.parameters)}")
    if 4 * sum(commit.ties) != len(record.ties):
        raise ValueError(f"it holds {len(record.ties)} bytes of ties for {sum(commit.ties)} of them")
    if not place.pattern:
        raise ValueError("it names no drive")


def describe(
    layout: Layout,
    shapes: Sequence[Sequence[int]],
    *,
    rank: int,
    ranks: int,
    shards: int,
    compute_dtype: str,
    pattern: Sequence[int] = (0,),
    stripe_bytes: int = 1,
    arena_bytes: int = 0,
    moments: Sequence[str] = ("exp_avg", "exp_avg_sq"),
) -> Place:
    """The place that a model laid out so has; `shapes`: of its whole parameters, in the order of the layout's shards."""
    return Place(
        rank=rank,
        ranks=ranks,
        shards=shards,
        compute_dtype=compute_dtype,
        pattern=tuple(pattern),
        stripe_bytes=stripe_bytes,
        arena_bytes=arena_bytes,
        parameters=tuple(
            StoredParameter(each.name, tuple(shape), each.group, each.numel, each.trained, each.resident)
            for each, shape in zip(layout.shards, shapes, strict=True)
        ),
        sub_groups=tuple(
            StoredSubGroup(each.space, each.start, each.numel, each.trained, each.compute_itemsize, each.split)
            for each in layout.sub_groups
        ),
        moments=tuple(moments),
    )


def differences(there: Place, here: Place) -> Iterator[str]:
    """In words, why what was committed `there` can't be read `here`; the drives aside, which follow the record."""
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
        kept, keeps = kept_in_words(there.moments), kept_in_words(here.moments)
        yield f"its optimizer kept {kept}, and keeps {keeps} now: use the one of that run"
    theirs = {each.name: each for each in there.parameters}
    ours = {each.name: each for each in here.parameters}
    for what, names in (("it has no", ours.keys() - theirs.keys()), ("the model has no", theirs.keys() - ours.keys())):
        if names:
            yield f"{what} {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
    changed = [(theirs[name], each) for name, each in ours.items() if theirs.get(name, each) != each]
    for before, now in changed[:3]:
        yield f"{now.name} {_change(before, now)}"
    if not changed and there.parameters != here.parameters and theirs.keys() == ours.keys():
        yield "its parameters come in another order"
    elif there.parameters == here.parameters and there.sub_groups != here.sub_groups:
        yield (
            "its sub-groups are cut or kept in another way: set zero_optimization.sub_group_size, infinity.pinned_bytes_max "
            "and infinity.master_weights as they were"
        )


def kept_in_words(moments: Iterable[str]) -> str:
    """What an optimizer keeps of each element."""
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
    if before.group != now.group:
        return f"was in group {before.group}, and is in group {now.group} now: set infinity.wrap as it was"
    return f"had {before.numel} elements on this rank, and has {now.numel} now"


def bits(values: Sequence[Any]) -> str:
    """Truth values as a record holds them."""
    return "".join("1" if each else "0" for each in values)
