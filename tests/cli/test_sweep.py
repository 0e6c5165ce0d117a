"""What `infinity-bench sweep` promises to who calls it: the results in the places where they are looked for, a block that the
config takes as it is, nothing left behind however it ends, and plain words where it can't be done."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.aio import IoSettings
from infinity.cli.bench import main
from infinity.cli.sweep import report as sweep_report
from infinity.cli.sweep.report import Swept, config_block, endurance, share_a_disk, wear_of
from infinity.cli.sweep.run import Sweep
from infinity.cli.sweep.search import Choice, Effort, Standing
from infinity.config import load_config
from infinity.drive.choice import FILE_NAME, load_profile
from infinity.drive.describe import Disk, Drive, Queue
from infinity.drive.measure import DriveTest, Workload
from infinity.units import KIB, MIB

COMMAND = [sys.executable, "-m", "infinity.cli.bench", "sweep"]
TINY = ["--quick", "--size", "64MiB", "--rounds", "1", "--backend", "threads"]
NEEDS_FIO = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


@dataclass
class Ran:
    status: int
    output: str
    errors: str
    folder: Path
    files: Path


def sweep(folder: Path, files: Path, *arguments: str) -> Ran:
    command = [*COMMAND, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=files, timeout=300, check=False)
    return Ran(done.returncode, done.stdout, done.stderr, folder, files)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """As `nvme_path`, for a run that many tests look at."""
    root = Path(os.environ.get("INFINITY_TEST_PATH") or Path(__file__).resolve().parents[2] / ".nvme")
    made = root / f"test-sweep-{os.getpid()}"
    made.mkdir(parents=True)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def ran(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    files = tmp_path_factory.mktemp("files")
    arguments = [*TINY, "--json", "found.json", "--params", "3B"]
    arguments += ["--plot", "found.png"] if importlib.util.find_spec("matplotlib") else []
    arguments += ["--fio"] if shutil.which("fio") else []
    done = sweep(folder, files, *arguments)
    assert done.status == 0, done.errors
    return done


@pytest.fixture(scope="module")
def found(ran: Ran) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((ran.files / "found.json").read_text())
    return values


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that tries next to nothing, and signal handlers put back; for runs in this process."""
    effort = Effort((256 * KIB, MIB), (4,), 1, 0.02, candidates=1, finalists=1, rounds=1, round_seconds=0.02)
    monkeypatch.setattr("infinity.cli.sweep.run.QUICK", effort)
    monkeypatch.setattr("signal.signal", lambda *_: None)


@pytest.mark.parametrize("load", ["read", "write", "mixed"])
def test_results_stand_where_others_look_for_them(found: dict[str, Any], load: str) -> None:
    result = found[load]
    assert 0 < result["bytes_per_s_min"] <= result["bytes_per_s"] <= result["bytes_per_s_max"]
    assert result["backend"] == "threads"
    assert result["block_bytes"] % 4096 == 0
    assert result["queue_depth"] >= 1
    assert result["rings"] >= 1
    assert result["rounds"] == 1
    assert result["cpu_seconds_per_gib"] > 0
    assert ("mix" in result) == (load == "mixed")
    assert found["backends"]["threads"][load] == result
    assert found["recommended"][load]["bytes_per_s"] <= result["bytes_per_s"] * (1 + 1e-9)


def test_results_name_their_machine(found: dict[str, Any], folder: Path) -> None:
    assert found["path"] == str(folder.resolve())
    assert found["kernel"] == os.uname().release
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["drive"]["name"]
    assert found["versions"]["infinity"]
    assert found["file_bytes"] == 64 * MIB
    assert found["seconds"] > 0
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", found["date"])


@NEEDS_FIO
@pytest.mark.parametrize("load", ["read", "write", "mixed"])
def test_fio_stands_beside_it(found: dict[str, Any], load: str) -> None:
    result = found["fio"][load]
    assert result["bytes_per_s"] > 0
    assert result["cpu_seconds_per_gib"] >= 0
    assert result["iodepth"] >= 1
    assert result["numjobs"] >= 1
    assert result["block_bytes"] >= 4096
    assert found["ratio"][load] == pytest.approx(found[load]["bytes_per_s"] / result["bytes_per_s"])
    assert found["versions"]["fio"].startswith("fio-")


def test_block_for_the_config_is_taken_there_as_it_is(found: dict[str, Any], ran: Ran) -> None:
    printed = json.loads(ran.output[ran.output.index('{\n  "aio"') : ran.output.rindex("}") + 1])
    assert printed == {"aio": found["aio"], "infinity": found["infinity"]}
    config = load_config(printed)
    assert config.aio.block_size == found["aio"]["block_size"]
    assert config.aio.queue_depth == found["aio"]["queue_depth"]
    assert config.io_rings == found["aio"]["intra_op_parallelism"]
    assert config.infinity.backend == "threads"


def test_words_tell_speed_wear_and_progress(ran: Ran) -> None:
    words = " ".join(ran.output.split())
    assert "One setting for all loads: threads" in words
    assert "Wear: a step writes 12 bytes per trained parameter" in words
    assert "3.0B" in words
    assert re.search(r"writing the test file.*; about \d+ (s|min) left", ran.errors)
    if shutil.which("fio"):
        assert "Relative to the best of fio" in words


def test_profile_is_all_that_stays(ran: Ran, found: dict[str, Any]) -> None:
    assert [path.name for path in ran.folder.iterdir()] == [FILE_NAME]
    profile = load_profile(ran.folder / "below")
    assert profile is not None
    assert profile.block_bytes == found["aio"]["block_size"]
    assert profile.queue_depth == found["aio"]["queue_depth"]
    assert profile.rings == found["aio"]["intra_op_parallelism"]
    assert profile.backend == "threads"
    assert profile.mixed_bytes_per_s == found["recommended"]["mixed"]["bytes_per_s"]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")
def test_plot_is_drawn(ran: Ran) -> None:
    assert (ran.files / "found.png").read_bytes().startswith(b"\x89PNG")


def test_json_on_standard_output_is_alone_there(
    nvme_path: Path, hasty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([str(nvme_path), *TINY, "--json", "-", "--no-profile"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["bench"] == "sweep"
    assert "For the training config" in captured.err
    assert list(nvme_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status", "word", "arguments"),
    [
        pytest.param(signal.SIGINT, 130, "io_uring|linux_aio|threads", [], id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, "io_uring|linux_aio|threads", [], id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, "fio", [*TINY, "--fio"], marks=NEEDS_FIO, id="Ctrl-C during fio"),
    ],
)
def test_ended_early_it_leaves_nothing_and_tells_what_it_found(
    nvme_path: Path, number: signal.Signals, status: int, word: str, arguments: list[str]
) -> None:
    process = subprocess.Popen(
        [*COMMAND, str(nvme_path), "--size", "64MiB", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = any(re.search(rf", ({word}), ", line) for line in process.stderr)  # a line of progress: a trial has ended
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert seen
    assert process.returncode == status, errors
    assert "Ended early" in output
    assert re.search(r"read +\d", output)
    assert "Traceback" not in errors
    assert list(nvme_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{folder}/nowhere"], "does not exist: mkdir -p"),
        (["{folder}/file"], "is not a folder"),
        (["{folder}", "--size", "1EiB"], "expected a number of bytes"),
        (["{folder}", "--size", "1000TiB"], "does not fit"),
        (["{folder}", "--size", "1MiB"], "at least"),
        (["{folder}", "--rounds", "0"], "at least 1"),
        (["{folder}", "--params", "many"], "expected a count"),
        (["{folder}", "--backend", "carrier_pigeon"], "no such backend; there are io_uring"),
        (["{folder}", "--json", "{folder}/nowhere/found.json"], "can't be written"),
        (["{folder}", "--json", "{folder}"], "can't be written"),
        (["{folder}", "--plot", "{folder}/found.doc"], "must end in"),
        (["{folder}", "--plot", "{folder}/nowhere/found.png"], "can't be written"),
        ([], "required: PATH"),
    ],
)
def test_what_can_not_be_done_is_refused_before_anything_is_written(
    nvme_path: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (nvme_path / "file").write_text("x")
    assert call([argument.format(folder=nvme_path) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""
    assert [path.name for path in nvme_path.iterdir()] == ["file"]


def call(arguments: list[str]) -> int | str | None:
    """The exit code of `infinity-bench sweep`, in this process."""
    try:
        return main(["sweep", *arguments])
    except SystemExit as ended:
        return ended.code


def test_missing_programs_are_named(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert call([str(nvme_path), "--fio"]) == 2
    assert "install it" in capsys.readouterr().err
    assert call([str(nvme_path), "--plot", "found.png"]) == 2
    assert "pip install matplotlib, or leave --plot out" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_of_somebody_else_is_refused(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvme_path.chmod(0o500)
    try:
        assert call([str(nvme_path)]) == 2
    finally:
        nvme_path.chmod(0o700)
    assert "not writable" in capsys.readouterr().err


# Several paths


def asked_for(folder: Path, **options: Any) -> argparse.Namespace:
    values = {"paths": [folder], "quick": True, "rounds": 1, "backend": ["threads"], "fio": False, "params": None}
    return argparse.Namespace(**(values | {"json": None, "plot": None, "no_profile": True} | options))


def test_two_paths_on_one_device_are_told_so(
    nvme_path: Path, hasty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [nvme_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    file = tmp_path / "found.json"
    assert call([*map(str, folders), *TINY, "--json", str(file), "--no-profile"]) == 0
    assert "are on one device" in " ".join(capsys.readouterr().out.split())
    found = json.loads(file.read_text())
    assert [result["path"] for result in found["paths"]] == [str(folder.resolve()) for folder in folders]
    assert all(result["read"]["bytes_per_s"] > 0 for result in found["paths"])
    assert found["one_device"] == [[str(folder.resolve()) for folder in folders]]
    assert "together" not in found


def test_two_drives_are_measured_alone_and_all_at_once(
    nvme_path: Path, hasty: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [nvme_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr("infinity.cli.sweep.run.drive_of", lambda path: drive(path.name))
    Sweep(asked_for(nvme_path, json=str(tmp_path / "found.json")), dict.fromkeys(folders, 64 * MIB)).run()
    together = json.loads((tmp_path / "found.json").read_text())["together"]
    assert set(together) == {"read", "write", "mixed"}
    assert all(result["bytes_per_s"] > 0 and result["of_sum"] > 0 for result in together.values())
    assert "All at once" in capsys.readouterr().out
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


# The sums and the words


def drive(name: str = "nvme0n1") -> Drive:
    disk = Disk(name, "Fast One", None, "nvme", 1 << 40, rotational=False, numa_node=None)
    return Drive("/x", "/", "ext4", f"/dev/{name}", (), name, (), (disk,), Queue())


def choice(rate: float = 3e9) -> Choice:
    settings = IoSettings("io_uring", 4 * MIB, 16, 2, "bursts")
    standing = Standing(settings, rate, rate, rate, 0.01, 3)
    return Choice(settings, rate, dict.fromkeys(Workload, standing))


def test_wear_is_bytes_written_over_the_life_of_the_drive() -> None:
    wear = wear_of(drive(), choice(3e9))
    per_day = 3e9 * 12 / 26 * 86400  # 12 of the 26 bytes that move are written
    assert wear["written_bytes_per_day"] == pytest.approx(per_day)
    assert wear["drive_writes_per_day"] == pytest.approx(per_day / 2**40)
    assert wear["days_at_1_dwpd_for_5_years"] == pytest.approx(5 * 365 / (per_day / 2**40))
    words = endurance(drive(), choice(3e9))
    assert "109 drive writes per day" in words
    assert "17 days" in words


def test_drive_of_unknown_size_has_no_drive_writes() -> None:
    unknown = dataclasses.replace(drive(), source="server:/export", disks=())
    assert set(wear_of(unknown, choice())) == {"written_bytes_per_day"}
    assert "drive writes" not in endurance(unknown, choice())


def test_drives_share_a_disk_or_a_source() -> None:
    one, other, both = (
        drive("a"),
        drive("b"),
        dataclasses.replace(drive("a"), disks=drive("a").disks + drive("b").disks),
    )
    assert share_a_disk(one, one)
    assert share_a_disk(one, both)
    assert share_a_disk(both, other)
    assert not share_a_disk(one, other)
    server = dataclasses.replace(one, source="server:/export", disks=())
    assert share_a_disk(server, server)
    assert not share_a_disk(server, dataclasses.replace(server, source="server:/other"))


def test_drive_is_named_for_people() -> None:
    assert sweep_report.label_of(drive("a")) == "a (Fast One, 1.00 TiB, ext4)"
    both = dataclasses.replace(drive("a"), disks=drive("a").disks + drive("b").disks)
    assert sweep_report.label_of(both) == "a+b (2 x Fast One, 2.00 TiB, ext4)"


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.1, "10 % more than"), (0.5, "50 % less than"), (1.01, "about as much as"), (3.0, "200 % more than")],
)
def test_comparisons_in_words(value: float, words: str) -> None:
    assert sweep_report._compared(value, 1.0) == words


def test_config_block_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    block = config_block(choice())
    assert block["aio"] == {
        "block_size": 4 * MIB,
        "queue_depth": 16,
        "intra_op_parallelism": 2,
        "single_submit": False,
        "overlap_events": True,
    }
    assert block["infinity"]["backend"] == "io_uring"
    load_config(block)


def test_file_system_without_direct_io_is_told(
    nvme_path: Path, hasty: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_ = Sweep(asked_for(nvme_path), {nvme_path: 64 * MIB})
    sweep_.run()
    capsys.readouterr()
    (swept,) = sweep_._swept
    assert isinstance(swept, Swept)
    monkeypatch.setattr(DriveTest, "direct", False)
    sweep_report.print_report(swept, Console(), params=None)
    assert "refuses direct I/O" in " ".join(capsys.readouterr().out.split())
