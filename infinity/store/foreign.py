"""Tensors in the user's own safetensors files: where their bytes are, and the files, opened to be read only.

[Note: Foreign files]
Frozen weights can rest where the user has them. A safetensors file is 8 bytes with the length of its header, the header (JSON),
and the tensors one behind the other, row-major. A rank's shard of a tensor is some of its rows, so one range of bytes.

Such a range begins anywhere, and a direct transfer moves whole pages. So a group reads the pages around the ranges of its
shards, one behind the other into its lease, and each shard is found at the same place in its page as in the file. Ranges that
share a page, or whose pages are neighbours, are read as one. The last page of a file is rarely whole: what it has is read when
the file is opened, and stays in host memory.

Nothing is ever written to these files, locked in them, or left in their folder. A change of one while it is in use is detected:
until the first read of a range the file must not have changed since it was opened, and from then on every page must hold what
that read found ([Note: integrity] in csrc/aio/checksums.h).
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from infinity.aio import File
from infinity.errors import IntegrityError, parsing
from infinity.units import MIB, PAGE_BYTES, align_up

FOREIGN_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""What frozen parameters may be in where they rest in files, by the names of the format. Each is exact in fp32."""

DTYPES = {
    **FOREIGN_DTYPES,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
}
"""These, and the dtypes of the tensors of coded parameters."""

_DIMENSIONS_MAX = 64
_HEADER_BYTES_MAX = 100 * MIB
"""As the safetensors library has it."""

CODES = ("I8", "U8", "I32", "U32")
"""What weights are coded in, by the names of the format."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: bytes [offset, offset + nbytes) of it. `dtype` as the format calls it, such as "BF16"."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def row(self, number: int) -> StoredTensor:
        """Return one row as a tensor of its own."""
        row_bytes = self.nbytes // self.shape[0]
        return StoredTensor(self.path, self.dtype, self.shape[1:], self.offset + number * row_bytes, row_bytes)

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        row_bytes = self.nbytes // self.shape[0] if self.nbytes else 0
        return (FileRange(self.path, self.offset + first * row_bytes, count * row_bytes),)

    def decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        (part,) = parts
        out.copy_(as_elements(part, FOREIGN_DTYPES[self.dtype]).view(out.shape))


class StoredParameter(Protocol):
    """The source of a frozen parameter: a `StoredTensor`, several parameters (stored_parameter.py), or codes (formats/)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        """The bytes of the files that hold rows [first, first + count)."""

    def decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        """Set `out` (rows from `first` on, not empty) from the bytes of `ranges`, on any device."""


@runtime_checkable
class Stack(StoredParameter, Protocol):
    """A parameter whose rows can each be read as a parameter of its own."""

    def row(self, number: int) -> StoredParameter:
        """Return one row as a parameter."""


def as_elements(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes (1-D) as elements: a view, or a copy where they begin at an odd place."""
    return (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)


def read_bytes(place: FileRange | StoredTensor) -> torch.Tensor:
    """Return the bytes there (1-D), through the page cache; one zero byte if the place is empty."""
    with place.path.open("rb") as file:
        file.seek(place.offset)
        return torch.frombuffer(bytearray(file.read(place.nbytes) or b"\0"), dtype=torch.uint8)


def parse_shape(sizes: Iterable[object]) -> tuple[int, ...]:
    """The shape of a tensor, as others wrote it. Raises ValueError for what can't be one."""
    shape = tuple(itertools.islice(sizes, _DIMENSIONS_MAX + 1))
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"a shape of more than {_DIMENSIONS_MAX} dimensions")
    sizes_in = [size for size in shape if type(size) is int and 0 <= size < 2**62]
    if len(sizes_in) < len(shape) or math.prod(size or 1 for size in sizes_in) >= 2**62:
        raise ValueError(f"{reprlib.repr(shape)} is no shape")
    return tuple(sizes_in)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises CheckpointError, naming it, where it is damaged or can't be read.

    The format: https://huggingface.co/docs/safetensors/index#format
    """
    with parsing(f"{path} is damaged or not safetensors", "fetch or save it again"):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _HEADER_BYTES_MAX):
                raise ValueError("its header ends behind the file")
            header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if {type(begin), type(end)} != {int} or not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{name} ends behind the file")
            shape = parse_shape(entry["shape"])
            itemsize = DTYPES[entry["dtype"]].itemsize if entry["dtype"] in DTYPES else None
            if itemsize is not None and end - begin != math.prod(shape) * itemsize:
                raise ValueError(f"{name} has {end - begin} bytes, which its shape doesn't fit")
            tensors[name] = StoredTensor(path, str(entry["dtype"]), shape, 8 + length + begin, end - begin)
        return tensors


@dataclass(frozen=True)
class FileRange:
    """Bytes [offset, offset + nbytes) of a file."""

    path: Path
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def pages(self) -> FileRange:
        """The whole pages around it."""
        first = self.offset // PAGE_BYTES * PAGE_BYTES
        return FileRange(self.path, first, align_up(self.end) - first)


@dataclass(frozen=True)
class ForeignRows:
    """A shard's rows [first, first + count), or none, of what files hold. `padded_bytes`: what must be there in a lease from
    the first byte of its first range on."""

    stored: StoredParameter
    first: int
    count: int
    padded_bytes: int = 0

    @property
    def ranges(self) -> tuple[FileRange, ...]:
        return self.stored.ranges(self.first, self.count)


@dataclass(frozen=True)
class PagesInLease:
    """Whole pages of a file, and where in a lease they lie (bytes)."""

    range: FileRange
    lease_offset: int


@dataclass(frozen=True)
class ForeignPart:
    """What one group reads of foreign files, as it lies in a lease of `nbytes` bytes (whole pages).

    `rows`: by number of the shard. `places`: the first byte of each of its ranges.
    """

    rows: Mapping[int, ForeignRows] = field(default_factory=dict)
    places: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pages: tuple[PagesInLease, ...] = ()
    nbytes: int = 0


def lay_out(rows: Mapping[int, ForeignRows]) -> ForeignPart:
    """Lay the pages around the shards of a group, by number, one behind the other: see [Note: Foreign files]."""
    pages: list[PagesInLease] = []
    ranges = [(shard, number, file) for shard, mine in rows.items() for number, file in enumerate(mine.ranges)]
    places = {shard: [0] * len(mine.ranges) for shard, mine in rows.items()}
    end = needed = 0
    for shard, number, file_range in sorted(ranges, key=lambda entry: (str(entry[2].path), entry[2].offset, entry[:2])):
        if file_range.nbytes:
            around = file_range.pages
            last = pages[-1] if pages else None
            if last is not None and last.range.path == around.path and around.offset <= last.range.end:
                joined = FileRange(around.path, last.range.offset, max(last.range.end, around.end) - last.range.offset)
                pages[-1] = PagesInLease(joined, last.lease_offset)
            else:
                pages.append(PagesInLease(around, end))
            end = pages[-1].lease_offset + pages[-1].range.nbytes
            places[shard][number] = pages[-1].lease_offset + file_range.offset - pages[-1].range.offset
        needed = max(needed, places[shard][number] + (rows[shard].padded_bytes if number == 0 else 0))
    return ForeignPart(
        rows, {shard: tuple(mine) for shard, mine in places.items()}, tuple(pages), align_up(max(end, needed))
    )


class ForeignFile:
    """A file of the user, opened to be read only, and what it was like then. Its last page is in memory, if it is not whole."""

    def __init__(self, path: Path, *, drive: int, checksums: bool) -> None:
        self.file = File(path, read_only=True, drive=drive, checksums=checksums)
        self._opened, self._checked = os.fstat(self.file.fileno()), set[int]()
        self._whole_bytes = self.file.size_bytes // PAGE_BYTES * PAGE_BYTES
        with path.open("rb") as opened:
            self._end = os.pread(opened.fileno(), PAGE_BYTES, self._whole_bytes)

    def check_first_read(self, offset: int) -> None:
        """Raise IntegrityError if what was read at `offset` for the first time may be newer than the opening of the file."""
        if offset in self._checked:
            return
        then, now = self._opened, os.fstat(self.file.fileno())
        touched = now.st_ctime_ns != then.st_ctime_ns and now.st_nlink == then.st_nlink  # it was not only removed
        if touched or (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            why = "was changed after it was opened and before it was read: start again with the file as it is to be"
            raise IntegrityError(f"{self.file.path} {why}", errno.EBADMSG, "read", self.file.path, offset)
        self._checked.add(offset)

    def split_end(self, pages: FileRange) -> tuple[int, bytes]:
        """Of whole pages: how many bytes are to be read, and what the last page of the file adds to them."""
        return min(pages.end, self._whole_bytes) - pages.offset, self._end if pages.end > self._whole_bytes else b""


class ForeignFiles:
    """Files of the user, opened to be read only. Any thread may read; one opens and closes.

    Args:
        paths: their paths.
        drive_of: the number of the engine's drive that a path lies on.
        checksums: whether every page must hold what its first read found.

    Raises IoError, which names the file, where one can't be opened.
    """

    def __init__(self, paths: Iterable[Path], drive_of: Callable[[Path], int], *, checksums: bool) -> None:
        self._files: dict[Path, ForeignFile] = {}
        try:
            for path in dict.fromkeys(paths):
                self._files[path] = ForeignFile(path, drive=drive_of(path), checksums=checksums)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> list[str]:
        """What was refused: a line, however many files there are."""
        notes = [note for file in self._files.values() for note in file.file.notes]
        return [f"{notes[0]} (so with {len(notes)} files of weights)"] if len(notes) > 1 else notes

    def file(self, path: Path) -> ForeignFile:
        """The open file."""
        return self._files[path]

    def close(self) -> None:
        """Close them. Transfers in flight keep theirs open until they end. Idempotent."""
        for file in self._files.values():
            file.file.close()
