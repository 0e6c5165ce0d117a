"""Floor 8. The stager: brings chunks into leases and back. Mechanism only; what to stage next is decided elsewhere.

[Note: Why nobody waits for ever]
Every lease is held by a chunk in one of six states. READING and WRITING end by themselves, LANDING ends when the device has
copied, ARRIVING becomes WRITING then, STAGED may be dropped at any time. Only IN_USE lasts as long as its user wants, and the
users are few: the groups being handed to FSDP2 (two at most, however many it prefetches: see [Note: When a group has been
copied] in manager.py), or the sub-groups of one optimizer step that were read and not yet updated. The budget
(infinity/swap/budget.py) holds these and enough holes around them for the next, so a demand either finds room, or makes it by
dropping and waiting; it fails only where the caller breaks the sum.

[Note: What a call costs]
Thousands of chunks may be wanted, staged and on their way, and each gather or update asks what to read and what to drop next.
So nothing here looks at all of them. What is next to be read, and what is the first to be dropped, stand in queues whose
entries are held against the state of their chunk when they come to the front: that state alone counts, the queues are made
from it anew whenever something else is wanted, and an entry that is missing costs a read on demand at most. And of transfers
that may have ended, a few are looked at: a drive ends them about in the order in which they began.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count

from infinity.aio import IoEngine, Lease, PinnedPool, PoolPart, Priority, Request
from infinity.device import CopyEvent, Device
from infinity.errors import BudgetError, IntegrityError, IoError
from infinity.store import Arena
from infinity.swap.chunk import Chunk, ChunkState, Span
from infinity.swap.timeline import Timeline, measured
from infinity.swap.wanted import Wanted
from infinity.units import format_bytes

log = logging.getLogger("infinity")

_UNENDED_LOOKED_AT = 64
"""Transfers that go on, past which nobody looks for one that has ended: more than a drive has in flight."""


class Stager:
    """Moves chunks between one arena and one pool. Used by one thread at a time."""

    def __init__(self, engine: IoEngine, pool: PinnedPool | PoolPart, arena: Arena, device: Device) -> None:
        self._engine = engine
        self._pool = pool
        self._arena = arena
        self.device = device
        self._leased: dict[Chunk, None] = {}
        """All chunks that hold a lease, or were about to when an exception came."""
        self._staged: OrderedDict[Chunk, int] = OrderedDict()
        """READING or STAGED, oldest first, and their numbers in that order."""
        self._from_device: OrderedDict[Chunk, None] = OrderedDict()
        self._writing: OrderedDict[Chunk, None] = OrderedDict()
        self._to_device: OrderedDict[Chunk, None] = OrderedDict()
        self._staged_so_far = count()
        self._blocked_by: dict[Chunk, int] = {}
        """By chunk that waits for the write of another one: the number of that in its `after`, when it was asked last."""
        self._wanted, _ = Wanted.of([])
        self._to_read = _Queue(self._key_to_read)
        self._unwanted = _Queue(self._key_unwanted)
        self._farthest = _Queue(self._key_farthest)
        self.demand_reads = 0
        """Reads that nobody had started before they were needed."""
        self.timeline: Timeline | None = None
        """Where what happens is noted, while a trace runs."""

    @contextlib.contextmanager
    def stalling(self, why: str) -> Iterator[None]:
        """A block in which the training thread waits for a drive otherwise than in a transfer; it counts as stall."""
        began = time.perf_counter()
        try:
            with measured(self.timeline, "stall", why):
                yield
        finally:
            self._engine.stall_seconds += time.perf_counter() - began

    @property
    def wanted(self) -> Wanted:
        """What is worth keeping staged, soonest needed first; the rest is dropped before it, and it from its end."""
        return self._wanted

    @wanted.setter
    def wanted(self, wanted: Wanted | Sequence[Chunk]) -> None:
        if not isinstance(wanted, Wanted):
            wanted, _ = Wanted.of(wanted)
        if wanted is not self._wanted:
            self._wanted = wanted
            self._queue_anew()
        else:
            for chunk in wanted.changed():
                self._queue(chunk)
        wanted.told()

    def want(self, chunks: Wanted | Sequence[Chunk]) -> None:
        """From now on these are worth having staged, soonest needed first: start reading what rests of them, while it fits."""
        self._write_arrived()
        self.wanted = chunks
        passed: list[Chunk] = []
        read_up_to: int | None = None
        try:
            while (chunk := self._to_read.first()) is not None:
                key = self._key_to_read(chunk)
                assert key is not None
                if read_up_to is not None and key < read_up_to:  # came to rest meanwhile: next time
                    passed.append(chunk)
                    self._to_read.pass_over()
                elif self.prefetch(chunk):
                    read_up_to = key
                else:
                    break
        finally:
            for chunk in passed:
                self._to_read.put(chunk)

    def prefetch(self, chunk: Chunk) -> bool:
        """Start reading a resting chunk if that takes no waiting and displaces nothing wanted. Whether it was started."""
        if not self.may_be_read(chunk):
            return False
        lease = self._pool.try_lease(chunk.lease_bytes)
        if lease is None:
            self.reap()
            lease = self._pool.try_lease(chunk.lease_bytes)
        while lease is None:
            idle = self._unwanted.first(_is_idle)
            if idle is None:
                return False
            self.drop(idle)
            lease = self._pool.try_lease(chunk.lease_bytes)
        self._start_read(chunk, lease, Priority.PREFETCH)
        return True

    def acquire(self, chunk: Chunk) -> Lease:
        """The chunk's bytes in a lease, for the caller alone until `release` or `write_back`. Waits as long as it takes.

        A chunk that is `verified_by_user` may come `unverified`: that is then the caller's to do, or `verify`'s.
        Raises IoError when the read failed (the lease is back in the pool then), BudgetError when the pool can't hold it.
        """
        if chunk.is_unwritten:
            self.settle(chunk)
        if chunk.copy_event is not None and chunk.writes:  # they may be changed now: the device must have copied them
            self._wait_copied(chunk)
            chunk.copy_event = None
        if chunk.state is ChunkState.COPYING_TO_DEVICE:
            del self._to_device[chunk]
            chunk.move_to(ChunkState.IN_USE)
            assert chunk.lease is not None
            return chunk.lease
        if chunk.state is ChunkState.ON_NVME:
            self.let_be_read(chunk)
            self.demand_reads += bool(chunk.reads)
            self._start_read(chunk, self.make_room(chunk.lease_bytes, chunk.name), Priority.DEMAND)
        if chunk.state is ChunkState.READING:
            self._finish_read(chunk)
        assert chunk.state is ChunkState.STAGED and chunk.lease is not None, f"{chunk.name} is already in use"
        del self._staged[chunk]
        chunk.move_to(ChunkState.IN_USE)
        return chunk.lease

    @property
    def checked(self) -> bool:
        """Whether the arena keeps checksums."""
        return self._arena.file.checked

    def expected_sums(self, span: Span) -> bytes:
        """What the pages of a span of the arena must hold, for who verifies them: as `infinity.aio.File.checksums`."""
        return self._arena.checksums(span.offset, span.nbytes)

    def verify(self, chunk: Chunk, only: Span | None = None) -> None:
        """Hold what was read of a chunk in use against its checksums, if nobody has yet; `only`: a part of it, in any case.

        Raises IntegrityError as a read that the engine verifies would have.
        """
        if not chunk.unverified and only is None:
            return
        assert chunk.lease is not None
        for span in chunk.reads if only is None else (only,):
            request = self._request("read", chunk.lease, span, Priority.DEMAND)
            try:
                self._engine.verify(request)
            except IntegrityError as error:
                self._arena.explain(error, chunk.name, at=span.offset)
                raise
        chunk.unverified = chunk.unverified and only is not None

    def may_be_read(self, chunk: Chunk) -> bool:
        """Whether the arena holds what a read of the chunk is to find; never blocks."""
        if self._is_blocked(chunk):
            self.reap()
        return not self._is_blocked(chunk)

    def let_be_read(self, chunk: Chunk) -> None:
        """Wait until the arena holds what a read of the chunk is to find. Raises IoError when a write of it failed."""
        for other in chunk.after:
            self.settle(other, f"before the read of {chunk.name}")

    def is_ready(self, chunk: Chunk) -> bool:
        """Whether a chunk is staged, so that `acquire` waits for nothing. A read ahead that failed is only logged."""
        if chunk.state is ChunkState.READING and all(t.done for t in chunk.transfers):
            try:
                self._finish_read(chunk)
            except OSError as error:
                log.warning("a read ahead failed: %s", str(error))  # who keeps the record keeps no frames
        return chunk.state is ChunkState.STAGED and (
            not chunk.writes or chunk.copy_event is None or chunk.copy_event.done()
        )

    def occupy(self, chunk: Chunk) -> Lease:
        """A lease for a chunk whose old bytes are not needed: as `acquire`, without the read."""
        self.settle(chunk)
        self.drop(chunk)
        lease = self.make_room(chunk.lease_bytes, chunk.name)
        self._leased[chunk] = None
        chunk.lease = lease
        chunk.move_to(ChunkState.IN_USE)
        return lease

    def release(self, chunk: Chunk, *, keep: bool, copy_event: CopyEvent | None = None) -> None:
        """The user is done and changed nothing: keep the bytes staged, or give the lease back once the device has copied them.

        `copy_event`: fires when the device has taken the bytes over; all that it took so far where None.
        """
        chunk.sums = None
        copy_event = copy_event or self.device.copy_event()
        chunk.copy_event = None if copy_event.done() else copy_event
        if keep:
            chunk.move_to(ChunkState.STAGED)
            self._stage(chunk)
        elif chunk.copy_event is None:
            self._rest(chunk)
        else:
            chunk.move_to(ChunkState.COPYING_TO_DEVICE)
            self._to_device[chunk] = None

    def write_back(self, chunk: Chunk, *, copy_event: CopyEvent | None = None) -> None:
        """The user changed the bytes: write them in the background; the lease comes back when they are on the drive.

        `copy_event`: fires when the device has brought them; nobody waits for it, and the write starts with the first call of
        this stager that finds it fired. Raises IoError where the engine starts nothing any more, then or now: the new bytes
        are lost then, and the lease is back.
        """
        self._write_arrived()
        assert chunk.lease is not None and chunk.copy_event is None
        if copy_event is None or copy_event.done():
            self._start_write(chunk)
            return
        chunk.copy_event = copy_event
        chunk.move_to(ChunkState.COPYING_FROM_DEVICE)
        self._from_device[chunk] = None

    def settle(self, chunk: Chunk, why: str = "") -> None:
        """Wait until a chunk that is to be written is on the drive; nothing to do for any other.

        `why`: for a trace. Raises IoError when the write failed.
        """
        if chunk.state is ChunkState.COPYING_FROM_DEVICE:
            self._write_from_device(chunk)
        if chunk.state is ChunkState.WRITING:
            try:
                self._wait("write", chunk, why)
            except OSError as error:  # all of them have ended; on Ctrl-C they have not, and the lease is still theirs
                del self._writing[chunk]
                self._lose(chunk, error)
                raise
            del self._writing[chunk]
            self._rest(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Forget the staged bytes of a chunk, waiting until nothing reads into or out of them.

        Nothing to do where none are staged. A read that failed is only logged: nobody wanted its bytes.
        """
        if chunk.state is ChunkState.READING:
            try:
                self._finish_read(chunk, "which is dropped")
            except OSError as error:
                log.warning("a read ahead failed: %s", str(error))  # who keeps the record keeps no frames
        if chunk.state is ChunkState.STAGED:
            if chunk.copy_event is not None:
                self._wait_copied(chunk)
            del self._staged[chunk]
            self._rest(chunk)
        elif chunk.state is ChunkState.COPYING_TO_DEVICE:
            self._end_h2d(chunk)

    def drop_all(self) -> None:
        """Forget everything that is staged and nobody uses."""
        for chunk in [*self._staged, *self._to_device]:
            self.drop(chunk)

    def settle_all(self) -> None:
        """Wait until everything written is on the drive. Raises the first failure, after all have ended."""
        failure: OSError | None = None
        while left := self._from_device or self._writing:
            chunk = next(iter(left))
            try:
                self.settle(chunk)
            except OSError as error:
                failure = failure or error
            left.pop(chunk, None)  # one that an exception left here after its write
        if failure is not None:
            raise failure

    def reap(self) -> bool:
        """Take back what has ended by itself; whether anything had. Raises IoError where a write failed."""
        self._write_arrived()
        ended = _ended(self._writing, lambda chunk: all(t.done for t in chunk.transfers))
        for chunk in ended:
            self.settle(chunk)
        copied = _ended(self._to_device, _is_copied)
        for chunk in copied:
            self._end_h2d(chunk)
        return bool(ended or copied)

    def make_room(self, nbytes: int, who: str) -> Lease:
        """A lease of `nbytes`. What is staged and not wanted is dropped for it, then writes are waited for, then what is wanted
        is dropped, last needed first: it would have to be read again.

        Raises BudgetError, naming `who` and the budget, where all of that is not enough.
        """
        while (lease := self._pool.try_lease(nbytes)) is None:
            if self.reap():
                continue
            if (unwanted := self._unwanted.first()) is not None:
                self.drop(unwanted)
            elif self._writing:
                self.settle(next(iter(self._writing)), f"for room for {who}")
            elif self._from_device:
                self._write_from_device(next(iter(self._from_device)))
            elif (last := self._farthest.first()) is not None:
                self.drop(last)
            elif self._staged:  # an entry was lost
                self._queue_anew()
            elif self._to_device:
                self._end_h2d(next(iter(self._to_device)))
            else:
                raise BudgetError(
                    f"{who} needs {format_bytes(nbytes)} of the pinned pool at once, which holds "
                    f"{format_bytes(self._pool.nbytes)}, {format_bytes(self._pool.leased_bytes)} of them in use: raise "
                    f"pinned_bytes_max (host_bytes_max) to at least {format_bytes(self._pool.leased_bytes + 3 * nbytes)}"
                )
        return lease

    def recover(self, keep: Iterable[Lease]) -> None:
        """Bring every chunk to rest, but for those with a lease in `keep`, at whatever line an exception ended this stager.

        What was read is dropped, and what is to be written is on the drive after this, or lost (`on_lost`). Every lease of the
        pool goes back but `keep`. Waits for all transfers of the engine; raises no IoError.
        """
        kept = [*keep]
        self._engine.drain()
        for chunk in [*self._leased]:
            if any(chunk.lease is lease for lease in kept):
                continue
            if chunk.state is ChunkState.COPYING_FROM_DEVICE:
                with contextlib.suppress(OSError):  # is told by `on_lost`
                    self._write_from_device(chunk)
            if chunk.state is ChunkState.WRITING:
                try:
                    self._engine.wait(chunk.transfers)
                except OSError as error:
                    self._forget_sums(chunk)
                    if chunk.on_lost is not None:
                        chunk.on_lost(str(error))
            if chunk.copy_event is not None:
                chunk.copy_event.wait()
            chunk.forget_lease()
            self._leased.pop(chunk, None)
        for chunks in (self._staged, self._from_device, self._writing, self._to_device):
            for chunk in [chunk for chunk in chunks if chunk.state is ChunkState.ON_NVME]:
                del chunks[chunk]
        self._blocked_by.clear()
        self._wanted, _ = Wanted.of([])
        self._queue_anew()
        self._pool.reclaim(kept)

    def _key_to_read(self, chunk: Chunk) -> int | None:
        return self._wanted.key(chunk) if chunk.state is ChunkState.ON_NVME else None

    def _key_unwanted(self, chunk: Chunk) -> int | None:
        return self._staged.get(chunk) if self._wanted.key(chunk) is None else None

    def _key_farthest(self, chunk: Chunk) -> int | None:
        key = self._wanted.key(chunk) if chunk in self._staged else None
        return -key if key is not None else None

    def _queue(self, chunk: Chunk) -> None:
        """The chunk may belong into other queues than before: its state has changed, or when it is needed."""
        self._to_read.put(chunk)
        self._unwanted.put(chunk)
        self._farthest.put(chunk)

    def _queue_anew(self) -> None:
        self._to_read.fill(self._wanted)
        self._unwanted.fill(self._staged)
        self._farthest.fill(self._staged)

    def _stage(self, chunk: Chunk) -> None:
        self._staged[chunk] = next(self._staged_so_far)
        self._queue(chunk)

    def _is_blocked(self, chunk: Chunk) -> bool:
        """Whether the write of another one must end before it is read. They are written about in order: asks the last one
        first."""
        last = self._blocked_by.get(chunk, 0)
        for number in chain(range(last, len(chunk.after)), range(last)):
            if chunk.after[number].is_unwritten:
                self._blocked_by[chunk] = number
                return True
        self._blocked_by.pop(chunk, None)
        return False

    def _start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> None:
        if self.timeline is not None:
            self.timeline.starting(chunk.name, len(chunk.reads))
        self._leased[chunk] = None
        try:
            transfers = self._engine.start(
                self._requests("read", chunk, lease, priority), sums_by_caller=chunk.verified_by_user
            )
        except BaseException:
            lease.give_back()
            raise
        if chunk.fills:
            with measured(self.timeline, "copy", chunk.name):
                for start, elements in chunk.fills:
                    lease.view(elements.dtype, start, elements.numel()).copy_(elements)
        chunk.lease, chunk.transfers, chunk.unverified = lease, transfers, chunk.verified_by_user
        chunk.move_to(ChunkState.READING)
        self._stage(chunk)

    def _finish_read(self, chunk: Chunk, why: str = "") -> None:
        try:
            self._wait("read", chunk, why)
        except OSError:
            del self._staged[chunk]
            self._rest(chunk)
            raise
        chunk.transfers = []
        chunk.move_to(ChunkState.STAGED)

    def _write_arrived(self) -> None:
        """Start to write what the device has brought by now."""
        for chunk in _ended(self._from_device, _is_copied):
            self._write_from_device(chunk)

    def _write_from_device(self, chunk: Chunk) -> None:
        self._wait_copied(chunk)
        del self._from_device[chunk]
        chunk.copy_event = None
        self._start_write(chunk)

    def _start_write(self, chunk: Chunk) -> None:
        assert chunk.lease is not None
        if self.timeline is not None:
            self.timeline.starting(chunk.name, len(chunk.writes))
        summed = chunk.sums is not None
        try:
            if chunk.sums is not None:
                (span,) = chunk.writes
                self._arena.set_checksums(span.offset, chunk.sums)
            requests = self._requests("write", chunk, chunk.lease, Priority.WRITE_BACK)
            chunk.transfers = self._engine.start(requests, sums_by_caller=summed)
        except BaseException as error:
            self._lose(chunk, error)
            raise
        for span in chunk.writes:
            self._arena.count_write(span.offset, span.nbytes)
        chunk.move_to(ChunkState.WRITING)
        self._writing[chunk] = None

    def _lose(self, chunk: Chunk, error: BaseException) -> None:
        """Nobody knows which of its bytes were written."""
        try:
            self._forget_sums(chunk)
        finally:
            self._rest(chunk)
            if chunk.on_lost is not None:
                chunk.on_lost(str(error))

    def _forget_sums(self, chunk: Chunk) -> None:
        if chunk.sums is not None:
            (span,) = chunk.writes
            self._arena.set_checksums(span.offset, bytes(len(chunk.sums)))

    def _wait(self, operation: str, chunk: Chunk, why: str) -> None:
        try:
            if self.timeline is None:
                self._engine.wait(chunk.transfers)
                return
            with self.timeline.stall(f"the {operation} of {chunk.name}" + (f", {why}" if why else "")):
                self._engine.wait(chunk.transfers)
        except IntegrityError as error:
            self._arena.explain(error, chunk.name)
            raise
        except IoError as error:
            error.concerning(chunk.name)
            raise

    def _wait_copied(self, chunk: Chunk) -> None:
        assert chunk.copy_event is not None
        with measured(self.timeline, "copy", chunk.name):
            chunk.copy_event.wait()

    def _requests(self, operation: str, chunk: Chunk, lease: Lease, priority: Priority) -> list[Request]:
        spans: tuple[Span, ...] = chunk.reads if operation == "read" else chunk.writes
        return [self._request(operation, lease, span, priority) for span in spans]

    def _request(self, operation: str, lease: Lease, span: Span, priority: Priority) -> Request:
        return Request(operation, self._arena.file, span.offset, lease, span.lease_offset, span.nbytes, priority)

    def _end_h2d(self, chunk: Chunk) -> None:
        self._wait_copied(chunk)
        del self._to_device[chunk]
        self._rest(chunk)

    def _rest(self, chunk: Chunk) -> None:
        """The lease goes back and the chunk rests. No transfer of it is in flight any more."""
        lease = chunk.lease
        assert lease is not None
        chunk.forget_lease()
        lease.give_back()
        del self._leased[chunk]
        self._to_read.put(chunk)


class _Queue:
    """Chunks by a number that follows from their state, the least first: see [Note: What a call costs].

    key: a chunk's number, None for one that doesn't belong here; a method of its owner, whom it must not keep.
    """

    def __init__(self, key: Callable[[Chunk], int | None]) -> None:
        self._method = weakref.WeakMethod(key)
        self._entries: list[tuple[int, int, Chunk]] = []
        self._count = count()
        """Where numbers are equal, of which one is out of date, chunks are not compared."""
        self._compact_at = 64

    @property
    def _key(self) -> Callable[[Chunk], int | None]:
        key = self._method()
        assert key is not None
        return key

    def put(self, chunk: Chunk) -> None:
        """One that may belong here now, or at another place."""
        key = self._key(chunk)
        if key is not None:
            heapq.heappush(self._entries, (key, next(self._count), chunk))
            if len(self._entries) > self._compact_at:
                self.fill(dict.fromkeys(chunk for _, _, chunk in self._entries))

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Those of these that belong here, and nothing else."""
        key_of = self._key
        entries = [(key, number, chunk) for number, chunk in enumerate(chunks) if (key := key_of(chunk)) is not None]
        heapq.heapify(entries)
        self._entries, self._count = entries, count(len(entries))
        self._compact_at = 64 + 2 * len(entries)

    def first(self, fitting: Callable[[Chunk], bool] = lambda chunk: True) -> Chunk | None:
        """The first that is `fitting`; it stays here."""
        passed: list[tuple[int, int, Chunk]] = []
        chosen = None
        while self._entries and chosen is None:
            key, _, chunk = self._entries[0]
            if self._key(chunk) != key:
                heapq.heappop(self._entries)
            elif fitting(chunk):
                chosen = chunk
            else:
                passed.append(heapq.heappop(self._entries))
        for entry in passed:
            heapq.heappush(self._entries, entry)
        return chosen

    def pass_over(self) -> None:
        """Take the first out."""
        heapq.heappop(self._entries)


def _ended(chunks: Iterable[Chunk], has_ended: Callable[[Chunk], bool]) -> list[Chunk]:
    """Those that have ended; not past too many that go on."""
    ended: list[Chunk] = []
    left = _UNENDED_LOOKED_AT
    for chunk in chunks:
        if has_ended(chunk):
            ended.append(chunk)
        elif not (left := left - 1):
            break
    return ended


def _is_copied(chunk: Chunk) -> bool:
    return chunk.copy_event is not None and chunk.copy_event.done()


def _is_idle(chunk: Chunk) -> bool:
    """Whether dropping a staged chunk takes no waiting."""
    return all(t.done for t in chunk.transfers) and (chunk.copy_event is None or chunk.copy_event.done())
