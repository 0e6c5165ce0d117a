"""Floor 3. The sums every measured step stands beside: bytes a step must move, and the time it can't go below.

P trainable parameters, 16-bit model, fp32 Adam, gradients in host memory (docs/architecture.md, "The sum").
"""

from __future__ import annotations

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
) -> tuple[int, int]:
    """Bytes (read, written) that one step moves with nothing cached.

    Args:
        trained_numel: elements this rank steps.
        paged_numel: elements of its shards that are read for each gather (all but the resident ones).
        copy_itemsize: bytes of one element of what is gathered (2 for bf16).
        writes_copy: whether that is a copy of its own (not where the fp32 master is gathered); resident ones aren't written.
        state_on_nvme: whether master and moments are read and written too.
        gathers: gathers per micro-batch: forward and backward.
        micro_batches: micro-batches per step.

    With everything paged and one micro-batch: 2 · 2 P + 12 P = 16 P read, 14 P written.
    """
    state = MASTER_BYTES + 2 * MOMENT_BYTES if state_on_nvme else 0
    read = gathers * micro_batches * copy_itemsize * paged_numel + state * trained_numel
    return read, state * trained_numel + copy_itemsize * writes_copy * min(trained_numel, paged_numel)


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
