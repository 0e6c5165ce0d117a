"""A parameter as files hold it: one tensor, a coded matrix (coded.py), or several of them, one behind the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import CheckpointError
from infinity.store.coded import CodedMatrix, coded_matrix
from infinity.store.foreign import FOREIGN_DTYPES, FileRange, StoredParameter, StoredTensor, as_elements


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """The rows of several parameters, one behind the other."""

    members: tuple[StoredTensor | CodedMatrix, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(member.shape[0] for member in self.members), *self.members[0].shape[1:]

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        """What rows [first, first + count) take of the files, member by member."""
        mine = self._members(first, count)
        return tuple(file_range for member, low, rows in mine for file_range in member.ranges(low, rows))

    def decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        """Set `out` (rows from `first` on) from the bytes of `ranges`, on any device."""
        at = taken = 0
        for member, low, rows in self._members(first, len(out)):
            count = len(member.ranges(low, rows))
            decode(member, parts[taken : taken + count], low, out[at : at + rows])
            at, taken = at + rows, taken + count

    def _members(self, first: int, count: int) -> list[tuple[StoredTensor | CodedMatrix, int, int]]:
        """(member, its first row, rows) of those that are in rows [first, first + count)."""
        mine, begin = [], 0
        for member in self.members:
            low, high = max(first, begin), min(first + count, begin + member.shape[0])
            mine.append((member, min(low - begin, member.shape[0]), max(0, high - low)))
            begin += member.shape[0]
        return mine


def decode(stored: StoredParameter, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
    """Set `out` (rows from `first` on, in any dtype) from the bytes of the stored parameter's `ranges`."""
    if not out.numel():
        return
    if not isinstance(stored, StoredTensor):
        stored.decode(parts, first, out)
        return
    (part,) = parts
    out.copy_(as_elements(part, FOREIGN_DTYPES[stored.dtype]).view(out.shape))


def read_rows(stored: StoredParameter, first: int, out: torch.Tensor) -> None:
    """Set `out` (rows from `first` on, in ordinary memory) from the files, through the page cache. Raises OSError."""
    parts = []
    for file_range in stored.ranges(first, len(out)):
        with file_range.path.open("rb") as file:
            file.seek(file_range.offset)
            parts.append(torch.frombuffer(bytearray(file.read(file_range.nbytes) or b"\0"), dtype=torch.uint8))
    decode(stored, parts, first, out)


def stored_parameter(
    names: Iterable[str], others: Iterable[Sequence[str]], where: Mapping[str, StoredTensor]
) -> StoredParameter | None:
    """The parameter that safetensors hold under the first of `names` that is there; else as the first of `others` of which all
    tensors are there, one behind the other. Raises as `coded_matrix`."""
    for name in names:
        if name in where:
            return coded_matrix(name, where) or where[name]
    for parts in others:
        if all(name in where for name in parts):
            members = tuple(coded_matrix(name, where) or where[name] for name in parts)
            plain = [member for member in members if isinstance(member, StoredTensor)]
            if len({member.shape[1:] for member in members}) > 1 or any(t.dtype not in FOREIGN_DTYPES for t in plain):
                shapes = ", ".join(f"{name} {member.shape}" for name, member in zip(parts, members, strict=True))
                raise CheckpointError(f"{where[parts[0]].path}: these can't be one parameter: {shapes}")
            return members[0] if len(members) == 1 else JoinedRows(members)
    return None
