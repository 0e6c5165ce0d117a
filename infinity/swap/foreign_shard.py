"""A shard whose parameter is in a file of the user: read from there, never written. See [Note: Foreign files] in
infinity/store/foreign.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from infinity.errors import InfinityError
from infinity.store.foreign import (
    FileRange,
    ForeignFiles,
    ForeignRows,
    StoredParameter,
    StoredTensor,
    as_elements,
    lay_out,
)
from infinity.store.layout import Field
from infinity.swap.chunk import Chunk, Span
from infinity.swap.shard import PagedShard
from infinity.swap.stager import Stager
from infinity.swap.values import RANGE_NUMEL


@dataclass(eq=False, kw_only=True)
class ForeignShard(PagedShard):
    """A frozen shard: `rows` of what files hold, in `gathered_dtype`."""

    rows: ForeignRows
    files: ForeignFiles = field(repr=False)
    stager: Stager = field(repr=False)

    def read(self, name: Field, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) (1-D, fp32, on the CPU) in ordinary memory. Raises IoError, and InfinityError when
        the swap manager is closed."""
        assert name is Field.MASTER, "a frozen parameter has no moments"
        self.values.health.check_not_closed()
        out = torch.empty(numel)
        for at in range(start, start + numel, RANGE_NUMEL):
            count = min(RANGE_NUMEL, start + numel - at)
            out[at - start : at - start + count].copy_(self._read_elements(at, count))
        return out

    def write(self, name: Field, start: int, values: torch.Tensor) -> None:
        """Loading what the file holds changes nothing. Raises InfinityError for anything else."""
        if not self._are_there(self.read(name, start, values.numel()), values.to(torch.float32)):
            raise InfinityError(
                f"{self.name} is frozen and rests in {self.rows.ranges[0].path}, which stays as it is: build the model with "
                "other weights, or without weights= in which it lies"
            )

    def elements(self, piece: torch.Tensor) -> torch.Tensor:
        return as_elements(piece[self.place], self.gathered_dtype)

    def _are_there(self, there: torch.Tensor, values: torch.Tensor) -> bool:
        return torch.equal(there.view(torch.int32), values.contiguous().view(torch.int32))

    def _read_elements(self, start: int, numel: int) -> torch.Tensor:
        whole, itemsize = self.rows.ranges[0], self.gathered_dtype.itemsize
        as_bytes = StoredTensor(whole.path, "U8", (whole.nbytes,), whole.offset, whole.nbytes)
        with self._staged(ForeignRows(as_bytes, start * itemsize, numel * itemsize)) as (stored,):
            return stored.clone().view(self.gathered_dtype).float()

    @contextlib.contextmanager
    def _staged(self, rows: ForeignRows) -> Iterator[Sequence[torch.Tensor]]:
        """The bytes of each range of `rows` in a lease of their own."""
        part = lay_out({0: rows})
        parts = [spans_of(self.files, pages.range, pages.lease_offset) for pages in part.pages]
        reads, fills = (tuple(one for some in kind for one in some) for kind in zip(*parts, strict=True))
        chunk = Chunk(self.name, part.nbytes, reads, (), fills=fills)
        lease = self.stager.acquire(chunk)
        try:
            yield [
                lease.view(torch.uint8, place, file_range.nbytes)
                for place, file_range in zip(part.places[0], rows.ranges, strict=True)
            ]
        finally:
            self.stager.release(chunk, keep=False)


@dataclass(eq=False, kw_only=True)
class CodedShard(ForeignShard):
    """A frozen shard that files hold in another form (infinity/store/stored_parameter.py). `places`: the bytes of each of its
    ranges in the delivery; `coded`: what decodes them into `gathered_dtype`, which is the dtype of compute."""

    places: Sequence[slice]
    coded: StoredParameter

    def elements(self, piece: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.padded_shape.numel(), dtype=self.gathered_dtype, device=piece.device)
        self._decode([piece[place] for place in self.places], self.rows.first, out[: self.shape.numel()])
        out[self.shape.numel() :].zero_()
        return out

    is_lodged = False

    def _are_there(self, there: torch.Tensor, values: torch.Tensor) -> bool:
        """But for the rounding: they may be of a run with another dtype of compute."""
        return torch.allclose(there, values, rtol=torch.finfo(torch.bfloat16).eps, atol=0.0)

    def _read_elements(self, start: int, numel: int) -> torch.Tensor:
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-(start + numel) // row)
        out = torch.empty((last - first) * row, dtype=self.gathered_dtype)
        with self._staged(ForeignRows(self.coded, self.rows.first + first, last - first)) as parts:
            self._decode(parts, self.rows.first + first, out)
        return out[start - first * row : start - first * row + numel].float()

    def _decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        if out.numel():
            self.coded.decode(parts, first, out.view(-1, *self.shape[1:]))


def spans_of(
    files: ForeignFiles, pages: FileRange, lease_offset: int
) -> tuple[tuple[Span, ...], tuple[tuple[int, torch.Tensor], ...]]:
    """What reads whole pages of a file into a lease, and what of them is in host memory: a chunk's `reads` and `fills`."""
    file = files.file(pages.path)
    nbytes, end = file.split_end(pages)
    reads = (Span(pages.offset, lease_offset, nbytes, file),) if nbytes else ()
    fills = ((lease_offset + nbytes, torch.frombuffer(bytearray(end), dtype=torch.uint8)),) if end else ()
    return reads, fills
