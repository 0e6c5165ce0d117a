"""Copies one rank's state out of the arena into a file while training continues.

A thread of its own copies, through two small buffers; the training thread starts it, waits at its gates, and joins it. If the
program ends meanwhile, the thread continues until the last of Python's exit functions has run.

[Note: A copy of bytes that keep changing]
The copy is the state at one instant. So a caller that would change the bytes of a sub-group, in the arena or in host memory,
waits at its gate (`wait_for`) until they are copied. Sub-groups are copied in the order of the file, which is that of a
forward pass; one that a caller waits for is copied next. (The hash goes from beginning to end, so bytes copied out of turn
are read once more.) If copying fails, all gates open: there is nothing to protect.

Bytes that are read from the arena are verified against its checksums, as in any other read. Else bytes that have changed on the
drive would get into a checkpoint, whose hash would declare them right.

Where the file system can share blocks between files (XFS, btrfs) and the arena is one file, its ranges are cloned, which takes
no time: only a later write to them takes new space. A hard link would not do: the file behind it keeps changing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from infinity.aio import File, page_checksums
from infinity.errors import IntegrityError
from infinity.store.arena import Arena, ArenaReader, Extent, read_into
from infinity.store.commit import SUM_BYTES
from infinity.store.files import StoredFile, create_private
from infinity.units import MIB, PAGE_BYTES

_BUFFER_BYTES = 4 * MIB
_BUFFERS = 2
_FICLONERANGE = 0x4020940D
"""linux/fs.h: _IOW(0x94, 13, struct file_clone_range)."""


@dataclass(frozen=True)
class Source:
    """A range of bytes to copy: `nbytes` of the arena from `offset` on, or those in `memory`, behind which
    zeros follow."""

    nbytes: int
    offset: int = 0
    memory: memoryview | None = None


@dataclass(frozen=True)
class _Part:
    """A source, with the checksums of its pages as `Arena.checksums`; empty where unknown, or where it is memory. `name`,
    `extent` and `generation` tell in errors whose bytes they are."""

    source: Source
    name: str
    sums: bytes = b""
    extent: Extent | None = None
    generation: int = -1


class Copying:
    """Copies `sections`, one per sub-group, into the new file `path`; then calls `finish` with it on the same thread.

    cloned: whether the file shares the arena's blocks. ended: whether the thread is done, so that `join` returns or raises at
    once. seconds: duration, once it has ended. error: why copying failed; None where it has not.
    Raises OSError where it can't be started.
    """

    def __init__(
        self,
        arena: Arena,
        sections: Sequence[Sequence[Source]],
        path: Path,
        finish: Callable[[StoredFile], None] = lambda written: None,
    ) -> None:
        self._sections = [
            [_part_of(arena, source, f"sub-group {index}") for source in section]
            for index, section in enumerate(sections)
        ]
        self._path = path
        self._finish = finish
        self._changed = threading.Condition()
        self._copied: set[int] = set()
        self._urgent: int | None = None
        self.ended = self._cancelled = False
        self._began = time.monotonic()
        self.seconds = 0.0
        self.error: BaseException | None = None
        self._digest = hashlib.sha256()
        with contextlib.ExitStack() as undo:
            self._arena = ArenaReader(arena)
            self._arena_path = arena.file.path
            undo.callback(self._arena.close)
            create_private(path).close()
            self._file = File(str(path))
            undo.callback(self._file.close)
            self.cloned = self._clone()
            self._pump = undo.enter_context(_Pump())  # not later: a program that is ending starts no thread
            self._closing = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name=f"copying {path.name}", daemon=True)
        self._thread.start()

    def is_copied(self, section: int) -> bool:
        """Whether the bytes of a section may be changed."""
        return self.ended or section in self._copied

    def wait_for(self, section: int) -> None:
        """Wait until the bytes of a section may be changed: see [Note: A copy of bytes that keep changing]."""
        with self._changed:
            while not self.is_copied(section):
                self._urgent = section
                self._changed.wait()

    def join(self) -> StoredFile:
        """Wait for the end; returns the file, which is on the drive. Raises the error of the thread, mostly OSError."""
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self._written

    def cancel(self) -> None:
        """Stop copying, and wait for the thread. The partial file stays."""
        self._cancelled = True
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            with self._closing:
                nbytes = self._copy_all()
                self._file.sync()
                self._written = StoredFile(nbytes, self._digest.hexdigest())
                self._finish(self._written)
        except BaseException as error:  # raised again in `join`
            self.error = error
        finally:
            self.seconds = time.monotonic() - self._began
            with self._changed:
                self.ended = True
                self._sections = []
                self._changed.notify_all()

    def _copy_all(self) -> int:
        """Copy and hash all sections; returns the bytes of the file."""
        sizes = (sum(part.source.nbytes for part in section) for section in self._sections)
        *begins, nbytes = accumulate(sizes, initial=0)
        if nbytes:
            self._file.reserve(nbytes)
        for index, begin in enumerate(begins):
            while (urgent := self._urgent) is not None:
                self._urgent = None
                if not self.is_copied(urgent):
                    self._copy(urgent, begins[urgent], hashed=False)
            hashed = not (self.cloned or self.is_copied(index))
            if not self.is_copied(index):
                self._copy(index, begin, hashed=hashed)
            if not hashed:
                self._hash_copied(index, begin)
        return nbytes

    def _copy(self, index: int, begin: int, *, hashed: bool) -> None:
        """Copy the sources of a section that were not cloned to `begin` of the file and on, and open its gate."""
        for part in self._sections[index]:
            if not (self.cloned and part.source.memory is None):
                self._copy_source(part, begin, self._digest.update if hashed else lambda piece: None)
            begin += part.source.nbytes
        with self._changed:
            self._copied.add(index)
            self._changed.notify_all()

    def _hash_copied(self, index: int, begin: int) -> None:
        """Hash a section whose bytes are in the file; verify the checksums of cloned bytes, which were not read yet."""
        for part in self._sections[index]:
            end = begin + part.source.nbytes
            self._pump.run(begin, end, partial(self._read_back, part, begin), self._digest.update)
            begin = end

    def _copy_source(self, part: _Part, begin: int, update_hash: Callable[[memoryview], None]) -> None:
        source = part.source

        def fetch(buffer: memoryview, at: int) -> None:
            self._check_cancelled()
            first = at - begin
            if source.memory is not None:
                elements = source.memory[first : first + buffer.nbytes]
                buffer[: elements.nbytes] = elements
                buffer[elements.nbytes :] = bytes(
                    buffer.nbytes - elements.nbytes
                )  # to the end of the field's last page
            else:
                self._arena.read_into(buffer, source.offset + first)
                _verify(buffer, part, first, self._arena_path, source.offset)

        self._pump.run(begin, begin + source.nbytes, fetch, update_hash, into=self._file)

    def _read_back(self, part: _Part, begin: int, buffer: memoryview, at: int) -> None:
        self._check_cancelled()
        read_into(self._file, buffer, at)
        _verify(buffer, part, at - begin, str(self._path), begin)

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise InterruptedError(errno.EINTR, "it was given up")

    def _clone(self) -> bool:
        """Clone the arena's ranges into the file; whether the file system could. Opens the gates of sections that are done."""
        arena = self._arena.only_file
        if arena is None:
            return False
        begin, done = 0, set()
        for index, section in enumerate(self._sections):
            sources = [part.source for part in section]
            for source in sources:
                if source.memory is None and source.nbytes and not _clone_range(arena, source, self._file, begin):
                    return False
                begin += source.nbytes
            if all(source.memory is None for source in sources):
                done.add(index)
        self._copied = done
        return True


def _clone_range(arena: File, source: Source, file: File, begin: int) -> bool:
    request = struct.pack("qQQQ", arena.fileno(), source.offset, source.nbytes, begin)
    try:
        fcntl.ioctl(file.fileno(), _FICLONERANGE, request)
    except OSError:  # another drive, or a file system that can't clone: copying will tell of any other trouble
        return False
    return True


def _part_of(arena: Arena, source: Source, name: str) -> _Part:
    if source.memory is not None or not source.nbytes:
        return _Part(source, name)
    return _Part(source, name, arena.checksums(source.offset, source.nbytes), *arena.generation_at(source.offset))


def _verify(buffer: memoryview, part: _Part, first: int, path: str, offset: int) -> None:
    """Raise IntegrityError unless the pages in `buffer` match the checksums of a source, from its byte `first` on. They were
    read from `path`, where the source begins at `offset`."""
    sums = part.sums[first // PAGE_BYTES * SUM_BYTES :][: buffer.nbytes // PAGE_BYTES * SUM_BYTES]
    if not sums or page_checksums(buffer) == sums:
        return
    for page in range(0, len(sums), SUM_BYTES):
        at = page // SUM_BYTES * PAGE_BYTES
        wanted = sums[page : page + SUM_BYTES]
        if any(wanted) and page_checksums(buffer[at : at + PAGE_BYTES]) != wanted:
            place = offset + first + at
            error = IntegrityError(
                f"the page at offset {place} of {path} doesn't hold what was written there: see to the health of the drive "
                "(smartctl -a, dmesg), and load an earlier checkpoint",
                errno.EBADMSG,
                "read",
                path,
                place,
                PAGE_BYTES,
            )
            assert part.extent is not None
            error.in_extent(part.name, part.extent.offset, part.extent.nbytes, part.generation)
            raise error


class _Pump:
    """Moves bytes through a few buffers: the next piece is fetched while the last one is hashed and written."""

    def __init__(self) -> None:
        self._maps = [mmap.mmap(-1, _BUFFER_BYTES) for _ in range(_BUFFERS)]  # aligned to pages, for direct transfers
        self._busy: list[Future[None] | None] = [None] * _BUFFERS
        # Not a pool of concurrent.futures, which accepts no work once the program is ending.
        self._waiting: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="copying", daemon=True)
        self._writer.start()

    def run(
        self,
        begin: int,
        end: int,
        fetch: Callable[[memoryview, int], None],
        update_hash: Callable[[memoryview], None],
        *,
        into: File | None = None,
    ) -> None:
        """Fetch bytes [begin, end) piece by piece; pass each to `update_hash` and write it to `into`, if given, at its offset.

        Returns when all of it is done. Raises OSError.
        """
        for number, at in enumerate(range(begin, end, _BUFFER_BYTES)):
            slot = number % _BUFFERS
            self._await(slot)
            piece = memoryview(self._maps[slot])[: min(_BUFFER_BYTES, end - at)]
            fetch(piece, at)
            busy: Future[None] = Future()
            self._busy[slot] = busy
            self._waiting.put((busy, partial(_put, piece, at, update_hash, into)))
        for slot in range(_BUFFERS):
            self._await(slot)

    def _await(self, slot: int) -> None:
        busy, self._busy[slot] = self._busy[slot], None
        if busy is not None:
            busy.result()

    def __enter__(self) -> _Pump:
        return self

    def __exit__(self, *exception: object) -> None:
        self._waiting.put(None)
        self._writer.join()

    def _write_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            done, write = waiting
            try:
                write()
            except BaseException as error:  # raised again in `_await`
                done.set_exception(error)
            else:
                done.set_result(None)


def _put(piece: memoryview, at: int, update_hash: Callable[[memoryview], None], into: File | None) -> None:
    update_hash(piece)
    done = 0
    while into is not None and done < piece.nbytes:
        done += os.pwritev(into.fileno(), [piece[done:]], at + done)
