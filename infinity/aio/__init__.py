"""The typed Python interface of the I/O core in csrc/aio: engine, transfers, pinned pool and leases."""

from infinity._aio import (
    EarlySleep,
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
from infinity.aio.early_sleep import start_early_sleep
from infinity.aio.engine import DriveStats, IoEngine, IoSettings, Request
from infinity.aio.numa import near
from infinity.aio.pool import FreeRanges, Lease, PinnedPool, PoolPart

__all__ = [
    "DriveStats",
    "EarlySleep",
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
    "start_early_sleep",
]
