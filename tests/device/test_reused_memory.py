"""Memory that is mapped once: elements stay while they are used, and no more is mapped than was used at once."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
from pathlib import Path
from unittest import mock

import launch
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from infinity.device.reused_memory import ReusedMemory
from infinity.fsdp2.guarded import guard

MIB = 1 << 20
NUMEL = 600 * 1000
"""Of a matrix whose bytes are no multiple of a huge page."""


@given(
    sizes=st.lists(st.integers(MIB, 7 * MIB), min_size=1, max_size=5),
    events=st.lists(st.integers(0, 4), max_size=40),
)
def test_elements_stay_while_they_are_used_and_no_more_is_mapped_than_at_once(
    sizes: list[int], events: list[int]
) -> None:
    memory = ReusedMemory()
    tensors = [memory.tensor(size, torch.uint8) for size in sizes]
    used: dict[int, int] = {}
    most = 0
    for number, event in enumerate(events):
        which = event % len(sizes)
        tensor = tensors[which]
        if which in used:
            assert bool((tensor[::4096] == used.pop(which)).all())
            memory.free(tensor)
        else:
            memory.fill(tensor)
            tensor[::4096] = used[which] = number
        most = max(most, sum(-(-sizes[one] // (2 * MIB)) for one in used) * 2 * MIB)
    for which, number in used.items():
        assert bool((tensors[which][::4096] == number).all())
    assert memory.nbytes == most


@given(
    sizes=st.lists(st.integers(MIB, 7 * MIB), min_size=1, max_size=4),
    events=st.lists(st.integers(0, 7), max_size=40),
)
def test_what_is_lent_shares_pages_with_what_is_gathered(sizes: list[int], events: list[int]) -> None:
    memory = ReusedMemory()
    gathered = [memory.tensor(size, torch.uint8) for size in sizes]
    lent: dict[int, torch.Tensor] = {}
    used: dict[int, int] = {}
    most = 0
    for number, event in enumerate(events):
        which = event % len(sizes)
        key = which + len(sizes) * (event % 2)
        if key in used:
            tensor = lent.pop(key) if event % 2 else gathered[which]
            assert bool((tensor[::4096] == used.pop(key)).all())
            if not event % 2:
                memory.free(tensor)
            del tensor
        else:
            if event % 2:
                lent[key] = memory.lend(sizes[which], torch.uint8)
            else:
                memory.fill(gathered[which])
            (lent[key] if event % 2 else gathered[which])[::4096] = used[key] = number
        most = max(most, sum(-(-sizes[one % len(sizes)] // (2 * MIB)) for one in used) * 2 * MIB)
    for key, number in used.items():
        assert bool(((lent[key] if key in lent else gathered[key])[::4096] == number).all())
    assert memory.nbytes == most


def test_memory_is_never_lent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if an exception comes while it is lent, and is kept with all that it holds."""
    memory = ReusedMemory()
    memory.lend(NUMEL, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "fill", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as raised:
            memory.lend(NUMEL, torch.float32)
    lent = memory.lend(NUMEL, torch.float32).fill_(7)
    del raised
    gc.collect()
    assert bool((memory.lend(NUMEL, torch.float32).fill_(3) == 3).all()) and bool((lent == 7).all())


def test_what_is_in_no_use_is_given_back() -> None:
    memory = ReusedMemory()
    gathered, lent = memory.tensor(NUMEL, torch.float32), memory.lend(NUMEL, torch.float32)
    memory.fill(gathered)
    memory.free(gathered)
    memory.lend(2 * NUMEL, torch.float32)
    memory.release()
    assert memory.nbytes == 4 * MIB and lent.numel() == NUMEL
    del lent
    memory.release()
    assert memory.nbytes == 0
    memory.fill(gathered)
    assert bool((gathered.fill_(1) == 1).all())


def test_small_tensors_are_torchs_own() -> None:
    memory = ReusedMemory()
    tensor = memory.tensor(100, torch.float32)
    assert not memory.holds(tensor) and memory.nbytes == 0


def test_what_is_read_after_it_was_freed_ends_the_process() -> None:
    code = """
import torch
from infinity.device.reused_memory import ReusedMemory
memory = ReusedMemory()
tensor = memory.tensor(1 << 20, torch.float32)
memory.fill(tensor)
tensor.fill_(1)
view = tensor.view(1024, 1024).t()
memory.free(tensor)
print(view.sum())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=120)
    assert ended.returncode < 0 and not ended.stdout


INTERRUPTED = """
import sys

import torch

from infinity.device import reused_memory

memory = reused_memory.ReusedMemory()
tensors = [memory.tensor(mib << 20, torch.uint8) for mib in (1, 5, 3, 8)]
left = 0


def trace(frame, event, argument):
    global left
    if frame.f_code.co_filename != reused_memory.__file__:
        return None
    if event == "line":
        left -= 1
        if not left:
            raise KeyboardInterrupt
    return trace


def use(number):
    used = []
    for place in (number, number + 1):
        tensor = tensors[place % len(tensors)]
        memory.fill(tensor)
        used.append(tensor.fill_(number % 251))
    for tensor in used:
        assert bool((tensor[::4096] == number % 251).all())
        memory.free(tensor)


interrupts = 0
for number in range(2000):
    left = number // 8 + 1
    sys.settrace(trace)
    try:
        use(number)
    except KeyboardInterrupt:
        interrupts += 1
    finally:
        sys.settrace(None)
    for tensor in tensors:
        memory.free(tensor)
    use(number)
assert interrupts > 500 and left > 0, (interrupts, left)
"""


def test_an_exception_at_any_line_leaves_memory_that_can_be_used() -> None:
    done = launch.code(INTERRUPTED)
    assert done.returncode == 0, done.stderr


HUGE = """
import mmap
import sys
from pathlib import Path

import torch

from infinity.device.reused_memory import ReusedMemory


def huge_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


with mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as asked:
    asked.madvise(mmap.MADV_HUGEPAGE)
    before = huge_bytes()
    asked[::4096] = bytes(len(asked) // 4096)
    if huge_bytes() - before < len(asked) // 2:
        sys.exit("none")
memory = ReusedMemory()
before = huge_bytes()
for value in (1, 2):
    tensor = memory.tensor(47 << 20, torch.uint8)
    memory.fill(tensor)
    assert int(tensor.fill_(value)[::4096].sum()) == value * tensor.numel() // 4096
    assert huge_bytes() - before >= tensor.nbytes // 2  # the others have no free one, if memory is fragmented
    memory.free(tensor)
"""


def test_large_parameters_are_in_huge_pages() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("the kernel gives no huge pages: /sys/kernel/mm/transparent_hugepage/enabled")
    done = launch.code(HUGE)
    if done.stderr.strip() == "none":
        pytest.skip("the kernel gives no huge pages now: its memory is fragmented")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("one_rank")
def test_a_model_trains_as_ever_and_maps_nothing_anew() -> None:
    """Autograd's views of the forward read what the backward gathers, in any order of the layers."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(width, height) for width, height in ((600, 1000), (1000, 700), (700, 900), (900, 600)))
        )

    def train(trained: nn.Sequential) -> list[float]:
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        losses = []
        for number in range(6):
            torch.manual_seed(number)
            loss = trained(torch.randn(4, 600)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    memory, sharded = model(), model()
    mesh = init_device_mesh("cpu", (1,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    guard(sharded, ReusedMemory())
    gathered = sharded[0]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]._memory
    assert train(sharded) == train(memory)
    mapped, before = gathered.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert 0 < mapped <= 2 * 4 * MIB  # of layers of 2.4 to 2.8 MB, two at once
    with torch.no_grad():
        for _ in range(20):
            sharded(torch.ones(4, 600))
    assert gathered.nbytes == mapped
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 500  # with FSDP2's own memory: 50 000
