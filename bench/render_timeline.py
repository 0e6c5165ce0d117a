"""Draws a trace written by `stop_trace(path)` or a command's `--trace`. A row per drive and direction, then the rows of
the training thread. Needs matplotlib.

    python bench/render_timeline.py trace.json timeline.png
    python bench/render_timeline.py trace.json timeline.png --from 0.2 --to 0.5     # seconds since the trace began
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import InfinityError
from infinity.extras import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
PARTS = {"forward": "#d6e6f5", "backward": "#fde1c8", "step": "#bfe3bf"}


def rows_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of each row, by its name, in the order in which viewers show them. Raises ValueError."""
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
    """Draw seconds `start` to `end` of the trace to `file`, whose suffix selects the format."""
    with needs("plot"):
        from matplotlib.figure import Figure
    shown = [name for name in rows if name != "step"]
    # A gap separates the drives' rows from the training thread's.
    places = {name: place + (0 if name.startswith("drive") else 0.4) for place, name in enumerate(shown)}
    lowest = max(places.values(), default=0) + 0.5
    # Large enough to be legible on a page that shows it 800 pixels wide.
    figure = Figure(figsize=(10, 1.1 + 0.32 * lowest), layout="constrained")
    panel = figure.subplots()
    for name, place in places.items():
        spans = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in rows[name]]
        panel.broken_barh(spans, (place - 0.38, 0.76), facecolors=COLORS.get(name.split()[-1], "black"), zorder=2)
    panel.set_yticks(list(places.values()), shown)
    panel.set(xlim=(start, end), ylim=(lowest, -0.5), xlabel="seconds since the trace began")
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="white", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["left", "right", "top"]].set_visible(False)
    _shade_parts(panel, rows.get("step", []), start, end)
    _write_shares(panel, rows, places, start, end)
    figure.savefig(file, dpi=160)


def _shade_parts(panel: Axes, parts: list[dict[str, Any]], start: float, end: float) -> None:
    """Shade forward, backward and step behind the rows, with names above, or in a legend if they are too narrow."""
    labelled, narrow = set(), {}
    for part in parts:
        name, left, right = part["name"], *_within(part, start, end)
        if left >= right:
            continue
        band = panel.axvspan(left, right, color=PARTS.get(name, "white"), linewidth=0, zorder=0)
        if right - left > 0.08 * (end - start):
            above = panel.get_xaxis_transform()
            panel.text((left + right) / 2, 1.01, name, transform=above, ha="center", va="bottom")
            labelled.add(name)
        else:
            narrow.setdefault(name, band)
    legend = {name: band for name, band in narrow.items() if name not in labelled}
    if legend:
        # Not "outside": there is room next to the axis label.
        panel.figure.legend(legend.values(), legend, loc="lower right", ncols=len(legend), frameon=False)


def _write_shares(
    panel: Axes, rows: dict[str, list[dict[str, Any]]], places: dict[str, float], start: float, end: float
) -> None:
    """Write each row's share of the shown time at its right."""
    right = panel.get_yaxis_transform()
    decimals = 2 if end - start >= 1 else 3
    panel.text(1.01, -0.6, f"of {end - start:.{decimals}f} s", transform=right, va="bottom")
    for name, place in places.items():
        seconds = sum(max(0.0, after - before) for before, after in (_within(e, start, end) for e in rows[name]))
        share = f"{seconds / (end - start):4.0%}".replace(" ", "\u2007")  # a space as wide as a digit
        panel.text(1.01, place, f"{seconds:.{decimals}f} s {share}", transform=right, va="center")


def _within(event: dict[str, Any], start: float, end: float) -> tuple[float, float]:
    """Return the seconds at which an event begins and ends, cut to `start` and `end`."""
    return max(start, event["ts"] / 1e6), min(end, (event["ts"] + event["dur"]) / 1e6)


def busy_by_row(rows: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return the seconds that the events of each row take."""
    return {name: sum(event["dur"] for event in events) / 1e6 for name, events in rows.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path, help="its suffix selects the format: .png, .svg, .pdf")
    parser.add_argument("--from", dest="start", type=float, default=0.0, help="seconds (default: the trace's begin)")
    parser.add_argument("--to", dest="end", type=float, help="seconds (default: its end)")
    asked = parser.parse_args(argv)
    try:
        rows = rows_of(asked.trace)
        last = max((event["ts"] + event["dur"] for events in rows.values() for event in events), default=0.0) / 1e6
        end = last if asked.end is None else asked.end
        if not asked.start < end:
            raise ValueError(f"{asked.trace} has nothing from {asked.start:g} s to {end:g} s")
        draw(rows, asked.picture, start=asked.start, end=end)
    except (InfinityError, OSError, ValueError) as error:
        print(f"render_timeline: {error}", file=sys.stderr)
        return 1
    for name, seconds in busy_by_row(rows).items():
        print(f"{name:16s} {seconds:8.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
