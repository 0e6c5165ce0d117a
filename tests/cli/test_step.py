"""What `infinity-bench step` promises: real steps, their bytes counted, their lower bound, and nothing left on the drive."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launch
import pytest
import torch

from infinity.cli import measured_step, step
from infinity.cli.measured_step import Round, summarize
from infinity.cli.memory_limit import memory_limit
from infinity.cli.plain_torch import PlainStep, Usage
from infinity.cli.synthetic import Block, Transformer, shape_for, shape_of

MIB = 1 << 20
GIB = 1 << 30

KEYS = {
    "params", "layers", "hidden", "batch_size", "seq", "clipping", "steps", "seconds", "torch_in_memory_seconds",
    "drive_seconds", "lower_bound_seconds", "over_lower_bound", "cpu_seconds_per_step",
    "minor_faults_per_step", "torch_in_memory_cpu_seconds_per_step", "torch_in_memory_minor_faults_per_step",
    "torch_in_memory_peak_rss_bytes", "predicted_seconds", "read_bytes_per_param", "written_bytes_per_param", "drive",
    "pinned_bytes", "arena_bytes", "peak_rss_bytes", "cache_bytes", "master_weights", "update", "trace",
    "moments_dtype",
    "accumulation", "schedule", "optimizer", "memory_limit_bytes",
}  # fmt: skip


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return launch.program("infinity.cli.bench", "step", *map(str, arguments))


def small(nvme_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    sizes = ("--params", "1M", "--batch-size", 1, "--seq", 8, "--steps", 2, "--warmup", 1)
    return run(nvme_path, *sizes, *arguments)


def test_steps_are_timed_and_counted(nvme_path: Path) -> None:
    done = small(nvme_path, "--json", "-")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result.keys() == KEYS
    assert len(result["steps"]) == 2
    assert result["steps"][0].keys() == {
        *("seconds", "cpu_seconds", "minor_faults", "read_bytes", "written_bytes", "stall_seconds"),
    }
    bytes_per_step = (result["read_bytes_per_param"] + result["written_bytes_per_param"]) * result["params"]
    on_drive = bytes_per_step / result["drive"]["mixed_bytes_per_s"]
    assert 0 < result["drive_seconds"] == pytest.approx(on_drive, rel=0.2)  # as planned, where it was fewer bytes
    assert result["lower_bound_seconds"] == max(result["torch_in_memory_seconds"], result["drive_seconds"])
    assert result["over_lower_bound"] == result["seconds"] / result["lower_bound_seconds"]
    assert result["torch_in_memory_seconds"] > 0 and result["torch_in_memory_cpu_seconds_per_step"] > 0
    assert result["minor_faults_per_step"] >= 0 and result["torch_in_memory_minor_faults_per_step"] >= 0
    assert (result["clipping"], result["update"]) == (1.0, "backward")
    assert result["predicted_seconds"] > 0
    assert 11.9 < result["written_bytes_per_param"] < 16  # small parameters keep their copies in memory
    assert result["peak_rss_bytes"] > result["pinned_bytes"]
    assert list(nvme_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "written"), [("bf16", 9.9), ("8bit", 8.0)])
def test_how_a_model_is_stepped_is_asked_for(dtype: str, written: float, nvme_path: Path) -> None:
    asked = ("--master-weights", "full", "--update", "step", "--cache", "1MiB", "--clipping", "0.25")
    asked += ("--moments-dtype", dtype)
    done = small(nvme_path, "--json", "-", *asked)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert (result["master_weights"], result["update"], result["clipping"]) == ("full", "step", 0.25)
    assert result["moments_dtype"] == dtype
    assert 4 < result["written_bytes_per_param"] < written  # 14 in full, 4 or 6 less, and less what is cached
    assert 0 < result["cache_bytes"] <= 1 << 20


@pytest.mark.parametrize(("optimizer", "written"), [("Adam", 12), ("SGD", 8), ("Muon", 8)])
def test_each_optimizer_is_stepped_beside_torch_s(optimizer: str, written: int, nvme_path: Path) -> None:
    done = small(nvme_path, "--optimizer", optimizer, "--json", "-")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert (
        result["optimizer"] == optimizer and result["torch_in_memory_seconds"] > 0 and result["predicted_seconds"] > 0
    )
    assert written - 0.1 < result["written_bytes_per_param"] < written + 2


def test_the_schedule_and_the_micro_batches_of_a_step_are_asked_for(nvme_path: Path) -> None:
    done = small(nvme_path, "--accumulation", 4, "--schedule", "vertical", "--json", "-")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert (result["accumulation"], result["schedule"]) == (4, "vertical")
    assert result["written_bytes_per_param"] <= 12.3


def test_the_training_is_limited_and_plain_pytorch_is_not(nvme_path: Path) -> None:
    with memory_limit(GIB) as limit:
        if limit.enter is None or "RLIMIT" in limit.in_words:
            pytest.skip("this system lets us make no control group")
    done = small(nvme_path, "--memory-limit", "1GiB", "--json", "-")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["memory_limit_bytes"] == GIB and result["torch_in_memory_seconds"] > 0
    assert list(nvme_path.iterdir()) == []
    too_much = run(nvme_path, "--params", "10M", "--batch-size", 128, "--seq", 512, "--memory-limit", "1GiB")
    assert too_much.returncode == 1
    assert "killed" in too_much.stderr and "raise" in too_much.stderr and "--memory-limit" in too_much.stderr


@pytest.mark.parametrize("moment", ["its processes start", "it has begun"])
def test_ctrl_c_ends_all_its_processes_in_a_line(moment: str, nvme_path: Path) -> None:
    """While torch loads in all of them, and later; the terminal sends it to each."""
    command = [sys.executable, "-m", "infinity.cli.bench", "step", str(nvme_path), "--memory-limit", "1GiB"]
    sizes = ["--params", "1M", "--batch-size", "1", "--seq", "8", "--steps", "10000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, *sizes], **pipes, start_new_session=True) as process:
        assert process.stdout is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if moment == "it has begun":
            assert process.stdout.readline()
        while (
            len(children.read_text().split()) < 3 and process.poll() is None
        ):  # plain PyTorch, its tracker, the training
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    if "no memory limit" in said:
        pytest.skip("this system permits no memory limit")
    assert process.returncode == 130, said
    if moment == "it has begun":  # before that Python may be the one that says so
        assert said.count("interrupted") == 1 and "Traceback" not in said
    assert list(nvme_path.iterdir()) == []


@pytest.mark.parametrize("off", ["--no-clipping", "--clipping=0"])
def test_without_clipping_updates_may_be_in_the_backward(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    options = parser.parse_args(["--update", "backward", off, "--json", "-"])
    monkeypatch.setattr(measured_step, "measure", lambda options, plain: ({}, None))
    assert step.run(options) == 0
    assert (options.clipping, options.no_clipping) == (0.0, True)


def rounds_of(seconds: list[float], plain: list[float | None], *, read: int = 140 * MIB) -> list[Round]:
    """Rounds in which nothing waits, 120 MiB are written, and the drive's mixed rate is 260 MiB/s."""
    from infinity.drive.measure import Workload

    rates = {Workload.READ: 200.0 * MIB, Workload.WRITE: 500.0 * MIB, Workload.MIXED: 260.0 * MIB}
    used = {"cpu_seconds": 1.0, "minor_faults": 7, "read_bytes": read, "written_bytes": 120 * MIB, "stall_seconds": 0.0}
    steps = [None if took is None else PlainStep(took, Usage(0.5, 3), 9) for took in plain]
    return [Round({"seconds": took, **used}, plain, rates) for took, plain in zip(seconds, steps, strict=True)]


PLANNED: dict[str, Any] = {"planned_bytes": (140 * MIB, 120 * MIB), "numel": 10 * MIB, "backend": "threads"}


@pytest.mark.parametrize(
    ("plain", "over"),
    [([0.5, 2.5, 2.0], 5.0), ([0.4, 0.5, 0.6], 10.0), ([None, None, None], 10.0), ([0.5, None, 2.0], 10.0)],
)
def test_a_step_that_never_waits_can_still_be_slow(plain: list[float | None], over: float) -> None:
    """By the longer of plain PyTorch and the drive: what held the step up is in neither."""
    result = summarize(rounds_of([9.0, 10.0, 11.0], plain), **PLANNED)
    assert result["drive_seconds"] == 1.0
    assert result["over_lower_bound"] == over
    left_out = None in plain
    assert (result["torch_in_memory_seconds"] is None) == left_out
    assert result["torch_in_memory_minor_faults_per_step"] == (None if left_out else 3)
    assert (result["minor_faults_per_step"], result["cpu_seconds_per_step"]) == (7, 1.0)


def test_bytes_that_were_moved_twice_or_spared_make_no_step_look_better() -> None:
    twice = summarize(rounds_of([4.0], [0.5], read=400 * MIB), **PLANNED)
    assert (twice["drive_seconds"], twice["over_lower_bound"]) == (1.0, 4.0)
    spared = summarize(rounds_of([4.0], [0.5], read=10 * MIB), **PLANNED)
    assert (spared["drive_seconds"], spared["over_lower_bound"]) == (0.5, 8.0)


def test_where_nothing_moves_and_nothing_is_beside_there_is_no_ratio() -> None:
    result = summarize(rounds_of([4.0], [None]), **{**PLANNED, "planned_bytes": (0, 0)})
    assert (result["lower_bound_seconds"], result["over_lower_bound"]) == (0.0, None)


def test_the_table_is_for_people_and_the_file_for_programs(nvme_path: Path, tmp_path: Path) -> None:
    done = small(nvme_path, "--json", tmp_path / "step.json")
    assert done.returncode == 0, done.stderr
    assert "times it" in done.stdout and "\x1b" not in done.stdout
    assert json.loads((tmp_path / "step.json").read_text())["params"] > 500_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", "ten"), "ten"),
        (("--params", "5"), "at least 10000"),
        (("--steps", "0"), "at least 1"),
        (("--master-weights", "lost"), "invalid choice"),
        (("--clipping", "-1"), "expected a norm such as 1.0, or 0 not to clip"),
        (("--clipping", "nan"), "expected a norm such as 1.0, or 0 not to clip"),
        (("--clipping", "0.5", "--no-clipping"), "--no-clipping contradicts --clipping 0.5"),
        (("--seq", "1.5"), "expected a whole number"),
        (("--cache", "4"), "did you mean 4GiB?"),
        (("--pinned-bytes-max", "banana"), "banana"),
        (("--pinned-bytes-max", "1MiB"), "--pinned-bytes-max 1MiB is below the minimum of 8.00 MiB"),
        (("--json", "/no/such/folder/x.json"), "be written"),
        (("--trace", "/no/such/folder/x.json"), "be written"),
    ],
)
def test_wrong_usage_is_refused_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_too_small_a_pool_is_told_in_a_line(nvme_path: Path) -> None:
    done = small(nvme_path, "--params", "10M", "--pinned-bytes-max", "8MiB")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "MiB" in done.stderr


@pytest.mark.parametrize(
    ("path", "said"),
    [("file", "is a file, not a folder: choose another"), ("no/such", "no/such can't be made ({}/no does not exist)")],
)
def test_a_path_that_is_no_folder_is_refused(path: str, said: str, nvme_path: Path) -> None:
    (nvme_path / "file").touch()
    done = run(nvme_path / path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert said.format(nvme_path) in done.stderr
    assert [place.name for place in nvme_path.iterdir()] == ["file"]


@pytest.mark.parametrize("numel", [10_000, 1_000_000, 40_000_000, 1_000_000_000, 70_000_000_000])
def test_shapes_are_near_what_was_asked(numel: int) -> None:
    shape = shape_for(numel, seq=32)
    assert shape.hidden % 64 == 0
    if numel >= 1_000_000:
        assert 0.9 < shape.numel / numel < 1.1


def test_a_shape_has_as_many_parameters_as_it_says() -> None:
    shape = shape_of(2, 128, seq=32)
    assert sum(parameter.numel() for parameter in Transformer(shape).parameters()) == shape.numel


def test_attention_looks_back_only() -> None:
    torch.manual_seed(0)
    block = Block(64, heads=2)
    x = torch.randn(1, 8, 64)
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(block(x)[:, :5], block(changed)[:, :5])
    assert not torch.equal(block(x)[:, 5:], block(changed)[:, 5:])


def test_a_traced_step_comes_as_events_figures_and_a_picture(nvme_path: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    done = small(nvme_path, "--trace", trace, "--json", tmp_path / "step.json")
    assert done.returncode == 0, done.stderr
    assert "drive busy" in done.stdout and "I/O hidden, exposed" in done.stdout
    result = json.loads((tmp_path / "step.json").read_text())
    assert len(result["steps"]) == 2 and result["trace"]["steps"] == 1
    events = json.loads(trace.read_text())["traceEvents"]
    written = sum(each["args"]["bytes"] for each in events if each["ph"] == "X" and each["tid"] == 1)
    assert written == result["trace"]["drives"][0]["written_bytes"] == result["steps"][-1]["written_bytes"]
    root = Path(__file__).resolve().parents[2]
    caption = runpy.run_path(str(root / "tools" / "build_docs.py"))["caption"](result)
    assert f"({result['layers']} layers of hidden size {result['hidden']}) on 1 × {result['seq']} tokens" in caption
    script = root / "bench" / "render_timeline.py"
    command = [sys.executable, str(script), str(trace), str(picture)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and "drive 0 read" in shown
    refused = subprocess.run([*command, "--from", "1e9"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 1 and "has nothing" in refused.stderr
