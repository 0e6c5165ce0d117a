"""Trainings on the device that isn't there (fake.py): bit for bit what they are in memory, and refused where anything in the
order of copies is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from fake import FakeRuntime, Hazard, LateRuntime
from launch import ranks

import infinity
from infinity.device import StreamDevice, streams
from infinity.runtime import prepare
from infinity.swap import manager, parameter_lap, waiting_gradients
from infinity.swap.paging import Paging
from infinity.swap.pending_updates import PendingUpdates
from infinity.swap.stager import ChunkState, Stager

CASES = [
    "plain",
    "accumulation and clipping",
    "activation checkpointing",
    "evaluation between steps",
    "updated in forward, small sub-groups",
    "only the optimizer on NVMe",
    "a quarter cached, fp32",
    "fp16, fixed loss scale",
    "some gradients on NVMe, accumulated",
    "host memory, accumulation and clipping",
    "host memory, updated in forward",
    "host memory, updated in backward",
    "host memory, vertical",
    "only the optimizer in host memory, clipping",
    "only the optimizer in host memory, updated in the step",
    "only the optimizer in host memory, updated in backward",
]


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "STEPS", 3)


def on_fake(runtime: FakeRuntime, case: training.Case, path: Path, monkeypatch: pytest.MonkeyPatch) -> training.Outcome:
    monkeypatch.setattr(manager, "device_for", lambda torch_device: StreamDevice(runtime))
    monkeypatch.setattr(prepare, "keeps_all", lambda *_: False)  # for torch the device is a CPU
    with runtime.watching():
        return training.with_engine(case, str(path))


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", CASES)
def test_training_on_a_late_device_equals_memory(name: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, runtime = training.CASES[name], FakeRuntime(seed=CASES.index(name))
    expected = training.with_engine(case, None)
    assert not training.differences(expected, on_fake(runtime, case, nvme_path, monkeypatch))
    assert runtime.copied_bytes["in"] > 0 and runtime.copied_bytes["out"] > 0
    assert runtime.early > 0, "copies ran before anybody waited for them, and were not the worse for it"
    assert not any(copy for copy in runtime.copies if not copy.ran)


@pytest.mark.usefixtures("few_steps")
def test_parameters_that_stay_on_the_device_go_there_once_a_step(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bytes per parameter, behind its update; without that, for every gather."""
    copied = {}
    for parameters_on in ("cpu", "none"):
        runtime = FakeRuntime()
        case = training.Case(parameters_on=parameters_on, state_on="cpu", pinned_bytes_max="auto", evaluate=True)
        on_fake(runtime, case, nvme_path, monkeypatch)
        copied[parameters_on] = runtime.copied_bytes["in"]
    compute_bytes = 2 * sum(p.numel() for p in training.Model(case).parameters())
    changes = training.STEPS + 1
    assert compute_bytes * training.STEPS < copied["none"] < 1.3 * compute_bytes * changes
    assert copied["cpu"] > 1.5 * copied["none"]


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("parameters_on", ["cpu", "none"])
def test_updates_wait_for_the_group_before_to_be_gathered(
    parameters_on: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the device computes one group, the host updates the next one, and no more."""
    events: list[tuple[str, int]] = []
    gather, run = parameter_lap.ParameterLap.gathering, PendingUpdates.run

    def gathering(
        self: parameter_lap.ParameterLap, group: Any, **options: Any
    ) -> contextlib.AbstractContextManager[None]:
        events.append(("gather", group.index))
        return gather(self, group, **options)

    def running(self: PendingUpdates, sub: Any, **options: Any) -> None:
        if (group := self.group_of(sub)) is not None:
            events.append(("update", group.index))
        run(self, sub, **options)

    monkeypatch.setattr(parameter_lap.ParameterLap, "gathering", gathering)
    monkeypatch.setattr(PendingUpdates, "run", running)
    case = training.Case(
        parameters_on=parameters_on, state_on="cpu", clipping=0.5, pinned_bytes_max="auto", persistence_threshold=0
    )
    on_fake(FakeRuntime(), case, nvme_path, monkeypatch)
    gathers = [number for number, (kind, _) in enumerate(events) if kind == "gather"]
    in_passes = events[: gathers[-1]]  # a look at all weights runs what the last step left
    gathered = 0
    for kind, group in in_passes:
        gathered = group if kind == "gather" else gathered
        assert kind == "gather" or group <= gathered + 2
    assert in_passes.count(("update", 1)) == training.STEPS - 1


@pytest.mark.usefixtures("few_steps")
def test_training_where_nothing_can_be_pinned_equals_memory(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = training.CASES["plain"]
    expected = training.with_engine(case, None)
    runtime = FakeRuntime(refuses="not on this machine")
    assert not training.differences(expected, on_fake(runtime, case, nvme_path, monkeypatch))


def test_pin_memory_false_pins_nothing(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(manager, "device_for", lambda torch_device: StreamDevice(runtime))
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    for pin in (False, True):
        config = {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "offload_param": place | {"pin_memory": pin}, "offload_optimizer": place},
            "infinity": {"pinned_bytes_max": "16MiB"},
        }
        with infinity.initialize(model=torch.nn.Linear(8, 8), config=config)[0]:
            assert bool(runtime.pinned) == pin


@pytest.mark.parametrize(
    ("name", "small_too"),
    [("updated in the step", True), ("only the optimizer on NVMe", True), ("half cached", False), ("plain", True)],
)
def test_groups_are_on_their_way_before_they_are_asked_for(
    name: str, small_too: bool, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the order is known and reads are no longer than what they are read for; and no more than the bound lies there.
    What stays in host memory comes ahead as well: copies that are small, cached, or all there are."""
    monkeypatch.setattr(training, "STEPS", 4)
    runtime = FakeRuntime()
    demanded: list[tuple[int, int]] = []
    largest = []
    end_step = Paging.end_step

    def end(paging: Paging) -> None:
        swap: Any = paging.owner
        swap.stager.settle_all()  # what is still being written can't be read ahead
        end_step(paging)
        assert swap.paging.parameters.ahead is not None
        demanded.append((swap.paging.parameters.ahead.late, len(swap.paged.groups)))
        largest.append(swap.paging.parameters.ahead.bytes_max)
        assert any(group.resident_bytes for group in swap.paged.groups) == small_too

    start = parameter_lap.ParameterLap.start_ahead

    def start_when_read(self: parameter_lap.ParameterLap, **options: Any) -> None:
        self._paged.stager._engine.drain()  # a drive that is never late
        start(self, **options)

    monkeypatch.setattr(Paging, "end_step", end)
    monkeypatch.setattr(parameter_lap.ParameterLap, "start_ahead", start_when_read)
    case = dataclasses.replace(training.CASES[name], evaluate=False, update="step")
    on_fake(runtime, case, nvme_path, monkeypatch)
    later = [after[0] - before[0] for before, after in itertools.pairwise(demanded[2:])]
    assert demanded[0][0] >= demanded[0][1] and set(later) == {0}, demanded
    gathering = 2  # the group that FSDP2 copies, and the one behind it whose copy ends
    assert runtime.device_bytes_max <= largest[0] * (1 + gathering)


@pytest.mark.usefixtures("few_steps")
def test_a_bound_on_live_parameters_leaves_no_room_ahead(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the root and one block, nothing lies on the device but what is asked for; and the numbers are the same."""
    model = training.Model(training.Case())
    blocks = {id(p) for p in model.blocks.parameters()}
    root = sum(p.numel() for p in model.parameters() if id(p) not in blocks)
    case = dataclasses.replace(
        training.CASES["plain"], live=root + sum(p.numel() for p in model.blocks[0].parameters())
    )
    bounds = []
    end_step = Paging.end_step

    def end(paging: Paging) -> None:
        swap: Any = paging.owner
        end_step(paging)
        assert swap.paging.parameters.ahead is not None
        bounds.append((swap.paging.parameters.ahead.bytes_max, swap.paging.parameters.ahead.late))

    monkeypatch.setattr(Paging, "end_step", end)
    expected = training.with_engine(training.CASES["plain"], None)
    assert not training.differences(expected, on_fake(FakeRuntime(), case, nvme_path, monkeypatch))
    assert {nbytes for nbytes, _ in bounds} == {0}
    late = [count for _, count in bounds]
    assert late[-1] > late[-2] > 0, "every copy starts when it is asked for"


@pytest.mark.usefixtures("few_steps")
def test_nobody_waits_for_a_gradient_that_spills(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that copies nothing before it must, every gradient is still on its way when the backward continues."""
    waited: list[bool] = []
    spill = waiting_gradients.WaitingGradients._spill

    def spilling(self: waiting_gradients.WaitingGradients, sub: Any, pieces: Any, grads: Any) -> None:
        spill(self, sub, pieces, grads)
        chunk = self._spilled[sub]
        waited.append(
            chunk.state is not ChunkState.COPYING_FROM_DEVICE or chunk.copy_event is None or chunk.copy_event.done()
        )

    monkeypatch.setattr(waiting_gradients.WaitingGradients, "_spill", spilling)
    case = training.CASES["some gradients on NVMe, accumulated"]
    on_fake(LateRuntime(), case, nvme_path, monkeypatch)
    assert len(waited) > 10 and not any(waited)


def test_a_block_called_alone_leads_nobody_astray(nvme_path: Path) -> None:
    """FSDP2 takes it for the next one in the backward after, and asks for it while its update is still to come."""
    status, output = ranks(
        Path(__file__).resolve().parents[1] / "helpers" / "block_alone_ranks.py", str(nvme_path), count=2
    )
    assert status == 0, output
    for line in output.splitlines():
        if line.startswith("["):
            in_memory, on_nvme = json.loads(line)
            assert in_memory == on_nvme


def without_waiting(copied: Any) -> torch.Tensor:
    copied._runtime.note_use(copied._taken, copied._runtime.current_stream())
    return copied._taken


def without_noting(copied: Any) -> torch.Tensor:
    copied._runtime.current_stream().wait_event(copied._event)
    return copied._taken


def write_too_soon(stager: Any, chunk: Any, *, copy_event: Any = None) -> None:
    stager._start_write(chunk)


def give_too_soon(device: Any, found: torch.Tensor, into: torch.Tensor) -> Any:
    device._runtime.start_copy(into, found, device._d2h)
    device._runtime.note_use(found, device._d2h)
    return streams.StreamCopyEvent(device._d2h.record_event())


def give_unnoted(device: Any, found: torch.Tensor, into: torch.Tensor) -> Any:
    device._d2h.wait_event(device._runtime.current_stream().record_event())
    device._runtime.start_copy(into, found, device._d2h)
    return streams.StreamCopyEvent(device._d2h.record_event())


BUGS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "given out before it has come": (streams._Copied, "on_device", without_waiting),
    "given out without a note of who uses it": (streams._Copied, "on_device", without_noting),
    "brought back before it was computed": (StreamDevice, "start_d2h", give_too_soon),
    "brought back from memory that was reused": (StreamDevice, "start_d2h", give_unnoted),
    "a copy event that is a guess": (streams.StreamCopyEvent, "done", lambda copy_event: True),
    "a copy event without a wait": (streams.StreamCopyEvent, "wait", lambda copy_event: None),
    "gradients in 16 bits used before they have come": (waiting_gradients.HostGradients, "settle", lambda home: None),
    "gradients written to the drive before they have come": (Stager, "write_back", write_too_soon),
    "gradients used before they have come": (
        waiting_gradients.HostGradient,
        "wait",
        lambda gradient: gradient.tensor,
    ),
}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a hazard in what is collected at the end
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("bug", BUGS)
def test_what_is_left_out_is_found(bug: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of the order of copies less, and the same training fails."""
    where, name, broken = BUGS[bug]
    monkeypatch.setattr(where, name, broken)
    case = training.CASES["plain"]
    if "16 bits" in bug:
        case = training.CASES["updated in forward, small sub-groups"]
    if "drive" in bug:
        case = training.CASES["some gradients on NVMe, accumulated"]
    if "guess" in bug:  # in which leases go back as soon as they may
        case = dataclasses.replace(training.CASES["updated in the step"], prefetch=0, persistence_threshold=0)
    with pytest.raises(Hazard):
        on_fake(LateRuntime(), case, nvme_path, monkeypatch)
