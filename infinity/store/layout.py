"""How the shards of a model lie in the arena: pure arithmetic on element counts.

[Note: Flat spaces]
The shards of one group are laid one after another in a flat space of elements: first those that are trained, then the
frozen ones, each part starting on a boundary of SPACE_ALIGN elements. Shards that stay resident in host memory are not
fetched with their group, so all of them share one flat space of their own.

A flat space is cut into sub-groups at multiples of SPACE_ALIGN elements. A sub-group is one extent:

    | compute parameter (bf16)   | remainder (16-bit) | moment 1 (fp32) | moment 2 (fp32) |   trained
    | compute parameter (16-bit) | master (fp32)      | moment 1 (fp32) | moment 2 (fp32) |   trained, the master kept in full
    | compute parameter (16-bit) | master (fp32)      |                                       frozen

The moments are the numbers that the optimizer keeps per element: Adam has two, which may be bf16, SGD its momentum, or none.
Adam's may also be codes of 8 bits. Then the scales of all blocks of BLOCK_NUMEL elements, the first moment's before the
second's, are a field behind them, and so that no block is of two shards, each shard starts with one.
Matrices that Muon updates, which needs all of one, are cut between each other only, and have a moment of their own. A bf16
compute parameter and the remainder that rounding left make the master (infinity/optim/kernel.py): 12 bytes an element with
Adam, instead of 14. Every field has the same element offsets, and fields begin at multiples of 4 KiB. So the optimizer reads a
sub-group's state with one read and writes all of it with one write; and the compute parameters of a group's sub-groups, read
one behind the other, give the group's flat space without a gap, shards that a boundary cuts included. Where compute runs in
fp32 there is no compute parameter: the master is gathered. Nor is there one in the space of resident shards, where no gather
would read it.

Fields that stay in host memory, held there or cached, are left out of the extent; the others move up. A sub-group with no
field on NVMe has an extent of no bytes.

A shard that stays in a file of the user is in no flat space: its group reads it behind the compute parameters of its own
(foreign.py).

Where gradients don't fit into host memory, those of a sub-group have an extent of their own, from the backward to the update,
which reads them into the same lease, behind the state.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from infinity.errors import ConfigError
from infinity.store.foreign import ForeignPart
from infinity.units import PAGE_BYTES, align_up

SPACE_ALIGN = 2048
"""Elements between possible sub-group boundaries: 4 KiB of 16-bit elements."""

BLOCK_NUMEL = 256
"""Elements with one scale, where moments are coded."""

SHARD_ALIGN = 64
"""Elements between possible starts of shards. Vector kernels handle the last few elements of a tensor differently, so a
shard is only ever cut where a vector would end anyway: 64 covers every vector width."""


class Field(enum.Enum):
    """The values kept per element of a sub-group."""

    COMPUTE = "compute parameter"
    MASTER = "master"
    REMAINDER = "remainder"
    MOMENT_1 = "moment 1"
    MOMENT_2 = "moment 2"
    MOMENT_3 = "moment 3"
    MOMENT_4 = "moment 4"
    SCALES = "scales"


MOMENTS = (Field.MOMENT_1, Field.MOMENT_2, Field.MOMENT_3, Field.MOMENT_4)
"""A layout has the first few of these."""

_STATE = (Field.MASTER, Field.REMAINDER, *MOMENTS, Field.SCALES)


@dataclass(frozen=True)
class Shard:
    """This rank's piece of one parameter, as far as the layout depends on it.

    group: number of its group. numel: elements, padding of uneven sharding included. trained: has optimizer state.
    resident: its compute parameter stays in host memory. foreign: stays in a file of the user. whole: the optimizer updates it
    as one matrix.
    """

    name: str
    group: int
    numel: int
    trained: bool = True
    resident: bool = False
    foreign: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of shard number `shard`, at element `offset` of their sub-group."""

    shard: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class SubGroup:
    """Elements [start, start + numel) of flat space number `space`; the unit of the optimizer's reads and writes."""

    index: int
    space: int
    start: int
    numel: int
    trained: bool
    compute_itemsize: int
    pieces: tuple[Piece, ...]
    split: bool = False
    """Whether the master is kept as compute parameter and remainder."""
    held: tuple[Field, ...] = ()
    """The fields that stay in ordinary host memory."""
    cached: tuple[Field, ...] = ()
    """The fields that stay in pinned memory."""
    gradient_itemsize: int = 0
    """Bytes per element of a gradient that waits for its update on NVMe; 0 where it waits in host memory."""
    moments: tuple[Field, ...] = MOMENTS[:2]
    """The numbers that the optimizer keeps of each element, where it is trained."""
    whole: bool = False
    """Whether its shards are matrices that are updated whole."""
    moment_itemsize: int = 4
    """Bytes of each of these numbers; 1 where they are codes, which have scales."""

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All fields, in order."""
        moments = self.moments if self.trained else ()
        if self.coded:
            moments = (*moments, Field.SCALES)
        if self.split:
            return (Field.COMPUTE, Field.REMAINDER, *moments)
        compute = (Field.COMPUTE,) if self.compute_itemsize else ()
        return (*compute, Field.MASTER, *moments)

    @cached_property
    def on_nvme(self) -> tuple[Field, ...]:
        """The fields of the extent, in order."""
        return tuple(field for field in self.fields if field not in self.held and field not in self.cached)

    @cached_property
    def gathered(self) -> Field:
        """The field that is gathered (but in the space of resident shards, which is not gathered from here)."""
        return Field.COMPUTE if self.compute_itemsize else Field.MASTER

    @cached_property
    def gathered_start(self) -> int:
        """The first byte of that in the flat space of its group."""
        return self.start * self.itemsize(self.gathered)

    @cached_property
    def coded(self) -> bool:
        """Whether its moments are codes, with scales."""
        return self.trained and self.moment_itemsize == 1

    def field_numel(self, field: Field, numel: int | None = None) -> int:
        """The numbers that a field has of so many elements (a multiple of BLOCK_NUMEL), or of all."""
        numel = self.numel if numel is None else numel
        return numel // BLOCK_NUMEL * len(self.moments) if field is Field.SCALES else numel

    def first_scale(self, moment: Field) -> int:
        """The number of the first scale of a moment among those of all."""
        return self.moments.index(moment) * (self.numel // BLOCK_NUMEL)

    def field_bytes(self, field: Field) -> int:
        """Bytes that a field takes, a multiple of 4 KiB."""
        return align_up(self.field_numel(field) * self.itemsize(field), PAGE_BYTES)

    def itemsize(self, field: Field) -> int:
        """Bytes of a number of a field."""
        if field is Field.COMPUTE:
            return self.compute_itemsize
        if field is Field.REMAINDER:
            return 2
        return 4 if field in (Field.MASTER, Field.SCALES) else self.moment_itemsize

    @cached_property
    def state(self) -> tuple[Field, ...]:
        """The fields of the extent that an update reads: all but a compute parameter that is no part of the master."""
        return tuple(field for field in self.on_nvme if self.split or field is not Field.COMPUTE)

    def field_offset(self, field: Field) -> int:
        """Where a field begins in the extent (bytes, a multiple of 4 KiB)."""
        if field not in self._offsets:
            raise KeyError(f"the extent of sub-group {self.index} has no field {field.value}")
        return self._offsets[field]

    @cached_property
    def _offsets(self) -> dict[Field, int]:
        ends = accumulate((self.field_bytes(field) for field in self.on_nvme), initial=0)
        return dict(zip(self.on_nvme, ends, strict=False))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole extent."""
        return sum(self.field_bytes(field) for field in self.on_nvme)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the extent of its gradient."""
        return self.numel * self.gradient_itemsize

    @cached_property
    def lease_bytes(self) -> int:
        """Bytes of the lease in which it is updated: its extent, and its gradient behind that."""
        return self.nbytes + self.gradient_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of pinned memory that its cached fields take."""
        return sum(self.field_bytes(field) for field in self.cached)


class PartKey(NamedTuple):
    """One part of a flat space: what of it is trained, in pieces or as whole matrices, or frozen."""

    space: int
    trained: bool
    whole: bool = False


@dataclass(frozen=True)
class Cached:
    """Which fields of one part of a flat space stay in pinned memory: the gathered one for the first `gathered_numel` elements,
    those that only the optimizer needs for the first `state_numel`. Both are multiples of SPACE_ALIGN, and of whole matrices
    where one ends."""

    gathered_numel: int = 0
    state_numel: int = 0

    def fields_of(self, sub: SubGroup, first: int) -> tuple[Field, ...]:
        """The fields that stay in memory of a sub-group that begins at element `first` of the part."""
        gathered = first < self.gathered_numel
        state = first < self.state_numel
        return tuple(field for field in sub.on_nvme if (gathered if field is sub.gathered else state))


@dataclass(frozen=True)
class Layout:
    """The layout of one rank's shards: `place[i]` is (flat space, first element) of shard i.

    Space g belongs to group g; the last one holds the resident shards of all groups.
    """

    shards: tuple[Shard, ...]
    place: tuple[tuple[int, int], ...]
    space_numel: tuple[int, ...]
    sub_groups: tuple[SubGroup, ...]
    by_space: tuple[tuple[SubGroup, ...], ...] = field(repr=False)
    foreign: tuple[ForeignPart, ...] = field(default=(), repr=False)
    """By group, what it reads of files of the user."""

    def gathered_bytes(self, group: int) -> int:
        """Bytes of the flat space of a group as it is gathered, in front of what it reads of files of the user."""
        return sum(sub.numel * sub.itemsize(sub.gathered) for sub in self.by_space[group])

    @property
    def resident_space(self) -> int:
        """Number of the space that holds the resident shards."""
        return len(self.space_numel) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all extents of state."""
        return sum(sub.nbytes for sub in self.sub_groups)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all extents of gradients."""
        return sum(sub.gradient_bytes for sub in self.sub_groups)

    @cached_property
    def cached_bytes(self) -> int:
        """Bytes of pinned memory that all cached fields take."""
        return sum(sub.cached_bytes for sub in self.sub_groups)

    @property
    def sub_group_bytes_max(self) -> int:
        """Bytes of the largest lease in which a sub-group is updated."""
        return max((sub.lease_bytes for sub in self.sub_groups if sub.trained), default=0)


def plan_layout(
    shards: Sequence[Shard],
    *,
    groups: int,
    sub_group_numel_max: int,
    compute_itemsize: int,
    split_master: bool = False,
    hold_state: bool = False,
    cache_gathered: bool = False,
    cached: Mapping[PartKey, Cached] | None = None,
    gradient_itemsizes: Mapping[int, int] | None = None,
    moments: int = 2,
    matrix_moments: int = 0,
    moment_itemsize: int = 4,
    foreign: Sequence[ForeignPart] | None = None,
) -> Layout:
    """Lay out `shards`, which belong to groups 0 to groups - 1. See [Note: Flat spaces].

    Args:
        shards: in the order of use; those of one group need not be neighbours.
        groups: how many groups there are.
        sub_group_numel_max: at most this many elements per sub-group (not below SPACE_ALIGN), but one matrix that is whole.
        compute_itemsize: bytes per element of the compute parameter (2), or 0 where the fp32 master itself is gathered.
        split_master: keep trained masters as compute parameter (which must be bf16) and remainder, wherever there is one.
        hold_state: masters and moments stay in host memory; extents hold compute parameters only.
        cache_gathered: everything that is gathered stays in pinned memory.
        cached: otherwise, which fields of each part stay in pinned memory.
        gradient_itemsizes: bytes per element of the gradients that wait on NVMe, by flat space; others wait in host memory.
        moments: numbers that the optimizer keeps of each element. matrix_moments: of those of whole matrices, instead.
        moment_itemsize: bytes of each of these (4, 2 as bf16, or 1 as codes with scales).
        foreign: by group, where its shards are that rest in files of the user.
    """
    if sub_group_numel_max < SPACE_ALIGN:
        raise ConfigError(f"sub_group_size must be at least {SPACE_ALIGN} elements, got {sub_group_numel_max}")
    space_numel: list[int] = []
    by_space: list[tuple[SubGroup, ...]] = []
    count = 0
    place, parts = place_shards(shards, groups, shard_align(moment_itemsize))
    for space, of_space in enumerate(parts):
        cuts: list[SubGroup] = []
        itemsize = compute_itemsize if space < groups else 0
        for part in of_space:
            trained = part.trained
            of_part = moments_of(part, moments, matrix_moments)
            held: tuple[Field, ...] = _STATE if hold_state else ()
            keep = (cached or {}).get(PartKey(space, trained, part.whole), Cached())
            for start, numel in _cut_part(part, place, keep, sub_group_numel_max):
                pieces = pieces_of(part, shards, place, start, numel)
                # Without a drive a frozen master is split, too: what isn't gathered of it takes 2 bytes, not 4.
                split = split_master and itemsize > 0 and (cache_gathered or (trained and not hold_state))
                of_sub = (count, space, start, numel, trained, itemsize, pieces, split, held)
                sub = SubGroup(*of_sub, moments=of_part, whole=part.whole, moment_itemsize=moment_itemsize)
                gradient = (gradient_itemsizes or {}).get(space, 0) if trained else 0
                in_cache = keep.fields_of(sub, start - part.start)
                if cache_gathered and space < groups:
                    in_cache = (sub.gathered,)
                in_memory = tuple(name for name in held if name not in in_cache)
                cuts.append(replace(sub, held=in_memory, cached=in_cache, gradient_itemsize=gradient))
                count += 1
        space_numel.append(of_space[-1].end)
        by_space.append(tuple(cuts))
    return Layout(
        tuple(shards),
        tuple(place),
        tuple(space_numel),
        tuple(s for cuts in by_space for s in cuts),
        tuple(by_space),
        tuple(foreign or [ForeignPart()] * groups),
    )


@dataclass(frozen=True)
class Part:
    """The shards of a flat space that are `trained`, in pieces or `whole`, or frozen, by number: its elements [start, end)."""

    shards: tuple[int, ...]
    start: int
    end: int
    trained: bool
    whole: bool


_KINDS = ((True, False), (True, True), (False, False))
"""(trained, whole) of the parts of a flat space, in order."""


def shard_align(moment_itemsize: int) -> int:
    """Elements between possible starts of shards."""
    return BLOCK_NUMEL if moment_itemsize == 1 else SHARD_ALIGN


def place_shards(
    shards: Sequence[Shard], groups: int, align: int
) -> tuple[list[tuple[int, int]], list[tuple[Part, ...]]]:
    """(space, first element) of each shard, and the parts of each space. Cuts into sub-groups change neither.

    `align`: see `shard_align`.
    """
    spaces: list[list[int]] = [[] for _ in range(groups + 1)]
    for i, shard in enumerate(shards):
        if not shard.foreign:
            spaces[groups if shard.resident else shard.group].append(i)
    place: list[tuple[int, int]] = [(0, 0)] * len(shards)
    parts = []
    for space, members in enumerate(spaces):
        end = 0
        of_space = []
        for trained, whole in _KINDS:
            in_part = tuple(i for i in members if (shards[i].trained, shards[i].whole) == (trained, whole))
            start = end
            for i in in_part:
                place[i] = (space, end)
                end = align_up(end + shards[i].numel, SPACE_ALIGN if whole else align)
            end = align_up(end, SPACE_ALIGN)
            of_space.append(Part(in_part, start, end, trained, whole))
        parts.append(tuple(of_space))
    return place, parts


def moments_of(part: Part, moments: int, matrix_moments: int) -> tuple[Field, ...]:
    """The fields of what an optimizer keeps of each element of a part: the matrices' come behind the others'."""
    return MOMENTS[moments : moments + matrix_moments] if part.whole else MOMENTS[:moments]


def _cut_part(part: Part, place: Sequence[tuple[int, int]], keep: Cached, numel_max: int) -> Iterator[tuple[int, int]]:
    """(start, numel) of its sub-groups: cut where the cache ends, and anywhere, or between whole matrices alone."""
    ends = {part.start, part.start + keep.gathered_numel, part.start + keep.state_numel, part.end}
    if not part.whole:
        for low, high in pairwise(sorted(ends)):
            yield from _cut(low, high, numel_max)
        return
    start = part.start
    for begin, end in pairwise([*(place[i][1] for i in part.shards), part.end]):
        if begin > start and (end - start > numel_max or begin in ends):
            yield start, begin - start
            start = begin
    if part.end > start:
        yield start, part.end - start


def _cut(start: int, end: int, numel_max: int) -> list[tuple[int, int]]:
    """(start, numel) of the fewest pieces of [start, end) with at most `numel_max` elements, as even as SPACE_ALIGN allows."""
    total = end - start
    if not total:
        return []
    limit = numel_max // SPACE_ALIGN * SPACE_ALIGN
    parts = -(-total // limit)
    size = align_up(-(-total // parts), SPACE_ALIGN)
    return [(at, min(size, end - at)) for at in range(start, end, size)]


def pieces_of(
    part: Part, shards: Sequence[Shard], place: Sequence[tuple[int, int]], start: int, numel: int
) -> tuple[Piece, ...]:
    """The pieces of the part's shards in elements [start, start + numel) of their space."""
    pieces = []
    from_here = max(0, bisect_right(part.shards, start, key=lambda i: place[i][1]) - 1)  # they lie in order
    for number in range(from_here, len(part.shards)):
        i = part.shards[number]
        first = place[i][1]
        if first >= start + numel:
            break
        low, high = max(first, start), min(first + shards[i].numel, start + numel)
        if low < high:
            pieces.append(Piece(i, low - first, high - low, low - start))
    return tuple(pieces)


assert SPACE_ALIGN * 2 % PAGE_BYTES == 0 and SPACE_ALIGN % SHARD_ALIGN == 0
