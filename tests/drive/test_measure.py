"""What measuring a drive promises: bytes really moved, of written data, through the engine that was asked for, and nothing
left behind."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worse_drives import DriveLimit, worse_drives

import infinity
from infinity.aio import IoEngine, IoSettings
from infinity.drive import measure
from infinity.drive.measure import MIX_MODES, DriveTest, Trial, Workload, measure_drive
from infinity.errors import IoError, StoreError
from infinity.units import KIB, MIB

NBYTES = 32 * MIB
SHORT_SECONDS = 0.02
SMALL = IoSettings(block_bytes=256 * KIB, queue_depth=4)


@pytest.fixture
def drive_test(nvme_path: Path) -> Iterator[DriveTest]:
    with DriveTest(nvme_path, nbytes=NBYTES) as test:
        test.fill()
        yield test


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[IoEngine]:
    """Every engine that the measurement makes."""
    made: list[IoEngine] = []

    class Remembered(IoEngine):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(measure, "IoEngine", Remembered)
    return made


@pytest.mark.parametrize("workload", list(Workload))
def test_trial_moves_what_it_counts(
    drive_test: DriveTest, engines: list[IoEngine], backend: str, workload: Workload
) -> None:
    trial = drive_test.run(workload, IoSettings(backend, 256 * KIB, 4, 2), SHORT_SECONDS)
    (engine,) = engines
    moved = engine.read_bytes + engine.written_bytes
    assert 0 < trial.nbytes < moved  # the warm-up and what was under way at the end are not counted
    assert (engine.read_bytes > 0) == (workload is not Workload.WRITE)
    assert (engine.written_bytes > 0) == (workload is not Workload.READ)
    if workload is Workload.MIXED:
        assert engine.read_bytes == engine.written_bytes
    assert trial.seconds >= SHORT_SECONDS
    assert trial.cpu_seconds >= 0
    assert trial.settings == IoSettings(backend, 256 * KIB, 4, 2)


def test_trial_names_the_backend_behind_auto(drive_test: DriveTest) -> None:
    assert drive_test.run(Workload.READ, SMALL, SHORT_SECONDS).settings.backend in {"io_uring", "linux_aio", "threads"}


def test_rates_of_a_trial() -> None:
    trial = Trial(Workload.READ, SMALL, nbytes=3 << 30, seconds=2.0, cpu_seconds=0.6)
    assert trial.bytes_per_s == 1.5 * (1 << 30)
    assert trial.cpu_seconds_per_gib == pytest.approx(0.2)


def test_fill_writes_every_byte_with_data_that_does_not_compress(nvme_path: Path) -> None:
    with DriveTest(nvme_path, nbytes=NBYTES) as test:
        seen: list[int] = []
        test.fill(seen.append)
        data = torch.frombuffer(bytearray(os.pread(test.descriptor, 2 * NBYTES, 0)), dtype=torch.uint8)
        assert data.numel() == test.nbytes == NBYTES
        assert seen == sorted(seen)
        assert seen[0] == 0
        for chunk in data.split(test.chunk_bytes):
            counts = torch.bincount(chunk.long(), minlength=256).float() / chunk.numel()
            assert counts.max() < 2 / 256  # near 8 bits of entropy per byte


def test_measuring_draws_none_of_the_trainings_random_numbers(nvme_path: Path) -> None:
    before = torch.get_rng_state()
    with DriveTest(nvme_path, nbytes=NBYTES) as test:
        test.fill()
    assert torch.equal(torch.get_rng_state(), before)


def test_trials_leave_the_data_random(drive_test: DriveTest) -> None:
    for workload in Workload:
        drive_test.run(workload, SMALL, SHORT_SECONDS)
    data = torch.frombuffer(bytearray(os.pread(drive_test.descriptor, NBYTES, 0)), dtype=torch.int64)
    assert (data == 0).sum() < 10


def test_trial_before_the_file_is_written_is_refused(nvme_path: Path) -> None:
    with DriveTest(nvme_path, nbytes=NBYTES) as test, pytest.raises(AssertionError, match="not written"):
        test.run(Workload.READ, SMALL, SHORT_SECONDS)


@pytest.mark.parametrize("nbytes", [MIB, 2 * MIB])
def test_turns_go_through_the_whole_file_and_never_meet(drive_test: DriveTest, nbytes: int) -> None:
    count = NBYTES // nbytes
    for slots in (1, 3, measure._LEASES // 2):
        turns = [drive_test._requests(Workload.MIXED, nbytes, slot % slots) for slot in range(count)]
        assert {read.offset for read, _ in turns} == {turn * nbytes for turn in range(count)}
        assert {write.offset for _, write in turns} == {turn * nbytes for turn in range(count)}
        for first in range(count - slots):
            together = list(itertools.chain(*turns[first : first + slots]))
            assert len({request.offset for request in together}) == len(together)
            assert len({id(request.lease) for request in together}) == len(together)


def test_turns_of_another_size_go_on_at_their_own_boundary(drive_test: DriveTest) -> None:
    drive_test._requests(Workload.READ, MIB, 0)
    (request,) = drive_test._requests(Workload.READ, 2 * MIB, 0)
    assert request.offset % (2 * MIB) == 0


def test_settings_fit_while_half_of_the_pool_holds_them(drive_test: DriveTest) -> None:
    assert drive_test.fits(IoSettings(block_bytes=MIB, queue_depth=16))
    assert not drive_test.fits(IoSettings(block_bytes=MIB, queue_depth=17))
    assert drive_test.fits(IoSettings(block_bytes=drive_test.chunk_bytes, queue_depth=1))
    assert not drive_test.fits(IoSettings(block_bytes=2 * drive_test.chunk_bytes, queue_depth=1))


@pytest.mark.parametrize("workload", list(Workload))
@pytest.mark.parametrize("depth", [1, 4, 16, 256])
@pytest.mark.parametrize("block_bytes", [64 * KIB, 512 * KIB, 2 * MIB])
def test_what_is_queued_covers_what_is_in_flight_as_far_as_there_are_leases(
    drive_test: DriveTest, workload: Workload, depth: int, block_bytes: int
) -> None:
    settings = IoSettings(block_bytes=block_bytes, queue_depth=depth)
    nbytes = drive_test._transfer_bytes(settings)
    slots = drive_test._slots(workload, settings, nbytes)
    leases = slots * (2 if workload is Workload.MIXED else 1)
    assert drive_test.chunk_bytes % nbytes == 0
    assert nbytes % settings.block_bytes == 0
    assert leases <= measure._LEASES
    assert leases == measure._LEASES or leases * nbytes > settings.in_flight_bytes


@pytest.mark.parametrize("mix", MIX_MODES)
def test_every_way_of_mixing_runs(drive_test: DriveTest, mix: str) -> None:
    trial = drive_test.run(Workload.MIXED, IoSettings(block_bytes=256 * KIB, queue_depth=4, mix=mix), SHORT_SECONDS)
    assert trial.settings.mix == mix


def test_nothing_has_a_name_while_it_runs_and_nothing_is_left(nvme_path: Path) -> None:
    with DriveTest(nvme_path, nbytes=NBYTES) as test:
        test.fill()
        (folder,) = nvme_path.iterdir()
        assert sorted(file.name for file in folder.iterdir()) == ["lock", "run.json"]
        assert os.fstat(test.descriptor).st_nlink == 0
    assert list(nvme_path.iterdir()) == []


def test_failure_gives_everything_back(drive_test: DriveTest, nvme_path: Path) -> None:
    os.ftruncate(drive_test.descriptor, drive_test.chunk_bytes)
    with pytest.raises(IoError, match="file ends"):
        drive_test.run(Workload.READ, SMALL, 1.0)
    drive_test.close()
    assert list(nvme_path.iterdir()) == []
    drive_test.close()


def test_file_that_is_too_small_or_too_large_is_refused(nvme_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at least 16\.00 MiB"):
        DriveTest(nvme_path, nbytes=MIB)
    with pytest.raises(StoreError, match=r"the test file: .* are needed"):
        DriveTest(nvme_path, nbytes=1 << 60)
    assert list(nvme_path.iterdir()) == []


def test_drive_rates_are_positive_and_nothing_is_left(nvme_path: Path, backend: str) -> None:
    rates = measure_drive(nvme_path, nbytes=NBYTES, rounds=2, seconds=SHORT_SECONDS, backend=backend)
    assert rates.backend == backend
    assert rates.read_bytes_per_s > 0
    assert rates.write_bytes_per_s > 0
    assert list(nvme_path.iterdir()) == []
    assert infinity.measure_drive is measure_drive


def test_drive_rates_are_medians_of_the_rounds(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([1, 40, 6, 9, 10, 8, 5, 20, 7])  # read, write, both at once, in turn

    def run(_: DriveTest, workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        return Trial(workload, settings, next(speeds), 1.0, 0.0)

    monkeypatch.setattr(DriveTest, "run", run)
    rates = measure_drive(nvme_path, nbytes=NBYTES, rounds=3)
    assert (rates.read_bytes_per_s, rates.write_bytes_per_s, rates.mixed_bytes_per_s) == (5, 20, 7)


def test_drive_rates_of_no_backend(nvme_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        measure_drive(nvme_path, nbytes=NBYTES, backend="no such thing")
    assert list(nvme_path.iterdir()) == []


def test_path_that_can_not_be_used_is_a_store_error(nvme_path: Path) -> None:
    file = nvme_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError):
        measure_drive(file)


def test_a_drive_is_measured_as_slow_as_it_is(nvme_path: Path) -> None:
    with worse_drives([DriveLimit(bytes_per_s=1e8)]):
        rates = measure_drive(nvme_path, nbytes=NBYTES, rounds=1, seconds=SHORT_SECONDS, queue_depth=4, mix="bursts")
    assert 0 < rates.read_bytes_per_s < 2e8
