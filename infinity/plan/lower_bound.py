"""The bytes that a step must move, and its least time: docs/architecture.md, "The sum"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from infinity.schedule.residency import Candidate, moved_bytes
from infinity.schedule.scheme import COMPUTE_BYTES, Scheme


@dataclass(frozen=True)
class Part:
    """Elements of one rank that a step treats alike. gathers: of each per step; see `live.LivePlan.gathers`.
    compute_on_nvme: False if gathers read them from ordinary host memory."""

    numel: int
    gathers: int = 2
    compute_on_nvme: bool = True


def candidates_of(part: Part, scheme: Scheme) -> tuple[Candidate, Candidate]:
    """Return the bytes of `part` that a step moves with all state on NVMe: compute parameters, and other state. Units:
    bytes."""
    if not part.compute_on_nvme:  # masters are stored in full
        full = replace(scheme, master_weights="full")
        return Candidate(0, 1, 0, 0), Candidate(math.ceil(full.other_state_bytes() * part.numel), 1, 1, 1)
    return (
        Candidate(COMPUTE_BYTES * part.numel, 1, scheme.compute_reads(part.gathers), 1),
        Candidate(math.ceil(scheme.other_state_bytes() * part.numel), 1, 1, 1),
    )


def step_bytes(part: Part, scheme: Scheme) -> tuple[int, int]:
    """Return the minimum bytes (read, written) of a step with nothing cached."""
    return moved_bytes(candidates_of(part, scheme), (0, 0))


@dataclass(frozen=True)
class DriveSpeed:
    """The drives' rates for one rank (bytes per second). mixed: rates of reads and of writes at the same time; None for
    drives that alternate."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed: tuple[float, float] | None = None

    def lower_bound_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the least time for these bytes. If reading and writing at once is faster than alternating, it does so
        while both remain, and then moves the remainder alone."""
        seconds = 0.0
        reads, writes = self.mixed or (0.0, 0.0)
        if reads / self.read_bytes_per_s + writes / self.write_bytes_per_s > 1:  # faster than alternating
            seconds = min(read_bytes / reads, written_bytes / writes)
            read_bytes -= seconds * reads
            written_bytes -= seconds * writes
        return seconds + read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s
