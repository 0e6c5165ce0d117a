"""A timeline: intervals of work by resource, measured or simulated, as figures and as Chrome trace events.

Pure: names and seconds in, figures and dicts out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from infinity.units import format_bytes

LANES = ("step", "gather", "update", "gradients", "copy", "stall", "compute")
"""Lanes of the training thread, in display order; those of the drives come first."""

_WORKING = ("gather", "update", "gradients", "copy", "stall")
"""Lanes in which the training thread doesn't compute; they may be nested."""


class Interval(NamedTuple):
    """`resource` works on `name` from `start` to `end` (seconds since the step began)."""

    resource: str
    name: str
    start: float
    end: float


class Moved(NamedTuple):
    """The part of a transfer that one drive moved: `nbytes` of `name`, from the submission of its first block at
    `start` to the end of its last at `end` (seconds since the trace began). `waited`: seconds in the queue before."""

    drive: int
    writes: bool
    name: str
    start: float
    end: float
    nbytes: int
    waited: float = 0.0

    @property
    def lane(self) -> str:
        """The name of its row."""
        return f"drive {self.drive} {'write' if self.writes else 'read'}"


Spans = list[tuple[float, float]]
"""Disjoint, ascending."""


@dataclass(frozen=True)
class DriveUse:
    """The bytes that one drive moved in a trace, and the shares of time (0 to 1) in which it read, wrote, or did
    either."""

    read_bytes: int
    written_bytes: int
    read_share: float
    write_share: float
    busy_share: float


@dataclass(frozen=True)
class TraceSummary:
    """A trace as numbers (seconds, of one rank).

    Attributes:
        seconds: from `start_trace` until all transfers had ended, in `stop_trace`.
        steps: number of optimizer steps that ended.
        drives: the use of each drive, in the order of the paths.
        stall_seconds: the training thread waited for a drive, as in `swap_stats()`.
        hidden_io_seconds: a drive was busy, and the training thread did not wait for one.
        exposed_io_seconds: a drive was busy, and the training thread waited for one.
        update_seconds, gather_seconds: updating, gathering (without the stalls, copies and updates inside).
        compute_seconds: all other time.
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
        """Return the rows of a table: names of quantities and their values."""
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


def summarize(
    intervals: Sequence[Interval], moved: Sequence[Moved], *, seconds: float, steps: int, drives: int
) -> TraceSummary:
    """Return the figures of a trace of `seconds` over so many drives."""
    lanes = {lane: united(_spans_of(some for some in intervals if some.resource == lane)) for lane in LANES}
    waiting = lanes["stall"]
    busy = united(_spans_of(moved))
    exposed = total(common(busy, waiting))
    waiting_or_copying = united([*waiting, *lanes["copy"]])
    return TraceSummary(
        seconds=seconds,
        steps=steps,
        drives=tuple(_use_of(drive, moved, seconds) for drive in range(drives)),
        stall_seconds=sum(some.end - some.start for some in intervals if some.resource == "stall"),
        hidden_io_seconds=total(busy) - exposed,
        exposed_io_seconds=exposed,
        update_seconds=total(without(lanes["update"], waiting_or_copying)),
        gather_seconds=total(without(lanes["gather"], united([*waiting_or_copying, *lanes["update"]]))),
        compute_seconds=sum(part.end - part.start for part in compute_between(intervals, seconds)),
    )


def compute_between(intervals: Sequence[Interval], seconds: float) -> list[Interval]:
    """Return the training thread's time outside all recorded work, as intervals named by the part of the step."""
    working = united(_spans_of(some for some in intervals if some.resource in _WORKING))
    phases = sorted((some for some in intervals if some.resource == "step"), key=attrgetter("start"))
    between = without([(0.0, seconds)], united(_spans_of(phases)))
    parts = [*phases, *(Interval("step", "between" if phases else "compute", *span) for span in between)]
    computing = [
        Interval("compute", part.name, *span) for part in parts for span in without([(part.start, part.end)], working)
    ]
    return sorted(computing, key=attrgetter("start"))


def one_after_another(moved: Iterable[Moved]) -> list[Moved]:
    """Return the transfers of one lane as if the drive had done one at a time, in the order in which they ended.

    A drive has many in flight at once. Each gets the time from the end of the previous one, or from the submission of
    the first of the remaining ones; so the lane is busy exactly when the drive was.
    """
    by_end = sorted(moved, key=lambda transfer: transfer.end)
    earliest, begun = float("inf"), []
    for transfer in reversed(by_end):
        earliest = min(earliest, transfer.start)
        begun.append(earliest)
    in_turn, free = [], 0.0
    for transfer, start in zip(by_end, reversed(begun), strict=True):
        in_turn.append(transfer._replace(start=min(max(start, free), transfer.end)))
        free = transfer.end
    return in_turn


def trace_events(timeline: Iterable[Interval]) -> list[dict[str, Any]]:
    """Return events of Chrome's trace format (microseconds), with one row per resource in order of appearance."""
    return _events([(*interval, {}) for interval in timeline], process=0)


def measured_events(intervals: Sequence[Interval], moved: Sequence[Moved], *, process: int) -> list[dict[str, Any]]:
    """Return the events of a measured trace: the drives' rows, with bytes, above those of the training thread."""
    rows: list[tuple[str, str, float, float, Mapping[str, Any]]] = []
    for lane in sorted({transfer.lane for transfer in moved}):
        for one in one_after_another(transfer for transfer in moved if transfer.lane == lane):
            rows.append((lane, one.name, one.start, one.end, {"bytes": one.nbytes, "queued_ms": 1e3 * one.waited}))
    for lane in LANES:
        rows += [(*interval, {}) for interval in intervals if interval.resource == lane]
    events = _events(rows, process)
    for number in {event["tid"] for event in events}:  # otherwise a viewer may sort the rows by name
        where = {"ph": "M", "pid": process, "tid": number}
        events.append({"name": "thread_sort_index", **where, "args": {"sort_index": number}})
    return [*events, {"name": "process_name", "ph": "M", "pid": process, "args": {"name": f"rank {process}"}}]


def united(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the union of spans."""
    union: Spans = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def common(left: Spans, right: Spans) -> Spans:
    """Return the parts in both."""
    spans: Spans = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            spans.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return spans


def without(spans: Spans, taken: Spans) -> Spans:
    """`spans` without the parts that `taken` covers."""
    edges = [float("-inf"), *(edge for span in taken for edge in span), float("inf")]
    return common(spans, list(zip(edges[::2], edges[1::2], strict=True)))


def total(spans: Spans) -> float:
    """Return the seconds in spans."""
    return sum(end - start for start, end in spans)


def _spans_of(some: Iterable[Interval | Moved]) -> Iterable[tuple[float, float]]:
    return ((one.start, one.end) for one in some)


def _use_of(drive: int, moved: Sequence[Moved], seconds: float) -> DriveUse:
    reads = [transfer for transfer in moved if transfer.drive == drive and not transfer.writes]
    writes = [transfer for transfer in moved if transfer.drive == drive and transfer.writes]

    def share(some: list[Moved]) -> float:
        return total(united(_spans_of(some))) / seconds if seconds > 0 else 0.0

    return DriveUse(
        read_bytes=sum(transfer.nbytes for transfer in reads),
        written_bytes=sum(transfer.nbytes for transfer in writes),
        read_share=share(reads),
        write_share=share(writes),
        busy_share=share(reads + writes),
    )


def _events(rows: Sequence[tuple[str, str, float, float, Mapping[str, Any]]], process: int) -> list[dict[str, Any]]:
    numbers = {lane: number for number, lane in enumerate(dict.fromkeys(row[0] for row in rows))}
    events: list[dict[str, Any]] = []
    for lane, number in numbers.items():
        events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": lane}})
    for lane, name, start, end, details in rows:
        event = {"name": name, "cat": lane, "ph": "X", "pid": process, "tid": numbers[lane]}
        event |= {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
        events.append(event | ({"args": dict(details)} if details else {}))
    return events
