"""Compiled from csrc/aio: asynchronous direct I/O between files and pinned memory.

Its own threads move the bytes and never enter Python. Any thread may call anything. Times are seconds of `time.monotonic()`,
other numbers are bytes. A failed operation raises `infinity.errors.IoError`.
"""

import os
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt

@final
class PinnedSlab:
    """Host memory, 2 MiB aligned, in huge pages if available. A writable buffer for `memoryview` and `torch.frombuffer`, which
    keep it alive. A child made by fork has no such memory and must not use it."""

    def __init__(
        self, nbytes: int, *, huge_pages: bool = True, lock: bool = False, in_background: bool = False
    ) -> None:
        """Allocate `nbytes` zeros, resident from the start; with `in_background` soon after, but usable at once.

        `lock` keeps them from being swapped out (mlock). If the kernel refuses that or huge pages, `notes` has the reason.
        Raises MemoryError if the memory isn't available, ValueError if `nbytes` isn't positive.
        """

    @staticmethod
    def around(address: int, nbytes: int) -> PinnedSlab:
        """Return a slab around other memory, which its owner keeps until every transfer with it is done.

        Raises ValueError if `address` isn't a multiple of 4096 or `nbytes` isn't positive.
        """

    def release(self, offset: int, nbytes: int) -> None:
        """Give the pages of [offset, offset + nbytes) back to the kernel; their bytes are lost.

        `present` is False until `fill_again` has ended. No engine may have the slab, and no transfer may use it. Raises
        ValueError for bounds and alignment (4096).
        """

    def fill_again(self) -> None:
        """After `release`: make all pages resident in the background."""

    @property
    def nbytes(self) -> int:
        """Size of the slab, as requested."""

    @property
    def address(self) -> int:
        """Address of the first byte; a multiple of 2 MiB."""

    @property
    def present(self) -> bool:
        """True if all of it is resident; the properties below are final then."""

    @property
    def huge_pages(self) -> bool:
        """True if at least a part is in huge pages."""

    @property
    def notes(self) -> list[str]:
        """Optional requests that were refused, with reason and remedy."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class _AnyFile:
    """Methods of File and StripedFile; for type checkers only. For a StripedFile they concern all its files, in the order of
    the striped bytes. After `close`, methods and new transfers raise ValueError."""

    @property
    def path(self) -> str:
        """The path as given; several are joined by commas."""

    @property
    def notes(self) -> list[str]:
        """Optional requests that were refused, with reason and remedy."""

    @property
    def checked(self) -> bool:
        """True if it keeps checksums."""

    def checksums(self, offset: int, nbytes: int) -> bytes:
        """Return the checksums of the pages of [offset, offset + nbytes): a little-endian CRC-32C (4 bytes) for each.

        0 marks an unknown page; a CRC-32C of 0 is stored as 1. A page that is being written has its old or its new one.
        Raises ValueError without checksums, and for numbers that aren't multiples of 4096.
        """

    def set_checksums(self, offset: int, sums: bytes) -> None:
        """Set the checksums of the pages from `offset` on, as `checksums` returned them. Raises ValueError as there."""

    def reserve(self, nbytes: int) -> None:
        """Reserve at least `nbytes` on the drive (fallocate), each file its share; never shrinks a file.

        Raises IoError, for example with ENOSPC. If the file system can't reserve, the file only grows, with a note.
        """

    def sync(self) -> None:
        """Wait until the data of finished writes is on the drive (fdatasync). Raises IoError."""

    def close(self) -> None:
        """Close the file; transfers in flight keep it open until they end. Idempotent."""

def absent_bytes() -> int:
    """Return the bytes of this process's slabs that are not resident yet. The kernel still counts them as available."""

@final
class File(_AnyFile):
    """A file opened for direct transfers (O_DIRECT), or buffered, with a note, if the file system refuses that."""

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
        """Open `path` for reading and writing. Raises IoError.

        Args:
            create: create it with mode 0600; an existing file is an error.
            drive: number of its drive in an engine, from 0.
            fine_alignment: accept transfers with the drive's own alignment, see `alignment`.
            read_only: open for reading only.
            exclusive: lock the file until the last transfer has ended (EAGAIN if it is locked); never follow a link.
            checksums: keep a CRC-32C of every written page (4096 bytes), and raise IntegrityError if a read finds other bytes.
                Transfers then move whole pages. Pages that were never written are zeros after `create`; with `read_only` they
                must stay as at their first read; otherwise they are unknown, and not verified. A page whose write failed is
                unknown until it is written again. A read of a page that is being written may fail.
        """

    @property
    def direct(self) -> bool:
        """True if transfers bypass the page cache, and need the `alignment`."""

    @property
    def alignment(self) -> int:
        """Alignment of offset, length and slab offset of every transfer: 4096; with `fine_alignment` the drive's (often 512) if
        known; 1 if it isn't direct."""

    @property
    def size_bytes(self) -> int:
        """Current size."""

    def fileno(self) -> int:
        """Return its descriptor, until `close`: to open it again through /proc/self/fd."""

    def __enter__(self) -> File: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class StripedFile(_AnyFile):
    """Files on several drives as one: stripe k is in `files[pattern[k % len(pattern)]]`, behind its earlier stripes.

    It can be the `file` of any transfer. An error names the file that failed.
    """

    def __init__(self, files: Sequence[File], *, pattern: Sequence[int], stripe_bytes: int) -> None:
        """Stripe `files`; a file that is twice as often in the pattern holds twice as many bytes.

        Raises ValueError if the pattern has an unknown file or lacks one, and if `stripe_bytes` isn't a multiple of 4096.
        """

@final
class Priority:
    """Order of service: DEMAND first. PREFETCH and WRITE_BACK share the drive by the engine's `mix`; of two in the same
    direction, PREFETCH is first. Within a priority: first come, first served. After a demand, for a short time, the other two
    keep little in flight, because blocks in flight can't be overtaken."""

    DEMAND: ClassVar[Priority]
    PREFETCH: ClassVar[Priority]
    WRITE_BACK: ClassVar[Priority]

@final
class Transfer:
    """One read or write of an `Engine`. It keeps file and slab alive until its last completion. Until then its range of the
    slab must not be written, and that of a read not be read."""

    @property
    def done(self) -> bool:
        """True if it has ended or failed. Never blocks."""

    def wait(self, *, with_team: bool = False) -> None:
        """Wait until it is done, without the GIL and interruptible by Ctrl-C.

        with_team: this thread's OpenMP threads, which would spin for milliseconds, sleep until then. For a thread that computes
        on the CPU; without effect if torch's OpenMP isn't GNU's.

        Raises IoError on every call if it failed, IntegrityError for wrong checksums; the bytes in its range are then
        undefined. Raises RuntimeError in a forked child while it isn't done.
        """

_Request: TypeAlias = tuple[str, File | StripedFile, int, PinnedSlab, int, int, Priority]

@final
class Engine:
    """Moves bytes between files and slabs on its own threads. In a forked child, starting raises RuntimeError, and `drain` and
    `close` do nothing."""

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

        `slab` is registered with the kernel if permitted, which saves CPU; transfers may use other slabs. See
        `infinity.aio.IoSettings` and `IoEngine` for the others. Raises ValueError for an invalid number or name, IoError if
        the named backend is refused.
        """

    @property
    def backend(self) -> str:
        """The backend in use."""

    @property
    def notes(self) -> list[str]:
        """Optional requests that were refused, with reason and remedy."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; the last one of a transfer may be smaller."""

    def start_batch(self, requests: Sequence[_Request], *, sums_by_caller: bool = False) -> list[Transfer]:
        """Start many transfers with one lock and one wake, in the given order: all or none. Never blocks.

        A request is (operation, file, offset, slab, slab_offset, length, priority), with operation "read" or "write". With
        `sums_by_caller`, the caller verifies bytes read (`verify`) and sets the checksums of written pages
        (`File.set_checksums`).

        Raises ValueError for a range outside its slab, for a number that isn't aligned as a direct file requires, and if file
        or engine is closed; TypeError for a malformed request.
        """

    def verify(self, file: File | StripedFile, offset: int, slab: PinnedSlab, slab_offset: int, length: int) -> None:
        """Verify the checksums of `length` bytes at `slab_offset`, read from `offset` of `file`.

        Raises IntegrityError as the read would have, ValueError as `start_batch` and `File.checksums`.
        """

    def counters(self) -> dict[str, Any]:
        """Return sums since the start: `read_bytes`, `written_bytes` (moved); `read_transfers`, `write_transfers` (successful),
        `failed_transfers`; `resubmitted_blocks` (short or interrupted). Current: `in_flight_blocks`, `queued_bytes`.

        `drives`: a dict per drive with its `read_bytes`, `written_bytes`, `in_flight_blocks`, `queued_bytes`, and the seconds
        with at least one read or write in flight, `read_seconds` and `write_seconds`.
        """

    def take_timings(self) -> npt.NDArray[np.void]:
        """Return the transfers that have ended since the last call, in this order: a row for each drive that they used, at most
        the last 65536.

        A structured array: `queued`, and for the drive's part of the transfer `submitted`, `done` (float64, seconds of
        `time.monotonic`), `bytes` (int64), `drive` (int32, -1 if it failed before it reached one); `operation` (0 read,
        1 write), `priority` (0 DEMAND, 1 PREFETCH, 2 WRITE_BACK), `failed` (uint8).
        """

    def drain(self) -> None:
        """Wait until nothing is queued or in flight, without the GIL and interruptible by Ctrl-C. Raises no IoError."""

    def close(self) -> None:
        """Refuse new transfers, drain, end the threads; then raise the first failure that no `wait` has raised. Idempotent. A
        context manager doesn't hide an exception of its block."""

    def __enter__(self) -> Engine: ...
    def __exit__(self, *exception: object) -> None: ...

def probe() -> list[tuple[str, bool, str]]:
    """Return (backend, available, reason) for every backend, best first; the reason includes a remedy."""

def direct_alignment(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the alignment (of memory, of offset and length) of direct transfers with the regular file at `path`.

    (0, 0) if it takes none; None if the kernel (before Linux 6.1) or the file system doesn't say. Raises IoError.
    """

def crc32c_ways() -> list[str]:
    """Return the implementations of CRC-32C for this processor, the one in use first: "avx512", "sse4.2", "table"."""

def page_checksums(data: bytes | bytearray | memoryview | PinnedSlab, *, way: str = "") -> bytes:
    """Return the checksums of `data` (whole pages, contiguous), as `File.checksums` does, by one of the `crc32c_ways`. Raises
    ValueError for other data or an unknown way."""
