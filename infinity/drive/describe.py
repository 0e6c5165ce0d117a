"""The drive under a path, as described by the kernel: file system, disks, limits of the block queue.

Reads text under /proc and /sys and no device, so it needs no permissions and no time. Unknown values are None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from infinity.errors import StoreError
from infinity.kernel_files import chosen_of, number_of, text_of
from infinity.units import KIB, MIB

_BLOCK_BYTES_MIN = 512 * KIB
_BLOCK_BYTES_MAX = 1 * MIB
_SECTOR_BYTES = 512
"""Unit of `size` in sysfs, for drives of any sector size."""
_MEMORY = "is memory, not a drive: state that is offloaded there uses the memory that offloading should save"
_UNSUITABLE = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": "is the writable layer of a container, slow and short-lived; mount a folder of the host's drive instead",
    "btrfs": "copies on write and computes checksums, which costs bandwidth; ext4 and xfs don't",
    "zfs": "copies on write and computes checksums, which costs bandwidth; ext4 and xfs don't",
    "vfat": "can't hold a file of 4 GiB, and reserves no space",
    "exfat": "reserves no space, so a write in the middle of a step may fail",
    "ecryptfs": "encrypts on the CPU and refuses direct I/O",
}
_NETWORK = "nfs nfs4 cifs smb3 9p ceph lustre afs gpfs beegfs glusterfs virtiofs gfs2 ocfs2 pvfs2 vboxsf prl_fs"
_UNSUITABLE |= dict.fromkeys(
    _NETWORK.split(),
    "is a network or host-shared file system: every byte of a step crosses it, slower than a local drive",
)
_FUSE = "sends every block through a program in user space, far slower than the kernel's own file systems"
LOCAL = "put the nvme_path on ext4 or xfs on a local NVMe drive"
_SPINNING = ("sata", "sas", "usb", "scsi")
"""Transports with a reliable `rotational` flag: virtual disks set it by default."""
_IDENTITIES = ("wwid", "device/wwid", "device/serial", "serial")


@dataclass(frozen=True)
class Queue:
    """Limits of one block queue, with the kernel's names. Scattered 4 KiB pages end a request at max_segments."""

    max_sectors_kb: int | None = None
    max_hw_sectors_kb: int | None = None
    max_segments: int | None = None
    nr_requests: int | None = None
    scheduler: str | None = None
    io_poll: bool | None = None
    write_cache: str | None = None
    dma_alignment: int | None = None
    logical_block_size: int | None = None
    physical_block_size: int | None = None


@dataclass(frozen=True)
class Disk:
    """One whole disk. identity: serial number or world-wide name. transport: "nvme", "nvme-tcp", "virtio", "sata",
    "sas", "usb", "loop", ... rotational: unreliable for virtual disks."""

    name: str
    model: str | None
    identity: str | None
    transport: str
    nbytes: int | None
    rotational: bool | None
    numa_node: int | None

    @property
    def weakness(self) -> str:
        """Reason why it is unsuitable for training; empty if none is known."""
        if self.rotational and self.transport in _SPINNING:
            return "a spinning disk, too slow to train from"
        if self.transport in ("zram", "ram"):
            return "a disk in memory: state that is offloaded there uses the memory that offloading should save"
        if self.transport == "loop":
            return "a loop device: a file on another file system, which costs a second trip through the kernel"
        if self.transport in ("usb", "mmc"):
            return "slow, and not made for continuous writes"
        if self.transport.startswith("nvme-") or self.transport in ("iscsi", "nbd", "rbd", "drbd"):
            return "behind a network"
        return ""


@dataclass(frozen=True)
class Drive:
    """The drive under a path. device: the file system's block device, such as "nvme0n1p2" or "dm-0". layers: between it
    and the disks, such as "dm-0 (LVM data-swap)" or "md0 (raid0)". queue: limits of the first queue that a request
    reaches."""

    path: str
    mount_point: str
    file_system: str
    source: str
    mount_options: tuple[str, ...]
    device: str | None
    layers: tuple[str, ...]
    disks: tuple[Disk, ...]
    queue: Queue

    @property
    def model(self) -> str:
        """The names of the disks, such as "2 x Samsung SSD 990 PRO 2TB"; without disks, the file system's type."""
        names = [disk.model or f"{disk.transport} disk" for disk in self.disks]
        counted = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
        return " + ".join(counted) or self.file_system

    @property
    def file_system_weakness(self) -> str:
        """Reason, as words after "it", why its file system is unsuitable for training; empty if none is known."""
        return _UNSUITABLE.get(self.file_system) or (_FUSE if self.file_system.startswith("fuse") else "")

    @property
    def weaknesses(self) -> list[str]:
        disks = [f"has {disk.name}, {disk.weakness}" for disk in self.disks if disk.weakness]
        return [*filter(None, [self.file_system_weakness]), *disks]

    @property
    def nbytes(self) -> int:
        """Bytes of all its disks; 0 if one is unknown."""
        sizes = [disk.nbytes or 0 for disk in self.disks]
        return sum(sizes) if all(sizes) else 0

    @property
    def identity(self) -> str:
        """A text that identifies the disks and the file system, as far as the kernel can tell them apart."""
        disks = [disk.identity or f"{disk.model or disk.transport} {disk.name} {disk.nbytes}" for disk in self.disks]
        return " + ".join([self.file_system, *(disks or [self.source])])


def existing(path: str | os.PathLike[str]) -> Path:
    """Return `path`, or the nearest existing folder above it."""
    absolute = Path(path).absolute()
    return next(place for place in (absolute, *absolute.parents) if os.access(place, os.F_OK))


def drive_of(
    path: str | os.PathLike[str], *, mountinfo: Path = Path("/proc/self/mountinfo"), sysfs: Path = Path("/sys")
) -> Drive:
    """Return the drive under `path`; `mountinfo` and `sysfs` are where the kernel describes mounts and devices. Raises
    StoreError if `path` does not exist."""
    try:
        resolved = Path(path).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (0, str(error))
        raise StoreError(number or 0, f"{os.fspath(path)}: {why}: name a folder that exists") from None
    mount = _mount_of(resolved, mountinfo)
    sysfs = sysfs.resolve()
    device = _device_of(mount, sysfs)
    layers, disks = _below(device, sysfs) if device else ([], [])
    return Drive(
        path=str(resolved),
        mount_point=mount.point,
        file_system=mount.file_system,
        source=mount.source,
        mount_options=mount.options,
        device=device.name if device else None,
        layers=tuple(layers),
        disks=tuple(disks),
        queue=_queue_of(device) if device else Queue(),
    )


def default_block_bytes(drive: Drive) -> int:
    """Return the largest power of two that the queue passes on as one request; 1 MiB if that is unknown.

    At least 512 KiB, because below that the cost per block matters. At most 1 MiB, because larger blocks made a step,
    which reads and writes at once, 2 to 6 % longer on our drives.
    """
    limit = (drive.queue.max_sectors_kb or 0) * KIB
    if not limit:
        return _BLOCK_BYTES_MAX
    power = 1 << (limit.bit_length() - 1)
    return min(max(power, _BLOCK_BYTES_MIN), _BLOCK_BYTES_MAX)


class _Mount(NamedTuple):
    """A line of mountinfo (proc_pid_mountinfo(5))."""

    device_number: str
    point: str
    options: tuple[str, ...]
    file_system: str
    source: str


def _mount_of(path: Path, mountinfo: Path) -> _Mount:
    """Return the mount of `path`: the deepest; of several on one point the last, which hides the others."""
    deepest = _Mount("", "/", (), "unknown", "unknown")
    for line in (text_of(mountinfo) or "").split("\n"):
        mount, separator, super_block = line.partition(" - ")
        if not separator:
            continue
        _, _, device_number, _, point, options, *_ = mount.split(" ")
        file_system, source, *super_options = super_block.split(" ")
        names = dict.fromkeys([*options.split(","), *",".join(super_options).split(",")])
        if "ro" in names:  # of the mount or the file system: either forbids writing
            names.pop("rw", None)
        point = _unescape(point)
        if path.is_relative_to(point) and len(Path(point).parts) >= len(Path(deepest.point).parts):
            deepest = _Mount(device_number, point, tuple(filter(None, names)), file_system, _unescape(source))
    return deepest


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _device_of(mount: _Mount, sysfs: Path) -> Path | None:
    """Return the sysfs folder of the mount's block device; btrfs names it only as its source."""
    names = [sysfs / "dev/block" / mount.device_number] if mount.device_number else []
    if mount.source.startswith("/dev/"):
        names.append(sysfs / "class/block" / Path(mount.source).resolve().name)
    return next((name.resolve() for name in names if name.exists()), None)


def _below(device: Path, sysfs: Path) -> tuple[list[str], list[Disk]]:
    """Return the layers below `device`, such as "dm-0 (CRYPT-LUKS2 home)" or "md0 (raid0)", and the whole disks."""
    disk = _whole(device)
    slaves = sorted((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() else []
    if not slaves:
        size = number_of(disk / "size")
        return [], [
            Disk(
                name=disk.name,
                model=text_of(disk / "device/model"),
                identity=next((text for name in _IDENTITIES if (text := text_of(disk / name))), None),
                transport=_transport(disk),
                nbytes=None if size is None else size * _SECTOR_BYTES,
                rotational=_flag_of(disk / "queue/rotational"),
                numa_node=_numa_node(disk, sysfs),
            )
        ]
    uuid = text_of(disk / "dm/uuid") or ""
    kind = "-".join(uuid.split("-")[: 2 if uuid.startswith("CRYPT-") else 1])  # numbers follow
    words = " ".join(filter(None, [kind, text_of(disk / "dm/name"), text_of(disk / "md/level")]))
    layers = [f"{disk.name} ({words})" if words else disk.name]
    disks: list[Disk] = []
    for slave in slaves:
        more_layers, more_disks = _below(slave.resolve(), sysfs)
        layers += [layer for layer in more_layers if layer not in layers]
        disks += [disk for disk in more_disks if disk not in disks]
    return layers, disks


def _whole(device: Path) -> Path:
    return device.parent if (device / "partition").exists() else device


def _transport(disk: Path) -> str:
    if disk.name.startswith("nvme"):
        kind = next((kind for controller in _controllers(disk) if (kind := text_of(controller / "transport"))), "pcie")
        return "nvme" if kind == "pcie" else f"nvme-{kind}"
    where = str(disk)
    for mark, transport in (
        (r"/usb\d", "usb"),
        (r"/virtio\d", "virtio"),
        (r"/ata\d", "sata"),
        (r"/end_device-", "sas"),
        (r"/session\d", "iscsi"),
        (r"/vbd-", "xen"),
        (r"/mmc", "mmc"),
        (r"/(vmbus|VMBUS)", "hyper-v"),
        (r"/host\d", "scsi"),
    ):
        if re.search(mark, where):
            return transport
    return re.sub(r"[-\d].*", "", disk.name)  # loop, zram, nbd, rbd, ...


def _numa_node(disk: Path, sysfs: Path) -> int | None:
    """Return the first node found upwards from the disk, or from its controllers if it has several paths."""
    for start in (disk, *_controllers(disk)):
        for folder in (start, *start.parents):
            if folder == sysfs:
                break
            node = number_of(folder / "numa_node")
            if node is not None and node >= 0:
                return node
    return None


def _controllers(disk: Path) -> list[Path]:
    """Return the NVMe controllers of a disk: its device, or with native multipath its subsystem's members."""
    device = disk / "device"
    return [path.resolve() for path in (device, *sorted(device.glob("nvme*"))) if (path / "transport").exists()]


def _queue_of(device: Path) -> Queue:
    queue = _whole(device) / "queue"
    readers: dict[str, Callable[[Path], Any]] = {"scheduler": chosen_of, "io_poll": _flag_of, "write_cache": text_of}
    return Queue(**{field.name: readers.get(field.name, number_of)(queue / field.name) for field in fields(Queue)})


def _flag_of(file: Path) -> bool | None:
    number = number_of(file)
    return None if number is None else bool(number)
