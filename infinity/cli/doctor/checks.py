"""Floor 17. The doctor's checks: each looks at one thing and returns what it found as plain data. Nothing is printed here.

Run in order on the main thread by `examine`. torch and the compiled core are imported by the checks that need them, so that
one which can't be loaded is a finding like any other.
"""

from __future__ import annotations

import enum
import os
import platform
import re
import shlex
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import infinity
from infinity.cli.environment import (
    Container,
    HugePages,
    Limits,
    Machine,
    read_container,
    read_huge_pages,
    read_limits,
    read_machine,
)
from infinity.kernel_files import text_of
from infinity.units import GIB, KIB, MIB, PAGE_BYTES, format_bytes, format_count

if TYPE_CHECKING:
    from infinity.drive.describe import Disk, Drive, Queue

TRIAL_BYTES = 8 * MIB
"""What the trial writes and reads back."""
SLAB_BYTES = 64 * MIB
"""The trial slab: large enough that huge pages could be had, small enough for any machine that trains."""
STATE_BYTES_PER_PARAMETER = 12
"""On NVMe: 16-bit copy, 16-bit remainder of the master, two fp32 moments."""

_DECISIVE = ("software", "backends", "path", "trial")
"""Sections without which nobody can say that training works."""

_OPEN_FILES_MIN = 256
_MEMORY_BYTES_MIN = 1 * GIB
_AIO_REQUESTS_MIN = 1024

_UNSUITABLE = {
    "tmpfs": "is memory, not a drive: what is swapped out there takes up the memory that training should save",
    "ramfs": "is memory, not a drive: what is swapped out there takes up the memory that training should save",
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
_LOCAL = "put the nvme_path on ext4 or xfs on a local NVMe drive"
_SPINNING = ("sata", "sas", "usb", "scsi")
"""Transports whose word on `rotational` can be trusted: virtual disks claim it by default."""


class Mark(enum.Enum):
    """How a finding is meant. OK: as it should be. INFO: neither good nor bad. WARN: training works, but slower or less
    safely than it could. FAIL: training with NVMe does not work here."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report. name: what was looked at, in snake_case. text: what was found. next_move: what to do about
    it; every WARN and FAIL has one."""

    name: str
    mark: Mark
    text: str
    next_move: str = ""


@dataclass
class Section:
    """What one check found: `facts` for programs (JSON types under stable snake_case keys), `findings` for people."""

    name: str
    title: str
    facts: dict[str, object] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, mark: Mark, text: str, next_move: str = "") -> None:
        self.findings.append(Finding(name, mark, text, next_move))


def examine(path: Path) -> Iterator[Section]:
    """Look at everything, one section after the other; the last one tries to write and read under `path`.

    A check that stumbles over something nobody thought of says so in its section and does not keep the others from running.
    """
    place = Section("path", "Path")
    checks: list[tuple[Section, Callable[[Section], None]]] = [
        (Section("software", "Software"), check_software),
        (Section("machine", "Machine"), lambda section: check_machine(section, read_machine())),
        (Section("gpu", "GPU"), check_gpu),
        (Section("container", "Container and rights"), lambda section: check_container(section, read_container())),
        (Section("limits", "Limits"), lambda section: check_limits(section, read_limits(), read_container())),
        (Section("huge_pages", "Huge pages"), lambda section: check_huge_pages(section, read_huge_pages())),
        (Section("backends", "I/O backends"), lambda section: check_backends(section, read_container())),
        (place, partial(check_path, path=path)),
        (Section("drive", "Drive"), partial(check_drive, path=path)),
        (Section("trial", "Trial"), partial(check_trial, path=path, place=place)),
    ]
    for section, check in checks:
        try:
            check(section)
        except Exception as error:
            text = f"could not be looked at: {type(error).__name__}: {error}"
            mark = Mark.FAIL if section.name in _DECISIVE else Mark.WARN
            section.add("check", mark, text, "if nothing above explains it, report it with this line")
        yield section


def check_software(section: Section) -> None:
    """Versions, and whether the compiled core and torch can be loaded at all."""
    section.facts = {
        "infinity_version": infinity.__version__,
        "python_version": platform.python_version(),
        "torch_version": None,
    }
    section.add("infinity", Mark.OK, infinity.__version__)
    section.add("python", Mark.OK, f"{platform.python_version()} ({platform.python_implementation()})")
    try:
        with _signals_held():  # an exception raised by Ctrl-C while torch loads may abort the process
            import torch
    except Exception as error:  # a missing library of CUDA is an OSError
        section.add("torch", Mark.FAIL, f"torch can't be loaded: {error}", "install torch again: pip install torch")
    else:
        section.facts["torch_version"] = torch.__version__
        section.add("torch", Mark.OK, torch.__version__)
    try:
        from infinity import _aio  # noqa: F401
    except ImportError as error:
        move = "build it for this Python: make setup in a checkout, or pip install again"
        section.add("core", Mark.FAIL, f"the compiled core can't be loaded: {error}", move)


def check_machine(section: Section, machine: Machine) -> None:
    """Kernel, processors and memory."""
    section.facts = asdict(machine)
    section.add(
        "system", Mark.INFO, f"{machine.distribution or 'Linux'}, kernel {machine.kernel}, {machine.architecture}"
    )
    cpus = f"{machine.cpus} for this process"
    if machine.cpus_online:
        cpus += f", {machine.cpus_online} in the machine"
    if machine.numa_nodes:
        cpus += f", {machine.numa_nodes} NUMA node{'s' * (machine.numa_nodes > 1)}"
    section.add("cpus", Mark.INFO, cpus)
    _check_memory(section, machine)
    if machine.swap_bytes:
        text = f"{format_bytes(machine.swap_bytes)}, {format_bytes(machine.swap_free_bytes or 0)} free"
        section.add("swap", Mark.INFO, f"{text}; infinity.lock_memory keeps the pool out of it")
    elif machine.swap_bytes is not None:
        section.add("swap", Mark.INFO, "none")


def _check_memory(section: Section, machine: Machine) -> None:
    available = machine.memory_available_bytes
    text = f"{_size(machine.memory_bytes)}, {_size(available)} available"
    limit = machine.memory_limit_bytes
    if limit is not None:
        used = machine.memory_limit_used_bytes
        text += f"; a control group allows {format_bytes(limit)}" + (f", {format_bytes(used)} used" if used else "")
    low = min((each for each in (available, limit) if each is not None), default=_MEMORY_BYTES_MIN) < _MEMORY_BYTES_MIN
    move = "end other programs or raise the container's memory limit: Python, torch and a small pool take about 1 GiB"
    section.add("memory", Mark.WARN if low else Mark.OK, text, move if low else "")


def check_gpu(section: Section) -> None:
    """CUDA, if there is a device. Where there is none, CUDA is not touched."""
    section.facts = {"cuda_version": None, "driver_version": None, "available": False, "devices": []}
    try:
        import torch
    except Exception:
        section.add("cuda", Mark.INFO, "not looked at, as torch can't be loaded")
        return
    driver = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text_of(Path("/proc/driver/nvidia/version")) or "")
    version = torch.version.cuda or torch.version.hip
    section.facts |= {"cuda_version": version, "driver_version": driver[1] if driver else None}
    present = any(Path(each).exists() for each in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    if not version:
        move = "install the CUDA build of torch (pytorch.org/get-started) to train on the GPU" if present else ""
        text = "this torch is built for the CPU" + (", but there is a GPU" if present else "")
        section.add("cuda", Mark.WARN if present else Mark.INFO, text, move)
    elif not present:
        section.add("cuda", Mark.INFO, f"no GPU here: training runs on the CPU (torch is built for CUDA {version})")
    elif not torch.cuda.is_available():
        move = "see what nvidia-smi says; check the driver's version, and that CUDA_VISIBLE_DEVICES is not empty"
        section.add("cuda", Mark.WARN, f"there is a GPU, but torch (CUDA {version}) can't use it", move)
    else:
        _check_devices(section, f"CUDA {version}, driver {driver[1] if driver else 'unknown'}")


def _check_devices(section: Section, versions: str) -> None:
    import torch

    section.add("cuda", Mark.OK, versions)
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    section.facts |= {
        "available": True,
        "devices": [{"name": device.name, "memory_bytes": device.total_memory} for device in devices],
    }
    for number, device in enumerate(devices):
        section.add(f"device_{number}", Mark.OK, f"{device.name}, {format_bytes(device.total_memory)}")


def check_container(section: Section, container: Container) -> None:
    """What surrounds the process, and what that forbids."""
    section.facts = asdict(container)
    section.add("container", Mark.INFO, container.kind or "none, as far as one can see")
    if container.gvisor:
        move = "run under the machine's own kernel (docker run --runtime=runc) for io_uring, huge pages and full speed"
        section.add("gvisor", Mark.WARN, "the kernel is gVisor's: every system call goes through a sandbox", move)
    if container.seccomp == "filter":
        section.add("seccomp", Mark.INFO, "a filter decides on system calls; the backends below show what it refuses")
    elif container.seccomp:
        section.add("seccomp", Mark.OK if container.seccomp == "off" else Mark.INFO, container.seccomp)
    words = {0: "allowed for all", 1: "allowed for one group and CAP_SYS_ADMIN", 2: "off for all"}
    setting = container.io_uring_disabled
    if setting is not None:
        text = f"kernel.io_uring_disabled is {setting}: {words.get(setting, 'unknown')}"
        section.add("io_uring_sysctl", Mark.OK if setting == 0 else Mark.INFO, text)
    if container.cap_ipc_lock is not None:
        text = "held: locked memory has no limit" if container.cap_ipc_lock else "not held: the memlock limit counts"
        section.add("cap_ipc_lock", Mark.INFO, text)


def check_limits(section: Section, limits: Limits, container: Container) -> None:
    """Limits of the process that the pool, the arenas and the backends meet."""
    section.facts = asdict(limits)
    _check_memlock(section, limits, container)
    files = limits.open_files_soft
    text = "no limit" if files is None else f"{files} (at most {_or_none(limits.open_files_hard)})"
    few = files is not None and files < _OPEN_FILES_MIN
    section.add("open_files", Mark.WARN if few else Mark.OK, text, "raise it: ulimit -n 4096" if few else "")
    if limits.file_size_bytes is not None:
        text = f"no file may grow beyond {format_bytes(limits.file_size_bytes)}, and a rank's state is one file"
        section.add("file_size", Mark.WARN, text, "lift it: ulimit -f unlimited")
    if limits.aio_max_nr is not None and limits.aio_nr is not None:
        left = limits.aio_max_nr - limits.aio_nr
        text = f"{left} of {limits.aio_max_nr} requests of kernel AIO are free"
        move = f"sysctl -w fs.aio-max-nr={max(1 << 20, 2 * limits.aio_max_nr)} (as root)"
        scarce = left < _AIO_REQUESTS_MIN
        section.add("kernel_aio", Mark.WARN if scarce else Mark.OK, text, move if scarce else "")


def _check_memlock(section: Section, limits: Limits, container: Container) -> None:
    soft, hard = limits.memlock_soft_bytes, limits.memlock_hard_bytes
    text = f"{_size(soft)} (at most {_size(hard)})"
    if soft is None or container.cap_ipc_lock:
        why = "no limit" if soft is None else f"{text}, but CAP_IPC_LOCK lifts it"
        section.add("memlock", Mark.OK, f"{why}: a pool of any size can be registered and locked")
        return
    text += ": a larger pool is not registered with io_uring (more CPU per byte), nor locked (infinity.lock_memory)"
    move = "ulimit -l unlimited, or docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in a systemd unit"
    section.add("memlock", Mark.WARN, text, move)


def check_huge_pages(section: Section, pages: HugePages) -> None:
    """The settings, and a trial slab: what the kernel gives counts, not what it promises."""
    section.facts = asdict(pages) | {"trial_bytes": SLAB_BYTES, "trial_huge": None, "trial_notes": []}
    allow = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root, on the host)"
    if pages.enabled is None:
        section.add("transparent", Mark.WARN, "this kernel has no transparent huge pages", "use a kernel that has them")
    else:
        off = pages.enabled == "never"
        text = f"{pages.enabled} (defrag: {pages.defrag or 'unknown'})"
        section.add("transparent", Mark.WARN if off else Mark.OK, text, allow if off else "")
    for pool in pages.reserved:
        text = f"{pool.total} of {format_bytes(pool.page_bytes)}, {pool.free} free: memory that nothing else can use"
        section.add("reserved", Mark.INFO, text)
    _try_slab(section, allow)


def _try_slab(section: Section, allow: str) -> None:
    from infinity.aio import PinnedSlab

    try:
        slab = PinnedSlab(SLAB_BYTES)
    except MemoryError as error:
        section.add("trial", Mark.FAIL, str(error), "free memory, or raise the container's memory limit")
        return
    section.facts |= {"trial_huge": slab.huge_pages, "trial_notes": list(slab.notes)}
    if slab.huge_pages and not slab.notes:
        section.add("trial", Mark.OK, f"a slab of {format_bytes(SLAB_BYTES)} lies in huge pages")
        return
    text = "; ".join(slab.notes) or f"a slab of {format_bytes(SLAB_BYTES)} lies in small pages"
    section.add("trial", Mark.WARN, text, f"{allow}; echo 1 > /proc/sys/vm/compact_memory joins fragmented memory")


def check_backends(section: Section, container: Container) -> None:
    """Which ways to the drive work here; the best one that does is the one that "auto" takes."""
    from infinity.aio import probe

    found = probe()
    chosen = next((name for name, available, _ in found if available), None)
    section.facts = {
        "chosen": chosen,
        "probed": [{"name": name, "available": available, "reason": reason} for name, available, reason in found],
    }
    better = chosen is not None
    for name, available, reason in found:
        better = better and name != chosen
        if available:
            section.add(name, Mark.OK, reason + (' ("auto" takes it)' if name == chosen else ""))
        elif chosen is None:
            section.add(name, Mark.FAIL, reason, _backend_move(name, container))
        else:
            mark = Mark.WARN if better else Mark.INFO
            section.add(name, mark, reason, _backend_move(name, container) if better else "")


def _backend_move(name: str, container: Container) -> str:
    """What would make a refused backend available; what is known of the container is more exact than the errno."""
    if name == "io_uring":
        if container.gvisor:
            return "gVisor has none: run under the machine's own kernel (docker run --runtime=runc)"
        if container.io_uring_disabled == 2 or (container.io_uring_disabled == 1 and not container.cap_sys_admin):
            return "sysctl -w kernel.io_uring_disabled=0 (as root, on the host)"
        if container.seccomp == "filter":
            return (
                "start the container with a seccomp profile that allows io_uring_setup, io_uring_enter and "
                "io_uring_register (docker run --security-opt seccomp=PROFILE.json)"
            )
    return "do what the line above says; until then the next backend in the list is used"


def check_path(section: Section, path: Path) -> None:
    """Whether the path is a folder that takes files, and how much room there is."""
    section.facts = {"path": str(path), "usable": False, "free_bytes": None, "total_bytes": None, "free_files": None}
    refusal = _refusal(path)
    if refusal is not None:
        section.findings.append(refusal)
        return
    section.add("folder", Mark.OK, str(path))
    _check_room(section, path)
    section.facts["usable"] = all(each.mark is not Mark.FAIL for each in section.findings)


def _refusal(path: Path) -> Finding | None:
    """Why nothing can be written in `path`, if that shows without trying."""
    another = "or name another folder"
    try:
        status = path.stat()
    except FileNotFoundError:
        return Finding("folder", Mark.FAIL, f"{path} does not exist", f"mkdir -p {shlex.quote(str(path))}, {another}")
    except OSError as error:
        return Finding(
            "folder", Mark.FAIL, f"{path} can't be reached: {error.strerror}", f"correct the path, {another}"
        )
    if not stat.S_ISDIR(status.st_mode):
        return Finding("folder", Mark.FAIL, f"{path} is not a folder", "name the folder that swap files may be made in")
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return Finding("folder", Mark.FAIL, f"{path} is mounted read-only", f"mount it read-write, {another}")
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding("folder", Mark.FAIL, f"{path} is not writable for this user", f"change its owner, {another}")
    return None


def _check_room(section: Section, path: Path) -> None:
    from infinity.store.run_folder import free_bytes

    free = free_bytes(path)
    status = os.statvfs(path)
    total = status.f_blocks * status.f_frsize
    counts_files = status.f_files > 0
    section.facts |= {"free_bytes": free if total else None, "total_bytes": total or None}
    section.facts["free_files"] = status.f_favail if counts_files else None
    move = "remove files there, or name a folder on another drive"
    if free < TRIAL_BYTES + MIB:
        text = f"no space: {format_bytes(free)} of {format_bytes(total)} are free, and the trial alone takes more"
        section.add("space", Mark.FAIL, text, move)
    elif not total:
        section.add("space", Mark.INFO, "this file system does not say how much is free")
    else:
        room = f"{format_bytes(free)} of {format_bytes(total)} are free: room for {format_count(_parameters(free))}"
        text = f"{room} parameters at {STATE_BYTES_PER_PARAMETER} bytes each"
        tight = free < GIB
        section.add("space", Mark.WARN if tight else Mark.OK, text, move if tight else "")
    if counts_files and status.f_favail < 8:
        section.add("files", Mark.FAIL, "the file system can't hold another file (no inodes are free)", move)


def _parameters(nbytes: int) -> int:
    return nbytes // STATE_BYTES_PER_PARAMETER


def check_drive(section: Section, path: Path) -> None:
    """What lies under the path, or under the nearest folder above it that exists."""
    from infinity.drive.describe import default_block_bytes, drive_of

    drive = drive_of(next(each for each in (path, *path.parents) if os.access(each, os.F_OK)))
    block_bytes = default_block_bytes(drive)
    section.facts = asdict(drive) | {"model": drive.model, "identity": drive.identity, "block_bytes": block_bytes}
    _check_file_system(section, drive)
    for layer in drive.layers:
        encrypted = "(CRYPT" in layer
        text = f"{layer}" + (": encryption costs CPU for every byte" if encrypted else "")
        move = "use an unencrypted partition if the data may rest on one" if encrypted else ""
        section.add("layer", Mark.WARN if encrypted else Mark.INFO, text, move)
    for disk in drive.disks:
        _check_disk(section, disk)
    if drive.device:
        _check_queue(section, drive, drive.queue)
        section.add("block_size", Mark.INFO, f"{format_bytes(block_bytes)} to begin with, from the largest request")


def _check_file_system(section: Section, drive: Drive) -> None:
    options = ", ".join(drive.mount_options)
    text = f"{drive.file_system} on {drive.source}, mounted at {drive.mount_point} ({options})"
    why = _UNSUITABLE.get(drive.file_system) or (_FUSE if drive.file_system.startswith("fuse") else "")
    section.add(
        "file_system", Mark.WARN if why else Mark.OK, text + (f"; it {why}" if why else ""), _LOCAL if why else ""
    )


def _check_disk(section: Section, disk: Disk) -> None:
    text = f"{disk.name}: {disk.model or 'no model given'}, {disk.transport}, {_size(disk.nbytes)}"
    if disk.numa_node is not None:
        text += f", on NUMA node {disk.numa_node}"
    why = ""
    if disk.rotational and disk.transport in _SPINNING:
        why = "a spinning disk, too slow to train from"
    elif disk.transport in ("zram", "ram"):
        why = "a disk in memory: what is swapped out there takes up the memory that training should save"
    elif disk.transport == "loop":
        why = "a loop device: a file on another file system, which costs a second trip through the kernel"
    elif disk.transport in ("usb", "mmc"):
        why = "slow, and not made to be written all day"
    elif disk.transport.startswith("nvme-") or disk.transport in ("iscsi", "nbd", "rbd", "drbd"):
        why = "behind a network"
    section.add("disk", Mark.WARN if why else Mark.OK, text + (f"; {why}" if why else ""), _LOCAL if why else "")


def _check_queue(section: Section, drive: Drive, queue: Queue) -> None:
    text = f"requests of at most {_kib(queue.max_sectors_kb)} (the device: {_kib(queue.max_hw_sectors_kb)})"
    text += f" in {_or_none(queue.max_segments)} segments, {_or_none(queue.nr_requests)} in flight"
    small = (queue.max_sectors_kb or 512) < min(512, queue.max_hw_sectors_kb or 512)
    top = f"/sys/block/{drive.disks[0].name if len(drive.disks) == 1 and not drive.layers else drive.device}/queue"
    move = f"echo {min(queue.max_hw_sectors_kb or 512, 4096)} > {top}/max_sectors_kb (as root)"
    section.add("requests", Mark.WARN if small else Mark.INFO, text, move if small else "")
    slow = queue.scheduler == "bfq"
    text = f"scheduler {queue.scheduler or 'unknown'}, write cache {queue.write_cache or 'unknown'}, "
    text += {True: "poll queues", False: "no poll queues", None: "poll queues unknown"}[queue.io_poll]
    text += f", blocks of {_or_none(queue.logical_block_size)} B (physical {_or_none(queue.physical_block_size)} B)"
    move = f"echo none > {top}/scheduler (as root): bfq shares fairly at the cost of bandwidth" if slow else ""
    section.add("queue", Mark.WARN if slow else Mark.INFO, text, move)


@dataclass(frozen=True)
class Trial:
    """What came of writing and reading back `TRIAL_BYTES`. alignment: (of memory, of offset and length) in bytes, as the
    kernel tells it. identical: whether every bit came back. notes: what engine, pool and file say was refused."""

    backend: str
    direct: bool
    alignment: tuple[int, int] | None
    identical: bool
    notes: list[str]


def check_trial(section: Section, path: Path, place: Section) -> None:
    """Write random bytes through the engine into a run folder, read them back, compare them bit for bit."""
    section.facts = {"trial_bytes": TRIAL_BYTES}
    section.facts |= dict.fromkeys(["backend", "direct", "alignment", "identical", "notes"])
    if not place.facts["usable"]:
        section.add("write_and_read", Mark.INFO, "not tried, as the path can't be used")
        return
    try:
        trial = _try_engine(path)
    except (OSError, MemoryError) as error:
        section.add(
            "write_and_read", Mark.FAIL, f"failed: {error}", "do what the line says; dmesg tells of a failing drive"
        )
        return
    section.facts |= asdict(trial)
    _judge(section, trial)


def _try_engine(path: Path) -> Trial:
    import torch

    from infinity.aio import IoEngine, PinnedPool, Priority, Request, direct_alignment
    from infinity.store import RunFolder

    pool = PinnedPool(2 * TRIAL_BYTES)
    with _signals_held():
        folder = RunFolder(path)
    try:
        engine = IoEngine(pool)
        file = engine.open(folder.path / "trial", create=True)
        alignment = direct_alignment(file.path)
        file.reserve(TRIAL_BYTES)
        with pool.lease(TRIAL_BYTES) as source, pool.lease(TRIAL_BYTES) as target:
            source.view(torch.uint8).copy_(torch.frombuffer(bytearray(os.urandom(TRIAL_BYTES)), dtype=torch.uint8))
            for operation, lease in (("write", source), ("read", target)):
                engine.wait(engine.start([Request(operation, file, 0, lease, 0, TRIAL_BYTES, Priority.DEMAND)]))
            identical = torch.equal(source.view(torch.uint8), target.view(torch.uint8))
        file.close()
        engine.close()
    finally:
        with _signals_held():
            folder.close()
    notes = [*pool.notes, *engine.notes, *file.notes]
    return Trial(engine.backend, file.direct, alignment, identical, notes)


def _judge(section: Section, trial: Trial) -> None:
    text = f"{format_bytes(TRIAL_BYTES)} of random bytes through {trial.backend}"
    if trial.identical:
        section.add("write_and_read", Mark.OK, f"{text}: what was read is what was written, bit for bit")
    else:
        move = "don't train here: test the machine's memory and the drive (smartctl -a), and report it"
        section.add("write_and_read", Mark.FAIL, f"{text}: what was read is not what was written", move)
    if not trial.direct:
        text = "refused: transfers go through the page cache, which costs memory and CPU"
        section.add("direct_io", Mark.WARN, text, _LOCAL)
    elif trial.alignment is None:
        section.add("direct_io", Mark.OK, "works; the kernel does not tell the alignment it needs")
    else:
        memory, offset = trial.alignment
        fits = all(each and PAGE_BYTES % each == 0 for each in trial.alignment)
        text = f"works; alignment of memory {memory} B, of offset and length {offset} B"
        move = f"use a drive that takes {PAGE_BYTES} B, as every transfer is aligned to that"
        section.add("direct_io", Mark.OK if fits else Mark.FAIL, text, "" if fits else move)
    for note in trial.notes:
        section.add("note", Mark.INFO, note)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that would end the program wait until the block is done, so that a folder is made or removed as a whole."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, lambda got, _frame: arrived.append(got))) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def _size(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else format_bytes(nbytes)


def _kib(kib: int | None) -> str:
    if kib is None:
        return "unknown size"
    return "any size" if kib >= (1 << 31) - 1 else format_bytes(kib * KIB)


def _or_none(value: int | None) -> str:
    return "?" if value is None else str(value)
