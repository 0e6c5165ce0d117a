"""What runs in a forked process runs as if started: its place, its end, its crash; several ranks end together."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import launch
import pytest


@pytest.fixture
def written(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> Path:
        (tmp_path / "script.py").write_text(text)
        (tmp_path / "sibling.py").write_text("VALUE = 'imported'")
        return tmp_path / "script.py"

    return write


def test_a_program_finds_what_python_would_give_it(written, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    script = written(
        "import atexit, sibling, os, sys\n"
        "atexit.register(print, 'at the end')\n"
        "print(__name__, sys.argv, os.getcwd(), os.environ['GIVEN'], sibling.VALUE, sys.stdin.read())\n"
        "sys.exit('in words')\n"
    )
    done = launch.program(script, "--one", cwd=tmp_path, environment={**os.environ, "GIVEN": "5"})
    assert (done.returncode, done.stderr) == (1, "in words\n")
    assert done.stdout == f"__main__ {[str(script), '--one']} {tmp_path} 5 imported \nat the end\n"


def test_one_program_knows_nothing_of_another(written) -> None:  # type: ignore[no-untyped-def]
    launch.program(written("import os, torch\nos.environ['LEFT'] = '1'\ntorch.left = 1\n"))
    done = launch.program(written("import os, torch\nprint('LEFT' in os.environ, hasattr(torch, 'left'))\n"))
    assert done.stdout == "False False\n"


def test_a_module_is_run_as_with_m_and_a_text_as_with_c(tmp_path: Path) -> None:
    done = launch.code("import os, sys\nprint(__name__, sys.argv, os.getcwd())", "one", cwd=tmp_path)
    assert done.stdout == f"__main__ ['-c', 'one'] {tmp_path}\n"
    done = launch.program("infinity.cli.bench", "--help")
    assert done.returncode == 0
    assert "sweep" in done.stdout


def test_a_traceback_and_a_signal_are_told(written) -> None:  # type: ignore[no-untyped-def]
    done = launch.program(written("print(1 / 0)\n"))
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    done = launch.program(written("import os\ndef here():\n    os.abort()\nhere()\n"))
    assert done.returncode == -6
    assert "in here" in done.stderr


def test_a_program_without_end_is_ended_and_the_next_runs(written) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(subprocess.TimeoutExpired):
        launch.program(written("import time\ntime.sleep(600)\n"), timeout_seconds=0.5)
    assert launch.program(written("print(3)\n")).stdout == "3\n"


RANKS = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {total.item()}", flush=True)
if sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
    sys.exit(7)
time.sleep(600 if sys.argv[1:] else 0)
dist.destroy_process_group()
"""


def test_ranks_find_each_other(written) -> None:  # type: ignore[no-untyped-def]
    status, output = launch.ranks(written(RANKS), count=3)
    assert status == 0
    assert sorted(output.splitlines()) == [f"rank {rank} of 3: 6.0" for rank in range(3)]


def test_a_rank_that_fails_ends_the_others(written) -> None:  # type: ignore[no-untyped-def]
    status, output = launch.ranks(written(RANKS), "fail", count=2, timeout_seconds=60)
    assert status == 1
    assert output.count(" of 2: 3.0") == 2


def test_ranks_without_end_are_ended(written) -> None:  # type: ignore[no-untyped-def]
    for seconds in (5, 60):  # on a busy machine they may not be that far in five
        status, output = launch.ranks(written(RANKS), "wait", count=2, timeout_seconds=seconds)
        assert status is None
        if output.count(" of 2: 3.0") == 2:
            return
    pytest.fail(output)
