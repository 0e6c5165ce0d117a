"""Which saved activations pass to the drive: all that the buffer can't keep in hand, the first ones, each once each way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.activations import BUFFER_SHARES, IN_HAND_SHARES, bytes_on_drive


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


def test_in_numbers() -> None:
    assert bytes_on_drive([10] * 8, 80) == [10, 10, 10, 10, 0, 0, 0, 0]
    assert bytes_on_drive([10, 21, 10, 10], 40) == [10, 0, 0, 0], "21 is more than a quarter, and stays where it is"
    assert bytes_on_drive([10] * 8, 39) == [0] * 8
