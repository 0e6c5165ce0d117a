"""Summarizes the rounds of bench/step.py: medians, ratios within a round, and a table. Pure but for the table.

A row is a round: for each way the measurements of its step by bench/step_worker.py, and under "drive" the drive's
bytes/s of reads, of writes, and of both at once in equal parts, measured around that step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.units import GIB, MIB

Row = dict[str, dict[str, Any]]

_PARTS = ("seconds", "forward", "backward", "step", "cpu_seconds", "ring_cpu_seconds", "minor_faults")


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def summarize(rows: list[Row], way: str) -> dict[str, Any] | None:
    """Return medians over the rounds, each ratio taken within its round first; None for a way that was left out."""
    if not all(way in row for row in rows):
        return None
    rows = [{name: step for name, step in row.items() if all(name in other for other in rows)} for row in rows]
    steps = [row[way] for row in rows]
    summary: dict[str, Any] = {part: median(step[part] for step in steps) for part in _PARTS if part in steps[0]}
    summary["min_max_seconds"] = [round(pick(step["seconds"] for step in steps), 4) for pick in (min, max)]
    summary["peak_rss_gib"] = round(steps[-1]["peak_rss_bytes"] / GIB, 2)
    summary["loss"] = steps[-1]["loss"]
    if steps[0].get("scale", 1) != 1:
        summary["times_multiplied_by"] = round(steps[0]["scale"], 4)
    numel = steps[0]["numel"]
    for name in ("disk_read_bytes", "disk_written_bytes"):
        if name in steps[0]:
            summary[f"{name}_per_param"] = median(step[name] / numel for step in steps)
    if "torch" in rows[0]:
        for name, part in (("over_torch", "seconds"), ("cpu_over_torch", "cpu_seconds")):
            if part in steps[0]:
                summary[name] = median(row[way][part] / row["torch"][part] for row in rows)
    update, _, variant = way.partition("-")
    if variant and update in rows[0]:
        summary[f"over_{update}"] = median(row[way]["seconds"] / row[update]["seconds"] for row in rows)
    if "deepspeed" in rows[0]:
        summary["deepspeed_over_this"] = median(row["deepspeed"]["seconds"] / row[way]["seconds"] for row in rows)
    if (without := f"{way}-unchecked") in rows[0]:
        for part in ("seconds", "step", "cpu_seconds"):
            if part in steps[0]:
                summary[f"{part}_over_unchecked"] = median(row[way][part] / row[without][part] for row in rows)
    if "ring_cpu_seconds" in steps[0] and without in rows[0]:
        extra = [row[way]["ring_cpu_seconds"] - row[without]["ring_cpu_seconds"] for row in rows]
        summary["ring_cpu_beyond_unchecked"] = median(extra)
        summary["of_all_cpu"] = median(
            more / row[without]["cpu_seconds"] for more, row in zip(extra, rows, strict=True)
        )
    if "step_bytes" not in steps[0]:
        return summary
    for name in ("read_bytes", "written_bytes"):
        summary[f"{name}_per_param"] = median(step[name] / numel for step in steps)
    summary["stall_seconds"] = median(step["stall_seconds"] for step in steps)
    summary["pinned_mib"] = round(steps[-1]["pinned_bytes"] / MIB)
    summary["drive_seconds"] = median(drive_seconds(row, way) for row in rows)
    bounds = [lower_bound(row, way) for row in rows]
    if all(bound > 0 for bound in bounds):  # else everything is cached, and there is no bound
        summary["lower_bound_seconds"] = median(bounds)
        summary["over_lower_bound"] = median(step["seconds"] / bound for step, bound in zip(steps, bounds, strict=True))
    if "torch" in rows[0] and update == "forward":
        summary["over_forward_lower_bound"] = median(
            row[way]["seconds"] / forward_lower_bound(row, way) for row in rows
        )
    if update == "step" and variant not in ("full", "spilled"):  # reads and writes are equal, both at once
        optimizer = [step["step"] for step in steps]
        on_drive = [2 * step["step_bytes"][1] / step["drive"][2] for step in steps]
        summary |= ratio("optimizer_over_drive", optimizer, on_drive)
        if steps[0]["phases"]:
            transfers = [statistics.mean(step["phases"]) for step in steps]
            summary |= ratio("optimizer_over_transfers", optimizer, transfers)
            summary |= ratio("transfers_over_drive", transfers, on_drive)
            summary |= ratio("optimizer_over_moved", optimizer, [phase_seconds(row, way) for row in rows])
            summary["drive_busy_share"] = median(step["busy_share"] for step in steps)
    return summary


def ratio(name: str, seconds: list[float], others: list[float]) -> dict[str, float]:
    """Return the median of the ratios within the rounds, and the ratio of the sums over all rounds."""
    pairs = zip(seconds, others, strict=True)
    return {name: median(a / b for a, b in pairs), f"{name}_in_all": round(sum(seconds) / sum(others), 4)}


def drive_seconds(row: Row, way: str) -> float:
    """Return the drive time for a step's bytes at that round's mixed rate: those of its plan, fewer if the pool saved
    some. Bytes that were moved twice count once."""
    step = row[way]
    moved_bytes = step["read_bytes"], step["written_bytes"]
    return float(sum(map(min, step["step_bytes"], moved_bytes)) / step["drive"][2])


def lower_bound(row: Row, way: str) -> float:
    """Return [Note: The lower bound of a measured step] in cli/measured_step.py; without plain PyTorch the drive's."""
    plain = row["torch"]["seconds"] if "torch" in row else 0.0
    return max(plain, drive_seconds(row, way))


def phase_seconds(row: Row, way: str) -> float:
    """Return the drive time for the bytes moved in the optimizer's phase, at that round's bandwidth: mixed as far as
    reads and writes are equal, the others alone. State that the backward read ahead is not among them."""
    read, written = row[way]["phase_bytes"]
    read_rate, write_rate, mixed_rate = row[way]["drive"]
    both = min(read, written)
    return float(2 * both / mixed_rate + (read - both) / read_rate + (written - both) / write_rate)


def forward_lower_bound(row: Row, way: str) -> float:
    """Return the lower bound of a step whose updates wait for the next forward, with the compute of plain PyTorch.

    No update may begin before the last gradient is known, and each must end before its group is used. So all state is
    read and written in the forward, except for the part in the pool at either end: as much is read ahead in the
    previous backward, and written in the next one. With S bytes of state, a pool of M bytes and drives that take turns,

        T_step >= max(forward and update, (S - M) / BW_read + (S - M) / BW_write) + backward
    """
    moved = max(0.0, row[way]["step_bytes"][1] - row[way]["pinned_bytes"])
    read_rate, write_rate, _ = row[way]["drive"]
    forward_seconds = row["torch"]["forward"] + row["torch"]["step"]
    return max(forward_seconds, moved / read_rate + moved / write_rate) + float(row["torch"]["backward"])


def show(results: dict[str, dict[str, Any] | None]) -> None:
    """Print a table on standard error."""
    columns = {
        "step s": "seconds",
        "forward": "forward",
        "backward": "backward",
        "optimizer": "step",
        "stall": "stall_seconds",
        "/ plain": "over_torch",
        "/ lower bound": "over_lower_bound",
        "/ forward's": "over_forward_lower_bound",
        "optimizer / drive": "optimizer_over_drive",
        "/ moved": "optimizer_over_moved",
        "/ transfers": "optimizer_over_transfers",
        "/ unchecked": "step_over_unchecked",
        "B read": "disk_read_bytes_per_param",
        "B written": "disk_written_bytes_per_param",
        "peak GiB": "peak_rss_gib",
        "CPU s": "cpu_seconds",
        "faults": "minor_faults",
        "DeepSpeed /": "deepspeed_over_this",
    }
    columns = {
        title: key for title, key in columns.items() if any(key in (values or {}) for values in results.values())
    }
    table = Table("way", *columns)
    for way, values in results.items():
        cells = [f"{values[key]:.3g}" if key in values else "" for key in columns.values()] if values else ["left out"]
        table.add_row(way, *cells)
    Console(stderr=True, width=150).print(table)
