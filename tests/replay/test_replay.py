"""What the swap core moves in a step, event by event, is what it moved before.

A change that only rearranges replays every record. A change of policy renews them on purpose: `make replay-records` writes
them again, and the commit shows which transfers came, went or moved.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import models
import pytest
from conftest import Ranks

RECORDS = Path(__file__).parent / "records"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [name for name, case in models.CASES.items() if case.ranks == 1])
def test_one_rank_replays_its_record(name: str, nvme_path: Path) -> None:
    _compare(name, "\n".join(models.record(name, nvme_path)) + "\n")


def test_two_ranks_replay_their_records(forked_ranks: Ranks, nvme_path: Path, tmp_path: Path) -> None:
    forked_ranks(Path(models.__file__), "two_ranks", str(nvme_path), str(tmp_path / "record"))
    for rank in range(2):
        _compare(f"two_ranks.{rank}", (tmp_path / f"record.{rank}").read_text())


def _compare(name: str, record: str) -> None:
    path = RECORDS / f"{name}.txt"
    if os.environ.get("INFINITY_RENEW_REPLAYS"):
        path.write_text(record)
    committed = path.read_text()
    if record != committed:
        lines = difflib.unified_diff(committed.splitlines(), record.splitlines(), "committed", "this run", lineterm="")
        pytest.fail(
            "\n".join([f"{path.name}: another sequence (make replay-records renews it)", *lines]), pytrace=False
        )
