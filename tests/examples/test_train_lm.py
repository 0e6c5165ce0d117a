"""The main job as a user runs it: its figures, its oracle, its ranks, wrong inputs, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
SMALL = ["--params", "300k", "--steps", "3", "--context", "32", "--batch-size", "2", "--seed", "5"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def losses(file: Path) -> list[float]:
    return [step["loss"] for step in json.loads(file.read_text())["steps"]]


def test_the_figures_and_the_oracle(nvme_path: Path, tmp_path: Path) -> None:
    shown = run("--nvme-path", str(nvme_path), "--json", str(tmp_path / "nvme.json")).stdout
    for words in (
        "loss",
        "GB/s",
        "stall",
        "resident",
        "held-out loss",
        "on NVMe",
        "peak resident memory",
        "floor",
        "def ",
    ):
        assert words in shown
    summary: dict[str, Any] = json.loads((tmp_path / "nvme.json").read_text())
    assert [set(step) for step in summary["steps"]] == [
        {"step", "loss", "seconds", "read_bytes", "written_bytes", "stall_seconds"}
    ] * 3
    assert summary["params"] > 250_000
    assert summary["peak_rss_bytes"] > summary["pinned_bytes"] > 0
    assert 0 < summary["floor_seconds"] <= summary["step_seconds"] * 1.5
    assert summary["written_bytes_per_param"] == pytest.approx(
        14, rel=0.35
    )  # padding weighs much in a model this small
    assert not list(nvme_path.iterdir())

    run("--in-memory", "--no-sample", "--json", str(tmp_path / "memory.json"))
    assert losses(tmp_path / "nvme.json") == losses(tmp_path / "memory.json")


def test_going_on_from_a_checkpoint(nvme_path: Path, tmp_path: Path) -> None:
    place = ["--nvme-path", str(nvme_path), "--no-sample"]
    run(*place, "--save", str(tmp_path / "saved"))
    refused = run(*place, "--resume", str(tmp_path / "saved"), check=False)
    assert refused.returncode == 1
    assert "is at step 3 already" in refused.stderr
    run(*place, "--resume", str(tmp_path / "saved"), "--steps", "5", "--json", str(tmp_path / "after.json"))
    assert len(losses(tmp_path / "after.json")) == 2


@pytest.mark.slow
def test_two_ranks(torchrun: Any, nvme_path: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "--no-sample", "--json"]
    torchrun(SCRIPT, *arguments, str(tmp_path / "nvme.json"), "--nvme-path", str(nvme_path))
    torchrun(SCRIPT, *arguments, str(tmp_path / "memory.json"), "--in-memory")
    assert losses(tmp_path / "nvme.json") == losses(tmp_path / "memory.json")
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nvme-path", "/proc/nowhere"], "can't be made"),
        (["--data", "/nowhere"], "no such file or folder"),
        (["--config", "/nowhere.json"], "can't read the config"),
        (["--pinned-bytes-max", "8MiB", "--params", "40M"], "would do"),
        (["--params", "many"], "--params"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_wrong_inputs_are_told_in_a_line(arguments: list[str], words: str, nvme_path: Path) -> None:
    done = run("--nvme-path", str(nvme_path), *arguments, check=False)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing_behind(number: signal.Signals, nvme_path: Path) -> None:
    arguments = [sys.executable, str(SCRIPT), *SMALL, "--steps", "100000", "--nvme-path", str(nvme_path)]
    job = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step") and " 3/" in line:
            break
    assert list(nvme_path.iterdir())
    job.send_signal(number)
    rest = job.stdout.read()
    assert job.wait(60) == 128 + number, rest
    assert "Traceback" not in rest
    assert not list(nvme_path.iterdir())


def test_a_kill_leaves_no_swap_file_and_the_next_run_cleans_up(nvme_path: Path) -> None:
    arguments = [sys.executable, str(SCRIPT), *SMALL, "--steps", "100000", "--nvme-path", str(nvme_path)]
    job = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step") and " 3/" in line:
            break
    job.kill()
    job.wait()
    time.sleep(0.1)
    left = [file for folder in nvme_path.iterdir() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in left) < 4096  # a lock and a note; the arena has no name to be left under
    run("--nvme-path", str(nvme_path), "--no-sample", "--steps", "1")
    assert not list(nvme_path.iterdir())
