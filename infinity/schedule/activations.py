"""Floor 6. Activations that are saved for the backward and wait on NVMe: which pass through the buffer, and what they move.

Numbers only; swap/stores.py does it.
"""

from __future__ import annotations

from collections.abc import Sequence

BUFFER_SHARES = 4
"""A tensor larger than this part of the buffer is not put away: one is filled while others are written or read."""

IN_HAND_SHARES = 2
"""What was saved last stays in this part of the buffer: it is asked for first, and needs no drive."""

BUFFER_BYTES_DEFAULT = 256 << 20


def bytes_on_drive(saved_bytes: Sequence[int], buffer_bytes: int) -> list[int]:
    """Of tensors saved in this order, the bytes of each that a pass writes to the drive and reads again."""
    moved = [nbytes if nbytes <= buffer_bytes // BUFFER_SHARES else 0 for nbytes in saved_bytes]
    left = buffer_bytes // IN_HAND_SHARES
    for place in reversed(range(len(moved))):
        if moved[place] > left:
            break
        left -= moved[place]
        moved[place] = 0
    return moved
