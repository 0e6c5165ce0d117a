"""Floor 2. A short look at what the drive gives right now, for the floor that a measured step is held against."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from infinity.aio import IoEngine, PinnedPool, Priority, Request
from infinity.store.arena import Arena
from infinity.store.run_folder import RunFolder
from infinity.units import MIB

_CHUNK_BYTES = 16 * MIB


@dataclass(frozen=True)
class DriveRates:
    """Bytes per second of long sequential transfers through the I/O engine: medians of a few rounds."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    backend: str


def measure_drive(
    path: str | os.PathLike[str], *, nbytes: int = 256 * MIB, rounds: int = 5, **engine_options: Any
) -> DriveRates:
    """Write and read `nbytes` of random data on the drive of `path`, `rounds` times in turn; takes seconds.

    Args:
        engine_options: as for `infinity.aio.IoEngine`.

    Leaves nothing behind. Raises StoreError or IoError.
    """
    folder = RunFolder(path)
    try:
        pool = PinnedPool(2 * _CHUNK_BYTES)
        engine = IoEngine(pool, **engine_options)
        arena = Arena(folder, engine, name="probe.arena")
        leases = [pool.lease(_CHUNK_BYTES) for _ in range(2)]
        for lease in leases:
            torch.randint(0, 1 << 62, (_CHUNK_BYTES // 8,), out=lease.view(torch.int64))
        chunks = max(2, nbytes // _CHUNK_BYTES)
        arena.reserve([_CHUNK_BYTES] * chunks, "the drive probe")

        def run(operation: str) -> float:
            began = time.perf_counter()
            requests = [
                Request(operation, arena.file, k * _CHUNK_BYTES, leases[k % 2], 0, _CHUNK_BYTES, Priority.DEMAND)
                for k in range(chunks)
            ]
            engine.wait(engine.start(requests))
            return chunks * _CHUNK_BYTES / (time.perf_counter() - began)

        run("write")  # the first write to reserved space costs the file system a conversion
        rates = [(run("read"), run("write")) for _ in range(rounds)]
        for lease in leases:
            lease.give_back()
        backend = engine.backend
        engine.close()
        arena.close()
    finally:
        folder.close()
    return DriveRates(statistics.median(r for r, _ in rates), statistics.median(w for _, w in rates), backend)
