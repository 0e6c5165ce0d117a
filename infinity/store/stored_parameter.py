"""Parameters in safetensors: under their own name, or as several tensors, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import CheckpointError
from infinity.store.foreign import FOREIGN_DTYPES, FileRange, StoredParameter, StoredTensor, read_bytes


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """The rows of several parameters, one behind the other."""

    members: tuple[StoredParameter, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(member.shape[0] for member in self.members), *self.members[0].shape[1:]

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        """Member by member."""
        mine = self._members(first, count)
        return tuple(file_range for member, low, rows in mine for file_range in member.ranges(low, rows))

    def decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        at = taken = 0
        for member, low, rows in self._members(first, len(out)):
            count = len(member.ranges(low, rows))
            if rows:
                member.decode(parts[taken : taken + count], low, out[at : at + rows])
            at, taken = at + rows, taken + count

    def _members(self, first: int, count: int) -> list[tuple[StoredParameter, int, int]]:
        """(member, its first row, rows) of those that are in rows [first, first + count)."""
        mine, begin = [], 0
        for member in self.members:
            low, high = max(first, begin), min(first + count, begin + member.shape[0])
            mine.append((member, min(low - begin, member.shape[0]), max(0, high - low)))
            begin += member.shape[0]
        return mine


def read_rows(stored: StoredParameter, first: int, out: torch.Tensor) -> None:
    """Set `out` (rows from `first` on, in ordinary memory) from the files, through the page cache. Raises OSError."""
    if out.numel():
        stored.decode([read_bytes(file_range) for file_range in stored.ranges(first, len(out))], first, out)


def stored_parameter(
    names: Iterable[str], others: Iterable[Sequence[str]], where: Mapping[str, StoredParameter]
) -> StoredParameter | None:
    """Return the parameter under the first of `names` that safetensors have; else the first of `others` whose parts are all
    there, one after another; else None. Raises CheckpointError if the parts do not fit together."""
    for name in names:
        if name in where:
            return where[name]
    for parts in others:
        if all(name in where for name in parts):
            members = tuple(where[name] for name in parts)
            plain = [member for member in members if isinstance(member, StoredTensor)]
            if len({member.shape[1:] for member in members}) > 1 or any(t.dtype not in FOREIGN_DTYPES for t in plain):
                shapes = ", ".join(f"{name} {member.shape}" for name, member in zip(parts, members, strict=True))
                path = members[0].ranges(0, 0)[0].path
                raise CheckpointError(f"{path}: these can't be one parameter: {shapes}")
            return members[0] if len(members) == 1 else JoinedRows(members)
    return None
