"""The drive under a path, as the kernel describes it: file system, disks, limits of the block queue.

Reads text under /proc and /sys and no device, so it needs no rights and no time. What the kernel does not say is None.
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
"""The unit of `size` in sysfs, whatever the sectors of the drive."""
_MEMORY = "is memory, not a drive: what is swapped out there takes up the memory that training should save"
_UNSUITABLE = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": "is the writable layer of a container, slow and short-lived; mount a folder of the host's drive instead",
    "btrfs": "copies on write and computes checksums, which costs bandwidth; ext4 and xfs don't",
    "zfs": "copies on write and computes checksums, which costs bandwidth; ext4 and xfs don't",
    "vfat": "holds no file of 4 GiB and reserves no space",
    "exfat": "reserves no space, so a write in the middle of a step may find none",
    "ecryptfs": "encrypts on the CPU and refuses direct I/O",
}
_NETWORK = "nfs nfs4 cifs smb3 9p ceph lustre afs gpfs beegfs glusterfs virtiofs gfs2 ocfs2 pvfs2 vboxsf prl_fs"
_UNSUITABLE |= dict.fromkeys(
    _NETWORK.split(),
    "is a network or host-shared file system: every byte of a step crosses it, slower than a local drive",
)
_FUSE = "goes through a program in user space for every block, far slower than the kernel's own file systems"
LOCAL = "put the nvme_path on ext4 or xfs on a local NVMe drive"
"""What to do about a weak place."""
_SPINNING = ("sata", "sas", "usb", "scsi")
"""Transports whose `rotational` flag can be trusted: virtual disks set it by default."""
_IDENTITIES = ("wwid", "device/wwid", "device/serial", "serial")


@dataclass(frozen=True)
class Queue:
    """Limits of one block queue, under the names they have in /sys/block/*/queue, where the kernel's documentation tells what
    they mean. max_segments: scattered 4 KiB pages end a request there."""

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
    """One whole disk.

    name: of the kernel, such as "nvme0n1". identity: the serial number or world-wide name; it stays when the name changes.
    transport: "nvme", "nvme-tcp", "virtio", "sata", "sas", "usb", "loop", ... rotational: of virtual disks this says little.
    """

    name: str
    model: str | None
    identity: str | None
    transport: str
    nbytes: int | None
    rotational: bool | None
    numa_node: int | None

    @property
    def weakness(self) -> str:
        """Why it is a poor place to train from; empty where nothing speaks against it."""
        if self.rotational and self.transport in _SPINNING:
            return "a spinning disk, too slow to train from"
        if self.transport in ("zram", "ram"):
            return "a disk in memory: what is swapped out there takes up the memory that training should save"
        if self.transport == "loop":
            return "a loop device: a file on another file system, which costs a second trip through the kernel"
        if self.transport in ("usb", "mmc"):
            return "slow, and not made to be written all day"
        if self.transport.startswith("nvme-") or self.transport in ("iscsi", "nbd", "rbd", "drbd"):
            return "behind a network"
        return ""


@dataclass(frozen=True)
class Drive:
    """The drive under a path.

    path: with symbolic links resolved. mount_point, file_system ("ext4"), source ("/dev/nvme0n1p2", "server:/export"),
    mount_options: of the mount that holds it. device: the block device with the file system, such as "nvme0n1p2" or
    "dm-0"; None for network and memory file systems and those that don't tell. layers: what lies between it and the disks,
    such as "dm-0 (LVM data-swap)" or "md0 (raid0)". disks: the whole disks at the bottom. queue: the limits that a request of
    the file system meets first.
    """

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
        """The names of the disks, such as "2 x Samsung SSD 990 PRO 2TB"; the file system's type where there are none."""
        names = [disk.model or f"{disk.transport} disk" for disk in self.disks]
        counted = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
        return " + ".join(counted) or self.file_system

    @property
    def file_system_weakness(self) -> str:
        """Why its file system is a poor place to train from, after "it"; empty where nothing speaks against it."""
        return _UNSUITABLE.get(self.file_system) or (_FUSE if self.file_system.startswith("fuse") else "")

    @property
    def weaknesses(self) -> list[str]:
        """Why it is a poor place to train from, in sentences about "it"."""
        disks = [f"has {disk.name}, {disk.weakness}" for disk in self.disks if disk.weakness]
        return [*filter(None, [self.file_system_weakness]), *disks]

    @property
    def nbytes(self) -> int:
        """Bytes of all its disks; 0 where one doesn't tell."""
        sizes = [disk.nbytes or 0 for disk in self.disks]
        return sum(sizes) if all(sizes) else 0

    @property
    def identity(self) -> str:
        """A text that is the same for the same disks and file system, and differs for others, as far as the kernel can tell
        them apart."""
        disks = [disk.identity or f"{disk.model or disk.transport} {disk.name} {disk.nbytes}" for disk in self.disks]
        return " + ".join([self.file_system, *(disks or [self.source])])


def existing(path: str | os.PathLike[str]) -> Path:
    """`path`, or the nearest folder above it that exists."""
    absolute = Path(path).absolute()
    return next(place for place in (absolute, *absolute.parents) if os.access(place, os.F_OK))


def drive_of(
    path: str | os.PathLike[str], *, mountinfo: Path = Path("/proc/self/mountinfo"), sysfs: Path = Path("/sys")
) -> Drive:
    """The drive under `path`.

    Args:
        mountinfo, sysfs: where the kernel describes mounts and devices.

    Raises StoreError where `path` does not exist.
    """
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
    """A block size (bytes) to begin with: the largest power of two that the queue passes on as one request.

    Never below 512 KiB, where the cost per block shows, nor above 1 MiB: a training step reads and writes at once, and larger
    blocks make it 2 to 6 % longer on the drives we had. 1 MiB where the limit is unknown.
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
    """The mount of `path`: the deepest; of several on one point the last, which hides the others."""
    deepest = _Mount("", "/", (), "unknown", "unknown")
    for line in (text_of(mountinfo) or "").split("\n"):
        mount, separator, super_block = line.partition(" - ")
        if not separator:
            continue
        _, _, device_number, _, point, options, *_ = mount.split(" ")
        file_system, source, *super_options = super_block.split(" ")
        names = dict.fromkeys([*options.split(","), *",".join(super_options).split(",")])
        if "ro" in names:  # of the mount or of the file system: either forbids writing
            names.pop("rw", None)
        point = _unescape(point)
        if path.is_relative_to(point) and len(Path(point).parts) >= len(Path(deepest.point).parts):
            deepest = _Mount(device_number, point, tuple(filter(None, names)), file_system, _unescape(source))
    return deepest


def _unescape(text: str) -> str:
    """mountinfo writes blanks and the like as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _device_of(mount: _Mount, sysfs: Path) -> Path | None:
    """The folder of the mount's block device. btrfs gives a number that is no device's, but names one as its source."""
    names = [sysfs / "dev/block" / mount.device_number] if mount.device_number else []
    if mount.source.startswith("/dev/"):
        names.append(sysfs / "class/block" / Path(mount.source).resolve().name)
    return next((name.resolve() for name in names if name.exists()), None)


def _below(device: Path, sysfs: Path) -> tuple[list[str], list[Disk]]:
    """The layers from `device` down, such as "dm-0 (CRYPT-LUKS2 home)" or "md0 (raid0)", and the whole disks under them, each
    once."""
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
    kind = "-".join(uuid.split("-")[: 2 if uuid.startswith("CRYPT-") else 1])  # what follows are numbers
    words = " ".join(filter(None, [kind, text_of(disk / "dm/name"), text_of(disk / "md/level")]))
    layers = [f"{disk.name} ({words})" if words else disk.name]
    disks: list[Disk] = []
    for slave in slaves:
        more_layers, more_disks = _below(slave.resolve(), sysfs)
        layers += [layer for layer in more_layers if layer not in layers]
        disks += [disk for disk in more_disks if disk not in disks]
    return layers, disks


def _whole(device: Path) -> Path:
    """The disk of a partition; any other device itself."""
    return device.parent if (device / "partition").exists() else device


def _transport(disk: Path) -> str:
    """How the disk is attached, from the path of its device and the kernel's name for it."""
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
    """The first one said on the way up from the disk, or from its controller where the disk is a path over several."""
    for start in (disk, *_controllers(disk)):
        for folder in (start, *start.parents):
            if folder == sysfs:
                break
            node = number_of(folder / "numa_node")
            if node is not None and node >= 0:
                return node
    return None


def _controllers(disk: Path) -> list[Path]:
    """The NVMe controllers of a disk: its device, or with native multipath the members of its subsystem."""
    device = disk / "device"
    return [path.resolve() for path in (device, *sorted(device.glob("nvme*"))) if (path / "transport").exists()]


def _queue_of(device: Path) -> Queue:
    queue = _whole(device) / "queue"
    readers: dict[str, Callable[[Path], Any]] = {"scheduler": chosen_of, "io_poll": _flag_of, "write_cache": text_of}
    return Queue(**{field.name: readers.get(field.name, number_of)(queue / field.name) for field in fields(Queue)})


def _flag_of(file: Path) -> bool | None:
    number = number_of(file)
    return None if number is None else bool(number)
