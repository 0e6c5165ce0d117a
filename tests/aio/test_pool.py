"""What the pinned pool promises: bytes are lent to one at a time, come back exactly once, and are then free again."""

from __future__ import annotations

import time
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity._aio import File, Priority
from infinity.aio import IoEngine, PinnedPool, Request
from infinity.aio.pool import FreeRanges, Lease
from infinity.errors import BudgetError, InfinityError

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64


class FreeRangesMachine(RuleBasedStateMachine):
    """Against a map of single bytes: True where it is free."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = FreeRanges(SIZE)
        self.free = [True] * SIZE
        self.there = SIZE
        self.taken: list[tuple[int, int]] = []

    def runs(self) -> list[tuple[int, int]]:
        """(offset, length) of every run of free bytes, as long as it can be."""
        found = []
        start = None
        for place, free in enumerate([*self.free, False]):
            if free and start is None:
                start = place
            elif not free and start is not None:
                found.append((start, place - start))
                start = None
        return found

    def mark(self, offset: int, nbytes: int, free: bool) -> None:
        self.free[offset : offset + nbytes] = [free] * nbytes

    @rule(nbytes=st.integers(1, SIZE + 1))
    def take(self, nbytes: int) -> None:
        expected = next((offset for offset, length in self.runs() if length >= nbytes), None)
        assert self.ranges.take(nbytes) == expected
        if expected is not None:
            self.mark(expected, nbytes, False)
            self.taken.append((expected, nbytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        offset, nbytes = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.ranges.put(offset, nbytes)
        self.mark(offset, nbytes, True)

    @rule(nbytes=st.integers(1, SIZE + 1))
    def take_pieces(self, nbytes: int) -> None:
        pieces = self.ranges.take_pieces(nbytes)
        if nbytes > sum(self.free):
            assert pieces is None
            return
        assert pieces is not None and sum(length for _, length in pieces) == nbytes
        lengths = sorted((length for _, length in self.runs()), reverse=True)
        assert sum(lengths[: len(pieces) - 1]) < nbytes <= sum(lengths[: len(pieces)]), "as few as there can be"
        for offset, length in pieces:
            assert all(self.free[offset : offset + length]) and offset + length <= len(self.free)
            self.mark(offset, length, False)
            self.taken.append((offset, length))

    @rule(gap=st.integers(0, 2), nbytes=st.integers(1, 8))
    def grow(self, gap: int, nbytes: int) -> None:
        self.ranges.grow(len(self.free) + gap, nbytes)
        self.free += [False] * gap + [True] * nbytes
        self.there += nbytes

    @rule(offset=st.integers(0, SIZE), nbytes=st.integers(1, SIZE))
    def put_what_is_free_or_outside(self, offset: int, nbytes: int) -> None:
        hypothesis.assume(offset + nbytes > len(self.free) or any(self.free[offset : offset + nbytes]))
        with pytest.raises(AssertionError, match="came back twice"):
            self.ranges.put(offset, nbytes)

    @invariant()
    def sums_are_exact(self) -> None:
        assert self.ranges.free_bytes == sum(self.free)
        assert self.ranges.nbytes == self.there
        assert self.ranges.largest == max((length for _, length in self.runs()), default=0)

    def teardown(self) -> None:
        for offset, nbytes in self.taken:
            self.ranges.put(offset, nbytes)
        assert self.ranges.free_bytes == self.there


TestFreeRanges = FreeRangesMachine.TestCase
TestFreeRanges.settings = hypothesis.settings(stateful_step_count=30)


def test_no_bytes_are_no_range() -> None:
    ranges = FreeRanges(0)
    assert (ranges.free_bytes, ranges.largest, ranges.take(1)) == (0, 0, None)


@pytest.fixture
def pool() -> PinnedPool:
    return PinnedPool(64 * KIB)


def test_pool_is_a_whole_number_of_pages() -> None:
    assert PinnedPool(1).nbytes == 4 * KIB
    assert PinnedPool(4 * KIB + 1).nbytes == 8 * KIB


def test_leases_are_whole_pages_and_do_not_overlap(pool: PinnedPool) -> None:
    leases = [pool.lease(1 + k * 3 * KIB) for k in range(4)]
    assert [lease.nbytes for lease in leases] == [4 * KIB, 4 * KIB, 8 * KIB, 12 * KIB]
    for number, lease in enumerate(leases):
        lease.view(torch.uint8).fill_(number)
    for number, lease in enumerate(leases):
        assert lease.view(torch.uint8).unique().tolist() == [number]
    assert pool.leased_bytes == 28 * KIB


def test_lease_comes_back_exactly_once(pool: PinnedPool) -> None:
    lease = pool.lease(8 * KIB)
    assert lease.held
    lease.give_back()
    assert not lease.held
    assert pool.leased_bytes == 0
    with pytest.raises(AssertionError, match="came back twice"):
        lease.give_back()
    assert pool.leased_bytes == 0


def test_lease_comes_back_at_the_end_of_its_block(pool: PinnedPool) -> None:
    with pool.lease(8 * KIB):
        assert pool.leased_bytes == 8 * KIB
    assert pool.leased_bytes == 0
    with pool.lease(8 * KIB) as lease:
        lease.give_back()  # early is fine
    assert pool.leased_bytes == 0


def test_lease_comes_back_when_its_block_raises(pool: PinnedPool) -> None:
    with pytest.raises(ZeroDivisionError), pool.lease(8 * KIB):
        raise ZeroDivisionError
    assert pool.leased_bytes == 0


def test_lease_of_nothing_comes_back_without_harm(pool: PinnedPool) -> None:
    nothing = pool.lease(0)
    something = pool.lease(4 * KIB)
    nothing.give_back()
    something.give_back()
    assert pool.leased_bytes == 0
    pool.lease(pool.nbytes).give_back()


def test_peak_is_the_most_that_was_on_lease_at_once(pool: PinnedPool) -> None:
    assert pool.peak_bytes == 0
    first = pool.lease(16 * KIB)
    pool.lease(8 * KIB).give_back()
    pool.lease(4 * KIB).give_back()
    first.give_back()
    assert pool.peak_bytes == 24 * KIB
    assert pool.try_lease(65 * KIB) is None
    assert pool.peak_bytes == 24 * KIB


def test_full_pool_says_what_it_holds(pool: PinnedPool) -> None:
    kept = [pool.lease(16 * KIB) for _ in range(4)]
    kept[0].give_back()
    kept[2].give_back()
    assert pool.try_lease(20 * KIB) is None
    with pytest.raises(BudgetError) as caught:
        pool.lease(20 * KIB)
    assert str(caught.value) == (
        "no room for 20.00 KiB in the pinned pool: 32.00 KiB of 64.00 KiB are free, the largest piece 16.00 KiB"
    )
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, InfinityError)
    assert pool.leased_bytes == 32 * KIB


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_view_covers_the_lease(pool: PinnedPool, dtype: torch.dtype) -> None:
    pool.lease(4 * KIB)
    lease = pool.lease(8 * KIB)
    view = lease.view(dtype)
    assert (view.dtype, view.dim(), view.numel() * dtype.itemsize) == (dtype, 1, 8 * KIB)
    assert view.data_ptr() == pool.slab.address + lease.offset


def test_view_begins_at_a_byte_and_counts_elements(pool: PinnedPool) -> None:
    lease = pool.lease(4 * KIB)
    lease.view(torch.uint8).zero_()
    lease.view(torch.float32, 16, 2).fill_(1.0)
    assert lease.view(torch.float32).nonzero().flatten().tolist() == [4, 5]
    assert lease.view(torch.int64, 4 * KIB - 16).numel() == 2
    assert lease.view(torch.float32, 4 * KIB).numel() == 0


@pytest.mark.parametrize(("start", "numel"), [(0, 1025), (4, 1024), (4096, 1), (-4, 1)])
def test_view_never_leaves_its_lease(pool: PinnedPool, start: int, numel: int) -> None:
    pool.lease(4 * KIB)
    lease = pool.lease(4 * KIB)
    with pytest.raises(AssertionError, match="beyond its lease"):
        lease.view(torch.float32, start, numel)


def test_returned_lease_has_no_view(pool: PinnedPool) -> None:
    lease = pool.lease(4 * KIB)
    lease.give_back()
    with pytest.raises(AssertionError, match="given back"):
        lease.view(torch.uint8)


def test_memory_that_is_released_comes_back_but_for_leases_that_are_kept(backend: str, nvme_path: Path) -> None:
    pool = PinnedPool(16 * MIB)
    engine = IoEngine(pool, backend=backend)
    file = File(nvme_path / "file", create=True)
    file.reserve(4 * MIB)

    def move(operation: str, lease: Lease) -> None:
        engine.wait(engine.start([Request(operation, file, 0, lease, 0, 4 * MIB, Priority.DEMAND)]))

    kept, other = pool.lease(4 * MIB), pool.lease(4 * MIB)
    kept.view(torch.uint8).fill_(7)
    other.view(torch.uint8).fill_(9)
    move("write", other)
    for number in range(1, 4):
        engine.pause()
        with pytest.raises(ValueError, match="engine is closed"):
            move("read", other)
        pool.release([kept])
        assert not pool.slab.present
        assert other.view(torch.uint8).unique().tolist() == [0]
        pool.fill_again()
        engine.resume()
        assert kept.view(torch.uint8).unique().tolist() == [7]
        move("read", other)  # into the pages that are there now
        assert other.view(torch.uint8).unique().tolist() == [9]
        assert (engine.read_bytes, engine.written_bytes) == (number * 4 * MIB, 4 * MIB)
        assert [drive.read_bytes for drive in engine.drives] == [number * 4 * MIB]
    while not pool.slab.present:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="can't be released"):
        pool.slab.release(1, 4096)
    engine.close()
