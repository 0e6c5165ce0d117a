"""What the planner promises: budgets that add up, the published example, and strategies in their order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import BudgetError
from infinity.schedule import pinned
from infinity.schedule.estimate import (
    STRATEGIES,
    Strategy,
    Work,
    bytes_of_step,
    memory_of,
    pinned_bytes_min,
    pipeline_of,
)
from infinity.schedule.floor import DriveSpeed
from infinity.schedule.planner import Machine, busiest, fastest_that_fits, plan_step, plans_for
from infinity.schedule.simulator import Interval
from infinity.schedule.transformer import transformer_of

B = 10**9
GB = 1e9
ALL_NVME = STRATEGIES[-1]
NODE = Machine(
    name="a node",
    ranks_per_node=8,
    device_bytes=80 * B,
    flops_per_s=400e12,
    device_bytes_per_s=3000 * GB,
    link_bytes_per_s=50 * GB,
    host_bytes=2000 * B,
    host_bytes_per_s=400 * GB,
    drive_bytes=30_000 * B,
    drive=DriveSpeed(48 * GB, 26 * GB),
    node_link_bytes_per_s=400 * GB,
    network_bytes_per_s=300 * GB,
)
CPU = Machine(
    name="a CPU",
    device_is_host=True,
    flops_per_s=1e12,
    host_bytes=16 * B,
    host_bytes_per_s=40 * GB,
    drive_bytes=1000 * B,
    drive=DriveSpeed(5 * GB, 2 * GB),
)


def work_of(numel: int, **settings: int) -> Work:
    return Work(transformer_of(numel, seq=1024, vocab=32_000), **settings)


def test_seventy_billion_parameters_move_the_bytes_of_the_published_example() -> None:
    """1120 GB read and 980 GB written in a step of all ranks; 61 s where drives take turns, 37.7 s where they overlap fully."""
    work = work_of(70 * B, ranks=8)
    read, written = bytes_of_step(work, ALL_NVME)
    assert (8 * read, 8 * written) == (1120 * B, 980 * B)
    assert NODE.drive is not None
    assert NODE.drive.floor_seconds(8 * read, 8 * written) == pytest.approx(61.0, abs=0.05)
    at_once = replace(NODE.drive, together=(48 * GB, 26 * GB))
    assert at_once.floor_seconds(8 * read, 8 * written) == pytest.approx(37.7, abs=0.05)


def test_the_published_example_simulated() -> None:
    plan = plan_step(work_of(70 * B, ranks=8), NODE, ALL_NVME)
    assert plan.fits
    assert plan.simulated is not None
    assert 8 * plan.simulated.written_bytes == pytest.approx(980 * B, rel=1e-6)
    assert 8 * plan.simulated.read_bytes == pytest.approx(1120 * B, rel=0.03)  # what is kept staged is read once
    assert 60 < plan.floor_seconds <= plan.step_seconds < 1.05 * 61


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
def test_every_strategy_holds_each_state_once(strategy: Strategy) -> None:
    """16 bytes per parameter of masters, moments and gradients; copies only where something is gathered from them."""
    work = work_of(7 * B, ranks=8)
    memory = memory_of(work, strategy, pinned_bytes=1 << 30, device_is_host=False)
    shard = 7 * B // 8
    lines = [line for tier in (memory.device, memory.host, memory.nvme) for line in tier.items()]
    states = sum(
        nbytes for user, nbytes in lines if user.startswith(("optimizer state", "gradients")) and "group" not in user
    )
    assert states == 16 * shard
    tier_of = {"none": memory.device, "cpu": memory.host, "nvme": memory.nvme}
    assert tier_of[strategy.optimizer]["optimizer state: masters and moments"] == 12 * shard
    assert ("pinned pool" in memory.host) == strategy.uses_nvme
    assert memory.nvme_bytes == {"none": 0, "cpu": 0, "nvme": 14 * shard}[strategy.optimizer]


def test_from_fast_to_frugal_the_device_holds_less() -> None:
    work = work_of(7 * B, ranks=8)
    held = [
        memory_of(work, each, pinned_bytes=0, device_is_host=False).device_bytes for each in STRATEGIES if each.runs
    ]
    assert held == sorted(held, reverse=True)


def test_on_a_cpu_all_is_in_host_memory() -> None:
    for strategy in STRATEGIES:
        memory = memory_of(work_of(B), strategy, pinned_bytes=0, device_is_host=True)
        assert memory.device == {}


@given(numel=st.integers(10**7, 10**12), ranks=st.integers(1, 512), strategy=st.sampled_from(STRATEGIES))
def test_the_pipeline_fits_its_pool(numel: int, ranks: int, strategy: Strategy) -> None:
    work = work_of(numel, ranks=ranks)
    pipeline = pipeline_of(work, strategy)
    if not strategy.uses_nvme:
        assert pipeline.pinned_bytes == 0
        return
    assert pipeline.pinned_bytes >= pinned_bytes_min(work, strategy)
    per_element = 14 if strategy.optimizer == "nvme" else 2
    assert pinned.PIPELINE_DEPTH * pipeline.sub_group_numel * per_element + pinned.ACCESS_BYTES <= pipeline.pinned_bytes
    assert 0 <= pipeline.look_ahead_bytes < pipeline.pinned_bytes


@given(numel=st.integers(10**7, 10**10), pool=st.integers(2 << 30, 64 << 30))
def test_a_given_pool_is_what_is_planned_with(numel: int, pool: int) -> None:
    plan = plan_step(work_of(numel, ranks=8), NODE, ALL_NVME, pinned_bytes=pool)
    assert plan.pipeline.pinned_bytes == pool
    assert plan.simulated is not None
    assert plan.simulated.pool_bytes_peak <= pool


def test_a_pool_too_small_for_the_groups_is_a_reason_and_no_crash() -> None:
    plan = plan_step(work_of(7 * B), CPU, ALL_NVME, pinned_bytes=64 << 20)
    assert any("pinned pool" in reason for reason in plan.reasons)
    assert plan.simulated is None
    assert math.isinf(plan.step_seconds)
    assert plan.tokens_per_s == 0
    assert plan.limits() == []
    assert plan.drive_writes_per_day is None


@given(numel=st.integers(10**7, 10**11), samples=st.integers(1, 8), micro_batches=st.integers(1, 3))
def test_no_plan_beats_its_floor(numel: int, samples: int, micro_batches: int) -> None:
    work = work_of(numel, ranks=8, samples=samples, micro_batches=micro_batches)
    for plan in plans_for(work, NODE):
        assert plan.step_seconds >= plan.floor_seconds * (1 - 1e-6)


@pytest.mark.parametrize("faster", ["flops_per_s", "link_bytes_per_s", "host_bytes_per_s", "node_link_bytes_per_s"])
def test_a_faster_part_is_no_slower_step(faster: str) -> None:
    better = replace(NODE, **{faster: 4 * getattr(NODE, faster)})
    for before, after in zip(
        plans_for(work_of(70 * B, ranks=8), NODE), plans_for(work_of(70 * B, ranks=8), better), strict=True
    ):
        assert after.step_seconds <= before.step_seconds * 1.01


def test_the_fastest_that_fits_and_runs_is_chosen() -> None:
    chosen = fastest_that_fits(plans_for(work_of(70 * B, ranks=8), NODE))
    assert chosen is not None
    assert chosen.strategy.name == "stage 3, all on CPU"
    small_host = replace(NODE, host_bytes=500 * B)
    chosen = fastest_that_fits(plans_for(work_of(70 * B, ranks=8), small_host))
    assert chosen is not None
    assert chosen.strategy.uses_nvme
    assert fastest_that_fits(plans_for(work_of(1000 * B, ranks=8), NODE)) is None


def test_on_a_cpu_there_is_no_offload_to_the_cpu() -> None:
    names = [plan.strategy.name for plan in plans_for(work_of(B), CPU)]
    assert names == ["stage 2", "stage 3", "stage 3, optimizer on NVMe", "stage 3, all on NVMe"]


def test_what_does_not_fit_says_which_memory_and_by_how_much() -> None:
    plan = plan_step(work_of(7 * B), CPU, STRATEGIES[0])
    assert plan.reasons[0].startswith("host memory: ")
    assert "of the 14.16 GiB that a node can give" in plan.reasons[0]


def test_free_space_counts_and_capacity_wears() -> None:
    crowded = replace(CPU, drive_free_bytes=B)
    plan = plan_step(work_of(B), crowded, ALL_NVME)
    assert any(reason.startswith("NVMe: 13.04 GiB needed of the 953.67 MiB") for reason in plan.reasons)
    daily = plan.drive_writes_per_day
    assert daily is not None
    assert daily == pytest.approx(14 * B * 86_400 / plan.step_seconds / (1000 * B), rel=1e-3)


def test_without_a_drive_nvme_is_refused_and_the_rest_planned() -> None:
    machine = replace(NODE, drive=None, drive_bytes=0)
    plans = plans_for(work_of(7 * B, ranks=8), machine)
    assert [plan.fits for plan in plans if plan.strategy.uses_nvme] == [False, False]
    assert all(plan.simulated is not None for plan in plans if not plan.strategy.uses_nvme)
    with pytest.raises(BudgetError, match="a node has no drive"):
        machine.drive_of_rank()


def test_collectives_cost_what_links_and_network_take() -> None:
    assert CPU.gather_seconds(1e9) == 0
    assert NODE.gather_seconds(400e9) == pytest.approx(7 / 8)
    two = replace(NODE, nodes=2, collective_seconds=0.5)
    assert two.gather_seconds(300e9) == pytest.approx(0.5 + max(300 / 400 * 15 / 16, 0.5))


def test_finer_groups_hold_less_at_once() -> None:
    coarse, fine = (work_of(70 * B, ranks=8, groups_per_block=parts) for parts in (1, 4))
    assert sum(fine.group_numels) == sum(coarse.group_numels) == 70 * B
    of_coarse, of_fine = (memory_of(work, ALL_NVME, pinned_bytes=0, device_is_host=False) for work in (coarse, fine))
    assert of_fine.device["gathered groups"] < of_coarse.device["gathered groups"]


def test_more_micro_batches_read_copies_more_often_and_write_once() -> None:
    one, four = (bytes_of_step(work_of(8 * B, ranks=8, micro_batches=count), ALL_NVME) for count in (1, 4))
    assert four[1] == one[1] == 14 * B
    assert four[0] - one[0] == 3 * 4 * B


def test_busiest_counts_reads_and_writes_at_once_as_one_drive() -> None:
    timeline = [
        Interval("read", "", 0, 3),
        Interval("write", "", 1, 4),
        Interval("compute", "", 0, 3.5),
        Interval("to_host", "", 5, 50),
    ]
    assert busiest(timeline, 0, 5) == ("drive", 4)
    assert busiest(timeline, 0, 100) == ("to host", 45)
