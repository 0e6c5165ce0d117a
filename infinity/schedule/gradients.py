"""Floor 6. Where reduced gradients wait for their update: in host memory, or on NVMe with so many bytes moved.

[Note: Gradients that spill]
A gradient waits from the backward that brings it to the update that takes it. Where updates are in the forward, the gradients
that come first wait longest: those of the last groups, which the forward reaches last. So the last groups' gradients spill,
which leaves most time to write them and to read them again. Each element moves its bytes once each way; with n micro-batches,
whose sum it holds, n times. Where updates are in the backward, gradients don't wait.
"""

from __future__ import annotations

from collections.abc import Sequence

GRADIENT_BYTES = 4
"""One element of a reduced gradient (fp32)."""

NARROW_GRADIENT_BYTES = 2
"""The same where it fits in 16 bits: see [Note: Gradients in 16 bits] in infinity/swap/waiting_gradients.py."""


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
    spilled, left = [], host_bytes_max
    for group, nbytes in enumerate(gradient_bytes):
        if nbytes > left:
            spilled.append(group)
        else:
            left -= nbytes
    return spilled
