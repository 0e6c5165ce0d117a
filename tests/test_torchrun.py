"""The launchers for several ranks: what is left of a rank that dies."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = """
import os, signal

def where_it_was():
    os.kill(os.getpid(), signal.SIGSEGV)

if os.environ["RANK"] == "1":
    where_it_was()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "forked_ranks"])
def test_a_rank_that_crashes_says_where(launcher: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(SCRIPT)
    done = request.getfixturevalue(launcher)(script, ranks=2, check=False)
    assert done.returncode != 0
    assert "Segmentation fault" in done.stdout
    assert "where_it_was" in done.stdout
