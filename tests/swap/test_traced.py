"""What a trace promises: every byte that the engine counted, every stall with its cause, rows in which nothing overlaps, and
nothing at all while none runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worse_drives import DriveLimit, worse_drives

import infinity
from infinity import InfinityError, SwapManager
from infinity.schedule.timeline import LANES
from infinity.swap import TraceSummary
from infinity.swap.timeline import measured
from infinity.units import MIB

STEPS = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


pytestmark = pytest.mark.usefixtures("one_rank")


def made(nvme_path: Path, update: str, **own: Any) -> infinity.Engine:
    torch.manual_seed(0)
    drive = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0 if update == "backward" else 1.0,
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": drive,
            "offload_optimizer": drive,
            "stage3_param_persistence_threshold": 200,
            "sub_group_size": 4096,
        },
        "infinity": {"pinned_bytes_max": "8MiB", "wrap": ["Linear"], "update": update, **own},
    }
    engine, *_ = infinity.initialize(model=Model(), config=config)
    return engine


def train(engine: infinity.Engine) -> None:
    engine.backward(engine(torch.ones(4, 96)).float().square().mean())
    engine.step()


def traced(engine: infinity.Engine, file: Path) -> tuple[TraceSummary, list[dict[str, Any]], dict[str, float]]:
    """A trace of a few steps, its events with their rows' names, and what the engine counted meanwhile."""
    train(engine)
    assert engine.swap is not None
    engine.swap.flush()
    engine.start_trace()
    before = engine.swap_stats()
    for _ in range(STEPS):
        train(engine)
    summary = engine.stop_trace(file)
    after = engine.swap_stats()
    assert before is not None and after is not None
    keys = ("read_bytes", "written_bytes", "stall_seconds")
    counted = {key: getattr(after, key) - getattr(before, key) for key in keys}
    for way in ("read_seconds", "write_seconds"):
        counted[way] = getattr(after.drives[0], way) - getattr(before.drives[0], way)
    events = json.loads(file.read_text())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    return summary, [{**each, "row": rows[each["tid"]]} for each in events if each["ph"] == "X"], counted


@pytest.fixture(params=["step", "forward", "backward"])
def found(
    request: pytest.FixtureRequest, nvme_path: Path, tmp_path: Path
) -> Iterator[tuple[TraceSummary, list[dict[str, Any]], dict[str, float]]]:
    with made(nvme_path, request.param) as engine:
        yield traced(engine, tmp_path / "trace.json")


def test_its_bytes_and_stalls_are_what_was_counted(found: Any) -> None:
    summary, events, counted = found
    for way, key in (("read", "read_bytes"), ("write", "written_bytes")):
        moved = sum(each["args"]["bytes"] for each in events if each["row"] == f"drive 0 {way}")
        assert moved == counted[key] > 0
    drive = summary.drives[0]
    assert (drive.read_bytes, drive.written_bytes) == (counted["read_bytes"], counted["written_bytes"])
    stalls = sum(each["dur"] for each in events if each["row"] == "stall") / 1e6
    assert stalls == pytest.approx(counted["stall_seconds"]) == pytest.approx(summary.stall_seconds)
    assert drive.read_share * summary.seconds == pytest.approx(counted["read_seconds"], rel=1e-6)
    assert drive.write_share * summary.seconds == pytest.approx(counted["write_seconds"], rel=1e-6)
    assert summary.steps == STEPS
    assert 0 < summary.hidden_io_seconds + summary.exposed_io_seconds <= summary.seconds


def test_rows_hold_one_thing_at_a_time_and_what_is_nested_lies_inside(found: Any) -> None:
    _, events, _ = found
    slack = 1e-2  # microseconds: that is what sums of doubles leave
    rows = {each["row"] for each in events}
    assert (
        {"step", "gather", "update", "gradients", "stall", "compute"}
        <= rows
        <= {*LANES, "drive 0 read", "drive 0 write"}
    )
    for row in rows:
        own = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if each["row"] == row)
        assert all(one[1] <= other[0] + slack for one, other in pairwise(own)), row
    ends = [(each["ts"], each["ts"] + each["dur"]) for each in events if not each["row"].startswith("drive")]
    working = [each for each in events if each["row"] in ("gather", "update", "gradients", "copy", "stall", "step")]
    for one in working:
        start, end = one["ts"], one["ts"] + one["dur"]
        apart_or_nested = (
            end <= a + slack
            or b <= start + slack
            or (start >= a - slack and end <= b + slack)
            or (a >= start - slack and b <= end + slack)
            for a, b in ((each["ts"], each["ts"] + each["dur"]) for each in working)
        )
        assert all(apart_or_nested), one
    assert min(start for start, _ in ends) >= 0
    compute = [each for each in events if each["row"] == "compute"]
    for one in (each for each in working if each["row"] != "step"):
        for other in compute:
            assert min(one["ts"] + one["dur"], other["ts"] + other["dur"]) <= max(one["ts"], other["ts"]) + slack


def test_everything_has_its_name_and_every_stall_its_cause(found: Any) -> None:
    _, events, _ = found
    names = {row: {each["name"] for each in events if each["row"] == row} for row in {each["row"] for each in events}}
    assert names["step"] == {"forward", "backward", "step"}
    assert {f"gather blocks.{k}" for k in range(4)} <= names["gather"]
    assert all(name.startswith("update sub-group ") for name in names["update"])
    assert all(
        name.startswith(("group ", "sub-group ")) for row in names if row.startswith("drive") for name in names[row]
    )
    causes = ("wait for the read of ", "wait for the write of ", "wait for all transfers")
    assert all(name.startswith(causes) for name in names["stall"])
    assert sum((each["row"], each["name"]) == ("step", "forward") for each in events) == STEPS


def test_the_profiler_has_the_same_names(nvme_path: Path, tmp_path: Path) -> None:
    with made(nvme_path, "step") as engine, torch.profiler.profile() as profile:
        _, events, _ = traced(engine, tmp_path / "trace.json")
    profiled = {each.key for each in profile.key_averages()}
    assert {each["name"] for each in events if each["row"] in ("step", "gather", "update", "stall")} <= profiled


def test_nothing_is_noted_while_no_trace_runs(nvme_path: Path) -> None:
    with made(nvme_path, "forward") as engine:
        with torch.profiler.profile() as profile:
            train(engine)
        assert engine.timeline is None
        assert not any(each.key.startswith(("gather ", "update ", "wait for ")) for each in profile.key_averages())
        assert measured(None, "update", "x") is measured(None, "gather", "y")
        engine.start_trace()
        assert engine.stop_trace().stall_seconds < 1
        assert engine.timeline is None


def test_a_loop_of_ones_own_is_traced_too(nvme_path: Path, tmp_path: Path) -> None:
    with SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap:
        for k in range(4):
            swap.tensors.register(f"t{k}", torch.full((MIB // 4,), float(k)))
        swap.flush()
        swap.start_trace()
        with pytest.raises(InfinityError, match="runs already"):
            swap.start_trace()
        for k in range(4):
            with swap.tensors.update(f"t{k}") as tensor:
                tensor.add_(1)
        summary = swap.stop_trace(tmp_path / "trace.json")
        with pytest.raises(InfinityError, match="no trace runs"):
            swap.stop_trace()
        with swap.tensors.use("t3") as tensor:
            assert float(tensor[0]) == 4
    assert (summary.drives[0].read_bytes, summary.drives[0].written_bytes, summary.steps) == (4 * MIB, 4 * MIB, 0)
    names = {each["name"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"t0", "wait for the read of t3", "compute"} <= names


def test_a_wait_for_room_says_for_whom(nvme_path: Path, tmp_path: Path) -> None:
    slow = DriveLimit(bytes_per_s=5e6)
    with worse_drives([slow]), SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap:
        swap.start_trace()
        swap.tensors.register("first", torch.zeros(MIB))
        swap.tensors.register("second", torch.zeros(MIB + 1))
        swap.stop_trace(tmp_path / "trace.json")
    names = {each["name"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "wait for the write of first, for room for second" in names


def test_each_drive_has_rows_of_its_own(nvme_path: Path, tmp_path: Path) -> None:
    folders = [nvme_path / "a", nvme_path / "b"]
    for folder in folders:
        folder.mkdir()
    with SwapManager(folders, pinned_bytes_max="16MiB", bandwidths=[1, 1]) as swap:
        swap.tensors.register("t", torch.zeros(2 * MIB))
        swap.flush()
        before = swap.stats().drives
        swap.start_trace()
        with swap.tensors.update("t") as tensor:
            tensor.add_(1)
        summary = swap.stop_trace(tmp_path / "trace.json")
        after = swap.stats().drives
    for number, use in enumerate(summary.drives):
        assert use.read_bytes == after[number].read_bytes - before[number].read_bytes > 0
        assert use.written_bytes == after[number].written_bytes - before[number].written_bytes > 0
    rows = {
        each["args"]["name"]
        for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if "args" in each and "name" in each["args"]
    }
    assert {f"drive {number} {way}" for number in (0, 1) for way in ("read", "write")} <= rows


def test_a_training_in_memory_has_no_timeline() -> None:
    engine, *_ = infinity.initialize(model=Model(), config={"bf16": {"enabled": True}})
    with engine, pytest.raises(InfinityError, match="is offloaded"):
        engine.start_trace()


def test_saved_activations_are_in_it_by_name(nvme_path: Path, tmp_path: Path) -> None:
    """They have a buffer of their own, and the drive in common with all else."""
    moved = {"device": "nvme", "bytes_min": 4096, "buffer_bytes": "128KiB"}
    with made(nvme_path, "forward", offload_activations=moved, pinned_bytes_max="16MiB") as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(64, 96)).float().square().mean())
            engine.step()
        engine.start_trace()
        engine.backward(engine(torch.ones(64, 96)).float().square().mean())
        engine.step()
        engine.stop_trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [each["name"] for each in events]
    assert any("saved activation of 12.00 KiB" in name for name in names)
    assert not any("something else" in name for name in names)
