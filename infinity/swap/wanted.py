"""Floor 8. The chunks that are worth having staged, soonest needed first, as a look-ahead over numbers chooses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from infinity.schedule.lookahead import LookAhead
from infinity.swap.chunk import Chunk


class Wanted:
    """Says of a chunk how soon it is needed, and which chunks changed in that. Follows its look-ahead; holds nothing itself.

    Args:
        ahead: what chooses.
        chunks: by number that it chooses; None where nothing is to be staged.
        numbers: the same, by chunk.
    """

    def __init__(self, ahead: LookAhead, chunks: Sequence[Chunk | None], numbers: Mapping[Chunk, int]) -> None:
        self._ahead, self._chunks, self._numbers = ahead, chunks, numbers

    @staticmethod
    def of(chunks: Sequence[Chunk], *, at_once: int | None = None) -> tuple[Wanted, LookAhead]:
        """These, one after the other, so many `at_once` (all where None); and what chooses them, to be told where it is."""
        count = len(chunks)
        coming = ((float(place), place) for place in range(count))
        ahead = LookAhead(coming, ([1] * count, count if at_once is None else at_once))
        ahead.fit()
        return Wanted(ahead, chunks, {chunk: place for place, chunk in enumerate(chunks)}), ahead

    def __iter__(self) -> Iterator[Chunk]:
        """Soonest needed first."""
        return iter([chunk for number in self._ahead if (chunk := self._chunks[number]) is not None])

    def __contains__(self, chunk: object) -> bool:
        return isinstance(chunk, Chunk) and self.key(chunk) is not None

    def key(self, chunk: Chunk) -> int | None:
        """The less, the sooner it is needed; None where it is not wanted."""
        number = self._numbers.get(chunk)
        return self._ahead.key(number) if number is not None else None

    def changed(self) -> list[Chunk]:
        """Those that became wanted, or not any more, or are needed at another moment, since `told`."""
        return [chunk for number in self._ahead.changed if (chunk := self._chunks[number]) is not None]

    def told(self) -> None:
        """Whoever asked for changes has taken them in."""
        self._ahead.changed.clear()
