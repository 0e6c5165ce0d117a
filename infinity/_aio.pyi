"""Floor 1, compiled from csrc/aio: asynchronous direct I/O between files and pinned memory.

Its own threads move the bytes; none of them ever enters Python. Any thread may call anything. Times are seconds of
`time.monotonic()`, all other numbers are bytes. A failed operation raises `infinity.errors.IoError`.
"""

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import ClassVar, TypeAlias, final

@final
class PinnedSlab:
    """Page-aligned host memory, present from the start, 2 MiB aligned and in huge pages where the kernel gives them.

    A writable buffer: `memoryview(slab)` and `torch.frombuffer(slab, dtype=torch.uint8)` see and keep it.
    A child made by fork has no such memory and must not touch it.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True, lock: bool = False) -> None:
        """Allocate `nbytes` bytes, filled with zeros.

        `lock` keeps them from being swapped out (mlock); a refusal of that or of huge pages is a note, not an error.
        Raises MemoryError if the memory isn't available, ValueError if `nbytes` isn't positive.
        """

    @property
    def nbytes(self) -> int:
        """Bytes in the slab, as asked for."""

    @property
    def address(self) -> int:
        """Where it begins; a multiple of 2 MiB."""

    @property
    def huge_pages(self) -> bool:
        """Whether at least a part lay in huge pages when it was allocated."""

    @property
    def locked(self) -> bool:
        """Whether it is locked in memory."""

    @property
    def notes(self) -> list[str]:
        """What was optional and refused, a sentence each, with the next move."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class File:
    """A file opened for direct transfers (O_DIRECT), or buffered, with a note, where the file system refuses that.

    After `close`, its methods and new transfers raise ValueError.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        """Open `path` for reading and writing; `create` makes it, mode 0600, and refuses one that exists.

        Raises IoError with the errno.
        """

    @property
    def path(self) -> str:
        """The path as given."""

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache, and so need offsets and lengths in multiples of 4096."""

    @property
    def notes(self) -> list[str]:
        """What was optional and refused, a sentence each, with the next move."""

    @property
    def size_bytes(self) -> int:
        """Its present size."""

    def reserve(self, nbytes: int) -> None:
        """Make room on the drive for at least `nbytes` bytes (fallocate); never shrinks the file.

        Raises IoError, for example with ENOSPC. Where the file system can't reserve, the file only grows, with a note.
        """

    def sync(self) -> None:
        """Wait until what finished writes have written is on the drive (fdatasync). Raises IoError."""

    def close(self) -> None:
        """Let go of the file. Transfers in flight keep it open until they end. May be called again."""

    def __enter__(self) -> File: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class Priority:
    """Order of service: every DEMAND block goes before any PREFETCH block, and those before any WRITE_BACK block.

    Inside one priority, first come, first served. What is already in flight is not overtaken.
    """

    DEMAND: ClassVar[Priority]
    PREFETCH: ClassVar[Priority]
    WRITE_BACK: ClassVar[Priority]
    __members__: ClassVar[Mapping[str, Priority]]

    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Transfer:
    """One read or write, made by an `Engine`. It keeps file and slab alive until its last completion was read.

    Until then the range of the slab belongs to it: don't write there (a read: don't read there either).
    """

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""

    @property
    def operation(self) -> str:
        """ "read" or "write"."""

    @property
    def path(self) -> str:
        """Path of its file."""

    @property
    def offset(self) -> int:
        """Where it begins in the file."""

    @property
    def length(self) -> int:
        """How much it moves."""

    @property
    def times(self) -> tuple[float, float, float]:
        """When it was queued, its first block submitted, and all of it done; 0.0 for what is still to come."""

    def wait(self) -> None:
        """Wait until it is done, without the GIL; Ctrl-C gets through.

        Raises IoError, at every call, if it failed; then the bytes in its range are undefined. Raises RuntimeError in a
        forked child while it isn't done.
        """

_Request: TypeAlias = tuple[str, File, int, PinnedSlab, int, int, Priority]

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
    ) -> None:
        """Start `rings` ring threads, each with at most `queue_depth` blocks of `block_bytes` bytes in flight.

        `backend` is "io_uring", "threads", or "auto" for the best that works here. `slab` is registered with the kernel
        where permitted, which saves CPU; transfers may use others too. Raises ValueError for a number or a name that
        can't be, IoError if the named backend is refused here.
        """

    @property
    def backend(self) -> str:
        """The backend in use: "io_uring" or "threads"."""

    @property
    def notes(self) -> list[str]:
        """What was optional and refused, a sentence each, with the next move."""

    @property
    def queue_depth(self) -> int:
        """Blocks in flight per ring, at most."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; the last one of a transfer may be smaller."""

    @property
    def rings(self) -> int:
        """Ring threads."""

    def start_read(
        self,
        file: File,
        offset: int,
        slab: PinnedSlab,
        slab_offset: int,
        length: int,
        priority: Priority = Priority.PREFETCH,
    ) -> Transfer:
        """Start reading `length` bytes at `offset` of `file` to `slab_offset` of `slab`. Returns at once.

        Raises ValueError naming the numbers if the range isn't inside the slab or, for a direct file, a number isn't a
        multiple of 4096; ValueError if file or engine is closed. The queue has no limit of its own: what bounds it is
        the memory that each transfer needs.
        """

    def start_write(
        self,
        file: File,
        offset: int,
        slab: PinnedSlab,
        slab_offset: int,
        length: int,
        priority: Priority = Priority.WRITE_BACK,
    ) -> Transfer:
        """Start writing `length` bytes at `slab_offset` of `slab` to `offset` of `file`. As `start_read`."""

    def start_batch(self, requests: Sequence[_Request]) -> list[Transfer]:
        """Start many transfers with one lock and one wake, in the order given.

        Each request is (operation, file, offset, slab, slab_offset, length, priority), the operation being "read" or
        "write". All or none: everything is checked before anything starts. Raises ValueError as `start_read`, TypeError
        for a request of another shape.
        """

    def counters(self) -> dict[str, int | float]:
        """Sums since the start, and what is under way now.

        `read_bytes`, `written_bytes`: really moved. `read_transfers`, `write_transfers`: done without failure.
        `failed_transfers`. `in_flight_blocks`, `queued_blocks`: now. `resubmitted_blocks`: short or interrupted ones.
        """

    def drain(self) -> None:
        """Wait until nothing is queued or in flight, without the GIL; Ctrl-C gets through. Raises no IoError."""

    def close(self) -> None:
        """Refuse new transfers, drain, end the threads; then raise the first failure that no `wait` has raised.

        May be called again, and then raises nothing. As a context manager it doesn't hide an exception of the block.
        """

    def __enter__(self) -> Engine: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

def probe() -> list[tuple[str, bool, str]]:
    """(backend, available, reason) for every backend, best first; the reason says what would help."""

def direct_alignment(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(of memory, of offset and length) that direct transfers with the regular file at `path` must have; (0, 0) where it
    takes none. None where kernel (before Linux 6.1) or file system don't say. Raises IoError with the errno.
    """
