"""Floor 2. Which drive a folder is on, as the kernel names it: from /proc and /sys, without privileges.

Reads only; where a system hides what is asked (a network file system, a container), less is known, never an error.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from infinity.units import format_bytes

_SECTOR_BYTES = 512
"""What /sys counts sizes in, whatever the drive's own sectors are."""


@dataclass(frozen=True)
class Drive:
    """What is known of the drive under a folder.

    Attributes:
        name: the block devices, such as "nvme0n1"; the file system's source where there is none ("host:/export").
        model: as the drive tells it; "" where it doesn't.
        size_bytes: capacity of the devices together; 0 where unknown.
        file_system: "ext4", "xfs", ...
        devices: names of the whole disks that hold the bytes; two folders that share one compete for it.
    """

    name: str
    model: str
    size_bytes: int
    file_system: str
    devices: frozenset[str]

    @property
    def label(self) -> str:
        """For people: "nvme0n1 (Fast One, 1.82 TiB, ext4)"."""
        size = format_bytes(self.size_bytes) if self.size_bytes else ""
        known = ", ".join(each for each in (self.model, size, self.file_system) if each)
        return f"{self.name} ({known})" if known else self.name

    def shares_device_with(self, other: Drive) -> bool:
        """Whether the two use a disk in common."""
        return bool(self.devices & other.devices)


def drive_of(path: str | os.PathLike[str], *, sys_path: Path = Path("/sys")) -> Drive:
    """The drive that the existing folder `path` is on. Raises OSError where `path` can't be looked at."""
    number = Path(path).stat().st_dev
    source, file_system = _mount_of(Path(path).resolve())
    block = _block_device(number, source, sys_path)
    if block is None:
        return Drive(source or "unknown", "", 0, file_system, frozenset({f"st_dev {number}"}))
    disks = sorted(_whole_disks(block), key=lambda disk: disk.name)
    models = sorted({model for disk in disks if (model := _text(disk / "device" / "model"))})
    sizes = [int(_text(disk / "size") or 0) * _SECTOR_BYTES for disk in disks]
    names = [disk.name for disk in disks]
    return Drive("+".join(names), ", ".join(models), sum(sizes), file_system, frozenset(names))


def _block_device(number: int, source: str, sys_path: Path) -> Path | None:
    """The folder in /sys of the device with this number; by the source's name for file systems that have none (btrfs)."""
    by_number = sys_path / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if by_number.exists():
        return by_number.resolve()
    by_name = sys_path / "class" / "block" / Path(source).name
    return by_name.resolve() if source.startswith("/dev/") and by_name.exists() else None


def _whole_disks(block: Path) -> set[Path]:
    """The disks under a block device: of a partition the disk, of a RAID or volume those of all its parts."""
    parts = list((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if parts:
        return {disk for part in parts for disk in _whole_disks(part.resolve())}
    return {block.parent if (block / "partition").exists() else block}


def _mount_of(path: Path) -> tuple[str, str]:
    """Source and type of the file system that `path` is in: the last, deepest mount point above it."""
    best, source, file_system = -1, "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = Path(before.split()[4].replace("\\040", " "))
            if len(point.parts) >= best and path.is_relative_to(point):
                best = len(point.parts)
                file_system, source = after.split()[:2]
    return source, file_system


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
