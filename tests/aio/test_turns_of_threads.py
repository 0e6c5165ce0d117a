"""I/O threads ask the scheduler for short turns; nobody else in the process does."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

import pytest

from infinity.aio import IoEngine, PinnedPool
from infinity.units import MIB

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
ATTRIBUTES = "IIQiIQQQ"  # size, policy, flags, nice, priority, runtime, deadline, period: sched_setattr(2)


def turn_nanoseconds(thread: int) -> int:
    """0 where the kernel says nothing of it."""
    size = struct.calcsize(ATTRIBUTES)
    found = ctypes.create_string_buffer(size)
    status = ctypes.CDLL(None, use_errno=True).syscall(SCHED_GETATTR[platform.machine()], thread, found, size, 0)
    if status != 0:
        pytest.skip(f"sched_getattr is refused here: {os.strerror(ctypes.get_errno())}")
    return int(struct.unpack(ATTRIBUTES, found.raw)[5])


@pytest.mark.skipif(platform.machine() not in SCHED_GETATTR, reason=f"no system call number for {platform.machine()}")
def test_a_ring_thread_takes_short_turns() -> None:
    before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    engine = IoEngine(PinnedPool(MIB), rings=2)
    try:
        names = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        rings = [thread for thread, name in names.items() if thread not in before and name.startswith("inf-ring")]
        assert len(rings) == 2
        turns = {turn_nanoseconds(thread) for thread in rings}
        usual = turn_nanoseconds(os.getpid())
    finally:
        engine.close()
    if not usual:
        pytest.skip("this kernel has no turns to ask for (Linux 6.12 has)")
    assert turns == {100_000} and usual > 100_000
