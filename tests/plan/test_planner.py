"""What the planner promises: budgets that add up, the published example, and strategies in their order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinity.errors import BudgetError
from infinity.plan.estimate import (
    bytes_of_step,
    host_cache_of,
    memory_of,
    pinned_bytes_min,
    pipeline_of,
    updated_in_backward,
)
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.planner import busiest, fastest_that_fits, plan_step, plans_for
from infinity.plan.program import step_of, update_bytes
from infinity.plan.simulator import simulate
from infinity.plan.strategy import STRATEGIES, Strategy
from infinity.plan.transformer import transformer_of
from infinity.plan.work import Work
from infinity.schedule import pinned
from infinity.schedule.scheme import MOMENT_BYTES_OF, Scheme
from infinity.schedule.timeline import Interval
from infinity.units import MIB

B = 10**9
GB = 1e9
ALL_NVME = STRATEGIES[-1]
PLAIN = Scheme("full", "step")
"""That of the published example."""
SCHEMES = [Scheme(master, update) for master in ("split", "full") for update in ("step", "forward", "backward")]
SPECULATIVE = [replace(scheme, speculative=True) for scheme in SCHEMES if scheme.update == "backward"]
UNBOUNDED = 1 << 60
"""Of gradients that wait: with any bound all groups are updated in the backward, and none before its next forward."""

SECOND_SLOT = "second slot of what the backward updates"
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


def work_of(numel: int, **settings: Any) -> Work:
    return Work(transformer_of(numel, seq=1024, vocab=32_000), **settings)


def test_seventy_billion_parameters_move_the_bytes_of_the_published_example() -> None:
    """1120 GB read and 980 GB written in a step of all ranks; 61 s where drives take turns, 37.7 s where they overlap fully."""
    work = work_of(70 * B, ranks=8, scheme=PLAIN)
    read, written = bytes_of_step(work, ALL_NVME)
    assert (8 * read, 8 * written) == (1120 * B, 980 * B)
    assert NODE.drive is not None
    assert NODE.drive.lower_bound_seconds(8 * read, 8 * written) == pytest.approx(61.0, abs=0.05)
    at_once = replace(NODE.drive, mixed=(48 * GB, 26 * GB))
    assert at_once.lower_bound_seconds(8 * read, 8 * written) == pytest.approx(37.7, abs=0.05)


def pool_in_which_nothing_stays(work: Work) -> int:
    return pipeline_of(work, ALL_NVME, cache=None).pinned_bytes


@pytest.mark.parametrize(
    ("scheme", "read", "written"),
    [
        (Scheme("split", "step"), 16, 12),
        (Scheme("split", "forward"), 14, 12),
        (Scheme("split", "backward"), 14, 12),
        (Scheme("full", "forward"), 14, 14),
        (Scheme("full", "backward"), 16, 14),
        (Scheme("split", "backward", speculative=True), 14, 12),
        (Scheme("split", "backward", moment_bytes=2), 10, 8),
        (Scheme("split", "backward", moment_bytes=MOMENT_BYTES_OF["8bit"]), 8.03125, 6.03125),
        (Scheme("full", "backward", speculative=True), 16, 14),
    ],
)
def test_what_is_simulated_is_the_sum_of_the_scheme(scheme: Scheme, read: float, written: float) -> None:
    """But for what stays gathered, the root, and staged, a few groups: read once from forward to backward."""
    work = work_of(70 * B, ranks=8, scheme=scheme, gradient_bytes_max=UNBOUNDED)
    assert bytes_of_step(work, ALL_NVME) == (read * work.shard_numel, written * work.shard_numel)
    pool = pool_in_which_nothing_stays(work)
    plan = plan_step(work, NODE, ALL_NVME, pinned_bytes=pool, cache_bytes=0)
    simulated = plan.simulated
    assert simulated is not None and not plan.pipeline.staying
    assert simulated.written_bytes == pytest.approx(written * work.shard_numel, rel=1e-6)
    assert (read - 0.25) * work.shard_numel < simulated.read_bytes <= read * work.shard_numel * (1 + 1e-6)


@pytest.mark.parametrize("scheme", [*SCHEMES, *SPECULATIVE], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_stays_staged_is_not_read(scheme: Scheme, micro_batches: int) -> None:
    """Neither for a gather nor for an update, whenever that is."""
    work = work_of(8 * B, ranks=8, scheme=scheme, micro_batches=micro_batches, gradient_bytes_max=UNBOUNDED)
    root, *blocks = work.group_shards
    pool = pool_in_which_nothing_stays(work) + 2 * work.shard_numel + MIB
    plan = plan_step(work, NODE, ALL_NVME, pinned_bytes=pool, cache_bytes=0)
    assert plan.pipeline.staying >= {*range(1, len(blocks) + 1)}
    state = 10 if scheme.master_weights == "split" else 12  # without compute parameters
    of_root = 2 * (micro_batches + 1) * root  # gathered once by each, and updated
    assert plan.simulated is not None
    assert 0 <= plan.simulated.read_bytes + 1e4 - state * work.shard_numel <= of_root + 2e4
    assert plan.simulated.written_bytes == pytest.approx(plan.plain_bytes[1], rel=1e-6)


def test_a_pool_grows_for_what_stays_within_a_quarter_of_the_memory() -> None:
    work = work_of(8 * B, ranks=8)
    pool, gradients = pool_in_which_nothing_stays(work), work.gradient_itemsize * work.shard_numel
    plans = [
        plan_step(work, replace(NODE, host_bytes=8 * 4 * (pool + gradients + more)), ALL_NVME, cache_bytes=0)
        for more in (0, work.shard_numel, 100 * work.shard_numel)
    ]
    none, some, most = (len(plan.pipeline.staying) for plan in plans)
    assert none == 0 < some < most == len(work.group_shards)
    for plan in plans:
        assert 0 <= plan.pipeline.pinned_bytes - plan.pipeline.staying_bytes - pool < MIB + 2 * max(work.group_shards)


@given(scheme=st.sampled_from([*SCHEMES, *SPECULATIVE]), micro_batches=st.integers(1, 3), share=st.floats(0, 1.2))
@example(scheme=SPECULATIVE[0], micro_batches=1, share=0.0078125)
@example(scheme=SPECULATIVE[1], micro_batches=1, share=0.125)
def test_what_is_kept_is_not_moved(scheme: Scheme, micro_batches: int, share: float) -> None:
    """Written is what isn't kept, whole; and a step never reads more for keeping more."""
    count = 1 if scheme.update == "backward" and not scheme.speculative else micro_batches
    work = work_of(8 * B, ranks=8, scheme=scheme, micro_batches=count)
    none, some = (
        plan_step(work, NODE, ALL_NVME, cache_bytes=int(part * 12 * work.shard_numel)) for part in (0.0, share)
    )
    assert none.simulated is not None and some.simulated is not None
    stored = sum(ALL_NVME.stored_bytes(scheme)) * work.shard_numel
    assert some.cache.nbytes <= share * 12 * work.shard_numel
    assert some.simulated.written_bytes == pytest.approx(stored - some.cache.nbytes, rel=1e-6, abs=1e4)
    assert some.simulated.read_bytes <= none.simulated.read_bytes * (1 + 1e-6)
    on_nvme, less = (sum(n for user, n in plan.memory.nvme.items() if user != SECOND_SLOT) for plan in (none, some))
    assert less == pytest.approx(on_nvme - some.cache.nbytes, rel=1e-6, abs=1e4)
    assert some.memory.nvme.get(SECOND_SLOT, 0) <= less + 1e4
    if share >= 14 / 12 * (1 + 1e-6):
        assert some.simulated.read_bytes == 0


def test_what_is_left_of_host_memory_becomes_the_cache_and_its_line_is_in_the_sum() -> None:
    host = replace(NODE, host_bytes=600 * B)
    plan = plan_step(work_of(70 * B, ranks=8), host, ALL_NVME)
    without = plan_step(work_of(70 * B, ranks=8), host, ALL_NVME, cache_bytes=0)
    assert plan.memory.host["host cache, pinned"] == plan.cache.nbytes > 0
    assert plan.memory.host_bytes == without.memory.host_bytes + plan.cache.nbytes
    assert 0 <= 0.95 * 600 * B - 8 * plan.memory.host_bytes < 1000
    assert plan.fits
    assert plan.step_seconds < without.step_seconds


def test_no_more_is_kept_than_there_is() -> None:
    work = work_of(B, ranks=8)
    cache = host_cache_of(work, ALL_NVME, 10**15)
    assert cache.nbytes == 12 * sum(work.group_shards)
    assert host_cache_of(work, STRATEGIES[0], 10**15).nbytes == 0


def test_updates_beside_compute_are_a_faster_step_than_after_it() -> None:
    work = {
        update: work_of(70 * B, ranks=8, samples=8, scheme=Scheme("split", update)) for update in ("step", "forward")
    }
    after, overlapped = (plan_step(work[update], NODE, ALL_NVME, cache_bytes=0) for update in ("step", "forward"))
    assert overlapped.step_seconds < after.step_seconds
    assert overlapped.lower_bound_seconds <= after.lower_bound_seconds * (1 + 1e-6)  # the same where all of it stays


@pytest.mark.parametrize(
    ("parameters", "optimizer", "scheme", "nbytes"),
    [
        ("nvme", "nvme", Scheme("split"), 4 + 2 * (2 + 2) + 2 * 8),  # gradient, both halves of the master, moments
        ("nvme", "nvme", Scheme("full"), 4 + 2 * 4 + 2 * 8 + 2),  # ... and a copy in addition to the master
        ("none", "nvme", Scheme("split"), 4 + 2 * 4 + 2 * 8 + 2),  # copies stay: masters rest in full
        ("cpu", "cpu", Scheme("split"), 4 + 2 * (2 + 2) + 2 * 8),  # in host memory as on NVMe
        ("none", "cpu", Scheme("full"), 4 + 2 * 4 + 2 * 8 + 2),
        ("none", "none", Scheme("split"), 4 + 2 * 4 + 2 * 8),
    ],
)
def test_memory_traffic_of_an_update(parameters: str, optimizer: str, scheme: Scheme, nbytes: int) -> None:
    (strategy,) = [s for s in STRATEGIES if (s.stage, s.parameters, s.optimizer) == (3, parameters, optimizer)]
    assert update_bytes(strategy, scheme) == nbytes


def test_updates_in_the_backward_need_no_memory_for_gradients() -> None:
    work = work_of(70 * B, ranks=8, clipping=False, scheme=Scheme("split", "backward"), gradient_bytes_max=UNBOUNDED)
    memory = memory_of(work, ALL_NVME, pinned_bytes=0, device_is_host=False)
    assert "gradients" not in memory.host
    assert memory.host["gradients being applied"] == 2 * 4 * max(work.group_shards)
    on_cpu = next(each for each in STRATEGIES if each.optimizer == "cpu")
    assert "gradients" not in memory_of(work, on_cpu, pinned_bytes=0, device_is_host=False).host
    clipped = replace(work, clipping=True, scheme=Scheme("split", "backward", speculative=True))
    assert "gradients" in memory_of(clipped, on_cpu, pinned_bytes=0, device_is_host=False).host


def test_updates_ahead_need_the_memory_for_gradients_and_a_second_slot() -> None:
    work = work_of(70 * B, ranks=8, scheme=SPECULATIVE[0], gradient_bytes_max=UNBOUNDED)
    forward, ahead = (
        memory_of(each, ALL_NVME, pinned_bytes=0, device_is_host=False)
        for each in (replace(work, scheme=Scheme()), work)
    )
    assert ahead.host == forward.host
    assert ahead.nvme == {**forward.nvme, SECOND_SLOT: pytest.approx(forward.nvme_bytes, rel=1e-6)}
    keeps = next(each for each in STRATEGIES if each.keeps_compute)
    assert SECOND_SLOT not in memory_of(work, keeps, pinned_bytes=0, device_is_host=False).nvme
    durable = memory_of(replace(work, durable=True), ALL_NVME, pinned_bytes=0, device_is_host=False)
    assert SECOND_SLOT not in durable.nvme and durable.nvme_bytes > ahead.nvme_bytes


IN_BACKWARD = [scheme for scheme in (*SCHEMES, *SPECULATIVE) if scheme.update == "backward"]


@pytest.mark.parametrize("scheme", IN_BACKWARD, ids=str)
def test_a_fourth_is_updated_before_its_next_forward(scheme: Scheme) -> None:
    """It moves what "forward" says, has one slot, and its gradients wait: every fourth group, or a fourth of each."""
    work = work_of(70 * B, ranks=8, scheme=scheme)
    whole = work.shard_numel
    left = whole / 4 if scheme.speculative else sum(work.group_shards[3::4])  # the root is number 0
    assert sum(updated_in_backward(work, ALL_NVME)) == pytest.approx(whole - left, rel=1e-6)
    plan = plan_step(work, NODE, ALL_NVME, cache_bytes=0)
    second = scheme.speculative * sum(ALL_NVME.stored_bytes(scheme)) * (whole - left)
    assert plan.memory.nvme.get(SECOND_SLOT, 0) == pytest.approx(second, rel=1e-6)
    assert plan.memory.host["gradients"] == pytest.approx(4 * (whole if scheme.speculative else left), rel=1e-6)
    spared = 2 * left if scheme.master_weights == "full" else 0
    some, none = (bytes_of_step(replace(work, gradient_bytes_max=most), ALL_NVME) for most in (None, UNBOUNDED))
    assert some == pytest.approx((none[0] - spared, none[1]), rel=1e-6)
    assert plan.simulated is not None and plan.simulated.written_bytes == pytest.approx(some[1], rel=1e-6)


@pytest.mark.parametrize("scheme", [Scheme("split", "backward"), SPECULATIVE[0]], ids=str)
def test_where_compute_takes_as_long_as_the_drive_no_pass_waits_for_it(scheme: Scheme) -> None:
    work = work_of(8 * B, ranks=8, scheme=scheme, clipping=scheme.speculative, checkpointing=False)
    drive = NODE.drive_of_rank().lower_bound_seconds(*bytes_of_step(work, ALL_NVME))
    even = replace(NODE, flops_per_s=work.flops / drive)
    some, none = (
        plan_step(replace(work, gradient_bytes_max=most), even, ALL_NVME, cache_bytes=0).step_seconds
        for most in (None, UNBOUNDED)
    )
    assert some < 0.9 * none and some < 1.25 * drive, (some, none, drive)


def test_where_a_part_of_the_gradients_spills_no_pass_waits_for_the_drive() -> None:
    """An even share of the groups is updated before its next forward, as without a bound a part of each."""
    work = work_of(8 * B, ranks=8, scheme=SPECULATIVE[0], checkpointing=False)
    work = replace(work, gradient_bytes_max=work.gradient_itemsize * work.shard_numel * 3 // 4)
    drive = NODE.drive_of_rank().lower_bound_seconds(*bytes_of_step(work, ALL_NVME))
    even = replace(NODE, flops_per_s=work.flops / drive)
    assert plan_step(work, even, ALL_NVME, cache_bytes=0).step_seconds < 1.2 * drive


def test_a_cache_that_leaves_all_updates_to_the_forward_is_not_taken() -> None:
    """It would move fewer bytes in a longer step, as what it holds is not updated speculatively."""
    work = work_of(8 * B, ranks=8, scheme=SPECULATIVE[0], unasked=True)
    drive = NODE.drive_of_rank().lower_bound_seconds(*bytes_of_step(work, ALL_NVME))
    even = replace(NODE, flops_per_s=work.flops / drive, host_bytes=8 * 14 * B)  # of which 4 per parameter are left
    cached, best = (plan_step(work, even, ALL_NVME, cache_bytes=nbytes) for nbytes in (4 * B, None))
    assert cached.simulated is not None and best.simulated is not None
    assert best.cache.nbytes == 0 and best.simulated.written_bytes > cached.simulated.written_bytes
    assert best.step_seconds < 0.9 * cached.step_seconds


@given(scheme=st.sampled_from(SPECULATIVE), micro_batches=st.integers(1, 3), share=st.floats(0, 1.2))
def test_a_discarded_step_reads_and_writes_the_state_of_what_was_updated_ahead_again(
    scheme: Scheme, micro_batches: int, share: float
) -> None:
    work = work_of(8 * B, ranks=8, scheme=scheme, micro_batches=micro_batches, gradient_bytes_max=UNBOUNDED)
    plan = plan_step(work, NODE, ALL_NVME, cache_bytes=int(share * 12 * work.shard_numel))
    discarding = simulate(step_of(work, NODE, ALL_NVME, plan.pipeline, plan.cache, discards=True), NODE.drive_of_rank())
    read, written = plan.discarded_bytes
    assert plan.simulated is not None
    assert discarding.written_bytes == pytest.approx(plan.simulated.written_bytes + written, rel=1e-6, abs=1e4)
    staged = 0.5 * micro_batches * work.shard_numel  # what the pool keeps from pass to pass differs
    assert discarding.read_bytes == pytest.approx(plan.simulated.read_bytes + read, rel=1e-6, abs=staged + 1e4)
    assert plan.simulate(discards=True).seconds >= plan.step_seconds * (1 - 1e-6)
    if not share:
        stored = sum(ALL_NVME.stored_bytes(scheme))
        per_element = 12 if plan.pipeline.staying else 10  # else the next forward spares the read of a gather
        assert [read, written] == pytest.approx([per_element * work.shard_numel, stored * work.shard_numel], rel=1e-6)


@given(
    update=st.sampled_from(["step", "forward", "backward"]),
    ranks=st.sampled_from([1, 8]),
    micro_batches=st.integers(1, 3),
    share=st.floats(0, 1.2),
    machine=st.sampled_from([NODE, CPU]),
)
def test_gradients_that_do_not_fit_are_written_and_read_once_a_pass(
    update: Any, ranks: int, micro_batches: int, share: float, machine: Machine
) -> None:
    """They leave host memory for NVMe, whole groups, and the step moves just their bytes more."""
    settings: dict[str, Any] = {"ranks": ranks, "micro_batches": micro_batches}
    settings["scheme"] = Scheme("split", update, speculative=update == "backward")
    free = work_of(B, **settings)
    whole = free.gradient_itemsize * sum(free.group_shards)
    assert free.gradient_itemsize == (2 if ranks == micro_batches == 1 else 4)
    bound = work_of(B, gradient_bytes_max=int(share * whole), **settings)
    node = replace(machine, ranks_per_node=ranks)
    roomy, tight = (plan_step(work, node, ALL_NVME, cache_bytes=0) for work in (free, bound))
    spilled = sum(bound.gradients_that_spill(ALL_NVME))
    assert tight.memory.host["gradients"] == pytest.approx(whole - spilled, abs=4 * ranks)
    assert whole - spilled <= share * whole
    assert tight.memory.nvme.get("gradients", 0) == spilled
    assert [b - a for a, b in zip(roomy.plain_bytes, tight.plain_bytes, strict=True)] == [spilled * micro_batches] * 2
    assert roomy.simulated is not None and tight.simulated is not None
    more = tight.simulated.written_bytes - roomy.simulated.written_bytes
    assert more == pytest.approx(spilled * micro_batches, rel=1e-6, abs=1e4)


def test_gradients_are_not_kept_where_updates_are_in_the_backward() -> None:
    work = work_of(B, clipping=False, scheme=Scheme("split", "backward"), gradient_bytes_max=0)
    assert sum(work.gradients_that_spill(ALL_NVME)) == 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
def test_every_strategy_holds_each_state_once(strategy: Strategy) -> None:
    """16 bytes per parameter of masters, moments and gradients; copies only where something is gathered from them. Gradients
    twice where the device has them until the step brings all to the host."""
    work = work_of(7 * B, ranks=8, scheme=PLAIN)
    memory = memory_of(work, strategy, pinned_bytes=1 << 30, device_is_host=False)
    shard = 7 * B // 8
    lines = [line for tier in (memory.device, memory.host, memory.nvme) for line in tier.items()]
    states = sum(
        nbytes for user, nbytes in lines if user.startswith(("optimizer state", "gradients")) and "group" not in user
    )
    assert states == (20 if strategy.keeps_compute else 16) * shard
    tier_of = {"none": memory.device, "cpu": memory.host, "nvme": memory.nvme}
    assert tier_of[strategy.optimizer]["optimizer state: masters and moments"] == 12 * shard
    assert ("pinned pool" in memory.host) == strategy.uses_nvme
    copies = 2 * shard if strategy.parameters == "nvme" else 0
    assert memory.nvme_bytes == {"none": 0, "cpu": 0, "nvme": 12 * shard + copies}[strategy.optimizer]
    split = memory_of(replace(work, scheme=Scheme()), strategy, pinned_bytes=1 << 30, device_is_host=False)
    assert split.nvme_bytes == memory.nvme_bytes - copies  # the copy is a part of the master


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
def test_moments_are_small_only_in_state_that_is_offloaded(strategy: Strategy) -> None:
    work = work_of(7 * B, ranks=8)
    small = replace(work, scheme=replace(work.scheme, moment_bytes=1))
    full, less = (memory_of(each, strategy, pinned_bytes=0, device_is_host=False) for each in (work, small))
    full_bytes, less_bytes = (each.device_bytes + each.host_bytes + each.nvme_bytes for each in (full, less))
    assert full_bytes - less_bytes == (2 * 3 * 7 * B // 8 if strategy.on_host else 0)
    assert update_bytes(strategy, work.scheme) - update_bytes(strategy, small.scheme) == 12 * strategy.on_host


def test_from_fast_to_frugal_the_device_holds_less() -> None:
    work = work_of(7 * B, ranks=8)
    memories = [memory_of(work, each, pinned_bytes=0, device_is_host=False) for each in STRATEGIES]
    held = [memory.device_bytes - memory.device.get("gradients", 0) for memory in memories]
    assert held == sorted(held, reverse=True)
    assert memories[-1].device_bytes == min(memory.device_bytes for memory in memories)


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
    group_bytes = 2 * max(work.group_shards) if strategy.parameters == "nvme" else 0
    updates = pinned.pipeline_bytes(group_bytes, 12 * pipeline.sub_group_numel)
    assert pinned.PinnedBudget(pinned.gather_bytes(group_bytes), updates).nbytes <= pipeline.pinned_bytes
    assert 0 <= pipeline.look_ahead_bytes < pipeline.pinned_bytes


def test_what_is_updated_in_the_backward_waits_within_a_quarter_of_the_memory() -> None:
    work = replace(work_of(B), scheme=Scheme(update="backward"), clipping=False, gradient_bytes_max=UNBOUNDED)
    before, roomy = map(pool_in_which_nothing_stays, (work_of(B), work))
    assert roomy > 2 * 14 * max(work.group_shards) > before
    small = replace(NODE, host_bytes=4 * NODE.ranks_per_node * (roomy - MIB))
    assert plan_step(work, small, ALL_NVME).pipeline.pinned_bytes == roomy - MIB


@given(numel=st.integers(10**7, 10**10), pool=st.integers(2 << 30, 64 << 30))
def test_a_given_pool_is_what_is_planned_with(numel: int, pool: int) -> None:
    plan = plan_step(work_of(numel, ranks=8), NODE, ALL_NVME, pinned_bytes=pool)
    assert plan.pipeline.pinned_bytes == pool
    assert plan.simulated is not None
    assert plan.simulated.pool_bytes_peak <= pool


def test_a_pool_too_small_for_the_groups_is_a_reason_and_no_crash() -> None:
    plan = plan_step(work_of(7 * B), CPU, ALL_NVME, pinned_bytes=64 << 20, cache_bytes=0)
    assert any("pinned pool" in reason for reason in plan.reasons)
    assert plan.simulated is None
    assert math.isinf(plan.step_seconds)
    assert plan.tokens_per_s == 0
    assert plan.limits() == []
    assert plan.drive_writes_per_day is None


@given(numel=st.integers(10**7, 10**11), samples=st.integers(1, 8), micro_batches=st.integers(1, 3))
def test_no_plan_beats_its_lower_bound(numel: int, samples: int, micro_batches: int) -> None:
    work = work_of(numel, ranks=8, samples=samples, micro_batches=micro_batches)
    for plan in plans_for(work, NODE):
        assert plan.step_seconds >= plan.lower_bound_seconds * (1 - 1e-6)


@pytest.mark.parametrize("faster", ["flops_per_s", "link_bytes_per_s", "host_bytes_per_s", "node_link_bytes_per_s"])
def test_a_faster_part_is_no_slower_step(faster: str) -> None:
    better = replace(NODE, **{faster: 4 * getattr(NODE, faster)})
    plans = (plans_for(work_of(70 * B, ranks=8), machine, cache_bytes=0) for machine in (NODE, better))
    for before, after in zip(*plans, strict=True):
        assert after.step_seconds <= before.step_seconds * 1.01


def test_the_fastest_that_fits_is_chosen() -> None:
    chosen = fastest_that_fits(plans_for(work_of(70 * B, ranks=8), NODE, cache_bytes=0))
    assert chosen is not None
    assert chosen.strategy.name == "stage 3, optimizer on CPU"
    small_host = replace(NODE, host_bytes=500 * B)
    chosen = fastest_that_fits(plans_for(work_of(70 * B, ranks=8), small_host))
    assert chosen is not None
    assert chosen.strategy.uses_nvme
    assert fastest_that_fits(plans_for(work_of(1000 * B, ranks=8), NODE)) is None


def test_of_strategies_that_are_as_fast_the_first_is_chosen() -> None:
    """All of the model stays in the host cache of those on NVMe, so that they are faster by what clipping reads again."""
    plans = plans_for(work_of(B // 5, samples=4), CPU)
    chosen = fastest_that_fits(plans)
    assert chosen is not None
    assert chosen is plans[0]
    assert min(plan.step_seconds for plan in plans) < chosen.step_seconds


def test_on_a_cpu_all_that_is_not_on_nvme_is_in_host_memory() -> None:
    names = [plan.strategy.name for plan in plans_for(work_of(B), CPU)]
    assert names == ["stage 3, all on CPU", "stage 3, optimizer on NVMe", "stage 3, all on NVMe"]


def test_what_does_not_fit_says_which_memory_and_by_how_much() -> None:
    plan = plan_step(work_of(7 * B), CPU, STRATEGIES[0])
    assert plan.reasons[0].startswith("host memory: ")
    assert "needed, 14.16 GiB usable on a node" in plan.reasons[0]


def test_free_space_counts_and_capacity_wears() -> None:
    crowded = replace(CPU, drive_free_bytes=B)
    plan = plan_step(work_of(B), crowded, ALL_NVME, cache_bytes=0)
    assert any(reason.startswith("NVMe: 11.18 GiB needed, 953.67 MiB usable") for reason in plan.reasons)
    daily = plan.drive_writes_per_day
    assert daily is not None
    assert daily == pytest.approx(12 * B * 86_400 / plan.step_seconds / (1000 * B), rel=1e-3)


def test_a_durable_run_takes_twice_the_state_on_nvme_and_its_records() -> None:
    plain, durable = (plan_step(work_of(B, durable=d), CPU, ALL_NVME, cache_bytes=0) for d in (False, True))
    state = plain.memory.nvme_bytes
    assert durable.memory.nvme_bytes == 2 * state + 2 * 4 * -(-state // 4096)
    assert durable.memory.host_bytes == plain.memory.host_bytes
    assert durable.step_seconds == plain.step_seconds  # as many bytes, in another place
    asked = plan_step(work_of(B, durable=True), CPU, ALL_NVME)
    assert asked.cache.nbytes == 0 and asked.fits
    between = replace(CPU, drive_free_bytes=state + state // 2)
    assert plan_step(work_of(B), between, ALL_NVME, cache_bytes=0).fits
    assert plan_step(work_of(B, durable=True), between, ALL_NVME).reasons[0].startswith("NVMe: 22.37 GiB needed")
    for plan in plans_for(work_of(B // 5, durable=True), CPU):
        assert plan.fits == (plan.strategy.optimizer == "nvme"), plan.reasons


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
    assert four[1] == one[1] == 12 * B
    assert four[0] - one[0] == 3 * 4 * B


@pytest.mark.parametrize("at_once", [2, 4, 8])
def test_micro_batches_at_once_spare_reads_and_hold_their_hidden_states(at_once: int) -> None:
    """Logits and what the last block saves are there once, as each micro-batch goes through them and back."""
    loop = work_of(8 * B, ranks=8, micro_batches=8)
    work = replace(loop, micro_batches_at_once=at_once)
    (read, written), of_loop = bytes_of_step(work, ALL_NVME), bytes_of_step(loop, ALL_NVME)
    assert (of_loop[0] - read, written) == (4 * B * (8 - 8 // at_once), of_loop[1])
    device, before = (memory_of(each, ALL_NVME, pinned_bytes=0, device_is_host=False).device for each in (work, loop))
    model = work.model
    hidden_state, head = 2 * model.seq * model.hidden, 2 * model.vocab * model.hidden
    more = {name: nbytes - before.get(name, 0) for name, nbytes in device.items() if nbytes != before.get(name)}
    assert more == {
        "activation checkpoints": (at_once - 1) * (model.layers - 1) * hidden_state,
        "hidden states between groups": (at_once - 1) * hidden_state,
        "gradients of the tied head": (at_once - 1) * head,
    }


def test_saved_activations_fill_the_host_memory_that_they_are_given_first() -> None:
    work = work_that_saves("cpu", micro_batches=4, micro_batches_at_once=4, activation_host_bytes_max=10**9)
    whole = replace(work, activation_host_bytes_max=None)
    some, every = (memory_of(each, ALL_NVME, pinned_bytes=0, device_is_host=False) for each in (work, whole))
    assert (some.host["saved activations, pinned"], every.host["saved activations, pinned"]) == (
        10**9,
        sum(work.saved_bytes),
    )
    assert some.device_bytes + 10**9 == every.device_bytes + sum(work.saved_bytes)
    plan = plan_step(work, NODE, ALL_NVME, cache_bytes=0)
    saved = [each.name for each in plan.simulated.timeline if each.name.startswith("activations")]  # type: ignore[union-attr]
    assert saved[0] == "activations of group 1" and saved[-1] == saved[0], "the last to be used again"


def test_busiest_counts_reads_and_writes_at_once_as_one_drive() -> None:
    timeline = [
        Interval("read", "", 0, 3),
        Interval("write", "", 1, 4),
        Interval("compute", "", 0, 3.5),
        Interval("to_host", "", 5, 50),
    ]
    assert busiest(timeline, 0, 5) == ("drive", 4)
    assert busiest(timeline, 0, 100) == ("to host", 45)


def work_that_saves(where: str, **settings: Any) -> Work:
    return work_of(8 * B, ranks=8, samples=4, activations=where, **settings)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_saved_activations_leave_the_device_for_the_tier_that_is_named(checkpointing: bool) -> None:
    there, host, drive = (
        memory_of(work, ALL_NVME, pinned_bytes=0, device_is_host=False)
        for work in (work_that_saves(where, checkpointing=checkpointing) for where in ("none", "cpu", "nvme"))
    )
    work = work_that_saves("nvme", checkpointing=checkpointing)
    saved, model = sum(work.saved_bytes), work.model
    held = model.checkpoint_bytes(4) if checkpointing else model.activation_bytes(4, model.layers)
    assert saved == pytest.approx(held, rel=1e-6)
    assert there.device_bytes - host.device_bytes == there.device_bytes - drive.device_bytes
    assert there.device_bytes - host.device_bytes == pytest.approx(held * (1 - 2 / model.layers), rel=1e-6)
    assert host.host_bytes - there.host_bytes == saved
    assert drive.host_bytes - there.host_bytes == work.activation_buffer_bytes
    assert drive.nvme_bytes - there.nvme_bytes == saved


def test_a_device_in_host_memory_has_no_other_place_there() -> None:
    none, host = (memory_of(work_that_saves(w), ALL_NVME, pinned_bytes=0, device_is_host=True) for w in ("none", "cpu"))
    assert none == host


@pytest.mark.parametrize(
    ("micro_batches", "checkpointing", "more"), [(1, True, 0), (3, True, 5), (1, False, 9), (1, True, 64)]
)
def test_a_step_moves_what_the_buffer_can_not_keep_each_way_of_each_pass(
    micro_batches: int, checkpointing: bool, more: int
) -> None:
    work = work_that_saves("nvme", micro_batches=micro_batches, checkpointing=checkpointing)
    work = replace(work, activation_buffer_bytes_max=work.activation_buffer_bytes + more * work.saved_tensor_bytes)
    without = replace(work, activations="none")
    moved = micro_batches * sum(work.saved_on_drive)
    kept = work.activation_buffer_bytes // 2
    assert (
        sum(work.saved_bytes) - kept
        <= sum(work.saved_on_drive)
        <= sum(work.saved_bytes) - kept + work.saved_tensor_bytes
    )
    assert bytes_of_step(work, ALL_NVME) == tuple(moved + each for each in bytes_of_step(without, ALL_NVME))
    plan, plain = (plan_step(each, NODE, ALL_NVME, cache_bytes=0) for each in (work, without))
    assert plan.simulated is not None and plain.simulated is not None
    assert plan.simulated.written_bytes == pytest.approx(plain.simulated.written_bytes + moved, rel=1e-6)
    assert plan.simulated.to_host_bytes == plain.simulated.to_host_bytes + micro_batches * sum(work.saved_bytes)
    assert plan.simulated.to_device_bytes == plain.simulated.to_device_bytes + micro_batches * sum(work.saved_bytes)
    assert plain.lower_bound_seconds <= plan.lower_bound_seconds <= plan.step_seconds * (1 + 1e-9)


def test_on_a_slow_drive_saved_activations_set_the_pace() -> None:
    slow = replace(NODE, drive=DriveSpeed(4 * GB, 2 * GB))
    work = work_that_saves("nvme", micro_batches=4)
    with_them, without = (plan_step(each, slow, ALL_NVME) for each in (work, replace(work, activations="none")))
    moved = 4 * sum(work.saved_on_drive)
    assert with_them.fits
    assert with_them.step_seconds >= moved / (4 * GB / 8) + moved / (2 * GB / 8)
    assert with_them.step_seconds > without.step_seconds
    assert {each.name for each in with_them.simulated.timeline if each.resource == "write"} >= {
        "activations of group 1"
    }


def test_what_can_not_pass_does_not_fit_and_says_why() -> None:
    work = work_that_saves("nvme")
    small = replace(work, activation_buffer_bytes_max=3 * work.saved_tensor_bytes)
    assert any("their buffer has" in reason for reason in plan_step(small, NODE, ALL_NVME).reasons)
    no_drives = plan_step(work, NODE, Strategy("stage 3", 3))
    assert any("only if parameters or optimizer state are" in reason for reason in no_drives.reasons)
