"""Compiled from csrc/aio: asynchronous direct I/O between files and pinned memory.

Its own threads move the bytes; none of them ever enters Python. Any thread may call anything. Times are seconds of
`time.monotonic()`, all other numbers are bytes. A failed operation raises `infinity.errors.IoError`.
"""

import os
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt

@final
class PinnedSlab:
    """Page-aligned host memory, 2 MiB aligned and in huge pages where the kernel gives them.

    A writable buffer: `memoryview(slab)` and `torch.frombuffer(slab, dtype=torch.uint8)` see and keep it.
    A child made by fork has no such memory and must not touch it.
    """

    def __init__(
        self, nbytes: int, *, huge_pages: bool = True, lock: bool = False, in_background: bool = False
    ) -> None:
        """Allocate `nbytes` bytes, filled with zeros.

        All of them are present from the start, or (`in_background`) in a while, and may be used at once. `lock` keeps them
        from being swapped out (mlock); a refusal of that or of huge pages is a note, not an error.
        Raises MemoryError if the memory isn't available, ValueError if `nbytes` isn't positive.
        """

    @staticmethod
    def around(address: int, nbytes: int) -> PinnedSlab:
        """A slab around memory of someone else, who keeps it until every transfer with it is done.

        Raises ValueError if `address` isn't a multiple of 4096 or `nbytes` isn't positive.
        """

    def release(self, offset: int, nbytes: int) -> None:
        """Give the pages of [offset, offset + nbytes) back to the kernel; their bytes are lost. `present` is False until
        `fill_again` has made all present.

        No engine may have the slab, and no transfer may use it. Raises ValueError for bounds and alignment (4096).
        """

    def fill_again(self) -> None:
        """After `release`: all pages become present in a while, as with `in_background`."""

    @property
    def nbytes(self) -> int:
        """Bytes in the slab, as asked for."""

    @property
    def address(self) -> int:
        """Where it begins; a multiple of 2 MiB."""

    @property
    def present(self) -> bool:
        """Whether the kernel has given all of it, and what follows is known."""

    @property
    def huge_pages(self) -> bool:
        """Whether at least a part lay in huge pages when it became present."""

    @property
    def notes(self) -> list[str]:
        """What was optional and refused, a sentence each, with the next move."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class _AnyFile:
    """What a File and a StripedFile have in common; of the latter: of all its files, in the order of the striped bytes.
    For type checkers alone: at run time the two have no common base.

    After `close`, its methods and new transfers raise ValueError.
    """

    @property
    def path(self) -> str:
        """The path as given; of several files, all, joined by commas."""

    @property
    def notes(self) -> list[str]:
        """What was optional and refused, a sentence each, with the next move."""

    @property
    def checked(self) -> bool:
        """Whether it keeps checksums."""

    def checksums(self, offset: int, nbytes: int) -> bytes:
        """What the pages of [offset, offset + nbytes) must hold: 4 bytes for each, its CRC-32C, little-endian.

        0 stands for an unknown page, and 1 for a CRC-32C of 0 too. Of pages that are being written: the old or the new one.
        Raises ValueError where the file keeps no checksums or the numbers aren't multiples of 4096.
        """

    def set_checksums(self, offset: int, sums: bytes) -> None:
        """Say that the pages from `offset` on hold this, as `checksums` returned it for the same bytes. ValueError as there."""

    def reserve(self, nbytes: int) -> None:
        """Make room on the drive for at least `nbytes` bytes (fallocate), each file for its share; never shrinks a file.

        Raises IoError, for example with ENOSPC. Where the file system can't reserve, the file only grows, with a note.
        """

    def sync(self) -> None:
        """Wait until what finished writes have written is on the drive (fdatasync). Raises IoError."""

    def close(self) -> None:
        """Let go of the file. Transfers in flight keep it open until they end. May be called again."""

def absent_bytes() -> int:
    """Bytes of this process's slabs that are still to become present. What the kernel says is available holds them, too."""

@final
class File(_AnyFile):
    """A file opened for direct transfers (O_DIRECT), or buffered, with a note, where the file system refuses that."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        drive: int = 0,
        fine_alignment: bool = False,
        read_only: bool = False,
        exclusive: bool = False,
        checksums: bool = False,
    ) -> None:
        """Open `path` for reading and writing; `create` makes it, mode 0600, and refuses one that exists.

        `drive`, from 0, says which of an engine's drives it lies on. `fine_alignment`: take transfers aligned as finely as
        the drive does, see `alignment`. `read_only`: for files that one may not write. `exclusive`: for this
        open file alone, until its last transfer has ended, and never what a link names. `checksums`: keep a CRC-32C of every
        page of 4096 bytes that is written, and fail a read that finds something else with IntegrityError; transfers then
        move whole pages. Pages that were never written are zeros in a file that `create` made; in one opened `read_only` they
        are what their first read found; in another they are unknown, so not verified. A page whose write failed is unknown
        until it is written again. A read of what is being written may fail. Raises IoError with the errno (EAGAIN where
        somebody has the lock).
        """

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache, and so need offsets and lengths in multiples of `alignment`."""

    @property
    def alignment(self) -> int:
        """What offset, length and slab offset of every transfer must be multiples of: 4096; with `fine_alignment` what the
        drive wants (often 512) where the kernel says so; 1 where it isn't direct."""

    @property
    def size_bytes(self) -> int:
        """Its present size."""

    def fileno(self) -> int:
        """The number of its descriptor, until `close`: for opening it once more, through /proc/self/fd."""

    def __enter__(self) -> File: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class StripedFile(_AnyFile):
    """Files on several drives as one: stripe k lies in `files[pattern[k % len(pattern)]]`, behind its earlier stripes.

    Goes wherever a File goes as the `file` of a transfer. A failure names the one file that was concerned.
    """

    def __init__(self, files: Sequence[File], *, pattern: Sequence[int], stripe_bytes: int) -> None:
        """Stripe `files`; a file that stands in the pattern twice as often holds twice as many bytes.

        Raises ValueError where the pattern names a file that isn't there or leaves one out, or where `stripe_bytes`
        isn't a multiple of 4096.
        """

@final
class Priority:
    """Order of service: DEMAND goes before everything. PREFETCH and WRITE_BACK share the drive as the engine's `mix` says;
    where both want the same direction, PREFETCH goes first.

    Inside one priority, first come, first served. What is already in flight is not overtaken, so for a little while after
    a demand the other two keep only a little in flight.
    """

    DEMAND: ClassVar[Priority]
    PREFETCH: ClassVar[Priority]
    WRITE_BACK: ClassVar[Priority]

@final
class Transfer:
    """One read or write, made by an `Engine`. It keeps file and slab alive until its last completion was read.

    Until then the range of the slab belongs to it: don't write there (a read: don't read there either).
    """

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""

    def wait(self, *, with_team: bool = False) -> None:
        """Wait until it is done, without the GIL; Ctrl-C gets through.

        with_team: the OpenMP threads that compute for this thread sleep until then, where they would spin for milliseconds. For
        a thread that computes on the CPU; where torch's OpenMP isn't GNU's it has no effect.

        Raises IoError, at every call, if it failed, IntegrityError where it read something else than was written; then the
        bytes in its range are undefined. Raises RuntimeError in a
        forked child while it isn't done.
        """

_Request: TypeAlias = tuple[str, File | StripedFile, int, PinnedSlab, int, int, Priority]

@final
class Engine:
    """Moves bytes between files and slabs on threads of its own.

    In a forked child, starting anything raises RuntimeError, and `drain` and `close` do nothing.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        queue_depth: int = 32,
        block_bytes: int = 1048576,
        rings: int = 1,
        slab: PinnedSlab | None = None,
        drives: int = 1,
        mix: str = "interleaved",
        iopoll: bool = False,
        sqpoll: bool = False,
        silence_seconds_max: float = 300.0,
    ) -> None:
        """Start `rings` ring threads per drive, each with at most `queue_depth` blocks of `block_bytes` bytes in flight.

        `slab` is registered with the kernel where permitted, which saves CPU; transfers may use others too. All others are as
        `infinity.aio.IoSettings` and `IoEngine` have them.

        Raises ValueError for a number or a name that can't be, IoError if the named backend is refused here.
        """

    @property
    def backend(self) -> str:
        """The backend in use."""

    @property
    def notes(self) -> list[str]:
        """What was optional and refused, a sentence each, with the next move."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; the last one of a transfer may be smaller."""

    def start_batch(self, requests: Sequence[_Request], *, sums_by_caller: bool = False) -> list[Transfer]:
        """Start many transfers with one lock and one wake, in the order given.

        `sums_by_caller`: of files that keep checksums, the caller verifies what was read, and has told what the pages hold
        that are written (`verify`, `File.set_checksums`).

        Each request is (operation, file, offset, slab, slab_offset, length, priority), the operation being "read" or
        "write". All or none: everything is checked before anything starts. Returns at once: the queue has no limit of its
        own, what bounds it is the memory that each transfer needs. Raises ValueError naming the numbers if a range isn't
        inside its slab or, for a direct file, a number isn't a multiple of 4096; ValueError if file or engine is closed;
        TypeError for a request of another shape.
        """

    def verify(self, file: File | StripedFile, offset: int, slab: PinnedSlab, slab_offset: int, length: int) -> None:
        """Hold `length` bytes at `slab_offset`, which were read from `offset` of `file`, against the checksums of their pages.

        Raises IntegrityError as the read would have, ValueError as `start_batch` and `File.checksums`.
        """

    def counters(self) -> dict[str, Any]:
        """Sums since the start, and what is under way now.

        `read_bytes`, `written_bytes`: really moved. `read_transfers`, `write_transfers`: done without failure.
        `failed_transfers`. `in_flight_blocks`, `queued_bytes`: now. `resubmitted_blocks`: short or interrupted ones.
        `drives`: a dict per drive with `read_bytes`, `written_bytes`, `in_flight_blocks`, `queued_bytes` of its own, and
        `read_seconds`, `write_seconds` during which it had at least one read, one write in flight.
        """

    def take_timings(self) -> npt.NDArray[np.void]:
        """The transfers that have ended since the last call, one row for each drive that they reached, in the order in which
        they ended, at most the last 65536.

        A structured array: `queued`, and of the drive's part of the transfer `submitted`, `done` (float64, seconds: the clock
        of `time.monotonic`), `bytes` (int64), `drive` (int32, -1 where it failed before it reached one); `operation` (0 read,
        1 write), `priority` (0 DEMAND, 1 PREFETCH, 2 WRITE_BACK), `failed` (uint8).
        """

    def drain(self) -> None:
        """Wait until nothing is queued or in flight, without the GIL; Ctrl-C gets through. Raises no IoError."""

    def close(self) -> None:
        """Refuse new transfers, drain, end the threads; then raise the first failure that no `wait` has raised.

        May be called again, and then raises nothing. As a context manager it doesn't hide an exception of the block.
        """

    def __enter__(self) -> Engine: ...
    def __exit__(self, *exception: object) -> None: ...

def probe() -> list[tuple[str, bool, str]]:
    """(backend, available, reason) for every backend, best first; the reason says what would help."""

def direct_alignment(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(of memory, of offset and length) that direct transfers with the regular file at `path` must have; (0, 0) where it
    takes none. None where kernel (before Linux 6.1) or file system don't say. Raises IoError with the errno.
    """

def crc32c_ways() -> list[str]:
    """How this processor can compute the CRC-32C of a page, the way in use first: "avx512", "sse4.2", "table"."""

def page_checksums(data: bytes | bytearray | memoryview | PinnedSlab, *, way: str = "") -> bytes:
    """What `File.checksums` returns for a range that holds `data`, whose bytes lie one behind the other.

    `way`: of `crc32c_ways`, to compute it. Raises ValueError where that isn't whole pages, or there is no such way.
    """
