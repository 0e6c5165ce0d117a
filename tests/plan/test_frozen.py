"""What the plan of work on frozen weights promises: the bytes that were measured, no time below what the bytes take, and fewer
bytes with more pinned memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli.plan.machines import PRESETS
from infinity.plan.frozen import START_SECONDS, FrozenPlan, frozen_plans
from infinity.plan.frozen_groups import FrozenGroups
from infinity.plan.lower_bound import DriveSpeed
from infinity.plan.machine import Machine
from infinity.plan.transformer import Experts, Transformer, transformer_of
from infinity.plan.work import Work
from infinity.schedule.pinned import look_ahead_room
from infinity.units import GIB, MIB

WIDTH, VOCABULARY = 2304, 256
MADE_1B = Transformer(
    layers=13,
    hidden=WIDTH,
    heads=WIDTH // 64,
    seq=64,
    vocab=VOCABULARY,
    block_numel=(2 * 4 + 2 + 4 * 12) * WIDTH**2 // 4 + 2 * WIDTH,
    root_numel=(VOCABULARY + 1) * WIDTH,
)
"""What `examples/made_model.py` makes for 1B: a Llama with a quarter as many heads of keys, and tied embeddings."""

SMALL_MACHINE = Machine(
    name="2 cores",
    device_is_host=True,
    flops_per_s=0.15e12,
    host_bytes=16 * GIB,
    host_bytes_per_s=12.5e9,
    drive=DriveSpeed(3.0e9, 2.0e9),
    group_seconds=1e-3,
)
ON_A_GPU = PRESETS["rtx4090-gen4"]


def planned(work: Work, machine: Machine = SMALL_MACHINE, *, rank: int = 16, **memory: int | None) -> list[FrozenPlan]:
    return frozen_plans(work, machine, lora_rank=rank, **memory)


def mixture(*, count: int = 16, per_token: int = 2, blocks: int = 6, layers: int = 8) -> Transformer:
    """Of which the first blocks have no experts."""
    expert = 300_000
    return Transformer(
        layers=layers,
        hidden=256,
        heads=4,
        seq=128,
        vocab=1000,
        block_numel=400_000 + count * expert,
        root_numel=512_000,
        linear_width=5000 + 1500 * count,
        experts=Experts(count, per_token, expert, 1500, tuple(range(layers - blocks, layers)), 1_000_000, 6000),
    )


# What was measured: examples/finetune_lora.py and generate.py with --params 1B, as the kernel counts what the process reads


@pytest.mark.parametrize(("pinned_bytes", "read_bytes"), [(1 * GIB, 2772.4e6)])
def test_a_step_of_lora_reads_what_was_measured(pinned_bytes: int, read_bytes: float) -> None:
    lora, _ = planned(Work(MADE_1B), pinned_bytes=pinned_bytes)
    assert lora.read_bytes == pytest.approx(read_bytes, rel=0.001)
    assert 2.7 < lora.read_bytes / MADE_1B.numel < 2.8


@pytest.mark.parametrize(("pinned_bytes", "read_bytes"), [(800 * MIB, 1.85e9), (1434 * MIB, 1.23e9), (3 * GIB, 0.0)])
def test_a_token_reads_what_was_measured(pinned_bytes: int, read_bytes: float) -> None:
    _, generation = planned(Work(MADE_1B), pinned_bytes=pinned_bytes)
    assert generation.read_bytes == pytest.approx(read_bytes, rel=0.01)


# Bytes


sizes = st.lists(st.integers(1, 40), min_size=2, max_size=12)


@given(sizes=sizes, room=st.integers(0, 300), passes=st.integers(1, 3))
def test_lora_spares_what_stays_at_the_ends_of_the_passes(sizes: list[int], room: int, passes: int) -> None:
    groups = FrozenGroups(tuple(sizes), (0,) * len(sizes))
    each_pass = sizes[0] + 2 * sum(sizes[1:])
    spared = (
        held(sizes[:0:-1], room) + held(sizes, room) - sizes[0]
    )  # the root is read ahead, and was last used long before
    read = groups.lora_read_bytes(room, passes)
    if sum(sizes) > room:
        assert read == passes * (each_pass - spared)
    else:
        assert read == 0


def held(sizes: list[int], room: int) -> int:
    """Bytes of the first that fit; the very first is there anyway, as reads go on for what comes next whatever the room is."""
    total = 0
    for place, size in enumerate(sizes):
        if place and total + size > room:
            break
        total += size
    return total


@given(sizes=sizes, rooms=st.tuples(st.integers(0, 300), st.integers(0, 300)), passes=st.integers(1, 3))
def test_more_room_is_never_more_to_read_in_a_step(sizes: list[int], rooms: tuple[int, int], passes: int) -> None:
    groups = FrozenGroups(tuple(sizes), (0,) * len(sizes))
    less, more = (groups.lora_read_bytes(room, passes) for room in sorted(rooms))
    assert more <= less


@given(count=st.integers(2, 40), size=st.integers(1, 50), rooms=st.tuples(st.integers(0, 2000), st.integers(0, 2000)))
def test_more_room_is_never_more_to_read_in_a_round(count: int, size: int, rooms: tuple[int, int]) -> None:
    groups = FrozenGroups((size,) * count, (0,) * count)
    less, more = (sum(groups.round_read_bytes(room)) for room in sorted(rooms))
    assert more <= less


@given(
    always=sizes,
    room=st.integers(0, 900),
    expert=st.integers(0, 30),
    shares=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_a_round_spares_no_more_than_the_room(
    always: list[int], room: int, expert: int, shares: tuple[float, float]
) -> None:
    experts = (0, *[expert] * (len(always) - 1))
    groups = FrozenGroups(tuple(always), experts, *sorted(shares))
    read = sum(groups.round_read_bytes(room))
    assert max(0.0, groups.expected_bytes - room) - 1e-6 <= read <= groups.expected_bytes + 1e-6
    if groups.whole_bytes <= room:
        assert read == 0


def test_several_passes_read_as_often_and_the_vertical_schedule_once() -> None:
    work = Work(MADE_1B, micro_batches=4)
    loop, _ = planned(work, pinned_bytes=1 * GIB)
    vertical, _ = planned(replace(work, schedule="vertical"), pinned_bytes=1 * GIB)
    one, _ = planned(Work(MADE_1B), pinned_bytes=1 * GIB)
    assert vertical.read_bytes == one.read_bytes == loop.read_bytes / 4
    assert vertical.tokens == loop.tokens == 4 * one.tokens


def test_ranks_read_their_rows_alone() -> None:
    """As many groups stay in a pool of half the size."""
    room = look_ahead_room(1 * GIB, 2 * MADE_1B.block_numel)
    one, two = (FrozenGroups.of(Work(MADE_1B, ranks=ranks), tokens=None) for ranks in (1, 2))
    assert two.lora_read_bytes(room // 2, 1) == pytest.approx(one.lora_read_bytes(room, 1) / 2, rel=1e-6)


# Time


@given(
    numel=st.integers(20_000_000, 20 * 10**9),
    pinned_bytes=st.none() | st.integers(1 * MIB, 64 * GIB),
    samples=st.integers(1, 16),
    gpu=st.booleans(),
)
def test_no_time_is_below_what_bytes_and_operations_take(
    numel: int, pinned_bytes: int | None, samples: int, gpu: bool
) -> None:
    machine = ON_A_GPU if gpu else SMALL_MACHINE
    assert machine.drive is not None
    work = Work(transformer_of(numel, seq=512, vocab=32_000), samples=samples)
    lora, generation = planned(work, machine, pinned_bytes=pinned_bytes)
    bytes_per_s = machine.device_bytes_per_s if gpu else machine.host_bytes_per_s
    for plan in (lora, generation):
        assert plan.seconds >= plan.read_bytes / machine.drive.read_bytes_per_s
        assert plan.seconds >= 2 * samples * numel / machine.flops_per_s
        assert plan.start_seconds == pytest.approx(START_SECONDS + 2 * numel / machine.drive.read_bytes_per_s)
        assert plan.fits or plan.reasons
    assert lora.seconds >= 6 * work.tokens * numel / machine.flops_per_s
    assert generation.seconds >= 2 * numel / bytes_per_s
    if gpu:
        assert generation.seconds >= 2 * numel / machine.link_bytes_per_s


def test_a_faster_drive_takes_over_from_what_limits_it() -> None:
    work = Work(transformer_of(30 * 10**9, seq=512, vocab=32_000))
    slow, fast = (planned(work, replace(ON_A_GPU, drive=DriveSpeed(rate, 1e9)), cache_bytes=0) for rate in (3e9, 300e9))
    assert [plan.limit for plan in slow] == ["drive", "drive"]
    assert [plan.limit for plan in fast] == ["to device", "to device"]
    assert all(after.seconds < before.seconds for before, after in zip(slow, fast, strict=True))


def test_without_checkpointing_a_step_takes_a_third_fewer_operations() -> None:
    work = Work(MADE_1B, samples=8)
    machine = replace(SMALL_MACHINE, group_seconds=0.0, host_bytes_per_s=math.inf)
    again, once = (planned(replace(work, checkpointing=kept), machine, rank=1)[0] for kept in (True, False))
    assert once.busy["compute"] == pytest.approx(again.busy["compute"] * 4 / 6, rel=0.001)


# Memory, and what doesn't fit


def test_the_pool_takes_what_the_model_makes_use_of_and_no_more() -> None:
    plenty, _ = planned(Work(MADE_1B), replace(SMALL_MACHINE, host_bytes=64 * GIB))
    assert plenty.read_bytes == 0
    assert 2 * MADE_1B.numel < plenty.pinned_bytes < 2 * MADE_1B.numel + GIB
    none_left, _ = planned(Work(MADE_1B), cache_bytes=0)
    asked, _ = planned(Work(MADE_1B), pinned_bytes=none_left.pinned_bytes)
    assert asked == none_left
    assert none_left.read_bytes > 0


def test_each_tier_s_users_are_named() -> None:
    lora, generation = planned(Work(MADE_1B, samples=3), ON_A_GPU)
    adapters = MADE_1B.adapter_numel(16)
    assert lora.trained_numel == adapters
    assert lora.memory.host["adapters and their optimizer state"] == 12 * adapters
    assert lora.memory.host["gradients of the adapters"] == 4 * adapters
    assert lora.memory.nvme == generation.memory.nvme == {"frozen weights, in their files": 2 * MADE_1B.numel}
    assert generation.memory.device["keys and values"] == 2 * 3 * 64 * 13 * 2 * WIDTH
    assert not generation.trained_numel and generation.tokens == 3
    on_cpu = planned(Work(MADE_1B))
    assert all(not plan.memory.device and "gathered groups" in plan.memory.host for plan in on_cpu)


@pytest.mark.parametrize(
    ("work", "machine", "memory", "reasons"),
    [
        (Work(MADE_1B), replace(SMALL_MACHINE, drive=None), {}, ("NVMe: the machine has no drive",) * 2),
        (Work(MADE_1B), SMALL_MACHINE, {"pinned_bytes": 100 * MIB}, ("pinned pool: 100.00 MiB, and the groups",) * 2),
        (Work(MADE_1B), replace(SMALL_MACHINE, host_bytes=GIB), {}, ("host memory: ",) * 2),
        (Work(MADE_1B), replace(ON_A_GPU, device_bytes=GIB), {}, ("GPU memory: ",) * 2),
        (Work(MADE_1B), replace(SMALL_MACHINE, drive_bytes=10**9), {}, ("NVMe: 1.87 GiB needed of the",) * 2),
        (Work(MADE_1B, durable=True), SMALL_MACHINE, {}, ("durability: ", "")),
        (Work(MADE_1B, activations="nvme"), SMALL_MACHINE, {}, ("saved activations: to NVMe they would be", "")),
    ],
)
def test_the_reason_why_it_does_not_fit_is_given(
    work: Work, machine: Machine, memory: dict[str, int], reasons: tuple[str, str]
) -> None:
    for plan, reason in zip(planned(work, machine, **memory), reasons, strict=True):
        assert plan.fits == (not reason)
        assert any(said.startswith(reason) for said in plan.reasons) or not reason


def test_more_adapters_than_stay_in_memory_are_refused() -> None:
    lora, generation = planned(Work(MADE_1B), rank=1000)
    assert "lower --lora" in lora.reasons[-1]
    assert generation.fits


# Mixtures of experts


@pytest.mark.parametrize(("count", "per_token", "tokens"), [(4, 2, 1), (4, 2, 2), (5, 1, 3), (3, 3, 2)])
def test_distinct_experts_are_as_many_as_all_ways_of_routing_give(count: int, per_token: int, tokens: int) -> None:
    ways = [*product([*combinations(range(count), per_token)], repeat=tokens)]
    numbers = [len({expert for chosen in way for expert in chosen}) for way in ways]
    experts = Experts(count, per_token, 1, 1, (0,))
    assert experts.distinct(tokens) == pytest.approx(sum(numbers) / len(ways))
    assert experts.distinct_max(tokens) == max(numbers)


def test_only_routed_experts_are_read_where_they_are_read_alone() -> None:
    work = Work(mixture())
    lora, lora_routed, generation, routed = planned(work, cache_bytes=0)
    assert [plan.experts_read for plan in (lora, lora_routed, generation, routed)] == ["all", "routed"] * 2
    assert lora_routed.read_bytes == pytest.approx(lora.read_bytes, rel=1e-6)  # 128 tokens need all of 16
    assert routed.pinned_bytes < generation.pinned_bytes  # its largest gather is smaller
    groups = FrozenGroups.of(work, tokens=1)
    assert sum(groups.round_read_bytes(0)) == 2 * work.model.active_numel
    assert routed.read_bytes <= 2 * work.model.active_numel < generation.read_bytes
    assert routed.seconds < generation.seconds


def test_few_tokens_leave_experts_alone_in_training_too() -> None:
    work = Work(replace(mixture(count=64, per_token=1), seq=16))
    lora, routed = planned(work, cache_bytes=0)[:2]
    share = 1 - (1 - 1 / 64) ** 16
    in_experts = 6 * 64 * 300_000
    bare = FrozenGroups.of(work, tokens=16)
    assert bare.expected_bytes == pytest.approx(2 * (work.model.numel - in_experts * (1 - share)), rel=1e-6)
    assert routed.read_bytes < lora.read_bytes


@given(tokens=st.integers(1, 400), room=st.integers(0, 40_000_000))
def test_experts_that_stayed_are_used_again_only_in_part(tokens: int, room: int) -> None:
    """No more bytes than where every gather reads all experts; none where all of them stay."""
    work = Work(mixture())
    groups = FrozenGroups.of(work, tokens=tokens)
    again = replace(groups, expected_share=1.0, most_share=1.0)
    assert 0 <= groups.lora_read_bytes(room, 1) <= again.lora_read_bytes(0, 1)
    assert groups.lora_read_bytes(groups.whole_bytes, 1) == 0


def test_several_sequences_need_more_experts_and_several_ranks_all() -> None:
    one, several = (planned(Work(mixture(), samples=samples), cache_bytes=0)[3] for samples in (1, 8))
    assert one.read_bytes < several.read_bytes < 8 * one.read_bytes
    plans = planned(Work(mixture(), ranks=2), replace(SMALL_MACHINE, ranks_per_node=2))
    assert [plan.fits for plan in plans] == [True, False, True, False]
    assert "ranks take one route" in plans[1].reasons[0]


def test_blocks_without_experts_are_counted_as_they_are() -> None:
    model = mixture()
    assert model.block_numels == [1_000_000] * 2 + [400_000 + 16 * 300_000] * 6
    assert model.numel == 2 * 1_000_000 + 6 * (400_000 + 16 * 300_000) + 512_000
    assert model.active_numel == 2 * 1_000_000 + 6 * (400_000 + 2 * 300_000) + 512_000
    assert model.adapter_numel(4) == 4 * (2 * 6000 + 6 * (5000 + 16 * 1500))
    assert model.active_adapter_numel(4) == 4 * (2 * 6000 + 6 * (5000 + 2 * 1500))
    work = Work(model, groups_per_block=3)
    assert sum(work.group_numels) == model.numel
    assert sum(work.group_active_numels) == pytest.approx(model.active_numel, abs=100)
