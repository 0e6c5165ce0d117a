"""An exception at any line, caught by who trains: afterwards the numbers are right, or a refusal says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign import Report, run, seeds
from interrupts import trial


@pytest.mark.timeout(0)  # each seed has its own alarm
@pytest.mark.usefixtures("one_rank")
def test_an_exception_at_any_line_changes_no_number(nvme_path: Path) -> None:
    report = Report("interrupts")
    run(report, seeds(40), lambda seed: trial(seed, nvme_path))
