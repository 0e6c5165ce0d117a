"""Chunks, each of which moves between the arena and a lease as one, and the stager, which moves them. Mechanism only; other
modules decide what to stage.

[Note: Why no wait is endless]
A chunk with a lease is in one of six states. READING and WRITING end by themselves. COPYING_TO_DEVICE ends when the
device has copied, and COPYING_FROM_DEVICE then becomes WRITING. STAGED chunks may be dropped at any time. Only IN_USE
lasts as long as its user wants, and the users are few: the group that FSDP2 copies or an update changes, and the
sub-group of that update. The budget (infinity/swap/plan.py) has room for these, and for the next lease in one of the
holes between them. So a demand finds room, or makes it by dropping and waiting. It fails only if the caller exceeds the
budget.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from infinity.aio import IoEngine, Lease, PinnedPool, PoolPart, Priority, Request, Transfer
from infinity.device import CopyEvent, Device
from infinity.errors import BudgetError, IntegrityError, IoError, in_words
from infinity.schedule.readahead import ReadAhead, in_turn
from infinity.store.arena import Arena
from infinity.store.foreign import ForeignFile
from infinity.swap.timeline import Timeline, measured
from infinity.units import format_bytes

log = logging.getLogger("infinity")

_IN_FLIGHT_SEEN_MAX = 64
"""A search for ended chunks stops after so many that have not ended: more than a drive has in flight."""


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


_UNWRITTEN = (ChunkState.COPYING_FROM_DEVICE, ChunkState.WRITING)
"""The states of a chunk whose last bytes the arena doesn't hold yet."""

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

    def transfers_ended(self) -> bool:
        """Return True if none of its transfers is in flight."""
        return all(transfer.done for transfer in self.transfers)

    def device_is_done(self) -> bool:
        """Return True if no copy between its lease and the device is in flight."""
        return self.copy_event is None or self.copy_event.done()

    def awaits_write(self) -> bool:
        """Return True if a write of `after` must end before this chunk is read. Starts at the last one found."""
        places = range(len(self.after))
        for place in chain(places[self._last_awaited :], places[: self._last_awaited]):
            if self.after[place].state in _UNWRITTEN:
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
        self._engine, self.arena = engine, arena

    def start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> list[Transfer]:
        """Start to read `chunk.reads` into `lease`."""
        requests = [self._request("read", lease, span, priority) for span in chunk.reads]
        return self._engine.start(requests, sums_by_caller=chunk.verified_by_caller)

    def start_write(self, chunk: Chunk) -> list[Transfer]:
        """Start to write `chunk.writes` from its lease, with the caller's checksums if there are any."""
        assert chunk.lease is not None
        if chunk.sums is not None:
            (span,) = chunk.writes
            self.arena.file.set_checksums(span.offset, chunk.sums)
        requests = [self._request("write", chunk.lease, span, Priority.WRITE_BACK) for span in chunk.writes]
        return self._engine.start(requests, sums_by_caller=chunk.sums is not None)

    def wait(self, chunk: Chunk, *, with_team: bool) -> None:
        """Wait until the chunk's transfers have ended (`with_team`: see `IoEngine`). Raises IoError, which names the
        chunk."""
        try:
            self._engine.wait(chunk.transfers, with_team=with_team)
            for span in chunk.reads:
                if span.foreign is not None:
                    span.foreign.check_first_read(span.offset)
        except IoError as error:
            is_foreign = any(span.foreign is not None and span.foreign.file.path == error.path for span in chunk.reads)
            if isinstance(error, IntegrityError) and not is_foreign:
                self.arena.explain(error, chunk.name)
            else:
                error.concerning(chunk.name)
            raise

    def forget_sums(self, chunk: Chunk) -> None:
        """Drop the caller's checksums after a failed write."""
        if chunk.sums is not None:
            (span,) = chunk.writes
            self.arena.file.set_checksums(span.offset, bytes(len(chunk.sums)))

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
                self.arena.explain(error, chunk.name, at=span.offset)
                raise
        chunk.unverified = chunk.unverified and only is not None

    def _request(self, operation: str, lease: Lease, span: Span, priority: Priority) -> Request:
        file = span.foreign.file if span.foreign is not None else self.arena.file
        return Request(operation, file, span.offset, lease, span.lease_offset, span.nbytes, priority)


class Stager:
    """Moves chunks between one arena and one pool. Used by one thread at a time."""

    def __init__(self, engine: IoEngine, pool: PinnedPool | PoolPart, arena: Arena, device: Device) -> None:
        self._engine, self._pool = engine, pool
        self.io, self.device = ChunkIo(engine, arena), device
        self._leased: dict[Chunk, None] = {}
        """All chunks that hold a lease, or were about to when an exception interrupted."""
        self.readahead: ReadAhead[Any] = ReadAhead(self._leased, Chunk)
        """Decides which chunks are wanted; its `staged` are the chunks that are READING or STAGED and have no home."""
        self._staged = self.readahead.staged
        self._from_device: OrderedDict[Chunk, None] = OrderedDict()
        self._writing: OrderedDict[Chunk, None] = OrderedDict()
        self._to_device: OrderedDict[Chunk, None] = OrderedDict()
        self.demand_reads = 0
        """Reads that were started only when their bytes were needed."""
        self.timeline: Timeline | None = None
        """The recorder of the running trace, if any."""

    def close(self) -> None:
        """Release pool, engine and arena, because the paged model holds this stager and outlives them. Ends its use."""
        del self._engine, self._pool, self.io

    @contextlib.contextmanager
    def stalling(self, why: str) -> Iterator[None]:
        """Count the block as a stall: the training thread waits for a drive, but not for a transfer of this stager."""
        with self._engine.stalling(), measured(self.timeline, "stall", why):
            yield

    def want(self, chunks: Sequence[Chunk] | None = None) -> None:
        """Start to read the wanted chunks that are on NVMe, soonest needed first, while they fit. `chunks`: replaces
        the wanted chunks, in this order."""
        if self._from_device:
            self._write_arrived()
        if chunks is not None:
            self.readahead.follow(in_turn(chunks))
        for chunk in self.readahead.to_read():
            if not self.prefetch(chunk):
                break

    def prefetch(self, chunk: Chunk) -> bool:
        """Start to read a chunk if that neither waits nor drops a wanted chunk. Returns True if it has started."""
        if not self.may_be_read(chunk):
            return False
        lease = chunk.home or self._pool.try_lease(chunk.lease_bytes)
        if lease is None:
            self.reap()
            lease = self._pool.try_lease(chunk.lease_bytes)
        while lease is None:
            unwanted = self._staged.oldest_unwanted(lambda chunk: chunk.transfers_ended() and chunk.device_is_done())
            if unwanted is None:
                return False
            self.drop(unwanted)
            lease = self._pool.try_lease(chunk.lease_bytes)
        self._start_read(chunk, lease, Priority.PREFETCH)
        return True

    def acquire(self, chunk: Chunk) -> Lease:
        """Return a lease with the chunk's bytes, for the caller alone until `release` or `write_back`. May block.

        A chunk that is `verified_by_caller` may be `unverified`: the caller verifies it, or `io.verify` does. Raises
        IoError if a write or the read failed (the lease is then back in the pool), BudgetError if the chunk exceeds the pool.
        """
        if chunk.state in _UNWRITTEN:
            self.settle(chunk)
        if chunk.early:
            self.drop(chunk)
        if chunk.writes:  # the caller may change the bytes, so the device must have copied them
            self.wait_copied(chunk)
        if chunk.state is ChunkState.ON_NVME:
            for other in chunk.after:
                self.settle(other, f"before the read of {chunk.name}")
            self.demand_reads += bool(chunk.reads)
            lease = chunk.home or self.make_room(chunk.lease_bytes, chunk.name)
            self._start_read(chunk, lease, Priority.DEMAND)
        if chunk.state is ChunkState.READING:
            self._finish_read(chunk)
        assert chunk.state is not ChunkState.IN_USE and chunk.lease is not None, f"{chunk.name} is already in use"
        if chunk.state is ChunkState.COPYING_TO_DEVICE:
            del self._to_device[chunk]
        elif chunk.home is None:
            self._staged.discard(chunk)
        chunk.move_to(ChunkState.IN_USE)
        return chunk.lease

    def may_be_read(self, chunk: Chunk) -> bool:
        """Return True if the arena holds the bytes that a read of the chunk must return. Never blocks."""
        if not chunk.awaits_write():
            return True
        self.reap()
        return not chunk.awaits_write()

    def is_ready(self, chunk: Chunk) -> bool:
        """Return True if a chunk is staged and `acquire` would not wait. A prefetch that failed is only logged."""
        if chunk.state is ChunkState.READING and chunk.transfers_ended():
            self._finish_unneeded_read(chunk)
        return chunk.state is ChunkState.STAGED and not chunk.early and (not chunk.writes or chunk.device_is_done())

    def occupy(self, chunk: Chunk) -> Lease:
        """Return a lease for a chunk whose old bytes are not needed: like `acquire`, without the read."""
        self.settle(chunk)
        self.drop(chunk)
        lease = self.make_room(chunk.lease_bytes, chunk.name)
        self._leased[chunk] = None
        chunk.lease = lease
        chunk.move_to(ChunkState.IN_USE)
        return lease

    def release(self, chunk: Chunk, *, keep: bool, copy_event: CopyEvent | None = None) -> None:
        """End the use of a chunk whose lease matches the arena, or will after the writes in flight.

        `keep`: keep it staged; otherwise the lease goes back once the device has copied it. `copy_event`: fires when
        the device has copied the bytes; None stands for all copies so far.
        """
        chunk.sums = None
        if self.device.is_discrete:
            copy_event = copy_event or self.device.copy_event()
            chunk.copy_event = None if copy_event.done() else copy_event
        if keep:
            chunk.move_to(ChunkState.STAGED)
            if chunk.home is None:
                self.readahead.stage(chunk)
        elif chunk.copy_event is None:
            self._give_back(chunk)
        else:
            chunk.move_to(ChunkState.COPYING_TO_DEVICE)
            self._to_device[chunk] = None

    def write_back(self, chunk: Chunk, *, copy_event: CopyEvent | None = None) -> None:
        """Write the changed bytes in the background; the lease goes back when they are on the drive.

        `copy_event`: fires when the device has delivered the bytes. Nothing waits for it: the next call of this stager
        that finds it fired starts the write. Raises IoError, with the bytes lost, if the engine starts nothing more.
        """
        if self._from_device:
            self._write_arrived()
        assert chunk.lease is not None and chunk.copy_event is None
        if copy_event is None or copy_event.done():
            self._start_write(chunk)
        else:
            chunk.copy_event = copy_event
            chunk.move_to(ChunkState.COPYING_FROM_DEVICE)
            self._from_device[chunk] = None

    def wait_copied(self, chunk: Chunk) -> None:
        """Wait until the device has copied a chunk's bytes, before they change in its lease."""
        if chunk.copy_event is not None:
            with measured(self.timeline, "copy", chunk.name):
                chunk.copy_event.wait()
            chunk.copy_event = None

    def settle(self, chunk: Chunk, why: str = "") -> None:
        """Wait until a chunk's write is on the drive. Raises IoError if it failed. `why`: shown in a trace."""
        if chunk.state is ChunkState.COPYING_FROM_DEVICE:
            self._write_from_device(chunk)
        if chunk.state is ChunkState.WRITING:
            try:
                self._wait("write", chunk, why)
            except OSError as error:  # all transfers have ended; after Ctrl-C they have not, and still own the lease
                del self._writing[chunk]
                self._lose(chunk, error)
                raise
            del self._writing[chunk]
            self._give_back(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Drop the staged bytes of a chunk, after its transfers and copies have ended. A failed read is only logged."""
        if chunk.state is ChunkState.READING:
            self._finish_unneeded_read(chunk, "which is dropped")
        if chunk.state is ChunkState.STAGED:
            self.wait_copied(chunk)
            self._staged.discard(chunk)
            self._give_back(chunk)
        elif chunk.state is ChunkState.COPYING_TO_DEVICE:
            self._end_h2d(chunk)

    def drop_all(self) -> None:
        """Drop all staged chunks that are not in use."""
        for chunk in [*self._leased]:
            self.drop(chunk)

    def settle_all(self) -> None:
        """Wait for all writes. Raises the first failure, after all have ended."""
        failure: OSError | None = None
        while left := self._from_device or self._writing:
            chunk = next(iter(left))
            try:
                self.settle(chunk)
            except OSError as error:
                failure = failure or error
            left.pop(chunk, None)  # may still be here if an exception interrupted `settle` after the write
        if failure is not None:
            raise failure

    def reap(self) -> bool:
        """Release leases of ended writes and copies. Returns True if any ended. Raises IoError if a write failed."""
        if self._from_device:
            self._write_arrived()
        ended = _ended(self._writing, Chunk.transfers_ended)
        for chunk in ended:
            self.settle(chunk)
        copied = _ended(self._to_device, Chunk.device_is_done)
        for chunk in copied:
            self._end_h2d(chunk)
        return bool(ended or copied)

    def make_room(self, nbytes: int, who: str) -> Lease:
        """Return a lease of `nbytes`; drops and waits for it as in [Note: What makes room] in schedule/readahead.py.

        Raises BudgetError, which names `who` and the budget, if that is not enough.
        """
        while (lease := self._pool.try_lease(nbytes)) is None:
            if self.reap():
                continue
            victim = self._staged.victim(writes_in_flight=bool(self._writing or self._from_device))
            if victim is not None:
                self.drop(victim)
            elif self._writing:
                self.settle(next(iter(self._writing)), f"for room for {who}")
            elif self._from_device:
                self._write_from_device(next(iter(self._from_device)))
            elif self._to_device:
                self._end_h2d(next(iter(self._to_device)))
            else:
                raise _too_small(self._pool, nbytes, who)
        return lease

    def recover(self, keep: Iterable[Lease]) -> None:
        """Free all chunks after an exception at any line of this stager, except those with a lease in `keep`.

        Waits for all transfers of the engine; raises no IoError. Writes are then on the drive, or lost (`on_lost`). All
        leases of the pool except `keep` go back. A chunk keeps its home, but not the contents.
        """
        leases = [*keep]
        self._engine.drain()
        for chunk in [*self._leased]:
            if chunk.lease is not chunk.home and any(chunk.lease is lease for lease in leases):
                continue
            if chunk.state is ChunkState.COPYING_FROM_DEVICE:
                with contextlib.suppress(OSError):  # reported by `on_lost`
                    self._write_from_device(chunk)
            try:
                self._engine.wait(chunk.transfers)
            except OSError as error:
                if chunk.state is ChunkState.WRITING:  # an abandoned read needs no cleanup
                    self.io.forget_sums(chunk)
                    if chunk.on_lost is not None:
                        chunk.on_lost(str(error))
            self.wait_copied(chunk)
            chunk.forget_lease()
            self._leased.pop(chunk, None)
        for chunk in [chunk for chunk in self._staged if chunk.state is ChunkState.ON_NVME]:
            self._staged.discard(chunk)
        for chunks in (self._from_device, self._writing, self._to_device):
            for chunk in [chunk for chunk in chunks if chunk.state is ChunkState.ON_NVME]:
                del chunks[chunk]
        self.readahead.follow(in_turn(()))
        self._pool.reclaim(leases)

    def _start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> None:
        if self.timeline is not None:
            self.timeline.starting(chunk.name, len(chunk.reads))
        self._leased[chunk] = None
        try:
            transfers = self.io.start_read(chunk, lease, priority)
        except BaseException:
            if lease is not chunk.home:
                lease.give_back()
            del self._leased[chunk]
            raise
        if chunk.fills:
            with measured(self.timeline, "copy", chunk.name):
                for start, elements in chunk.fills:
                    lease.view(elements.dtype, start, elements.numel()).copy_(elements)
        chunk.lease, chunk.transfers, chunk.unverified = lease, transfers, chunk.verified_by_caller
        chunk.move_to(ChunkState.READING)
        if chunk.home is None:  # dropping a chunk with a home frees no room
            self.readahead.stage(chunk)

    def _finish_read(self, chunk: Chunk, why: str = "") -> None:
        try:
            self._wait("read", chunk, why)
        except OSError:
            self._staged.discard(chunk)
            self._give_back(chunk)
            raise
        chunk.transfers = []
        chunk.move_to(ChunkState.STAGED)

    def _finish_unneeded_read(self, chunk: Chunk, why: str = "") -> None:
        """Finish a read that is not waited for: like `_finish_read`, but a failure is only logged."""
        try:
            self._finish_read(chunk, why)
        except OSError as error:
            log.warning("prefetch failed: %s", str(error))  # not the error itself, which would hold its frames

    def _write_arrived(self) -> None:
        """Start to write the chunks that the device has delivered."""
        for chunk in _ended(self._from_device, Chunk.device_is_done):
            self._write_from_device(chunk)

    def _write_from_device(self, chunk: Chunk) -> None:
        self.wait_copied(chunk)
        self._from_device.pop(chunk, None)  # absent if `recover` repeats an interrupted call
        self._start_write(chunk)

    def _start_write(self, chunk: Chunk) -> None:
        if self.timeline is not None:
            self.timeline.starting(chunk.name, len(chunk.writes))
        try:
            chunk.transfers = self.io.start_write(chunk)
        except BaseException as error:
            self._lose(chunk, error)
            raise
        for span in chunk.writes:
            self.io.arena.count_write(span.offset, span.nbytes)
        chunk.move_to(ChunkState.WRITING)
        self._writing[chunk] = None

    def _lose(self, chunk: Chunk, error: BaseException) -> None:
        """Handle a failed write: it is unknown which bytes were written."""
        try:
            self.io.forget_sums(chunk)
        finally:
            self._give_back(chunk)
            if chunk.on_lost is not None:
                chunk.on_lost(in_words(error))

    def _wait(self, operation: str, chunk: Chunk, why: str) -> None:
        where = f"the {operation} of {chunk.name}" + (f", {why}" if why else "")
        with self.timeline.stall(where) if self.timeline is not None else contextlib.nullcontext():
            self.io.wait(chunk, with_team=not self.device.is_discrete)

    def _end_h2d(self, chunk: Chunk) -> None:
        self.wait_copied(chunk)
        del self._to_device[chunk]
        self._give_back(chunk)

    def _give_back(self, chunk: Chunk) -> None:
        """Give the chunk's lease back; none of its transfers is in flight."""
        lease = chunk.lease
        assert lease is not None
        chunk.forget_lease()
        if lease is not chunk.home:
            lease.give_back()
        del self._leased[chunk]
        self.readahead.unstage(chunk)


def _ended(chunks: Iterable[Chunk], has_ended: Callable[[Chunk], bool]) -> list[Chunk]:
    """Return the chunks that have ended, looking at a limited number of others."""
    ended: list[Chunk] = []
    left = _IN_FLIGHT_SEEN_MAX
    for chunk in chunks:
        if has_ended(chunk):
            ended.append(chunk)
        elif not (left := left - 1):
            break
    return ended


def _too_small(pool: PinnedPool | PoolPart, nbytes: int, who: str) -> BudgetError:
    return BudgetError(
        f"{who} needs {format_bytes(nbytes)} of the pinned pool at once, which holds {format_bytes(pool.nbytes)}, "
        f"{format_bytes(pool.leased_bytes)} of them in use: raise pinned_bytes_max to at least "
        f"{format_bytes(pool.leased_bytes + 3 * nbytes)}"
    )
