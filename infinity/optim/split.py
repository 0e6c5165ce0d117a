"""Floor 6. An fp32 master as its bf16 compute parameter and the remainder of the rounding: 4 bytes instead of 6, exactly.

[Note: Split masters]
The compute parameter is the master's upper 16 bits, rounded to nearest even as torch converts. The remainder is the lower 16
bits. A remainder above 0x8000 says that the compute parameter was rounded up by one in the last place; below, it was not. At
0x8000, a tie, it was rounded to the even neighbour. Then an odd compute parameter was not rounded up, and an even one may have
been. So a list names the ties that were rounded up: one in 131072 of the masters that training leaves is a tie. Every master
comes back bit for bit, infinities, denormals and what rounds up to infinity included. A NaN stays a NaN.
"""

from __future__ import annotations

import torch

_TIE = 0x8000


def split(master: torch.Tensor, compute_param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Set `compute_param` (bf16) and `remainder` (int16, its bits) from `master` (fp32); all 1-D and of one length.

    Returns the ties that were rounded up (int32 indices, ascending), which `join` needs. See [Note: Split masters].
    """
    bits = master.view(torch.int32)
    compute_param.copy_(master)
    remainder.copy_(bits)  # keeps the lower 16 bits
    tied = (remainder == _TIE - 0x10000).nonzero().squeeze(1)
    rounded_up = compute_param.view(torch.int16)[tied] != (bits[tied] >> 16).to(torch.int16)
    return tied[rounded_up].to(torch.int32)


def join(compute_param: torch.Tensor, remainder: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """The master (fp32, 1-D) of which `split` made `compute_param` (bf16) and `remainder` (int16), and returned `ties`."""
    low = remainder.to(torch.int32) & 0xFFFF
    rounded_up = low > _TIE
    rounded_up[ties] = True
    bits = (compute_param.view(torch.int16).to(torch.int32) - rounded_up.to(torch.int32)) << 16
    return (bits | low).view(torch.float32)
