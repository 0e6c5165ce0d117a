"""What a device promises: it takes staged bytes over unchanged, and says when they may be reused, never sooner."""

from __future__ import annotations

import resource
from unittest import mock

import pytest
import torch
from fake import FakeRuntime, Hazard, LateRuntime

from infinity.aio import PinnedPool
from infinity.device import Device, HostBuffers, StreamDevice, device_for
from infinity.device import cuda as module
from infinity.device.cuda import CudaRuntime
from infinity.host_memory import GroupLimit
from infinity.swap.waiting_gradients import HostGradients


def test_cpu_uses_staged_bytes_where_they_lie() -> None:
    pool = PinnedPool(4096)
    device = Device()
    staged = pool.lease(4096).view(torch.float32).fill_(1.0)
    in_flight = device.start_h2d(staged)
    taken = in_flight.on_device()
    assert taken.data_ptr() == staged.data_ptr()
    assert taken.device == device.torch_device == torch.device("cpu")
    assert in_flight.copy_event.done() and device.copy_event().done() and not device.is_discrete
    into = torch.zeros(1024)
    assert device.start_d2h(staged, into).done()
    assert torch.equal(into, staged)
    assert device.register(pool.slab) is None


def test_device_is_chosen_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(device_for(torch.device("cpu"))) is Device
    monkeypatch.setattr(CudaRuntime, "new_stream", lambda self: object())
    chosen = device_for(torch.device("cuda", 1))
    assert isinstance(chosen, StreamDevice)
    assert chosen.torch_device == torch.device("cuda", 1) and chosen.is_discrete


def test_bytes_are_on_the_device_when_handed_over_and_the_landing_says_when_they_left() -> None:
    pool, runtime = PinnedPool(4096), LateRuntime()
    device = StreamDevice(runtime)
    assert device.register(pool.slab) is None
    staged = pool.lease(4096).view(torch.int32)
    staged.copy_(torch.arange(1024, dtype=torch.int32))
    with runtime.watching():
        in_flight = device.start_h2d(staged)
        assert not in_flight.copy_event.done() and not device.copy_event().done()
        taken = in_flight.on_device()
        assert torch.equal(taken, torch.arange(1024, dtype=torch.int32))
        in_flight.copy_event.wait()
        staged.zero_()
        assert taken[7] == 7


def test_bytes_come_back_as_the_current_stream_leaves_them() -> None:
    runtime = LateRuntime()
    device = StreamDevice(runtime)
    buffers = HostBuffers(device, pin=True)
    buffer = buffers.lend(1000, torch.float32)
    with runtime.watching():
        copy_event = device.start_d2h(torch.ones(1000) * 3, buffer.tensor)
        with pytest.raises(Hazard, match="before the copy into it has ended"):
            buffer.give_back()
        copy_event.wait()
        assert torch.equal(buffer.tensor, torch.full((1000,), 3.0))


def test_a_slab_is_not_unregistered_under_a_copy_whose_event_never_came(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = LateRuntime()
    device = StreamDevice(runtime)
    buffers = HostBuffers(device, pin=True)
    buffer = buffers.lend(1000, torch.float32)
    with runtime.watching():
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "note_use", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                device.start_d2h(torch.ones(1000), buffer.tensor)
        buffers.close()


def test_a_sum_goes_back_to_where_its_first_part_was_taken_from_without_a_wait_in_between() -> None:
    runtime = LateRuntime()
    device = StreamDevice(runtime)
    buffers = HostBuffers(device, pin=True)
    home = HostGradients(device, buffers)
    with runtime.watching():
        place = home.memory(1000, torch.float32)
        home.fetch(torch.ones(1000), place)
        with pytest.raises(Hazard, match="reads host memory before the copy into it has ended"):
            home.to_device(place)
        home.settle()
        home.fetch((torch.ones(1000) * 2).add_(home.to_device(place)), place)
        assert not all(copy.ran for copy in runtime.copies), "there was no wait"
        home.settle()
        assert place.unique().tolist() == [3.0]


def test_a_buffer_is_lent_again_for_its_own_size_and_never_rounded_to_a_power_of_two() -> None:
    buffers = HostBuffers(StreamDevice(FakeRuntime()), pin=True)
    first = buffers.lend(5 * 1024, torch.float32)
    other = buffers.lend(5 * 1024, torch.float32)
    assert buffers.nbytes == 2 * 20480
    address = first.tensor.data_ptr()
    first.give_back()
    again = buffers.lend(10 * 1024, torch.bfloat16)
    assert again.tensor.data_ptr() == address
    assert other.tensor.data_ptr() != address and buffers.nbytes == 2 * 20480
    buffers.close()


def test_what_refuses_to_be_pinned_is_said_once_and_used_all_the_same() -> None:
    buffers = HostBuffers(StreamDevice(FakeRuntime(refuses="no")), pin=True)
    assert buffers.lend(10, torch.float32).tensor.numel() == 10
    buffers.lend(10, torch.float32)
    assert buffers.notes == ["no"]
    unpinned = FakeRuntime(refuses="not asked")
    quiet = HostBuffers(StreamDevice(unpinned), pin=False)
    quiet.lend(10, torch.float32)
    assert quiet.notes == []


class ScriptedCuda:
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
    runtime = ScriptedCuda(0)
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: runtime)
    slab = PinnedPool(8192).slab
    assert CudaRuntime(torch.device("cuda", 0)).pin(slab) is None
    assert [(address, nbytes) for address, nbytes, _ in runtime.calls] == [(slab.address, slab.nbytes)]


def test_cuda_forgets_a_slab_once_and_only_one_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ScriptedCuda(0)
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: runtime)
    device, slab = CudaRuntime(torch.device("cuda", 0)), PinnedPool(8192).slab
    device.unpin(slab)
    assert runtime.undone == []
    device.pin(slab)
    device.unpin(slab)
    device.unpin(slab)
    assert runtime.undone == [slab.address]


def test_refused_registration_is_a_sentence_that_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: ScriptedCuda(2))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    groups = [GroupLimit(limit_bytes=gib << 30, used_bytes=None, reclaimable_bytes=0) for gib in (5, 3)]
    monkeypatch.setattr(module, "control_group_limits", lambda: groups)
    note = CudaRuntime(torch.device("cuda", 0)).pin(PinnedPool(4096).slab)
    assert note is not None
    for said in ("refused 4.00 KiB", "CUDA error 2", "synchronous", "ulimit -l) is 8.00 MiB", "cgroup", "3.00 GiB"):
        assert said in note


def test_refused_registration_without_limits_says_that_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: ScriptedCuda(712))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(module, "control_group_limits", list)
    note = CudaRuntime(torch.device("cuda", 0)).pin(PinnedPool(4096).slab)
    assert note is not None and "no limit on locked memory or of the cgroup is set" in note


@pytest.mark.gpu
def test_cuda_takes_bytes_over_and_frees_them_when_landed() -> None:
    pool = PinnedPool(64 << 20)
    device = device_for(torch.device("cuda", 0))
    assert device.register(pool.slab) is None
    staged = pool.lease(pool.nbytes).view(torch.int32)
    staged.copy_(torch.arange(staged.numel(), dtype=torch.int32))
    in_flight = device.start_h2d(staged)
    taken = in_flight.on_device()
    in_flight.copy_event.wait()
    assert in_flight.copy_event.done()
    staged.zero_()
    assert taken.device.type == "cuda"
    assert torch.equal(taken.cpu(), torch.arange(taken.numel(), dtype=torch.int32))
    device.unregister(pool.slab)
