"""Reports of a sweep: tables and text, JSON, and the block for the training config."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import infinity
from infinity.aio import IoSettings
from infinity.cli.arguments import values_of
from infinity.cli.sweep import fio
from infinity.cli.sweep.search import Choice, Search, Standing
from infinity.cli.tables import table_of
from infinity.drive.describe import Drive
from infinity.drive.measure import DriveTest, Workload
from infinity.plan.estimate import Part, step_bytes
from infinity.plan.planner import RATED_DAYS
from infinity.schedule.scheme import Scheme
from infinity.units import DAY_SECONDS, GIB, KIB, MIB, format_bytes, format_count, format_seconds

_PARAMS = (10**9, 7 * 10**9, 70 * 10**9)


@dataclass
class Swept:
    """One path: its drive, its test (closed at the end), and its results."""

    path: Path
    drive: Drive
    test: DriveTest
    search: Search
    rival: fio.Fio | None
    seconds: float = 0.0


AllAtOnce = dict[Workload, float]
"""Bytes per second of all drives at the same time, each at its recommended settings."""


def name_of(drive: Drive) -> str:
    return "+".join(disk.name for disk in drive.disks) or drive.source


def label_of(drive: Drive) -> str:
    """Return a label: "nvme0n1 (Samsung SSD 990 PRO 2TB, 1.82 TiB, ext4)"."""
    size = format_bytes(drive.nbytes) if drive.nbytes else "size unknown"
    return f"{name_of(drive)} ({', '.join(dict.fromkeys([drive.model, size, drive.file_system]))})"


def block_in_words(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def share_a_disk(one: Drive, other: Drive) -> bool:
    disks = {disk.name for disk in one.disks} & {disk.name for disk in other.disks}
    return bool(disks) or one.source == other.source


def on_one_device(swept: list[Swept]) -> list[tuple[Swept, Swept]]:
    """Return the pairs of paths that compete for the same bandwidth."""
    return [(one, other) for one, other in combinations(swept, 2) if share_a_disk(one.drive, other.drive)]


def config_block(choice: Choice) -> dict[str, Any]:
    settings = choice.settings
    return {
        "aio": {
            "block_size": settings.block_bytes,
            "queue_depth": settings.queue_depth,
            "intra_op_parallelism": settings.rings,
            "single_submit": False,
            "overlap_events": True,
        },
        "infinity": {"backend": settings.backend, "mix": settings.mix},
    }


# --- For people ---


def print_report(swept: Swept, console: Console, *, params: list[int] | None) -> None:
    console.print(f"\n[bold]{swept.path}[/] on {label_of(swept.drive)}, file of {format_bytes(swept.test.nbytes)}")
    print_found(swept, console)
    choice = swept.search.recommended()
    if choice is None:
        console.print("Nothing can be recommended: no settings were measured under every load.", style="yellow")
        return
    console.print(*_verdict(swept, choice), sep="\n")
    table = table_of("parameters", "on the drive", "read per step", "written per step", "step at least")
    for count in params or _PARAMS:
        read, written = _step_bytes(count)
        table.add_row(
            format_count(count),
            format_bytes(Scheme().state_bytes * count),
            format_bytes(read),
            format_bytes(written),
            format_seconds((read + written) / choice.step_bytes_per_s),
        )
    console.print(table)
    console.print(endurance(swept.drive, choice))
    console.print("For the training config:")
    console.print(json.dumps(config_block(choice), indent=2), soft_wrap=True, highlight=False, markup=False)


def print_found(swept: Swept, console: Console) -> None:
    table = table_of("backend", "load", "GB/s", "range", "block", "depth", "rings", "CPU s/GB", words=2)
    for name in swept.search.names:
        for workload in Workload:
            if (standing := swept.search.best(name, workload)) is not None:
                title = name if workload is Workload.READ else ""
                last = workload is Workload.MIXED
                settings = standing.settings
                table.add_row(
                    title,
                    "mixed, bursts" if last and settings.mix == "bursts" else workload.value,
                    f"{standing.bytes_per_s / 1e9:.2f}",
                    f"{standing.bytes_per_s_min / 1e9:.2f}-{standing.bytes_per_s_max / 1e9:.2f}",
                    block_in_words(settings.block_bytes),
                    str(settings.queue_depth),
                    str(settings.rings),
                    f"{standing.cpu_seconds_per_gib * 1e9 / GIB:.4f}",
                    end_section=last,
                )
    console.print(table)


def _verdict(swept: Swept, choice: Choice) -> list[str]:
    read, write, mixed = (_fastest(swept, workload) for workload in Workload)
    turns = 2 / (1 / read + 1 / write)
    lines = [
        f"It reads {_rate(read)} and writes {_rate(write)}. Doing both at once moves {_rate(mixed)}, "
        f"{_compared(mixed, turns)} taking turns would ({_rate(turns)})."
    ]
    settings = choice.settings
    lines.append(
        f"One setting for all loads: {settings.backend}, blocks of {block_in_words(settings.block_bytes)}, "
        f"{settings.queue_depth} in flight on {f'each of {settings.rings} rings' if settings.rings > 1 else 'one ring'}, "
        f"reads and writes {'in bursts' if settings.mix == 'bursts' else 'interleaved'}. "
        f"The bytes of a training step then move at {_rate(choice.step_bytes_per_s)}."
    )
    usual = swept.search.choice_of(IoSettings(settings.backend))
    if usual is not None and usual.settings != settings:
        comparison = _compared(choice.step_bytes_per_s, usual.step_bytes_per_s)
        lines[-1] += f" That is {comparison} the defaults ({block_in_words(usual.settings.block_bytes)} x 32)."
    if swept.search.disturbed:
        lines.append(
            f"[yellow]The machine was busy: the same settings differed by {swept.search.spread:.0%} from round to round. The "
            "rates above are too low, and simple settings were preferred: sweep again while nothing else runs.[/]"
        )
    ratios = ratios_to_rival(swept)
    if swept.rival is not None and ratios:
        listed = ", ".join(f"{workload} {ratio:.2f}" for workload, ratio in ratios.items())
        lines.append(f"Relative to the best of fio ({swept.rival.io_engine}) in the same rounds: {listed}.")
    if not swept.test.direct:
        lines.append(
            "[yellow]This file system refuses direct I/O, so this is the speed of memory, not of a drive: "
            "choose a folder on a local file system such as ext4 or xfs.[/]"
        )
    return lines + [f"[yellow]{note}[/]" for note in swept.test.notes if swept.test.direct]


def ratios_to_rival(swept: Swept) -> dict[str, float]:
    rivals = {workload: swept.search.best(fio.NAME, workload) for workload in Workload}
    return {
        workload.value: _fastest(swept, workload) / rival.bytes_per_s
        for workload, rival in rivals.items()
        if rival is not None
    }


def endurance(drive: Drive, choice: Choice) -> str:
    """Describe drive wear. It is the same for models of all sizes: a larger one writes more, less often."""
    wear = wear_of(drive, choice)
    text = "Wear: a step writes 12 bytes per trained parameter. Training that never waits for compute would write "
    text += f"{format_bytes(wear['written_bytes_per_day'])} a day."
    if "drive_writes_per_day" in wear:
        text += (
            f" That is {wear['drive_writes_per_day']:.3g} drive writes per day for this drive of "
            f"{format_bytes(drive.nbytes)}; rated for 1 a day over 5 years, it would last "
            f"{format_seconds(DAY_SECONDS * wear['days_at_1_dwpd_for_5_years'], digits=2)}."
        )
    return text + " If compute takes longer, the drive lasts longer in proportion."


def wear_of(drive: Drive, choice: Choice) -> dict[str, float]:
    read, written = _step_bytes(1)
    per_day = written / ((read + written) / choice.step_bytes_per_s) * DAY_SECONDS
    if not drive.nbytes:
        return {"written_bytes_per_day": per_day}
    return {
        "written_bytes_per_day": per_day,
        "drive_writes_per_day": per_day / drive.nbytes,
        "days_at_1_dwpd_for_5_years": RATED_DAYS * drive.nbytes / per_day,
    }


def print_all_at_once(swept: list[Swept], result: AllAtOnce | None, console: Console) -> None:
    for one, other in on_one_device(swept):
        console.print(
            f"{one.path} and {other.path} are on one device ({name_of(one.drive)}): they share its bandwidth, and a second "
            "path there gains nothing.",
            style="yellow",
        )
    if result is None:
        return
    table = table_of("load", "GB/s", "sum of each alone", "ratio", title="All at once")
    for workload, rate in result.items():
        alone = _alone(swept, workload)
        table.add_row(workload.value, f"{rate / 1e9:.2f}", f"{alone / 1e9:.2f}", f"{rate / alone:.2f}")
    console.print(table)


# --- For programs ---


def as_json(swept: list[Swept], all_at_once: AllAtOnce | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return the whole result. Several paths are entries of `paths`; a single one is at the top level."""
    versions = {"infinity": infinity.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if options.fio:
        versions["fio"] = fio.version_of(fio.find_fio())
    about = {
        "bench": "sweep",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": _machine(),
        "kernel": platform.release(),
        "versions": versions,
        "quick": options.quick,
        "rounds": swept[0].search.effort.rounds,
    }
    results = [_path_as_json(one) for one in swept]
    if len(results) == 1:
        return about | results[0]
    more: dict[str, Any] = {
        "paths": results,
        "one_device": [[str(a.path), str(b.path)] for a, b in on_one_device(swept)],
    }
    if all_at_once is not None:
        more["together"] = {
            workload.value: {"bytes_per_s": rate, "of_sum": rate / _alone(swept, workload)}
            for workload, rate in all_at_once.items()
        }
    return about | more


def _path_as_json(swept: Swept) -> dict[str, Any]:
    search, drive = swept.search, swept.drive
    result: dict[str, Any] = {
        "path": str(swept.path),
        "drive": {
            "name": name_of(drive),
            "size_bytes": drive.nbytes,
            **values_of(drive, "model file_system layers"),
        },
        "file_bytes": swept.test.nbytes,
        "seconds": round(swept.seconds, 1),
        **values_of(search, "spread disturbed"),
        **values_of(swept.test, "direct notes"),
    }
    for workload in Workload:
        if (standing := search.fastest(workload)) is not None:
            result[workload.value] = _standing_as_json(standing, workload)
    result["backends"] = {name: _loads_as_json(swept, name) for name in search.names if name != fio.NAME}
    if swept.rival is not None:
        result["fio"] = {"io_engine": swept.rival.io_engine} | _loads_as_json(swept, fio.NAME)
        result["ratio"] = ratios_to_rival(swept)
    choice = search.recommended()
    if choice is not None:
        result |= config_block(choice)
        result["recommended"] = _choice_as_json(choice)
        usual = search.choice_of(IoSettings(choice.settings.backend))
        result["default"] = _choice_as_json(usual) if usual is not None else None
        result["endurance"] = wear_of(drive, choice)
    return result


def _loads_as_json(swept: Swept, name: str) -> dict[str, Any]:
    bests = {workload: swept.search.best(name, workload) for workload in Workload}
    return {load.value: _standing_as_json(best, load) for load, best in bests.items() if best}


def _standing_as_json(standing: Standing, workload: Workload) -> dict[str, Any]:
    settings = standing.settings
    fio_s = settings.backend == fio.NAME
    names = ("iodepth", "numjobs") if fio_s else ("queue_depth", "rings")
    result = values_of(standing, "bytes_per_s bytes_per_s_min bytes_per_s_max cpu_seconds_per_gib rounds")
    result |= values_of(settings, "backend block_bytes") | {names[0]: settings.queue_depth, names[1]: settings.rings}
    if workload is Workload.MIXED and not fio_s:
        result["mix"] = settings.mix
    return result


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    loads = {load.value: _standing_as_json(standing, load) for load, standing in choice.of.items()}
    return {"step_bytes_per_s": choice.step_bytes_per_s} | loads


def _machine() -> dict[str, Any]:
    model = re.search(r"^model name\s*:\s*(.*?)\s*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": model[1] if model else "unknown",
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "architecture": platform.machine(),
    }


# --- Small things ---


def _step_bytes(params: int) -> tuple[int, int]:
    return step_bytes(Part(params), Scheme())


def _fastest(swept: Swept, workload: Workload) -> float:
    standing = swept.search.fastest(workload)
    assert standing is not None, "a recommendation without measurements"
    return standing.bytes_per_s


def _alone(swept: list[Swept], workload: Workload) -> float:
    choices = [one.search.recommended() for one in swept]
    return sum(choice.of[workload].bytes_per_s for choice in choices if choice is not None)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _compared(value: float, other: float) -> str:
    percent = 100 * (value / other - 1)
    if abs(percent) < 2:
        return "about as much as"
    return f"{abs(percent):.0f} % {'more' if percent > 0 else 'less'} than"
