"""The data of a pass that memory can't hold until its use: which gradients and saved activations wait on NVMe.

[Note: Gradients that spill]
A gradient waits from the backward that computes it to the update that uses it. A group whose gradient spills is updated
in its next forward; the others may be updated in the backward. So an even share of the groups spills, and each pass
moves about as much between any two groups. If one end of the model spilled, the drive would idle in most of a pass, and
compute would wait for it in the other part. Each element moves its bytes once each way; with n micro-batches, whose sum
it holds, n times. With updates in the backward that aren't speculative, none spills: with a bound, none waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule.residency import choose_evenly

GRADIENT_BYTES = 4
"""Bytes per element of a reduced gradient (fp32)."""

NARROW_GRADIENT_BYTES = 2
"""Bytes per element if 16 bits are exact: see [Note: Gradients in 16 bits] in infinity/swap/waiting_gradients.py."""

BUFFER_SHARES = 4
"""Saved activations pass through a buffer. A tensor larger than this part of it stays in place: one part is filled
while others are written or read."""

IN_HAND_SHARES = 2
"""The tensors saved last stay in this part of the buffer: they are needed first, and use no drive."""

BUFFER_BYTES_DEFAULT = 256 << 20


def gradient_itemsize(*, ranks: int, micro_batches: int, reduced_in_16_bits: bool, computed_in_16_bits: bool) -> int:
    """Return the bytes per element of a waiting gradient: 2 if that is exact, else 4.

    Args:
        ranks: number of ranks that gradients are reduced over.
        micro_batches: number whose gradients are summed, in fp32.
        reduced_in_16_bits: the reduction gives bf16.
        computed_in_16_bits: the backward gives bf16 or fp16, which a reduction over one rank leaves unchanged.
    """
    exact = reduced_in_16_bits or (computed_in_16_bits and ranks == 1)
    return NARROW_GRADIENT_BYTES if exact and micro_batches == 1 else GRADIENT_BYTES


def groups_that_spill(gradient_bytes: Sequence[int], host_bytes_max: int | None) -> list[int]:
    """Return the groups whose gradients wait on NVMe, so that all others take at most `host_bytes_max` (None: any).

    `gradient_bytes`: of each group, in the order of the forward. See [Note: Gradients that spill].
    """
    if host_bytes_max is None:
        return []
    last = len(gradient_bytes) - 1
    held = {last - place for place in choose_evenly(gradient_bytes[::-1], host_bytes_max)}
    left = host_bytes_max - sum(gradient_bytes[group] for group in held)
    spilled = []
    for group in sorted({*range(len(gradient_bytes))} - held):
        if gradient_bytes[group] > left:
            spilled.append(group)
        else:
            left -= gradient_bytes[group]
    return spilled


def bytes_on_drive(saved_bytes: Sequence[int], buffer_bytes: int) -> list[int]:
    """Return the bytes of each tensor that a pass writes to the drive and reads again, in the order of saving."""
    moved = [nbytes if nbytes <= buffer_bytes // BUFFER_SHARES else 0 for nbytes in saved_bytes]
    left = buffer_bytes // IN_HAND_SHARES
    for place in reversed(range(len(moved))):
        if moved[place] > left:
            break
        left -= moved[place]
        moved[place] = 0
    return moved
