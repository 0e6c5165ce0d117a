"""infinity-ckpt in a process of its own: how much memory it takes beyond its imports, and what it says if it is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

_PROGRAM = """
import sys, threading, time
import infinity.checkpoint.consolidate, infinity.checkpoint.deepspeed_import, infinity.checkpoint.export, rich.progress
from infinity.cli.ckpt import main

def held():  # of its own: pages of the libraries come and go as the machine pleases
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon:"))

def watch():
    global peak
    while True:
        peak = max(peak, held())
        time.sleep(0.001)

before = peak = held()
threading.Thread(target=watch, daemon=True).start()
code = main(sys.argv[1:])
print(peak - before, file=sys.stderr)
sys.exit(code)
"""


def peak_of(*arguments: str) -> tuple[int, dict[str, Any]]:
    """(bytes by which memory grew at most, the report) of `infinity-ckpt *arguments --json`."""
    command = [sys.executable, "-c", _PROGRAM, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]), json.loads(done.stdout)


_SLOW_PROGRAM = """
import pkgutil, sys, time
place, _, name = sys.argv.pop(1).rpartition(".")
place = pkgutil.resolve_name(place)
call = getattr(place, name)

def slowly(*arguments):
    print("piece", flush=True)
    time.sleep(0.2)
    return call(*arguments)

setattr(place, name, slowly)
from infinity.cli.ckpt import main
sys.exit(main())
"""


def interrupted(by: signal.Signals, function: str, *arguments: str) -> str:
    """What `infinity-ckpt *arguments` prints to stderr when a signal comes in its first call of `function`, made per piece."""
    command = [sys.executable, "-c", _SLOW_PROGRAM, function, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "piece\n"
    time.sleep(0.1)
    process.send_signal(by)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + by
    return error
