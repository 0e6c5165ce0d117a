"""Floor 6. Which bytes stay in host memory from step to step: the optimum over all ways of caching. Integers only.

[Note: What stays]
A step repeats. It reads the copies of the parameters in its passes (forward and backward of each micro-batch), and it updates
each byte of state once, which reads and writes it: in an optimizer step of its own, or in one of the passes ([Note: Schemes] in
scheme.py). A copy is a part of that state, or it is written anew. Beyond what the pipeline needs there are C bytes of host
memory. They may hold other bytes at every moment, and a part of an extent as well as all of it. What is changed in memory has
to be written before it is forgotten, unless it is overwritten before anybody reads it.

Minimised is the cost of a step's transfers: `read_cost` for each byte read and `write_cost` for each byte written. The worth of
a byte is the cost that it causes when it never stays: its reads and a write for a copy (no write where it is frozen), one read
and one write for the rest of the state.

  The optimum keeps the same bytes all the time: those of the greatest worth, as many as C holds.

Proof. Look into the memory at u moments of each step, one before each pass that reads copies (the optimizer step too, where it
does). A byte of a copy is read at most once between two of them, so being there at k of the u moments spares it at most k
reads; and the write only if k = u, for otherwise it was forgotten between two updates, or between its update and its last
reading. In both cases that is at most k/u of its worth. The rest of the state is used once a step: it is spared its worth if
k = u, and nothing otherwise. So what is spared in a step is at most the sum of (k/u) · worth over all bytes, where no k/u is
above 1 and they sum up to C at most (all moments together hold u · C bytes). The greatest such sum is that of the fractional
knapsack: C bytes of the greatest worth with k = u. Keeping just these at all times spares just that. (Copies that the update
makes before the forward are dead when it begins: leave out that moment. A copy that one of the passes doesn't read has
the fewer reads to be spared.) ∎

Farthest next use, which is optimal for any order of reads (Belady), comes to the same: the passes are over more than C bytes,
so it keeps what it has and lets the rest pass by. tests/schedule/test_residency.py searches all ways of caching small steps of
every scheme, copies that stay gathered until backward among them, and finds none that is cheaper. (Only where copies that leave
out one of the u moments meet frozen ones that leave out another there can be: each in the same bytes at its time.)

Costs: whatever reads and writes cost, no trained copy is worth less than other state, of which each byte is read and written
once too. Only frozen copies against state depend on it: the copies first where reads cost more, state where writes do. Equal
costs, which the swap manager uses, move the fewest bytes, and don't make the layout of a model a matter of what a drive did
in some measurement.

What stays is whole units (a page of each field). The proof is for bytes; so all that is lost is a rest of C that holds no unit
of the next candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Candidate:
    """`units` pieces of `unit_bytes`, used alike: a step reads each `reads` times and writes it `writes` times if it doesn't
    stay in memory."""

    units: int
    unit_bytes: int
    reads: int
    writes: int


def choose_resident(
    candidates: Sequence[Candidate], cache_bytes: int, *, read_cost: int = 1, write_cost: int = 1
) -> list[int]:
    """How many units of each candidate stay in `cache_bytes` of memory so that a step costs least: see [Note: What stays].

    Args:
        candidates: of those whose worth and reads are the same, those that come first are kept first; but those that are read
            once an even share of each, so that the drive has as much to do in each part of a step.
        read_cost: of a byte; for the least time, the drive's write bandwidth (any unit) ...
        write_cost: ... and its read bandwidth here, since a byte takes 1 / bandwidth.

    With equal costs the bytes moved are the least possible, and among all choices that move as few, those read.
    """

    def rank(each: Candidate) -> tuple[int, int]:
        return -(each.reads * read_cost + each.writes * write_cost), -each.reads

    chosen = [0] * len(candidates)
    left = cache_bytes
    moving = [index for index, each in enumerate(candidates) if each.reads or each.writes]
    for _, equals in groupby(sorted(moving, key=lambda index: rank(candidates[index])), lambda i: rank(candidates[i])):
        indices = list(equals)
        total_bytes = sum(candidates[index].units * candidates[index].unit_bytes for index in indices)
        if candidates[indices[0]].reads == 1 and total_bytes > left:
            for index in indices:
                chosen[index] = candidates[index].units * left // total_bytes
            left -= sum(chosen[index] * candidates[index].unit_bytes for index in indices)
        for index in indices:
            each = candidates[index]
            more = min(each.units - chosen[index], left // each.unit_bytes)
            chosen[index] += more
            left -= more * each.unit_bytes
    return chosen


def moved_bytes(candidates: Sequence[Candidate], resident: Sequence[int]) -> tuple[int, int]:
    """Bytes (read, written) of a step in which so many units of each candidate stay in memory."""
    away = [(each.units - kept) * each.unit_bytes for each, kept in zip(candidates, resident, strict=True)]
    read = sum(nbytes * each.reads for nbytes, each in zip(away, candidates, strict=True))
    return read, sum(nbytes * each.writes for nbytes, each in zip(away, candidates, strict=True))
