"""Placement: which drive each stripe of an arena lies on. Pure arithmetic on bandwidths and counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

READ_BYTES_PER_PARAMETER = 14
WRITTEN_BYTES_PER_PARAMETER = 12
"""Bytes that a step moves with nothing cached (docs/architecture.md, "The sum"): the mix by which drives are compared."""

SLOTS_MAX = 64
"""Stripes in the longest pattern: with more, short transfers would miss drives altogether."""

_GOOD_ENOUGH = 1.01


def step_bandwidth(read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Bytes per second of a drive over the reads and writes of a step: their harmonic mean by bytes."""
    total = READ_BYTES_PER_PARAMETER + WRITTEN_BYTES_PER_PARAMETER
    return total / (READ_BYTES_PER_PARAMETER / read_bytes_per_s + WRITTEN_BYTES_PER_PARAMETER / write_bytes_per_s)


def stripe_pattern(bandwidths: Sequence[float]) -> tuple[int, ...]:
    """The drive of each stripe of a repeating pattern, so that all drives end a long transfer together.

    Takes the shortest pattern whose time is within 1 % of what the bandwidths (any one unit, all positive) allow, or the
    best of at most SLOTS_MAX stripes. A drive so slow that it would hold the others up with a single stripe has none.
    """
    assert bandwidths and min(bandwidths) > 0, "bandwidths must be positive"
    ideal = 1 / sum(bandwidths)  # seconds per unit with every drive busy to the end
    best: tuple[int, ...] = ()
    best_seconds = float("inf")
    for slots in range(1, SLOTS_MAX + 1):
        pattern = _fill(bandwidths, slots)
        seconds = max(pattern.count(drive) / rate for drive, rate in enumerate(bandwidths)) / slots
        if seconds < best_seconds * (1 - 1e-9):
            best, best_seconds = pattern, seconds
        if best_seconds <= ideal * _GOOD_ENOUGH:
            break
    return best


def _fill(bandwidths: Sequence[float], slots: int) -> tuple[int, ...]:
    """Give each slot to the drive that would finish it first, which also spreads the stripes of one drive."""
    counts = [0] * len(bandwidths)
    pattern = []
    for _ in range(slots):
        drive = min(range(len(bandwidths)), key=lambda i: (counts[i] + 1) / bandwidths[i])
        counts[drive] += 1
        pattern.append(drive)
    return tuple(pattern)


def file_bytes(pattern: Sequence[int], stripe_bytes: int, nbytes: int) -> list[int]:
    """Bytes, in whole stripes, that each drive of the pattern holds of the first `nbytes` bytes."""
    stripes = -(-nbytes // stripe_bytes)
    cycles, partial = divmod(stripes, len(pattern))
    drives = range(max(pattern) + 1)
    return [(cycles * pattern.count(i) + pattern[:partial].count(i)) * stripe_bytes for i in drives]


def pieces_on_drives(
    pattern: Sequence[int], stripe_bytes: int, offset: int, nbytes: int
) -> Iterator[tuple[int, int, int]]:
    """(drive, offset in its file, bytes) of the pieces that make up logical bytes [offset, offset + nbytes), in order."""
    end = offset + nbytes
    while offset < end:
        stripe, inside = divmod(offset, stripe_bytes)
        cycle, slot = divmod(stripe, len(pattern))
        drive = pattern[slot]
        before = cycle * pattern.count(drive) + pattern[:slot].count(drive)
        length = min(stripe_bytes - inside, end - offset)
        yield drive, before * stripe_bytes + inside, length
        offset += length
