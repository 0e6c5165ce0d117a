"""A limit of memory for a child process holds, ends with it, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from infinity.cli import memory_limit as limits

MIB = 1 << 20


@pytest.mark.parametrize("way", ["_systemd", "_own_group", "_of_the_process"])
def test_a_limit_holds(way: str) -> None:
    with getattr(limits, way)(200 * MIB) as limit:
        if limit is None:
            pytest.skip(f"this system has no limit of the kind {way}")
        assert limit.run([sys.executable, "-c", "bytearray(20 << 20)"]) == 0
        assert limit.run([sys.executable, "-c", "bytearray(400 << 20)"]) != 0
        assert limit.run([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert not [*limits.CGROUPS.rglob(f"infinity-limit-{os.getpid()}-*")]


@pytest.mark.parametrize("swap", [False, True])
def test_swap_space_counts_unless_it_is_permitted(swap: bool) -> None:
    with limits._own_group(200 * MIB, swap) as limit:
        groups = limits.CGROUPS.rglob(f"infinity-limit-{os.getpid()}-*")
        names = ("memory.memsw.limit_in_bytes", "memory.swap.max")
        files = [group / name for group in groups for name in names if (group / name).exists()]
        if limit is None or not files:
            pytest.skip("this system lets us make no control group, or does not count swap space")
        assert (files[0].read_text().strip() in ("0", str(200 * MIB))) is not swap
    with limits._of_the_process(200 * MIB, swap) as limit:
        assert not (swap and limit)


def test_what_a_killed_process_left_is_removed() -> None:
    code = "import os, signal\nfrom infinity.cli import memory_limit\nwith memory_limit._own_group(1 << 30) as limit:\n"
    code += "    print(limit is not None, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if killed.stdout.split() != ["True"]:
        pytest.skip("this system lets us make no control group")
    before = {*limits.CGROUPS.rglob("infinity-limit-*")}
    with limits._own_group(1 << 30):
        assert len(before - {*limits.CGROUPS.rglob("infinity-limit-*")}) >= 1
