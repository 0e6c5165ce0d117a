"""Memory of gathered parameters: elements stay while they are used, and no more is mapped than was used at once."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import launch
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from infinity.fsdp2.gathered_memory import GatheredMemory
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
    memory = GatheredMemory()
    tensors = [memory.tensor(size, torch.uint8) for size in sizes]
    used: dict[int, int] = {}
    most = 0
    for number, event in enumerate(events):
        which = event % len(sizes)
        tensor = tensors[which]
        if which in used:
            assert bool((tensor[::4096] == used.pop(which)).all()) and memory.free(tensor)
        else:
            memory.fill(tensor)
            tensor[::4096] = used[which] = number
        most = max(most, sum(-(-sizes[one] // (2 * MIB)) for one in used) * 2 * MIB)
    for which, number in used.items():
        assert bool((tensors[which][::4096] == number).all())
    assert memory.nbytes == most


def test_small_tensors_are_torchs_own() -> None:
    memory = GatheredMemory()
    tensor = memory.tensor(100, torch.float32)
    memory.fill(tensor)
    assert not memory.free(tensor) and memory.nbytes == 0


def test_what_is_read_after_it_was_freed_ends_the_process() -> None:
    code = """
import torch
from infinity.fsdp2.gathered_memory import GatheredMemory
memory = GatheredMemory()
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

from infinity.fsdp2 import gathered_memory

memory = gathered_memory.GatheredMemory()
tensors = [memory.tensor(mib << 20, torch.uint8) for mib in (1, 5, 3, 8)]
left = 0


def trace(frame, event, argument):
    global left
    if frame.f_code.co_filename != gathered_memory.__file__:
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

from infinity.fsdp2.gathered_memory import GatheredMemory


def huge_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


with mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as asked:
    asked.madvise(mmap.MADV_HUGEPAGE)
    before = huge_bytes()
    asked[::4096] = bytes(len(asked) // 4096)
    if huge_bytes() - before < len(asked) // 2:
        sys.exit("none")
memory = GatheredMemory()
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
    guard(sharded)
    gathered = sharded[0]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]._memory
    assert train(sharded) == train(memory)
    mapped, before = gathered.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert 0 < mapped <= 2 * 4 * MIB  # of layers of 2.4 to 2.8 MB, two at once
    with torch.no_grad():
        for _ in range(20):
            sharded(torch.ones(4, 600))
    assert gathered.nbytes == mapped
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 500  # with FSDP2's own memory: 50 000
