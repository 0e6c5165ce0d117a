"""A hard limit of memory for a child process: a control group where one may be made, else a limit of the process itself.

With a control group the kernel takes nothing from elsewhere: what goes over the limit is ended. Without one, the kernel refuses
the process memory of its own (RLIMIT_DATA: private and writable, shared libraries and files left out).
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
SYSTEMD_RUN = ("systemd-run", "--user", "--scope", "--quiet", "--collect")


@dataclass(frozen=True)
class MemoryLimit:
    """How a child gets its limit. command: what its own is put behind. enter: runs in it before it begins."""

    in_words: str
    command: tuple[str, ...] = ()
    enter: Callable[[], None] | None = None

    def run(self, command: list[str]) -> int:
        """Run a command to its end on this terminal; its exit status, negative where a signal ended it."""
        with subprocess.Popen([*self.command, *command], preexec_fn=self.enter) as process:
            while True:
                try:
                    status = process.wait()
                    return 128 - status if status > 128 else status  # as systemd-run tells of signals
                except KeyboardInterrupt:  # it got that, too, and ends by itself
                    continue


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit | None]:
    """The hardest limit that this system lets us set; None where it lets us set none."""
    with contextlib.ExitStack() as stack:
        for way in (_systemd, _own_group, _of_the_process):
            if (limit := stack.enter_context(way(nbytes))) is not None:
                yield limit
                return
        yield None


@contextlib.contextmanager
def _systemd(nbytes: int) -> Iterator[MemoryLimit | None]:
    """A scope of the user's own service manager."""
    command = (*SYSTEMD_RUN, "--property", f"MemoryMax={nbytes}", "--property", "MemorySwapMax=0")
    works = shutil.which(command[0]) and not subprocess.run([*command, "true"], capture_output=True).returncode
    yield MemoryLimit("a control group, made by systemd", command) if works else None


@contextlib.contextmanager
def _own_group(nbytes: int) -> Iterator[MemoryLimit | None]:
    """A group below the one that this process is in, for those who may make one (root, as a rule)."""
    version_1, version_2 = "memory.limit_in_bytes", "memory.max"
    group = None
    try:
        parent = _parent()
        for left in parent.glob("infinity-demo-*"):  # by one that was killed; a group with processes in it stays
            with contextlib.suppress(OSError):
                left.rmdir()
        group = parent / f"infinity-demo-{os.getpid()}"
        group.mkdir()
        name = version_2 if (group / version_2).exists() else version_1
        (group / name).write_text(str(nbytes))
        swap = "memory.swap.max" if name == version_2 else "memory.memsw.limit_in_bytes"
        with contextlib.suppress(OSError):  # where the kernel counts swap
            (group / swap).write_text("0" if name == version_2 else str(nbytes))
        processes = str(group / "cgroup.procs")
        subprocess.run(["true"], preexec_fn=lambda: _enter(processes), check=True)
        limit: MemoryLimit | None = MemoryLimit("a control group", enter=lambda: _enter(processes))
    except (OSError, subprocess.SubprocessError):
        limit = None
    try:
        yield limit
    finally:
        for _ in range(50):  # the kernel takes a moment to take leave of what has ended
            with contextlib.suppress(OSError):
                if group is not None and group.exists():
                    group.rmdir()
                break
            time.sleep(0.1)


def _parent() -> Path:
    """The folder of this process's group, in the hierarchy that limits memory. Raises OSError where none is to be seen."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = CGROUPS / "memory" / path.lstrip("/")
            return folder if folder.is_dir() else CGROUPS / "memory"
    folder = CGROUPS
    if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
        raise OSError("no group below may limit memory")
    return folder


def _enter(processes: str) -> None:
    """Put the process that calls this into a group."""
    Path(processes).write_text(str(os.getpid()))


@contextlib.contextmanager
def _of_the_process(nbytes: int) -> Iterator[MemoryLimit | None]:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard not in (resource.RLIM_INFINITY,) and hard < nbytes:
        yield None
        return
    yield MemoryLimit(
        "a limit of the process (RLIMIT_DATA)",
        enter=lambda: resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes)),
    )
