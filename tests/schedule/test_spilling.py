"""Which gradients wait where: within the budget, the last groups first, and in 16 bits only where these hold them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.gradients import gradient_itemsize, groups_that_spill


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(0, 600))
def test_what_stays_fits_and_nothing_spills_that_would_have_fitted(sizes: list[int], host_bytes_max: int) -> None:
    spilled = groups_that_spill(sizes, host_bytes_max)
    kept = sum(nbytes for group, nbytes in enumerate(sizes) if group not in spilled)
    assert kept <= host_bytes_max
    assert all(kept + sizes[group] > host_bytes_max for group in spilled)


def test_the_last_groups_spill() -> None:
    assert groups_that_spill([10, 10, 10, 10], 25) == [2, 3]
    assert groups_that_spill([10, 30, 10], 25) == [1]  # what comes after one that is too large may still fit
    assert groups_that_spill([10, 10], 0) == [0, 1]
    assert groups_that_spill([10, 10], None) == []


def test_sixteen_bits_are_kept_only_where_they_hold_all_of_a_gradient() -> None:
    exact = {"ranks": 1, "micro_batches": 1, "reduced_in_16_bits": False, "computed_in_16_bits": True}
    assert gradient_itemsize(**exact) == 2
    assert gradient_itemsize(**{**exact, "ranks": 2}) == 4  # a sum over ranks has more
    assert gradient_itemsize(**{**exact, "ranks": 2, "reduced_in_16_bits": True}) == 2
    assert gradient_itemsize(**{**exact, "micro_batches": 2}) == 4  # and so has one over micro-batches
    assert gradient_itemsize(**{**exact, "micro_batches": 2, "reduced_in_16_bits": True}) == 4
    assert gradient_itemsize(**{**exact, "computed_in_16_bits": False}) == 4
