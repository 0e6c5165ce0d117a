"""The recorder of a trace: the events of the training thread and of the drives.

Exists from `SwapManager.start_trace` to `stop_trace`, held by the stager; otherwise nothing is recorded. Training
thread only. All times are of CLOCK_MONOTONIC, the clock of `time.perf_counter` and of the ring threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy.typing as npt
from torch.profiler import record_function

from infinity.aio import IoEngine
from infinity.schedule.timeline import Interval, Moved, TraceSummary, compute_between, measured_events, summarize

_TIMINGS_MAX = 32768
"""Half of the engine's limit: after so many transfers its timings are collected."""

_PREFIXES = {"gather": "gather ", "update": "update ", "copy": "copy ", "stall": "wait for "}
_NOTHING = contextlib.nullcontext()


class Timeline:
    """Records events from now on. First waits until the drives are idle, so that a trace has whole transfers only."""

    def __init__(self, engine: IoEngine) -> None:
        self._engine = engine
        self._drives = len(engine.drives)
        engine.drain()
        engine.take_timings()
        self._intervals: list[Interval] = []
        self._started: list[tuple[float, str]] = []
        """Start time of transfers, and what they move."""
        self._timings: list[npt.NDArray[Any]] = []
        self._untaken = 0
        self.steps = 0
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def span(self, lane: str, subject: str) -> Iterator[None]:
        """Record the block in `lane` (of infinity.schedule.timeline.LANES) and in torch's profiler."""
        name = _PREFIXES.get(lane, "") + subject
        with record_function(name):
            began = time.perf_counter()
            try:
                yield
            finally:
                self._note(lane, name, began, time.perf_counter())

    @contextlib.contextmanager
    def stall(self, subject: str) -> Iterator[None]:
        """Record the block as a stall, as long as the engine measured."""
        name = _PREFIXES["stall"] + subject
        with record_function(name):
            began, before = time.perf_counter(), self._engine.stall_seconds
            try:
                yield
            finally:
                self._note("stall", name, began, began + self._engine.stall_seconds - before)

    def starting(self, subject: str, transfers: int) -> None:
        """Record that so many transfers of `subject` are about to start."""
        if self._untaken > _TIMINGS_MAX:
            self._take()
        self._untaken += transfers * self._drives
        self._started.append((time.perf_counter(), subject))

    def stop(self, path: str | os.PathLike[str] | None, *, rank: int) -> TraceSummary:
        """Wait until the drives are idle, write the trace to `path` if given, and return its figures."""
        with self.stall("all transfers, at the end of the trace"):
            self._engine.drain()
        seconds = time.perf_counter() - self._began
        self._take()
        intervals = [
            interval._replace(start=interval.start - self._began, end=interval.end - self._began)
            for interval in self._intervals
        ]
        moved = self._moved()
        summary = summarize(intervals, moved, seconds=seconds, steps=self.steps, drives=self._drives)
        if path is not None:
            events = measured_events([*intervals, *compute_between(intervals, seconds)], moved, process=rank)
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
        return summary

    def _note(self, lane: str, name: str, began: float, ended: float) -> None:
        self._intervals.append(Interval(lane, name, began, ended))

    def _take(self) -> None:
        self._timings.append(self._engine.take_timings())
        self._untaken = 0

    def _moved(self) -> list[Moved]:
        """Return the transfers with names: each belongs to the last subject started before it was queued."""
        times = [began for began, _ in self._started]
        moved = []
        for row in (row for timings in self._timings for row in timings if row["drive"] >= 0 and not row["failed"]):
            place = bisect_right(times, row["queued"]) - 1
            moved.append(
                Moved(
                    drive=int(row["drive"]),
                    writes=bool(row["operation"]),
                    name=self._started[place][1] if place >= 0 else "something else",
                    start=float(row["submitted"]) - self._began,
                    end=float(row["done"]) - self._began,
                    nbytes=int(row["bytes"]),
                    waited=float(row["submitted"] - row["queued"]),
                )
            )
        return moved


def measured(timeline: Timeline | None, lane: str, subject: str) -> AbstractContextManager[None]:
    """Record a block in a lane of `timeline`, if there is one."""
    return _NOTHING if timeline is None else timeline.span(lane, subject)
