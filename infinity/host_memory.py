"""Memory that this process may still take: available to the kernel, and allowed by control groups. And `HEAP`, which
gives the kernel back what the C library's heap keeps free.

Read from /proc and /sys below `root`. Unknown values are None.

[Note: A heap with holes]
torch aligns tensors to 64 bytes, and glibc before 2.38 finds no place for one where another of its size was freed. So a
heap grows in every pass. malloc_trim gives whole free pages back, which are cleared when used again, so it is called
only if the process takes an eighth more than it ever needed: docs/decisions/41-the-heap-gives-back-what-it-keeps-free.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infinity.kernel_files import number_of, text_of

_ROOT = Path("/")
_NO_LIMIT_BYTES = 1 << 60
"""Limit that control groups of version 1 show, approximately, if there is none."""

_GROWTH = 9 / 8
"""Memory that the process may take, over what it needed."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


@dataclass(frozen=True)
class GroupLimit:
    """The limit of one control group (v1 or v2) around this process.

    used_bytes: bytes charged to it now, page cache included; None if unknown. reclaimable_bytes: the part that the
    kernel reclaims on demand: page cache, and cached file names.
    """

    limit_bytes: int
    used_bytes: int | None
    reclaimable_bytes: int

    @property
    def left_bytes(self) -> int:
        """Bytes that its processes may still take."""
        return max(0, self.limit_bytes - max(0, (self.used_bytes or 0) - self.reclaimable_bytes))


@dataclass(frozen=True)
class _Version:
    """Names of one version of control groups. From `limits` on, the kernel reclaims memory, slows or ends a process."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


_VERSIONS = {
    1: _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: _Version(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
}


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the memory (bytes) that this process may still take, by machine and control groups."""
    machine = machine_memory(root).get("MemAvailable")
    rooms = [limit.left_bytes for limit in control_group_limits(root)]
    return min([*rooms, *([machine] if machine is not None else [])], default=None)


def taken_bytes() -> int:
    """Return the resident memory (bytes) of this process, without pages of files and shared memory."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    return mmap.PAGESIZE * (int(resident) - int(shared))


class Heap:
    """The heap of this process: [Note: A heap with holes]. Training thread, and autograd's for it."""

    def __init__(self) -> None:
        self._bytes_max = 0
        """Memory that the process may take until the next trim."""

    def trim_if_grown(self) -> None:
        """Give free pages back if the process takes more memory than before. Without malloc_trim, do nothing."""
        if _malloc_trim is None or taken_bytes() <= self._bytes_max:
            return
        _malloc_trim(0)
        self._bytes_max = max(self._bytes_max, int(_GROWTH * taken_bytes()))


HEAP = Heap()


def machine_memory(root: Path = _ROOT) -> dict[str, int]:
    """Return the sizes in /proc/meminfo, in bytes."""
    return _sizes(root / "proc/meminfo")


def _sizes(path: Path) -> dict[str, int]:
    sizes = {}
    for line in (text_of(path) or "").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes


def control_group_limits(root: Path = _ROOT) -> list[GroupLimit]:
    """Return the limits of the control groups around this process, innermost first."""
    limits: list[GroupLimit] = []
    for top, group, version in _memory_groups(root):
        # A container sees its own group as the top; the kernel's path may be outside of what it sees.
        folder = group if group.is_dir() else top
        while folder.is_relative_to(top):
            limits += _limit_of(folder, version)
            folder = folder.parent
    return limits


def ranks_here() -> int:
    """Return the number of ranks on this machine, this one included, from the launcher's environment."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        count = os.environ.get(name, "")
        if count.isdecimal():
            return max(1, int(count))
    return 1


def _limit_of(folder: Path, version: _Version) -> Iterator[GroupLimit]:
    numbers = [number_of(folder / name) for name in version.limits]
    limits = [number for number in numbers if number is not None and number < _NO_LIMIT_BYTES]
    if not limits:
        return
    lines = (line.split() for line in (text_of(folder / "memory.stat") or "").splitlines())
    stat = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}
    reclaimable = sum(stat.get(name, 0) for name in version.reclaimable)
    yield GroupLimit(min(limits), number_of(folder / version.used), reclaimable)


def _memory_groups(root: Path) -> Iterator[tuple[Path, Path, _Version]]:
    """Yield (mount point, this process's group, version) for every hierarchy that limits memory."""
    groups = {}
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            groups[1 if controllers else 2] = path
    for line in (text_of(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, *options = after.split(" ")
        version = {"cgroup2": 2, "cgroup": 1}.get(kind, 0)
        if version not in groups or (version == 1 and "memory" not in ",".join(options).split(",")):
            continue
        shown, point = before.split(" ")[3:5]  # `shown` is the group at the mount point
        top = root / point.lstrip("/")
        yield top, top / os.path.relpath(groups[version], shown), _VERSIONS[version]
