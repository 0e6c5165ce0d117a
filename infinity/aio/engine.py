"""The I/O engine: transfers between files and leases of the pinned pool.

The ring threads are in csrc/aio and never enter Python; all code here runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity import _aio
from infinity._aio import File, Priority, StripedFile, Transfer
from infinity.aio.pool import Lease, PinnedPool
from infinity.units import MIB


@dataclass(frozen=True)
class Request:
    """One transfer to start: `length` bytes between `file` at `offset` and `lease` at `lease_offset` (all in bytes)."""

    operation: str
    file: File | StripedFile
    offset: int
    lease: Lease
    lease_offset: int
    length: int
    priority: Priority


@dataclass(frozen=True)
class IoSettings:
    """The I/O settings of an engine, which checks the values; some depend on the machine.

    Attributes:
        backend: "auto", "io_uring", "linux_aio" or "threads".
        block_bytes: bytes per submission.
        queue_depth: submissions in flight per ring.
        rings: ring threads per drive.
        mix: how waiting reads and writes share a drive: "interleaved", or "bursts" of one, then the other.
        iopoll, sqpoll: io_uring polls for completions (the drive needs poll queues), or for submissions (uses a core).
    """

    backend: str = "auto"
    block_bytes: int = MIB
    queue_depth: int = 32
    rings: int = 1
    mix: str = "interleaved"
    iopoll: bool = False
    sqpoll: bool = False

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in flight on one drive."""
        return self.block_bytes * self.queue_depth * self.rings


@dataclass(frozen=True)
class DriveStats:
    """Bytes that one drive moved, and the seconds during which it had a read, and a write, in flight."""

    read_bytes: int
    written_bytes: int
    read_seconds: float
    write_seconds: float

    @property
    def read_bytes_per_s(self) -> float:
        """Bandwidth while reading."""
        return self.read_bytes / self.read_seconds if self.read_seconds else 0.0

    @property
    def write_bytes_per_s(self) -> float:
        """Bandwidth while writing."""
        return self.written_bytes / self.write_seconds if self.write_seconds else 0.0


class IoEngine:
    """Starts transfers into and out of the leases of one pool.

    Args:
        pool: the only memory for transfers; registered with the kernel if possible.
        io: the I/O settings.
        drives: number of drives with its files; each has its own rings.
        silence_seconds_max: a drive that completes no block for this long is given up: transfers that wait for it fail,
            and no more can be started. 0 waits for ever.
        io_options: fields of `io` to override by name: `backend="threads"`.

    Raises IoError, with the reason, if a backend requested by name is not available; ValueError for invalid numbers.
    """

    def __init__(
        self,
        pool: PinnedPool,
        io: IoSettings | None = None,
        *,
        drives: int = 1,
        silence_seconds_max: float = 300.0,
        **io_options: Any,
    ) -> None:
        self._pool = pool
        self._options = asdict(replace(io or IoSettings(), **io_options))
        self._options |= {"drives": drives, "silence_seconds_max": silence_seconds_max}
        self._core = _aio.Engine(**self._options, slab=pool.slab)
        self._notes: list[str] = []
        self._drives = [DriveStats(0, 0, 0.0, 0.0)] * drives
        """What was said, and moved, before the last `resume`."""
        self.stall_seconds = 0.0

    @property
    def backend(self) -> str:
        return self._core.backend

    @property
    def block_bytes(self) -> int:
        """Bytes per submission."""
        return self._core.block_bytes

    @property
    def notes(self) -> list[str]:
        """Messages: the reason for the backend, and requests that the kernel refused."""
        return list(dict.fromkeys((*self._notes, *self._core.notes)))

    @property
    def read_bytes(self) -> int:
        return sum(drive.read_bytes for drive in self._drives) + int(self._core.counters()["read_bytes"])

    @property
    def written_bytes(self) -> int:
        return sum(drive.written_bytes for drive in self._drives) + int(self._core.counters()["written_bytes"])

    @property
    def drives(self) -> list[DriveStats]:
        """The statistics of each drive so far."""
        keys = ("read_bytes", "written_bytes", "read_seconds", "write_seconds")
        now = zip(self._drives, self._core.counters()["drives"], strict=True)
        return [DriveStats(*(getattr(before, key) + drive[key] for key in keys)) for before, drive in now]

    def take_timings(self) -> npt.NDArray[np.void]:
        """Return when transfers that ended since the last call were queued, submitted and done; see `_aio.Engine`."""
        return self._core.take_timings()

    def start(self, requests: Sequence[Request], *, sums_by_caller: bool = False) -> list[Transfer]:
        """Start several transfers with one lock and one wake; all are checked before the first one starts.

        A lease must be held until its transfers are done. `sums_by_caller`: for files with checksums, the caller
        verifies bytes read (`verify`) and has set the checksums of pages to be written (`File.set_checksums`); else the
        engine does both. Raises ValueError for wrong bounds or alignment.
        """
        slab = self._pool.slab
        batch = []
        for r in requests:
            assert r.lease.held, "a transfer with a lease that was given back"
            at = r.lease.offset + r.lease_offset
            batch.append((r.operation, r.file, r.offset, slab, at, r.length, r.priority))
        return self._core.start_batch(batch, sums_by_caller=sums_by_caller)

    def verify(self, request: Request) -> None:
        """Verify the checksums of the pages of a finished read. Raises IntegrityError as the read would have."""
        r = request
        self._core.verify(r.file, r.offset, self._pool.slab, r.lease.offset + r.lease_offset, r.length)

    def wait(self, transfers: Sequence[Transfer], *, with_team: bool = False) -> None:
        """Wait until all transfers are done; the time counts as stall.

        with_team: this thread computes on the CPU, and its OpenMP threads sleep meanwhile.
        Raises the IoError of the first one that failed, after all have ended.
        """
        failure: Exception | None = None
        began = time.perf_counter()
        try:
            for transfer in transfers:
                try:
                    transfer.wait(with_team=with_team)
                except OSError as error:
                    failure = failure or error
        finally:
            self.stall_seconds += time.perf_counter() - began
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Count the time of the block, in which the caller waits for a drive, as stall."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - began

    def drain(self) -> None:
        """Wait until no transfer is in flight; the time counts as stall. Raises no IoError."""
        with self.stalling():
            self._core.drain()

    def pause(self) -> None:
        """Stop the threads, so that the kernel holds nothing of the pool, until `resume`. Nothing can be started meanwhile.
        Raises as `close`."""
        self._core.close()

    def resume(self) -> None:
        """After `pause`: start threads again. Raises as the constructor."""
        core = _aio.Engine(**self._options, slab=self._pool.slab)
        self._notes, self._drives = self.notes, self.drives
        self._core = core

    def close(self) -> None:
        """Drain, stop the threads, and raise the first error that no wait has raised."""
        self._core.close()
