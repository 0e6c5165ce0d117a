"""How our programs end if their output has no reader, or can't be written."""

from __future__ import annotations

import os
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


def test_what_the_terminals_encoding_lacks_is_printed_in_another_way() -> None:
    code = (
        "import argparse; from infinity.cli.program import run_program; parser = argparse.ArgumentParser()\n"
        "parser.set_defaults(func=lambda options: print('a\\u2026b'))\nrun_program(parser, [])"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a\\u2026b\n"
