"""How both programs end where nobody reads what they print."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("stdout", [">&-", "> /dev/full", ""])
def test_an_error_is_one_line_wherever_stdout_goes(stdout: str) -> None:
    command = f"{sys.executable} -m infinity.cli.ckpt info /nothing {stdout}"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("infinity-ckpt: /nothing is not a folder")
