"""A bar with the time left on standard error; where that is no terminal, a plain line every few seconds."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from infinity.units import format_seconds

_LINE_SECONDS = 5.0


class Progress(Bar):
    """Shows progress, from the seconds done and an estimate of the seconds left."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._next_line = time.monotonic()
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self.add_task("", total=None, left="")

    def show(self, activity: str, *, done_seconds: float, left_seconds: float) -> None:
        """Show what is being done now. May be called often."""
        left = f"about {format_seconds(max(1.0, left_seconds), digits=1)} left"
        total = done_seconds + left_seconds
        self.update(self._task, description=activity, completed=done_seconds, total=total, left=left)
        if self.disable and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            print(f"{activity}; {left}", file=sys.stderr, flush=True)
