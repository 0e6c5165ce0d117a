"""OpenMP's idle threads sleep at once while an `EarlySleep` lives, and spin before and after: [Note: Early sleep]."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CPU_SECONDS_OF_OTHERS = """
import os, time
from pathlib import Path
import torch
from infinity.aio import start_early_sleep

tensor = torch.ones(1 << 20)

def threads():
    return {task.name for task in Path("/proc/self/task").iterdir()}

def spun():
    before = time.process_time() - time.thread_time()
    for _ in range(50):
        tensor.add_(1)
        began = time.thread_time()
        while time.thread_time() < began + 0.002:  # Python, while the others have nothing to do
            pass
    return time.process_time() - time.thread_time() - before

awake = spun()
before = threads()
sleep = start_early_sleep()
assert sleep is not None
tensor.add_(1)
spun()
asleep = spun()
child = os.fork()
if child == 0:
    sleep.end()  # its threads aren't here
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
started = len(threads() - before)
sleep.end()
sleep.end()
deadline = time.monotonic() + 10
while (left := len(threads() - before)) and time.monotonic() < deadline:  # the runtime doesn't wait for its own
    time.sleep(0.01)
again = spun()
print(awake, asleep, again, started, left, bool((tensor == tensor[0]).all()), "libgomp" in Path("/proc/self/maps").read_text())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenMP doesn't spin on one core")
def test_idle_threads_sleep_at_once_until_the_end() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-c", CPU_SECONDS_OF_OTHERS],
        env=environment | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    awake, asleep, again, started, left, equal, has_libgomp = done.stdout.split()
    if has_libgomp != "True":
        pytest.skip("torch's OpenMP isn't GNU's here")
    assert float(asleep) < float(awake) / 2, done.stdout
    assert float(asleep) < float(again) / 2, done.stdout
    assert int(started) >= 2, done.stdout
    assert (left, equal) == ("0", "True"), done.stdout


@pytest.mark.parametrize(
    "environment", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "1000"}, {"OMP_NUM_THREADS": "1"}]
)
def test_how_threads_wait_is_the_users_to_say(environment: dict[str, str]) -> None:
    script = "from infinity.aio import start_early_sleep; print(start_early_sleep())"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
