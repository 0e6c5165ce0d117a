"""Drives that are slow or fail, for tests: what a test build adds to `infinity._aio` (tests/csrc/faulty)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from infinity import _aio

IS_TEST_BUILD = hasattr(_aio, "make_worse")
REASON = "this is no test build of infinity: make setup-test"
needs_test_build = pytest.mark.skipif(not IS_TEST_BUILD, reason=REASON)


@dataclass(frozen=True)
class DriveLimit:
    """Makes a drive slower, for experiments; 0 means no limit.

    bytes_per_s: upper bound. latency_seconds: lower bound, of each block. path: a folder; the limit concerns only the files in
    it. None concerns every file.
    """

    bytes_per_s: float = 0.0
    latency_seconds: float = 0.0
    path: Path | None = None


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Makes the drives of an engine fail at random, as bad drives, cables or kernels do.

    Each field but the last three is the probability (0 to 1) of a fault per submission; of those before `late`, at most one
    happens. The same seed and submissions give the same faults, in any order of the drive's answers.

    Attributes:
        interrupted, again, memory: EINTR, EAGAIN, ENOMEM; nothing was moved. The engine tries again, for about a second.
        io, space: EIO, ENOSPC (EIO for a read); sometimes after a part was moved. The transfer fails.
        short: a part was moved. The engine continues with the remaining part.
        corrupt: one bit of the moved bytes is wrong, without an error.
        lost: a write that reports success and moved nothing. A read fails with EIO.
        stuck: no answer; see `silence_seconds_max` of `IoEngine`.
        late: the answer is delayed by up to `delay_seconds_max`.
        overtaken: later submissions are answered first.
        seed: of the random draws.
        delay_seconds_max: upper bound for `late`.
        after_blocks: number of submissions of each ring that succeed first.
    """

    interrupted: float = 0.0
    again: float = 0.0
    io: float = 0.0
    space: float = 0.0
    memory: float = 0.0
    short: float = 0.0
    corrupt: float = 0.0
    lost: float = 0.0
    stuck: float = 0.0
    late: float = 0.0
    overtaken: float = 0.0
    seed: int = 0
    delay_seconds_max: float = 0.002
    after_blocks: int = 0


@contextlib.contextmanager
def worse_drives(
    limits: Sequence[DriveLimit] = (), faults: FaultPlan | None = None
) -> Iterator[Callable[[], dict[str, int]]]:
    """Make drives worse for every engine that this process makes in the block. Skips the test without a test build.

    Yields a function that returns the number of faults of these engines so far, by name. If several limits concern a file, the
    first one counts. Blocks must not nest. Raises ValueError for a plan that can't be.
    """
    if not IS_TEST_BUILD:
        pytest.skip(REASON)
    _aio.make_worse(
        [
            (limit.bytes_per_s, limit.latency_seconds, str(limit.path.absolute()) if limit.path else "")
            for limit in limits
        ],
        asdict(faults or FaultPlan()),
    )
    try:
        yield _aio.fault_counts
    finally:
        _aio.end_worse()
