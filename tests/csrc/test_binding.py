"""infinity._aio as Python sees it, over every backend that works here."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from infinity._aio import (
    Engine,
    File,
    PinnedSlab,
    Priority,
    StripedFile,
    Transfer,
    absent_bytes,
    direct_alignment,
    probe,
)
from infinity.errors import IoError

KIB = 1 << 10
MIB = 1 << 20
PAGE = 4096
BACKENDS = [name for name, available, _ in probe() if available]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slab() -> PinnedSlab:
    return PinnedSlab(8 * MIB)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    with File(tmp_path / "rank0.arena", create=True) as opened:
        opened.reserve(8 * MIB)
        yield opened


def start_read(
    engine: Engine,
    file: File | StripedFile,
    offset: int,
    slab: PinnedSlab,
    slab_offset: int,
    length: int,
    priority: Priority = Priority.PREFETCH,
) -> Transfer:
    [transfer] = engine.start_batch([("read", file, offset, slab, slab_offset, length, priority)])
    return transfer


def start_write(
    engine: Engine, file: File | StripedFile, offset: int, slab: PinnedSlab, slab_offset: int, length: int
) -> Transfer:
    [transfer] = engine.start_batch([("write", file, offset, slab, slab_offset, length, Priority.WRITE_BACK)])
    return transfer


def test_probe_lists_every_backend_with_a_reason() -> None:
    assert [name for name, _, _ in probe()] == ["io_uring", "linux_aio", "threads"]
    assert all(reason for _, _, reason in probe())
    assert "threads" in BACKENDS


def test_slab_is_a_writable_buffer_of_bytes(slab: PinnedSlab) -> None:
    view = memoryview(slab)
    assert (view.nbytes, view.format, view.ndim, view.readonly) == (slab.nbytes, "B", 1, False)
    assert slab.address % (2 * MIB) == 0
    assert bytes(view[:PAGE]) == bytes(PAGE)
    view[-1] = 7
    assert memoryview(slab)[-1] == 7


def test_slab_lives_as_long_as_a_view_of_it() -> None:
    view = memoryview(PinnedSlab(MIB, huge_pages=False))
    gc.collect()
    view[:] = b"x" * MIB
    assert view[MIB - 1] == ord("x")


def test_slab_says_what_it_did_not_get() -> None:
    small = PinnedSlab(PAGE)
    assert not small.huge_pages
    assert "smaller than a huge page" in small.notes[0]
    locked = PinnedSlab(MIB, huge_pages=False, lock=True)
    assert all("can't be locked" in note for note in locked.notes)


def wait_until_present(slab: PinnedSlab) -> None:
    deadline = time.monotonic() + 60
    while not slab.present:
        assert time.monotonic() < deadline, "the slab never becomes present"
        time.sleep(0.001)


def test_bytes_written_before_a_slab_is_present_stay() -> None:
    slab = PinnedSlab(256 * MIB, in_background=True)
    pages = np.frombuffer(slab, dtype=np.uint32).reshape(-1, PAGE // 4)
    numbers = np.arange(1, len(pages) + 1, dtype=np.uint32)
    pages[::-1, 0] = numbers  # from the end, as the slab becomes present from the beginning
    pages[:, 7] = numbers
    wait_until_present(slab)
    assert np.array_equal(pages[::-1, 0], numbers)
    assert np.array_equal(pages[:, 7], numbers)
    assert not pages[:, 1:7].any()
    assert not pages[:, 8:].any()


def test_transfers_before_and_after_a_slab_is_present(backend: str, file: File) -> None:
    slab = PinnedSlab(256 * MIB, in_background=True)
    with Engine(backend=backend, slab=slab) as engine:
        memoryview(slab)[-MIB:] = b"x" * MIB
        start_write(engine, file, 0, slab, slab.nbytes - MIB, MIB).wait()
        for megabyte in range(0, 128, 2):
            start_read(engine, file, 0, slab, megabyte * MIB, MIB).wait()
        wait_until_present(slab)
        for megabyte in range(1, 128, 2):
            start_read(engine, file, 0, slab, megabyte * MIB, MIB).wait()
        assert bytes(memoryview(slab)[: 128 * MIB]) == b"x" * (128 * MIB)
        if not slab.notes:  # all in huge pages
            assert engine.notes == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_slab_may_go_before_it_is_present() -> None:
    slab = PinnedSlab(512 * MIB, in_background=True)
    address = slab.address
    child = os.fork()
    if child == 0:
        del slab
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert 0 <= absent_bytes() <= 512 * MIB
    del slab
    gc.collect()
    assert not _mapped(address)
    assert absent_bytes() == 0


def test_slab_that_can_not_be_is_refused() -> None:
    with pytest.raises(MemoryError, match="slab of 1024 TiB"):
        PinnedSlab(1 << 50)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match=f"got {nbytes}"):
            PinnedSlab(nbytes)


def test_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    with File(str(path), create=True) as file:
        assert file.path == str(path)
        assert file.direct == (file.notes == [])
        file.reserve(MIB)
        assert file.size_bytes == MIB
        file.sync()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(IoError) as caught:
        File(path, create=True)
    assert (caught.value.errno, caught.value.operation, caught.value.path) == (errno.EEXIST, "open", str(path))
    with pytest.raises(ValueError, match="is closed"):
        file.sync()
    file.close()


def test_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="ENOENT"):
        File(tmp_path / "missing")


def test_round_trip(backend: str, file: File, slab: PinnedSlab) -> None:
    view = memoryview(slab)
    data = random.Random(1).randbytes(MIB + PAGE)
    with Engine(backend=backend, block_bytes=64 * KIB, queue_depth=4, slab=slab) as engine:
        assert (engine.backend, engine.block_bytes) == (backend, 64 * KIB)
        view[PAGE : PAGE + len(data)] = data
        write = start_write(engine, file, 2 * PAGE, slab, PAGE, len(data))
        write.wait()
        read = start_read(engine, file, 2 * PAGE, slab, 4 * MIB, len(data), Priority.DEMAND)
        read.wait()
        assert bytes(view[4 * MIB : 4 * MIB + len(data)]) == data
        assert read.done
        _, timing = engine.take_timings()
        assert (timing["operation"], timing["priority"], timing["bytes"]) == (0, 0, len(data))
        assert 0 < timing["queued"] <= timing["submitted"] <= timing["done"] <= time.monotonic()
        counters = engine.counters()
    [drive] = counters.pop("drives")
    assert (drive["read_bytes"], drive["written_bytes"]) == (len(data), len(data))
    assert drive["read_seconds"] > 0 and drive["write_seconds"] > 0
    assert counters == {
        "read_bytes": len(data),
        "written_bytes": len(data),
        "read_transfers": 1,
        "write_transfers": 1,
        "failed_transfers": 0,
        "in_flight_blocks": 0,
        "queued_bytes": 0,
        "resubmitted_blocks": 0,
    }


def test_a_batch_moves_each_to_its_place(backend: str, file: File, slab: PinnedSlab) -> None:
    data = np.frombuffer(memoryview(slab), dtype=np.uint8)
    pieces = 100
    data[: pieces * PAGE] = np.random.default_rng(1).integers(0, 256, pieces * PAGE, dtype=np.uint8)
    order = np.random.default_rng(2).permutation(pieces)
    with Engine(backend=backend, slab=slab) as engine:
        for write in engine.start_batch(
            [("write", file, int(to) * PAGE, slab, at * PAGE, PAGE, Priority.DEMAND) for at, to in enumerate(order)]
        ):
            write.wait()
        read = start_read(engine, file, 0, slab, MIB, pieces * PAGE)
        read.wait()
    wanted = np.empty((pieces, PAGE), np.uint8)
    wanted[order] = data[: pieces * PAGE].reshape(pieces, PAGE)
    assert (data[MIB : MIB + pieces * PAGE].reshape(pieces, PAGE) == wanted).all()


def test_striped_file_is_a_file(backend: str, tmp_path: Path, slab: PinnedSlab) -> None:
    data = random.Random(3).randbytes(MIB + 5 * PAGE)
    memoryview(slab)[: len(data)] = data
    files = [File(tmp_path / name, create=True, drive=drive) for drive, name in enumerate(("a", "b"))]
    striped = StripedFile(files, pattern=[0, 1, 1], stripe_bytes=64 * KIB)
    striped.reserve(2 * MIB)
    with Engine(backend=backend, slab=slab, drives=2) as engine:
        engine.start_batch([("write", striped, PAGE, slab, 0, len(data), Priority.WRITE_BACK)])[0].wait()
        start_read(engine, striped, PAGE, slab, 4 * MIB, len(data)).wait()
        written = [drive["written_bytes"] for drive in engine.counters()["drives"]]
    assert bytes(memoryview(slab)[4 * MIB : 4 * MIB + len(data)]) == data
    assert sum(written) == len(data) and written[1] > written[0]
    assert striped.path == f"{tmp_path / 'a'}, {tmp_path / 'b'}"
    striped.close()
    with pytest.raises(ValueError, match="closed"):
        striped.reserve(1)


def test_files_and_drives_must_fit(tmp_path: Path, slab: PinnedSlab) -> None:
    with File(tmp_path / "c", create=True, drive=1) as file, Engine(slab=slab) as engine:
        with pytest.raises(ValueError, match="drive 1"):
            start_read(engine, file, 0, slab, 0, PAGE)
        with pytest.raises(ValueError, match="two files"):
            StripedFile([file], pattern=[0], stripe_bytes=PAGE)
    with pytest.raises(ValueError, match="drive"):
        File(tmp_path / "d", create=True, drive=-1)


def test_timings_come_as_an_array(file: File, slab: PinnedSlab) -> None:
    with Engine(slab=slab) as engine:
        for length in (PAGE, MIB):
            start_write(engine, file, 0, slab, 0, length).wait()
        start_read(engine, file, 0, slab, 0, PAGE, Priority.DEMAND).wait()
        timings = engine.take_timings()
        assert len(engine.take_timings()) == 0
    assert timings["bytes"].tolist() == [PAGE, MIB, PAGE]
    assert timings["drive"].tolist() == [0, 0, 0]
    assert timings["operation"].tolist() == [1, 1, 0]
    assert timings["priority"].tolist() == [2, 2, 0]
    assert not timings["failed"].any()
    assert (timings["queued"] <= timings["submitted"]).all() and (timings["submitted"] <= timings["done"]).all()


@pytest.mark.parametrize("rings", [1, 2])
def test_each_drive_of_a_striped_transfer_has_a_timing(tmp_path: Path, slab: PinnedSlab, rings: int) -> None:
    files = [File(tmp_path / str(drive), create=True, drive=drive) for drive in (0, 1)]
    striped = StripedFile(files, pattern=[0, 1, 0], stripe_bytes=64 * KIB)
    with Engine(slab=slab, drives=2, rings=rings, block_bytes=64 * KIB) as engine:
        striped.reserve(3 * MIB)
        transfer = start_write(engine, striped, 0, slab, 0, 3 * MIB)
        transfer.wait()
        ended = time.monotonic()
        timings = engine.take_timings()
        counted = [drive["written_bytes"] for drive in engine.counters()["drives"]]
    assert dict(zip(timings["drive"].tolist(), timings["bytes"].tolist(), strict=True)) == {0: 2 * MIB, 1: MIB}
    assert counted == [2 * MIB, MIB]
    assert len({*timings["queued"].tolist()}) == 1 and (timings["queued"] <= timings["submitted"]).all()
    assert (timings["submitted"] <= timings["done"]).all() and (timings["done"] <= ended).all()
    striped.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": "both"}, "interleaved"),
        ({"drives": 0}, "drives"),
        ({"backend": "threads", "sqpoll": True}, "io_uring"),
        ({"backend": "linux_aio", "iopoll": True}, "io_uring"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**options)


def test_batch_from_many_threads(backend: str, file: File, slab: PinnedSlab) -> None:
    view = memoryview(slab)
    wrong: list[int] = []

    def work(engine: Engine, seed: int) -> None:
        base = seed * MIB
        for round_ in range(5):
            data = random.Random(seed * 10 + round_).randbytes(8 * 16 * KIB)
            view[base : base + len(data)] = data
            ranges = range(base, base + len(data), 16 * KIB)
            for one in engine.start_batch(
                [("write", file, at, slab, at, 16 * KIB, Priority.WRITE_BACK) for at in ranges]
            ):
                one.wait()
            view[base : base + len(data)] = bytes(len(data))
            for one in engine.start_batch([("read", file, at, slab, at, 16 * KIB, Priority.DEMAND) for at in ranges]):
                one.wait()
            if bytes(view[base : base + len(data)]) != data:
                wrong.append(seed)

    with Engine(backend=backend, rings=2, block_bytes=PAGE, queue_depth=4, slab=slab) as engine:
        threads = [threading.Thread(target=work, args=(engine, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_demand_overtakes_what_is_queued(backend: str, file: File, slab: PinnedSlab) -> None:
    """Everything is queued under one lock, so the order in which the one ring takes it is the order of priorities."""
    kinds = [Priority.WRITE_BACK, Priority.PREFETCH, Priority.DEMAND, Priority.PREFETCH, Priority.DEMAND]
    with Engine(backend=backend, queue_depth=1, block_bytes=PAGE, slab=slab) as engine:
        transfers = engine.start_batch(
            [("read", file, i * MIB, slab, i * MIB, (32 + i) * PAGE, kind) for i, kind in enumerate(kinds)]
        )
        for transfer in transfers:
            transfer.wait()
        timings = engine.take_timings()
    order = sorted(range(len(kinds)), key=lambda i: timings["submitted"][i])
    assert [int(timings["bytes"][i]) // PAGE for i in order] == [34, 36, 33, 35, 32]


def test_failure_has_everything_and_is_raised_at_every_wait(backend: str, file: File, slab: PinnedSlab) -> None:
    with Engine(backend=backend, slab=slab) as engine:
        transfer = start_read(engine, file, 6 * MIB, slab, 0, 4 * MIB)
        for _ in range(2):
            with pytest.raises(IoError) as caught:
                transfer.wait()
            error = caught.value
            assert (error.operation, error.path, error.offset) == ("read", file.path, 6 * MIB)
            assert (error.length, error.backend, error.errno) == (4 * MIB, backend, errno.ENODATA)
            assert str(error).startswith(f"read 4 MiB at offset {6 * MIB} of {file.path}: the file ends before offset")
        assert transfer.done
        assert engine.counters()["failed_transfers"] == 1


def test_errno_of_the_kernel_comes_through(backend: str, slab: PinnedSlab) -> None:
    if backend == "linux_aio":
        pytest.skip("Linux AIO knows no character devices")
    words = r"write 4 KiB at offset 0 of /dev/full: ENOSPC \(No space left on device\)"
    with File("/dev/full") as full, Engine(backend=backend) as engine, pytest.raises(IoError, match=words):
        start_write(engine, full, 0, slab, 0, PAGE).wait()


def test_close_raises_the_failure_that_nobody_saw(backend: str, file: File, slab: PinnedSlab) -> None:
    engine = Engine(backend=backend)
    start_read(engine, file, 100 * MIB, slab, 0, PAGE)
    with pytest.raises(IoError, match="the file ends before"):
        engine.close()
    engine.close()
    with pytest.raises(ValueError, match="engine is closed"):
        start_read(engine, file, 0, slab, 0, PAGE)


def test_leaving_the_block_does_not_hide_its_exception(backend: str, file: File, slab: PinnedSlab) -> None:
    def fail_twice() -> None:
        with Engine(backend=backend) as engine:
            start_read(engine, file, 100 * MIB, slab, 0, PAGE)
            raise KeyError

    with pytest.raises(KeyError):
        fail_twice()


@pytest.mark.parametrize(
    ("offset", "slab_offset", "length"),
    [(0, 0, 0), (-PAGE, 0, PAGE), (0, -PAGE, PAGE), (0, 8 * MIB, PAGE), (0, 0, 8 * MIB + PAGE), (0, 0, -PAGE)],
)
def test_ranges_that_can_not_be_are_refused(
    backend: str, file: File, slab: PinnedSlab, offset: int, slab_offset: int, length: int
) -> None:
    good = ("read", file, 0, slab, 0, PAGE, Priority.DEMAND)
    with Engine(backend=backend) as engine:
        for start in (start_read, start_write):
            with pytest.raises(ValueError, match=f"{length} bytes at offset {offset} of .* slab offset {slab_offset}"):
                start(engine, file, offset, slab, slab_offset, length)
        with pytest.raises(ValueError, match="slab"):
            engine.start_batch([good, ("read", file, offset, slab, slab_offset, length, Priority.DEMAND)])
        engine.drain()
        assert engine.counters()["read_transfers"] == 0


def test_direct_files_need_alignment_and_buffered_ones_do_not(backend: str, file: File, slab: PinnedSlab) -> None:
    with Engine(backend=backend) as engine:
        for numbers in ((1, 0, PAGE), (0, 1, PAGE), (0, 0, 100)):
            if file.direct:
                with pytest.raises(ValueError, match="multiples of 4096"):
                    start_read(engine, file, numbers[0], slab, numbers[1], numbers[2])
            else:
                start_read(engine, file, numbers[0], slab, numbers[1], numbers[2]).wait()


def test_a_file_takes_what_the_drive_takes_where_asked(backend: str, tmp_path: Path, slab: PinnedSlab) -> None:
    with File(tmp_path / "fine", create=True, fine_alignment=True) as file, Engine(backend=backend) as engine:
        said = direct_alignment(tmp_path / "fine") if file.direct else None
        assert file.alignment == (1 if not file.direct else max(said) if said else PAGE)
        finest = file.alignment
        random_view = memoryview(slab)
        random_view[: 3 * PAGE] = random.randbytes(3 * PAGE)
        start_write(engine, file, 3 * finest, slab, finest, PAGE + finest).wait()
        start_read(engine, file, 3 * finest, slab, 4 * PAGE + finest, PAGE + finest).wait()
        start = 4 * PAGE + finest
        assert random_view[start : start + PAGE + finest] == random_view[finest : PAGE + 2 * finest]
        assert file.size_bytes == PAGE + 4 * finest
        if finest > 1:
            with pytest.raises(ValueError, match=f"multiples of {finest}"):
                start_read(engine, file, finest - 1, slab, 0, finest)


def test_a_file_that_one_may_only_read(backend: str, tmp_path: Path, slab: PinnedSlab) -> None:
    path = tmp_path / "read_only"
    path.write_bytes(b"x" * PAGE)
    with File(path, read_only=True) as file, Engine(backend=backend) as engine:
        start_read(engine, file, 0, slab, 0, PAGE).wait()
        assert bytes(memoryview(slab)[:PAGE]) == b"x" * PAGE
        with pytest.raises(IoError):
            start_write(engine, file, 0, slab, 0, PAGE).wait()


def test_a_slab_around_memory_of_someone_else(backend: str, file: File) -> None:
    memory = np.zeros(4 * PAGE, dtype=np.uint8)
    address = -(-memory.ctypes.data // PAGE) * PAGE
    inside = memory[address - memory.ctypes.data :][: 2 * PAGE]
    inside[:] = 7
    borrowed = PinnedSlab.around(address, 2 * PAGE)
    assert (borrowed.address, borrowed.nbytes) == (address, 2 * PAGE)
    with Engine(backend=backend) as engine:
        start_write(engine, file, 0, borrowed, 0, 2 * PAGE).wait()
        inside[:] = 0
        start_read(engine, file, 0, borrowed, 0, PAGE).wait()
    del borrowed
    assert (inside[:PAGE] == 7).all()
    assert (inside[PAGE:] == 0).all()
    for wrong in ((address + 1, PAGE), (0, PAGE), (address, 0)):
        with pytest.raises(ValueError):
            PinnedSlab.around(*wrong)


def test_requests_of_another_shape_are_refused(backend: str, file: File, slab: PinnedSlab) -> None:
    with Engine(backend=backend) as engine:
        for bad in ([("read", file, 0)], [None], [("read", None, 0, slab, 0, PAGE, Priority.DEMAND)]):
            with pytest.raises(TypeError):
                engine.start_batch(bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="erase"):
            engine.start_batch([("erase", file, 0, slab, 0, PAGE, Priority.DEMAND)])
        closed = File(file.path)
        closed.close()
        with pytest.raises(ValueError, match="is closed"):
            start_read(engine, closed, 0, slab, 0, PAGE)


def test_engine_options_are_checked() -> None:
    with pytest.raises(ValueError, match="choose auto, io_uring, linux_aio or threads"):
        Engine(backend="magic")
    with pytest.raises(ValueError, match="queue_depth"):
        Engine(queue_depth=0)
    with pytest.raises(ValueError, match="block_bytes"):
        Engine(block_bytes=1000)
    with pytest.raises(ValueError, match="rings"):
        Engine(rings=0)


def test_backend_is_chosen_or_refused_with_its_reason() -> None:
    with Engine() as engine:
        assert engine.backend == BACKENDS[0]
        assert (engine.notes != []) == (engine.backend != "io_uring")
    for name, available, reason in probe():
        if not available:
            with pytest.raises(IoError) as caught:
                Engine(backend=name)
            assert reason in str(caught.value)


def test_file_closed_under_a_transfer_stays_open_for_it(backend: str, tmp_path: Path, slab: PinnedSlab) -> None:
    path = tmp_path / "short-lived"
    file = File(path, create=True)
    memoryview(slab)[:MIB] = b"y" * MIB
    with Engine(backend=backend, queue_depth=1, block_bytes=PAGE) as engine:
        transfer = start_write(engine, file, 0, slab, 0, MIB)
        file.close()
        transfer.wait()
    assert path.read_bytes() == b"y" * MIB


def test_dropped_objects_outlive_their_transfer(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "dropped"
    file = File(path, create=True)
    slab = PinnedSlab(MIB, huge_pages=False)
    memoryview(slab)[:] = b"z" * MIB
    engine = Engine(backend=backend, queue_depth=1, block_bytes=PAGE, slab=slab)
    start_write(engine, file, 0, slab, 0, MIB)
    del file, slab
    gc.collect()
    del engine  # not closed: finishes its work first
    assert path.read_bytes() == b"z" * MIB


def test_waiting_lets_other_python_threads_run(backend: str, file: File, slab: PinnedSlab) -> None:
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    seen = False
    with Engine(backend=backend, queue_depth=1, block_bytes=PAGE) as engine:
        thread.start()
        for _ in range(100):  # on a busy machine the other thread may get no turn during one wait
            transfer = start_read(engine, file, 0, slab, 0, 8 * MIB)
            transfer.wait()
            [timing] = engine.take_timings()
            seen = any(timing["submitted"] <= at <= timing["done"] for at in ticks)
            if seen:
                break
        stop.set()
        thread.join()
    assert seen


@pytest.mark.parametrize("with_team", [False, True])
def test_ctrl_c_gets_through_a_wait(backend: str, file: File, slab: PinnedSlab, *, with_team: bool) -> None:
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Engine(backend=backend, queue_depth=1, block_bytes=PAGE, slab=slab) as engine:
            # Blocks one at a time, for longer than a wait goes without looking: rings serve a cached file at 6 GB/s.
            batch = [("read", file, 0, slab, 0, 8 * MIB, Priority.DEMAND)] * (16 if backend == "threads" else 256)
            for _ in range(5):  # on a busy machine all may be read before the alarm
                last = engine.start_batch(batch)[-1]
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0.02)
                    last.wait(with_team=with_team)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                if not last.done:
                    break
            assert not last.done
            last.wait(with_team=with_team)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _in_child(engine: Engine, file: File, slab: PinnedSlab, path: str) -> int:
    """What a forked DataLoader worker does with objects of its parent: mostly nothing, and it must not hang."""
    try:
        start_read(engine, file, 0, slab, 0, PAGE)
    except RuntimeError as error:
        if "forked child" not in str(error):
            return 2
    else:
        return 3
    try:
        file.fileno()
    except RuntimeError as error:
        if "forked child" not in str(error):
            return 5
    else:
        return 6
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # noqa: PTH115
    if any("io_uring" in link or link == path for link in links):
        return 7
    engine.drain()
    engine.close()
    file.close()
    try:
        memoryview(slab)
    except BufferError:
        return 0
    return 4


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_neither_hangs_nor_harms(backend: str, file: File, tmp_path: Path) -> None:
    slab = PinnedSlab(8 * MIB)
    engine = Engine(backend=backend, queue_depth=1, block_bytes=PAGE, slab=slab)
    transfer = start_read(engine, file, 0, slab, 0, 8 * MIB)
    waiter = threading.Thread(target=transfer.wait)
    waiter.start()
    child = os.fork()
    if child == 0:
        code = 9
        try:
            code = _in_child(engine, file, slab, str(tmp_path / "rank0.arena"))
            del engine, transfer, waiter, slab
            gc.collect()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    status = 0
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    waiter.join()
    transfer.wait()
    engine.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_worker_that_exits_normally_ends(backend: str, file: File, slab: PinnedSlab) -> None:
    with Engine(backend=backend, slab=slab) as engine:
        worker = multiprocessing.get_context("fork").Process(target=lambda: None)
        worker.start()
        worker.join(20)
        assert worker.exitcode == 0
        start_write(engine, file, 0, slab, 0, PAGE).wait()


def test_nothing_is_kept_after_close(backend: str, file: File) -> None:
    """The slab's Python object can't be weakly referenced, so its memory is looked for instead."""
    slab = PinnedSlab(64 * MIB)
    address = slab.address
    engine = Engine(backend=backend, slab=slab)
    transfer = start_read(engine, file, 0, slab, 0, MIB)
    transfer.wait()
    engine.close()
    assert _mapped(address)
    del slab
    gc.collect()
    assert not _mapped(address)
    assert transfer.done


def _mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return True
    return False


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="io_uring is refused here")
def test_small_pages_at_the_end_of_a_slab_cut_no_transfer(nvme_path: Path) -> None:
    device = nvme_path.stat().st_dev
    statistics = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not statistics.exists():
        pytest.skip(f"{nvme_path} is on no block device that counts its requests")

    def fewest_requests(slab: PinnedSlab, expected: int) -> int:
        """That the drive gets for a read of 4 MiB; others who use it only make them more, so asks until it is `expected`."""
        if not slab.huge_pages or slab.notes:
            pytest.skip("this machine has no huge pages to give")
        fewest = 1000
        with Engine(backend="io_uring", block_bytes=4 * MIB, queue_depth=1, slab=slab) as engine:
            for _ in range(3000):
                before = int(statistics.read_text().split()[0])
                start_read(engine, file, 0, slab, 0, 4 * MIB).wait()
                fewest = min(fewest, int(statistics.read_text().split()[0]) - before)
                if 0 < fewest <= expected:
                    break
        return fewest

    with File(nvme_path / "rank0.arena", create=True) as file:
        if not file.direct:
            pytest.skip(f"{nvme_path} takes no direct transfers")
        file.reserve(4 * MIB)
        whole = PinnedSlab(4 * MIB)
        with Engine(backend="io_uring", slab=whole) as engine:
            start_write(engine, file, 0, whole, 0, 4 * MIB).wait()
        # Where huge pages lie apart in memory, either takes one more; small pages would make it five.
        assert 0 < fewest_requests(PinnedSlab(5 * MIB), 2) <= fewest_requests(whole, 1) + 1


def test_direct_alignment_is_a_power_of_two_that_4_kib_satisfies(nvme_path: Path) -> None:
    with File(nvme_path / "rank0.arena", create=True) as opened:
        found = direct_alignment(opened.path)
        if found is None:
            pytest.skip("this kernel or file system does not tell the alignment of direct transfers")
        assert all(PAGE % bytes_ == 0 for bytes_ in found) if opened.direct else found == (0, 0)


def test_direct_alignment_of_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"stat.*missing: ENOENT") as caught:
        direct_alignment(tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT
