"""How much memory a command of infinity-ckpt takes, in a process of its own: beyond what its imports have taken."""

from __future__ import annotations

import json
import subprocess
import sys
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
