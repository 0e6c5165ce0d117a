"""Times the small operations that every transfer needs, with pytest-benchmark:

    python -m pytest bench/test_parts.py

Not part of the test suite: results depend on the machine, so nothing here fails for being slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from infinity.aio import IoEngine, PinnedPool, Priority, Request
from infinity.aio.pool import FreeRanges
from infinity.plan.machine import DriveSpeed
from infinity.plan.simulator import simulate
from infinity.plan.step import Pause, Step, SubGroup, Use
from infinity.schedule.readahead import plan_look_ahead
from infinity.store.arena import Arena
from infinity.store.layout import Shard, plan_layout
from infinity.store.run_folder import RunFolder
from infinity.units import KIB, MIB

BATCH = 64
PIECE_BYTES = 4 * KIB
GROUPS = 10_000


class Machine:
    """A warm file of a few MiB, an engine and a lease."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.pool = PinnedPool(16 * MIB)
        self.engine = IoEngine(self.pool)
        self.arena = Arena(self.folder, self.engine, name="parts.arena")
        self.arena.reserve([8 * MIB], "the file")
        self.lease = self.pool.lease(8 * MIB)
        self.move([Request("write", self.arena.file, 0, self.lease, 0, 8 * MIB, Priority.DEMAND)])

    def move(self, requests: list[Request]) -> None:
        self.engine.wait(self.engine.start(requests))

    def close(self) -> None:
        self.engine.close()
        self.arena.close()
        self.folder.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def test_lease_and_give_back(benchmark: BenchmarkFixture) -> None:
    pool = PinnedPool(64 * MIB)
    leases = [pool.lease(MIB) for _ in range(32)]  # fragment the pool, as in use
    for lease in leases[::2]:
        lease.give_back()
    benchmark(lambda: pool.lease(2 * MIB).give_back())


def test_allocation_in_a_fragmented_pool(benchmark: BenchmarkFixture) -> None:
    ranges = FreeRanges(1 << 30)
    taken = [ranges.take(64 * KIB) for _ in range(2048)]
    for offset in taken[::2]:
        assert offset is not None
        ranges.put(offset, 64 * KIB)

    def take_and_put() -> None:
        offset = ranges.take(128 * KIB)
        assert offset is not None
        ranges.put(offset, 128 * KIB)

    benchmark(take_and_put)


def test_submit_and_reap_a_batch(benchmark: BenchmarkFixture, machine: Machine) -> None:
    requests = [
        Request(
            "read", machine.arena.file, i * PIECE_BYTES, machine.lease, i * PIECE_BYTES, PIECE_BYTES, Priority.DEMAND
        )
        for i in range(BATCH)
    ]
    benchmark(lambda: machine.move(requests))


def test_extent_allocation(benchmark: BenchmarkFixture, machine: Machine) -> None:
    benchmark(lambda: machine.arena.reserve([PIECE_BYTES] * 16, "extents"))


def test_planning_the_layout_of_a_large_model(benchmark: BenchmarkFixture) -> None:
    numbers = itertools.cycle([12_582_912, 4_194_304, 4096, 16_777_216])
    shards = [Shard(f"p{i}", i // 4, next(numbers)) for i in range(400)]
    benchmark(lambda: plan_layout(shards, groups=100, sub_group_numel_max=4 << 20, compute_itemsize=2))


def test_planning_the_reads_of_a_step_of_many_groups(benchmark: BenchmarkFixture) -> None:
    order = [*range(GROUPS), *reversed(range(GROUPS))]
    benchmark(lambda: plan_look_ahead(order, [MIB] * GROUPS, 5 * MIB))


def test_simulating_a_step_of_many_groups(benchmark: BenchmarkFixture) -> None:
    order = [*range(GROUPS), *reversed(range(GROUPS))]
    uses = [Use(group, MIB, MIB, 1e-4, 1e-3, 1e-4, MIB, live_bytes=MIB) for group in order]
    program = [*uses, Pause(), *[SubGroup(6 * MIB, 7 * MIB, 7 * MIB, 1e-3)] * GROUPS]
    step = Step(program=program, group_bytes=[MIB] * GROUPS, look_ahead_bytes=5 * MIB, pool_bytes=40 * MIB)
    benchmark.pedantic(lambda: simulate(step, DriveSpeed(5e9, 2e9), 25e9), rounds=3)
