"""Faults at random, through the Python face: what the engine makes good, what it raises, and what it can't know."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from worse_drives import FaultPlan, worse_drives

import infinity
from infinity.aio import File, IoEngine, PinnedPool, Priority, Request

MIB = 1 << 20


class Machine:
    """A pool of 4 MiB, an engine, and a file of 2 MiB."""

    def __init__(self, path: Path, backend: str, silence_seconds_max: float) -> None:
        self.pool = PinnedPool(4 * MIB)
        self.engine = IoEngine(
            self.pool,
            backend=backend,
            block_bytes=64 << 10,
            queue_depth=4,
            silence_seconds_max=silence_seconds_max,
        )
        self.file = File(path / "file", create=True)
        self.file.reserve(2 * MIB)
        self.lease = self.pool.lease(2 * MIB)
        self.bytes = self.lease.view(torch.uint8, 0, 2 * MIB)

    def move(self, operation: str) -> None:
        request = Request(operation, self.file, 0, self.lease, 0, 2 * MIB, Priority.PREFETCH)
        self.engine.wait(self.engine.start([request]))


@contextmanager
def machine_for(
    path: Path, plan: FaultPlan, *, backend: str = "auto", silence_seconds_max: float = 300.0
) -> Iterator[tuple[Machine, Callable[[], dict[str, int]]]]:
    """A machine whose drive fails by `plan`, and the counts of its faults."""
    with worse_drives(faults=plan) as fault_counts:
        machine = Machine(path, backend, silence_seconds_max)
    try:
        yield machine, fault_counts
    finally:
        machine.lease.give_back()
        machine.engine.close()
        machine.file.close()


def test_what_can_be_made_good_is(backend: str, nvme_path: Path) -> None:
    plan = FaultPlan(seed=5, interrupted=0.2, again=0.2, memory=0.1, short=0.2, overtaken=0.2)
    with machine_for(nvme_path, plan, backend=backend) as (machine, fault_counts):
        machine.bytes.copy_(torch.arange(2 * MIB) % 251)
        machine.move("write")
        machine.bytes.zero_()
        machine.move("read")
        assert torch.equal(machine.bytes, (torch.arange(2 * MIB) % 251).to(torch.uint8))
        faults = fault_counts()
        assert all(faults[name] > 0 for name in ("interrupted", "again", "memory", "short", "overtaken"))
        assert faults["io"] == 0


@pytest.mark.parametrize(
    ("name", "operation", "number"),
    [("io", "read", errno.EIO), ("space", "write", errno.ENOSPC), ("memory", "read", errno.ENOMEM)],
)
def test_what_cannot_is_raised_with_its_errno(name: str, operation: str, number: int, nvme_path: Path) -> None:
    with machine_for(nvme_path, FaultPlan(**{name: 1.0})) as (machine, fault_counts):
        with pytest.raises(infinity.IoError, match=f"{operation} 2 MiB at offset 0 of .*file") as caught:
            machine.move(operation)
        assert caught.value.errno == number
        assert fault_counts()[name] > 0


def test_a_lost_write_looks_like_success(nvme_path: Path) -> None:
    with machine_for(nvme_path, FaultPlan(lost=1.0, after_blocks=32)) as (machine, _):
        machine.bytes.fill_(1)
        machine.move("write")
        machine.bytes.fill_(2)
        machine.move("write")
    assert set((nvme_path / "file").read_bytes()) == {1}


def test_a_drive_that_stops_answering_is_an_error_and_no_hang(backend: str, nvme_path: Path) -> None:
    plan = FaultPlan(stuck=0.2, seed=1)
    with machine_for(nvme_path, plan, backend=backend, silence_seconds_max=0.4) as (machine, _):
        with pytest.raises(infinity.IoError, match="has not answered"):
            machine.move("read")
        with pytest.raises(infinity.IoError, match="has not answered"):
            machine.move("read")


@pytest.mark.parametrize("rates", [{"io": 1.1}, {"io": 0.6, "short": 0.6}, {"late": -1}, {"after_blocks": -1}])
def test_plans_that_cannot_be_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|sum"), worse_drives(faults=FaultPlan(**rates)):  # type: ignore[arg-type]
        pass


def test_an_engine_made_after_the_block_has_no_faults(nvme_path: Path) -> None:
    with worse_drives(faults=FaultPlan(io=1.0)):
        pass
    machine = Machine(nvme_path, "auto", 300.0)
    machine.move("write")
    machine.lease.give_back()
    machine.engine.close()
    machine.file.close()


def test_a_swap_manager_raises_what_its_drive_answers(nvme_path: Path) -> None:
    plan = FaultPlan(io=1.0, after_blocks=1)
    with worse_drives(faults=plan), infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.tensors.register("first", torch.ones(4096))
        swap.flush()
        with pytest.raises(infinity.IoError, match="EIO"), swap.tensors.use("first"):
            pass
