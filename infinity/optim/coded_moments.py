"""8-bit moments: their codes and scales, in plain PyTorch. The kernel gives the same, bit for bit.

[Note: Codes of eight bits] in csrc/optim/codes.inc describes the format and its source: a code (uint8) per element, and
a scale (fp32) per block of `BLOCK_NUMEL` elements from the start of a shard. Codes of the first moment have a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from infinity.store.layout import BLOCK_NUMEL

_DECADES = 8
_LEAST_NORMAL = torch.finfo(torch.float32).tiny
_ZERO_OF_SIGNED = 127


@dataclass(frozen=True)
class _Codes:
    """A code table.

    values: of all 256 codes. thresholds: first value of decades 1 to 8. steps, shift, limit: by decade (0 to 8); the
    nearest code's number is the integer part of value * steps + shift, at most limit. limit is int64, steps and shift
    are fp64 (exact for products of two fp32 numbers), the others fp32.
    """

    values: torch.Tensor
    thresholds: torch.Tensor
    steps: torch.Tensor
    shift: torch.Tensor
    limit: torch.Tensor


def blocks_of(numel: int) -> int:
    """Return the number of blocks of `numel` elements."""
    return -(-numel // BLOCK_NUMEL)


def code_values(*, signed: bool) -> torch.Tensor:
    """Return the values (fp32, 256, ascending) of the codes of a first moment (`signed`) or of a second."""
    return _codes(signed).values.clone()


def decode(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the moments (fp32) for codes (uint8, 1-D, starting at a block) and the scales (fp32) of their blocks."""
    values = _codes(signed).values[codes.long()]
    scale = scales.repeat_interleave(BLOCK_NUMEL)[: codes.numel()]
    return torch.where(scale == 0, 0.0, values * scale)


def encode(moments: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes (uint8, 1-D, one per element) and scales (fp32, one per block) of moments (fp32, 1-D).

    The first moment starts a block. A block with a non-finite moment decodes as NaN; without a normal number, as zero.
    """
    code = _codes(signed)
    blocks = torch.nn.functional.pad(moments.float(), (0, -moments.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    magnitudes = blocks.abs()
    largest = magnitudes.amax(1, keepdim=True)
    finite = largest.isfinite()
    coded = finite & (largest >= _LEAST_NORMAL)
    scales = torch.where(coded, largest, torch.where(finite, 0.0, torch.nan))
    if signed:
        scales = torch.where(coded & ~(blocks == largest).any(1, keepdim=True), -scales, scales)
    relative = torch.where(coded, magnitudes, 0.0) * torch.where(coded, 1 / largest, 0.0)
    decade = torch.bucketize(relative, code.thresholds, right=True)
    number = (relative.double() * code.steps[decade] + code.shift[decade]).float().long()
    number = torch.minimum(number, code.limit[decade])
    if signed:
        negative = (blocks < 0) != (scales < 0)
        number = _ZERO_OF_SIGNED + torch.where(negative, -number, number).clamp(min=-_ZERO_OF_SIGNED)
    else:
        number = torch.maximum(number - 1, (coded & (magnitudes >= _LEAST_NORMAL)).long())
    return number.to(torch.uint8).view(-1)[: moments.numel()], scales.view(-1)


@cache
def _codes(signed: bool) -> _Codes:
    numbers = [1 << (i - 1 if signed else i) for i in range(_DECADES + 1) if i or not signed]
    counts = [0, *numbers] if signed else numbers
    tens = [10.0 ** (i - 7) for i in range(_DECADES)]
    # A decade has counts[i] values; the value of x in [counts[i], 2 * counts[i]) is x * slope + offset. The last has
    # the 1.
    slope = _fp32([0, *(0.9 * tens[i] / counts[i] for i in range(1, _DECADES)), 0])
    offset = _fp32([0, *(-0.8 * ten for ten in tens[1:]), 1])
    steps = _fp32([0, *(counts[i] / (0.9 * tens[i]) for i in range(1, _DECADES)), 0])
    shift = _fp32([0 if signed else 1, *(counts[i] * (0.8 / 0.9) for i in range(1, _DECADES)), counts[-1]])
    limit = [0 if signed else 1, *(2 * counts[i] - 1 for i in range(1, _DECADES)), counts[-1]]

    def values_at(x: torch.Tensor) -> torch.Tensor:
        decade = torch.bucketize(x, torch.tensor(counts[1:], dtype=torch.float64), right=True)
        return (x * slope[decade] + offset[decade]).float()

    counts_from = torch.tensor(counts[1:], dtype=torch.float64)
    firsts = values_at(counts_from + 0.5).double()
    lasts = torch.cat([torch.zeros(1), values_at(2 * counts_from[:-1] - 0.5)]).double()
    if signed:
        positive = values_at(torch.arange(129, dtype=torch.float64) + 0.5)
        values = torch.cat([-positive[1:128].flip(0), positive])
    else:
        values = values_at(torch.arange(256, dtype=torch.float64) + 1.5)
    return _Codes(values, ((lasts + firsts) / 2).float(), steps, shift, torch.tensor(limit))


def _fp32(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).double()
