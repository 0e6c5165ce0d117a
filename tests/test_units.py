"""What units promises: words to bytes and back, the same number whichever way it is written, ValueError on all else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.units import (
    GIB,
    KIB,
    MIB,
    PAGE_BYTES,
    align_up,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
)


@given(value=st.integers(0, 1 << 60), alignment=st.integers(1, 1 << 30))
def test_align_up_is_the_smallest_multiple_not_below(value: int, alignment: int) -> None:
    aligned = align_up(value, alignment)
    assert aligned % alignment == 0
    assert value <= aligned < value + alignment


def test_align_up_is_to_pages_unless_told_otherwise() -> None:
    assert [align_up(n) for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [0, 4096, 4096, 8192]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (536870912, 536870912),
        (2.0, 2),
        ("536870912", 536870912),
        ("0", 0),
        ("7B", 7),
        ("512MiB", 512 * MIB),
        ("2 GiB", 2 * GIB),
        ("  4kib ", 4 * KIB),
        ("1.5GiB", 3 * GIB // 2),
        ("1.5GB", 1_500_000_000),
        ("3M", 3_000_000),
        ("1e9", 1_000_000_000),
        ("2.5e-1 GiB", GIB // 4),
        ("1TiB", 1 << 40),
        ("1tb", 10**12),
    ],
)
def test_bytes_are_read(text: str | int | float, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "count"), [("40M", 40_000_000), ("1B", 10**9), ("1.5k", 1500), (7, 7), ("2 t", 2 * 10**12)]
)
def test_counts_are_read_in_powers_of_ten(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("parse", [parse_bytes, parse_count])
@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 2", "1.2.3", "0x10", "1 GIBB", "auto", "1_000", True, False, 0.5])
def test_anything_else_is_refused_and_shown(parse: object, text: str | float) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match="expected a"):
        parse(text)


@pytest.mark.parametrize("text", [float("nan"), float("inf"), -float("inf"), "1e999"])
def test_what_is_no_finite_number_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


@given(st.integers(0, 1 << 60))
def test_bytes_survive_words(nbytes: int) -> None:
    """Two decimals of a number of at least 1: half a hundredth is lost, at most."""
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= nbytes * 0.005


@given(st.integers(0, 10**15))
def test_counts_survive_words(count: int) -> None:
    assert abs(parse_count(format_count(count)) - count) <= count * 0.05


@given(
    number=st.integers(0, 1 << 20),
    unit=st.sampled_from(["KiB", "MiB", "GiB", "kb", "MB", "g"]),
    space=st.sampled_from(["", " "]),
)
def test_units_are_read_in_any_case(number: int, unit: str, space: str) -> None:
    text = f"{number}{space}{unit}"
    assert (
        parse_bytes(text) == parse_bytes(text.upper()) == parse_bytes(text.lower()) == number * parse_bytes(f"1{unit}")
    )


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (KIB, "1.00 KiB"), (1536 * MIB, "1.50 GiB"), (-2 * MIB, "-2.00 MiB")],
)
def test_bytes_are_told_in_the_largest_unit_that_fits(nbytes: int, words: str) -> None:
    assert format_bytes(nbytes) == words


def test_counts_are_told_in_thousands_millions_billions() -> None:
    assert [format_count(n) for n in (999, 1000, 40_100_000, 7 * 10**10, 10**12)] == [
        "999",
        "1.0k",
        "40.1M",
        "70.0B",
        "1.0T",
    ]


@pytest.mark.parametrize(
    ("seconds", "three", "two"),
    [
        (0, "0 s", "0 s"),
        (0.0161, "0.0161 s", "0.016 s"),
        (6.0, "6.00 s", "6.0 s"),
        (99.9, "99.9 s", "100 s"),
        (100, "1.67 min", "1.7 min"),
        (14 * 60, "14.0 min", "14 min"),
        (6000, "1.67 hours", "1.7 hours"),
        (48 * 3600, "2.00 days", "2.0 days"),
        (0.048 * 365 * 86_400, "17.5 days", "18 days"),
        (1234 * 365 * 86_400, "1234 years", "1234 years"),
    ],
)
def test_seconds_beyond_a_hundred_are_minutes_hours_days(seconds: float, three: str, two: str) -> None:
    assert (format_seconds(seconds), format_seconds(seconds, digits=2)) == (three, two)
