"""The stager: brings chunks into leases and back. Mechanism only; what to stage next is decided elsewhere.

[Note: Why nobody waits for ever]
A chunk with a lease is in one of six states. READING and WRITING end by themselves. COPYING_TO_DEVICE ends when the device has
copied, and COPYING_FROM_DEVICE becomes WRITING then. STAGED may be dropped at any time. Only IN_USE lasts as long as its user
wants, and the users are few: the groups that FSDP2 copies (two at most, however many it prefetches: see [Note: When a group has
been copied] in parameter_lap.py), or the sub-groups of one optimizer step that were read and not yet updated. The budget
(infinity/swap/plan.py) holds these and enough holes around them for the next. So a demand finds room, or makes it by dropping
and waiting; it fails only where the caller breaks the sum.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from infinity.aio import IoEngine, Lease, PinnedPool, PoolPart, Priority
from infinity.device import CopyEvent, Device
from infinity.errors import BudgetError
from infinity.schedule.readahead import ReadAhead, in_turn
from infinity.store.arena import Arena
from infinity.swap.chunk import Chunk, ChunkIo, ChunkState
from infinity.swap.timeline import Timeline, measured
from infinity.units import format_bytes

log = logging.getLogger("infinity")

_IN_FLIGHT_SEEN_MAX = 64
"""Transfers in flight after which nobody looks for one that has ended: more than a drive has in flight."""


class Stager:
    """Moves chunks between one arena and one pool. Used by one thread at a time."""

    def __init__(self, engine: IoEngine, pool: PinnedPool | PoolPart, arena: Arena, device: Device) -> None:
        self._engine, self._pool = engine, pool
        self.io, self.device = ChunkIo(engine, arena), device
        self._leased: dict[Chunk, None] = {}
        """All chunks that hold a lease, or were about to when an exception came."""
        self.readahead: ReadAhead[Any] = ReadAhead(self._leased, Chunk)
        """Says which chunks are wanted; its `staged` are those that are READING or STAGED and have no home."""
        self._staged = self.readahead.staged
        self._from_device: OrderedDict[Chunk, None] = OrderedDict()
        self._writing: OrderedDict[Chunk, None] = OrderedDict()
        self._to_device: OrderedDict[Chunk, None] = OrderedDict()
        self.demand_reads = 0
        """Reads that nobody had started before they were needed."""
        self.timeline: Timeline | None = None
        """Where events are noted while a trace runs."""

    def close(self) -> None:
        """Let go of pool, engine and arena: a paged model knows its stager, and outlives them. Of no use after this."""
        del self._engine, self._pool, self.io

    @contextlib.contextmanager
    def stalling(self, why: str) -> Iterator[None]:
        """A block in which the training thread waits for a drive, but not in a transfer of this stager; it counts as stall."""
        with self._engine.stalling(), measured(self.timeline, "stall", why):
            yield

    def want(self, chunks: Sequence[Chunk] | None = None) -> None:
        """Start to read the wanted chunks that are on NVMe, soonest needed first, while they fit. `chunks`: from now on these
        are wanted, in this order."""
        if self._from_device:
            self._write_arrived()
        if chunks is not None:
            self.readahead.follow(in_turn(chunks))
        for chunk in self.readahead.to_read():
            if not self.prefetch(chunk):
                break

    def prefetch(self, chunk: Chunk) -> bool:
        """Start to read a chunk if that waits for nothing and drops nothing wanted. Returns whether the read was started."""
        if not self.may_be_read(chunk):
            return False
        lease = chunk.home or self._pool.try_lease(chunk.lease_bytes)
        if lease is None:
            self.reap()
            lease = self._pool.try_lease(chunk.lease_bytes)
        while lease is None:
            unwanted = self._staged.oldest_unwanted(lambda chunk: chunk.transfers_ended and chunk.device_is_done)
            if unwanted is None:
                return False
            self.drop(unwanted)
            lease = self._pool.try_lease(chunk.lease_bytes)
        self._start_read(chunk, lease, Priority.PREFETCH)
        return True

    def acquire(self, chunk: Chunk) -> Lease:
        """The chunk's bytes in a lease, for the caller alone until `release` or `write_back`. Waits as long as it takes.

        A chunk that is `verified_by_caller` may come `unverified`: then the caller verifies it, or `io.verify` does.
        Raises IoError when the read failed (the lease is back in the pool then), BudgetError when the pool can't hold it.
        """
        if chunk.is_unwritten:
            self.settle(chunk)
        if chunk.early:
            self.drop(chunk)
        if chunk.writes:  # they may be changed now: the device must have copied them
            self.wait_copied(chunk)
        if chunk.state is ChunkState.ON_NVME:
            self.wait_until_readable(chunk)
            self.demand_reads += bool(chunk.reads)
            lease = chunk.home or self.make_room(chunk.lease_bytes, chunk.name)
            self._start_read(chunk, lease, Priority.DEMAND)
        if chunk.state is ChunkState.READING:
            self._finish_read(chunk)
        assert chunk.state is not ChunkState.IN_USE and chunk.lease is not None, f"{chunk.name} is already in use"
        if chunk.state is ChunkState.STAGED:
            self._staged.discard(chunk)
        else:
            del self._to_device[chunk]
        chunk.move_to(ChunkState.IN_USE)
        return chunk.lease

    def may_be_read(self, chunk: Chunk) -> bool:
        """Whether the arena holds the bytes that a read of the chunk must bring. Never blocks."""
        if chunk.awaits_write():
            self.reap()
        return not chunk.awaits_write()

    def wait_until_readable(self, chunk: Chunk) -> None:
        """Wait until the arena holds the bytes that a read of the chunk must bring. Raises IoError when their write failed."""
        for other in chunk.after:
            self.settle(other, f"before the read of {chunk.name}")

    def is_ready(self, chunk: Chunk) -> bool:
        """Whether a chunk is staged, so that `acquire` waits for nothing. A read ahead that failed is only logged."""
        if chunk.state is ChunkState.READING and chunk.transfers_ended:
            self._finish_unneeded_read(chunk)
        return chunk.state is ChunkState.STAGED and not chunk.early and (not chunk.writes or chunk.device_is_done)

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
        """The caller is done. The lease matches the arena, or will once the writes in flight have ended: keep it staged, or
        give it back once the device has copied it.

        `copy_event`: fires when the device has taken the bytes over; all that it took so far where None.
        """
        chunk.sums = None
        copy_event = copy_event or self.device.copy_event()
        chunk.copy_event = None if copy_event.done() else copy_event
        if keep:
            chunk.move_to(ChunkState.STAGED)
            self._may_drop(chunk)
        elif chunk.copy_event is None:
            self._give_back(chunk)
        else:
            chunk.move_to(ChunkState.COPYING_TO_DEVICE)
            self._to_device[chunk] = None

    def write_back(self, chunk: Chunk, *, copy_event: CopyEvent | None = None) -> None:
        """The caller changed the bytes: write them in the background; the lease comes back when they are on the drive.

        `copy_event`: fires when the device has brought them. Nobody waits for it: the write starts with the first call of this
        stager that finds it fired. Raises IoError where the engine starts nothing any more; the new bytes are lost then.
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
        """The bytes of a chunk are about to change in its lease: wait until the device has copied what it takes of them."""
        if chunk.copy_event is not None:
            with measured(self.timeline, "copy", chunk.name):
                chunk.copy_event.wait()
            chunk.copy_event = None

    def settle(self, chunk: Chunk, why: str = "") -> None:
        """Wait until what is to be written of a chunk is on the drive. Raises IoError when that failed. `why`: for a trace."""
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
            self._give_back(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Forget the staged bytes of a chunk, once nothing reads into or out of them. A read that failed is only logged."""
        if chunk.state is ChunkState.READING:
            self._finish_unneeded_read(chunk, "which is dropped")
        if chunk.state is ChunkState.STAGED:
            self.wait_copied(chunk)
            self._staged.discard(chunk)
            self._give_back(chunk)
        elif chunk.state is ChunkState.COPYING_TO_DEVICE:
            self._end_h2d(chunk)

    def drop_all(self) -> None:
        """Forget everything that is staged and nobody uses."""
        for chunk in [*self._leased]:
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
        if self._from_device:
            self._write_arrived()
        ended = _ended(self._writing, lambda chunk: chunk.transfers_ended)
        for chunk in ended:
            self.settle(chunk)
        copied = _ended(self._to_device, lambda chunk: chunk.device_is_done)
        for chunk in copied:
            self._end_h2d(chunk)
        return bool(ended or copied)

    def make_room(self, nbytes: int, who: str) -> Lease:
        """A lease of `nbytes`, waiting and dropping for it as [Note: What makes room] in schedule/readahead.py says.

        Raises BudgetError, which names `who` and the budget, where all of that is not enough.
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
        """Free every chunk but those of others, with a lease in `keep`, wherever in this stager an exception came. Raises no
        IoError. One that has a home keeps that, and nothing in it.

        Waits for all transfers of the engine. What was to be written is on the drive after this, or lost (`on_lost`). All
        leases of the pool but `keep` go back.
        """
        leases = [*keep]
        self._engine.drain()
        for chunk in [*self._leased]:
            if chunk.lease is not chunk.home and any(chunk.lease is lease for lease in leases):
                continue
            if chunk.state is ChunkState.COPYING_FROM_DEVICE:
                with contextlib.suppress(OSError):  # is told by `on_lost`
                    self._write_from_device(chunk)
            try:
                self._engine.wait(chunk.transfers)
            except OSError as error:
                if chunk.state is ChunkState.WRITING:  # a read is nobody's any more
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
        self._may_drop(chunk)

    def _may_drop(self, chunk: Chunk) -> None:
        if chunk.home is None:  # else dropping it leaves no room
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
        """As `_finish_read`, for a read that nobody waits for: a failure is only logged."""
        try:
            self._finish_read(chunk, why)
        except OSError as error:
            log.warning("a read ahead failed: %s", str(error))  # a record that holds the error would hold its frames

    def _write_arrived(self) -> None:
        """Start to write what the device has brought by now."""
        for chunk in _ended(self._from_device, lambda chunk: chunk.device_is_done):
            self._write_from_device(chunk)

    def _write_from_device(self, chunk: Chunk) -> None:
        self.wait_copied(chunk)
        self._from_device.pop(chunk, None)  # done already, where `recover` repeats what an exception ended
        self._start_write(chunk)

    def _start_write(self, chunk: Chunk) -> None:
        if self.timeline is not None:
            self.timeline.starting(chunk.name, len(chunk.writes))
        try:
            chunk.transfers = self.io.start_write(chunk)
        except BaseException as error:
            self._lose(chunk, error)
            raise
        self.io.count_writes(chunk)
        chunk.move_to(ChunkState.WRITING)
        self._writing[chunk] = None

    def _lose(self, chunk: Chunk, error: BaseException) -> None:
        """Nobody knows which of its bytes were written."""
        try:
            self.io.forget_sums(chunk)
        finally:
            self._give_back(chunk)
            if chunk.on_lost is not None:
                chunk.on_lost(str(error))

    def _wait(self, operation: str, chunk: Chunk, why: str) -> None:
        where = f"the {operation} of {chunk.name}" + (f", {why}" if why else "")
        with self.timeline.stall(where) if self.timeline is not None else contextlib.nullcontext():
            self.io.wait(chunk, with_team=not self.device.is_discrete)

    def _end_h2d(self, chunk: Chunk) -> None:
        self.wait_copied(chunk)
        del self._to_device[chunk]
        self._give_back(chunk)

    def _give_back(self, chunk: Chunk) -> None:
        """The lease goes back; no transfer of the chunk is in flight any more."""
        lease = chunk.lease
        assert lease is not None
        chunk.forget_lease()
        if lease is not chunk.home:
            lease.give_back()
        del self._leased[chunk]
        self.readahead.unstage(chunk)


def _ended(chunks: Iterable[Chunk], has_ended: Callable[[Chunk], bool]) -> list[Chunk]:
    """Those that have ended, up to some number of others."""
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
