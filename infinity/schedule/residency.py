"""Which bytes stay in host memory from step to step: the optimum over all ways of caching. Integers only.

[Note: What stays]
A step repeats. It reads the compute parameters in its passes (forward and backward of each micro-batch), and updates
each byte of state once, which reads and writes it: in an optimizer step of its own, or in one of the passes ([Note:
Schemes] in scheme.py). A compute parameter is part of that state, or is written by the update. Beyond the pipeline's
needs there are C bytes of host memory. They may hold different bytes at any time, and a part of an extent as well as
all of it. Bytes that were changed in memory must be written before they are dropped, unless overwritten before any
read.

The bytes that a step moves are minimised. The worth of a byte is how often it moves if it never stays: its reads and a
write for a compute parameter (no write if it is frozen), one read and one write for other state.

  The optimum keeps the same bytes all the time: those of the greatest worth, as many as C holds.

Proof. Look at the memory at u moments of each step, one before each pass that reads compute parameters (and before the
optimizer step, if it reads them). A byte of these is read at most once between two moments, so being present at k of
the u moments saves at most k reads. It saves the write only if k = u; otherwise it was dropped between two updates, or
between its update and its last read. In both cases that is at most k/u of its worth. Other state is used once a step:
it saves its worth if k = u, and nothing otherwise. So a step saves at most the sum of (k/u) · worth over all bytes,
where no k/u exceeds 1 and they sum up to at most C (all moments hold u · C bytes). The greatest such sum is that of the
fractional knapsack: C bytes of the greatest worth with k = u. Keeping just these at all times saves just that. (Compute
parameters that the update produces before the forward are dead when it begins: omit that moment. Those that one of the
passes doesn't read have fewer reads to save.) ∎

Farthest next use, which is optimal for any order of reads (Belady), gives the same result: the passes use more than C
bytes, so it keeps its bytes and lets all others pass. tests/schedule/test_residency.py searches all ways of caching
small steps of every scheme, including groups that stay gathered until backward, and finds none that moves less. (One
can exist only if compute parameters that omit one of the u moments and frozen ones that omit another share bytes.)

A byte read counts as much as a byte written, which makes the layout of a model independent of measurements. If one cost
more, only frozen compute parameters would move, before or after other state: a trained one is read at least as often as
other state, and written as often.

Whole units stay (a page of each field). The proof is for bytes, so the only loss is a remainder of C that holds no unit
of the next candidate.

[Note: Staying staged]
A cached byte has no place on NVMe. A byte that *stays* staged has one: it is always written there, and only its reads
are saved. This is compatible with everything that needs the bytes on the drive: second slots, commits, checkpoints. So
whole groups of compute parameters stay in the part of the pool that its pipeline doesn't need. (Other state is read
once a step, and would save half as much.) An update replaces the compute parameters in place, so no read is left. The
passes use more than the room holds, so the same groups stay all the time: those read most often, and of equals an even
share, so that the drive has as much to do in each part of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

UNITS_READ_AHEAD = 2
"""Units for which `choose_to_stay` leaves room: one is read while the previous one waits for its use."""


@dataclass(frozen=True)
class Candidate:
    """`units` pieces of `unit_bytes` with the same use: a step reads each `reads` times and writes it `writes` times if
    it doesn't stay in memory."""

    units: int
    unit_bytes: int
    reads: int
    writes: int


def choose_resident(candidates: Sequence[Candidate], cache_bytes: int) -> list[int]:
    """Return how many units of each candidate stay in `cache_bytes` so that a step moves least: [Note: What stays].

    Of candidates with the same worth and reads, the first stay first. Of those read once, an even share of each stays,
    so that the drive has as much to do in each part of a step. No other choice that moves as few bytes reads fewer.
    """

    def rank(index: int) -> tuple[int, int]:
        candidate = candidates[index]
        return -(candidate.reads + candidate.writes), -candidate.reads

    chosen = [0] * len(candidates)
    left = cache_bytes
    moving = [index for index, candidate in enumerate(candidates) if candidate.reads or candidate.writes]
    for _, equals in groupby(sorted(moving, key=rank), rank):
        indices = list(equals)
        total_bytes = sum(candidates[index].units * candidates[index].unit_bytes for index in indices)
        if candidates[indices[0]].reads == 1 and total_bytes > left:
            for index in indices:
                chosen[index] = candidates[index].units * left // total_bytes
            left -= sum(chosen[index] * candidates[index].unit_bytes for index in indices)
        for index in indices:
            candidate = candidates[index]
            more = min(candidate.units - chosen[index], left // candidate.unit_bytes)
            chosen[index] += more
            left -= more * candidate.unit_bytes
    return chosen


def moved_bytes(candidates: Sequence[Candidate], resident: Sequence[int]) -> tuple[int, int]:
    """Return the bytes (read, written) of a step if `resident` units of each candidate stay in memory."""
    read = written = 0
    for candidate, staying in zip(candidates, resident, strict=True):
        moving_bytes = (candidate.units - staying) * candidate.unit_bytes
        read += moving_bytes * candidate.reads
        written += moving_bytes * candidate.writes
    return read, written


def choose_evenly(unit_bytes: Sequence[int], bytes_max: int) -> list[int]:
    """Return the places of units that stay in at most `bytes_max`, spread evenly so that the drive has no pause.

    For uses that repeat in the same order. There, the unit used just now has the farthest next use, and holding the
    next ones saves no read. A fixed part saves its bytes in every round, and nothing saves more ([Note: What stays],
    with one moment per round).
    """
    whole_bytes = sum(unit_bytes)
    stay, stay_bytes, passed_bytes = [], 0, 0
    for place, nbytes in enumerate(unit_bytes):
        passed_bytes += nbytes
        if (stay_bytes + nbytes) * whole_bytes <= min(bytes_max, whole_bytes) * passed_bytes:
            stay.append(place)
            stay_bytes += nbytes
    return stay


def choose_staying(unit_bytes: Sequence[int], spared_reads: Sequence[int], bytes_max: int) -> list[int]:
    """Return the places of units that stay staged in at most `bytes_max`, ascending: see [Note: Staying staged].

    `spared_reads`: by unit, the reads per step that staying saves; a unit with 0 doesn't stay.
    """
    staying: list[int] = []
    left = bytes_max
    for reads in sorted({*spared_reads} - {0}, reverse=True):
        places = [place for place, spared in enumerate(spared_reads) if spared == reads and unit_bytes[place]]
        chosen = [places[at] for at in choose_evenly([unit_bytes[place] for place in places], left)]
        left -= sum(unit_bytes[place] for place in chosen)
        staying += chosen
    return sorted(staying)


def choose_to_stay(unit_bytes: Sequence[int], room_bytes: int) -> list[int]:
    """Return the places of units that stay in `room_bytes` while the others are read ahead in it: all if all fit, else
    the choice of `choose_evenly` that leaves room for two more of the largest."""
    if not unit_bytes or sum(unit_bytes) <= room_bytes:
        return [*range(len(unit_bytes))]
    return choose_evenly(unit_bytes, max(0, room_bytes - UNITS_READ_AHEAD * max(unit_bytes)))
