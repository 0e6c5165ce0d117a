"""Floor 6. Activations that are saved for the backward and wait on NVMe: how many bytes pass through the buffer.

Numbers only; activations/stores.py moves them.
"""

from __future__ import annotations

from collections.abc import Sequence

BUFFER_SHARES = 4
"""A tensor larger than this part of the buffer stays where it is: one part is filled while others are written or read."""

IN_HAND_SHARES = 2
"""The tensors saved last stay in this part of the buffer: they are needed first, and need no drive."""

BUFFER_BYTES_DEFAULT = 256 << 20


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
