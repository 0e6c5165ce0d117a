"""The main job as a user runs it: its figures, its oracle, its ranks, wrong inputs, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch
import pytest
from rich.console import Console

from infinity import ConfigError

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
SMALL = ["--params", "300k", "--steps", "3", "--context", "32", "--batch-size", "2", "--seed", "5"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}


def run(*arguments: str, check: bool = True, compare: bool = False) -> subprocess.CompletedProcess[str]:
    others = [] if compare else ["--no-compare"]
    done = launch.program(SCRIPT, *SMALL, *others, *arguments, environment=ENVIRONMENT)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def losses(file: Path) -> list[float]:
    return [step["loss"] for step in json.loads(file.read_text())["steps"]]


def test_the_figures_and_the_oracle(nvme_path: Path, tmp_path: Path) -> None:
    shown = run("--nvme-path", str(nvme_path), "--sample", "--json", str(tmp_path / "nvme.json"), compare=True).stdout
    for words in (
        "loss",
        "GB/s",
        "stall",
        "resident",
        "held-out loss",
        "on NVMe",
        "peak resident memory",
        "plain PyTorch in memory",
        "lower bound",
        "def ",
    ):
        assert words in shown
    summary: dict[str, Any] = json.loads((tmp_path / "nvme.json").read_text())
    assert [set(step) for step in summary["steps"]] == [
        {
            *("step", "loss", "seconds", "cpu_seconds", "minor_faults", "read_bytes", "written_bytes"),
            *("stall_seconds", "gradient_bytes", "steady"),
        }
    ] * 3
    # The first makes buffers; the one after a pause begins without writes of the one before.
    assert [step["steady"] for step in summary["steps"]] == [False, True, False]
    assert summary["step_seconds"] == summary["steps"][1]["seconds"]
    assert summary["params"] > 250_000
    assert summary["peak_rss_bytes"] > summary["pinned_bytes"] > 0
    plain, on_drive = summary["torch_in_memory_seconds"], summary["drive_seconds"]
    assert plain > 0 and on_drive > 0 and summary["lower_bound_seconds"] == max(plain, on_drive)
    assert f"a step takes {summary['step_seconds'] / max(plain, on_drive):.2f} times it" in shown
    assert summary["torch_in_memory_minor_faults_per_step"] >= 0 and summary["minor_faults_per_step"] >= 0
    assert summary["torch_in_memory_peak_rss_bytes"] > 0
    # In a model this small copies stay in memory, padding weighs much, and so does the last write if it is still on its way.
    assert summary["written_bytes_per_param"] == pytest.approx(12, rel=0.35)
    steady = summary["steps"][1:]  # the first has nothing to update before its passes
    assert summary["written_bytes_per_param"] * summary["params"] == pytest.approx(
        sum(step["written_bytes"] for step in steady) / len(steady)
    )
    assert not list(nvme_path.iterdir())

    run("--in-memory", "--json", str(tmp_path / "memory.json"))
    assert losses(tmp_path / "nvme.json") == losses(tmp_path / "memory.json")


def test_without_plain_pytorch_the_drive_alone_is_the_lower_bound(nvme_path: Path, tmp_path: Path) -> None:
    shown = run("--nvme-path", str(nvme_path), "--json", str(tmp_path / "run.json")).stdout
    summary = json.loads((tmp_path / "run.json").read_text())
    assert summary["torch_in_memory_seconds"] is None
    assert summary["lower_bound_seconds"] == summary["drive_seconds"] > 0
    assert "the one that was measured: a step takes" in shown


def test_the_last_step_is_traced(nvme_path: Path, tmp_path: Path) -> None:
    trace, figures = tmp_path / "trace.json", tmp_path / "run.json"
    shown = run("--nvme-path", str(nvme_path), "--trace", str(trace), "--json", str(figures)).stdout
    assert "drive busy" in shown and "I/O hidden, exposed" in shown
    assert [step.get("trace", {}).get("steps") for step in json.loads(figures.read_text())["steps"]] == [None, None, 1]
    assert {"forward", "backward", "step"} <= {each["name"] for each in json.loads(trace.read_text())["traceEvents"]}
    refused = run("--in-memory", "--trace", str(trace), check=False)
    assert refused.returncode == 2 and "no timeline" in refused.stderr


def test_going_on_from_a_checkpoint(nvme_path: Path, tmp_path: Path) -> None:
    place = ["--nvme-path", str(nvme_path)]
    run(*place, "--save", str(tmp_path / "saved"))
    refused = run(*place, "--resume", str(tmp_path / "saved"), check=False)
    assert refused.returncode == 1
    assert "already at step 3" in refused.stderr
    run(*place, "--resume", str(tmp_path / "saved"), "--steps", "5", "--json", str(tmp_path / "after.json"))
    assert len(losses(tmp_path / "after.json")) == 2


def test_killed_and_gone_on_with(nvme_path: Path, tmp_path: Path) -> None:
    command = ["--nvme-path", str(nvme_path), "--steps", "6", "--durability", "step"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *SMALL, *command], stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step    3/6"):
            break
    process.kill()
    process.communicate()
    refused = run(*command, check=False)
    assert refused.returncode == 1 and "is committed there" in refused.stderr
    shown = run(*command, "--resume", "--json", str(tmp_path / "after.json")).stdout
    found = json.loads((tmp_path / "after.json").read_text())["steps"]
    first = found[0]["step"]
    assert first >= 3 and f"resuming after step {first - 1}" in shown
    run("--in-memory", "--steps", "6", "--json", str(tmp_path / "memory.json"))
    assert losses(tmp_path / "after.json") == losses(tmp_path / "memory.json")[first - 1 :]


@pytest.mark.slow
def test_two_ranks(torchrun: Any, forked_ranks: Any, nvme_path: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "--json"]
    torchrun(SCRIPT, *arguments, str(tmp_path / "nvme.json"), "--nvme-path", str(nvme_path))
    forked_ranks(SCRIPT, *arguments, str(tmp_path / "memory.json"), "--in-memory")
    assert losses(tmp_path / "nvme.json") == losses(tmp_path / "memory.json")
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nvme-path", "/proc/nowhere"], "can't be made"),
        (["--data", "/nowhere"], "no such file or folder"),
        (["--config", "/nowhere.json"], "can't read the config"),
        (["--pinned-bytes-max", "8MiB", "--params", "40M"], "raise it to at least"),
        (["--params", "many"], "--params"),
        (["--steps", "0"], "--steps"),
        (["--pinned-bytes-max", "banana"], "--pinned-bytes-max: expected a number of bytes"),
        (["--nvme-path", ""], "--nvme-path: an empty path"),
        (["--json", "/proc/nowhere/summary.json"], "can't write /proc/nowhere/summary.json"),
        (["--save", "/proc/nowhere"], "can't write /proc/nowhere"),
        (["--nvme-path", str(SCRIPT)], "train_lm.py is a file, not a folder: choose another nvme_path"),
        (["--pinned-bytes-max", "1MiB"], "pinned_bytes_max of 1.00 MiB is below the least that works"),
        (["--resume"], "resumes a run of --durability step: add that"),
    ],
)
def test_wrong_inputs_are_told_in_a_line(arguments: list[str], words: str, nvme_path: Path) -> None:
    done = run("--nvme-path", str(nvme_path), *arguments, check=False)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[1]", "expected a JSON object, found list"),
        ('{"zero_optimization": 5}', "zero_optimization: got 5, expected an object"),
        ('{"optimizer": {"type": "AdamW", "params": 7}}', "optimizer.params: got 7, expected an object"),
        ('{"infinity": 3}', "infinity: got 3, expected an object"),
    ],
)
def test_configs_that_are_no_configs_are_told_in_a_line(config: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    done = run("--config", str(tmp_path / "config.json"), "--pinned-bytes-max", "16MiB", check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_save_that_fails_does_not_lose_the_summary(nvme_path: Path, tmp_path: Path) -> None:
    (tmp_path / "global_step3").touch()  # a file where the checkpoint's folder goes
    arguments = ["--nvme-path", str(nvme_path), "--save", str(tmp_path), "--json", str(tmp_path / "summary.json")]
    done = run(*arguments, check=False)
    assert done.returncode == 1
    assert "global_step3 exists already" in done.stderr
    assert "held-out loss" in done.stdout
    assert len(losses(tmp_path / "summary.json")) == 3


def test_a_drive_without_room_for_the_checkpoint_is_told_before_the_training(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from train_lm import check_room
    finally:
        sys.path.remove(str(SCRIPT.parent))
    free = shutil.disk_usage(tmp_path).free
    adam, sgd = SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=SimpleNamespace(momentum=0.0))
    check_room(SimpleNamespace(config=adam, numel=free // 24), tmp_path)  # type: ignore[arg-type]
    check_room(SimpleNamespace(config=sgd, numel=free // 8), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--save .* are free there: free .* more, or save elsewhere"):
        check_room(SimpleNamespace(config=adam, numel=free // 6), tmp_path)  # type: ignore[arg-type]


def test_the_live_figures_fit_in_80_columns() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from train_lm import progress_bar
    finally:
        sys.path.remove(str(SCRIPT.parent))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, color_system=None)
    record = {"loss": 2.859, "seconds": 1.62, "read_bytes": 53e7, "written_bytes": 57e7, "stall_seconds": 0.22}
    with progress_bar(console, enabled=True) as report:
        report(100, 100, record)
    for words in ("100/100", "loss 2.859", "s/step", "read 0.33 GB/s", "write 0.35 GB/s", "stall 0.22 s", "resident"):
        assert words in shown.getvalue()
    assert "…" not in shown.getvalue()


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
    run("--nvme-path", str(nvme_path), "--steps", "1")
    assert not list(nvme_path.iterdir())
