"""What the doctor promises: the right verdict and exit code, a next move for every trouble, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launch
import pytest
import torch

import infinity.aio
from infinity.cli import bench
from infinity.cli.doctor import command as doctor_command
from infinity.cli.doctor import machine_checks, path_checks
from infinity.cli.doctor.findings import Finding, Mark, Section
from infinity.cli.environment import read_container, read_huge_pages, read_limits, read_machine
from infinity.drive.describe import Disk, Drive, Queue
from infinity.errors import IoError

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20
GIB = 1 << 30

NOWHERE = Path("/nowhere")
MACHINE = read_machine(NOWHERE) | {"memory_bytes": 64 * GIB, "memory_available_bytes": 32 * GIB}
CONTAINER = read_container(NOWHERE) | {"seccomp": "off", "io_uring_disabled": 0, "cap_ipc_lock": False}
LIMITS = read_limits(NOWHERE) | {
    "memlock_soft_bytes": 8 * MIB,
    "file_size_bytes": None,
    "open_files_soft": 1024,
    "aio_max_nr": 65536,
    "aio_nr": 0,
}
PAGES = read_huge_pages(NOWHERE) | {"enabled": "madvise", "defrag": "madvise"}
DISK = Disk("nvme0n1", "Fast", "eui.1", "nvme", 1 << 40, False, 0)
DRIVE = Drive("/x", "/x", "ext4", "/dev/nvme0n1", ("rw",), "nvme0n1", (), (DISK,), Queue(1280, 2048, 127, 1023, "none"))


def environment() -> dict[str, str]:
    colours = {"FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "NO_COLOR"}
    return {name: value for name, value in os.environ.items() if name not in colours}


def doctor(*arguments: str | Path, cwd: Path | None = None, before: str = "") -> subprocess.CompletedProcess[str]:
    """The program as a user runs it, its output piped; `before` is Python that runs first in the same process."""
    code = f"import sys; {before}\nfrom infinity.cli.bench import main; sys.exit(main())"
    return launch.code(code, "doctor", *map(str, arguments), cwd=cwd, environment=environment())


def verdict(done: subprocess.CompletedProcess[str]) -> str:
    """The word that the last paragraph begins with; on a machine with warnings that paragraph has two lines."""
    return done.stdout.rstrip().split("\n\n")[-1].split(": ")[0]


def marks(section: Section) -> dict[str, Mark]:
    return {each.name: each.mark for each in section.findings}


def moves(section: Section) -> dict[str, str]:
    return {each.name: each.next_move for each in section.findings}


def looked(check: Callable[..., None], *read: object) -> Section:
    section = Section("any", "Any")
    check(section, *read)
    for each in section.findings:
        assert each.text
        assert bool(each.next_move) == (each.mark in (Mark.WARN, Mark.FAIL)), each
    json.dumps(section.facts)
    return section


# The program


def test_a_folder_on_a_drive_passes(nvme_path: Path) -> None:
    done = doctor(nvme_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdict(done) == "ok"
    assert "bit for bit" in " ".join(done.stdout.split())
    assert done.stderr == ""
    assert list(nvme_path.iterdir()) == []


def test_piped_report_has_no_escape_codes_and_fits_80_columns(nvme_path: Path) -> None:
    lines = doctor(nvme_path).stdout.splitlines()
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    assert max(map(len, lines)) <= 80


def test_json_is_one_object_whose_keys_are_documented(nvme_path: Path) -> None:
    done = doctor(nvme_path, "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["works"] is True
    assert report["reasons"] == []
    assert report["path"] == str(nvme_path)
    assert report["sections"]["trial"]["identical"] is True
    assert report["sections"]["path"]["usable"] is True
    documented = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs/doctor.md").read_text()))
    assert keys_of(report) - documented == set()
    assert all(re.fullmatch(r"[a-z0-9_]+", key) for key in keys_of(report))


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_a_path_that_does_not_exist_fails_and_is_not_made(tmp_path: Path) -> None:
    done = doctor(tmp_path / "not" / "there", "--json", "-")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["works"] is False
    (reason,) = report["reasons"]
    assert reason.endswith("there does not exist")
    assert report["sections"]["drive"]["mount_point"], "the drive of the nearest folder is named anyway"
    assert list(tmp_path.iterdir()) == []


def test_a_path_under_a_file_and_a_file_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, said in ((tmp_path / "file", "is not a folder"), (tmp_path / "file" / "x", "Not a directory")):
        done = doctor(path)
        assert done.returncode == 1
        assert said in " ".join(done.stdout.split())
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("options", "said"), [("ro", "mounted read-only"), ("size=4m", "no space: ")])
def test_a_mount_that_takes_nothing_fails(tmp_path: Path, options: str, said: str) -> None:
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    setup = f"mount -t tmpfs -o {options} test {tmp_path}"
    if subprocess.run([*mount, setup], capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted in a namespace here")
    run = f'{setup} && exec "{sys.executable}" -m infinity.cli.bench doctor {tmp_path}'
    done = subprocess.run([*mount, run], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert said in " ".join(done.stdout.split())


def test_an_unwritable_folder_fails(tmp_path: Path) -> None:
    """root may write anywhere, unless that capability is taken from it."""
    as_anybody = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    tmp_path.chmod(0o500)
    command = [*as_anybody, sys.executable, "-m", "infinity.cli.bench", "doctor", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    except FileNotFoundError:
        pytest.skip("no setpriv here, and root may write anywhere")
    if "setpriv:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1
    assert "is not writable for this user" in " ".join(done.stdout.split())


def test_without_a_path_the_current_directory_is_checked(nvme_path: Path) -> None:
    done = doctor(cwd=nvme_path, before=f"sys.path.insert(0, {str(ROOT)!r})")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"No PATH given: checking the current directory, {nvme_path}" in " ".join(done.stdout.split())


def test_an_empty_path_is_wrong_usage() -> None:
    done = doctor("")
    assert done.returncode == 2
    assert "the path is empty" in done.stderr
    assert done.stdout == ""


def test_a_path_of_odd_characters_is_printed_without_harm(nvme_path: Path) -> None:
    odd = nvme_path / "two words \x1b[31m [red] \udcff"
    odd.mkdir()
    done = doctor(odd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert r"two words \x1b[31m [red] \udcff" in " ".join(done.stdout.split())
    assert json.loads(doctor(odd, "--json", "-").stdout)["path"] == str(odd)


def test_a_reader_that_goes_away_is_no_traceback(nvme_path: Path) -> None:
    command = f'"{sys.executable}" -m infinity.cli.bench doctor {nvme_path} | head -1'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.stderr == ""


def test_output_that_can_not_be_written_is_said_once(nvme_path: Path) -> None:
    command = [sys.executable, "-m", "infinity.cli.bench", "doctor", str(nvme_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "infinity-bench: [Errno 28] No space left on device\n"


def test_a_current_directory_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    code = (
        f"import os, sys; from infinity.cli.bench import main; os.rmdir({str(tmp_path)!r}); sys.exit(main(['doctor']))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "infinity-bench: the current directory no longer exists: cd to one that does\n"


# Signals, at the worst moments


INTERRUPTED = """
import os, signal
from infinity.store import run_folder
def at_once(inner):
    def outer(*arguments):
        os.kill(os.getpid(), signal.{name})
        return inner(*arguments)
    return outer
{place} = at_once({place})
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(
    "place", ["run_folder._fill", "run_folder.RunFolder", "run_folder._remove", "run_folder.free_bytes"]
)
def test_a_signal_ends_it_and_leaves_nothing(nvme_path: Path, name: str, place: str) -> None:
    done = doctor(nvme_path, before=f"exec({INTERRUPTED.format(name=name, place=place)!r})")
    assert done.returncode == 128 + signal.Signals[name]
    assert "Traceback" not in done.stderr
    assert list(nvme_path.iterdir()) == []


def test_ctrl_c_during_the_trial_leaves_nothing(nvme_path: Path) -> None:
    # In short sleeps: Python handles a signal that arrives just before a sleep only after it.
    waiting = "(print('.', flush=True), [time.sleep(0.01) for _ in range(6000)])"
    slow = f"import time, infinity.aio; infinity.aio.IoEngine.wait = lambda *_: {waiting}"
    command = [sys.executable, "-c", f"{slow}; import sys; from infinity.cli.bench import main; sys.exit(main())"]
    process = subprocess.Popen([*command, "doctor", str(nvme_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert len(list(nvme_path.iterdir())) == 1
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, b"infinity-bench: interrupted\n")
    assert time.monotonic() - began < 60
    assert list(nvme_path.iterdir()) == []


# The verdict


@pytest.fixture
def run_main(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], tuple[int, dict[str, Any]]]]:
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]

    def run() -> tuple[int, dict[str, Any]]:
        code = bench.main(["doctor", "--json", "-", str(nvme_path)])
        assert list(nvme_path.iterdir()) == []
        return code, json.loads(capsys.readouterr().out)

    yield run
    for number, handler in handlers:
        signal.signal(number, handler)


RunMain = Callable[[], tuple[int, dict[str, Any]]]


def test_no_backend_is_a_failure(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        infinity.aio, "probe", lambda: [("io_uring", False, "refused"), ("threads", False, "no threads")]
    )
    code, report = run_main()
    assert code == 1
    assert report["reasons"] == ["refused", "no threads"]
    assert report["sections"]["backends"]["chosen"] is None


def test_a_failed_trial_is_a_failure(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IoError("write 8 MiB: EIO (Input/output error)", 5)

    monkeypatch.setattr(infinity.aio.IoEngine, "wait", fail)
    code, report = run_main()
    assert code == 1
    assert report["reasons"] == ["failed: write 8 MiB: EIO (Input/output error)"]


def test_bytes_that_come_back_changed_are_a_failure(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    start = infinity.aio.IoEngine.start

    def start_elsewhere(self: Any, requests: Any) -> Any:
        """Read what lies 4 KiB before: the same file, other bytes."""
        moved = [
            dataclasses.replace(each, offset=4096, length=each.length - 4096) if each.operation == "read" else each
            for each in requests
        ]
        return start(self, moved)

    monkeypatch.setattr(infinity.aio.IoEngine, "start", start_elsewhere)
    code, report = run_main()
    assert code == 1
    assert report["sections"]["trial"]["identical"] is False
    assert "read back changed" in report["reasons"][0]


def test_a_check_that_stumbles_does_not_hide_the_others(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise ValueError("what is this")

    monkeypatch.setattr(doctor_command, "check_machine", stumble)
    code, report = run_main()
    assert code == 0
    (finding,) = [each for each in report["findings"] if each["section"] == "machine"]
    assert finding["mark"] == "warn"
    assert "ValueError: what is this" in finding["text"]
    monkeypatch.setattr(doctor_command, "check_path", stumble)
    assert run_main()[0] == 1, "an unchecked path is no proof that training works"


# The checks, on what other machines say


def test_backends_say_which_is_taken_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("io_uring", False, "refused"), ("linux_aio", True, "works"), ("threads", False, "none left")]
    monkeypatch.setattr(infinity.aio, "probe", lambda: found)
    section = looked(machine_checks.check_backends, CONTAINER)
    assert marks(section) == {"io_uring": Mark.WARN, "linux_aio": Mark.OK, "threads": Mark.INFO}
    assert section.facts["chosen"] == "linux_aio"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seccomp": "filter"}, "seccomp profile"),
        ({"io_uring_disabled": 2, "seccomp": "filter"}, "io_uring_disabled=0"),
        ({"io_uring_disabled": 1}, "io_uring_disabled=0"),
        ({"gvisor": True}, "gVisor has no io_uring"),
        ({"io_uring_disabled": 1, "cap_sys_admin": True}, "line above"),
    ],
)
def test_a_refused_io_uring_has_the_move_that_fits(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(infinity.aio, "probe", lambda: [("io_uring", False, "refused"), ("threads", True, "works")])
    section = looked(machine_checks.check_backends, CONTAINER | change)
    assert re.search(said, moves(section)["io_uring"])


@pytest.mark.parametrize(
    ("limits", "container", "mark"),
    [
        ({}, {}, Mark.WARN),
        ({}, {"cap_ipc_lock": True}, Mark.OK),
        ({"memlock_soft_bytes": None, "memlock_hard_bytes": None}, {}, Mark.OK),
    ],
)
def test_memlock(limits: dict[str, Any], container: dict[str, Any], mark: Mark) -> None:
    section = looked(machine_checks.check_limits, LIMITS | limits, CONTAINER | container)
    assert marks(section)["memlock"] is mark


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"open_files_soft": 64}, "open_files"),
        ({"aio_nr": 65000}, "kernel_aio"),
        ({"file_size_bytes": GIB}, "file_size"),
    ],
)
def test_a_low_limit_is_a_warning(limits: dict[str, Any], name: str) -> None:
    assert marks(looked(machine_checks.check_limits, LIMITS | limits, CONTAINER))[name] is Mark.WARN
    assert marks(looked(machine_checks.check_limits, LIMITS, CONTAINER)).get(name, Mark.OK) is Mark.OK


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        ({}, Mark.OK),
        ({"memory_limit_bytes": 512 * MIB, "memory_limit_used_bytes": MIB}, Mark.WARN),
        ({"memory_available_bytes": 100 * MIB}, Mark.WARN),
        ({"memory_bytes": None, "memory_available_bytes": None}, Mark.OK),
    ],
)
def test_memory(change: dict[str, Any], mark: Mark) -> None:
    found = looked(machine_checks.check_machine, MACHINE | change)
    assert marks(found)["memory"] is mark
    assert (
        (found.facts["memory_bytes_per_s"] is not None) == ("memory_speed" in marks(found)) == (mark is not Mark.WARN)
    )


class FakeSlab:
    """A slab that got, or did not get, what it asked for."""

    def __init__(self, huge_pages: bool, notes: list[str]) -> None:
        self.huge_pages = huge_pages
        self.notes = notes


@pytest.mark.parametrize(
    ("slab", "mark"),
    [
        (FakeSlab(True, []), Mark.OK),
        (FakeSlab(True, ["only 2 MiB are in huge pages"]), Mark.WARN),
        (FakeSlab(False, []), Mark.WARN),
        (None, Mark.FAIL),
    ],
)
def test_what_the_trial_slab_got_counts(monkeypatch: pytest.MonkeyPatch, slab: FakeSlab | None, mark: Mark) -> None:
    def allocate(_nbytes: int) -> FakeSlab:
        if slab is None:
            raise MemoryError("no memory for a slab")
        return slab

    monkeypatch.setattr(infinity.aio, "PinnedSlab", allocate)
    assert marks(looked(machine_checks.check_huge_pages, PAGES))["trial"] is mark


def test_huge_pages_that_are_off_are_a_warning() -> None:
    section = looked(machine_checks.check_huge_pages, PAGES | {"enabled": "never"})
    assert marks(section)["transparent"] is Mark.WARN
    assert "echo madvise" in moves(section)["transparent"]


@pytest.mark.parametrize(
    ("change", "name", "mark", "said"),
    [
        ({}, "file_system", Mark.OK, "ext4 on /dev/nvme0n1"),
        ({"file_system": "tmpfs"}, "file_system", Mark.WARN, "memory"),
        ({"file_system": "overlay"}, "file_system", Mark.WARN, "container"),
        ({"file_system": "nfs4"}, "file_system", Mark.WARN, "network"),
        ({"file_system": "fuse.sshfs"}, "file_system", Mark.WARN, "user space"),
        ({"layers": ("dm-0 (CRYPT-LUKS2 x)",)}, "layer", Mark.WARN, "encryption"),
        ({"layers": ("dm-0 (LVM x)",)}, "layer", Mark.INFO, "dm-0"),
        ({}, "disk", Mark.OK, "Fast, nvme, 1.00 TiB, on NUMA node 0"),
        ({"disks": (dataclasses.replace(DISK, transport="sata", rotational=True),)}, "disk", Mark.WARN, "spinning"),
        ({"disks": (dataclasses.replace(DISK, transport="virtio", rotational=True),)}, "disk", Mark.OK, "virtio"),
        ({"disks": (dataclasses.replace(DISK, transport="nvme-tcp"),)}, "disk", Mark.WARN, "network"),
        ({"disks": (dataclasses.replace(DISK, transport="zram"),)}, "disk", Mark.WARN, "memory"),
        ({"queue": Queue(max_sectors_kb=128, max_hw_sectors_kb=2048)}, "requests", Mark.WARN, "128.00 KiB"),
        ({"queue": Queue(max_sectors_kb=128, max_hw_sectors_kb=128)}, "requests", Mark.INFO, "128.00 KiB"),
        ({"queue": Queue()}, "requests", Mark.INFO, "unknown"),
        ({"queue": Queue(scheduler="bfq")}, "queue", Mark.WARN, "bfq"),
    ],
)
def test_drive(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], name: str, mark: Mark, said: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(path_checks, "drive_of", lambda _path: dataclasses.replace(DRIVE, **change))
    section = looked(path_checks.check_drive, tmp_path)
    (finding,) = [each for each in section.findings if each.name == name]
    assert finding.mark is mark
    assert said in finding.text


def test_cuda_is_not_touched_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() or Path("/dev/dxg").exists():
        pytest.skip("there is a GPU here")

    def touched() -> bool:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", touched)
    section = looked(machine_checks.check_gpu)
    assert marks(section)["cuda"] is Mark.INFO
    assert section.facts["available"] is False


@pytest.mark.parametrize(("fast", "mark"), [(True, Mark.OK), (False, Mark.WARN)])
def test_a_cpu_that_is_slow_in_bf16_is_told_of(fast: bool, mark: Mark, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU computes here")
    monkeypatch.setattr("infinity.device.staging.cpu_multiplies_fast_in", lambda dtype: fast)
    section = looked(machine_checks.check_gpu)
    assert marks(section)["bf16"] is mark and section.facts["cpu_multiplies_in_bf16"] is fast


@pytest.mark.gpu
def test_a_gpu_is_named() -> None:
    section = looked(machine_checks.check_gpu)
    assert section.facts["available"] is True
    assert marks(section)["device_0"] is Mark.OK


@pytest.mark.parametrize(
    ("direct", "alignment", "mark"),
    [
        (True, (4, 512), Mark.OK),
        (True, None, Mark.OK),
        (True, (512, 16384), Mark.FAIL),
        (False, (0, 0), Mark.WARN),
    ],
)
def test_direct_io(direct: bool, alignment: tuple[int, int] | None, mark: Mark) -> None:
    section = looked(path_checks._judge, path_checks.Trial("threads", direct, alignment, True, ["a note"]))
    assert marks(section)["direct_io"] is mark
    assert Finding("note", Mark.INFO, "a note") in section.findings
