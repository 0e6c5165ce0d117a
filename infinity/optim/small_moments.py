"""16-bit moments: their rounding, in plain PyTorch. The kernel gives the same, bit for bit.

[Note: Rounded by chance] in csrc/optim/kernels.inc has the reason: bfloat16 has steps of a hundredth, and a second
moment changes by a thousandth. A moment is rounded up with a probability equal to its position between its two
neighbours. The random bits depend only on the parameter's name, the step and the element's index.
"""

from __future__ import annotations

import hashlib

import torch

_64_BITS = (1 << 64) - 1
_32_BITS = (1 << 32) - 1
_16_BITS = (1 << 16) - 1


def key_of(name: str) -> int:
    """Return the key (64 bits) of a parameter's random numbers."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def random_words(key: int, step: int, place: int, numel: int) -> torch.Tensor:
    """Return the 32 random bits (int64, 1-D) of elements [place, place + numel) of a parameter, in this step.

    csrc/optim has the sources of the two hashes: kernels.inc of the hash of a word, adam.cpp of that of a seed.
    """
    numbers = torch.arange(place, place + numel)
    of_step = _mixed(key ^ _mixed(step))
    seeds = {high: _mixed(of_step ^ high) & _32_BITS for high in range(place >> 32, ((place + numel - 1) >> 32) + 1)}
    words = torch.empty_like(numbers)
    for high, seed in seeds.items():
        of_seed = (numbers >> 32) == high
        words[of_seed] = (numbers[of_seed] & _32_BITS) ^ seed
    words ^= words >> 16
    words = (words * 0x7FEB352D) & _32_BITS
    words ^= words >> 15
    words = (words * 0x846CA68B) & _32_BITS
    return words ^ (words >> 16)


def rounded_by_chance(moment: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return `moment` (fp32) in bf16, rounded up if its lower 16 bits and those of `random` (int64, below 2**16) carry.

    A NaN stays a NaN; a value too large for bf16 may become infinite.
    """
    bits = moment.view(torch.int32).to(torch.int64) + random
    rounded = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(moment.isnan(), torch.full_like(rounded, torch.nan), rounded)


def round_moments(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, *, key: int, step: int, place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments (fp32, 1-D) of elements from index `place` on, rounded to bf16 as this step keeps them."""
    words = random_words(key, step, place, exp_avg.numel())
    return rounded_by_chance(exp_avg, words & _16_BITS), rounded_by_chance(exp_avg_sq, words >> 16)


def _mixed(bits: int) -> int:
    bits = (bits + 0x9E3779B97F4A7C15) & _64_BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return bits ^ (bits >> 31)
