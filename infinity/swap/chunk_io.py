"""A chunk's transfers between its lease and the arena or the user's files: requests, checksums, and errors that name
the chunk.

Knows no states and frees no lease: that is the stager's.
"""

from __future__ import annotations

from infinity.aio import IoEngine, Lease, Priority, Request, Transfer
from infinity.errors import IntegrityError, IoError
from infinity.store.arena import Arena
from infinity.swap.chunk import Chunk, Span


class ChunkIo:
    """Reads and writes chunks of one arena through one engine."""

    def __init__(self, engine: IoEngine, arena: Arena) -> None:
        self._engine, self._arena = engine, arena

    @property
    def checked(self) -> bool:
        """Whether the arena keeps checksums."""
        return self._arena.file.checked

    def start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> list[Transfer]:
        """Start to read `chunk.reads` into `lease`."""
        requests = [self._request("read", lease, span, priority) for span in chunk.reads]
        return self._engine.start(requests, sums_by_caller=chunk.verified_by_user)

    def start_write(self, chunk: Chunk) -> list[Transfer]:
        """Start to write `chunk.writes` from its lease, under the checksums of its user where that has made them."""
        assert chunk.lease is not None
        if chunk.sums is not None:
            (span,) = chunk.writes
            self._arena.file.set_checksums(span.offset, chunk.sums)
        requests = [self._request("write", chunk.lease, span, Priority.WRITE_BACK) for span in chunk.writes]
        return self._engine.start(requests, sums_by_caller=chunk.sums is not None)

    def count_writes(self, chunk: Chunk) -> None:
        """The writes of a chunk have started: the arena counts them."""
        for span in chunk.writes:
            self._arena.count_write(span.offset, span.nbytes)

    def wait(self, chunk: Chunk, *, with_team: bool) -> None:
        """Wait for the chunk's transfers, `with_team` as `IoEngine.wait` does. Raises IoError, which names the chunk, once all
        of them have ended."""
        try:
            self._engine.wait(chunk.transfers, with_team=with_team)
            for span in chunk.reads:
                if span.foreign is not None:
                    span.foreign.check_first_read(span.offset)
        except IoError as error:
            if isinstance(error, IntegrityError) and not _is_foreign(chunk, error.path):
                self._arena.explain(error, chunk.name)
            else:
                error.concerning(chunk.name)
            raise

    def expected_sums(self, span: Span) -> bytes:
        """The checksums that the pages of `span` must have, as `infinity.aio.File.checksums` gives them."""
        return self._arena.checksums(span.offset, span.nbytes)

    def forget_sums(self, chunk: Chunk) -> None:
        """A write failed: drop the checksums that its user had made for it."""
        if chunk.sums is not None:
            (span,) = chunk.writes
            self._arena.file.set_checksums(span.offset, bytes(len(chunk.sums)))

    def verify(self, chunk: Chunk, only: Span | None = None) -> None:
        """Compare what was read of a chunk in use with its checksums, unless somebody already has.

        `only`: compare this part, in any case. Raises IntegrityError, as a read that the engine verifies does.
        """
        if not chunk.unverified and only is None:
            return
        assert chunk.lease is not None
        for span in chunk.reads if only is None else (only,):
            try:
                self._engine.verify(self._request("read", chunk.lease, span, Priority.DEMAND))
            except IntegrityError as error:
                self._arena.explain(error, chunk.name, at=span.offset)
                raise
        chunk.unverified = chunk.unverified and only is not None

    def _request(self, operation: str, lease: Lease, span: Span, priority: Priority) -> Request:
        file = span.foreign.file if span.foreign is not None else self._arena.file
        return Request(operation, file, span.offset, lease, span.lease_offset, span.nbytes, priority)


def _is_foreign(chunk: Chunk, path: str) -> bool:
    return any(span.foreign is not None and span.foreign.file.path == path for span in chunk.reads)
