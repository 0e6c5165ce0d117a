"""`infinity-bench report`: runs doctor, sweep and step, each in a process of its own, and prints one Markdown row. Main
thread."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from infinity.cli.arguments import add_json, add_path, check_files, checked_value, write_json
from infinity.cli.memory_limit import MemoryLimit
from infinity.cli.program import usage_checked
from infinity.units import GIB, format_bytes, format_count, parse_count

SUMMARY = "run doctor, sweep and step, and print one row to share"
DESCRIPTION = """\
Run doctor, sweep --quick and step on a drive, and print one row in Markdown, with its header, to paste into an issue or
docs/machines.md. Takes about three minutes. Run it while nothing else uses the machine."""

EPILOG = """\
examples:
  infinity-bench report /local_nvme
  infinity-bench report /local_nvme --params 1B --json report.json

exit code: 0 when done; 1 if training with NVMe does not work here, or a command fails; 2 for wrong usage.
--json writes the results of the three commands under their names (docs/doctor.md, docs/sweep.md, docs/step.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    params = checked_value(parse_count, at_least=10_000)
    parser.add_argument("--params", type=params, default=200_000_000, metavar="COUNT", help='of step (default: "200M")')
    add_path(parser, "folder on the drive (default: the current one)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    with usage_checked():
        check_files(options, "json")
    path = str(options.path or Path())
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="infinity-report-") as folder:
        for name, more in {"doctor": [], "sweep": ["--quick"], "step": ["--params", str(options.params)]}.items():
            file = Path(folder, name)
            if status := run_command([name, path, *more, "--json", str(file)], quiet=options.json == "-"):
                return status
            results[name] = json.loads(file.read_text())
    row = row_of(**results)
    if options.json != "-":
        for cells in (row, ["---"] * len(row), row.values()):
            print(f"| {' | '.join(cells)} |")
    if options.json is not None:
        write_json(results, options.json)
    return 0


def run_command(words: list[str], *, quiet: bool) -> int:
    """Run a command of infinity-bench in a child process; returns its exit code. quiet: send its output to standard
    error."""
    status = MemoryLimit("none").run(
        [sys.executable, "-m", f"{__package__}.bench", *words], stdout=sys.stderr if quiet else None
    )
    return status if status >= 0 else 128 - status


def row_of(doctor: dict[str, Any], sweep: dict[str, Any], step: dict[str, Any]) -> dict[str, str]:
    """Return the cells of the row by column, from the JSON of the three commands."""
    facts, cpu, disk = doctor["sections"], sweep["machine"], sweep["drive"]
    gpus = [device["name"] for device in facts["gpu"]["devices"]]
    rates = [f"{sweep[load]['bytes_per_s'] / 1e9:.2f}" for load in ("read", "write", "mixed")]
    plain, software = step["torch_in_memory_seconds"], facts["software"]
    over = step["over_lower_bound"]
    return {
        "machine": f"{cpu['cores']} × {cpu['cpu']}, {cpu['memory_bytes'] / GIB:.0f} GiB, Linux {sweep['kernel']}",
        "GPU": ", ".join(gpus) or "–",
        "drive": f"{disk['name']}, {disk['file_system']}",
        "GB/s read, written, mixed": ", ".join(rates),
        "parameters": format_count(step["params"]),
        "tokens": f"{step['accumulation']} × {step['batch_size']} × {step['seq']}",
        "plain PyTorch": f"{plain:.2f} s" if plain is not None else "does not fit",
        "drive time": f"{step['drive_seconds']:.2f} s",
        "infinity": f"{step['seconds']:.2f} s",
        "infinity / longer": f"{over:.2f}" if over is not None else "–",
        "peak memory": format_bytes(step["peak_rss_bytes"]),
        "infinity, torch, date": f"{software['infinity_version']}, {software['torch_version']}, {sweep['date'][:10]}",
    }
