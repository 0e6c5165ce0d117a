"""What placement promises: bytes in proportion to bandwidth, so that no drive waits long for another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.store.arena import SLOTS_MAX, file_bytes, pieces_on_drives, step_bandwidth, stripe_pattern

RATES = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=8)


def seconds(pattern: tuple[int, ...], rates: list[float]) -> float:
    """Of a transfer of one unit laid out by `pattern`."""
    return max(pattern.count(i) / rate for i, rate in enumerate(rates)) / len(pattern)


def test_equal_drives_take_turns() -> None:
    assert stripe_pattern([1.0]) == (0,)
    assert sorted(stripe_pattern([3.0, 3.0])) == [0, 1]
    assert sorted(stripe_pattern([2.5] * 4)) == [0, 1, 2, 3]


def test_a_drive_of_thrice_the_bandwidth_takes_three_of_four() -> None:
    pattern = stripe_pattern([3.0, 1.0])
    assert sorted(pattern) == [0, 0, 0, 1]


def test_a_hopeless_drive_takes_nothing() -> None:
    assert set(stripe_pattern([10.0, 0.01])) == {0}


@given(RATES)
def test_time_is_near_what_the_bandwidths_allow(rates: list[float]) -> None:
    pattern = stripe_pattern(rates)
    assert 1 <= len(pattern) <= SLOTS_MAX
    assert set(pattern) <= set(range(len(rates)))
    ideal = 1 / sum(rates)
    assert ideal * (1 - 1e-9) <= seconds(pattern, rates) <= ideal * (1 + len(rates) / SLOTS_MAX * 2)
    assert seconds(pattern, rates) <= 1 / max(rates) * (1 + 1e-9), "slower than the best drive alone"


@given(RATES, st.sampled_from([4096, 1 << 20]), st.integers(0, 1 << 30))
def test_files_hold_everything_once(rates: list[float], stripe_bytes: int, nbytes: int) -> None:
    pattern = stripe_pattern(rates)
    held = file_bytes(pattern, stripe_bytes, nbytes)
    assert nbytes <= sum(held) < nbytes + stripe_bytes
    assert all(part % stripe_bytes == 0 for part in held)


def test_bandwidth_of_a_step_is_that_of_its_bytes() -> None:
    assert step_bandwidth(2.0, 2.0) == pytest.approx(2.0)
    assert 26 / step_bandwidth(4.0, 1.0) == pytest.approx(14 / 4.0 + 12 / 1.0)


@given(
    pattern=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    stripe=st.integers(1, 5),
    offset=st.integers(0, 200),
    nbytes=st.integers(0, 200),
)
def test_pieces_on_drives_are_where_the_stripes_are(pattern: list[int], stripe: int, offset: int, nbytes: int) -> None:
    files: dict[int, list[int]] = {drive: [] for drive in pattern}
    for at in range(offset + nbytes):  # byte by byte, as stripes are dealt out
        files[pattern[at // stripe % len(pattern)]].append(at)
    found = []
    for drive, start, length in pieces_on_drives(pattern, stripe, offset, nbytes):
        found += files[drive][start : start + length]
    assert found == list(range(offset, offset + nbytes))
