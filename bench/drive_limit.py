"""Makes the drive under a folder slower for child processes, by a control group. Needs root.

The kernel then passes on at most so many bytes a second of direct reads, and as many of direct writes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def drive_limit(folder: Path, bytes_per_s: int) -> Iterator[Callable[[], None]]:
    """Yield the function that puts a child process into the group (`preexec_fn`). Raises OSError if that is not
    permitted, or if `folder` is on no block device."""
    device = Path(f"/sys/dev/block/{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}").resolve()
    disk = device.parent if (device / "partition").exists() else device
    number = (disk / "dev").read_text().strip()
    version_1 = CGROUPS / "blkio"
    group = Path(tempfile.mkdtemp(prefix="drive-limit-", dir=version_1 if version_1.is_dir() else CGROUPS))
    try:
        if version_1.is_dir():
            for operation in ("read", "write"):
                (group / f"blkio.throttle.{operation}_bps_device").write_text(f"{number} {bytes_per_s}")
        else:
            (group / "io.max").write_text(f"{number} rbps={bytes_per_s} wbps={bytes_per_s}")
        processes = str(group / "cgroup.procs")
        yield lambda: _enter(processes)
    finally:
        for _ in range(50):  # the group is busy until the kernel has removed its last process
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _enter(processes: str) -> None:
    Path(processes).write_text(str(os.getpid()))
