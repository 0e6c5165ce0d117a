"""Trainings in processes of their own, for tests that kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Nursery:
    """Trainings as processes that can be killed, without a start of Python for each."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, *arguments: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(arguments) + "\n")
        self.process.stdin.flush()
        return int(self.until("child")[-1].split()[1])

    def until(self, *words: str) -> list[str]:
        """The lines up to the one that begins with one of `words`."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.strip())
            if line.split(" ", 1)[0].strip() in words:
                break
        return lines

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
