"""How much of a model stays staged from step to step, whatever its pool has room for: that of a small one has room for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from zlib import crc32

import pytest

from infinity.schedule.residency import choose_staying
from infinity.swap import plan

SHARES = (0.0, 0.5, 1.0)


def share_of(case: object) -> float:
    """One of them for each case of many, always the same."""
    return SHARES[crc32(repr(case).encode()) % len(SHARES)]


@contextlib.contextmanager
def staying(share: float) -> Iterator[None]:
    """In this block models are paged so that groups of at most this share of all compute parameters stay."""

    def choose_fewer(unit_bytes: Sequence[int], spared_reads: Sequence[int], bytes_max: int) -> list[int]:
        return choose_staying(unit_bytes, spared_reads, min(bytes_max, int(share * sum(unit_bytes))))

    with pytest.MonkeyPatch.context() as patch:  # no fixture: also in processes that tests start
        patch.setattr(plan, "choose_staying", choose_fewer)
        yield
