"""OpenMP's idle threads sleep at once while an `EarlySleep` lives, and spin before and after: [Note: Early sleep]."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from infinity.aio import early_sleep, start_early_sleep

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


def test_how_threads_wait_is_the_users_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(early_sleep, "EarlySleep", lambda threads: started.append(threads) or "sleep")
    monkeypatch.setattr(early_sleep, "_CPUS", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert start_early_sleep() == "sleep"
    assert started == [8]
    with monkeypatch.context() as said:
        said.setenv("OMP_WAIT_POLICY", "active")
        assert start_early_sleep() is None
    with monkeypatch.context() as said:
        said.setenv("GOMP_SPINCOUNT", "1000")
        assert start_early_sleep() is None
    with monkeypatch.context() as many:
        many.setattr(early_sleep, "_CPUS", 17)
        assert start_early_sleep() is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert start_early_sleep() is None
    assert started == [8]


WITHOUT_THREADS = """
import resource, time
import torch
from infinity.aio import EarlySleep

torch.ones(1 << 20).add_(1)
virtual = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (virtual + (120 << 20),) * 2)  # a few stacks
sleep = EarlySleep(60)
time.sleep(0.5)
sleep.end()
print("goes on")
"""


def test_a_system_that_has_no_threads_to_give_ends_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
