"""Which bytes stay in host memory from step to step: the optimum over all ways of caching. Integers only.

[Note: What stays]
A step repeats. It reads the compute parameters in its passes (forward and backward of each micro-batch), and it updates each
byte of state once, which reads and writes it: in an optimizer step of its own, or in one of the passes ([Note: Schemes] in
scheme.py). A compute parameter is a part of that state, or it is written anew. Beyond what the pipeline needs there are C bytes
of host memory. They may hold other bytes at every moment, and a part of an extent as well as all of it. Bytes that were changed
in memory must be written before they are forgotten, unless they are overwritten before anybody reads them.

Minimised are the bytes that a step moves. The worth of a byte is how often it moves when it never stays: its reads and a write
for a compute parameter (no write where it is frozen), one read and one write for other state.

  The optimum keeps the same bytes all the time: those of the greatest worth, as many as C holds.

Proof. Look into the memory at u moments of each step, one before each pass that reads compute parameters (the optimizer step
too, where it does). A byte of these is read at most once between two moments, so being there at k of the u moments spares it at
most k reads; and the write only if k = u, for otherwise it was forgotten between two updates, or between its update and its
last reading. In both cases that is at most k/u of its worth. Other state is used once a step: it is spared its worth if k = u,
and nothing otherwise. So a step is spared at most the sum of (k/u) · worth over all bytes, where no k/u is above 1 and they sum
up to C at most (all moments hold u · C bytes). The greatest such sum is that of the fractional knapsack: C bytes of the
greatest worth with k = u. Keeping just these at all times spares just that. (Compute parameters that the update makes before
the forward are dead when it begins: leave out that moment. Those that one of the passes doesn't read have the fewer reads to be
spared.) ∎

Farthest next use, which is optimal for any order of reads (Belady), comes to the same: the passes go over more than C bytes, so
it keeps what it has and lets all else pass by. tests/schedule/test_residency.py searches all ways of caching small steps of
every scheme, groups that stay gathered until backward among them, and finds none that moves less. (There can be one only where
compute parameters that leave out one of the u moments meet frozen ones that leave out another: both in the same bytes by
turns.)

A byte read counts as much as a byte written, which makes the layout of a model independent of measurements. If one cost more,
only the place of frozen compute parameters would change, to before other state or behind it: a trained one is read at least as
often as that, and written as often.

Whole units stay (a page of each field). The proof is for bytes; so all that is lost is a remainder of C that holds no unit of
the next candidate.

[Note: Staying staged]
A cached byte has no place on NVMe. A byte that *stays* staged has one: it is written there as ever, and its reads alone are
spared. That goes with all that has to be on the drive: second slots, commits, checkpoints. So whole groups of compute
parameters stay in what the pool has beyond its pipeline. (Other state is read once a step, and would spare half as much.) An
update takes the old ones from where they lie and puts the new ones there, and no read is left. As the passes go over more than
the room holds, the same groups stay all the time: those that are read most often, and of equals an even share, so that the
drive has as much to do in each part of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

UNITS_READ_AHEAD = 2
"""Units for which `choose_to_stay` leaves room: one is read while the one before it waits for its use."""


@dataclass(frozen=True)
class Candidate:
    """`units` pieces of `unit_bytes`, used alike: a step reads each `reads` times and writes it `writes` times if it doesn't
    stay in memory."""

    units: int
    unit_bytes: int
    reads: int
    writes: int


def choose_resident(candidates: Sequence[Candidate], cache_bytes: int) -> list[int]:
    """How many units of each candidate stay in `cache_bytes` of memory so that a step moves least: see [Note: What stays].

    Of candidates with the same worth and reads, the first stay first; but of those that are read once, an even share of each,
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
    """Bytes (read, written) of a step in which so many units of each candidate stay in memory."""
    read = written = 0
    for candidate, staying in zip(candidates, resident, strict=True):
        moving_bytes = (candidate.units - staying) * candidate.unit_bytes
        read += moving_bytes * candidate.reads
        written += moving_bytes * candidate.writes
    return read, written


def choose_evenly(unit_bytes: Sequence[int], bytes_max: int) -> list[int]:
    """The places of units that stay in at most `bytes_max` of memory, spread evenly over all: between two of those that are
    read there is as much of what stays as between any others, so that the drive has no pause.

    For uses that come in the same order again and again. There the unit used just now is the one whose next use is farthest,
    and holding what comes next spares no read; a fixed part spares its bytes in every round, and nothing spares more
    ([Note: What stays], with one moment to a round).
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
    """The places of units that stay staged in at most `bytes_max` of memory, ascending: see [Note: Staying staged].

    `spared_reads`: how often a step reads each of them less if it stays; one of which that is 0 doesn't.
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
    """The places of units that stay in `room_bytes` of memory (`choose_evenly`) where the others are read ahead in it, too: all
    where all fit, else those that leave room for two more, as large as the largest."""
    if not unit_bytes or sum(unit_bytes) <= room_bytes:
        return [*range(len(unit_bytes))]
    return choose_evenly(unit_bytes, max(0, room_bytes - UNITS_READ_AHEAD * max(unit_bytes)))
