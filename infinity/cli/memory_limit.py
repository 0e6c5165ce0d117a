"""Runs a command within a hard memory limit: a control group if permitted, else RLIMIT_DATA of the process.

The kernel kills a process that exceeds a control group's limit. With RLIMIT_DATA an allocation fails instead; that
counts private writable memory only, without shared libraries and files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from infinity.errors import InfinityError

CGROUPS = Path("/sys/fs/cgroup")
SYSTEMD_RUN = ("systemd-run", "--user", "--scope", "--quiet", "--collect")


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of a child process. command: prefix of the child's command. enter: runs in the child before it."""

    in_words: str
    command: tuple[str, ...] = ()
    enter: Callable[[], None] | None = None

    def run(self, command: list[str], *, pass_fds: Sequence[int] = (), stdout: TextIO | None = None) -> int:
        """Run a command on this terminal until it ends. Returns its exit status, -N if signal N ended it; 130 if Ctrl-C
        came and it did not succeed, as Python itself may exit with 1 while it starts."""
        interrupted = False
        with subprocess.Popen(
            [*self.command, *command], preexec_fn=self.enter, pass_fds=pass_fds, stdout=stdout
        ) as process:
            while True:
                try:
                    status = process.wait()
                    if interrupted and status > 0:
                        return 128 + signal.SIGINT
                    return 128 - status if status > 128 else status  # systemd-run returns 128 + N for signal N
                except KeyboardInterrupt:  # the child got it too, and ends by itself
                    interrupted = True
                except BaseException:
                    process.terminate()
                    raise


@contextlib.contextmanager
def memory_limit(nbytes: int, *, swap: bool = False) -> Iterator[MemoryLimit]:
    """Yield the strictest limit that this system permits; with `swap`, swap space does not count. Raises InfinityError if
    it permits none."""
    with contextlib.ExitStack() as stack:
        for way in (_systemd, _own_group, _of_the_process):
            if (limit := stack.enter_context(way(nbytes, swap))) is not None:
                yield limit
                return
        raise InfinityError(
            "this system permits no memory limit: run as root, or where systemd runs for the user (systemd-run --user)"
        )


@contextlib.contextmanager
def _systemd(nbytes: int, swap: bool = False) -> Iterator[MemoryLimit | None]:
    swap_max = "infinity" if swap else "0"
    command = (*SYSTEMD_RUN, "--property", f"MemoryMax={nbytes}", "--property", f"MemorySwapMax={swap_max}")
    works = shutil.which(command[0]) and not subprocess.run([*command, "true"], capture_output=True).returncode
    yield MemoryLimit("a control group, created by systemd", command) if works else None


@contextlib.contextmanager
def _own_group(nbytes: int, swap: bool = False) -> Iterator[MemoryLimit | None]:
    version_1, version_2 = "memory.limit_in_bytes", "memory.max"
    group = None
    try:
        parent = _parent()
        for left in parent.glob("infinity-limit-*"):  # of killed processes; a group in use stays
            with contextlib.suppress(OSError):
                left.rmdir()
        group = Path(tempfile.mkdtemp(prefix=f"infinity-limit-{os.getpid()}-", dir=parent))
        name = version_2 if (group / version_2).exists() else version_1
        (group / name).write_text(str(nbytes))
        if not swap:
            swap_name = "memory.swap.max" if name == version_2 else "memory.memsw.limit_in_bytes"
            with contextlib.suppress(OSError):  # a kernel that does not count swap has no such file
                (group / swap_name).write_text("0" if name == version_2 else str(nbytes))
        processes = str(group / "cgroup.procs")
        subprocess.run(["true"], preexec_fn=lambda: _enter(processes), check=True)
        limit: MemoryLimit | None = MemoryLimit("a control group", enter=lambda: _enter(processes))
    except (OSError, subprocess.SubprocessError):
        limit = None
    try:
        yield limit
    finally:
        for _ in range(50):  # the group is busy until the kernel has removed its last process
            with contextlib.suppress(OSError):
                if group is not None and group.exists():
                    group.rmdir()
                break
            time.sleep(0.1)


def _parent() -> Path:
    """Return this process's group folder in the hierarchy that limits memory. Raises OSError if there is none."""
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
    Path(processes).write_text(str(os.getpid()))


@contextlib.contextmanager
def _of_the_process(nbytes: int, swap: bool = False) -> Iterator[MemoryLimit | None]:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    may = not swap and (hard == resource.RLIM_INFINITY or hard >= nbytes)  # it counts what is in swap space, too
    enter = functools.partial(resource.setrlimit, resource.RLIMIT_DATA, (nbytes, nbytes))
    yield MemoryLimit("a process limit (RLIMIT_DATA)", enter=enter) if may else None
