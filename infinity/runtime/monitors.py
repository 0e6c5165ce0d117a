"""Monitors write figures of every step to files or services, on rank 0. docs/monitors.md lists events. Training thread
only."""

from __future__ import annotations

import csv
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from infinity.config import Config
from infinity.config.blocks import CometConfig, FileMonitorConfig, WandbConfig
from infinity.config.rules import config_error
from infinity.errors import ConfigError, in_words
from infinity.runtime.observe import EngineStats

log = logging.getLogger("infinity")

Event = tuple[str, float, int]
"""Name, value, and the samples of all ranks so far."""

_TAIL_BYTES = 4096


class Monitors:
    """All monitors of one engine, by config key. One that fails is stopped, and the log says so, once."""

    def __init__(self, *, enabled: bool = False, monitors: Mapping[str, Any] | None = None) -> None:
        self.enabled = enabled
        """True if the config enables any; the same on every rank."""
        self._open = dict(monitors or {})
        self._stopped: set[str] = set()
        self.is_writing = bool(self._open)
        """True until the last monitor is stopped or closed."""

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write events of your own: tuples of a name, a value (whatever float() takes) and the samples so far, such as
        `engine.global_samples`. Rank 0 writes."""
        if not self.is_writing:
            return
        events = [(name, float(value), int(samples)) for name, value, samples in event_list]
        for key, monitor in self._open.items():
            if key in self._stopped:
                continue
            try:
                monitor.write(events)
            except Exception as error:
                self._stopped.add(key)
                self.is_writing = self._open.keys() > self._stopped
                log.warning(
                    "%s failed and writes nothing more, while the training continues: %s; to have it in the next run, %s",
                    key,
                    in_words(error),
                    _KINDS[key].advice,
                )

    def close(self) -> None:
        self.is_writing = False
        while self._open:
            key, monitor = self._open.popitem()
            try:
                monitor.close()
            except Exception as error:
                if key not in self._stopped:
                    log.warning("%s may lack its last events: %s; %s", key, in_words(error), _KINDS[key].advice)


def check_monitors(config: Config) -> None:
    """Raise ConfigError if the library of an enabled monitor can't be imported. On rank 0, which writes."""
    problems = []
    for key in _enabled(config) if dist.get_rank() == 0 else ():
        library = _KINDS[key].library
        try:
            if library is not None:
                library.load()
        except Exception as error:  # not only ImportError
            problems.append(
                f"{key}.enabled: got true, which needs the package {library.package}, and {library.module} can't be imported "
                f"({in_words(error)}): pip install {library.package}, or set {key}.enabled to false"
            )
    if problems:
        raise config_error("config", problems)


def make_monitors(config: Config) -> Monitors:
    """Begin what the config enables on rank 0. Raises ConfigError if one can't begin; the others are closed then."""
    keys, monitors = _enabled(config), dict[str, Any]()
    with ExitStack() as undo:
        undo.callback(lambda: Monitors(monitors=monitors).close())
        for key in keys if dist.get_rank() == 0 else ():
            try:
                monitors[key] = _KINDS[key](getattr(config, key))
            except Exception as error:
                advice = f"{_KINDS[key].advice}, or set {key}.enabled to false"
                raise ConfigError(f"{key} can't start: {in_words(error)}; {advice}") from error
        undo.pop_all()
    return Monitors(enabled=bool(keys), monitors=monitors)


def events_of_step(
    samples: int,
    *,
    losses: Sequence[torch.Tensor],
    lr: float,
    loss_scale: float | None,
    grad_norm: float | None,
    stats: EngineStats,
    moves: bool,
) -> list[Event]:
    """Return the events of a step; None has none. losses: of its micro-batches, whose sum is the step's. moves: True if
    the model is paged."""
    figures = {
        "train_loss": sum(map(float, losses)) if losses else None,
        "lr": lr,
        "loss_scale": loss_scale,
        "grad_norm": grad_norm,
        "step_seconds": stats.seconds,
        "read_bytes": stats.read_bytes if moves else None,
        "written_bytes": stats.written_bytes if moves else None,
        "stall_seconds": stats.stall_seconds if moves else None,
    }
    return [(f"Train/Samples/{name}", float(value), samples) for name, value in figures.items() if value is not None]


class _Library(NamedTuple):
    module: str
    name: str
    """A name in it, which a module that only happens to be called so lacks: wandb leaves folders of its name."""
    package: str

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


class CsvMonitor:
    """A file per event in `output_path/job_name`, laid out as DeepSpeed's: `Train_Samples_lr.csv` begins with
    `step,lr`. A row is one write at the end of its file. A partial row, left by a crash of the machine, is cut off."""

    library: ClassVar[_Library | None] = None
    advice = "make room there or set csv_monitor.output_path to another folder"

    def __init__(self, settings: FileMonitorConfig) -> None:
        self._folder = _folder_of(settings)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun: set[Path] = set()

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a+b", buffering=0) as file:
                if path not in self._begun and _end_of_whole_rows(file) == 0:
                    _append(file, "step", name.rpartition("/")[2])
                self._begun.add(path)
                _append(file, samples, value)

    def close(self) -> None: ...


def _end_of_whole_rows(file: io.FileIO) -> int:
    """Return where the last whole row ends (bytes), and cut off what comes after it."""
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - _TAIL_BYTES))
    end = start + file.read(size - start).rfind(b"\n") + 1
    if end < size:
        file.truncate(end)
    return end


def _append(file: io.FileIO, *row: object) -> None:
    """Append a row, completely or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(row)
    line, size = text.getvalue().encode(), file.seek(0, os.SEEK_END)
    if file.write(line) < len(line):
        file.truncate(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))


class TensorboardMonitor:
    library = _Library("torch.utils.tensorboard", "SummaryWriter", "tensorboard")
    advice = "make room there or set tensorboard.output_path to another folder"

    def __init__(self, settings: FileMonitorConfig) -> None:
        self._writer = self.library.load()(log_dir=str(_folder_of(settings)))

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """Logs to a run of wandb, which may be the script's; then it is not finished here."""

    library = _Library("wandb", "init", "wandb")
    advice = "look at the network and `wandb login`, or set WANDB_MODE=offline in the environment"

    def __init__(self, settings: WandbConfig) -> None:
        before = importlib.import_module("wandb").run
        names = {"project": settings.project, "group": settings.group or None, "entity": settings.team or None}
        self._run = self.library.load()(**names)
        self._is_ours = self._run is not before

    def write(self, events: Sequence[Event]) -> None:
        by_samples: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            by_samples.setdefault(samples, {})[name] = value
        for samples, values in by_samples.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        if self._is_ours:
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


class CometMonitor:
    """Logs an event to a Comet experiment every `samples_log_interval` samples."""

    library = _Library("comet_ml", "start", "comet_ml")
    advice = "look at the network and comet.api_key, or set comet.online to false"

    def __init__(self, settings: CometConfig) -> None:
        key = settings.api_key
        self._experiment = self.library.load()(
            api_key=key.get_secret_value() if key is not None else None,
            workspace=settings.workspace,
            project=settings.project,
            experiment_key=settings.experiment_key,
            mode=settings.mode,
            online=settings.online,
        )
        if settings.experiment_name is not None:
            self._experiment.set_name(settings.experiment_name)
        self._interval = settings.samples_log_interval
        self._logged_at: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            if name not in self._logged_at or samples - self._logged_at[name] >= self._interval:
                self._logged_at[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        self._experiment.end()


_KINDS: Mapping[str, Any] = {
    "tensorboard": TensorboardMonitor,
    "csv_monitor": CsvMonitor,
    "wandb": WandbMonitor,
    "comet": CometMonitor,
}


def _enabled(config: Config) -> list[str]:
    return [key for key in _KINDS if getattr(config, key).enabled]


def _folder_of(settings: FileMonitorConfig) -> Path:
    return Path(settings.output_path, settings.job_name).absolute()  # the script may change its folder
