"""Floor 1. The typed Python face of the I/O core in csrc/aio: engine, transfers, pinned pool and leases."""

from infinity._aio import File, PinnedSlab, Priority, Transfer, direct_alignment, probe
from infinity.aio.engine import IoEngine, Request
from infinity.aio.pool import Lease, PinnedPool

__all__ = [
    "File",
    "IoEngine",
    "Lease",
    "PinnedPool",
    "PinnedSlab",
    "Priority",
    "Request",
    "Transfer",
    "direct_alignment",
    "probe",
]
