"""What the campaigns share: plans drawn from seeds, an alarm for what hangs, and the count of what happened.

`INFINITY_FAULT_SEEDS` is how many seeds each campaign runs (a few by default, thousands in `make torture`), and
`INFINITY_FAULT_FIRST_SEED` the first of them: a failure names its seed, and that one alone is run again with both.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
from worse_drives import FaultPlan, worse_drives

from infinity.aio import IoEngine

HANG_SECONDS = 120
SILENCE_SECONDS_MAX = 3.0
"""Of a drive that stops answering, in a campaign. Where a ring thread gets no turn for so long, a healthy one is given up, and
its files stay open."""
ROUNDS_TO_WARM_UP = 5
GROWTH_BYTES_MAX = 256 << 20
"""Less than what some rounds would leave behind if each left its pool."""
KEPT_BYTES_MAX = 32 << 20
"""A round whose drive stopped answering keeps its pool and its files for good."""


def seeds(default: int, share: float = 1.0) -> range:
    """The seeds of a campaign, which runs `share` of those asked for."""
    first = int(os.environ.get("INFINITY_FAULT_FIRST_SEED", "0"))
    asked = os.environ.get("INFINITY_FAULT_SEEDS")
    return range(first, first + (default if asked is None else math.ceil(int(asked) * share)))


def plan_for(seed: int, *, blocks: int) -> FaultPlan:
    """A plan of its own for every seed: gentle ones and hopeless ones, that begin in the first `blocks` submissions."""
    draw = random.Random(seed)
    kinds = ("interrupted", "again", "io", "space", "memory", "short", "corrupt", "lost", "late", "overtaken", "stuck")
    rates = dict.fromkeys(kinds, 0.0)
    for kind in draw.sample(kinds[:-1], k=draw.randint(1, 4)):
        rates[kind] = 10.0 ** draw.uniform(-3, -0.7)
    if seed % 50 == 7:
        rates["stuck"] = 0.01
    return FaultPlan(seed=seed, after_blocks=draw.randrange(blocks), delay_seconds_max=0.002, **rates)


@contextlib.contextmanager
def engines_fail(plan: FaultPlan) -> Iterator[Callable[[], dict[str, int]]]:
    """In the block, a swap manager's engine fails by `plan`. Yields a function that counts its faults by name."""
    with pytest.MonkeyPatch.context() as patch, worse_drives(faults=plan) as fault_counts:
        patch.setattr("infinity.swap.machinery.IoEngine", partial(IoEngine, silence_seconds_max=SILENCE_SECONDS_MAX))
        yield fault_counts


class Hang(BaseException):
    """Something waits for what will never come. No `except Exception` may swallow it."""


@contextlib.contextmanager
def alarm(seconds: int = HANG_SECONDS) -> Iterator[None]:
    """Raises `Hang` in the block when it takes longer than that."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Report:
    """What happened to each seed, and the faults behind it."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def tell(self) -> None:
        """On the terminal (pytest -s), and as a line of JSON to the file INFINITY_FAULT_REPORT names."""
        line = {"campaign": self.name, "outcomes": dict(self.outcomes), "faults": dict(self.faults)}
        print("\n" + json.dumps(line))
        if path := os.environ.get("INFINITY_FAULT_REPORT"):
            with Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")


def run(report: Report, which: range, one: Callable[[int], str]) -> None:
    """`one` for every seed; it returns the outcome in a word. Nothing may hang, keep a file open, or keep memory."""
    warm_bytes = kept_bytes = 0
    for round_number, seed in enumerate(which):
        files, stuck = _open_files(), report.faults["stuck"]
        try:
            with alarm():
                report.outcomes[one(seed)] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed} (INFINITY_FAULT_FIRST_SEED={seed} INFINITY_FAULT_SEEDS=1)") from error
        if report.faults["stuck"] > stuck:
            kept_bytes += KEPT_BYTES_MAX
        elif _open_files() - files:
            gc.collect()
            assert not (left := _open_files() - files), f"seed {seed} left files open: {left}"
        if round_number == ROUNDS_TO_WARM_UP:
            warm_bytes = _resident_bytes() - kept_bytes
    gc.collect()
    if len(which) > ROUNDS_TO_WARM_UP:
        growth = _resident_bytes() - kept_bytes - warm_bytes
        assert growth < GROWTH_BYTES_MAX, f"memory grows from seed to seed: {growth >> 20} MiB more after {len(which)}"
    report.tell()


def _open_files() -> Counter[str]:
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found[str(descriptor.readlink())] += 1
    return Counter({name: count for name, count in found.items() if "/proc/" not in name})


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
