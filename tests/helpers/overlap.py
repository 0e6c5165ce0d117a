"""The share of copying that overlaps with computing, from intervals of any unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Intervals = list[tuple[float, float]]


def on_the_gpu(events: Iterable[Any]) -> tuple[Intervals, Intervals, Intervals]:
    """Of torch's profiler: kernels, copies to the device, and copies from it (microseconds). What FSDP2 writes into the
    timeline of the GPU by name is none of them."""
    kernels: Intervals = []
    h2d: Intervals = []
    d2h: Intervals = []
    for event in events:
        if event.device_type.name != "CUDA" or event.is_user_annotation or event.name.startswith("FSDP::"):
            continue
        span = event.time_range.start, event.time_range.end
        if "HtoD" in event.name:
            h2d.append(span)
        elif "DtoH" in event.name:
            d2h.append(span)
        elif not event.name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    return kernels, h2d, d2h


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same moments, in pieces that don't touch, ascending."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def exposed(copies: Iterable[tuple[float, float]], computing: Iterable[tuple[float, float]]) -> float:
    """For how long something is copied while nothing is computed."""
    total = 0.0
    busy = union(computing)
    for begin, end in union(copies):
        at = begin
        for from_, until in busy:
            if until <= at or from_ >= end:
                continue
            total += max(0.0, from_ - at)
            at = max(at, until)
        total += max(0.0, end - at)
    return total


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """For how long any of them lasts."""
    return sum(end - begin for begin, end in union(intervals))
