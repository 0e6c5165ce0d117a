"""Measures drives: timed transfers through the I/O engine, between a file of random data and a pinned pool. Used by one
thread."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from infinity.aio import File, IoEngine, IoSettings, PinnedPool, Priority, Request
from infinity.errors import IoError, StoreError
from infinity.store.run_folder import RunFolder
from infinity.units import GIB, MIB, format_bytes

POOL_BYTES = 512 * MIB
FILE_BYTES_MIN = 16 * MIB
_LEASES = 8
"""Leases in the pool, each at least a transfer: few, to spare Python; enough for a slow drive to end in time."""

MIX_MODES = ("interleaved", "bursts")

_TRANSFER_BYTES_MIN = 4 * MIB
_RATES_POOL_BYTES_MIN = 64 * MIB

_WARM_UP = 0.2
"""Share of a trial that runs before its clock starts, to fill the drive's queue."""


class Workload(str, Enum):
    """Kind of load. MIXED is that of an optimizer step: it reads one chunk while it writes another."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"


@dataclass(frozen=True)
class Trial:
    """One measurement, between two moments at which the drive's queue was full. nbytes: read and written in between.
    cpu_seconds: user and system time of the whole process."""

    workload: Workload
    settings: IoSettings
    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.cpu_seconds / (self.nbytes / GIB)


@dataclass(frozen=True)
class DriveRates:
    """Bytes per second of long sequential transfers: medians of a few rounds. Mixed: both ways are counted."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    backend: str


def measure_drive(
    path: str | os.PathLike[str],
    *,
    nbytes: int = 256 * MIB,
    rounds: int = 5,
    seconds: float = 0.15,
    io: IoSettings | None = None,
    **io_options: Any,
) -> DriveRates:
    """Measure reads, writes and both at once, with random data in a file of `nbytes` on the drive of `path`: `rounds`
    trials of each kind, at least `seconds` long. io, io_options: as for `infinity.aio.IoEngine`.

    Leaves no file behind. Raises StoreError or IoError.
    """
    settings = replace(io or IoSettings(), **io_options)
    pool_bytes = max(_RATES_POOL_BYTES_MIN, 2 * settings.in_flight_bytes)
    with DriveTest(path, nbytes=nbytes, pool_bytes=pool_bytes) as test:
        test.fill()
        trials = [test.run(workload, settings, seconds) for workload in [*Workload] * rounds]
    read, write, mixed = (
        statistics.median(trial.bytes_per_s for trial in trials if trial.workload is workload) for workload in Workload
    )
    return DriveRates(read, write, mixed, trials[0].settings.backend)


class DriveTest:
    """A file of random data on the drive of `path`, and a pinned pool for its transfers.

    nbytes: size of the file, at least 16 MiB; rounded down to whole chunks. pool_bytes: maximum of pinned memory.

    Call `fill` before the first trial: reserved space reads as zeros without touching the drive, and the file system
    converts it on the first write. The file has no name ([Note: Leaving nothing behind] in store/run_folder.py). Raises
    StoreError for missing permissions or space, ValueError for a file that is too small.
    """

    def __init__(self, path: str | os.PathLike[str], *, nbytes: int, pool_bytes: int = POOL_BYTES) -> None:
        if nbytes < FILE_BYTES_MIN:
            raise ValueError(
                f"the test file must have at least {format_bytes(FILE_BYTES_MIN)}, got {format_bytes(nbytes)}"
            )
        self.chunk_bytes = 1 << ((min(pool_bytes, nbytes) // _LEASES).bit_length() - 1)
        self.nbytes = nbytes // self.chunk_bytes * self.chunk_bytes
        self.notes: list[str] = []
        self._offset = 0
        self._filled = False
        with contextlib.ExitStack() as stack:
            folder = RunFolder(path)
            stack.callback(folder.close)
            folder.check_free(self.nbytes, "the test file")
            name = folder.path / "drive-test"
            self._file = File(name, create=True)
            stack.callback(self._file.close)
            self.descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            """A plain descriptor of the file, so that another program can be measured on the same bytes."""
            stack.callback(os.close, self.descriptor)
            name.unlink()
            try:
                self._file.reserve(self.nbytes)
            except IoError as error:
                why = f"the test file: {error}: free space or choose another path"
                raise StoreError(error.errno or 0, why) from None
            self.notes += self._file.notes
            self.pool_bytes = _LEASES * self.chunk_bytes
            self._pool: PinnedPool | None = PinnedPool(self.pool_bytes)
            self._pool.bytes.view(torch.int64).random_(generator=torch.Generator())
            self.notes += self._pool.notes
            self._leases = [stack.enter_context(self._pool.lease(self.chunk_bytes)) for _ in range(_LEASES)]
            self._stack = stack.pop_all()

    @property
    def direct(self) -> bool:
        """True if transfers bypass the page cache. If not, memory is measured instead of the drive."""
        return self._file.direct

    def fits(self, settings: IoSettings) -> bool:
        """Return True if the pool can keep the drive busy with these settings: half in flight, half queued next."""
        in_time = settings.in_flight_bytes <= self.pool_bytes // 2
        return in_time and settings.block_bytes <= self.chunk_bytes

    def fill(self, on_progress: Callable[[int], None] = lambda _: None) -> None:
        """Write the whole file once. Calls `on_progress` with the bytes done so far."""
        with contextlib.closing(self._make_engine(IoSettings())) as engine:
            turns = self._turns(engine, Workload.WRITE, self.chunk_bytes, slots=3)
            for done_bytes in range(0, self.nbytes, self.chunk_bytes):
                on_progress(done_bytes)
                next(turns)
        self._filled = True

    def run(self, workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        """Move bytes for `seconds` after a warm-up. Each trial continues in the file where the last one stopped. The
        result's settings name the backend chosen for "auto"."""
        assert self._filled, "a trial on a file that was not written yet"
        with contextlib.closing(self._make_engine(settings)) as engine:
            nbytes = self._transfer_bytes(settings)
            turns = self._turns(engine, workload, nbytes, self._slots(workload, settings, nbytes))
            _go_on(turns, seconds * _WARM_UP)
            moved_before, began, cpu_before = _counters(engine)
            _go_on(turns, seconds)
            moved, ended, cpu = _counters(engine)
            settings = replace(settings, backend=engine.backend)
            return Trial(workload, settings, moved - moved_before, ended - began, cpu - cpu_before)

    def close(self) -> None:
        self._stack.close()
        self._leases.clear()
        self._pool = None

    def __enter__(self) -> DriveTest:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _make_engine(self, settings: IoSettings) -> IoEngine:
        assert self._pool is not None, "a trial after the end"
        engine = IoEngine(self._pool, settings)
        self.notes += [note for note in engine.notes if note not in self.notes]
        return engine

    def _transfer_bytes(self, settings: IoSettings) -> int:
        """Return the bytes per transfer: a power of two that divides the file, near the bytes in flight. At most a
        lease. Small if little is in flight, because a trial ends only when all queued bytes have moved."""
        wanted = max(_TRANSFER_BYTES_MIN, settings.block_bytes, settings.in_flight_bytes)
        return min(1 << (wanted - 1).bit_length(), self.chunk_bytes)

    def _slots(self, workload: Workload, settings: IoSettings, transfer_bytes: int) -> int:
        """Return the number of turns to keep in the engine. They are those in flight, one being cut into blocks, and
        one until Python has woken up. A mixed load has one more, so that in bursts both kinds are always waiting."""
        ways = 2 if workload is Workload.MIXED else 1
        wanted = -(-settings.in_flight_bytes // (transfer_bytes * ways)) + 1 + ways
        return min(wanted, _LEASES // ways)

    def _turns(self, engine: IoEngine, workload: Workload, nbytes: int, slots: int) -> Iterator[None]:
        """Keep `slots` turns of `nbytes` each way in flight while iterated; yield when the oldest has ended."""
        under_way = deque(engine.start(self._requests(workload, nbytes, slot)) for slot in range(slots))
        for slot in itertools.cycle(range(slots)):
            engine.wait(under_way.popleft())
            under_way.append(engine.start(self._requests(workload, nbytes, slot)))
            yield

    def _requests(self, workload: Workload, nbytes: int, slot: int) -> list[Request]:
        offset = -(-self._offset // nbytes) * nbytes % self.nbytes
        self._offset = offset + nbytes
        if workload is not Workload.MIXED:
            return [self._request(workload.value, offset, nbytes, slot)]
        far_away = (offset + self.nbytes // self.chunk_bytes // 2 * self.chunk_bytes) % self.nbytes
        return [self._request("read", offset, nbytes, 2 * slot), self._request("write", far_away, nbytes, 2 * slot + 1)]

    def _request(self, operation: str, offset: int, nbytes: int, lease: int) -> Request:
        priority = Priority.PREFETCH if operation == "read" else Priority.WRITE_BACK
        return Request(operation, self._file, offset, self._leases[lease], 0, nbytes, priority)


def _counters(engine: IoEngine) -> tuple[int, float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return engine.read_bytes + engine.written_bytes, time.perf_counter(), usage.ru_utime + usage.ru_stime


def _go_on(turns: Iterator[None], seconds: float) -> None:
    end = time.perf_counter() + seconds
    for _ in turns:
        if time.perf_counter() >= end:
            return
