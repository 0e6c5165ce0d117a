"""Floor 1. The I/O engine as the floors above see it: transfers between a file and a lease of the pinned pool.

The ring threads live in csrc/aio and never enter Python; everything here runs on the caller's thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from infinity import _aio
from infinity._aio import File, Priority, Transfer
from infinity.aio.pool import Lease, PinnedPool


@dataclass(frozen=True)
class Request:
    """One transfer to start: `length` bytes between `file` at `offset` and `lease` at `lease_offset` (all in bytes)."""

    operation: str
    file: File
    offset: int
    lease: Lease
    lease_offset: int
    length: int
    priority: Priority


class IoEngine:
    """Starts transfers into and out of the leases of one pool.

    Args:
        pool: the only memory this engine moves bytes through; registered with the kernel where it permits.
        backend: "auto", "io_uring" or "threads".
        queue_depth: submissions in flight per ring.
        block_bytes: bytes per submission.
        rings: ring threads.

    Raises IoError where a backend asked for by name is not available (with the reason), ValueError on bad numbers.
    """

    def __init__(
        self,
        pool: PinnedPool,
        *,
        backend: str = "auto",
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
        rings: int = 1,
    ) -> None:
        self._pool = pool
        self._core = _aio.Engine(
            backend=backend, queue_depth=queue_depth, block_bytes=block_bytes, rings=rings, slab=pool.slab
        )
        self.stall_seconds = 0.0

    @property
    def backend(self) -> str:
        """The backend that was chosen."""
        return self._core.backend

    @property
    def notes(self) -> list[str]:
        """Why it was chosen, and what the kernel refused."""
        return list(self._core.notes)

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return int(self._core.counters()["read_bytes"])

    @property
    def written_bytes(self) -> int:
        """Bytes written so far."""
        return int(self._core.counters()["written_bytes"])

    def open(self, path: str | os.PathLike[str], *, create: bool = False) -> File:
        """Open `path` for direct I/O (buffered where the file system refuses it; `File.notes` then says so)."""
        return File(os.fspath(path), create=create)

    def start(self, requests: Sequence[Request]) -> list[Transfer]:
        """Start several transfers with one lock and one wake; all are checked before the first one starts.

        A lease must be held until its transfers are done. Raises ValueError on bounds or alignment.
        """
        assert all(request.lease.held for request in requests), "a transfer with a lease that was given back"
        slab = self._pool.slab
        return self._core.start_batch(
            [
                (r.operation, r.file, r.offset, slab, r.lease.offset + r.lease_offset, r.length, r.priority)
                for r in requests
            ]
        )

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait until all are done; the time it takes counts as stall.

        Raises IoError of the first one that failed, after all of them ended.
        """
        failure: Exception | None = None
        began = time.perf_counter()
        for transfer in transfers:
            try:
                transfer.wait()
            except OSError as error:
                failure = failure or error
        self.stall_seconds += time.perf_counter() - began
        if failure is not None:
            raise failure

    def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        self._core.drain()

    def close(self) -> None:
        """Drain, stop the threads, and raise the first failure that nobody waited for."""
        self._core.close()
