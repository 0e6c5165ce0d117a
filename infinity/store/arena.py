"""The arena: one file per rank and drive, in which extents are reserved once and never move; and which drive each stripe of it
lies on."""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from infinity.aio import File, FreeRanges, IoEngine, StripedFile
from infinity.errors import IntegrityError, IoError, StoreError
from infinity.store.commit import ArenaLayout
from infinity.store.run_folder import Folder
from infinity.units import MIB, PAGE_BYTES, align_up, format_bytes

READ_BYTES_PER_PARAMETER = 14
WRITTEN_BYTES_PER_PARAMETER = 12
"""Bytes that a step moves with nothing cached (docs/architecture.md, "The sum"): the mix by which drives are compared."""

SLOTS_MAX = 64
"""Stripes in the longest pattern: with more, short transfers would miss drives altogether."""

_GOOD_ENOUGH = 1.01


def step_bandwidth(read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Bytes per second of a drive over the reads and writes of a step: their harmonic mean by bytes."""
    total = READ_BYTES_PER_PARAMETER + WRITTEN_BYTES_PER_PARAMETER
    return total / (READ_BYTES_PER_PARAMETER / read_bytes_per_s + WRITTEN_BYTES_PER_PARAMETER / write_bytes_per_s)


def stripe_pattern(bandwidths: Sequence[float]) -> tuple[int, ...]:
    """The drive of each stripe of a repeating pattern, so that all drives end a long transfer together.

    Takes the shortest pattern whose time is within 1 % of what the bandwidths (any one unit, all positive) allow, or the
    best of at most SLOTS_MAX stripes. A drive so slow that it would hold the others up with a single stripe has none.
    """
    assert bandwidths and min(bandwidths) > 0, "bandwidths must be positive"
    ideal = 1 / sum(bandwidths)  # seconds per unit with every drive busy to the end
    best: tuple[int, ...] = ()
    best_seconds = float("inf")
    for slots in range(1, SLOTS_MAX + 1):
        pattern = _fill(bandwidths, slots)
        seconds = max(pattern.count(drive) / rate for drive, rate in enumerate(bandwidths)) / slots
        if seconds < best_seconds * (1 - 1e-9):
            best, best_seconds = pattern, seconds
        if best_seconds <= ideal * _GOOD_ENOUGH:
            break
    return best


def _fill(bandwidths: Sequence[float], slots: int) -> tuple[int, ...]:
    """Give each slot to the drive that would finish it first, which also spreads the stripes of one drive."""
    counts = [0] * len(bandwidths)
    pattern = []
    for _ in range(slots):
        drive = min(range(len(bandwidths)), key=lambda i: (counts[i] + 1) / bandwidths[i])
        counts[drive] += 1
        pattern.append(drive)
    return tuple(pattern)


def file_bytes(pattern: Sequence[int], stripe_bytes: int, nbytes: int) -> list[int]:
    """Bytes, in whole stripes, that each drive of the pattern holds of the first `nbytes` bytes."""
    stripes = -(-nbytes // stripe_bytes)
    cycles, partial = divmod(stripes, len(pattern))
    drives = range(max(pattern) + 1)
    return [(cycles * pattern.count(i) + pattern[:partial].count(i)) * stripe_bytes for i in drives]


def pieces_on_drives(
    pattern: Sequence[int], stripe_bytes: int, offset: int, nbytes: int
) -> Iterator[tuple[int, int, int]]:
    """(drive, offset in its file, bytes) of the pieces that make up logical bytes [offset, offset + nbytes), in order."""
    end = offset + nbytes
    while offset < end:
        stripe, inside = divmod(offset, stripe_bytes)
        cycle, slot = divmod(stripe, len(pattern))
        drive = pattern[slot]
        before = cycle * pattern.count(drive) + pattern[:slot].count(drive)
        length = min(stripe_bytes - inside, end - offset)
        yield drive, before * stripe_bytes + inside, length
        offset += length


STRIPE_BYTES_MAX = MIB
"""Longer stripes would leave drives without a part of a small group; shorter ones than a block would cut it."""


@dataclass(frozen=True)
class Extent:
    """Bytes [offset, offset + nbytes) of the arena; both are multiples of 4 KiB."""

    offset: int
    nbytes: int


_OFFSET = attrgetter("offset")


class Arena:
    """Preallocated files, mode 0600, one in each folder, that are addressed as one. Bytes never written read as zero.

    In a run folder the files lose their names once they are open: see [Note: Leaving nothing behind].

    Args:
        folders: one per drive, in the order of the engine's drives; or a single one.
        engine: must serve as many drives.
        name: of the files.
        bandwidths: of the drives, in any one unit; extents are striped in proportion. None: all drives are equal.
        existing: the layout of the bytes that the files already hold, in a run that is resumed.
        checksums: keep a CRC-32C of every page written; a read that finds other bytes fails with IntegrityError.
    """

    def __init__(
        self,
        folders: Folder | Sequence[Folder],
        engine: IoEngine,
        *,
        name: str,
        bandwidths: Sequence[float] | None = None,
        existing: ArenaLayout | None = None,
        checksums: bool = True,
    ) -> None:
        all_folders = [folders] if isinstance(folders, Folder) else list(folders)
        pattern = existing.pattern if existing is not None else stripe_pattern(bandwidths or [1.0] * len(all_folders))
        self.pattern = tuple(pattern)
        """The drive of each stripe, by its number among `folders`."""
        self._existing_bytes = existing.arena_bytes if existing is not None else 0
        used = sorted(set(pattern))
        self.left_out = tuple(str(folder.root) for i, folder in enumerate(all_folders) if i not in used)
        """Paths of drives so slow, compared with the others, that every byte on them would cost time."""
        self._folders = [all_folders[drive] for drive in used]
        self._pattern = tuple(used.index(drive) for drive in pattern)
        self.stripe_bytes = existing.stripe_bytes if existing is not None else min(engine.block_bytes, STRIPE_BYTES_MAX)
        self._files = [all_folders[drive].open_arena(name, drive, checksums=checksums) for drive in used]
        self.file: File | StripedFile = self._files[0]
        if len(self._files) > 1:
            self.file = StripedFile(self._files, pattern=self._pattern, stripe_bytes=self.stripe_bytes)
        self.nbytes = 0
        self._extents: list[Extent] = []
        """By offset, ascending."""
        self._generations: list[int] = []
        """How often each extent was written to."""

    @property
    def shares(self) -> list[tuple[str, float]]:
        """(path, share of the bytes) of every drive in use."""
        parts = len(self._pattern)
        return [(str(folder.root), self._pattern.count(i) / parts) for i, folder in enumerate(self._folders)]

    @property
    def notes(self) -> list[str]:
        """Messages: what the file systems refused, and which drives are left out."""
        slow = [
            f"{path} is so much slower than the other drives that nothing is stored there" for path in self.left_out
        ]
        of_file = self.file.notes if self.nbytes else []
        return [*of_file, *slow, *(note for folder in self._folders for note in folder.notes)]

    def reserve(self, sizes: list[int], purpose: str) -> list[Extent]:
        """Reserve an extent of each size (bytes, rounded up to 4 KiB) at the end of the arena: all of them, or none.

        Raises StoreError, naming `purpose` and the bytes missing, when a file system lacks the space.
        """
        extents = []
        end = self.nbytes
        for size in sizes:
            extents.append(Extent(end, align_up(size, PAGE_BYTES)))
            end += extents[-1].nbytes
        if end == self.nbytes:
            return extents
        self._check_growth(end, purpose)
        try:
            self._reserve(end)
        except IoError as error:
            if error.errno == errno.ENOSPC:
                self._check_growth(end, purpose)
            roots = ", ".join(str(folder.root) for folder in self._folders)
            raise StoreError(
                error.errno or 0,
                f"{purpose}: {format_bytes(end - self.nbytes)} could not be reserved on {roots} "
                f"({error}): free space or choose another nvme_path",
            ) from None
        self.nbytes = end
        nonempty = [extent for extent in extents if extent.nbytes]
        self._extents += nonempty
        self._generations += [0] * len(nonempty)
        return extents

    def count_write(self, offset: int, nbytes: int) -> None:
        """Note that bytes [offset, offset + nbytes) are about to be written: their extents get a new generation."""
        first = bisect_right(self._extents, offset, key=_OFFSET) - 1
        for number in range(first, bisect_left(self._extents, offset + nbytes, key=_OFFSET)):
            self._generations[number] += 1

    def generation_at(self, offset: int) -> tuple[Extent, int]:
        """The extent that holds byte `offset`, and its generation: see `IntegrityError`."""
        number = bisect_right(self._extents, offset, key=_OFFSET) - 1
        return self._extents[number], self._generations[number]

    def explain(self, error: IntegrityError, name: str, *, at: int | None = None) -> None:
        """Add to the error of a read whose bytes they were (`name`), and their extent and generation.

        `at`: the offset in the arena, where known; the error itself has the offset in a file.
        """
        extent, generation = self.generation_at(error.offset if at is None else at)
        error.in_extent(name, extent.offset, extent.nbytes, generation)

    def _check_growth(self, end: int, purpose: str) -> None:
        begin = max(self.nbytes, self._existing_bytes)
        if end > begin:
            _check_shares(self._folders, self._pattern, self.stripe_bytes, begin, end, purpose)

    def _reserve(self, nbytes: int) -> None:
        self.file.reserve(nbytes)

    @property
    def descriptors(self) -> list[int]:
        """File descriptors, in the order in which `pieces` counts the files."""
        return [file.fileno() for file in self._files]

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(file number, offset in it, bytes) of the pieces of bytes [offset, offset + nbytes), in order."""
        if len(self._files) == 1:
            return iter([(0, offset, nbytes)])
        return pieces_on_drives(self._pattern, self.stripe_bytes, offset, nbytes)

    def checksums(self, offset: int, nbytes: int) -> bytes:
        """The checksums of the pages of these bytes, as `File.checksums`; empty where none are kept."""
        return self.file.checksums(offset, nbytes) if self.file.checked else b""

    def close(self) -> None:
        """Close the files; the kernel frees their space once the last transfer has ended."""
        self.file.close()


class Scratch:
    """Extents of the arena that are taken and given back, in any sizes and any order. One thread at a time.

    Owns the ranges that it reserved, for as long as the arena lives. `purpose` names its use in errors.

    [Note: The most that was taken]
    One request may get several pieces, so free bytes are of use wherever they lie. The arena grows only where all free bytes
    are too few, and only by the bytes missing: it reserves the most that was ever taken at once, however sizes vary. Pieces
    are rare: neighbours merge, and where everything is given back between two steps, it is one range again.
    """

    def __init__(self, arena: Arena, purpose: str) -> None:
        self._arena, self._purpose = arena, purpose
        self._ranges = FreeRanges(0)
        self._reserved: list[Extent] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far."""
        return self._ranges.nbytes

    @property
    def free_bytes(self) -> int:
        """Reserved bytes that are free."""
        return self._ranges.free_bytes

    def take(self, nbytes: int) -> list[Extent]:
        """Extents that sum to `nbytes` (rounded up to 4 KiB); one extent wherever one range is large enough.

        Raises StoreError as `Arena.reserve`, and takes nothing then.
        """
        size = align_up(nbytes, PAGE_BYTES)
        if size > self._ranges.free_bytes:
            (more,) = self._arena.reserve([size - self._ranges.free_bytes], self._purpose)
            self._reserved.append(more)
            self._ranges.grow(more.offset, more.nbytes)
        pieces = self._ranges.take_pieces(size)
        assert pieces is not None
        return [Extent(offset, length) for offset, length in pieces]

    def reset(self) -> None:
        """Take back all extents, after an exception that may have lost some. No transfer may use them any more."""
        self._ranges = FreeRanges(0)
        for extent in self._reserved:
            self._ranges.grow(extent.offset, extent.nbytes)

    def give_back(self, extents: Sequence[Extent]) -> None:
        """Give back extents that no transfer uses any more."""
        for extent in extents:
            self._ranges.put(extent.offset, extent.nbytes)


class ArenaReader:
    """Reads an open arena without its engine. Any thread, one at a time. Raises IoError where the files can't be reopened.

    The files may have no name: their descriptors are opened once more through /proc.
    """

    def __init__(self, arena: Arena) -> None:
        self._pieces = arena.pieces
        self._files: list[File] = []
        try:
            for descriptor in arena.descriptors:
                self._files.append(File(f"/proc/self/fd/{descriptor}", read_only=True))
        except BaseException:
            self.close()
            raise

    @property
    def only_file(self) -> File | None:
        """The single file of the arena; None where it is striped over several."""
        return self._files[0] if len(self._files) == 1 else None

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (aligned to 4 KiB, as `offset` and its length are) from byte `offset` on. Raises OSError."""
        done = 0
        for number, at, nbytes in self._pieces(offset, buffer.nbytes):
            read_into(self._files[number], buffer[done : done + nbytes], at)
            done += nbytes

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files:
            file.close()


def read_into(file: File, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from byte `offset` of the file on, without an engine. Raises OSError, also at an early end of file."""
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, f"{file.path} ends at {offset + done}")
        done += count


def check_free(folders: Sequence[Folder], bandwidths: Sequence[float] | None, nbytes: int, purpose: str) -> None:
    """Raise StoreError where a drive lacks the space for its share of an arena of `nbytes` bytes over `folders`."""
    pattern = stripe_pattern(bandwidths or [1.0] * len(folders))
    _check_shares(folders, pattern, STRIPE_BYTES_MAX, 0, nbytes, purpose)


def _check_shares(
    folders: Sequence[Folder], pattern: Sequence[int], stripe_bytes: int, begin: int, end: int, purpose: str
) -> None:
    """Raise StoreError where a drive lacks the space for its share of an arena that grows from `begin` to `end` bytes."""
    if len(folders) == 1:
        folders[0].check_free(end - begin, purpose)
        return
    now = file_bytes(pattern, stripe_bytes, begin)
    then = file_bytes(pattern, stripe_bytes, end)
    for folder, before, after in zip(folders, now, then, strict=False):  # a drive past the last one used has no share
        folder.check_free(after - before, purpose)
