"""The program infinity-bench as a shell sees it: quick help, exit codes, and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest


def infinity_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infinity.cli.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [("--help",), ("doctor", "--help")])
def test_help_is_printed(arguments: tuple[str, ...]) -> None:
    done = infinity_bench(*arguments)
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert done.stderr == ""


def test_help_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "matplotlib", "pydantic", "rich"]
    code = (
        "import sys; from infinity.cli.bench import main\n"
        "try: main(['--help'])\n"
        f"finally: sys.stderr.write(','.join(m for m in {heavy} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "doctor" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [(), ("no-such-command",), ("doctor", "--no-such-option"), ("doctor", "a", "b")])
def test_wrong_usage_is_two_and_says_what_is_right(arguments: tuple[str, ...]) -> None:
    done = infinity_bench(*arguments)
    assert done.returncode == 2
    assert "usage: infinity-bench" in done.stderr
    assert done.stdout == ""
