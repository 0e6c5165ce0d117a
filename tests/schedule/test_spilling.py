"""What waits on NVMe: an even share of the groups' gradients, beyond a budget, and in 16 bits only where these hold them; the
first saved activations, all that the buffer can't keep in hand, each once each way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.spilling import (
    BUFFER_SHARES,
    IN_HAND_SHARES,
    bytes_on_drive,
    gradient_itemsize,
    groups_that_spill,
)


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(0, 600))
def test_what_stays_fits_and_nothing_spills_that_would_have_fitted(sizes: list[int], host_bytes_max: int) -> None:
    spilled = groups_that_spill(sizes, host_bytes_max)
    kept = sum(nbytes for group, nbytes in enumerate(sizes) if group not in spilled)
    assert kept <= host_bytes_max
    assert all(kept + sizes[group] > host_bytes_max for group in spilled)


def test_an_even_share_of_the_groups_spills() -> None:
    """Between any two groups a pass has as much to move."""
    assert groups_that_spill([10] * 12, 90) == [3, 7, 11]
    assert groups_that_spill([10, 10, 10, 10], 25) == [1, 3]
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


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(0, 200))
def test_the_last_ones_stay_in_hand_and_as_many_as_fit(sizes: list[int], buffer_bytes: int) -> None:
    moved = bytes_on_drive(sizes, buffer_bytes)
    stay = [nbytes > buffer_bytes // BUFFER_SHARES for nbytes in sizes]  # on the device: too large to pass
    assert all(there in (0, nbytes) for there, nbytes in zip(moved, sizes, strict=True))
    assert not any(there for there, too_large in zip(moved, stay, strict=True) if too_large)
    first_in_hand = max((place + 1 for place, there in enumerate(moved) if there), default=0)
    in_hand = [n for n, too_large in zip(sizes[first_in_hand:], stay[first_in_hand:], strict=True) if not too_large]
    assert sum(in_hand) <= buffer_bytes // IN_HAND_SHARES
    assert all(there or too_large for there, too_large in zip(moved[:first_in_hand], stay[:first_in_hand], strict=True))
    if first_in_hand:
        assert sum(in_hand) + sizes[first_in_hand - 1] > buffer_bytes // IN_HAND_SHARES


def test_the_first_saved_activations_go_to_the_drive() -> None:
    assert bytes_on_drive([10] * 8, 80) == [10, 10, 10, 10, 0, 0, 0, 0]
    assert bytes_on_drive([10, 21, 10, 10], 40) == [10, 0, 0, 0], "21 is more than a quarter, and stays where it is"
    assert bytes_on_drive([10] * 8, 39) == [0] * 8
