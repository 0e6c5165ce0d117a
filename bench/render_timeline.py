"""A picture of a trace: what `stop_trace(path)`, or `--trace` of the commands, wrote. A row per drive and direction, then the
rows of the training thread. Needs matplotlib.

    python bench/render_timeline.py trace.json timeline.png
    python bench/render_timeline.py trace.json timeline.png --from 0.2 --to 0.5     # seconds since the trace began
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLORS = {
    "read": "tab:blue",
    "write": "tab:orange",
    "gather": "tab:cyan",
    "update": "tab:green",
    "gradients": "tab:olive",
    "copy": "tab:purple",
    "stall": "tab:red",
    "compute": "tab:gray",
}
PARTS = {"forward": "#dbe9f6", "backward": "#fde5cf", "step": "#dcefdc"}


def rows_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of each row, by its name, in the order in which viewers show them. Raises ValueError for another file."""
    try:
        events = json.loads(file.read_text())["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        rows: dict[str, list[dict[str, Any]]] = {name: [] for _, name in sorted(names.items())}
        for event in events:
            if event["ph"] == "X":
                rows[names[event["pid"], event["tid"]]].append(event)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a trace of infinity ({type(error).__name__}: {error})") from None
    return rows


def draw(rows: dict[str, list[dict[str, Any]]], file: Path, *, start: float, end: float) -> None:
    """Write the figure to `file`, whose suffix says in which format: seconds `start` to `end` of the trace."""
    parts = rows.get("step", [])
    shown = {name: events for name, events in rows.items() if name != "step"}
    figure = Figure(figsize=(14, 0.9 + 0.45 * len(shown)), layout="constrained")
    panel = figure.subplots()
    named = set()
    for part in parts:
        name = part["name"]
        label = name if name not in named else None
        named.add(name)
        panel.axvspan(part["ts"] / 1e6, (part["ts"] + part["dur"]) / 1e6, color=PARTS.get(name, "white"), label=label)
    for place, (name, events) in enumerate(shown.items()):
        spans = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in events]
        panel.broken_barh(spans, (place - 0.4, 0.8), facecolors=COLORS.get(name.split()[-1], "black"))
    panel.set_yticks(range(len(shown)), list(shown))
    panel.set(xlim=(start, end), ylim=(len(shown) - 0.5, -0.5), xlabel="seconds since the trace began")
    if named:
        figure.legend(loc="outside upper right", ncols=len(named), fontsize="small", frameon=False)
    figure.savefig(file, dpi=120)


def busy_by_row(rows: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Seconds that the events of each row take."""
    return {name: sum(event["dur"] for event in events) / 1e6 for name, events in rows.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path, help="its suffix says in which format: .png, .svg, .pdf")
    parser.add_argument(
        "--from", dest="start", type=float, default=0.0, help="seconds (default: where the trace begins)"
    )
    parser.add_argument("--to", dest="end", type=float, help="seconds (default: where it ends)")
    asked = parser.parse_args(argv)
    try:
        rows = rows_of(asked.trace)
        last = max((event["ts"] + event["dur"] for events in rows.values() for event in events), default=0.0) / 1e6
        end = last if asked.end is None else asked.end
        if not asked.start < end:
            raise ValueError(f"nothing of {asked.trace} lies from {asked.start:g} s to {end:g} s")
        draw(rows, asked.picture, start=asked.start, end=end)
    except (OSError, ValueError) as error:
        print(f"render_timeline: {error}", file=sys.stderr)
        return 1
    for name, seconds in busy_by_row(rows).items():
        print(f"{name:16s} {seconds:8.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
