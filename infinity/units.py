"""Parses and formats bytes, counts and seconds: "512MiB" is 536870912."""

from __future__ import annotations

import math
import re
from decimal import Decimal

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

DAY_SECONDS = 86_400

PAGE_BYTES = 4 * KIB
"""Alignment of every extent, lease and direct transfer (bytes). Some drives refuse 512 B; 4 KiB works everywhere."""

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FACTORS = {"": 1, "b": 1, **_DECIMAL, **{f"{unit}b": factor for unit, factor in _DECIMAL.items()}}
_FACTORS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def align_up(value: int, alignment: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def parse_bytes(text: str | int | float) -> int:
    """Return the bytes in `text`: an integer, or a number with a unit such as "512MiB", "2 GiB" or "1.5GB".

    Raises ValueError for any other text.
    """
    return _parse(text, _FACTORS, "a number of bytes such as 536870912, '512MiB' or '2GiB'")


def parse_count(text: str | int | float) -> int:
    """Return a count such as "40M" or "1B" (powers of ten). Raises ValueError for any other text."""
    return _parse(text, _COUNTS, "a count such as 40000000, '40M' or '1B'")


def format_bytes(nbytes: float) -> str:
    """Format `nbytes` in the largest binary unit with a number of at least 1: "1.50 GiB"."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{int(nbytes)} B"


def format_count(count: float) -> str:
    """Format `count` in thousands, millions, billions or trillions: "40.1M"."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f}{unit}"
    return f"{int(count)}"


def format_seconds(seconds: float, *, digits: int = 3) -> str:
    """Format `seconds` with so many significant digits; from 100 of a unit on, in the next: "53.3 s", "39.2 days"."""
    units = [("min", 60, 100), ("hours", 3600, 6000), ("days", DAY_SECONDS, 2 * DAY_SECONDS)]
    units += [("years", 365 * DAY_SECONDS, 2 * 365 * DAY_SECONDS)]
    unit, factor = "s", 1
    for name, unit_seconds, at_least in units:
        if seconds >= at_least:
            unit, factor = name, unit_seconds
    value = seconds / factor
    decimals = digits - 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, decimals)}f} {unit}"


def _parse(text: str | int | float, factors: dict[str, int], wanted: str) -> int:
    refusal = ValueError(f"expected {wanted}, got {text!r}")
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise refusal
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match.group(2).lower() not in factors:
        raise refusal
    number = Decimal(match.group(1))
    if number.adjusted() > 30:
        raise refusal
    value = number * factors[match.group(2).lower()]
    if value != int(value) and not match.group(2):
        raise refusal
    return int(value)
