"""Floor 5. A short measurement of a drive's present rates, for the lower bound of a measured step."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infinity.aio import DriveLimit, IoSettings
from infinity.drive.measure import DriveTest, Workload
from infinity.units import MIB

_POOL_BYTES_MIN = 64 * MIB


@dataclass(frozen=True)
class DriveRates:
    """Bytes per second of long sequential transfers through the I/O engine: medians of a few rounds."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    backend: str


def measure_drive(
    path: str | os.PathLike[str],
    *,
    nbytes: int = 256 * MIB,
    rounds: int = 5,
    seconds: float = 0.15,
    io: IoSettings | None = None,
    limits: Sequence[DriveLimit] = (),
    **io_options: Any,
) -> DriveRates:
    """Read and write random data on the drive of `path` in turn.

    Args:
        nbytes: size of the file (bytes).
        rounds: trials of each, at least `seconds` long.
        io, limits, io_options: as for `infinity.aio.IoEngine`.

    Leaves nothing behind. Raises StoreError or IoError.
    """
    settings = replace(io or IoSettings(), **io_options)
    pool_bytes = max(_POOL_BYTES_MIN, 2 * settings.in_flight_bytes)
    with DriveTest(path, nbytes=nbytes, pool_bytes=pool_bytes, limits=limits) as test:
        test.fill()
        trials = [test.run(way, settings, seconds) for way in (Workload.READ, Workload.WRITE) * rounds]
    reads, writes = ([trial.bytes_per_s for trial in trials[way::2]] for way in (0, 1))
    return DriveRates(statistics.median(reads), statistics.median(writes), trials[0].settings.backend)
