"""What the short look at a drive promises: positive rates through the engine that was asked for, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from infinity.aio import DriveLimit, IoSettings
from infinity.drive.measure import DriveTest, Trial, Workload
from infinity.drive.probe import measure_drive
from infinity.errors import StoreError
from infinity.units import MIB

NBYTES = 32 * MIB
SHORT_SECONDS = 0.02


def test_drive_rates_are_positive_and_nothing_is_left(nvme_path: Path, backend: str) -> None:
    rates = measure_drive(nvme_path, nbytes=NBYTES, rounds=2, seconds=SHORT_SECONDS, backend=backend)
    assert rates.backend == backend
    assert rates.read_bytes_per_s > 0
    assert rates.write_bytes_per_s > 0
    assert list(nvme_path.iterdir()) == []
    assert infinity.measure_drive is measure_drive


def test_drive_rates_are_medians_of_the_rounds(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([1, 40, 9, 10, 5, 20])  # read, write, in turn

    def run(_: DriveTest, workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        return Trial(workload, settings, next(speeds), 1.0, 0.0)

    monkeypatch.setattr(DriveTest, "run", run)
    rates = measure_drive(nvme_path, nbytes=NBYTES, rounds=3)
    assert (rates.read_bytes_per_s, rates.write_bytes_per_s) == (5, 20)


def test_drive_rates_of_no_backend(nvme_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        measure_drive(nvme_path, nbytes=NBYTES, backend="no such thing")
    assert list(nvme_path.iterdir()) == []


def test_path_that_can_not_be_used_is_a_store_error(nvme_path: Path) -> None:
    file = nvme_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError):
        measure_drive(file)


def test_other_options_reach_the_engine(nvme_path: Path) -> None:
    limits = [DriveLimit(bytes_per_s=1e8)]
    rates = measure_drive(
        nvme_path, nbytes=NBYTES, rounds=1, seconds=SHORT_SECONDS, limits=limits, queue_depth=4, mix="bursts"
    )
    assert 0 < rates.read_bytes_per_s < 2e8
