"""Plots step time over the number of parameters, a line per strategy as far as it fits. Needs matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from infinity.plan.machine import Machine
from infinity.plan.planner import plans_for
from infinity.plan.transformer import transformer_of
from infinity.plan.work import Work

_SIZES = tuple(step * 10**power for power in range(7, 13) for step in (1, 2, 5))
_AROUND = 30
"""Factor by which the drawn sizes may be larger or smaller than the model."""


def draw(work: Work, machine: Machine, file: Path, *, pinned_bytes: int | None, cache_bytes: int | None) -> None:
    asked = work.model.numel
    sizes = sorted({asked, *(size for size in _SIZES if asked / _AROUND <= size <= asked * _AROUND)})
    lines: dict[str, list[tuple[int, float]]] = {}
    for size in sizes:
        model = transformer_of(size, seq=work.model.seq, vocab=work.model.vocab) if size != asked else work.model
        of_this_size = replace(work, model=model)
        for plan in plans_for(of_this_size, machine, pinned_bytes=pinned_bytes, cache_bytes=cache_bytes):
            name = plan.strategy.name
            lines.setdefault(name, [])
            if plan.fits:
                lines[name].append((size, plan.step_seconds))
    figure = Figure(figsize=(9, 6), layout="constrained")
    panel = figure.subplots()
    for name, points in lines.items():
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    panel.axvline(asked, color="grey", linewidth=0.8, linestyle="--")
    panel.set(xscale="log", yscale="log", xlabel="parameters", ylabel="seconds per step", title=machine.name)
    panel.grid(alpha=0.3, which="both")
    if any(lines.values()):
        panel.legend(title="fits as", fontsize="small")
    figure.savefig(file, dpi=120)
