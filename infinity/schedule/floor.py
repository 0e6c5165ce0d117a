"""Floor 3. The sums every measured step stands beside: bytes a step must move, and the time it can't go below.

P trainable parameters, 16-bit model, fp32 Adam, gradients in host memory (docs/architecture.md, "The sum").
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.schedule.residency import Candidate, choose_resident, moved_bytes

MASTER_BYTES = 4
MOMENT_BYTES = 4


def step_bytes(
    *,
    trained_numel: int,
    paged_numel: int,
    copy_itemsize: int,
    writes_copy: bool = True,
    state_on_nvme: bool = True,
    gathers: int = 2,
    micro_batches: int = 1,
    cached_bytes: int = 0,
) -> tuple[int, int]:
    """Bytes (read, written) that one step moves at least, with `cached_bytes` of host memory to keep some of them in.

    Args:
        trained_numel: elements this rank steps.
        paged_numel: elements of its shards that are read for each gather (all but the resident ones).
        copy_itemsize: bytes of one element of what is gathered (2 for bf16).
        writes_copy: whether that is a copy of its own (not where the fp32 master is gathered); resident ones aren't written.
        state_on_nvme: whether master and moments are read and written too.
        gathers: gathers per micro-batch: forward and backward.
        micro_batches: micro-batches per step.
        cached_bytes: hold what a step would otherwise move, from step to step: see [Note: What stays] in residency.py.

    With everything paged, one micro-batch and nothing cached: 2 · 2 P + 12 P = 16 P read, 14 P written.
    """
    passes = gathers * micro_batches
    trained_copies = copy_itemsize * min(trained_numel, paged_numel)
    frozen_copies = copy_itemsize * paged_numel - trained_copies
    state = (MASTER_BYTES + 2 * MOMENT_BYTES) * trained_numel if state_on_nvme else 0
    if not writes_copy:  # the trained copies are a part of the state, which the optimizer reads
        state -= trained_copies
    parts = [
        Candidate(trained_copies, 1, passes + (not writes_copy), 1),
        Candidate(frozen_copies, 1, passes, 0),
        Candidate(state, 1, 1, 1),
    ]
    return moved_bytes(parts, choose_resident(parts, cached_bytes))


def step_floor_seconds(
    *,
    read_bytes: float,
    written_bytes: float,
    read_bytes_per_s: float,
    write_bytes_per_s: float,
    compute_seconds: float,
) -> float:
    """T_step >= max(compute, R / BW_read + W / BW_write), for a drive that reads and writes in turns."""
    return max(compute_seconds, read_bytes / read_bytes_per_s + written_bytes / write_bytes_per_s)


@dataclass(frozen=True)
class DriveSpeed:
    """What the drives give one rank (bytes per second).

    Attributes:
        read_bytes_per_s, write_bytes_per_s: of one alone.
        together: the same of each while both go on; None for drives that take turns.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    together: tuple[float, float] | None = None

    @property
    def overlaps(self) -> bool:
        """Whether doing both at once moves more than taking turns does."""
        if self.together is None:
            return False
        return self.together[0] / self.read_bytes_per_s + self.together[1] / self.write_bytes_per_s > 1

    def floor_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """The least time for these bytes: in turns R / BW_read + W / BW_write; where both at once is better, both for as
        long as there are both, and the rest alone."""
        seconds = 0.0
        if self.overlaps and self.together is not None:
            seconds = min(read_bytes / self.together[0], written_bytes / self.together[1])
            read_bytes -= seconds * self.together[0]
            written_bytes -= seconds * self.together[1]
        return seconds + read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s
