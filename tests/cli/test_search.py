"""What the search promises, on drives made of arithmetic: it finds settings as good as the best there are, prefers the cheap
ones, moves reads and writes the way the drive likes it, and says how much is still to come."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.aio import IoSettings
from infinity.cli.sweep.search import (
    BLOCKS,
    DEPTHS,
    QUICK,
    RINGS,
    THOROUGH,
    Choice,
    Effort,
    Search,
    Standing,
    prefer,
    step_bytes_per_s,
)
from infinity.drive.measure import Trial, Workload
from infinity.units import KIB, MIB

POOL_BYTES = 512 * MIB
MIXES = ("interleaved", "bursts")


class ModelDrive:
    """Rates follow Little's law until the drive is full; each block costs a little, and some settings are worse."""

    def __init__(
        self,
        *,
        peak: float = 5e9,
        latency_seconds: float = 0.002,
        block_seconds: float = 1e-5,
        ring_share: float = 1.0,
        bursts_gain: float = 1.0,
        backends: dict[str, float] | None = None,
        noise: float = 0.0,
    ) -> None:
        self.peak, self.latency_seconds, self.block_seconds = peak, latency_seconds, block_seconds
        self.ring_share, self.bursts_gain, self.noise = ring_share, bursts_gain, noise
        self.backends = backends or {"io_uring": 1.0, "threads": 0.7}
        self.random = random.Random(7)
        self.seconds = 0.0
        self.asked: list[tuple[Workload, IoSettings]] = []

    def rate(self, workload: Workload, settings: IoSettings) -> float:
        peak = self.peak * {"read": 1.0, "write": 0.8, "mixed": 0.85}[workload.value] * self.backends[settings.backend]
        if workload is Workload.MIXED and settings.mix == "bursts":
            peak *= self.bursts_gain
        of_ring = settings.block_bytes / (settings.block_bytes / (self.ring_share * peak) + self.block_seconds)
        by_latency = settings.in_flight_bytes / (self.latency_seconds + settings.block_bytes / peak)
        return min(peak, settings.rings * of_ring, by_latency)

    def measure(self, workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        assert fits(settings)
        self.seconds += seconds
        self.asked.append((workload, settings))
        rate = self.rate(workload, settings) * (1 + self.random.uniform(-self.noise, self.noise))
        return Trial(workload, settings, int(rate * seconds), seconds, cpu_seconds=0.01 * rate * seconds / (1 << 30))

    def step_rate(self, settings: IoSettings) -> float:
        return step_bytes_per_s(self.rate(Workload.READ, settings), self.rate(Workload.MIXED, settings))

    def best_step_rate(self) -> float:
        everything = itertools.product(self.backends, BLOCKS, DEPTHS, RINGS, MIXES)
        return max(self.step_rate(settings) for each in everything if fits(settings := IoSettings(*each)))


def fits(settings: IoSettings) -> bool:
    return settings.in_flight_bytes <= POOL_BYTES // 2


def search_on(drive: ModelDrive, effort: Effort, **options: object) -> Search:
    arguments = {"backends": list(drive.backends), "fits": fits} | options
    return Search(measure=drive.measure, effort=effort, **arguments)  # type: ignore[arg-type]


DRIVES: dict[str, Callable[[], ModelDrive]] = {
    "fast and far away": lambda: ModelDrive(peak=12e9, latency_seconds=0.01),
    "near": lambda: ModelDrive(latency_seconds=0.0001),
    "dear blocks": lambda: ModelDrive(block_seconds=2e-4),
    "needs rings": lambda: ModelDrive(ring_share=0.3),
    "slow": lambda: ModelDrive(peak=2e8, latency_seconds=0.005),
    "likes bursts": lambda: ModelDrive(bursts_gain=1.3),
    "likes threads": lambda: ModelDrive(backends={"io_uring": 0.8, "linux_aio": 0.9, "threads": 1.0}),
}


@pytest.mark.parametrize("effort", [QUICK, THOROUGH], ids=["quick", "thorough"])
@pytest.mark.parametrize("name", DRIVES)
def test_finds_settings_near_the_best_there_are(name: str, effort: Effort) -> None:
    drive = DRIVES[name]()
    search = search_on(drive, effort)
    search.run()
    choice = search.recommended()
    assert choice is not None
    assert drive.step_rate(choice.settings) >= 0.95 * drive.best_step_rate()


@pytest.mark.parametrize("name", DRIVES)
def test_noise_of_some_percent_costs_no_more_than_that(name: str) -> None:
    drive = DRIVES[name]()
    drive.noise = 0.05
    search = search_on(drive, THOROUGH)
    search.run()
    choice = search.recommended()
    assert choice is not None
    assert drive.step_rate(choice.settings) >= 0.88 * drive.best_step_rate()


def test_takes_the_way_of_mixing_and_the_backend_that_the_drive_likes() -> None:
    for name, mix, backend in (("likes bursts", "bursts", "io_uring"), ("likes threads", "interleaved", "threads")):
        search = search_on(DRIVES[name](), QUICK)
        search.run()
        choice = search.recommended()
        assert choice is not None
        assert (choice.settings.mix, choice.settings.backend) == (mix, backend)


def test_prefers_few_in_flight_where_more_gains_nothing() -> None:
    drive = ModelDrive(latency_seconds=0.0001)
    search = search_on(drive, THOROUGH)
    search.run()
    choice = search.recommended()
    assert choice is not None
    assert choice.settings.rings == 1
    assert choice.settings.in_flight_bytes <= 32 * MIB


def test_defaults_are_measured_in_the_final_rounds() -> None:
    search = search_on(ModelDrive(latency_seconds=0.02), QUICK)
    search.run()
    usual, chosen = search.choice_of(IoSettings("io_uring")), search.recommended()
    assert usual is not None
    assert chosen is not None
    assert all(standing.rounds == QUICK.rounds for standing in usual.of.values())
    assert chosen.step_bytes_per_s > usual.step_bytes_per_s


def test_what_is_reported_comes_from_the_final_rounds_alone() -> None:
    search = search_on(ModelDrive(noise=0.02), QUICK)
    search.run()
    for name, workload in itertools.product(search.names, Workload):
        standing = search.best(name, workload)
        assert standing is not None
        assert standing.rounds == QUICK.rounds
        assert standing.bytes_per_s_min < standing.bytes_per_s < standing.bytes_per_s_max
        assert standing.settings.backend == name


def test_final_rounds_take_turns() -> None:
    drive = ModelDrive()
    search = search_on(drive, replace(QUICK, rounds=2))
    search.run()
    finals = [(trial.workload, trial.settings) for trial in search.trials if trial.seconds == QUICK.round_seconds]
    half = len(finals) // 2
    assert finals[:half] == list(reversed(finals[half:]))
    assert len(set(finals)) == half


def test_rival_is_searched_alike_and_never_recommended() -> None:
    drive = ModelDrive(backends={"io_uring": 0.5, "fio": 1.0})
    search = search_on(drive, QUICK, backends=["io_uring"], rivals=["fio"])
    search.run()
    choice, rival, ours = search.recommended(), search.best("fio", Workload.READ), search.fastest(Workload.READ)
    assert choice is not None
    assert rival is not None
    assert ours is not None
    assert choice.settings.backend == ours.settings.backend == "io_uring"
    assert rival.bytes_per_s > 1.8 * ours.bytes_per_s
    assert all(settings.mix == MIXES[0] for _, settings in drive.asked if settings.backend == "fio")


def test_one_way_loads_are_not_measured_once_per_mix() -> None:
    drive = ModelDrive(bursts_gain=1.2)
    search_on(drive, THOROUGH).run()
    assert all(settings.mix == MIXES[0] for workload, settings in drive.asked if workload is not Workload.MIXED)


def test_ended_early_it_knows_what_it_has_seen() -> None:
    drive = ModelDrive()

    def measure(workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        if len(drive.asked) == 5:
            raise KeyboardInterrupt
        return drive.measure(workload, settings, seconds)

    search = Search(measure=measure, backends=["io_uring"], fits=fits, effort=THOROUGH)
    assert search.best("io_uring", Workload.READ) is None
    with pytest.raises(KeyboardInterrupt):
        search.run()
    best = search.best("io_uring", Workload.READ)
    assert best is not None
    assert best.bytes_per_s == max(trial.bytes_per_s for trial in search.trials)
    assert search.recommended() is None
    assert search.fastest(Workload.MIXED) is None


@pytest.mark.parametrize("effort", [QUICK, THOROUGH], ids=["quick", "thorough"])
def test_time_left_falls_to_nothing_and_was_never_too_little(effort: Effort) -> None:
    drive = ModelDrive()
    left: list[tuple[float, float]] = []

    def measure(workload: Workload, settings: IoSettings, seconds: float) -> Trial:
        left.append((drive.seconds, search.remaining_seconds))
        return drive.measure(workload, settings, seconds)

    search = Search(measure=measure, backends=["io_uring", "threads"], fits=fits, effort=effort, rivals=[])
    assert search.remaining_seconds == effort.seconds(backends=2, rivals=0)
    search.run()
    assert search.remaining_seconds == pytest.approx(0, abs=1e-6)
    assert all(done + promised >= drive.seconds - 1e-6 for done, promised in left)
    assert [promised for _, promised in left] == sorted((promised for _, promised in left), reverse=True)


def test_effort_keeps_its_promise_of_time() -> None:
    """With what starting and ending a trial takes (an eighth of a second), three backends, and the file to write."""
    for effort, seconds_max in ((QUICK, 60), (THOROUGH, 360)):
        drive = ModelDrive(backends={"io_uring": 1.0, "linux_aio": 0.9, "threads": 0.8}, noise=0.03)
        search = search_on(drive, effort)
        search.run()
        assert drive.seconds * 1.2 + len(drive.asked) * 0.125 < seconds_max - 8


def test_nothing_that_does_not_fit_is_asked_for() -> None:
    drive = ModelDrive(latency_seconds=0.05)
    limit = 4 * MIB
    search = search_on(drive, THOROUGH, fits=lambda settings: settings.in_flight_bytes <= limit)
    search.run()
    assert max(settings.in_flight_bytes for _, settings in drive.asked) == limit
    assert search.recommended() is not None


# The sums


def test_step_rate_counts_fourteen_read_and_twelve_written() -> None:
    assert step_bytes_per_s(1.0, 1.0) == pytest.approx(1.0)
    # On a drive that reads and writes in turns, the mixed rate is the harmonic mean of the two.
    read, write = 3.0, 2.0
    in_turns = 2 / (1 / read + 1 / write)
    assert 26 / step_bytes_per_s(read, in_turns) == pytest.approx(14 / read + 12 / write)


USUAL = IoSettings("io_uring")


def choice(rate: float, *, depth: int = 32, rings: int = 1, cpu: float = 0.01, spread: float = 0.0) -> Choice:
    settings = IoSettings("io_uring", MIB, depth, rings)
    standing = Standing(settings, rate, rate * (1 - spread / 2), rate * (1 + spread / 2), cpu, 3)
    return Choice(settings, rate, dict.fromkeys(Workload, standing))


def test_as_good_is_two_percent_and_then_the_cheaper_one() -> None:
    dear, cheap, slow = choice(100, depth=64, rings=4), choice(98.5, depth=16), choice(97, depth=1)
    assert prefer([dear, cheap, slow], USUAL) is cheap
    assert prefer([dear, slow], USUAL) is dear


def test_cpu_time_counts_before_memory() -> None:
    hungry, lean = choice(100, depth=8, cpu=0.03), choice(99, depth=64, cpu=0.01)
    assert prefer([hungry, lean], USUAL) is lean


def test_a_gain_within_the_noise_is_none() -> None:
    usual, lucky = choice(100, spread=0.4), choice(115, depth=8, rings=4, spread=0.4)
    assert (usual.settings, lucky.settings.rings) == (USUAL, 4)
    assert prefer([usual, lucky], USUAL) is usual
    assert prefer([choice(100, spread=0.05), choice(125, rings=4, spread=0.05)], USUAL).step_bytes_per_s == 125


def test_a_busy_machine_changes_no_recommendation_and_is_said() -> None:
    """The drive gives now all, now less of what it can, as when something else uses it: the defaults are as good as any."""
    recommended = set()
    for seed in range(8):
        drive = ModelDrive(latency_seconds=0.0001, block_seconds=0.0, noise=0.35)
        drive.random.seed(seed)
        search = search_on(drive, QUICK)
        search.run()
        choice = search.recommended()
        assert choice is not None and search.disturbed
        recommended.add(choice.settings)
    assert recommended == {USUAL}
    quiet = search_on(ModelDrive(noise=0.02), QUICK)
    quiet.run()
    assert not quiet.disturbed


@given(
    st.lists(st.tuples(st.floats(1, 100), st.sampled_from(DEPTHS), st.sampled_from(RINGS), st.floats(0, 1)), min_size=1)
)
def test_preferred_is_never_clearly_worse(found: list[tuple[float, int, int, float]]) -> None:
    choices = [choice(rate, depth=depth, rings=rings, cpu=cpu) for rate, depth, rings, cpu in found]
    assert prefer(choices, USUAL).step_bytes_per_s >= 0.98 * max(rate for rate, *_ in found)


def test_ladders_are_those_of_the_documentation() -> None:
    assert (BLOCKS[0], BLOCKS[-1], DEPTHS[0], DEPTHS[-1], RINGS) == (64 * KIB, 16 * MIB, 1, 256, (1, 2, 3, 4))
