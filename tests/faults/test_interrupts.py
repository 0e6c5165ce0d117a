"""An exception at any line, caught by who trains: afterwards the numbers are right, or a refusal says what to do."""

from __future__ import annotations

from pathlib import Path

import interrupted_loop
import pytest
from campaign import HANG_SECONDS, Report, run, seeds
from conftest import Ranks
from interrupts import trial

RANKS = Path(__file__).resolve().parents[1] / "helpers" / "interrupt_ranks.py"
SEEDS_AT_ONCE = 20


@pytest.mark.timeout(0)  # each seed has its own alarm
@pytest.mark.usefixtures("one_rank")
def test_an_exception_at_any_line_changes_no_number(nvme_path: Path) -> None:
    report = Report("interrupts")
    run(report, seeds(10), lambda seed: trial(seed, nvme_path))


@pytest.mark.timeout(0)
def test_two_ranks_agree_after_an_exception_on_one_or_both(nvme_path: Path, forked_ranks: Ranks) -> None:
    report, which = Report("interrupts of two ranks"), seeds(2, share=0.1)
    for first in range(which.start, which.stop, SEEDS_AT_ONCE):
        count = min(SEEDS_AT_ONCE, which.stop - first)
        ran = forked_ranks(RANKS, str(nvme_path), str(first), str(count), timeout_seconds=count * HANG_SECONDS)
        outcomes = [line.removeprefix("outcome ") for line in ran.stdout.splitlines() if line.startswith("outcome ")]
        assert len(outcomes) == count, ran.stdout
        report.outcomes.update(outcomes)
    report.tell()


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("one_rank")
def test_an_exception_in_a_loop_of_ones_own_changes_no_number(nvme_path: Path) -> None:
    report = Report("interrupts without the engine")
    run(report, seeds(6), lambda seed: interrupted_loop.trial(seed, nvme_path))


@pytest.mark.usefixtures("one_rank")
def test_updates_that_come_after_a_backward_are_made_or_missed_aloud(nvme_path: Path) -> None:
    """Those of a device wait for their gradients to come: the last ones until FSDP2 takes the backward for done."""
    counter = interrupted_loop.Tail()
    kind = {"update": "backward"}
    interrupted_loop.check(interrupted_loop.train(nvme_path, kind, counter, discrete=True))
    assert counter.seen > 100
    beyond = 2 * counter.seen  # how many lines there are depends on how long transfers take
    for at in (*range(0, 30, 2), beyond):
        lines = interrupted_loop.Tail(at)
        outcome = interrupted_loop.check(interrupted_loop.train(nvme_path, kind, lines, discrete=True))
        assert outcome == ("went on" if at == beyond else "refused"), (at, lines.where)
