"""A master weight comes back from its copy and remainder, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.optim import join, split


def there_and_back(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Masters (fp32) of these bits (int32), and what comes back of them."""
    master = bits.view(torch.float32)
    copy = torch.empty(bits.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(bits.numel(), dtype=torch.int16)
    ties = split(master, copy, remainder)
    assert torch.equal(copy, master.to(torch.bfloat16)) or master.isnan().any()
    assert torch.equal(ties, ties.unique())
    return master, join(copy, remainder, ties)


def check(bits: torch.Tensor) -> None:
    master, back = there_and_back(bits)
    nan = master.isnan()
    assert torch.equal(back.isnan(), nan)
    assert torch.equal(back.view(torch.int32)[~nan], master.view(torch.int32)[~nan])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_any_bits_come_back(bits: list[int]) -> None:
    check(torch.tensor(bits, dtype=torch.int32))


def test_every_upper_half_comes_back_around_its_tie() -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(upper | low)


def test_only_ties_that_were_rounded_up_are_listed() -> None:
    upper = torch.arange(0x3F80, 0x3F90, dtype=torch.int32)  # 1.0 and its neighbours
    master = ((upper << 16) | 0x8000).view(torch.float32)
    copy, remainder = torch.empty(16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.int16)
    assert split(master, copy, remainder).tolist() == list(range(1, 16, 2))
