"""The chunks that are worth having staged, as a look-ahead over numbers chooses them; the next one to read, and the
first one to leave."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from infinity.schedule.eviction import Eviction
from infinity.schedule.lookahead import LookAhead
from infinity.swap.chunk import Chunk, ChunkState

_LAST = 1 << 62
"""The key of what stays, while a look-ahead doesn't reach its next use."""


class Wanted:
    """Says how soon a chunk is needed, and for which chunks that changed. Follows its look-ahead; holds nothing itself.

    Args:
        ahead: chooses numbers.
        chunks: by number; None where nothing is to be staged.
        numbers: by chunk.
        stays: numbers of those that stay wanted beyond their next use.
    """

    def __init__(
        self,
        ahead: LookAhead,
        chunks: Sequence[Chunk | None],
        numbers: Mapping[Chunk, int],
        stays: Collection[int] = frozenset(),
    ) -> None:
        self._ahead, self._chunks, self._numbers, self._stays = ahead, chunks, numbers, stays

    @staticmethod
    def of(chunks: Sequence[Chunk], *, at_once: int | None = None) -> tuple[Wanted, LookAhead]:
        """`chunks`, one after another, so many `at_once` (all where None); and the look-ahead, to be told the current place."""
        length = len(chunks)
        coming = ((float(place), place) for place in range(length))
        ahead = LookAhead(coming, ([1] * length, length if at_once is None else at_once))
        ahead.fit()
        return Wanted(ahead, chunks, {chunk: place for place, chunk in enumerate(chunks)}), ahead

    def __iter__(self) -> Iterator[Chunk]:
        """Soonest needed first."""
        return iter([chunk for number in self._ahead if (chunk := self._chunks[number]) is not None])

    def __contains__(self, chunk: object) -> bool:
        return isinstance(chunk, Chunk) and self.key(chunk) is not None

    def key(self, chunk: Chunk) -> int | None:
        """The smaller, the sooner the chunk is needed; None where it is not wanted."""
        number = self._numbers.get(chunk)
        if number is None:
            return None
        key = self._ahead.key(number)
        return _LAST if key is None and number in self._stays else key

    def changed(self) -> list[Chunk]:
        """The chunks that became wanted or unwanted, or are needed at another moment, since `told`."""
        return [chunk for number in self._ahead.changed if (chunk := self._chunks[number]) is not None]

    def told(self) -> None:
        """The changes up to now are dealt with."""
        self._ahead.changed.clear()


class ReadQueue:
    """The wanted chunks that are only on NVMe, soonest needed first: see [Note: What a call costs] in stager.py."""

    def __init__(self) -> None:
        self.wanted, _ = Wanted.of([])
        self._entries: list[tuple[int, int, Chunk]] = []
        self._pushed = count()
        """Where two keys are equal, of which one is out of date, chunks are not compared."""
        self._compact_at = 64
        self._passed: list[Chunk] = []
        self._reached = -math.inf
        """The key of the chunk that `next` gave last."""

    def follow(self, wanted: Wanted) -> None:
        """Other chunks are wanted from now on."""
        self.wanted = wanted
        self._fill(wanted)

    def put(self, chunk: Chunk) -> None:
        """The chunk may be one of these now, or needed at another moment."""
        key = self._key(chunk)
        if key is not None:
            heapq.heappush(self._entries, (key, next(self._pushed), chunk))
            if len(self._entries) > self._compact_at:
                self._fill(dict.fromkeys(chunk for _, _, chunk in self._entries))

    def start_over(self) -> None:
        """From now on `next` goes through all of them again, those included that it passed over."""
        passed, self._passed, self._reached = self._passed, [], -math.inf
        for chunk in passed:
            self.put(chunk)

    def next(self) -> Chunk | None:
        """The chunk needed soonest; it stays in the queue. A chunk that came to rest after its turn is passed over."""
        while self._entries:
            key, _, chunk = self._entries[0]
            if self._key(chunk) == key and key >= self._reached:
                self._reached = key
                return chunk
            if self._key(chunk) == key:
                self._passed.append(chunk)
            heapq.heappop(self._entries)
        return None

    def _key(self, chunk: Chunk) -> int | None:
        return self.wanted.key(chunk) if chunk.state is ChunkState.ON_NVME else None

    def _fill(self, chunks: Iterable[Chunk]) -> None:
        entries = [(key, next(self._pushed), chunk) for chunk in chunks if (key := self._key(chunk)) is not None]
        heapq.heapify(entries)
        self._entries, self._compact_at = entries, 64 + 2 * len(entries)


class ChunkOrder:
    """Which chunk is read next, and which leaves first: both as those to come are wanted. Moves nothing."""

    def __init__(self) -> None:
        self.staged: Eviction[Chunk] = Eviction(leaves_room=lambda chunk: chunk.home is None)
        """READING or STAGED."""
        self.to_read = ReadQueue()

    @property
    def wanted(self) -> Wanted:
        """What was followed last."""
        return self.to_read.wanted

    def key(self, chunk: Chunk) -> int | None:
        """See `Wanted.key`."""
        return self.wanted.key(chunk)

    def follow(self, wanted: Wanted | Sequence[Chunk]) -> None:
        """From now on these are wanted, soonest needed first."""
        if not isinstance(wanted, Wanted):
            wanted, _ = Wanted.of(wanted)
        if wanted is not self.wanted:
            self.to_read.follow(wanted)
            self.staged.need_all(wanted.key)
        else:
            for chunk in wanted.changed():
                self.to_read.put(chunk)
                self.staged.need(chunk, wanted.key(chunk))
        wanted.told()
