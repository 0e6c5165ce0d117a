"""What is read out of fio, and how it is called: a sample of its output, and itself where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.aio import IoSettings
from infinity.cli.sweep import fio
from infinity.cli.sweep.fio import Fio, find_fio, parse_output
from infinity.drive.measure import DriveTest, Workload
from infinity.errors import IoError, StoreError
from infinity.units import KIB, MIB

# fio-3.33, two jobs of rw=rw in one group, for half a second; latencies and percentiles left out.
SAMPLE = """\
fio: a warning may come first
{
  "fio version" : "fio-3.33",
  "jobs" : [
    {
      "jobname" : "sweep",
      "groupid" : 0,
      "error" : 0,
      "eta" : 2147483647,
      "elapsed" : 1,
      "read" : {
        "io_bytes" : 989855744, "io_kbytes" : 966656, "bw_bytes" : 1967904063, "bw" : 1921781, "iops" : 1844.930417,
        "runtime" : 503, "total_ios" : 928, "short_ios" : 0, "drop_ios" : 0
      },
      "write" : {
        "io_bytes" : 1017118720, "io_kbytes" : 993280, "bw_bytes" : 2022104811, "bw" : 1974711, "iops" : 1900.596421,
        "runtime" : 503, "total_ios" : 956, "short_ios" : 0, "drop_ios" : 0
      },
      "trim" : { "io_bytes" : 0, "io_kbytes" : 0, "bw_bytes" : 0, "bw" : 0, "iops" : 0.0, "runtime" : 0 },
      "job_runtime" : 1003,
      "usr_cpu" : 1.595214,
      "sys_cpu" : 2.592223,
      "ctx" : 164
    }
  ]
}
"""


def changed(**values: Any) -> str:
    report = json.loads(SAMPLE[SAMPLE.index("{") :])
    report["jobs"][0] |= values
    return json.dumps(report)


def test_sample_is_read() -> None:
    nbytes, seconds, cpu_seconds = parse_output(SAMPLE)
    assert nbytes == 989855744 + 1017118720
    assert seconds == 0.503
    assert cpu_seconds == pytest.approx((0.01595214 + 0.02592223) * 1.003)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "can't be read"),
        ("fio: out of luck", "can't be read"),
        ("{", "can't be read"),
        ("{}", "can't be read"),
        (changed(job_runtime=None), "can't be read"),
        (changed(error=28), "No space left"),
        (changed(read={"io_bytes": 0, "runtime": 0}, write={"io_bytes": 0, "runtime": 0}), "no bytes"),
    ],
)
def test_output_that_is_none_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(IoError, match=reason):
        parse_output(text)


def test_missing_fio_is_told_with_the_next_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(StoreError, match="apt-get install fio"):
        find_fio()


@pytest.fixture
def drive_test(nvme_path: Path) -> Iterator[DriveTest]:
    with DriveTest(nvme_path, nbytes=64 * MIB) as test:
        test.fill()
        yield test


@pytest.fixture
def program() -> str:
    found = shutil.which("fio")
    if found is None:
        pytest.skip("fio is not installed")
    return found


@pytest.mark.parametrize("workload", list(Workload))
@pytest.mark.parametrize("io_engine", ["io_uring", "libaio"])
def test_fio_runs_on_our_file_and_leaves_nothing(
    drive_test: DriveTest, program: str, nvme_path: Path, workload: Workload, io_engine: str
) -> None:
    before = list(nvme_path.iterdir())
    settings = IoSettings(fio.NAME, 256 * KIB, 4, 2)
    trial = Fio(program, drive_test, io_engine).run(workload, settings, 0.05)
    assert trial.nbytes >= 256 * KIB
    assert trial.seconds > 0
    assert trial.settings == settings
    assert list(nvme_path.iterdir()) == before


def test_each_trial_goes_on_where_the_last_one_stopped(drive_test: DriveTest, program: str) -> None:
    runner = Fio(program, drive_test, "libaio")
    offsets = set()
    for _ in range(3):
        (offset,) = [each for each in runner.command(Workload.READ, IoSettings(), 0.05) if each.startswith("--offset=")]
        offsets.add(int(offset.partition("=")[2]))
        assert offsets <= set(range(0, drive_test.nbytes // 2, 4 * KIB))
        runner.run(Workload.READ, IoSettings(fio.NAME, 256 * KIB, 4), 0.05)
        runner._cursor += 4 * KIB  # however much it was, it is somewhere else now
    assert len(offsets) == 3


def test_jobs_start_together(drive_test: DriveTest, program: str) -> None:
    """Otherwise each has the drive to itself for a while, and their sum is more than the drive gives."""
    runner = Fio(program, drive_test, "libaio")
    assert not any("prerun" in option for option in runner.command(Workload.READ, IoSettings(fio.NAME, rings=1), 0.1))
    (barrier,) = [
        option for option in runner.command(Workload.READ, IoSettings(fio.NAME, rings=3), 0.1) if "prerun" in option
    ]
    assert "-ge 3" in barrier
    assert runner.run(Workload.READ, IoSettings(fio.NAME, 256 * KIB, 4, 3), 0.05).nbytes > 0  # none waits for ever


def test_goes_on_without_registered_buffers_where_the_limit_forbids_them(
    drive_test: DriveTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def call(self: Fio, workload: Workload, settings: IoSettings, seconds: float) -> subprocess.CompletedProcess[str]:
        commands.append(self.command(workload, settings, seconds))
        if "--fixedbufs=1" in commands[-1]:
            return subprocess.CompletedProcess([], 1, SAMPLE, "fio: func=io_queue_init, error=Cannot allocate memory")
        return subprocess.CompletedProcess([], 0, SAMPLE, "")

    monkeypatch.setattr(Fio, "_call", call)
    runner = Fio("fio", drive_test, "io_uring")
    runner.run(Workload.READ, IoSettings(), 0.1)
    runner.run(Workload.READ, IoSettings(), 0.1)
    assert ["--fixedbufs=1" in command for command in commands] == [True, False, False]


def test_failure_says_what_fio_said(drive_test: DriveTest, program: str) -> None:
    with pytest.raises(IoError, match="fio ended with status"):
        Fio(program, drive_test, "no-such-engine").run(Workload.READ, IoSettings(), 0.05)


def test_interrupted_fio_is_ended(drive_test: DriveTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    program = tmp_path / "fio"
    program.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 60\n")
    program.chmod(0o755)

    def interrupt(process: subprocess.Popen[str], *_: object, **__: object) -> tuple[str, str]:
        while not (pid_file.exists() and pid_file.read_text().strip()):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Fio(str(program), drive_test, "io_uring").run(Workload.READ, IoSettings(), 0.1)
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()
