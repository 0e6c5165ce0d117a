"""Plots bandwidth over block size, a panel per path and load, from every trial of a sweep. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from infinity.cli.sweep.report import Swept, block_in_words, name_of
from infinity.cli.sweep.search import Search
from infinity.drive.measure import Workload

_MARKERS = "osD^vP"


def draw(swept: list[Swept], file: Path) -> None:
    figure = Figure(figsize=(15, 5 * len(swept)), layout="constrained")
    axes = figure.subplots(len(swept), len(Workload), squeeze=False, sharey="row")
    for row, one in zip(axes, swept, strict=True):
        for panel, workload in zip(row, Workload, strict=True):
            for label, style, line in _lines(one.search, workload):
                blocks = sorted(line)
                panel.plot(blocks, [line[block] / 1e9 for block in blocks], label=label, **style)
            ticks = sorted({trial.settings.block_bytes for trial in one.search.trials})
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [block_in_words(tick) for tick in ticks])
            panel.set_title(f"{workload.value}, {name_of(one.drive)}")
            panel.set_xlabel("block size")
            panel.grid(alpha=0.3)
        row[0].set_ylabel("GB/s")
        row[0].set_ylim(bottom=0)
        row[-1].legend(title="backend, depth", loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(file, dpi=120)


def _lines(search: Search, workload: Workload) -> list[tuple[str, dict[str, object], dict[int, float]]]:
    """Return label, style and bytes/s by block size, of each backend (a colour) and depth on one ring (a shade) with
    several sizes."""
    rates_of: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial in search.trials:
        settings = trial.settings
        if trial.workload is workload and settings.rings == 1:
            rates_of[settings.backend, settings.queue_depth][settings.block_bytes].append(trial.bytes_per_s)
    lines_of = {key: rates for key, rates in rates_of.items() if len(rates) > 1}
    depths = sorted({depth for _, depth in lines_of})
    lines = []
    for (name, depth), rates in sorted(lines_of.items()):
        number = search.names.index(name)
        style = {
            "color": mpl.colormaps["tab10"](number),
            "marker": _MARKERS[number % len(_MARKERS)],
            "alpha": 0.35 + 0.65 * (depths.index(depth) + 1) / len(depths),
            "markersize": 4,
        }
        lines.append((f"{name}, {depth}", style, {block: statistics.median(of) for block, of in rates.items()}))
    return lines
