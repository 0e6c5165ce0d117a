"""A thread that computes on the CPU takes its OpenMP team along into a wait: [Note: One team] in csrc/base/openmp.h."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worse_drives import needs_test_build

CPU_SECONDS_OF_THE_TEAM = """
import sys, threading
from pathlib import Path
import torch
from infinity.aio import File, IoEngine, PinnedPool, Priority, Request
from worse_drives import DriveLimit, worse_drives

pool = PinnedPool(4 * 4096)
with worse_drives([DriveLimit(latency_seconds=0.5)]):
    engine = IoEngine(pool)
file = File(sys.argv[1], create=True)
file.reserve(4096)

def cpu_seconds_of_the_team():
    names = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
    team = [task for task, name in names.items() if task != threading.get_native_id() and not name.startswith("inf-")]
    return sum(int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) for task in team) / 1e9

def spun(with_team):
    torch.ones(1 << 20).add_(1)  # wakes the team
    transfers = engine.start([Request("write", file, 0, pool.lease(4096), 0, 4096, Priority.DEMAND)])
    before = cpu_seconds_of_the_team()
    engine.wait(transfers, with_team=with_team)
    return cpu_seconds_of_the_team() - before

print(min(spun(True) for _ in range(3)), spun(False), "libgomp" in Path("/proc/self/maps").read_text())
engine.close()
"""


@needs_test_build
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenMP doesn't spin on one core")
def test_the_team_sleeps_until_the_transfer_is_done(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CPU_SECONDS_OF_THE_TEAM, str(tmp_path / "file")],
        # It spins until there is work.
        env=os.environ | {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    with_team, alone, has_libgomp = done.stdout.split()
    if has_libgomp != "True":
        pytest.skip("torch's OpenMP isn't GNU's here")
    assert float(with_team) < float(alone) / 4, done.stdout
