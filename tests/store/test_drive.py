"""What a drive is known by: names from /sys, whole disks under partitions and volumes, and no failure where nothing shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.store import drive
from infinity.store.drive import Drive, drive_of


@pytest.fixture
def sys_path(tmp_path: Path, nvme_path: Path) -> Path:
    """A /sys in which the folder is on partition nvme0n1p1; md0 is made of that disk and another."""
    root = tmp_path / "sys"
    for disk, model, sectors in (("nvme0n1", "Fast One", 2000), ("nvme1n1", "Fast Two", 4000)):
        (root / "devices" / disk / "device").mkdir(parents=True)
        (root / "devices" / disk / "device" / "model").write_text(f"{model}   \n")
        (root / "devices" / disk / "size").write_text(f"{sectors}\n")
    partition = root / "devices" / "nvme0n1" / "nvme0n1p1"
    partition.mkdir()
    (partition / "partition").write_text("1\n")
    slaves = root / "devices" / "md0" / "slaves"
    slaves.mkdir(parents=True)
    (slaves / "nvme0n1p1").symlink_to(partition)
    (slaves / "nvme1n1").symlink_to(root / "devices" / "nvme1n1")
    (root / "class" / "block").mkdir(parents=True)
    (root / "class" / "block" / "md0").symlink_to(root / "devices" / "md0")
    (root / "dev" / "block").mkdir(parents=True)
    point(root, nvme_path, partition)
    return root


def point(root: Path, folder: Path, device: Path | None) -> None:
    number = folder.stat().st_dev
    link = root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.unlink(missing_ok=True)
    if device is not None:
        link.symlink_to(device)


def test_partition_is_known_by_its_disk(sys_path: Path, nvme_path: Path) -> None:
    found = drive_of(nvme_path, sys_path=sys_path)
    assert (found.name, found.model, found.size_bytes) == ("nvme0n1", "Fast One", 2000 * 512)
    assert found.file_system


def test_volume_is_known_by_the_disks_under_it(sys_path: Path, nvme_path: Path) -> None:
    one = drive_of(nvme_path, sys_path=sys_path)
    point(sys_path, nvme_path, sys_path / "devices" / "md0")
    both = drive_of(nvme_path, sys_path=sys_path)
    assert (both.name, both.model, both.size_bytes) == ("nvme0n1+nvme1n1", "Fast One, Fast Two", 6000 * 512)
    assert both.shares_device_with(one)


def test_file_system_without_a_device_number_is_found_by_its_source(
    sys_path: Path, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point(sys_path, nvme_path, None)
    monkeypatch.setattr(drive, "_mount_of", lambda path: ("/dev/md0", "btrfs"))
    assert drive_of(nvme_path, sys_path=sys_path).devices == {"nvme0n1", "nvme1n1"}


def test_what_is_no_block_device_is_known_by_its_source(
    sys_path: Path, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point(sys_path, nvme_path, None)
    monkeypatch.setattr(drive, "_mount_of", lambda path: ("server:/export", "nfs4"))
    found = drive_of(nvme_path, sys_path=sys_path)
    assert (found.name, found.size_bytes, found.file_system) == ("server:/export", 0, "nfs4")
    assert found.shares_device_with(drive_of(nvme_path, sys_path=sys_path))


def test_different_disks_share_nothing() -> None:
    one, two = (Drive(name, "", 0, "ext4", frozenset({name})) for name in ("a", "b"))
    assert not one.shares_device_with(two)


def test_here_and_now(nvme_path: Path) -> None:
    found = drive_of(nvme_path)
    assert found.name
    assert found.devices
    with pytest.raises(OSError):
        drive_of(nvme_path / "nowhere")
