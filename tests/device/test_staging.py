"""What a device promises: it takes staged bytes over unchanged, and says when they may be reused, never sooner."""

from __future__ import annotations

import pytest
import torch

from infinity.aio import PinnedPool
from infinity.device import CpuDevice, CudaDevice, device_for
from infinity.device import staging as module


def test_cpu_uses_staged_bytes_where_they_lie() -> None:
    pool = PinnedPool(4096)
    device = CpuDevice()
    staged = pool.lease(4096).view(torch.float32)
    taken = device.take(staged)
    assert taken.data_ptr() == staged.data_ptr()
    assert taken.device == device.torch_device == torch.device("cpu")


def test_cpu_has_landed_at_once() -> None:
    landing = CpuDevice().landing()
    assert landing.done()
    landing.wait()


def test_cpu_has_nothing_to_register() -> None:
    assert CpuDevice().register(PinnedPool(4096).slab) is None


def test_device_is_chosen_by_kind() -> None:
    assert isinstance(device_for(torch.device("cpu")), CpuDevice)
    chosen = device_for(torch.device("cuda", 1))
    assert isinstance(chosen, CudaDevice)
    assert chosen.torch_device == torch.device("cuda", 1)


class FakeEvent:
    def __init__(self) -> None:
        self.recorded = self.fired = False
        self.waits = 0

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.fired

    def synchronize(self) -> None:
        self.waits += 1
        self.fired = True


def test_cuda_landing_is_an_event_recorded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[FakeEvent] = []

    def make() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    monkeypatch.setattr(module.torch.cuda, "Event", make)
    landing = CudaDevice(torch.device("cuda", 0)).landing()
    (event,) = events
    assert event.recorded
    assert not landing.done()
    assert event.waits == 0
    landing.wait()
    assert event.waits == 1
    assert landing.done()


class FakeRuntime:
    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[int, int, int]] = []
        self.undone: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.undone.append(address)
        return 0


def test_cuda_registers_the_whole_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: runtime)
    slab = PinnedPool(8192).slab
    assert CudaDevice(torch.device("cuda", 0)).register(slab) is None
    assert [(address, nbytes) for address, nbytes, _ in runtime.calls] == [(slab.address, slab.nbytes)]


def test_cuda_forgets_a_slab_once_and_only_one_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: runtime)
    device, slab = CudaDevice(torch.device("cuda", 0)), PinnedPool(8192).slab
    device.unregister(slab)
    assert runtime.undone == []
    device.register(slab)
    device.unregister(slab)
    device.unregister(slab)
    assert runtime.undone == [slab.address]


def test_refused_registration_is_a_sentence_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: FakeRuntime(712))
    note = CudaDevice(torch.device("cuda", 0)).register(PinnedPool(4096).slab)
    assert note is not None
    assert "cudaHostRegister refused" in note and "712" in note and "synchronous" in note


@pytest.mark.gpu
def test_cuda_takes_bytes_over_and_frees_them_when_landed() -> None:
    pool = PinnedPool(64 << 20)
    device = device_for(torch.device("cuda", 0))
    assert device.register(pool.slab) is None
    staged = pool.lease(pool.nbytes).view(torch.int32)
    staged.copy_(torch.arange(staged.numel(), dtype=torch.int32))
    taken = device.take(staged)
    landing = device.landing()
    landing.wait()
    assert landing.done()
    staged.zero_()
    assert taken.device.type == "cuda"
    assert torch.equal(taken.cpu(), torch.arange(taken.numel(), dtype=torch.int32))
    device.unregister(pool.slab)
