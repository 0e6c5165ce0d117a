"""Floor 6. A timeline: what did what from when to when, measured or simulated, as figures and as Chrome's trace events.

Pure: names and seconds in, figures and dicts out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infinity.units import format_bytes

LANES = ("step", "gather", "update", "gradients", "copy", "stall", "compute")
"""Of the training thread, in the order in which they are shown; those of the drives come before them."""

_WORKING = ("gather", "update", "gradients", "copy", "stall")
"""What the training thread does in them is not compute; they lie in one another."""


class Interval(NamedTuple):
    """`resource` does `what` from `start` to `end` (seconds since the step began)."""

    resource: str
    what: str
    start: float
    end: float


class Moved(NamedTuple):
    """What one drive moved of a transfer: `nbytes` of `what`, its first block submitted at `start`, its last done at `end`.

    `waited`: for how long it was queued before that (all in seconds, since the trace began).
    """

    drive: int
    writes: bool
    what: str
    start: float
    end: float
    nbytes: int
    waited: float = 0.0

    @property
    def lane(self) -> str:
        """Its row."""
        return drive_lane(self.drive, writes=self.writes)


Spans = list[tuple[float, float]]
"""Disjoint, ascending."""


@dataclass(frozen=True)
class DriveUse:
    """What one drive did in a trace (bytes), and in which part of its time it was reading, writing, or either (0 to 1)."""

    read_bytes: int
    written_bytes: int
    read_share: float
    write_share: float
    busy_share: float


@dataclass(frozen=True)
class TraceSummary:
    """A trace as numbers (seconds, of one rank).

    Attributes:
        seconds: from `start_trace` until, in `stop_trace`, everything under way had ended.
        steps: optimizer steps that ended in it.
        drives: what each drive did, in the order of the paths.
        stall_seconds: the training thread waited for a drive, as `swap_stats()` counts it.
        hidden_io_seconds: some drive was busy, and the training thread did something else than wait for one.
        exposed_io_seconds: some drive was busy, and the training thread waited for one.
        update_seconds, gather_seconds: it updated, gathered (without the waiting, copies and updates in it).
        compute_seconds: the rest of its time.
    """

    seconds: float
    steps: int
    drives: tuple[DriveUse, ...]
    stall_seconds: float
    hidden_io_seconds: float
    exposed_io_seconds: float
    update_seconds: float
    gather_seconds: float
    compute_seconds: float

    def in_words(self) -> dict[str, str]:
        """Rows of a table: what, and how much of it."""
        rows = {}
        for number, drive in enumerate(self.drives):
            rows["drive busy" if len(self.drives) == 1 else f"drive {number} busy"] = (
                f"{drive.busy_share:.0%} of {self.seconds:.3f} s (reading {drive.read_share:.0%}, writing "
                f"{drive.write_share:.0%}), {format_bytes(drive.read_bytes)} read, {format_bytes(drive.written_bytes)} written"
            )
        rows["I/O hidden, exposed"] = (
            f"{self.hidden_io_seconds:.3f} s behind work, {self.exposed_io_seconds:.3f} s waited for"
        )
        return rows


def drive_lane(drive: int, *, writes: bool) -> str:
    """The row of one drive and direction."""
    return f"drive {drive} {'write' if writes else 'read'}"


def summarize(
    intervals: Sequence[Interval], moved: Sequence[Moved], *, seconds: float, steps: int, drives: int
) -> TraceSummary:
    """The figures of a trace that lasted `seconds` over so many drives."""
    lanes = {lane: united((each.start, each.end) for each in intervals if each.resource == lane) for lane in LANES}
    waiting = lanes["stall"]
    busy = united((each.start, each.end) for each in moved)
    exposed = total(common(busy, waiting))
    aside = united([*waiting, *lanes["copy"]])
    return TraceSummary(
        seconds=seconds,
        steps=steps,
        drives=tuple(_use_of(drive, moved, seconds) for drive in range(drives)),
        stall_seconds=sum(each.end - each.start for each in intervals if each.resource == "stall"),
        hidden_io_seconds=total(busy) - exposed,
        exposed_io_seconds=exposed,
        update_seconds=total(without(lanes["update"], aside)),
        gather_seconds=total(without(lanes["gather"], united([*aside, *lanes["update"]]))),
        compute_seconds=sum(each.end - each.start for each in compute_between(intervals, seconds)),
    )


def compute_between(intervals: Sequence[Interval], seconds: float) -> list[Interval]:
    """What the training thread did beside everything that was noted of it, by the part of the step in which it did it."""
    working = united((each.start, each.end) for each in intervals if each.resource in _WORKING)
    phases = sorted((each for each in intervals if each.resource == "step"), key=lambda each: each.start)
    outside = without([(0.0, seconds)], united((each.start, each.end) for each in phases))
    parts = [*phases, *(Interval("step", "between" if phases else "compute", *span) for span in outside)]
    found = [
        Interval("compute", part.what, *span) for part in parts for span in without([(part.start, part.end)], working)
    ]
    return sorted(found, key=lambda each: each.start)


def one_after_another(moved: Iterable[Moved]) -> list[Moved]:
    """The transfers of one lane as if the drive had done one at a time, in the order in which they ended.

    A drive has many in flight at once. Each gets the time from the end of the one before it, or from when one of those left
    was submitted; so the lane is busy exactly when the drive was.
    """
    by_end = sorted(moved, key=lambda each: each.end)
    earliest, begun = float("inf"), []
    for each in reversed(by_end):
        earliest = min(earliest, each.start)
        begun.append(earliest)
    laid, free = [], 0.0
    for each, start in zip(by_end, reversed(begun), strict=True):
        laid.append(each._replace(start=min(max(start, free), each.end)))
        free = each.end
    return laid


def trace_events(timeline: Iterable[Interval], *, process: int = 0) -> list[dict[str, Any]]:
    """Events of Chrome's trace format (microseconds), a row per resource in the order in which they come."""
    return _events([(each.resource, each.what, each.start, each.end, {}) for each in timeline], process)


def measured_events(intervals: Sequence[Interval], moved: Sequence[Moved], *, process: int) -> list[dict[str, Any]]:
    """The same of a trace: the drives' rows, with the bytes of each transfer, above the training thread's."""
    rows: list[tuple[str, str, float, float, Mapping[str, Any]]] = []
    for lane in sorted({each.lane for each in moved}):
        for each in one_after_another(each for each in moved if each.lane == lane):
            rows.append((lane, each.what, each.start, each.end, {"bytes": each.nbytes, "queued_ms": 1e3 * each.waited}))
    for lane in LANES:
        rows += [(lane, each.what, each.start, each.end, {}) for each in intervals if each.resource == lane]
    events = _events(rows, process)
    for number in {each["tid"] for each in events}:  # else a viewer may sort the rows by name
        where = {"ph": "M", "pid": process, "tid": number}
        events.append({"name": "thread_sort_index", **where, "args": {"sort_index": number}})
    return [*events, {"name": "process_name", "ph": "M", "pid": process, "args": {"name": f"rank {process}"}}]


def united(spans: Iterable[tuple[float, float]]) -> Spans:
    """Their union."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def common(left: Spans, right: Spans) -> Spans:
    """What lies in both."""
    found: Spans = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(spans: Spans, taken: Spans) -> Spans:
    """What of `spans` lies outside `taken`."""
    edges = [float("-inf"), *(edge for span in taken for edge in span), float("inf")]
    return common(spans, list(zip(edges[::2], edges[1::2], strict=True)))


def total(spans: Spans) -> float:
    """Seconds in them."""
    return sum(end - start for start, end in spans)


def _use_of(drive: int, moved: Sequence[Moved], seconds: float) -> DriveUse:
    own = [each for each in moved if each.drive == drive]
    reads, writes = ([each for each in own if each.writes is way] for way in (False, True))

    def share(some: list[Moved]) -> float:
        return total(united((each.start, each.end) for each in some)) / seconds if seconds > 0 else 0.0

    return DriveUse(
        read_bytes=sum(each.nbytes for each in reads),
        written_bytes=sum(each.nbytes for each in writes),
        read_share=share(reads),
        write_share=share(writes),
        busy_share=share(own),
    )


def _events(rows: Sequence[tuple[str, str, float, float, Mapping[str, Any]]], process: int) -> list[dict[str, Any]]:
    numbers = {lane: number for number, lane in enumerate(dict.fromkeys(row[0] for row in rows))}
    events: list[dict[str, Any]] = []
    for lane, number in numbers.items():
        events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": lane}})
    for lane, what, start, end, details in rows:
        event = {"name": what, "cat": lane, "ph": "X", "pid": process, "tid": numbers[lane]}
        event |= {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
        events.append(event | ({"args": dict(details)} if details else {}))
    return events
