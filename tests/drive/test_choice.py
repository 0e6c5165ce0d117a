"""What storage settings promise: the config counts, then the drive's profile, then the drive's own limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.aio import IoSettings, probe
from infinity.config import load_config
from infinity.drive import choice as storage
from infinity.drive.choice import DriveProfile, StorageChoice, choose_storage, save_profile
from infinity.drive.describe import default_block_bytes, drive_of
from infinity.units import KIB, MIB

PROFILE = DriveProfile(
    written="2026-11-21T07:00:00+00:00",
    path="/mnt",
    drive="a drive",
    backend="threads",
    block_bytes=256 * KIB,
    queue_depth=7,
    rings=2,
    mix="bursts",
    read_bytes_per_s=3e9,
    write_bytes_per_s=1e9,
    mixed_bytes_per_s=2e9,
    cpu_seconds_per_gib=0.1,
)


def chosen(*paths: Path, aio: Any = None, **own: Any) -> StorageChoice:
    drive = {"device": "nvme", "nvme_path": [str(path) for path in paths]}
    source = {"zero_optimization": {"stage": 3, "offload_param": drive}, "infinity": own}
    return choose_storage(load_config(source if aio is None else source | {"aio": aio}))


def settled(*paths: Path, aio: Any = None, **own: Any) -> IoSettings:
    return chosen(*paths, aio=aio, **own).io


@pytest.mark.parametrize("aio", [None, "auto", {}, {"block_size": "auto"}])
def test_profile_serves_where_aio_is_absent_or_auto(nvme_path: Path, aio: Any) -> None:
    save_profile(PROFILE, nvme_path)
    assert settled(nvme_path / "run" / "7", aio=aio) == IoSettings("threads", 256 * KIB, 7, 2, "bursts")


def test_config_counts_key_by_key(nvme_path: Path) -> None:
    save_profile(PROFILE, nvme_path)
    io = settled(nvme_path, aio={"queue_depth": 5}, mix="interleaved", backend="auto")
    assert (io.queue_depth, io.block_bytes, io.mix) == (5, 256 * KIB, "interleaved")
    assert settled(nvme_path, rings=3).rings == 3
    assert settled(nvme_path, aio={"thread_count": 4}).rings == 4
    polling = settled(nvme_path, sqpoll=True)
    assert (polling.backend, polling.sqpoll, polling.iopoll) == ("auto", True, False)


def test_a_depth_belongs_to_its_block(nvme_path: Path) -> None:
    save_profile(PROFILE, nvme_path)
    assert settled(nvme_path, aio={"block_size": "8MiB"}).queue_depth == 4


def test_without_a_profile_the_drive_is_asked(nvme_path: Path) -> None:
    io = settled(nvme_path / "not" / "there" / "yet")
    assert io.block_bytes == default_block_bytes(drive_of(nvme_path))
    assert io.in_flight_bytes >= 16 * MIB
    assert (io.backend, io.rings, io.mix) == ("auto", 1, "interleaved")


def test_the_drive_is_named_and_one_in_memory_warned_of(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = drive_of(nvme_path)
    on_drive, in_memory = (dataclasses.replace(drive, file_system=name, disks=()) for name in ("ext4", "tmpfs"))
    monkeypatch.setattr(storage, "drive_of", {nvme_path: on_drive, nvme_path.parent: in_memory}.__getitem__)
    choice = chosen(nvme_path, nvme_path.parent)
    assert choice.notes[0] == f"{nvme_path} is on ext4, device {drive.device or drive.source}"
    (warning,) = choice.warnings
    assert warning.startswith(f"{nvme_path.parent} is on tmpfs") and "is memory, not a drive" in warning


def test_a_backend_that_is_refused_here_is_not_taken_from_the_profile(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(dataclasses.replace(PROFILE, backend="io_uring"), nvme_path)
    refused = [(name, name != "io_uring", "seccomp says no") for name, _, _ in probe()]
    monkeypatch.setattr(storage, "probe", lambda: refused)
    drive = {"device": "nvme", "nvme_path": str(nvme_path)}
    choice = choose_storage(load_config({"zero_optimization": {"stage": 3, "offload_param": drive}}))
    assert choice.io.backend == "auto"
    assert any("seccomp says no" in note for note in choice.notes)


def test_drives_are_weighed_by_their_profiles_where_all_have_one(nvme_path: Path) -> None:
    for name, factor in (("a", 3.0), ("b", 1.0)):
        (nvme_path / name).mkdir()
        fast = dataclasses.replace(PROFILE, read_bytes_per_s=factor * 1e9, write_bytes_per_s=factor * 1e9)
        save_profile(fast, nvme_path / name)
    bandwidths = chosen(nvme_path / "a", nvme_path / "b").bandwidths
    assert bandwidths is not None
    assert bandwidths[0] / bandwidths[1] == pytest.approx(3.0)
    (nvme_path / "b" / ".infinity-drive.json").unlink()
    assert chosen(nvme_path / "a", nvme_path / "b").bandwidths is None


def test_initialize_follows_the_profile(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_profile(PROFILE, nvme_path)
    drive = {"device": "nvme", "nvme_path": str(nvme_path)}
    settings = {
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "infinity": {"pinned_bytes_max": "16MiB"},
    }
    with caplog.at_level("INFO", logger="infinity"):
        engine, *_ = infinity.initialize(model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config=settings)
    assert engine.swap is not None
    machinery = engine.swap._machinery
    assert machinery is not None
    assert (machinery.engine.backend, machinery.engine.block_bytes) == ("threads", 256 * KIB)
    assert "drive profile of 2026-11-21" in caplog.text
    engine.close()
