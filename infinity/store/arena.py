"""Floor 2. The arena: one file per rank and drive, in which extents are reserved once and never move."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.aio import File, IoEngine, StripedFile
from infinity.errors import IoError, StoreError
from infinity.store.commit import Place
from infinity.store.placement import file_bytes, stripe_pattern
from infinity.store.run_folder import Folder
from infinity.units import MIB, PAGE_BYTES, align_up, format_bytes

STRIPE_BYTES_MAX = MIB
"""Longer stripes would leave drives without a part of a small group; shorter ones than a block would cut it."""


@dataclass(frozen=True)
class Extent:
    """Bytes [offset, offset + nbytes) of the arena; both are multiples of 4 KiB."""

    offset: int
    nbytes: int


class Arena:
    """Preallocated files, mode 0600, one in each folder, that are addressed as one. Bytes never written read as zero.

    In a run folder the files have no name once they are open: see [Note: Leaving nothing behind].

    Args:
        folders: one per drive, in the order of the engine's drives; or the only one.
        engine: serves as many drives.
        name: of the files.
        bandwidths: of the drives (any one unit); extents are striped over them in proportion. All the same where None.
        kept: how the bytes lie that are in the files already.
        checksums: sum every page that is written, and fail reads that find another with IntegrityError.
    """

    def __init__(
        self,
        folders: Folder | Sequence[Folder],
        engine: IoEngine,
        *,
        name: str,
        bandwidths: Sequence[float] | None = None,
        kept: Place | None = None,
        checksums: bool = True,
    ) -> None:
        given = [folders] if isinstance(folders, Folder) else list(folders)
        pattern = kept.pattern if kept is not None else stripe_pattern(bandwidths or [1.0] * len(given))
        self.pattern = tuple(pattern)
        """The drive of each stripe, by its number among `folders`."""
        self._kept_bytes = kept.arena_bytes if kept is not None else 0
        used = sorted(set(pattern))
        self.left_out = tuple(str(folder.root) for i, folder in enumerate(given) if i not in used)
        """Paths so slow beside the others that every byte on them would cost time."""
        self._folders = [given[drive] for drive in used]
        self._pattern = tuple(used.index(drive) for drive in pattern)
        self.stripe_bytes = kept.stripe_bytes if kept is not None else min(engine.block_bytes, STRIPE_BYTES_MAX)
        self._files = [given[drive].open_arena(engine, name, drive, checksums=checksums) for drive in used]
        self.file: File | StripedFile = self._files[0]
        if len(self._files) > 1:
            self.file = StripedFile(self._files, pattern=self._pattern, stripe_bytes=self.stripe_bytes)
        self.nbytes = 0

    @property
    def shares(self) -> list[tuple[str, float]]:
        """(path, fraction of the bytes) of every drive that holds some."""
        parts = len(self._pattern)
        return [(str(folder.root), self._pattern.count(i) / parts) for i, folder in enumerate(self._folders)]

    @property
    def notes(self) -> list[str]:
        """What the file systems refused, and which drives are left out, in words."""
        slow = [f"{path} is so slow beside the other drives that nothing is kept there" for path in self.left_out]
        return [*self.file.notes, *slow, *(note for folder in self._folders for note in folder.notes)]

    def reserve(self, sizes: list[int], what: str) -> list[Extent]:
        """Reserve an extent of each size (bytes, rounded up to 4 KiB) at the end of the arena, all or none of them.

        Raises StoreError, in GiB and naming `what`, when a file system lacks the space; nothing is then reserved.
        """
        if not sizes:
            return []
        extents = []
        end = self.nbytes
        for size in sizes:
            extents.append(Extent(end, align_up(size, PAGE_BYTES)))
            end += extents[-1].nbytes
        self._check_growth(end, what)
        try:
            self._reserve(end)
        except IoError as error:
            if error.errno == errno.ENOSPC:
                self._check_growth(end, what)
            roots = ", ".join(str(folder.root) for folder in self._folders)
            raise StoreError(
                error.errno or 0,
                f"{what}: {format_bytes(end - self.nbytes)} could not be reserved on {roots} "
                f"({error}): free space or choose another nvme_path",
            ) from None
        self.nbytes = end
        return extents

    def _check_growth(self, end: int, what: str) -> None:
        begin = max(self.nbytes, self._kept_bytes)
        if end > begin:
            _check_shares(self._folders, self._pattern, self.stripe_bytes, begin, end, what)

    def _reserve(self, nbytes: int) -> None:
        self.file.reserve(nbytes)

    def sync(self) -> None:
        """Wait until the data of finished writes is on the drives. Raises IoError."""
        self.file.sync()

    def close(self) -> None:
        """Close the files; the kernel frees their space once the last transfer has ended."""
        self.file.close()


def check_free(folders: Sequence[Folder], bandwidths: Sequence[float] | None, nbytes: int, what: str) -> None:
    """Raise StoreError where a drive lacks the space for its share of an arena of `nbytes` bytes over `folders`."""
    pattern = stripe_pattern(bandwidths or [1.0] * len(folders))
    _check_shares(folders, pattern, STRIPE_BYTES_MAX, 0, nbytes, what)


def _check_shares(
    folders: Sequence[Folder], pattern: Sequence[int], stripe_bytes: int, begin: int, end: int, what: str
) -> None:
    """Raise StoreError where a drive lacks the space for its share of an arena that grows from `begin` to `end` bytes."""
    if len(folders) == 1:
        folders[0].check_free(end - begin, what)
        return
    now = file_bytes(pattern, stripe_bytes, begin)
    then = file_bytes(pattern, stripe_bytes, end)
    for folder, before, after in zip(folders, now, then, strict=False):  # a drive past the last one used has no share
        folder.check_free(after - before, what)
