"""Layout of a checkpoint's arena file: the place of each sub-group's fields. Pure arithmetic, no torch, no I/O.

    sub-group 0 | sub-group 1 | ...                   rankN.arena
    compute parameter | remainder | moment 1 | ...    a sub-group: all of its fields, in the order of layout.py

The file is the same whether a field was in the arena or in host memory, and whichever A/B slot was current. The remaining
state of a rank is in `rankN.record`, a commit record (infinity/store/commit.py), which also says how sub-groups are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from infinity.store.commit import ArenaLayout
from infinity.store.layout import (
    SPACE_ALIGN,
    Field,
    Piece,
    Shard,
    SubGroup,
    moments_of,
    pieces_of,
    place_shards,
    shard_align,
)

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MOMENT_ITEMSIZES = {"float32": 4, "bfloat16": 2, "uint8": 1}


class Snapshot:
    """The arena file of a rank whose arena has `layout`. Raises ValueError if that contradicts itself."""

    def __init__(self, layout: ArenaLayout) -> None:
        _check_parameters(layout)
        self.sub_groups = _sub_groups_of(layout)
        *self.offsets, self.nbytes = accumulate((sub.nbytes for sub in self.sub_groups), initial=0)
        self._by_parameter: list[list[tuple[SubGroup, Piece]]] = [[] for _ in layout.parameters]
        for sub in self.sub_groups:
            for piece in sub.pieces:
                self._by_parameter[piece.shard].append((sub, piece))

    def field_offset(self, sub: SubGroup, field: Field) -> int:
        return self.offsets[sub.index] + sub.field_offset(field)

    def pieces(self, parameter: int, start: int, numel: int) -> Iterator[tuple[SubGroup, int, int]]:
        """Yield (sub-group, its first element, count) of the pieces of a range of elements of a parameter's shard, in
        order."""
        for sub, piece in self._by_parameter[parameter]:
            low, high = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if low < high:
                yield sub, piece.offset + low - piece.start, high - low


def rows_of(shape: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements [start, end) of a whole parameter on rank `rank` of `ranks`. FSDP2 cuts by rows: equally many
    per rank, fewer on the last ranks."""
    rows, row_numel = -(-shape[0] // ranks), math.prod(shape[1:])
    first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
    return first * row_numel, last * row_numel


def _check_parameters(layout: ArenaLayout) -> None:
    if layout.compute_dtype not in _ITEMSIZES:
        raise ValueError(f"parameters can't have been gathered in {layout.compute_dtype}")
    if not layout.rank < layout.ranks or layout.ranks % layout.shards:
        raise ValueError(f"rank {layout.rank} of {layout.ranks}, sharded over {layout.shards}, is impossible")
    if len({parameter.name for parameter in layout.parameters}) != len(layout.parameters):
        raise ValueError("a parameter is in it twice")
    if len(set(layout.moments)) != len(layout.moments):
        raise ValueError("a moment is in it twice")
    if layout.matrix_moments > len(layout.moments):
        raise ValueError(f"{layout.matrix_moments} of its {len(layout.moments)} moments can't be of whole matrices")
    if any(parameter.whole and not parameter.trained for parameter in layout.parameters):
        raise ValueError("a matrix that is whole isn't trained")
    for param in layout.parameters:
        if not param.shape or param.numel != rows_of((-(-param.shape[0] // layout.shards), *param.shape[1:]), 0, 1)[1]:
            raise ValueError(f"{param.name} of shape {param.shape} can't have {param.numel} elements on a rank")
        if param.group >= len(layout.parameters):
            raise ValueError(f"{param.name} can't be in group {param.group}")


def _sub_groups_of(layout: ArenaLayout) -> list[SubGroup]:
    """Return the sub-groups of the record, which must fill the flat spaces of its parameters."""
    groups = max((param.group for param in layout.parameters), default=-1) + 1
    shards = [Shard(p.name, p.group, p.numel, p.trained, p.resident, whole=p.whole) for p in layout.parameters]
    moment_itemsize = _MOMENT_ITEMSIZES[layout.moments_dtype]
    where, parts = place_shards(shards, groups, shard_align(moment_itemsize))
    stored = iter(enumerate(layout.sub_groups))
    sub_groups: list[SubGroup] = []
    for space, of_space in enumerate(parts):
        itemsizes = (0, _ITEMSIZES[layout.compute_dtype]) if space < groups else (0,)
        for part in of_space:
            trained, of_matrices = part.trained, layout.matrix_moments
            moments = moments_of(part, len(layout.moments) - of_matrices, of_matrices)
            at = part.start
            while at < part.end:
                index, cut = next(stored, (0, None))
                if cut is None or (cut.space, cut.start, cut.trained) != (space, at, trained):
                    raise ValueError(f"its sub-groups don't make up space {space}")
                if not 0 < cut.numel <= part.end - at or cut.numel % SPACE_ALIGN:
                    raise ValueError(f"sub-group {index} can't have {cut.numel} elements")
                itemsize = cut.compute_itemsize
                if itemsize not in itemsizes:
                    raise ValueError(f"sub-group {index} can't have compute parameters of {itemsize} bytes")
                if cut.split and not (itemsize and layout.compute_dtype == "bfloat16"):
                    raise ValueError(f"sub-group {index} can't have split masters")
                pieces = pieces_of(part, shards, where, at, cut.numel)
                if part.whole and any(piece.numel != shards[piece.shard].numel for piece in pieces):
                    raise ValueError(f"sub-group {index} cuts a matrix that is whole")
                of_sub = (index, space, at, cut.numel, trained, itemsize, pieces, cut.split)
                sub_groups.append(SubGroup(*of_sub, moments=moments, whole=part.whole, moment_itemsize=moment_itemsize))
                at += cut.numel
    if next(stored, None) is not None:
        raise ValueError("it has more sub-groups than its parameters need")
    return sub_groups
