"""The lower bounds that every measured step is compared with: the bytes that it must move, and the least time.

16-bit model, fp32 state, gradients in host memory (docs/architecture.md, "The sum").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from infinity.schedule.residency import Candidate, moved_bytes
from infinity.schedule.scheme import COMPUTE_BYTES, Scheme


@dataclass(frozen=True)
class Part:
    """Elements of one rank that a step treats alike.

    Attributes:
        numel: how many.
        gathers: of each in a step; see `live.LivePlan.gathers`. Two for each micro-batch, fewer where they stay gathered.
        compute_on_nvme: whether gathers read them from NVMe, not from ordinary host memory.
    """

    numel: int
    gathers: int = 2
    compute_on_nvme: bool = True


def candidates_of(part: Part, scheme: Scheme) -> tuple[Candidate, Candidate]:
    """The bytes of `part` that a step moves, with all of its state on NVMe: compute parameters, and other state.

    Single bytes are the units.
    """
    if not part.compute_on_nvme:  # masters rest in full
        full = replace(scheme, master_weights="full")
        return Candidate(0, 1, 0, 0), Candidate(math.ceil(full.other_state_bytes() * part.numel), 1, 1, 1)
    return (
        Candidate(COMPUTE_BYTES * part.numel, 1, scheme.compute_reads(part.gathers), 1),
        Candidate(math.ceil(scheme.other_state_bytes() * part.numel), 1, 1, 1),
    )


def step_bytes(part: Part, scheme: Scheme) -> tuple[int, int]:
    """Bytes (read, written) that one step moves at least, with nothing cached.

    With everything paged and one micro-batch, P elements read 14 P and write 12 P where updates are in the passes:
    [Note: Schemes] in scheme.py.
    """
    return moved_bytes(candidates_of(part, scheme), (0, 0))


@dataclass(frozen=True)
class DriveSpeed:
    """The drives' rates for one rank (bytes per second).

    Attributes:
        read_bytes_per_s, write_bytes_per_s: while nothing else goes on.
        mixed: of reads and of writes while both go on; None for drives that take turns.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed: tuple[float, float] | None = None

    def lower_bound_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """The least time for these bytes: in turns R / BW_read + W / BW_write; where both at once is better, both for as
        long as there are both, and the rest alone."""
        seconds = 0.0
        reads, writes = self.mixed or (0.0, 0.0)
        if reads / self.read_bytes_per_s + writes / self.write_bytes_per_s > 1:  # more than taking turns moves
            seconds = min(read_bytes / reads, written_bytes / writes)
            read_bytes -= seconds * reads
            written_bytes -= seconds * writes
        return seconds + read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s
