"""The memory that may still be taken here: what the kernel has available, and what control groups leave of it.

Read from /proc and /sys, of which `root` is the folder. What the kernel does not say is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infinity.kernel_files import number_of, text_of

_ROOT = Path("/")
_NO_LIMIT_BYTES = 1 << 60
"""Control groups of version 1 write a number about this large where there is no limit."""


@dataclass(frozen=True)
class GroupLimit:
    """The limit of one control group (v1 or v2) around this process.

    used_bytes: what counts against it now, page cache included; None where nobody says. reclaimable_bytes: the part of that
    which the kernel takes back where memory is asked for: the page cache and what it keeps of file names.
    """

    limit_bytes: int
    used_bytes: int | None
    reclaimable_bytes: int

    @property
    def left_bytes(self) -> int:
        """What processes in it may still take."""
        return max(0, self.limit_bytes - max(0, (self.used_bytes or 0) - self.reclaimable_bytes))


@dataclass(frozen=True)
class _Version:
    """How one version of control groups names what it says. From `limits` on, the kernel takes memory back or slows down who
    asks for more, or ends it: neither is a place to be."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


_VERSIONS = {
    1: _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: _Version(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
}


def available_bytes(root: Path = _ROOT) -> int | None:
    """Memory that this process may still take (bytes): of the machine, and in every control group around it."""
    machine = machine_memory(root).get("MemAvailable")
    rooms = [limit.left_bytes for limit in control_group_limits(root)]
    return min([*rooms, *([machine] if machine is not None else [])], default=None)


def machine_memory(root: Path = _ROOT) -> dict[str, int]:
    """The lines of /proc/meminfo that are sizes, in bytes."""
    sizes = {}
    for line in (text_of(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes


def control_group_limits(root: Path = _ROOT) -> list[GroupLimit]:
    """Of the groups around this process that have one, from the innermost outward."""
    limits: list[GroupLimit] = []
    for top, group, version in _memory_groups(root):
        # A container sees its own group as the top; the path that the kernel gives may lie outside of what it sees.
        folder = group if group.is_dir() else top
        while folder.is_relative_to(top):
            limits += _limit_of(folder, version)
            folder = folder.parent
    return limits


def ranks_here() -> int:
    """How many ranks share this machine's memory, this one included, as their launcher tells."""
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
    """(where the hierarchy is mounted, this process's group in it, its version) for every hierarchy that limits memory."""
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
        shown, point = before.split(" ")[3:5]  # `shown` is the group that is seen at the mount point
        top = root / point.lstrip("/")
        yield top, top / os.path.relpath(groups[version], shown), _VERSIONS[version]
