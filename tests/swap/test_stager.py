"""What the stager promises: bytes arrive whole or not at all, every lease comes back, and every wait ends.

Over the real backends where bytes on a drive matter; over an engine in memory, whose transfers end when the test says so
and fail when it says so, where order and faults do.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity.aio import IoEngine, Lease, PinnedPool, Priority, Request
from infinity.device import Device
from infinity.errors import BudgetError, IoError
from infinity.schedule.readahead import in_turn
from infinity.store.arena import Arena
from infinity.store.run_folder import RunFolder
from infinity.swap.stager import Chunk, ChunkState, Span, Stager

PAGE = 4096
POISON = 0xEE


class ScriptedTransfer:
    """Moves its bytes when it ends, not before: reusing the lease too early spoils them, and the test sees it."""

    def __init__(self, engine: ScriptedEngine, request: Request) -> None:
        self.engine = engine
        self.request = request
        self.done = False
        self.failure: IoError | None = None
        self.waited = False
        self.waited_with_team: bool | None = None

    def end(self, failure: IoError | None = None) -> None:
        assert not self.done
        request = self.request
        assert request.lease.held, f"{request.operation} in flight into a lease that was given back"
        place = slice(request.offset, request.offset + request.length)
        staged = request.lease.view(torch.uint8, request.lease_offset, request.length)
        arena = self.engine.arena_bytes[place]
        if request.operation == "read":
            staged.copy_(arena)
        else:
            arena.copy_(staged)
        if failure is not None:
            (staged if request.operation == "read" else arena).fill_(POISON)
        self.done, self.failure = True, failure

    def wait(self, *, with_team: bool) -> None:
        self.waited_with_team = with_team
        if not self.done:
            self.waited = True
            self.end(self.engine.failure_of(self.request))
        if self.failure is not None:
            raise self.failure


class ScriptedEngine:
    """As infinity.aio.IoEngine, with a drive in memory. A transfer ends when it is waited for, or when told to."""

    def __init__(self, arena_pages: int) -> None:
        self.arena_bytes = torch.zeros(arena_pages * PAGE, dtype=torch.uint8)
        self.transfers: list[ScriptedTransfer] = []
        self.failing: Callable[[Request], bool] = lambda request: False
        self.stall_seconds = 0.0

    def start(self, requests: Sequence[Request], *, sums_by_caller: bool = False) -> list[ScriptedTransfer]:
        assert not sums_by_caller, "no chunk here is verified by its user"
        assert all(request.lease.held for request in requests)
        started = [ScriptedTransfer(self, request) for request in requests]
        self.transfers += started
        return started

    wait, stalling = IoEngine.wait, IoEngine.stalling

    def failure_of(self, request: Request) -> IoError | None:
        if not self.failing(request):
            return None
        return IoError(f"{request.operation} at {request.offset}: EIO", errno.EIO, request.operation)

    @property
    def pending(self) -> list[ScriptedTransfer]:
        return [transfer for transfer in self.transfers if not transfer.done]

    def end_all(self) -> None:
        for transfer in self.pending:
            transfer.end(self.failure_of(transfer.request))


class Scripted:
    """A copy event that fires when the script says so, or at a wait."""

    def __init__(self, *, fired: bool) -> None:
        self.fired, self.waited = fired, False

    def done(self) -> bool:
        return self.fired

    def wait(self) -> None:
        self.waited = self.waited or not self.fired
        self.fire()

    def fire(self) -> None:
        self.fired = True


class ScriptedLanding(Scripted):
    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(fired=not copies)
        self.copies = copies

    def fire(self) -> None:
        """The device copies only now: the bytes must still be those it was given."""
        self.fired = True
        for staged, given in self.copies:
            assert torch.equal(staged, given), "staged bytes changed before the device had copied them"
        self.copies.clear()


class ScriptedArrival(Scripted):
    """A device that brings new bytes late: until it fires, the lease holds what must not be written."""

    def __init__(self, lease: Lease, value: int) -> None:
        super().__init__(fired=False)
        self.lease, self.value = lease, value
        lease.view(torch.uint8).fill_(POISON)

    def fire(self) -> None:
        if not self.fired:
            assert self.lease.held, "the device copies into a lease that was given back"
            self.lease.view(torch.uint8).fill_(self.value)
            self.fired = True


class ScriptedDevice(Device):
    """A device that copies late. One queue of copies: a copy event covers all that were taken before it."""

    is_discrete = True

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copy_events: list[ScriptedLanding | ScriptedArrival] = []

    def take(self, staged: torch.Tensor) -> torch.Tensor:
        self.queue.append((staged, staged.clone()))
        return self.queue[-1][1]

    def copy_event(self) -> ScriptedLanding:
        copy_event = ScriptedLanding(self.queue)
        self.copy_events.append(copy_event)
        return copy_event


@dataclass
class Bench:
    """A stager over a pool of `pool_pages`, with chunks that lie one behind the other in the arena."""

    engine: Any
    pool: PinnedPool
    arena: Any
    device: ScriptedDevice
    stager: Stager
    chunks: list[Chunk] = field(default_factory=list)
    end: int = 0

    def chunk(self, pages: int = 1, *, after: tuple[Chunk, ...] = ()) -> Chunk:
        nbytes = pages * PAGE
        span = (Span(self.end, 0, nbytes),)
        self.end += nbytes
        self.chunks.append(Chunk(f"chunk {len(self.chunks)}", nbytes, span, span, after))
        return self.chunks[-1]

    def write(self, chunk: Chunk, value: int) -> None:
        """Start to write `value` into all bytes of the chunk."""
        self.stager.occupy(chunk).view(torch.uint8).fill_(value)
        self.stager.write_back(chunk)

    def write_late(self, chunk: Chunk, value: int) -> ScriptedArrival:
        """The same with a device that brings them when it fires."""
        copy_event = ScriptedArrival(self.stager.occupy(chunk), value)
        self.stager.write_back(chunk, copy_event=copy_event)
        return copy_event

    def read(self, chunk: Chunk) -> list[int]:
        """The distinct bytes of the chunk."""
        lease = self.stager.acquire(chunk)
        found: list[int] = lease.view(torch.uint8).unique().tolist()
        self.stager.release(chunk, keep=False)
        return found

    def is_clean(self) -> bool:
        return self.pool.leased_bytes == 0 and all(
            chunk.state is ChunkState.ON_NVME and chunk.lease is None for chunk in self.chunks
        )


def scripted(pool_pages: int = 8, arena_pages: int = 64) -> Bench:
    engine = ScriptedEngine(arena_pages)
    pool = PinnedPool(pool_pages * PAGE)
    arena = SimpleNamespace(file="arena", count_write=lambda offset, nbytes: None)
    device = ScriptedDevice()
    stager = Stager(cast(IoEngine, engine), pool, cast(Arena, arena), device)
    return Bench(engine, pool, arena, device, stager)


@pytest.fixture
def bench() -> Bench:
    return scripted()


@pytest.fixture
def real(backend: str, nvme_path: Path) -> Iterator[Bench]:
    folder = RunFolder(nvme_path)
    pool = PinnedPool(8 * PAGE)
    engine = IoEngine(pool, backend=backend, block_bytes=2 * PAGE)
    arena = Arena(folder, engine, name="rank0.arena")
    arena.reserve([64 * PAGE], "the test")
    device = ScriptedDevice()
    yield Bench(engine, pool, arena, device, Stager(engine, pool, arena, device))
    engine.close()
    arena.close()
    folder.close()


# On a drive.


def test_write_then_read_of_the_same_chunk_sees_the_new_bytes(real: Bench) -> None:
    chunk = real.chunk(5)
    for value in (1, 2, 3):
        real.write(chunk, value)
        assert real.read(chunk) == [value]
    real.stager.settle_all()
    assert real.is_clean()


@pytest.mark.parametrize("is_discrete", [False, True])
def test_a_thread_that_computes_on_the_cpu_waits_with_its_team(is_discrete: bool, bench: Bench) -> None:
    """On a GPU there is none: OpenMP's threads have other work, or none."""
    bench.device.is_discrete = is_discrete
    bench.read(bench.chunk())
    assert [transfer.waited_with_team for transfer in bench.engine.transfers] == [not is_discrete]


def test_chunk_of_many_spans_is_gathered_into_one_lease(real: Bench) -> None:
    """As a group is: the copies of its sub-groups, read one behind the other."""
    parts = [real.chunk(2) for _ in range(3)]
    for value, part in enumerate(parts):
        real.write(part, value + 1)
    spans = tuple(Span(2 * k * PAGE, k * PAGE, PAGE) for k in range(3))
    group = Chunk("group", 3 * PAGE, spans, (), after=tuple(parts))
    lease = real.stager.acquire(group)
    assert lease.view(torch.uint8).view(3, PAGE).unique(dim=1).flatten().tolist() == [1, 2, 3]
    real.stager.release(group, keep=False)
    assert real.is_clean()


def test_what_stays_in_memory_is_staged_from_there(real: Bench) -> None:
    """As it is of a group that is cached in part; the arena is read for the rest only."""
    part = real.chunk(1)
    real.write(part, 1)
    real.stager.settle_all()
    cached = torch.full((PAGE // 4,), 2, dtype=torch.int32)
    group = Chunk("group", 2 * PAGE, (Span(0, PAGE, PAGE),), (), after=(part,), fills=((0, cached),))
    for value in (2, 3):
        cached.fill_(value)
        read = real.engine.read_bytes
        assert real.stager.prefetch(group)
        lease = real.stager.acquire(group)
        assert lease.view(torch.int32, 0, PAGE // 4).unique().tolist() == [value]
        assert lease.view(torch.uint8, PAGE, PAGE).unique().tolist() == [1]
        real.stager.release(group, keep=False)
        assert real.engine.read_bytes - read == PAGE
    assert real.is_clean()


def test_more_chunks_than_the_pool_holds_flow_through_it(real: Bench) -> None:
    chunks = [real.chunk(3) for _ in range(12)]
    for value, chunk in enumerate(chunks):
        real.write(chunk, value)
    for place, chunk in enumerate(chunks):
        real.stager.want(chunks[place : place + 2])
        assert real.read(chunk) == [place]
    real.stager.drop_all()
    assert real.is_clean()
    assert real.pool.peak_bytes <= real.pool.nbytes


def beyond_the_end(bench: Bench) -> Chunk:
    offset = 1 << 30
    return Chunk("lost", PAGE, (Span(offset, 0, PAGE),), (Span(offset, 0, PAGE),))


def test_lease_returns_after_failed_read(real: Bench) -> None:
    lost = beyond_the_end(real)
    with pytest.raises(IoError) as caught:
        real.stager.acquire(lost)
    assert (caught.value.operation, caught.value.offset) == ("read", 1 << 30)
    assert lost.state is ChunkState.ON_NVME
    assert real.pool.leased_bytes == 0


def test_lease_returns_after_failed_prefetch(real: Bench) -> None:
    lost = beyond_the_end(real)
    assert real.stager.prefetch(lost)
    with pytest.raises(IoError):
        real.stager.acquire(lost)
    assert real.pool.leased_bytes == 0


# Reading.


def test_staged_chunk_is_not_read_again(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.stager.acquire(chunk)
    bench.stager.release(chunk, keep=True)
    assert chunk.state is ChunkState.STAGED
    assert bench.pool.leased_bytes == PAGE
    bench.stager.acquire(chunk)
    assert len(bench.engine.transfers) == 1
    assert bench.stager.demand_reads == 1


def test_prefetched_chunk_is_no_demand_read(bench: Bench) -> None:
    chunk = bench.chunk()
    assert bench.stager.prefetch(chunk)
    assert chunk.state is ChunkState.READING
    assert not bench.engine.transfers[0].done
    bench.stager.acquire(chunk)
    assert bench.stager.demand_reads == 0
    assert [transfer.request.priority for transfer in bench.engine.transfers] == [Priority.PREFETCH]


def test_demand_goes_first_and_write_back_last(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.stager.acquire(chunk)
    bench.stager.write_back(chunk)
    assert [transfer.request.priority for transfer in bench.engine.transfers] == [Priority.DEMAND, Priority.WRITE_BACK]


def test_chunk_in_use_is_nobody_elses(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.stager.acquire(chunk)
    with pytest.raises(AssertionError, match="already in use"):
        bench.stager.acquire(chunk)


def test_occupy_reads_nothing(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.stager.occupy(chunk)
    assert bench.engine.transfers == []
    assert chunk.state is ChunkState.IN_USE


def test_failed_read_rests_the_chunk_and_frees_its_lease(bench: Bench) -> None:
    chunk = bench.chunk(2)
    bench.engine.failing = lambda request: request.operation == "read"
    bench.stager.prefetch(chunk)
    with pytest.raises(IoError, match="EIO"):
        bench.stager.acquire(chunk)
    assert bench.is_clean()
    bench.engine.failing = lambda request: False
    assert bench.read(chunk) == [0]  # it may be tried again


def test_failed_read_that_nobody_wants_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    chunk = bench.chunk(2)
    bench.engine.failing = lambda request: request.operation == "read"
    bench.stager.prefetch(chunk)
    bench.stager.drop(chunk)
    assert bench.is_clean()
    assert "prefetch failed" in caplog.text
    assert "EIO" in caplog.text


def test_failed_part_of_a_read_waits_for_the_other_parts(bench: Bench) -> None:
    spans = tuple(Span(k * PAGE, k * PAGE, PAGE) for k in range(3))
    chunk = Chunk("parts", 3 * PAGE, spans, spans)
    bench.engine.failing = lambda request: request.offset == 0
    with pytest.raises(IoError):
        bench.stager.acquire(chunk)
    assert bench.engine.pending == []
    assert bench.pool.leased_bytes == 0


def test_drop_while_reading_waits_for_the_end(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.stager.prefetch(chunk)
    bench.stager.drop(chunk)
    assert bench.engine.transfers[0].waited
    assert bench.is_clean()


def test_drop_leaves_what_is_in_use_or_written(bench: Bench) -> None:
    used, written = bench.chunk(), bench.chunk()
    bench.stager.acquire(used)
    bench.write(written, 1)
    for chunk in (used, written):
        bench.stager.drop(chunk)
    bench.stager.drop_all()
    assert (used.state, written.state) == (ChunkState.IN_USE, ChunkState.WRITING)


def test_read_that_can_not_start_frees_its_lease(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(requests: Sequence[Request], **_: Any) -> list[ScriptedTransfer]:
        raise ValueError("the file is closed")

    monkeypatch.setattr(bench.engine, "start", refuse)
    chunk = bench.chunk()
    with pytest.raises(ValueError, match="closed"):
        bench.stager.acquire(chunk)
    with pytest.raises(ValueError, match="closed"):
        bench.stager.prefetch(chunk)
    assert bench.is_clean()


# Writing.


def test_write_goes_on_in_the_background(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.write(chunk, 5)
    assert chunk.state is ChunkState.WRITING
    assert bench.engine.arena_bytes[0] == 0
    bench.stager.settle(chunk)
    assert bench.engine.arena_bytes[:PAGE].unique().tolist() == [5]
    assert bench.is_clean()


def late_want(bench: Bench) -> None:
    bench.stager.want([])


def late_reap(bench: Bench) -> None:
    bench.stager.reap()


def late_next(bench: Bench) -> None:
    bench.write_late(bench.chunk(), 6)


@pytest.mark.parametrize("turn", [late_want, late_reap, late_next])
def test_write_starts_once_the_device_has_brought_the_bytes_and_nobody_waits(
    bench: Bench, turn: Callable[[Bench], None]
) -> None:
    chunk = bench.chunk()
    copy_event = bench.write_late(chunk, 5)
    turn(bench)
    assert chunk.state is ChunkState.COPYING_FROM_DEVICE and bench.engine.transfers == []
    copy_event.fire()
    turn(bench)
    assert chunk.state is ChunkState.WRITING and not copy_event.waited
    assert [transfer.done for transfer in bench.engine.transfers] == [False]
    bench.stager.settle_all()
    assert bench.is_clean()
    assert bench.engine.arena_bytes[:PAGE].unique().tolist() == [5]


def test_what_has_arrived_is_written_at_once(bench: Bench) -> None:
    chunk = bench.chunk()
    copy_event = ScriptedArrival(bench.stager.occupy(chunk), 5)
    copy_event.fire()
    bench.stager.write_back(chunk, copy_event=copy_event)
    assert chunk.state is ChunkState.WRITING


@pytest.mark.parametrize("backend", ["threads"])
def test_what_has_arrived_is_written_once_more_where_an_exception_ended_the_start_of_that(
    real: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = real.chunk()
    real.write_late(chunk, 5).fire()
    with monkeypatch.context() as patch:
        patch.setattr(real.arena, "count_write", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            real.stager.reap()
    real.stager.recover([])
    assert real.is_clean()
    assert real.read(chunk) == [5]


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_whoever_reads_what_is_arriving_waits_for_device_and_drive(bench: Bench) -> None:
    chunk = bench.chunk()
    other = Chunk("the same bytes", PAGE, (Span(0, 0, PAGE),), (), after=(chunk,))
    copy_event = bench.write_late(chunk, 5)
    assert not bench.stager.prefetch(other) and not copy_event.waited
    assert bench.read(other) == [5]
    assert bench.read(chunk) == [5]
    assert copy_event.waited


def test_room_is_made_of_what_arrives(bench: Bench) -> None:
    chunks = [bench.chunk(4), bench.chunk(4)]
    for chunk in chunks:
        bench.write_late(chunk, 5)
    bench.stager.occupy(bench.chunk(8))
    assert [chunk.state for chunk in chunks] == [ChunkState.ON_NVME] * 2


@pytest.mark.parametrize(
    "error", [IoError("the engine starts nothing any more", errno.EIO, "write"), KeyboardInterrupt()]
)
def test_write_that_can_not_start_after_the_arrival_frees_its_lease(
    error: BaseException, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, lost = bench.chunk(), []
    chunk.on_lost = lost.append
    copy_event = bench.write_late(chunk, 5)

    def refuse(requests: Sequence[Request], **_: Any) -> None:
        raise error

    monkeypatch.setattr(bench.engine, "start", refuse)
    copy_event.fire()
    with pytest.raises(type(error)):
        bench.stager.reap()
    assert bench.is_clean() and lost == [str(error) or "KeyboardInterrupt"]


def test_acquire_of_a_chunk_being_written_waits_for_the_write(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.write(chunk, 5)
    assert bench.read(chunk) == [5]
    assert [transfer.request.operation for transfer in bench.engine.transfers] == ["write", "read"]


def test_lease_returns_after_failed_write(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.engine.failing = lambda request: request.operation == "write"
    bench.write(chunk, 5)
    with pytest.raises(IoError, match="write at 0"):
        bench.stager.settle(chunk)
    assert bench.is_clean()
    bench.stager.settle(chunk)  # told once


def test_settle_all_raises_the_first_failure_after_all_have_ended(bench: Bench) -> None:
    chunks = [bench.chunk() for _ in range(4)]
    bench.engine.failing = lambda request: request.offset in (PAGE, 2 * PAGE)
    for value, chunk in enumerate(chunks):
        bench.write(chunk, value + 1)
    with pytest.raises(IoError, match=f"write at {PAGE}:"):
        bench.stager.settle_all()
    assert bench.engine.pending == []
    assert bench.is_clean()
    assert bench.engine.arena_bytes[3 * PAGE] == 4
    bench.stager.settle_all()


def test_failed_write_is_told_to_whoever_meets_it_first(bench: Bench) -> None:
    chunk = bench.chunk(8)
    other = bench.chunk(8)
    bench.engine.failing = lambda request: request.operation == "write"
    bench.write(chunk, 5)
    with pytest.raises(IoError, match="write at 0"):
        bench.stager.acquire(other)
    assert bench.is_clean()
    bench.stager.acquire(other)


def test_interrupted_settle_keeps_the_lease_until_the_write_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C gets through every wait; the transfer it interrupts the wait for is still in flight."""
    chunk = bench.chunk()
    bench.write(chunk, 5)

    def interrupted(transfers: Sequence[ScriptedTransfer], *, with_team: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.stager.settle(chunk)
    assert bench.engine.pending[0].request.lease.held
    bench.stager.settle_all()
    assert bench.engine.arena_bytes[0] == 5
    assert bench.is_clean()


def test_interrupted_acquire_keeps_the_lease_until_the_read_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = bench.chunk()

    def interrupted(transfers: Sequence[ScriptedTransfer], *, with_team: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.stager.acquire(chunk)
    assert bench.engine.pending[0].request.lease.held
    bench.stager.drop_all()
    assert bench.is_clean()


# One chunk after another that stores the same bytes.


def test_read_waits_for_the_writes_it_comes_after(bench: Bench) -> None:
    part = bench.chunk()
    group = Chunk("group", PAGE, part.reads, (), after=(part,))
    bench.write(part, 9)
    assert not bench.stager.prefetch(group)
    assert bench.pool.leased_bytes == PAGE
    lease = bench.stager.acquire(group)
    assert lease.view(torch.uint8).unique().tolist() == [9]


def test_prefetch_goes_ahead_once_the_write_before_it_has_ended(bench: Bench) -> None:
    part = bench.chunk()
    group = Chunk("group", PAGE, part.reads, (), after=(part,))
    bench.write(part, 9)
    bench.engine.end_all()
    assert bench.stager.prefetch(group)
    assert bench.stager.acquire(group).view(torch.uint8).unique().tolist() == [9]


def test_what_an_update_wrote_early_is_for_nobody_before_its_slot_is_current(bench: Bench) -> None:
    part, group = bench.chunk(), bench.chunk()
    bench.stager.acquire(group)
    group.early = (part,)
    bench.stager.release(group, keep=True)
    assert group.state is ChunkState.STAGED and not bench.stager.is_ready(group)
    bench.stager.acquire(group)
    assert (len(bench.engine.transfers), group.early) == (2, ())


# Making room.


def test_what_has_a_home_is_staged_there_and_makes_no_room(bench: Bench) -> None:
    stays, others = bench.chunk(), [bench.chunk(2) for _ in range(4)]
    stays.home = bench.stager.make_room(PAGE, "home")
    for _ in range(2):
        assert bench.stager.acquire(stays) is stays.home
        bench.stager.release(stays, keep=True)
        for other in others:
            bench.stager.acquire(other)
            bench.stager.release(other, keep=True)
        assert stays.state is ChunkState.STAGED
        bench.stager.drop(stays)
        assert stays.home.held


@pytest.mark.parametrize("backend", ["threads"])
@pytest.mark.parametrize("in_use", [False, True])
def test_after_an_exception_what_has_a_home_is_read_anew(real: Bench, in_use: bool) -> None:
    """A change in place may not have finished."""
    stays, other = real.chunk(), real.chunk()
    stays.home = real.stager.make_room(PAGE, "home")
    of_others = real.stager.acquire(other)
    real.stager.acquire(stays).view(torch.uint8).fill_(5)
    if not in_use:
        real.stager.release(stays, keep=True)
    real.stager.recover([stays.home, of_others])
    assert stays.state is ChunkState.ON_NVME and stays.home.held
    assert other.state is ChunkState.IN_USE and of_others.held
    assert real.read(stays) == [0]


def test_least_wanted_is_dropped_first(bench: Bench) -> None:
    chunks = [bench.chunk(2) for _ in range(4)]
    for chunk in chunks:
        bench.stager.prefetch(chunk)
    unwanted, *wanted = chunks
    bench.stager.readahead.follow(in_turn(wanted))
    new = [bench.chunk(2) for _ in range(3)]
    left = []
    for each in new:
        bench.stager.acquire(each)
        left.append([chunk.state is not ChunkState.ON_NVME for chunk in (unwanted, *wanted)])
    assert left == [[False, True, True, True], [False, True, True, False], [False, True, False, False]]


def test_room_is_made_by_waiting_for_writes(bench: Bench) -> None:
    first, second = bench.chunk(4), bench.chunk(4)
    bench.write(first, 1)
    bench.write(second, 2)
    third = bench.chunk(8)
    bench.stager.acquire(third)
    assert (first.state, second.state) == (ChunkState.ON_NVME, ChunkState.ON_NVME)
    assert bench.engine.arena_bytes[[0, 4 * PAGE]].tolist() == [1, 2]


def test_room_is_taken_from_what_ended_before_anything_is_dropped(bench: Bench) -> None:
    staged, written = bench.chunk(4), bench.chunk(4)
    bench.stager.prefetch(staged)
    bench.write(written, 1)
    bench.engine.end_all()
    bench.stager.acquire(bench.chunk(4))
    assert (staged.state, written.state) == (ChunkState.READING, ChunkState.ON_NVME)


def test_pool_full_of_what_is_in_use_is_a_budget_error_with_a_number(bench: Bench) -> None:
    for _ in range(2):
        bench.stager.acquire(bench.chunk(3))
    starved = bench.chunk(4)
    with pytest.raises(BudgetError) as caught:
        bench.stager.acquire(starved)
    assert str(caught.value) == (
        "chunk 2 needs 16.00 KiB of the pinned pool at once, which holds 32.00 KiB, 24.00 KiB of them in use: "
        "raise pinned_bytes_max to at least 72.00 KiB"
    )
    assert starved.state is ChunkState.ON_NVME
    assert bench.pool.leased_bytes == 6 * PAGE


def test_chunk_larger_than_the_pool_is_a_budget_error(bench: Bench) -> None:
    staged = bench.chunk(2)
    bench.stager.prefetch(staged)
    with pytest.raises(BudgetError, match=r"36\.00 KiB"):
        bench.stager.acquire(bench.chunk(9))


# Reading ahead.


def test_what_is_wanted_is_read_in_turn_until_it_no_longer_fits(bench: Bench) -> None:
    """What comes later and would fit stays where it is: it would stand in the way of what is needed before it."""
    unwanted, first, second, too_large, small = (bench.chunk(pages) for pages in (5, 2, 3, 4, 1))
    bench.stager.prefetch(unwanted)
    bench.engine.end_all()
    bench.stager.want([first, second, too_large, small])
    states = [chunk.state.name for chunk in (unwanted, first, second, too_large, small)]
    assert states == ["ON_NVME", "READING", "READING", "ON_NVME", "ON_NVME"]
    assert list(bench.stager.readahead.following) == [first, second, too_large, small]


def test_what_is_wanted_and_here_already_is_not_read_again(bench: Bench) -> None:
    staged, written, following = (bench.chunk(2) for _ in range(3))
    bench.stager.prefetch(staged)
    bench.write(written, 1)
    bench.stager.want([staged, written, following])
    assert [chunk.state.name for chunk in (staged, written, following)] == ["READING", "WRITING", "READING"]
    assert len(bench.engine.transfers) == 3


def test_prefetch_never_displaces_what_is_wanted(bench: Bench) -> None:
    wanted = [bench.chunk(4), bench.chunk(4)]
    for chunk in wanted:
        bench.stager.prefetch(chunk)
    bench.engine.end_all()
    bench.stager.readahead.follow(in_turn(wanted))
    assert not bench.stager.prefetch(bench.chunk(1))
    assert all(chunk.state is ChunkState.READING for chunk in wanted)


def test_prefetch_takes_the_room_of_what_is_not_wanted(bench: Bench) -> None:
    old = [bench.chunk(4), bench.chunk(4)]
    for chunk in old:
        bench.stager.prefetch(chunk)
    bench.engine.end_all()
    bench.stager.readahead.follow(in_turn([old[0]]))
    new = bench.chunk(4)
    assert bench.stager.prefetch(new)
    assert [chunk.state for chunk in (*old, new)] == [ChunkState.READING, ChunkState.ON_NVME, ChunkState.READING]


def test_prefetch_never_waits(bench: Bench) -> None:
    """Not for a read, not for a write, not for the device."""
    reading, writing, copy_event = bench.chunk(3), bench.chunk(3), bench.chunk(2)
    bench.device.take(bench.stager.acquire(copy_event).view(torch.uint8))
    bench.stager.release(copy_event, keep=False)
    bench.stager.prefetch(reading)
    bench.write(writing, 1)
    pending = bench.engine.pending
    assert not bench.stager.prefetch(bench.chunk(1))
    assert [chunk.state.name for chunk in (reading, writing, copy_event)] == ["READING", "WRITING", "COPYING_TO_DEVICE"]
    assert bench.engine.pending == pending
    assert not any(each.waited for each in bench.device.copy_events)
    assert bench.pool.leased_bytes == bench.pool.nbytes


def test_prefetch_takes_the_room_of_what_ended(bench: Bench) -> None:
    bench.write(bench.chunk(8), 1)
    following = bench.chunk(8)
    assert not bench.stager.prefetch(following)
    bench.engine.end_all()
    assert bench.stager.prefetch(following)


# Landing.


def on_device(bench: Bench, chunk: Chunk, *, keep: bool) -> None:
    """Use the chunk as a gather does: the device is still copying when it is released."""
    bench.device.take(bench.stager.acquire(chunk).view(torch.uint8))
    bench.stager.release(chunk, keep=keep)


def test_lease_returns_only_when_the_device_has_copied(bench: Bench) -> None:
    chunk = bench.chunk()
    on_device(bench, chunk, keep=False)
    assert chunk.state is ChunkState.COPYING_TO_DEVICE
    assert bench.pool.leased_bytes == PAGE
    assert not bench.device.copy_events[0].waited
    bench.device.copy_events[0].fire()
    bench.stager.drop_all()
    assert bench.is_clean()


def test_lease_returns_at_once_where_the_device_has_copied(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.stager.acquire(chunk)
    bench.stager.release(chunk, keep=False)
    assert bench.is_clean()


def test_room_is_made_by_waiting_for_the_device(bench: Bench) -> None:
    chunk = bench.chunk(8)
    on_device(bench, chunk, keep=False)
    bench.stager.acquire(bench.chunk(8))
    assert bench.device.copy_events[0].waited
    assert chunk.state is ChunkState.ON_NVME


def test_landing_chunk_is_acquired_where_it_lies(bench: Bench) -> None:
    chunk = bench.chunk()
    bench.write(chunk, 3)
    chunk.writes = ()  # no change from now on, as with a group
    on_device(bench, chunk, keep=False)
    reads = len(bench.engine.transfers)
    lease = bench.stager.acquire(chunk)
    assert lease.view(torch.uint8).unique().tolist() == [3]
    assert len(bench.engine.transfers) == reads
    assert not bench.device.copy_events[0].waited
    bench.stager.release(chunk, keep=False)  # the first copy still hasn't copied
    assert chunk.state is ChunkState.COPYING_TO_DEVICE
    bench.stager.drop(chunk)
    assert bench.is_clean()


def test_landing_chunk_is_occupied_once_the_device_has_copied(bench: Bench) -> None:
    chunk = bench.chunk()
    on_device(bench, chunk, keep=False)
    bench.stager.occupy(chunk)
    assert bench.device.copy_events[0].fired


@pytest.mark.parametrize("dropper", ["drop", "drop_all", "demand"])
def test_kept_chunk_is_dropped_only_when_the_device_has_copied(bench: Bench, dropper: str) -> None:
    chunk = bench.chunk(8)
    on_device(bench, chunk, keep=True)
    if dropper == "demand":
        bench.stager.acquire(bench.chunk(8)).view(torch.uint8).fill_(7)
    elif dropper == "drop":
        bench.stager.drop(chunk)
    else:
        bench.stager.drop_all()
    assert chunk.state is ChunkState.ON_NVME
    assert bench.device.copy_events[0].fired, "the lease went back while the device was copying out of it"


# Everything at once.

POOL_PAGES = 8
SIZES = (1, 2, 2, 3, 4)


class StagerMachine(RuleBasedStateMachine):
    """Random calls, transfers that end and fail at random, a device that copies late; against a dict of contents.

    Chunk `group` reads the same bytes as the first two chunks write, as the copies of two sub-groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bench = scripted(POOL_PAGES)
        self.plain = [self.bench.chunk(pages) for pages in SIZES]
        spans = (Span(0, 0, PAGE), Span(PAGE, PAGE, 2 * PAGE))
        self.group = Chunk("group", 3 * PAGE, spans, (), after=(self.plain[0], self.plain[1]))
        self.bench.chunks.append(self.group)
        self.content: dict[str, int | None] = {chunk.name: 0 for chunk in self.plain}  # None: a write failed
        self.failing = 0
        self.version = 0
        self.failures = 0
        self.copying: list[Lease] = []

    @initialize()
    def listen(self) -> None:
        def failing(request: Request) -> bool:
            if self.failing == 0:
                return False
            self.failing -= 1
            self.failures += 1
            if request.operation == "write":
                for chunk in self.plain:
                    if chunk.writes[0].offset == request.offset:
                        self.content[chunk.name] = None
            return True

        self.bench.engine.failing = failing

    @property
    def stager(self) -> Stager:
        return self.bench.stager

    def in_use(self) -> list[Chunk]:
        return [chunk for chunk in self.bench.chunks if chunk.state is ChunkState.IN_USE]

    def attempt(self, call: Callable[[], Any]) -> Any:
        """What the call returns; None where it raised what it may: an IoError, once a transfer has failed."""
        try:
            return call()
        except IoError:
            assert self.failures, "an error without a failed transfer"
            return None

    def check(self, chunk: Chunk, lease: Lease) -> None:
        found = lease.view(torch.uint8)
        parts = (
            [(chunk, found)]
            if chunk is not self.group
            else [(self.plain[0], found[:PAGE]), (self.plain[1], found[PAGE:])]
        )
        for part, elements in parts:
            expected = self.content[part.name]
            assert expected is None or elements.unique().tolist() == [expected]

    def some(self, data: st.DataObject, *states: ChunkState) -> Chunk:
        """Any chunk, or one in any of these states."""
        found = [chunk for chunk in self.bench.chunks if not states or chunk.state in states]
        hypothesis.assume(found)
        names = {chunk.name: chunk for chunk in found}
        return names[data.draw(st.sampled_from(list(names)), label="chunk")]

    @rule(data=st.data(), taken=st.booleans())
    def acquire(self, data: st.DataObject, taken: bool) -> None:
        chunk = self.some(data)
        if chunk.state is ChunkState.IN_USE:
            return
        try:
            lease = self.attempt(lambda: self.stager.acquire(chunk))
        except BudgetError:
            assert self.in_use()
            return
        if lease is not None:
            assert chunk.state is ChunkState.IN_USE
            self.check(chunk, lease)
            if not self.bench.device.queue:
                self.copying.clear()  # what making room waited for has ended
            if taken:
                self.bench.device.take(lease.view(torch.uint8))
                self.copying.append(lease)

    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        chunk = self.some(data, ChunkState.ON_NVME)
        pending = self.bench.engine.pending
        started = self.attempt(lambda: self.stager.prefetch(chunk))
        assert bool(started) == (chunk.state is ChunkState.READING)
        assert not any(transfer.done for transfer in pending), "prefetch waited for a transfer"

    @precondition(lambda self: self.in_use())
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        chunk = self.some(data, ChunkState.IN_USE)
        self.stager.release(chunk, keep=keep)

    @rule(data=st.data(), occupy=st.booleans(), late=st.booleans())
    def change(self, data: st.DataObject, occupy: bool, late: bool) -> None:
        """As an optimizer does: new bytes in place, then back to the drive. Staged copies of them are dropped before."""
        chunk = self.plain[data.draw(st.integers(0, len(self.plain) - 1), label="chunk")]
        shared = chunk in self.group.after
        if chunk.state is ChunkState.IN_USE or (shared and self.group.state is ChunkState.IN_USE):
            return
        if shared:
            self.attempt(lambda: self.stager.drop(self.group))
        self.fire()  # nothing is written into bytes that the device still copies
        try:
            lease = self.attempt(lambda: self.stager.occupy(chunk) if occupy else self.stager.acquire(chunk))
        except BudgetError:
            assert self.in_use()
            return
        if lease is None:
            return
        self.version = self.version % 200 + 1
        self.content[chunk.name] = self.version
        copy_event = ScriptedArrival(lease, self.version) if late else None
        if copy_event is not None:
            self.bench.device.copy_events.append(copy_event)
        else:
            lease.view(torch.uint8).fill_(self.version)
        self.stager.write_back(chunk, copy_event=copy_event)

    @rule(data=st.data(), how=st.sampled_from(["settle", "drop"]))
    def finish(self, data: st.DataObject, how: str) -> None:
        chunk = self.some(data)
        self.attempt(lambda: getattr(self.stager, how)(chunk))
        written = chunk.state not in (ChunkState.COPYING_FROM_DEVICE, ChunkState.WRITING)
        assert written if how == "settle" else chunk.state is not ChunkState.READING

    @rule(how=st.sampled_from(["settle_all", "drop_all"]))
    def finish_all(self, how: str) -> None:
        self.attempt(getattr(self.stager, how))

    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        places = st.integers(0, len(self.bench.chunks) - 1)
        chunks = [self.bench.chunks[k] for k in data.draw(st.lists(places, unique=True, max_size=4))]
        self.stager.readahead.follow(in_turn(chunks))

    @precondition(lambda self: self.bench.engine.pending)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        pending = self.bench.engine.pending
        transfer = pending[data.draw(st.integers(0, len(pending) - 1))]
        transfer.end(self.bench.engine.failure_of(transfer.request))

    @rule()
    def fail_next(self) -> None:
        self.failing = 1

    @rule()
    def fire(self) -> None:
        for copy_event in self.bench.device.copy_events:
            if not copy_event.fired:
                copy_event.fire()

    @invariant()
    def leases_are_those_of_the_chunks_and_do_not_overlap(self) -> None:
        leases = sorted((c.lease for c in self.bench.chunks if c.lease is not None), key=lambda lease: lease.offset)
        assert all(lease.held for lease in leases)
        assert sum(lease.nbytes for lease in leases) == self.bench.pool.leased_bytes
        for one, other in pairwise(leases):
            assert one.offset + one.nbytes <= other.offset
        for chunk in self.bench.chunks:
            assert (chunk.lease is None) == (chunk.state is ChunkState.ON_NVME)

    @invariant()
    def what_is_in_flight_has_its_lease(self) -> None:
        assert all(transfer.request.lease.held for transfer in self.bench.engine.pending)

    @invariant()
    def what_the_device_copies_has_its_lease(self) -> None:
        if not self.bench.device.queue:
            self.copying.clear()
        assert all(lease.held for lease in self.copying)

    def teardown(self) -> None:
        for chunk in self.in_use():
            self.stager.release(chunk, keep=False)
        for _ in range(len(self.bench.chunks) + 1):  # a failure met on the way may end a call early
            self.attempt(self.stager.drop_all)
            self.attempt(self.stager.settle_all)
        assert self.bench.is_clean()
        for chunk in self.plain:
            expected = self.content[chunk.name]
            span = chunk.writes[0]
            stored = self.bench.engine.arena_bytes[span.offset : span.offset + span.nbytes]
            assert expected is None or stored.unique().tolist() == [expected]


TestStagerMachine = StagerMachine.TestCase
TestStagerMachine.settings = hypothesis.settings(
    max_examples=hypothesis.settings.default.max_examples // 2, stateful_step_count=30
)
