"""Measures fio on the same bytes, with the same search as infinity's engine: one process per trial, which opens the
test file through our descriptor."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from tempfile import TemporaryDirectory
from typing import Any

from infinity.aio import IoSettings
from infinity.drive.measure import DriveTest, Trial, Workload
from infinity.errors import IoError, StoreError
from infinity.units import align_up

NAME = "fio"
"""fio as a backend in `IoSettings`; `rings` are then fio's jobs."""

# A job's clock starts when its buffers are ready. If jobs don't wait for each other, the first ends before the last
# begins, each has the drive to itself, and the sum of their rates exceeds the drive's.
_START_TOGETHER = "printf x >> ready; until [ $(stat -c %s ready) -ge {jobs} ]; do sleep 0.005; done"

_READWRITE = {Workload.READ: "read", Workload.WRITE: "write", Workload.MIXED: "rw"}


def find_fio() -> str:
    program = shutil.which("fio")
    if program is None:
        raise StoreError(errno.ENOENT, "--fio: no fio on the PATH: install it (apt-get install fio) or leave --fio out")
    return program


def version_of(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


class Fio:
    def __init__(self, program: str, test: DriveTest, io_engine: str) -> None:
        self._program = program
        self._test = test
        self.io_engine = io_engine
        self._cursor = 0
        self.registers_buffers = io_engine == "io_uring"

    def run(self, workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        done = self._call(workload, settings, seconds)
        if done.returncode and self.registers_buffers and os.strerror(errno.ENOMEM) in done.stderr:
            self.registers_buffers = False  # above the memlock limit: continue without, as our engine does
            done = self._call(workload, settings, seconds)
        if done.returncode:
            raise IoError(f"fio ended with status {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
        nbytes, elapsed, cpu_seconds = parse_output(done.stdout)
        self._cursor += nbytes
        return Trial(workload, settings, nbytes, elapsed, cpu_seconds)

    def command(self, workload: Workload, settings: IoSettings, seconds: float) -> list[str]:
        """Return the command line of one trial.

        A trial covers at most half of the file, from where the last one stopped, and each job a part of that, so that
        no bytes are read that the drive or a hypervisor may still cache. No ramp time: requests in flight at the start
        would count as moved, a tenth of a second of the drive's time at large depths.
        """
        range_bytes = self._test.nbytes // 2
        part = range_bytes // settings.rings // settings.block_bytes * settings.block_bytes
        options = {
            "name": "sweep",
            "filename": f"/proc/{os.getpid()}/fd/{self._test.descriptor}",
            "readwrite": _READWRITE[workload],
            "offset": align_up(self._cursor % range_bytes),
            "size": part,
            "offset_increment": part,
            "blocksize": settings.block_bytes,
            "iodepth": settings.queue_depth,
            "numjobs": settings.rings,
            "ioengine": self.io_engine,
            "direct": int(self._test.direct),
            "runtime": f"{max(1, round(seconds * 1000))}ms",
            "thread": 1,
            "group_reporting": 1,
            "randrepeat": 0,
            "scramble_buffers": 0,  # the buffers are random already; changing them costs CPU
            "allow_file_create": 0,
            "output-format": "json",
        }
        if settings.rings > 1:
            options |= {"exec_prerun": f"sh -c '{_START_TOGETHER.format(jobs=settings.rings)}'"}
        if self.io_engine == "io_uring":
            options |= {"registerfiles": 1, "fixedbufs": int(self.registers_buffers)}
        return [self._program, *(f"--{name}={value}" for name, value in options.items())]

    def _call(self, workload: Workload, settings: IoSettings, seconds: float) -> subprocess.CompletedProcess[str]:
        with TemporaryDirectory(prefix="infinity-fio-") as folder:
            return subprocess.run(
                self.command(workload, settings, seconds),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                # glibc then asks for huge pages for large blocks of memory, as our pinned pool does.
                env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
                cwd=folder,
                start_new_session=True,  # Ctrl-C reaches only us: run() kills fio on any exception
            )


def parse_output(text: str) -> tuple[int, float, float]:
    """Parse bytes moved, wall seconds, and CPU seconds of all jobs from fio's JSON, which may follow warnings."""
    try:
        report = json.loads(text[text.index("{") :])
        jobs: list[dict[str, Any]] = report["jobs"]
        failed = [job["error"] for job in jobs if job["error"]]
        if failed:
            raise IoError(f"a job of fio failed: {os.strerror(failed[0])}", failed[0])
        ways = [job[way] for job in jobs for way in ("read", "write")]
        nbytes = sum(int(way["io_bytes"]) for way in ways)
        milliseconds = max(int(way["runtime"]) for way in ways)
        # job_runtime is the sum over a group's jobs, and the percentages are of that.
        cpu_seconds = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in jobs)
    except (ValueError, KeyError, TypeError) as error:
        raise IoError(f"fio's output can't be read ({error!r}): {text.strip()[:200]!r}") from None
    if not nbytes or not milliseconds:
        raise IoError("fio moved no bytes")
    return nbytes, milliseconds / 1000, cpu_seconds
