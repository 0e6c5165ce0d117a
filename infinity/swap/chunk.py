"""The chunk: bytes that move between the arena and a lease as one, with their state and their transfers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import torch

from infinity.aio import IoEngine, Lease, Priority, Request, Transfer
from infinity.device import CopyEvent
from infinity.errors import IntegrityError, IoError
from infinity.store.arena import Arena
from infinity.store.foreign import ForeignFile


class ChunkState(enum.Enum):
    """The place of a chunk's bytes, and the owner of its memory."""

    ON_NVME = "on_nvme"
    """Only on NVMe. Holds no lease."""
    READING = "reading"
    """A read into its lease is in flight, and the transfers hold the memory too. May be dropped when that has ended."""
    STAGED = "staged"
    """Its lease holds the arena's bytes and is not in use. May be dropped once the device has copied them."""
    IN_USE = "in use"
    """A caller reads or changes its lease. Must not be dropped."""
    COPYING_TO_DEVICE = "copying to device"
    """Released by its user, while the device still copies out of the lease. The lease is free when the event fires."""
    COPYING_FROM_DEVICE = "copying from device"
    """The device copies new bytes into its lease, which is written after the event has fired."""
    WRITING = "writing"
    """Its lease is being written to the arena, and is free when the write has ended."""


_ALLOWED = {
    ChunkState.ON_NVME: {ChunkState.READING, ChunkState.IN_USE},
    ChunkState.READING: {ChunkState.STAGED, ChunkState.ON_NVME},
    ChunkState.STAGED: {ChunkState.IN_USE, ChunkState.ON_NVME},
    ChunkState.IN_USE: {
        ChunkState.STAGED,
        ChunkState.COPYING_TO_DEVICE,
        ChunkState.COPYING_FROM_DEVICE,
        ChunkState.WRITING,
        ChunkState.ON_NVME,
    },
    ChunkState.COPYING_TO_DEVICE: {ChunkState.ON_NVME, ChunkState.IN_USE},
    ChunkState.COPYING_FROM_DEVICE: {ChunkState.WRITING, ChunkState.ON_NVME},
    ChunkState.WRITING: {ChunkState.ON_NVME},
}


@dataclass(frozen=True)
class Span:
    """`nbytes` bytes at `offset` of the arena or of a `foreign` file, and at `lease_offset` of the chunk's lease. All
    values are 4 KiB aligned."""

    offset: int
    lease_offset: int
    nbytes: int
    foreign: ForeignFile | None = None


@dataclass(eq=False)
class Chunk:
    """Bytes that move as one: staging reads the spans `reads`, writing back writes the spans `writes`.

    `after`: chunks that store the same bytes; their writes must end before this chunk is read. `fills`: elements in
    host memory that staging copies into the lease, as (first byte there, elements). `on_lost`: called with the failure
    in words if a write failed; the arena then holds neither the old bytes nor the new ones.
    """

    name: str
    lease_bytes: int
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    after: tuple[Chunk, ...] = ()
    fills: tuple[tuple[int, torch.Tensor], ...] = field(default=(), repr=False)
    on_lost: Callable[[str], None] | None = field(default=None, repr=False)
    verified_by_caller: bool = False
    """True if the caller verifies the bytes, in a pass that it makes over them anyway: see `ChunkIo.verify`."""
    unverified: bool = False
    """True if the bytes that were read have not been verified."""
    sums: bytes | None = field(default=None, repr=False)
    """Checksums of the pages to write, if the caller computed them."""
    home: Lease | None = field(default=None, repr=False)
    """The permanent lease of a chunk that stays staged from step to step: see [Note: Staying staged] in
    infinity/schedule/residency.py."""
    early: tuple[Chunk, ...] = field(default=(), repr=False)
    """Chunks of sub-groups whose speculative updates this lease already holds. The lease has no other use until the
    step has accepted all of them."""
    state: ChunkState = ChunkState.ON_NVME
    lease: Lease | None = field(default=None, repr=False)
    transfers: list[Transfer] = field(default_factory=list, repr=False)
    copy_event: CopyEvent | None = field(default=None, repr=False)
    _last_awaited: int = field(default=0, repr=False)
    """The position in `after` of the chunk whose write the last call of `awaits_write` found."""

    @property
    def is_unwritten(self) -> bool:
        """True if the arena doesn't hold its last bytes yet."""
        return self.state in (ChunkState.COPYING_FROM_DEVICE, ChunkState.WRITING)

    @property
    def transfers_ended(self) -> bool:
        """True if none of its transfers is in flight."""
        return all(transfer.done for transfer in self.transfers)

    @property
    def device_is_done(self) -> bool:
        """True if no copy between its lease and the device is in flight."""
        return self.copy_event is None or self.copy_event.done()

    def awaits_write(self) -> bool:
        """Return True if a write of `after` must end before this chunk is read. Starts at the last one found."""
        places = range(len(self.after))
        for place in chain(places[self._last_awaited :], places[: self._last_awaited]):
            if self.after[place].is_unwritten:
                self._last_awaited = place
                return True
        self._last_awaited = 0
        return False

    def move_to(self, state: ChunkState) -> None:
        """Change the state; the only place that does."""
        assert state in _ALLOWED[self.state], f"{self.name}: {self.state.value} -> {state.value}"
        self.state = state

    def forget_lease(self) -> None:
        """Reset the chunk to ON_NVME; nothing may be in flight for it."""
        if self.state is not ChunkState.ON_NVME:
            self.move_to(ChunkState.ON_NVME)
        self.lease, self.transfers, self.copy_event = None, [], None
        self.unverified, self.sums, self.early = False, None, ()


class ChunkIo:
    """Reads and writes chunks of one arena through one engine."""

    def __init__(self, engine: IoEngine, arena: Arena) -> None:
        self._engine, self._arena = engine, arena

    @property
    def checked(self) -> bool:
        """True if the arena keeps checksums."""
        return self._arena.file.checked

    def start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> list[Transfer]:
        """Start to read `chunk.reads` into `lease`."""
        requests = [self._request("read", lease, span, priority) for span in chunk.reads]
        return self._engine.start(requests, sums_by_caller=chunk.verified_by_caller)

    def start_write(self, chunk: Chunk) -> list[Transfer]:
        """Start to write `chunk.writes` from its lease, with the caller's checksums if there are any."""
        assert chunk.lease is not None
        if chunk.sums is not None:
            (span,) = chunk.writes
            self._arena.file.set_checksums(span.offset, chunk.sums)
        requests = [self._request("write", chunk.lease, span, Priority.WRITE_BACK) for span in chunk.writes]
        return self._engine.start(requests, sums_by_caller=chunk.sums is not None)

    def count_writes(self, chunk: Chunk) -> None:
        """Count the writes of a chunk, which have started, in the arena."""
        for span in chunk.writes:
            self._arena.count_write(span.offset, span.nbytes)

    def wait(self, chunk: Chunk, *, with_team: bool) -> None:
        """Wait until the chunk's transfers have ended (`with_team`: see `IoEngine`). Raises IoError, which names the
        chunk."""
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
        """Return the expected checksums of the pages of `span`, in the form of `infinity.aio.File.checksums`."""
        return self._arena.checksums(span.offset, span.nbytes)

    def forget_sums(self, chunk: Chunk) -> None:
        """Drop the caller's checksums after a failed write."""
        if chunk.sums is not None:
            (span,) = chunk.writes
            self._arena.file.set_checksums(span.offset, bytes(len(chunk.sums)))

    def verify(self, chunk: Chunk, only: Span | None = None) -> None:
        """Verify the bytes read for a chunk in use, unless they are verified already.

        `only`: verify this part, in any case. Raises IntegrityError like a read that the engine verifies.
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
