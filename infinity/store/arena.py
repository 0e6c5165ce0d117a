"""Floor 2. The arena: one file per rank in which extents are reserved once and never move."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from infinity.aio import File, IoEngine
from infinity.errors import IoError, StoreError
from infinity.store.run_folder import RunFolder
from infinity.units import PAGE_BYTES, align_up, format_bytes


@dataclass(frozen=True)
class Extent:
    """Bytes [offset, offset + nbytes) of the arena; both are multiples of 4 KiB."""

    offset: int
    nbytes: int


class Arena:
    """One preallocated file, mode 0600, in the run folder. Bytes never written read as zero.

    The file has no name once it is open: see [Note: Leaving nothing behind].
    """

    def __init__(self, folder: RunFolder, engine: IoEngine, *, name: str) -> None:
        self._folder = folder
        path = folder.path / name
        self.file: File = engine.open(path, create=True)
        path.unlink()
        self.nbytes = 0

    @property
    def notes(self) -> list[str]:
        """What the file system refused, in words."""
        return list(self.file.notes)

    def reserve(self, sizes: list[int], what: str) -> list[Extent]:
        """Reserve an extent of each size (bytes, rounded up to 4 KiB) at the end of the file, all or none of them.

        Raises StoreError, in GiB and naming `what`, when the file system lacks the space; nothing is then reserved.
        """
        if not sizes:
            return []
        extents = []
        end = self.nbytes
        for size in sizes:
            extents.append(Extent(end, align_up(size, PAGE_BYTES)))
            end += extents[-1].nbytes
        self._folder.check_free(end - self.nbytes, what)
        try:
            self._reserve(end)
        except IoError as error:
            if error.errno == errno.ENOSPC:
                self._folder.check_free(end - self.nbytes, what)
            raise StoreError(
                error.errno or 0,
                f"{what}: {format_bytes(end - self.nbytes)} could not be reserved on {self._folder.root} "
                f"({error}): free space or choose another nvme_path",
            ) from None
        self.nbytes = end
        return extents

    def _reserve(self, nbytes: int) -> None:
        self.file.reserve(nbytes)

    def close(self) -> None:
        """Close the file; the kernel frees its space once the last transfer has ended."""
        self.file.close()
