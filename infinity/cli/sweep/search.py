"""Chooses which settings to try on a drive, and which to recommend. Pure policy: it calls a function that measures, and
does no I/O, so that tests run it on simulated drives.

[Note: How the search goes]
For each backend and workload, short trials cover a coarse grid of block sizes and depths, then change one setting at a
time from the best point. The best few are tried on all workloads. The best of these, and of every backend, run in final
rounds of longer trials. docs/sweep.md says which settings are then recommended.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from infinity.aio import IoSettings
from infinity.drive.measure import MIX_MODES, Trial, Workload
from infinity.units import KIB, MIB

Measure = Callable[[Workload, IoSettings, float], Trial]
_Trials = dict[tuple[Workload, IoSettings], list[Trial]]

BLOCKS = tuple(64 * KIB << power for power in range(9))  # 64 KiB to 16 MiB
DEPTHS = tuple(1 << power for power in range(9))  # 1 to 256
RINGS = (1, 2, 3, 4)

_CLEAR_GAIN = 1.01
"""Smallest gain for which the search takes a step: less is noise."""

_AS_GOOD = 0.98
"""Settings within this share of the best count as equal to it; within more if the measurements are noisier."""

_DISTURBED = 0.2
"""Spread of the same settings over the rounds above which something else uses the machine."""

_AS_LEAN = 1.5
"""CPU time per byte, relative to the least, up to which settings count as equally cheap."""


@dataclass(frozen=True)
class Effort:
    """The extent of a search. steps: trials after the grid, per backend and workload, at most. candidates: settings per
    backend and workload that are tried on the other workloads, too. finalists: settings in the final rounds."""

    grid_blocks: tuple[int, ...]
    grid_depths: tuple[int, ...]
    steps: int
    trial_seconds: float
    candidates: int
    finalists: int
    rounds: int
    round_seconds: float

    def phases(self, *, backends: int, rivals: int) -> list[float]:
        """Return bounds of each phase's trial time: exploring each backend and workload, the candidates, the finals."""
        exploring = (len(self.grid_blocks) * len(self.grid_depths) + self.steps) * self.trial_seconds
        candidates = len(Workload) * (backends * (self.candidates + 1) * 2 + 1) * self.trial_seconds
        finals = len(Workload) * (self.finalists + backends + 2 * rivals) * self.rounds * self.round_seconds
        return [exploring] * (len(Workload) * (backends + rivals)) + [candidates, finals]

    def seconds(self, *, backends: int, rivals: int) -> float:
        return sum(self.phases(backends=backends, rivals=rivals))


QUICK = Effort((MIB, 4 * MIB), (8, 32), 6, 0.15, candidates=1, finalists=2, rounds=3, round_seconds=0.2)
THOROUGH = Effort(
    (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    (1, 4, 16, 64),
    14,
    0.3,
    candidates=2,
    finalists=6,
    rounds=5,
    round_seconds=0.6,
)


@dataclass(frozen=True)
class Standing:
    """The result of some settings under one workload: median and range of their trials."""

    settings: IoSettings
    bytes_per_s: float
    bytes_per_s_min: float
    bytes_per_s_max: float
    cpu_seconds_per_gib: float
    rounds: int

    @property
    def spread(self) -> float:
        return (self.bytes_per_s_max - self.bytes_per_s_min) / self.bytes_per_s

    @property
    def noise(self) -> float:
        """Relative error of the median."""
        return self.spread / math.sqrt(self.rounds)


@dataclass(frozen=True)
class Choice:
    """Settings for a whole step, with its bytes per second and the standing under each workload."""

    settings: IoSettings
    step_bytes_per_s: float
    of: dict[Workload, Standing]

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.of[Workload.MIXED].cpu_seconds_per_gib

    @property
    def noise(self) -> float:
        return self.of[Workload.MIXED].noise


def step_bytes_per_s(read: float, mixed: float) -> float:
    """Return the bytes per second of a training step on a drive with these rates (same unit; `mixed` counts both ways).

    Of the 14 bytes read and 12 written per parameter (docs/architecture.md, "The sum"), the 2 that are gathered for the
    backward are read alone, and 12 are read while 12 are written: the harmonic mean of the two.
    """
    return 26 / (2 / read + 24 / mixed)


@dataclass(eq=False, kw_only=True)
class Search:
    """Search for the best settings of one drive. rivals: more "backends" that `measure` knows, such as another program:
    measured alike, never recommended."""

    measure: Measure
    backends: Sequence[str]
    fits: Callable[[IoSettings], bool]
    effort: Effort
    rivals: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.names = (*self.backends, *self.rivals)
        self.trials: list[Trial] = []
        self._short: _Trials = {}
        self._final: _Trials = defaultdict(list)
        self._phases = self.effort.phases(backends=len(self.backends), rivals=len(self.rivals))
        """Upper bounds of the remaining trial seconds, of the current phase and each later one."""

    @property
    def remaining_seconds(self) -> float:
        return sum(self._phases)

    def run(self) -> None:
        for name in self.names:
            for workload in Workload:
                self._explore(name, workload)
                del self._phases[0]
        for settings in self._candidates():
            for workload in Workload:
                self._try(workload, settings)
        del self._phases[0]
        self._run_finals()

    def best(self, name: str, workload: Workload) -> Standing | None:
        return next(iter(self._ranked(name, workload)), None)

    def fastest(self, workload: Workload) -> Standing | None:
        bests = [best for name in self.backends if (best := self.best(name, workload)) is not None]
        return max(bests, key=lambda standing: standing.bytes_per_s, default=None)

    def recommended(self) -> Choice | None:
        choices = self._choices(self._final) or self._choices(self._short)
        return prefer(choices, IoSettings(self.backends[0])) if choices else None

    @property
    def spread(self) -> float:
        """How much the same settings differ from round to round."""
        spreads = [_standing(settings, trials).spread for (_, settings), trials in self._final.items()]
        return statistics.median(spreads) if spreads else 0.0

    @property
    def disturbed(self) -> bool:
        return self.spread > _DISTURBED

    def choice_of(self, settings: IoSettings) -> Choice | None:
        return next((choice for choice in self._choices(self._final) if choice.settings == settings), None)

    # --- Exploring ---

    def _explore(self, name: str, workload: Workload) -> None:
        """Try the grid, then single steps from its best point until none helps. A move that helped is tried first."""
        for block in self.effort.grid_blocks:
            for depth in self.effort.grid_depths:
                self._try(workload, IoSettings(name, block, depth))
        tried_until = len(self.trials) + self.effort.steps
        helped = ""
        while (start := self.best(name, workload)) is not None:
            moves = self._moves(start.settings, workload)
            for move in sorted(moves, key=lambda move: move != helped):
                if len(self.trials) >= tried_until:
                    return
                rate = self._try(workload, moves[move])
                if rate is not None and rate > _CLEAR_GAIN * start.bytes_per_s:
                    helped = move
                    break
            else:
                return

    def _moves(self, settings: IoSettings, workload: Workload) -> dict[str, IoSettings]:
        def moved(*, block: int = 0, depth: int = 0, rings: int = 0) -> IoSettings:
            return replace(
                settings,
                block_bytes=_next(BLOCKS, settings.block_bytes, block),
                queue_depth=_next(DEPTHS, settings.queue_depth, depth),
                rings=_next(RINGS, settings.rings, rings),
            )

        mixes = MIX_MODES if workload is Workload.MIXED and settings.backend not in self.rivals else ()
        moves = {f"mix {mix}": replace(settings, mix=mix) for mix in mixes} | {
            "deeper": moved(depth=1),
            "larger blocks": moved(block=1),
            "more rings": moved(rings=1),
            "fewer, larger blocks": moved(block=1, depth=-1),
            "more, smaller blocks": moved(block=-1, depth=1),
            "shallower": moved(depth=-1),
            "smaller blocks": moved(block=-1),
            "fewer rings": moved(rings=-1),
        }
        return {move: changed for move, changed in moves.items() if changed != settings}

    def _try(self, workload: Workload, settings: IoSettings) -> float | None:
        """Run a short trial, unless done before. Returns bytes per second, or None if it can't be measured."""
        settings = _as_tried(workload, settings)
        if not self.fits(settings):
            return None
        if (workload, settings) not in self._short:
            self._short[workload, settings] = [self._record(workload, settings, self.effort.trial_seconds)]
        return self._short[workload, settings][0].bytes_per_s

    def _record(self, workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        trial = self.measure(workload, settings, seconds)
        self.trials.append(trial)
        self._phases[0] = max(0.0, self._phases[0] - seconds)
        return trial

    # --- Choosing ---

    def _candidates(self) -> list[IoSettings]:
        """Return settings that may suit all workloads: each backend's best, cheap ones as good, the defaults."""
        candidates = [IoSettings(self.backends[0])]
        for name in self.backends:
            mixed = self.best(name, Workload.MIXED)
            for workload in Workload:
                ranked = self._ranked(name, workload)
                chosen = [standing.settings for standing in ranked[: self.effort.candidates]]
                good = [standing for standing in ranked if standing.bytes_per_s >= _AS_GOOD * ranked[0].bytes_per_s]
                chosen += [min(good, key=lambda standing: _cost(standing.settings)).settings] if good else []
                if workload is not Workload.MIXED and mixed is not None:
                    chosen = [replace(settings, mix=mixed.settings.mix) for settings in chosen]
                candidates += chosen
        return list(dict.fromkeys(settings for settings in candidates if self.fits(settings)))

    def _run_finals(self) -> None:
        """Run rounds over the finalists, forwards and backwards in turn, so that a slowing drive affects all alike."""
        choices = sorted(self._choices(self._short), key=lambda choice: -choice.step_bytes_per_s)
        usual = IoSettings(self.backends[0])
        chosen = [choice.settings for choice in choices[: self.effort.finalists - 1]]
        chosen += [prefer(choices, usual).settings] if choices else []
        chosen += [usual for choice in choices if choice.settings == usual]
        entries: dict[tuple[Workload, IoSettings], None] = {}
        for workload in Workload:
            entries |= dict.fromkeys((workload, _as_tried(workload, settings)) for settings in chosen)
            for name in self.names:
                ranked = self._ranked(name, workload)[: 2 if name in self.rivals else 1]
                entries |= dict.fromkeys((workload, standing.settings) for standing in ranked)
        self._phases = [len(entries) * self.effort.rounds * self.effort.round_seconds]
        for number in range(self.effort.rounds):
            for workload, settings in entries if number % 2 == 0 else reversed(entries):
                trial = self._record(workload, settings, self.effort.round_seconds)
                self._final[workload, settings].append(trial)

    def _ranked(self, name: str, workload: Workload) -> list[Standing]:
        def standings(trials: _Trials) -> list[Standing]:
            keys = [(of, settings) for of, settings in trials if of is workload and settings.backend == name]
            return [_standing(settings, trials[of, settings]) for of, settings in keys]

        return sorted(standings(self._final) or standings(self._short), key=lambda standing: -standing.bytes_per_s)

    def _choices(self, trials: _Trials) -> list[Choice]:
        standings = {(workload, settings): _standing(settings, done) for (workload, settings), done in trials.items()}
        choices = []
        for (workload, settings), mixed in standings.items():
            if workload is not Workload.MIXED or settings.backend in self.rivals:
                continue
            one_way = _as_tried(Workload.READ, settings)
            read, write = standings.get((Workload.READ, one_way)), standings.get((Workload.WRITE, one_way))
            if read is not None and write is not None:
                rate = step_bytes_per_s(read.bytes_per_s, mixed.bytes_per_s)
                of = {Workload.READ: read, Workload.WRITE: write, Workload.MIXED: mixed}
                choices.append(Choice(settings, rate, of))
        return choices


def prefer(choices: Sequence[Choice], usual: IoSettings) -> Choice:
    """Return the simplest cheap choice that measurements can't tell from the best: `usual` (the defaults) if it is one,
    else that with the fewest rings, then the least memory."""
    best = max(choices, key=lambda choice: choice.step_bytes_per_s)
    typical = statistics.median(choice.noise for choice in choices)  # few rounds may have a small range by chance

    def as_good(choice: Choice) -> bool:
        noise = math.hypot(max(choice.noise, typical), max(best.noise, typical))
        return choice.step_bytes_per_s >= best.step_bytes_per_s * min(_AS_GOOD, 1 - noise)

    good = [choice for choice in choices if as_good(choice)]
    lean = min(choice.cpu_seconds_per_gib for choice in good)
    good = [choice for choice in good if choice.cpu_seconds_per_gib <= _AS_LEAN * lean]
    return min(good, key=lambda choice: (choice.settings != usual, *_cost(choice.settings), -choice.step_bytes_per_s))


def _as_tried(workload: Workload, settings: IoSettings) -> IoSettings:
    """Return the settings with the default mix for a workload that only reads or only writes."""
    return settings if workload is Workload.MIXED else replace(settings, mix=MIX_MODES[0])


def _standing(settings: IoSettings, trials: list[Trial]) -> Standing:
    rates = [trial.bytes_per_s for trial in trials]
    cpu = statistics.median(trial.cpu_seconds_per_gib for trial in trials)
    return Standing(settings, statistics.median(rates), min(rates), max(rates), cpu, len(trials))


def _cost(settings: IoSettings) -> tuple[int, int, int]:
    return settings.rings, settings.in_flight_bytes, settings.queue_depth


def _next(values: tuple[int, ...], value: int, step: int) -> int:
    """Return the neighbour of `value`; at the end of the ladder the value itself."""
    return values[min(max(values.index(value) + step, 0), len(values) - 1)]
