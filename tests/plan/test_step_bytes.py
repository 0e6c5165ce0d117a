"""What the lower bound promises: the sums of the design, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.estimate import Part, step_bytes
from infinity.plan.machine import DriveSpeed
from infinity.schedule.scheme import Scheme

B = 10**9


PLAIN = Scheme("full", "step")
"""The scheme of the published example: copies in addition to masters, and a separate update phase."""


@given(numel=st.integers(0, 10**12))
def test_fewest_bytes_are_fourteen_read_and_twelve_written_per_parameter(numel: int) -> None:
    assert step_bytes(Part(numel), Scheme()) == (14 * numel, 12 * numel)
    assert step_bytes(Part(numel), PLAIN) == (16 * numel, 14 * numel)


def test_seventy_billion_parameters() -> None:
    """Plain, 1120 GB and 980 GB per step; on drives of 48/26 GB/s that read and write in turns, 61 s."""
    read, written = step_bytes(Part(70 * B), PLAIN)
    assert (read, written) == (1120 * B, 980 * B)
    assert DriveSpeed(48 * B, 26 * B).lower_bound_seconds(read, written) == pytest.approx(61.0, abs=0.05)
    assert DriveSpeed(48 * B, 26 * B, mixed=(48 * B, 26 * B)).lower_bound_seconds(read, written) == pytest.approx(
        37.7, abs=0.05
    )


@pytest.mark.parametrize(
    ("part", "read", "written"),
    [
        ({"gathers": 8}, 4 * 4 + 12, 14),
        ({"gathers": 3}, 6 + 12, 14),
        ({"gathers": 1}, 2 + 12, 14),
        ({"compute_on_nvme": False}, 12, 12),
    ],
)
def test_what_a_step_leaves_out_is_not_counted(part: dict[str, int], read: int, written: int) -> None:
    assert step_bytes(Part(1000, **part), PLAIN) == (1000 * read, 1000 * written)


def test_a_drive_that_is_slower_at_both_than_in_turns_takes_turns() -> None:
    drive = DriveSpeed(10.0, 10.0, mixed=(4.0, 4.0))
    assert drive.lower_bound_seconds(100, 100) == pytest.approx(20)


def test_a_drive_that_gains_by_doing_both_does_the_rest_alone() -> None:
    drive = DriveSpeed(10.0, 10.0, mixed=(8.0, 8.0))
    assert drive.lower_bound_seconds(80, 160) == pytest.approx(10 + 8)
    assert drive.lower_bound_seconds(0, 160) == pytest.approx(16)
