"""What a pass makes for later and memory doesn't hold until then: which gradients and saved activations wait on NVMe.

[Note: Gradients that spill]
A gradient waits from the backward that brings it to the update that takes it. A group whose gradient spills is updated in its
next forward, the others perhaps in the backward. So an even share of the groups spills, and each pass has as much to move
between any two groups. If one end of the model spilled, the drive would idle in most of a pass, and compute wait for it in the
rest. Each element moves its bytes once each way; with n micro-batches, whose sum it holds, n times. Where updates are in the
backward and not speculative, gradients don't spill: with a bound none waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule.residency import choose_evenly

GRADIENT_BYTES = 4
"""One element of a reduced gradient (fp32)."""

NARROW_GRADIENT_BYTES = 2
"""The same where it fits in 16 bits: see [Note: Gradients in 16 bits] in infinity/swap/waiting_gradients.py."""

BUFFER_SHARES = 4
"""Saved activations pass through a buffer. A tensor larger than this part of it stays where it is: one part is filled while
others are written or read."""

IN_HAND_SHARES = 2
"""The tensors saved last stay in this part of the buffer: they are needed first, and need no drive."""

BUFFER_BYTES_DEFAULT = 256 << 20


def gradient_itemsize(*, ranks: int, micro_batches: int, reduced_in_16_bits: bool, computed_in_16_bits: bool) -> int:
    """Bytes of an element of a gradient as it waits: 2 where that is exact.

    Args:
        ranks: over which gradients are reduced.
        micro_batches: whose gradients are summed, in fp32.
        reduced_in_16_bits: whether the reduction gives bf16.
        computed_in_16_bits: whether the backward gives bf16 or fp16, which a reduction over one rank leaves as they are.
    """
    exact = reduced_in_16_bits or (computed_in_16_bits and ranks == 1)
    return NARROW_GRADIENT_BYTES if exact and micro_batches == 1 else GRADIENT_BYTES


def groups_that_spill(gradient_bytes: Sequence[int], host_bytes_max: int | None) -> list[int]:
    """The groups whose gradients wait on NVMe, so that the others take at most `host_bytes_max` (None: any amount).

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
    """For tensors of `saved_bytes`, saved in this order: the bytes of each that a pass writes to the drive and reads again."""
    moved = [nbytes if nbytes <= buffer_bytes // BUFFER_SHARES else 0 for nbytes in saved_bytes]
    left = buffer_bytes // IN_HAND_SHARES
    for place in reversed(range(len(moved))):
        if moved[place] > left:
            break
        left -= moved[place]
        moved[place] = 0
    return moved
