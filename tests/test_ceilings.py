"""The size of the code and the way through it only fall: tools/size.py and tools/laps.py, against tools/ceilings.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = json.loads((ROOT / "tools" / "ceilings.json").read_text())
SLACK_LINES = 100
"""A ceiling that is so far above its total is to be lowered."""
DRIFT = 0.05
"""The drive's speed decides how often the stager looks for transfers that have ended."""


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


def _skip_outside_git() -> None:
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode != 0:
        pytest.skip("not a checkout: git doesn't say which files count")


def test_no_total_of_lines_is_above_its_ceiling_or_far_below() -> None:
    import size

    _skip_outside_git()
    for name, total in size.totals(size.lines_by_room()).items():
        ceiling = CEILINGS["lines"][name]
        assert total <= ceiling, f"{name} has {total} lines, {total - ceiling} above its ceiling: remove as many"
        assert ceiling - total <= SLACK_LINES, f"{name} has {total} lines: python tools/size.py --lower"


def test_no_room_has_more_dialect_words_than_its_ceiling() -> None:
    import size

    _skip_outside_git()
    for room, count in size.dialect_by_room().items():
        ceiling = CEILINGS["dialect"].get(room, 0)
        assert count <= ceiling, f"{room} has {count} of {size.DIALECT.pattern}; its ceiling is {ceiling}"


@pytest.mark.usefixtures("one_rank")
def test_no_step_walks_farther_than_its_ceiling(nvme_path: Path) -> None:
    import laps

    for name, value in laps.count(laps.calls_of_a_step(nvme_path)).items():
        ceiling = CEILINGS["step"][name]
        assert value <= ceiling * (1 + DRIFT), f"a step makes {value} {name}; the ceiling is {ceiling}: tools/laps.py"
    assert sys.getprofile() is None
