"""What the arena promises: extents that never move, reserved all or none, in a private file without a name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.aio import IoEngine, Lease, PinnedPool, Priority, Request
from infinity.errors import IoError, StoreError
from infinity.store import run_folder
from infinity.store.arena import Arena, Extent
from infinity.store.run_folder import RunFolder

PAGE = 4096


@dataclass
class Bench:
    folder: RunFolder
    pool: PinnedPool
    engine: IoEngine
    arena: Arena

    def move(self, operation: str, extent: Extent, lease: Lease) -> None:
        request = Request(operation, self.arena.file, extent.offset, lease, 0, extent.nbytes, Priority.DEMAND)
        self.engine.wait(self.engine.start([request]))


@pytest.fixture
def bench(nvme_path: Path, backend: str) -> Iterator[Bench]:
    folder = RunFolder(nvme_path)
    pool = PinnedPool(16 * PAGE)
    engine = IoEngine(pool, backend=backend)
    arena = Arena(folder, engine, name="rank0.arena")
    yield Bench(folder, pool, engine, arena)
    engine.close()
    arena.close()
    folder.close()


def test_extents_are_whole_pages_one_behind_the_other(bench: Bench) -> None:
    first = bench.arena.reserve([1, PAGE, PAGE + 1], "tensors")
    assert first == [Extent(0, PAGE), Extent(PAGE, PAGE), Extent(2 * PAGE, 2 * PAGE)]
    assert bench.arena.reserve([10], "one more") == [Extent(4 * PAGE, PAGE)]
    assert bench.arena.nbytes == 5 * PAGE
    assert bench.arena.file.size_bytes >= 5 * PAGE


@settings(max_examples=settings.default.max_examples // 5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 3 * PAGE), max_size=6))
def test_no_byte_is_in_two_extents(bench: Bench, sizes: list[int]) -> None:
    """Reservations of earlier examples stay: the arena grows from example to example."""
    end = bench.arena.nbytes
    for size, extent in zip(sizes, bench.arena.reserve(sizes, "tensors"), strict=True):
        assert extent.offset == end and extent.offset % PAGE == extent.nbytes % PAGE == 0
        assert size <= extent.nbytes < size + PAGE
        for offset in {extent.offset, extent.offset + extent.nbytes - 1} if extent.nbytes else ():
            assert bench.arena.generation_at(offset) == (extent, 0)
        end += extent.nbytes
    assert bench.arena.nbytes == end <= bench.arena.file.size_bytes


def test_every_write_is_a_new_generation_of_the_extent_that_it_is_in(bench: Bench) -> None:
    first, empty, last = bench.arena.reserve([2 * PAGE, 0, PAGE], "tensors")
    more = bench.arena.reserve([PAGE], "one more")[0]
    for offset in (0, PAGE, more.offset):
        bench.arena.count_write(offset, PAGE)
    assert bench.arena.generation_at(PAGE) == (first, 2)
    assert bench.arena.generation_at(last.offset) == (last, 0) and empty.offset == last.offset
    assert bench.arena.generation_at(more.offset) == (more, 1)
    bench.arena.count_write(PAGE, 3 * PAGE)
    assert [bench.arena.generation_at(extent.offset)[1] for extent in (first, last, more)] == [3, 1, 2]


def test_nothing_to_reserve_is_nothing_reserved(bench: Bench) -> None:
    assert bench.arena.reserve([], "nothing") == []
    assert bench.arena.nbytes == 0


def test_file_is_private_and_has_no_name(bench: Bench) -> None:
    bench.arena.reserve([PAGE], "a tensor")
    assert {path.name for path in bench.folder.path.iterdir()} == {"lock", "run.json"}
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    ours = [link for link in links if link.is_symlink() and "rank0.arena" in os.readlink(link)]  # noqa: PTH115
    mine = [link.stat() for link in ours if str(bench.folder.path) in os.readlink(link)]  # noqa: PTH115
    assert mine
    for found in mine:
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_nlink == 0


def test_bytes_never_written_read_as_zero(bench: Bench) -> None:
    (extent,) = bench.arena.reserve([4 * PAGE], "a tensor")
    with bench.pool.lease(extent.nbytes) as lease:
        lease.view(torch.uint8).fill_(7)
        bench.move("read", extent, lease)
        assert not lease.view(torch.uint8).any()


def test_extents_keep_what_was_written_when_more_are_reserved(bench: Bench) -> None:
    first, second = bench.arena.reserve([2 * PAGE, 2 * PAGE], "tensors")
    with bench.pool.lease(2 * PAGE) as lease:
        for number, extent in ((1, first), (2, second)):
            lease.view(torch.uint8).fill_(number)
            bench.move("write", extent, lease)
        bench.arena.reserve([64 * PAGE], "another")
        for number, extent in ((1, first), (2, second)):
            lease.view(torch.uint8).zero_()
            bench.move("read", extent, lease)
            assert lease.view(torch.uint8).unique().tolist() == [number]


def test_missing_space_is_told_and_nothing_is_reserved(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.arena.reserve([PAGE], "a small one")
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: 1 << 30)
    with pytest.raises(StoreError) as caught:
        bench.arena.reserve([PAGE, 3 << 29, 3 << 29], "optimizer state")
    assert caught.value.errno == errno.ENOSPC
    assert "optimizer state: 3.00 GiB are needed on " in str(caught.value)
    assert "where 1.00 GiB are free: free 2.00 GiB more or choose another nvme_path" in str(caught.value)
    assert bench.arena.nbytes == PAGE
    assert bench.arena.file.size_bytes == PAGE
    assert bench.arena.reserve([PAGE], "another small one") == [Extent(PAGE, PAGE)]


def test_space_that_the_drive_really_lacks_is_refused(bench: Bench) -> None:
    with pytest.raises(StoreError, match=r"1048576\.00 TiB") as caught:
        bench.arena.reserve([1 << 60], "parameters")
    assert caught.value.errno == errno.ENOSPC
    assert bench.arena.nbytes == 0


class RefusingFile:
    """A file on a file system that has the space until it is asked for it."""

    def __init__(self, failure: IoError) -> None:
        self.failure = failure

    def reserve(self, nbytes: int) -> None:
        raise self.failure


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_refused_reservation_is_a_store_error(nvme_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(nvme_path)
    engine = IoEngine(PinnedPool(PAGE), backend="threads")
    arena = Arena(folder, engine, name="rank0.arena")
    arena.file.close()
    monkeypatch.setattr(arena, "file", RefusingFile(IoError("reserve: refused", number)))
    with pytest.raises(
        StoreError, match=r"parameters: 8\.00 KiB could not be reserved .*refused.*free space"
    ) as caught:
        arena.reserve([PAGE, PAGE], "parameters")
    assert caught.value.errno == number
    assert str(nvme_path) in str(caught.value)
    assert arena.nbytes == 0
    engine.close()
    folder.close()


def test_two_arenas_are_two_files(bench: Bench) -> None:
    other = Arena(bench.folder, bench.engine, name="rank0.arena")
    (extent,) = bench.arena.reserve([PAGE], "a tensor")
    other.reserve([PAGE], "a tensor")
    with bench.pool.lease(PAGE) as lease:
        lease.view(torch.uint8).fill_(9)
        bench.move("write", extent, lease)
        request = Request("read", other.file, 0, lease, 0, PAGE, Priority.DEMAND)
        bench.engine.wait(bench.engine.start([request]))
        assert not lease.view(torch.uint8).any()
    other.close()


def test_several_drives_are_one_arena(nvme_path: Path, backend: str) -> None:
    folders = [RunFolder(nvme_path / name) for name in ("a", "b", "c")]
    pool = PinnedPool(8 << 20)
    engine = IoEngine(pool, backend=backend, block_bytes=64 << 10, drives=3)
    arena = Arena(folders, engine, name="rank0.arena", bandwidths=[2.0, 1.0, 1e-6])
    assert arena.left_out == (str(nvme_path / "c"),) and "c is so much slower" in arena.notes[-1]
    assert [round(share, 2) for _, share in arena.shares] == [0.67, 0.33]
    first, second = arena.reserve([300 << 10, 3 << 20], "tensors")
    bench = Bench(folders[0], pool, engine, arena)
    with pool.lease(second.nbytes) as written, pool.lease(second.nbytes) as read:
        written.view(torch.int64).random_()
        bench.move("write", first, written)
        bench.move("write", second, written)
        bench.move("read", second, read)
        assert torch.equal(read.view(torch.int64), written.view(torch.int64))
    arena.file.sync()
    moved = [drive.written_bytes for drive in engine.drives]
    assert moved[2] == 0 and 1.8 < moved[0] / moved[1] < 2.2
    assert sum(moved) == first.nbytes + second.nbytes
    assert all(drive.write_bytes_per_s > 0 for drive in engine.drives[:2])
    engine.close()
    arena.close()
    for folder in folders:
        folder.close()


def test_a_share_that_does_not_fit_names_its_drive(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [RunFolder(nvme_path / name) for name in ("a", "b")]
    engine = IoEngine(PinnedPool(16 * PAGE), drives=2)
    arena = Arena(folders, engine, name="rank0.arena", bandwidths=[3.0, 1.0])
    free = {str(nvme_path / "a"): 100 << 20, str(nvme_path / "b"): 10 << 20}
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: free[str(path)])
    arena.reserve([36 << 20], "tensors")
    with pytest.raises(StoreError, match=r"needed on .*/b, where 10.00 MiB"):
        arena.reserve([48 << 20], "tensors")
    assert arena.nbytes == 36 << 20
    engine.close()
    arena.close()
    for folder in folders:
        folder.close()


def test_an_arena_made_in_a_folder_put_in_its_place_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    engine = IoEngine(PinnedPool(4 << 20))
    folder.path.rename(tmp_path / "moved")
    (tmp_path / "trap").mkdir()
    folder.path.symlink_to(tmp_path / "trap")
    with pytest.raises(StoreError, match="was moved or replaced"):
        Arena(folder, engine, name="rank0.arena")
    engine.close()
    folder.path.unlink()
    (tmp_path / "moved").rename(folder.path)
    folder.close()
