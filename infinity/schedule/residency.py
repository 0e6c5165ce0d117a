"""Floor 3. Which bytes stay in host memory from step to step: the optimum over all ways of caching. Integers only.

[Note: What stays]
A step repeats. It reads the copies of the parameters in u passes (forward and backward of each micro-batch); then it steps:
reads and writes each byte of optimizer state once, and writes the copies anew. Beyond what the pipeline needs there are C bytes
of host memory. They may hold other bytes at every moment, and a part of an extent as well as all of it. What is changed in
memory has to be written before it is forgotten, unless it is overwritten before anybody reads it.

Minimised is the cost of a step's transfers: `read_cost` for each byte read and `write_cost` for each byte written. The worth of
a byte is the cost that it causes when it never stays: u reads and a write for a copy (no write where it is frozen), one read
and one write for state.

  The optimum keeps the same bytes all the time: those of the greatest worth, as many as C holds.

Proof. Look into the memory at u moments of each step, one before each pass. A byte of a copy is read once between two of them;
so being there at k of the u moments spares it at most k reads, and the write only if k = u, for otherwise it was forgotten
between a step and its last reading. In both cases that is at most k/u of its worth. State is used once between two steps: it
is spared its worth if k = u, and nothing otherwise. So what is spared in a step is at most the sum of (k/u) · worth over all
bytes, where no k/u is above 1 and they sum up to C at most (all moments together hold u · C bytes). The greatest such sum is
that of the fractional knapsack: C bytes of the greatest worth with k = u. Keeping just these at all times spares just that. ∎

Farthest next use, which is optimal for any order of reads (Belady), comes to the same: the passes are over more than C bytes,
so it keeps what it has and lets the rest pass by. A copy that is read in the forward passes only (its group stays gathered
until backward) is worth less and stands behind the others. tests/schedule/test_residency.py searches all ways of caching
small steps, such copies among them, and finds none that is cheaper. (Only where such copies meet frozen ones there can be:
the first between step and forward, the second from forward to backward, in the same bytes.)

What stays is whole units (a page of each field). The proof is for bytes; so all that is lost is a rest of C that holds no unit
of the next candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
        candidates: those that come first are kept first where worth and reads are the same.
        read_cost: of a byte; for the least time, the drive's write bandwidth (any unit) ...
        write_cost: ... and its read bandwidth here, since a byte takes 1 / bandwidth.

    With equal costs the bytes moved are the least possible, and among all choices that move as few, those read.
    """

    def rank(index: int) -> tuple[int, int]:
        each = candidates[index]
        return -(each.reads * read_cost + each.writes * write_cost), -each.reads

    chosen = [0] * len(candidates)
    left = cache_bytes
    for index in sorted(range(len(candidates)), key=rank):
        each = candidates[index]
        if each.reads or each.writes:
            chosen[index] = min(each.units, left // each.unit_bytes)
            left -= chosen[index] * each.unit_bytes
    return chosen


def moved_bytes(candidates: Sequence[Candidate], resident: Sequence[int]) -> tuple[int, int]:
    """Bytes (read, written) of a step in which so many units of each candidate stay in memory."""
    away = [(each.units - kept) * each.unit_bytes for each, kept in zip(candidates, resident, strict=True)]
    read = sum(nbytes * each.reads for nbytes, each in zip(away, candidates, strict=True))
    return read, sum(nbytes * each.writes for nbytes, each in zip(away, candidates, strict=True))
