"""What measuring a drive promises: positive rates through the engine that was asked for, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.aio import IoEngine
from infinity.errors import StoreError
from infinity.store import probe
from infinity.store.probe import measure_drive

CHUNK = 256 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_CHUNK_BYTES", CHUNK)


def test_rates_are_positive_and_nothing_is_left(nvme_path: Path, backend: str) -> None:
    rates = measure_drive(nvme_path, nbytes=4 * CHUNK, rounds=2, backend=backend)
    assert rates.backend == backend
    assert rates.read_bytes_per_s > 0
    assert rates.write_bytes_per_s > 0
    assert list(nvme_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [1, CHUNK, 5 * CHUNK + 1])
def test_each_round_moves_what_it_was_told_in_whole_chunks(
    nvme_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[IoEngine] = []

    class Remembered(IoEngine):
        def close(self) -> None:
            engines.append(self)
            super().close()

    monkeypatch.setattr(probe, "IoEngine", Remembered)
    measure_drive(nvme_path, nbytes=nbytes, rounds=3, backend="threads")
    (engine,) = engines
    round_bytes = max(2, nbytes // CHUNK) * CHUNK
    assert engine.read_bytes == 3 * round_bytes
    assert engine.written_bytes == 4 * round_bytes  # the first round of writes is not counted


def test_failure_leaves_nothing(nvme_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        measure_drive(nvme_path, backend="no such thing")
    assert list(nvme_path.iterdir()) == []


def test_path_that_can_not_be_used_is_a_store_error(nvme_path: Path) -> None:
    file = nvme_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError):
        measure_drive(file)
