"""Reads past host memory: trainings with them on the device that isn't there are bit for bit what they are in memory, and
refused where a wait is left out; kvikio is asked for what it takes; and where it can't be, everything goes as without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake import FakeRuntime, Hazard, LateRuntime
from fake_reader import FakeReader
from launch import ranks
from quiet import come_to_rest

import infinity
from infinity.device import CpuDevice, StreamDevice, direct, direct_reader_for, staging
from infinity.device.direct import DirectReader
from infinity.errors import IoError
from infinity.swap import direct as direct_reads
from infinity.swap import machinery, manager
from infinity.swap.chunk import Chunk, Span
from infinity.swap.paging import Paging
from infinity.swap.parameter_lap import ParameterLap

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
import training

CASES = {
    "updated in forward": training.CASES["updated in forward, small sub-groups"],
    "accumulation and clipping": training.CASES["accumulation and clipping"],
    "updated in the step, evaluated": dataclasses.replace(
        training.CASES["updated in the step"], persistence_threshold=0
    ),
    "updated in backward, masters in full": training.CASES["updated in backward, masters in full"],
    "only parameters on NVMe": training.CASES["only parameters on NVMe"],
    "frozen parameters": training.CASES["frozen parameters"],
    "a tenth cached": dataclasses.replace(training.CASES["a tenth cached"], update="forward"),
    "activation checkpointing": training.CASES["activation checkpointing"],
    "fp16": training.CASES["fp16, fixed loss scale"],
}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "STEPS", 3)


class Machine:
    """A device that isn't there, with something that reads into it."""

    def __init__(self, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, *, fails: Sequence[int] = ()) -> None:
        self.runtime = runtime
        self.readers: list[FakeReader] = []
        self.bounds: list[int] = []
        """Bytes that may lie on the device ahead of use."""
        self._fails = fails
        monkeypatch.setattr(manager, "device_for", lambda torch_device: StreamDevice(runtime))
        monkeypatch.setattr(machinery, "direct_reader_for", self._reader)
        end_step = Paging.end_step

        def end(paging: Paging) -> None:
            swap: Any = paging.owner
            end_step(paging)
            assert swap.reads_directly and swap.paging.parameters.ahead is not None
            self.bounds.append(swap.paging.parameters.ahead.bytes_max)
            come_to_rest(swap)
            self.steps.append((swap.stats().read_bytes, swap.step_bytes()[0]))

        self.steps: list[tuple[int, int]] = []
        """After each step: bytes read so far, and what the next one is to read."""
        monkeypatch.setattr(Paging, "end_step", end)

    def _reader(self, torch_device: torch.device, descriptors: Sequence[int]) -> FakeReader:
        self.readers.append(FakeReader(self.runtime, descriptors, fails=self._fails))
        return self.readers[-1]

    def train(self, case: training.Case, path: Path) -> training.Outcome:
        with self.runtime.watching():
            return training.with_engine(dataclasses.replace(case, direct=True), str(path))


@pytest.mark.usefixtures("few_steps", "one_rank")
@pytest.mark.parametrize("name", CASES)
def test_training_past_host_memory_equals_memory(name: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = training.with_engine(CASES[name], None)
    machine = Machine(FakeRuntime(seed=len(name)), monkeypatch)
    assert not training.differences(expected, machine.train(CASES[name], nvme_path))
    assert all(bound * 3 >= machine.runtime.device_bytes_max for bound in machine.bounds), "one ahead, two with FSDP2"
    (reader,) = machine.readers
    assert reader.checked > 0 and not reader.under_way


@pytest.mark.usefixtures("one_rank")
def test_a_note_says_where_nothing_goes_past(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training, "STEPS", 1)
    all_in_backward = dataclasses.replace(training.CASES["plain"], gradients_in_memory=1 << 30)
    cases = {"nothing of this model goes": all_in_backward, "": training.CASES["updated in forward"]}
    for words, case in (cases | {"only 1 of 5 groups go": training.CASES["plain"]}).items():
        caplog.clear()
        machine = Machine(FakeRuntime(), monkeypatch)
        with caplog.at_level(logging.INFO, "infinity"):
            machine.train(case, nvme_path)
        assert ("past host memory" in caplog.text) == bool(words) and words in caplog.text
        assert bool(machine.readers[0].asked) == ("nothing" not in words)


@pytest.mark.usefixtures("few_steps", "one_rank")
def test_over_several_drives(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of a stripe comes from its own file, in its own place."""
    case = dataclasses.replace(training.CASES["updated in the step"], persistence_threshold=0, direct=True)
    machine = Machine(FakeRuntime(), monkeypatch)
    paths = [str(nvme_path / name) for name in ("first", "second")]
    for path in paths:
        Path(path).mkdir()
    monkeypatch.setattr(
        machinery.Drives, "_measure", lambda self, paths: [1.0, 1.0]
    )  # not by what a busy machine gives
    expected = training.with_engine(case, None)
    with machine.runtime.watching():
        found = training.with_engine(case, paths)  # type: ignore[arg-type]
    assert not training.differences(expected, found)
    assert {file for file, _ in machine.readers[0].asked} == {0, 1}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["updated in forward", "updated in the step, evaluated", "only parameters on NVMe"])
def test_a_step_reads_what_it_says(name: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, when nothing is read ahead of the step's end."""
    monkeypatch.setattr(training, "STEPS", 5)
    machine = Machine(LateRuntime(), monkeypatch)
    start_ahead, look_ahead = ParameterLap.start_ahead, ParameterLap.look_ahead
    ending: list[bool] = []
    end_step = Paging.end_step

    def end(paging: Paging) -> None:
        ending.append(True)
        end_step(paging)
        ending.pop()

    monkeypatch.setattr(Paging, "end_step", end)
    monkeypatch.setattr(ParameterLap, "look_ahead", lambda s, *a, **k: ending or look_ahead(s, *a, **k))
    monkeypatch.setattr(ParameterLap, "start_ahead", lambda s, *a, **k: ending or start_ahead(s, *a, **k))
    machine.train(dataclasses.replace(CASES[name], evaluate=False), nvme_path)
    (before, says), (after, _) = machine.steps[-2:]
    assert after - before == says


def test_two_ranks_read_no_more_than_they_say(nvme_path: Path) -> None:
    """FSDP2 asks for groups ahead there: each of them is read once, and lies within the bound."""
    status, output = ranks(Path(__file__).with_name("direct_ranks.py"), str(nvme_path), count=2)
    assert status == 0, output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == 2
    for rank in found:
        assert rank["read"] == rank["said"]
        assert rank["device_bytes_max"] <= 3 * rank["bound"]


@pytest.mark.usefixtures("few_steps", "one_rank")
def test_nothing_is_staged_that_goes_past(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(training.CASES["only parameters on NVMe"], persistence_threshold=0)
    machine = Machine(FakeRuntime(), monkeypatch)
    read = []
    end_step = Paging.end_step

    def end(paging: Paging) -> None:
        swap: Any = paging.owner
        end_step(paging)
        read.append(swap._open().engine.read_bytes)

    monkeypatch.setattr(Paging, "end_step", end)
    machine.train(case, nvme_path)
    assert len(set(read)) == 1 and machine.steps[-1][0] > machine.steps[0][0], "after what set it up"


@pytest.mark.usefixtures("few_steps", "one_rank")
def test_a_read_that_fails_says_of_what_and_is_done_again(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(training.CASES["updated in the step"], direct=True, persistence_threshold=0)
    machine = Machine(FakeRuntime(), monkeypatch, fails=[0])
    engine = infinity.initialize(
        model=training.Model(case),
        config={
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "offload_param": {"device": "nvme", "nvme_path": str(nvme_path)},
                "offload_optimizer": {"device": "nvme", "nvme_path": str(nvme_path)},
            },
            "aio": {"use_gds": True},
            "infinity": {"checksums": False, "pinned_bytes_max": "16MiB", "update": "step"},
        },
    )[0]
    with engine, torch.no_grad():
        with pytest.raises(IoError, match=r"group .*: the drive has gone"):
            training.loss_of(engine, training.batch(0, 0))
        assert training.loss_of(engine, training.batch(0, 0)).isfinite()
    assert len(machine.readers[0].asked) > 1


def without_a_wait(filled: Any) -> torch.Tensor:
    found: torch.Tensor = filled._copied._taken
    filled._copied._runtime.note_use(found, filled._copied._runtime.current_stream())
    return found


def without_a_note(filled: Any) -> torch.Tensor:
    filled.copy_event.wait()
    found: torch.Tensor = filled._copied._taken
    return found


def checked_too_soon(filled: Any) -> torch.Tensor:
    for read in filled._reads:
        read.check()
    found: torch.Tensor = filled._copied.on_device()
    return found


BUGS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "given out before it was read": (staging.Filled, "on_device", without_a_wait),
    "given out without a note of who uses it": (staging.Filled, "on_device", without_a_note),
    "held to be right before it was read": (staging.Filled, "on_device", checked_too_soon),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("few_steps", "one_rank")
@pytest.mark.parametrize("bug", BUGS)
def test_what_is_left_out_is_found(bug: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BUGS[bug]
    monkeypatch.setattr(where, name, broken)
    machine = Machine(LateRuntime(), monkeypatch)
    case = dataclasses.replace(training.CASES["updated in the step"], persistence_threshold=1000)
    if "too_soon" in broken.__name__ or "without_a_wait" in broken.__name__:
        monkeypatch.setattr(direct_reads._Coming, "on_device", lambda coming: coming._in_flight.on_device())
    with pytest.raises(Hazard):
        machine.train(case, nvme_path)


@pytest.mark.parametrize("waits", [True, False])
def test_what_nobody_wants_any_more_is_waited_for_at_the_end(waits: bool, written: int) -> None:
    reader = FakeReader(runtime := LateRuntime(), [written])
    arena: Any = SimpleNamespace(pieces=lambda offset, nbytes: [(0, offset, nbytes)])
    stager: Any = None
    reads = direct_reads.DirectReads(reader, arena, StreamDevice(runtime), stager)
    for offset in (0, 4096):
        reads.start(Chunk("group x", 4096, (Span(offset, 0, 4096),), ()))
    assert reader.under_way == 2
    if waits:
        reads.close()
        assert reader.under_way == 0 and reads.read_bytes == 8192
    else:
        with pytest.raises(Hazard, match="closed while they are read"):
            reader.close()


# kvikio itself.


class FakeKvikio:
    """The part of kvikio that is used, over ordinary reads, which behave as `how` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str = "") -> None:
        self.how = how
        self.asked: list[tuple[int, int, int]] = []
        self.compat_mode = "AUTO"
        self.closed = 0
        kvikio = ModuleType("kvikio")
        kvikio.CuFile = self.open  # type: ignore[attr-defined]
        if how != "of another time":
            kvikio.CompatMode = SimpleNamespace(OFF="OFF")  # type: ignore[attr-defined]
        defaults = ModuleType("kvikio.defaults")
        defaults.set = self.set  # type: ignore[attr-defined]
        driver = ModuleType("kvikio.cufile_driver")
        driver.get = lambda name: {"is_gds_available": how != "unavailable"}[name]  # type: ignore[attr-defined]
        for module in (kvikio, defaults, driver):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    @contextlib.contextmanager
    def set(self, config: dict[str, str]) -> Iterator[None]:
        self.compat_mode = config.pop("compat_mode")
        assert not config
        yield
        self.compat_mode = "AUTO"

    def open(self, path: str, flags: str) -> Any:
        assert flags == "r" and self.compat_mode == "OFF", "it would read through host memory"
        if self.how == "can't open":
            raise RuntimeError("cuFileHandleRegister says no")
        descriptor = os.open(path, os.O_RDONLY)

        def read(into: torch.Tensor, raw_stream: int, size: int | None = None, *, file_offset: int) -> Any:
            assert into.dtype is torch.uint8 and into.is_contiguous() and size is None
            self.asked.append((raw_stream, file_offset, into.numel()))
            if self.how == "can't start":
                raise RuntimeError("too many reads")

            def check_bytes_done() -> int:
                if self.how == "fails":
                    raise OSError("cuFile says no")
                found = os.pread(descriptor, into.numel(), file_offset)
                into[: len(found)].copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
                return len(found)

            return SimpleNamespace(check_bytes_done=check_bytes_done)

        def close() -> None:
            self.closed += 1
            os.close(descriptor)

        return SimpleNamespace(raw_read_async=read, close=close)


STREAM = SimpleNamespace(cuda_stream=77)


@pytest.fixture
def written(tmp_path: Path) -> int:
    """A descriptor of a file without a name, of 8 KiB."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 32)
    descriptor = os.open(path, os.O_RDONLY)
    path.unlink()
    return descriptor


def test_kvikio_is_asked_for_what_is_wanted(written: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio = FakeKvikio(monkeypatch)
    reader = DirectReader([written])
    assert kvikio.compat_mode == "AUTO", "for everybody else"
    into = torch.zeros(4096, dtype=torch.uint8)
    read = reader.start(0, 4096, into, STREAM)
    assert read.nbytes == 4096
    read.check()
    read.check()
    assert kvikio.asked == [(77, 4096, 4096)]
    assert bytes(into.numpy()) == bytes(range(256)) * 16
    reader.close()
    assert kvikio.closed == 1


@pytest.mark.parametrize(
    ("how", "nbytes", "says"),
    [
        ("fails", 4096, "cuFile says no"),
        ("can't start", 4096, "too many reads"),
        ("", 8192, "only 4096 of 8192 bytes came"),
    ],
)
def test_what_fails_is_said_every_time(
    how: str, nbytes: int, says: str, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeKvikio(monkeypatch, how)
    read = DirectReader([written]).start(0, 4096, torch.zeros(nbytes, dtype=torch.uint8), STREAM)
    for _ in range(2):
        with pytest.raises(IoError, match=f"{nbytes} bytes at offset 4096 past host memory: .*{says}") as raised:
            read.check()
        assert (raised.value.operation, raised.value.offset, raised.value.length) == ("read", 4096, nbytes)


def test_what_is_missing_is_said_first_things_first(
    tmp_path: Path, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda", 0)

    def said(torch_device: torch.device = cuda) -> str:
        found = direct_reader_for(torch_device, [written])
        assert isinstance(found, str)
        return found

    assert "no CUDA device" in said(torch.device("cpu"))
    monkeypatch.setattr(direct.importlib.util, "find_spec", lambda name: None)
    assert "kvikio is not installed" in said()
    monkeypatch.setattr(direct.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(direct, "_DRIVER", tmp_path / "missing")
    assert "nvidia-fs is not loaded" in said()
    monkeypatch.setattr(direct, "_DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", None)
    assert "kvikio can't be used" in said()
    FakeKvikio(monkeypatch, "unavailable")
    assert "GPUDirect Storage is not available" in said()
    FakeKvikio(monkeypatch, "of another time")
    assert "CompatMode" in said()
    FakeKvikio(monkeypatch, "can't open")
    assert "cuFile can't open /proc/self/fd/" in said() and "cuFileHandleRegister says no" in said()
    FakeKvikio(monkeypatch)
    found = direct_reader_for(cuda, [written])
    assert isinstance(found, DirectReader)
    found.close()


@pytest.mark.usefixtures("few_steps", "one_rank")
@pytest.mark.parametrize(("checksums", "says"), [(True, "infinity.checksums is on"), (False, "no CUDA device")])
def test_where_it_cannot_be_a_note_says_why(
    checksums: bool, says: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "aio": {"use_gds": True},
        "infinity": {"checksums": checksums, "pinned_bytes_max": "16MiB"},
    }
    with caplog.at_level(logging.INFO, "infinity"), infinity.initialize(model=torch.nn.Linear(8, 8), config=config)[0]:
        pass
    assert f"through pinned host memory, although aio.use_gds is set: {says}" in caplog.text.replace("there is ", "")


def test_the_cpu_fills_memory_too(written: int) -> None:
    def fill(into: torch.Tensor, stream: object) -> list[Any]:
        def check() -> None:
            into.copy_(torch.frombuffer(bytearray(os.pread(written, into.numel(), 1)), dtype=torch.uint8))

        assert stream is None
        return [SimpleNamespace(nbytes=into.numel(), check=check)]

    in_flight = CpuDevice().start_filling(4, torch.uint8, fill)
    assert in_flight.copy_event.done()
    assert in_flight.on_device().tolist() == [1, 2, 3, 4]
