"""Records, line by line, what the swap core moves: the net under every change that only rearranges it.

Each transfer ends before the call that starts it returns, so that a record depends on decisions alone, not on a drive's speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from infinity.aio import IoEngine, Priority
from infinity.swap.stager import Chunk, ChunkState, Span, Stager

_STAGED = (ChunkState.READING, ChunkState.STAGED)


class Record:
    """Lines of one record. As the stager's timeline it is notified of gathers and updates."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps = 0
        self._gathered = ""

    def note(self, event: str, subject: str, spans: tuple[Span, ...] = ()) -> None:
        nbytes = f", {sum(span.nbytes for span in spans)} bytes" if spans else ""
        self.lines.append(f"    {event:7}{subject}{nbytes}")

    @contextlib.contextmanager
    def span(self, lane: str, subject: str) -> Iterator[None]:
        if lane == "update":
            self.note("update", subject)
        elif lane == "gather" and subject != self._gathered:
            self.lines.append(f"  gather {subject}")
            self._gathered = subject
        yield

    def stall(self, subject: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def starting(self, subject: str, transfers: int) -> None:
        pass


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """While the block runs, `record` gets a line for each read, hit, eviction, update and write of every stager."""
    originals: dict[str, Any] = {
        name: getattr(Stager, name) for name in ("acquire", "drop", "_start_read", "_start_write")
    }

    def acquire(self: Stager, chunk: Chunk) -> Any:
        hit = chunk.state in _STAGED and not chunk.early
        if hit and (chunk.reads or chunk.fills):
            record.note("hit", chunk.name)
        return originals["acquire"](self, chunk)

    def drop(self: Stager, chunk: Chunk) -> None:
        if chunk.state in _STAGED:
            record.note("evict", chunk.name)
        originals["drop"](self, chunk)

    def start_read(self: Stager, chunk: Chunk, lease: Any, priority: Priority) -> None:
        if chunk.reads:
            record.note("demand" if priority is Priority.DEMAND else "read", chunk.name, chunk.reads)
        originals["_start_read"](self, chunk, lease, priority)

    def start_write(self: Stager, chunk: Chunk) -> None:
        record.note("write", chunk.name, chunk.writes)
        originals["_start_write"](self, chunk)

    def start(self: IoEngine, *args: Any, original: Any = IoEngine.start, **kwargs: Any) -> Any:
        transfers = original(self, *args, **kwargs)
        for transfer in transfers:
            transfer.wait()
        return transfers

    with contextlib.ExitStack() as stack:
        for name, replacement in (
            ("acquire", acquire),
            ("drop", drop),
            ("_start_read", start_read),
            ("_start_write", start_write),
        ):
            stack.enter_context(mock.patch.object(Stager, name, replacement))
        stack.enter_context(mock.patch.object(IoEngine, "start", start))
        yield
