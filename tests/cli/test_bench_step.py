"""What bench/step.py and bench/step_table.py make of their rounds: a step is held to what it had no part in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import launch
import pytest

from infinity.plan.machine import DriveSpeed

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))

from step_summary import forward_lower_bound, summarize  # noqa: E402
from step_table import COLUMNS, table_of  # noqa: E402

GB = 10**9
NUMEL = GB // 10


def measured(seconds: float, **others: Any) -> dict[str, Any]:
    """A step of which the passes, the optimizer and the process took so long."""
    parts = {"forward": seconds / 4, "backward": seconds / 2, "step": seconds / 4, "cpu_seconds": 2 * seconds}
    drive = {"drive": [3 * GB, 6 * GB, 4 * GB]}
    return {
        "seconds": seconds,
        **parts,
        **drive,
        "minor_faults": 5,
        "peak_rss_bytes": GB,
        "loss": 1.0,
        "numel": NUMEL,
        **others,
    }


def paged(seconds: float, *, read: int = 14 * NUMEL, moved: int = 14 * NUMEL) -> dict[str, Any]:
    """One from NVMe, in which nothing waited."""
    counters = {"read_bytes": moved, "written_bytes": 12 * NUMEL, "stall_seconds": 0.0, "pinned_bytes": GB}
    return measured(seconds, step_bytes=[read, 12 * NUMEL], phases=[], **counters)


def rows(plain: float | None, ours: list[float], **bytes_read: int) -> list[dict[str, Any]]:
    reference = {} if plain is None else {"torch": measured(plain)}
    return [{**reference, "memory": measured(50.0), "auto": paged(took, **bytes_read)} for took in ours]


@pytest.mark.parametrize(("plain", "bound", "over"), [(2.0, 2.0, 5.0), (0.1, 0.65, 10 / 0.65), (None, 0.65, 10 / 0.65)])
def test_a_step_that_never_waits_can_still_be_slow(plain: float | None, bound: float, over: float) -> None:
    """FSDP2 in memory, however slow, excuses nothing."""
    result = summarize(rows(plain, [9.0, 10.0, 11.0]), "auto")
    assert result is not None and result["stall_seconds"] == 0
    assert (result["drive_seconds"], result["lower_bound_seconds"]) == (0.65, bound)
    assert result["over_lower_bound"] == pytest.approx(over, rel=1e-4)
    assert (result["minor_faults"], result["cpu_seconds"]) == (5, 20.0)
    assert result.get("over_torch") == (None if plain is None else 10.0 / plain)


def test_bytes_that_were_moved_twice_or_spared_make_no_step_look_better() -> None:
    for moved, drive_seconds in ((40 * NUMEL, 0.65), (8 * NUMEL, 0.5)):
        result = summarize(rows(None, [10.0], moved=moved), "auto")
        assert result is not None and result["drive_seconds"] == drive_seconds


def test_updates_before_the_forward_hide_behind_it_alone() -> None:
    plain = {"forward": 0.5, "step": 0.5, "backward": 20.0}

    def bound(pool_bytes: float) -> float:
        step = {"step_bytes": [14.0, 12.0], "pinned_bytes": pool_bytes, "drive": [2.0, 4.0, 3.0]}
        return forward_lower_bound({"torch": plain, "auto": step}, "auto")

    assert bound(0.0) == 12 / 2 + 12 / 4 + 20
    assert bound(4.0) == 8 / 2 + 8 / 4 + 20
    assert bound(16.0) == 1 + 20
    assert bound(4.0) > 21 > DriveSpeed(2.0, 4.0).lower_bound_seconds(12, 12)


def test_a_way_that_ended_on_the_way_is_left_out_and_holds_nothing() -> None:
    some = rows(2.0, [10.0, 10.0])
    del some[1]["torch"]
    assert summarize(some, "torch") is None
    result = summarize(some, "auto")
    assert result is not None and "over_torch" not in result and result["lower_bound_seconds"] == 0.65


def test_a_row_of_the_table_has_a_cell_for_each_column_and_none_for_what_was_left_out() -> None:
    line = {"params": NUMEL, "batch_size": 2, "context": 128, "clipping": 0.0}
    full = {way: summarize(rows(2.0, [10.0]), way) for way in ("torch", "auto")}
    table = table_of(
        [{**line, "ways": full}, {**line, "clipping": 1.0, "ways": {**full, "torch": None, "deepspeed": None}}], "auto"
    )
    assert len(table) == 4 and all(row.count("|") == len(COLUMNS) + 1 for row in table)
    assert "| 2 × 128 | no |  | 2.00 s | 0.65 s | 10.00 s | 5.00 |  |  | 20.00 / 4.00 | 5 / 5 |" in table[2]
    assert "| 1 |  |  | 0.65 s | 10.00 s |" in table[3] and "| 20.00 / – |" in table[3]


@pytest.mark.slow
def test_the_table_is_measured_one_process_at_a_time_and_goes_on_where_it_was(nvme_path: Path, tmp_path: Path) -> None:
    lines, script = tmp_path / "lines.jsonl", tmp_path / "table.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\nimport step_table\n"
        "step_table.BYTES_PER_PARAMETER = 1 << 40\nsys.exit(step_table.main())\n"
    )
    sizes = ("--params", "1M", "--micro-batches", "1x16", "--rounds", "1", "--drive-file", "16MiB")
    asked = (*sizes, "--nvme-path", str(nvme_path), "--lines", str(lines), "--deepspeed-python", sys.executable)
    done = launch.program(script, *asked, "--clipping", "0")
    assert done.returncode == 0, done.stderr
    assert "one process at a time" in done.stderr
    line = json.loads(lines.read_text())
    assert line["alone"] and line["clipping"] == 0
    assert line["ways"]["deepspeed"] is None and "the worker for deepspeed ended" in done.stderr
    ours, plain = line["ways"]["auto"], line["ways"]["torch"]
    assert ours["lower_bound_seconds"] == pytest.approx(max(plain["seconds"], ours["drive_seconds"]), abs=1e-4)
    again = launch.program(script, *asked, "--clipping", "0")
    assert again.returncode == 0 and again.stdout == done.stdout and len(lines.read_text().splitlines()) == 1
