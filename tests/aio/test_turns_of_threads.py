"""Threads that serve a drive ask the scheduler for short turns; those that compute don't."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

import pytest
import torch

from infinity.aio import IoEngine, PinnedPool
from infinity.optim.kernel import split
from infinity.units import MIB

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
ATTRIBUTES = "IIQiIQQQ"  # size, policy, flags, nice, priority, runtime, deadline, period: sched_setattr(2)


def turn_nanoseconds(thread: int) -> int:
    """0 where the kernel says nothing of it. Skips where the thread isn't scheduled as threads usually are."""
    size = struct.calcsize(ATTRIBUTES)
    found = ctypes.create_string_buffer(size)
    status = ctypes.CDLL(None, use_errno=True).syscall(SCHED_GETATTR[platform.machine()], thread, found, size, 0)
    if status != 0:
        pytest.skip(f"sched_getattr is refused here: {os.strerror(ctypes.get_errno())}")
    _, policy, _, _, _, runtime, _, _ = struct.unpack(ATTRIBUTES, found.raw)
    if policy != 0:
        pytest.skip("this process is not under SCHED_OTHER")
    return int(runtime)


def threads_named(start: str) -> list[int]:
    names = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
    return [thread for thread, name in names.items() if name.startswith(start)]


@pytest.mark.skipif(platform.machine() not in SCHED_GETATTR, reason=f"no system call number for {platform.machine()}")
def test_a_ring_thread_takes_short_turns() -> None:
    split(
        torch.zeros(1 << 20),
        torch.zeros(1 << 20, dtype=torch.bfloat16),
        torch.zeros(1 << 20, dtype=torch.int16),
        threads=3,
    )
    before = threads_named("inf-ring")
    engine = IoEngine(PinnedPool(MIB), rings=2)
    try:
        rings = [thread for thread in threads_named("inf-ring") if thread not in before]
        assert len(rings) == 2
        turns = {turn_nanoseconds(thread) for thread in rings}
        # The engines of other tests may not have ended, and the kernel's threads for a ring begin with its turns.
        serving = [thread for name in ("inf-ring", "inf-io", "iou-") for thread in threads_named(name)]
        computing = [thread for thread in threads_named("") if thread not in serving]  # torch's, or the kernel's own
        assert os.getpid() in computing
        usual = {turn_nanoseconds(thread) for thread in computing}
    finally:
        engine.close()
    if not all(usual):
        pytest.skip("this kernel has no turns to ask for (Linux 6.12 has)")
    if turns == usual:
        pytest.skip("this kernel refuses other turns, or gives everybody as short ones")
    assert turns == {100_000} and min(usual) > 100_000
