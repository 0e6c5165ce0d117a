"""The loop that trains, sends its weights, sleeps, lets another process generate, and wakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "rollouts.py"


def test_a_loop_with_rollouts_of_another_process(nvme_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--nvme-path", str(nvme_path), "--steps", "3", "--samples", "16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    memory = re.findall(r"step \d: .*; host memory ([\d.]+) MiB, asleep ([\d.]+) MiB", done.stdout)
    assert len(memory) == 3
    assert all(float(awake) - float(asleep) > 30 for awake, asleep in memory)  # its pinned pool
    assert not list(nvme_path.iterdir())


def test_it_ends_if_the_other_process_fails(nvme_path: Path) -> None:
    arguments = ["--samples", "0", "--nvme-path", str(nvme_path)]  # which that process can't reshape
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1 and "EOFError" in done.stderr
    assert not list(nvme_path.iterdir())
