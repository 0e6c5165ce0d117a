"""A swap manager whose drives rest, so that counts of bytes begin and end at the same place of a step."""

from __future__ import annotations

import infinity


def come_to_rest(swap: infinity.SwapManager) -> None:
    """Nothing is being written or read, and all is read ahead that fits: how far that had come is the machine's mood."""
    swap.stager.settle_all()
    swap.stager.want()
    for chunk in swap.stager._leased:
        for transfer in chunk.transfers:
            transfer.wait()
