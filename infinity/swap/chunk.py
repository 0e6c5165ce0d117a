"""The chunk: bytes that move between the arena and a lease together, the one door of its state, and its transfers."""

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
    """Where a chunk is, and who holds memory for it."""

    ON_NVME = "on_nvme"
    """Only on NVMe. Holds no lease."""
    READING = "reading"
    """A read into its lease is in flight; the transfers hold the memory too. May be dropped once the read has ended."""
    STAGED = "staged"
    """Its lease holds what the arena holds; nobody uses it. May be dropped, once the device has copied what it took."""
    IN_USE = "in use"
    """Somebody reads or changes its lease. Must not be dropped."""
    COPYING_TO_DEVICE = "copying to device"
    """Given back by its user; the device is still copying out of the lease, which is free when the event fires."""
    COPYING_FROM_DEVICE = "copying from device"
    """The device is copying new bytes into its lease, which is written when the event has fired."""
    WRITING = "writing"
    """Its lease is being written to the arena; free when the write has ended."""


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
    """`nbytes` bytes at `offset` of the arena, or of a `foreign` file, which lie at `lease_offset` of the chunk's lease. All
    4 KiB aligned."""

    offset: int
    lease_offset: int
    nbytes: int
    foreign: ForeignFile | None = None


@dataclass(eq=False)
class Chunk:
    """Bytes that move as one: staging reads the spans `reads`, writing back stores the spans `writes`.

    `after`: chunks whose write must have ended before this one is read, because they store the same bytes.
    `fills`: elements in host memory that staging copies into the lease: (first byte there, elements).
    `on_lost` is called with the failure in words when a write has failed: the arena then holds neither the old bytes nor the
    new.
    """

    name: str
    lease_bytes: int
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    after: tuple[Chunk, ...] = ()
    fills: tuple[tuple[int, torch.Tensor], ...] = field(default=(), repr=False)
    on_lost: Callable[[str], None] | None = field(default=None, repr=False)
    verified_by_caller: bool = False
    """Whether the caller verifies the bytes that were read, in a pass that it makes over them anyway: see `ChunkIo.verify`."""
    unverified: bool = False
    """Whether nobody has verified the bytes that were read."""
    sums: bytes | None = field(default=None, repr=False)
    """Checksums of the pages that are to be written, if the caller has made them."""
    home: Lease | None = field(default=None, repr=False)
    """Of one that stays staged from step to step: the lease that is its own for good. See [Note: Staying staged] in
    infinity/schedule/residency.py."""
    early: tuple[Chunk, ...] = field(default=(), repr=False)
    """Chunks of sub-groups whose speculative updates this lease holds already. Nothing else may use the lease until the step
    has accepted all of them."""
    state: ChunkState = ChunkState.ON_NVME
    lease: Lease | None = field(default=None, repr=False)
    transfers: list[Transfer] = field(default_factory=list, repr=False)
    copy_event: CopyEvent | None = field(default=None, repr=False)
    _last_awaited: int = field(default=0, repr=False)
    """The place in `after` of the chunk whose write was awaited when somebody asked last."""

    @property
    def is_unwritten(self) -> bool:
        """Whether the arena doesn't hold its last bytes yet."""
        return self.state in (ChunkState.COPYING_FROM_DEVICE, ChunkState.WRITING)

    @property
    def transfers_ended(self) -> bool:
        """Whether no transfer of it is in flight."""
        return all(transfer.done for transfer in self.transfers)

    @property
    def device_is_done(self) -> bool:
        """Whether no copy between its lease and the device is in flight."""
        return self.copy_event is None or self.copy_event.done()

    def awaits_write(self) -> bool:
        """Whether a write of `after` must end before this chunk is read. They end about in order: asks the last one first."""
        places = range(len(self.after))
        for place in chain(places[self._last_awaited :], places[: self._last_awaited]):
            if self.after[place].is_unwritten:
                self._last_awaited = place
                return True
        self._last_awaited = 0
        return False

    def move_to(self, state: ChunkState) -> None:
        """The one door of the state."""
        assert state in _ALLOWED[self.state], f"{self.name}: {self.state.value} -> {state.value}"
        self.state = state

    def forget_lease(self) -> None:
        """It holds no memory any more; nothing is in flight for it."""
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
        """Whether the arena keeps checksums."""
        return self._arena.file.checked

    def start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> list[Transfer]:
        """Start to read `chunk.reads` into `lease`."""
        requests = [self._request("read", lease, span, priority) for span in chunk.reads]
        return self._engine.start(requests, sums_by_caller=chunk.verified_by_caller)

    def start_write(self, chunk: Chunk) -> list[Transfer]:
        """Start to write `chunk.writes` from its lease, under the checksums of the caller if that has made them."""
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
        """A write failed: drop the checksums that the caller had made for it."""
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
