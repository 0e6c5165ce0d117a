"""Runs a sweep: every path alone, then all at once if they are on different drives; then prints the results."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from infinity.aio import IoSettings, probe
from infinity.cli.arguments import values_of, write_json
from infinity.cli.sweep import fio, report
from infinity.cli.sweep.report import Swept
from infinity.cli.sweep.search import QUICK, THOROUGH, Effort, Search
from infinity.drive.choice import DriveProfile, save_profile
from infinity.drive.describe import drive_of
from infinity.drive.measure import FILE_BYTES_MIN, POOL_BYTES, DriveTest, Trial, Workload
from infinity.host_memory import available_bytes
from infinity.units import GIB, MIB, format_seconds

_LINE_SECONDS = 5.0


class Progress(Bar):
    """Progress display, from the seconds done and an estimate of the seconds left."""

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
        left = f"about {format_seconds(max(1.0, left_seconds), digits=1)} left"
        total = done_seconds + left_seconds
        self.update(self._task, description=activity, completed=done_seconds, total=total, left=left)
        if self.disable and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            print(f"{activity}; {left}", file=sys.stderr, flush=True)


_QUEUE_SECONDS_MAX = 0.1
_QUEUE_BYTES_MIN = 64 * MIB
"""Settings with more in flight than the drive moves in this time, and more than this minimum, are not tried: they only
add latency."""

_PIPED_WIDTH = 100

_MEMORY_SHARE = 4


class Sweep:
    def __init__(self, options: argparse.Namespace, sizes: dict[Path, int]) -> None:
        self._options = options
        self._sizes = sizes
        self._effort: Effort = QUICK if options.quick else THOROUGH
        if options.rounds is not None:
            self._effort = replace(self._effort, rounds=options.rounds)
        available = [name for name, available, _ in probe() if available]
        self._backends = [name for name in available if not options.backend or name in options.backend]
        self._fio_engine = "io_uring" if "io_uring" in available else "libaio"
        self._console = Console(stderr=options.json == "-")
        if not self._console.is_terminal:
            self._console.width = _PIPED_WIDTH
        self._began = time.monotonic()
        self._trial_seconds, self._wall_seconds = 4.0, 6.0  # a guess that outweighs the first trials
        self._swept: list[Swept] = []

    def run(self) -> None:
        with Progress() as progress:
            for path, nbytes in self._sizes.items():
                self._sweep(path, nbytes, progress)
            all_at_once = self._run_all_at_once(progress)
        for swept in self._swept:
            report.print_report(swept, self._console, params=self._options.params)
            if not self._options.no_profile:
                self._keep_profile(swept)
        report.print_all_at_once(self._swept, all_at_once, self._console)
        if self._options.json is not None:
            write_json(report.as_json(self._swept, all_at_once, self._options), self._options.json)
        if self._options.plot is not None:
            from infinity.cli.sweep.plot import draw

            draw(self._swept, self._options.plot)

    def print_partial_results(self) -> None:
        self._console.print("[bold]Ended early.[/] Results so far, from short trials:")
        for swept in self._swept:
            report.print_found(swept, self._console)

    def _sweep(self, path: Path, nbytes: int, progress: Progress) -> None:
        with DriveTest(path, nbytes=nbytes, pool_bytes=_pool_bytes()) as test:
            rival = fio.Fio(fio.find_fio(), test, self._fio_engine) if self._options.fio else None
            in_flight_bytes_max = POOL_BYTES

            def fits(settings: IoSettings) -> bool:
                if settings.in_flight_bytes > in_flight_bytes_max:
                    return False
                return settings.backend == fio.NAME or test.fits(settings)

            def measure(workload: Workload, settings: IoSettings, seconds: float) -> Trial:
                self._show(progress, swept, f"{path}: {_in_words(workload, settings)}")
                began = time.monotonic()
                runner = rival if rival is not None and settings.backend == fio.NAME else test
                trial = runner.run(workload, settings, seconds)
                self._trial_seconds += seconds
                self._wall_seconds += time.monotonic() - began
                return trial

            rivals = [fio.NAME] if rival is not None else []
            search = Search(measure=measure, backends=self._backends, fits=fits, effort=self._effort, rivals=rivals)
            swept = Swept(path.resolve(), drive_of(path), test, search, rival)
            self._swept.append(swept)
            began = time.monotonic()
            activity, size = f"{path}: writing the test file", f"{nbytes / GIB:.1f} GiB"
            test.fill(lambda done: self._show(progress, swept, f"{activity}, {done / GIB:.1f} of {size}"))
            usual = IoSettings(self._backends[0])
            rate = max(measure(workload, usual, self._effort.trial_seconds).bytes_per_s for workload in Workload)
            in_flight_bytes_max = max(_QUEUE_BYTES_MIN, int(rate * _QUEUE_SECONDS_MAX))
            search.run()
            swept.seconds = time.monotonic() - began

    def _show(self, progress: Progress, swept: Swept, activity: str) -> None:
        """Show progress. Trials take longer than they measure; the factor is estimated from those done."""
        stretch = self._wall_seconds / self._trial_seconds
        waiting = len(self._sizes) - len(self._swept)
        of_each = self._effort.seconds(backends=len(self._backends), rivals=int(self._options.fio))
        left = stretch * (swept.search.remaining_seconds + waiting * of_each)
        progress.show(activity, done_seconds=time.monotonic() - self._began, left_seconds=left)

    # --- All at once ---

    def _run_all_at_once(self, progress: Progress) -> report.AllAtOnce | None:
        chosen = [(swept, choice.settings) for swept in self._swept if (choice := swept.search.recommended())]
        if len(chosen) < 2 or report.on_one_device(self._swept):
            return None
        with ExitStack() as stack:
            tests = []
            for number, (swept, settings) in enumerate(chosen):
                left = (len(chosen) - number) * 5.0
                progress.show("all at once: writing the test files", done_seconds=0, left_seconds=left)
                test = DriveTest(swept.path, nbytes=self._sizes[swept.path], pool_bytes=_pool_bytes())
                tests.append((stack.enter_context(test), settings))
                test.fill()

            def one_round(workload: Workload) -> float:
                """Return the sum of the bytes per second of all drives."""
                trials = [threads.submit(test.run, workload, settings, 1.0) for test, settings in tests]
                return sum(trial.result().bytes_per_s for trial in trials)

            threads = stack.enter_context(ThreadPoolExecutor(len(tests)))
            rounds = range(self._effort.rounds)
            return {workload: statistics.median(one_round(workload) for _ in rounds) for workload in Workload}

    # --- Profiles ---

    def _keep_profile(self, swept: Swept) -> None:
        choice = swept.search.recommended()
        if choice is None:
            return
        measured = values_of(choice.settings, "backend block_bytes queue_depth rings mix")
        measured |= {f"{workload.value}_bytes_per_s": choice.of[workload].bytes_per_s for workload in Workload}
        profile = DriveProfile(
            written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            path=str(swept.path),
            drive=report.label_of(swept.drive),
            cpu_seconds_per_gib=choice.cpu_seconds_per_gib,
            **measured,
        )
        try:
            path = save_profile(profile, swept.path)
        except OSError as error:
            self._console.print(f"The drive's profile could not be stored in {swept.path}: {error}", style="yellow")
        else:
            self._console.print(f"Stored in {path}.", soft_wrap=True)


def _pool_bytes() -> int:
    """Return the pinned memory to measure with: the default, or less if the machine has little."""
    available = available_bytes()
    return POOL_BYTES if available is None else max(FILE_BYTES_MIN, min(POOL_BYTES, available // _MEMORY_SHARE))


def _in_words(workload: Workload, settings: IoSettings) -> str:
    rings = f" x {settings.rings}" if settings.rings > 1 else ""
    block = report.block_in_words(settings.block_bytes)
    return f"{workload.value}, {settings.backend}, {block} x {settings.queue_depth}{rings}"
