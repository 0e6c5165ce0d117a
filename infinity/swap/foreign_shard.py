"""Floor 8. The shard that rests in a file of the user: read from there, never written. See [Note: Foreign files] in
infinity/store/foreign.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from infinity.errors import InfinityError
from infinity.store.foreign import FileRange, ForeignFiles
from infinity.store.layout import Field
from infinity.swap.chunk import Chunk, Span
from infinity.swap.shard import PagedShard
from infinity.swap.stager import Stager
from infinity.swap.values import RANGE_NUMEL


@dataclass(eq=False, kw_only=True)
class ForeignShard(PagedShard):
    """A frozen shard in `range` of a file, in `gathered_dtype`."""

    range: FileRange
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
            out[at - start : at - start + count].copy_(self._read_range(at, count))
        return out

    def write(self, name: Field, start: int, values: torch.Tensor) -> None:
        """Loading what the file holds changes nothing. Raises InfinityError for anything else."""
        there = self.read(name, start, values.numel())
        if not torch.equal(there.view(torch.int32), values.to(torch.float32).contiguous().view(torch.int32)):
            raise InfinityError(
                f"{self.name} is frozen and rests in {self.range.path}, which stays as it is: build the model with other "
                "weights, or without weights= in which it lies"
            )

    def _read_range(self, start: int, numel: int) -> torch.Tensor:
        itemsize = self.gathered_dtype.itemsize
        wanted = FileRange(self.range.path, self.range.offset + start * itemsize, numel * itemsize)
        pages = wanted.pages
        reads, fills = spans_of(self.files, pages, 0)
        chunk = Chunk(self.name, pages.nbytes, reads, (), fills=fills)
        lease = self.stager.acquire(chunk)
        try:
            stored = lease.view(torch.uint8, wanted.offset - pages.offset, wanted.nbytes)
            return stored.clone().view(self.gathered_dtype).float()
        finally:
            self.stager.release(chunk, keep=False)


def spans_of(
    files: ForeignFiles, pages: FileRange, lease_offset: int
) -> tuple[tuple[Span, ...], tuple[tuple[int, torch.Tensor], ...]]:
    """What reads whole pages of a file into a lease, and what of them is in host memory: a chunk's `reads` and `fills`."""
    nbytes, end = files.split_end(pages)
    reads = (Span(pages.offset, lease_offset, nbytes, files.file(pages.path)),) if nbytes else ()
    fills = ((lease_offset + nbytes, torch.frombuffer(bytearray(end), dtype=torch.uint8)),) if end else ()
    return reads, fills
