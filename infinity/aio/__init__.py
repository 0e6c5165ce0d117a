"""The typed Python interface of the I/O core in csrc/aio: engine, transfers, pinned pool and leases."""

from infinity._aio import (
    File,
    PinnedSlab,
    Priority,
    StripedFile,
    Transfer,
    absent_bytes,
    direct_alignment,
    page_checksums,
    probe,
)
from infinity.aio.engine import DriveStats, IoEngine, IoSettings, Request
from infinity.aio.numa import near
from infinity.aio.pool import FreeRanges, Lease, PinnedPool, PoolPart

__all__ = [
    "DriveStats",
    "File",
    "FreeRanges",
    "IoEngine",
    "IoSettings",
    "Lease",
    "PinnedPool",
    "PinnedSlab",
    "PoolPart",
    "Priority",
    "Request",
    "StripedFile",
    "Transfer",
    "absent_bytes",
    "direct_alignment",
    "near",
    "page_checksums",
    "probe",
]
