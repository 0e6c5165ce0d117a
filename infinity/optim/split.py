"""Floor 6. An fp32 master weight as a bf16 copy and the 16 bits that its rounding left: 4 bytes instead of 6, exactly.

[Note: Copy and remainder]
The remainder is the lower half of the master's bits. The copy is the upper half, rounded to nearest even as torch converts; so
it was rounded up, by one in the last place, where the remainder is above 0x8000, and not where it is below. At 0x8000, a tie,
it was rounded to the even neighbour: an odd copy can't come from a tie, and an even one says nothing of where it came from.
Such masters, one in 131072 of those that training leaves, are told by a list of the ties that were rounded up; so every master
comes back bit for bit, infinities, denormals and what rounds up to infinity among them. A NaN stays a NaN.
"""

from __future__ import annotations

import torch

_TIE = 0x8000


def split(master: torch.Tensor, copy: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Set `copy` (bf16) and `remainder` (int16, its bits) from `master` (fp32); all 1-D and of one length.

    Returns the ties that were rounded up (int32 indices, ascending), which `join` needs. See [Note: Copy and remainder].
    """
    bits = master.view(torch.int32)
    copy.copy_(master)
    remainder.copy_(bits)  # keeps the lower half
    tied = (remainder == _TIE - 0x10000).nonzero().squeeze(1)
    rounded_up = copy.view(torch.int16)[tied] != (bits[tied] >> 16).to(torch.int16)
    return tied[rounded_up].to(torch.int32)


def join(copy: torch.Tensor, remainder: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """The master (fp32, 1-D) of which `split` made `copy` (bf16) and `remainder` (int16), and returned `ties`."""
    low = remainder.to(torch.int32) & 0xFFFF
    rounded_up = low > _TIE
    rounded_up[ties] = True
    bits = (copy.view(torch.int16).to(torch.int32) - rounded_up.to(torch.int32)) << 16
    return (bits | low).view(torch.float32)
