"""What the plan of work on frozen weights promises: the bytes that were measured, no time below what the bytes take, and fewer
bytes with more pinned memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.cli.plan.machines import PRESETS
from infinity.plan.frozen import IN_TURNS, START_SECONDS, FrozenPlan, frozen_plans
from infinity.plan.frozen_groups import BASE_BITS, FrozenGroups
from infinity.plan.machine import DriveSpeed, Machine
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

MADE_MIXTURE = Transformer(
    layers=8,
    hidden=256,
    heads=4,
    seq=4,
    vocab=1024,
    block_numel=200_000 + 16 * 393_216,
    root_numel=2 * 1024 * 256 + 256,
    linear_width=3000 + 16 * 2304,
    experts=Experts(16, 2, 393_216, 2304, tuple(range(8))),
)
"""A Qwen3-MoE."""

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


def planned(
    work: Work, machine: Machine = SMALL_MACHINE, *, rank: int = 16, base_bits: int = 16, **memory: int | None
) -> list[FrozenPlan]:
    return frozen_plans(work, machine, lora_rank=rank, base_bits=base_bits, **memory)


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


@pytest.mark.parametrize(("pinned_bytes", "read_bytes"), [(1 * GIB, 2464.1e6)])
def test_a_step_of_lora_reads_what_was_measured(pinned_bytes: int, read_bytes: float) -> None:
    lora, _ = planned(Work(MADE_1B), pinned_bytes=pinned_bytes)
    assert lora.read_bytes == pytest.approx(read_bytes, rel=0.001)
    assert 2.4 < lora.read_bytes / MADE_1B.numel < 2.5


@pytest.mark.parametrize(("pinned_bytes", "read_bytes"), [(800 * MIB, 1.69e9), (1434 * MIB, 1.08e9), (3 * GIB, 0.0)])
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
    assert read == (passes * (each_pass - spared) if sum(sizes) > room else 0, 0)


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
    less, more = (sum(groups.lora_read_bytes(room, passes)) for room in sorted(rooms))
    assert more <= less


@given(count=st.integers(2, 40), size=st.integers(1, 50), rooms=st.tuples(st.integers(0, 2000), st.integers(0, 2000)))
def test_more_room_is_never_more_to_read_in_a_round(count: int, size: int, rooms: tuple[int, int]) -> None:
    groups = FrozenGroups((size,) * count, (0,) * count)
    less, more = (sum(groups.round_read_bytes(room)) for room in sorted(rooms))
    assert more <= less


@given(
    always=sizes,
    rooms=st.tuples(st.integers(0, 900), st.integers(0, 900)),
    expert=st.integers(1, 8),
    count=st.integers(1, 8),
    share=st.floats(0.01, 1),
    passes=st.integers(1, 3),
)
def test_experts_are_spared_no_more_than_the_room(
    always: list[int], rooms: tuple[int, int], expert: int, count: int, share: float, passes: int
) -> None:
    blocks = len(always) - 1
    groups = FrozenGroups(tuple(always), (0, *[expert * count] * blocks), expert, share)
    less, more = sorted(rooms)
    held = more + 2 * groups.largest_bytes
    in_round = groups.expected_bytes - groups.root_bytes
    read = sum(groups.round_read_bytes(more))
    assert max(0.0, in_round - held) - 1e-6 <= read <= in_round + 1e-6
    trained = groups.lora_read_bytes(more, passes)
    assert trained[1] >= 2 * passes * max(0.0, groups.expected_experts_bytes - held) - 1e-6
    if groups.whole_bytes <= more:
        assert read == sum(trained) == 0
    assert groups.round_read_bytes(less)[1] >= groups.round_read_bytes(more)[1] - 1e-6
    assert groups.lora_read_bytes(less, passes)[1] >= trained[1] - 1e-6


@given(
    blocks=st.integers(2, 6),
    count=st.integers(2, 12),
    per_token=st.integers(1, 3),
    tokens=st.integers(1, 4),
    held=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_a_round_finds_the_experts_that_the_least_recently_used_rule_keeps(
    blocks: int, count: int, per_token: int, tokens: int, held: float, seed: int
) -> None:
    """Within one round more or less of what stays: how many distinct experts are used differs from round to round."""
    per_token = min(per_token, count)
    experts = Experts(count, per_token, 1, 1, (0,))
    share = experts.distinct(tokens) / count
    random = Random(seed)
    capacity = round(held * blocks * count)
    staged: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses, rounds = 0, 120
    for number in range(rounds):
        for block in range(blocks):
            used = {expert for _ in range(tokens) for expert in random.sample(range(count), per_token)}
            for expert in sorted(used):
                misses += number >= 20 and (block, expert) not in staged
                staged[block, expert] = None
                staged.move_to_end((block, expert))
                while len(staged) > capacity:
                    staged.popitem(last=False)
    measured = misses / (rounds - 20)

    def read(held_share: float) -> float:
        groups = FrozenGroups((1, *[1] * blocks), (0, *[1000 * count] * blocks), 1000, share)
        room = 1000 * blocks * count * held_share + blocks - groups.largest_bytes
        return groups.round_read_bytes(round(room))[1] / 1000

    spread = 0.15 * share + 1.5 / (blocks * count)
    assert read(capacity / blocks / count + spread) - 0.4 <= measured <= read(capacity / blocks / count - spread) + 0.4


def test_several_passes_read_as_often_and_the_vertical_schedule_once() -> None:
    work = Work(MADE_1B, micro_batches=4)
    loop, _ = planned(work, pinned_bytes=1 * GIB)
    vertical, _ = planned(replace(work, micro_batches_at_once=4), pinned_bytes=1 * GIB)
    one, _ = planned(Work(MADE_1B), pinned_bytes=1 * GIB)
    assert vertical.read_bytes == one.read_bytes == loop.read_bytes / 4
    assert vertical.tokens == loop.tokens == 4 * one.tokens


def test_ranks_read_their_rows_alone() -> None:
    """As many groups stay in a pool of half the size."""
    room = look_ahead_room(1 * GIB, 2 * MADE_1B.block_numel)
    one, two = (FrozenGroups.of(Work(MADE_1B, ranks=ranks), tokens=1) for ranks in (1, 2))
    halved = sum(one.lora_read_bytes(room, 1)) / 2
    assert sum(two.lora_read_bytes(room // 2, 1)) == pytest.approx(halved, rel=1e-6)


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
        assert generation.seconds >= 2 * (numel - work.model.root_numel) / machine.link_bytes_per_s


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
        (Work(MADE_1B), SMALL_MACHINE, {"pinned_bytes": 100 * MIB}, ("pinned pool: 100.00 MiB is too small",) * 2),
        (Work(MADE_1B), replace(SMALL_MACHINE, host_bytes=GIB), {}, ("host memory: ",) * 2),
        (Work(MADE_1B), replace(ON_A_GPU, device_bytes=GIB), {}, ("GPU memory: ",) * 2),
        (Work(MADE_1B), replace(SMALL_MACHINE, drive_bytes=10**9), {}, ("NVMe: 1.87 GiB needed",) * 2),
        (Work(MADE_1B, durable=True), SMALL_MACHINE, {}, ("durability: ", "")),
        (Work(MADE_1B, activations="nvme"), SMALL_MACHINE, {}, ("saved activations: NVMe would be", "")),
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


def test_a_token_reads_what_it_is_routed_to() -> None:
    work = Work(mixture())
    lora, generation = planned(work, cache_bytes=0)
    groups = FrozenGroups.of(work, tokens=1)
    assert sum(groups.round_read_bytes(0)) == pytest.approx(2 * (work.model.active_numel - work.model.root_numel))
    assert groups.largest_bytes == 2 * 1_000_000  # a dense block, more than the others without their experts
    assert generation.pinned_bytes == lora.pinned_bytes < 2 * work.model.block_numel + 10 * MIB
    assert generation.read_bytes <= 2 * work.model.active_numel
    assert lora.read_bytes > 1.8 * 2 * 6 * 16 * 300_000  # 128 tokens need all of 16, twice


def test_reading_experts_and_computing_take_turns() -> None:
    work = Work(mixture())
    slow = replace(SMALL_MACHINE, drive=DriveSpeed(1e7, 1e7))
    for plan in planned(work, slow, cache_bytes=0):
        assert plan.limit == IN_TURNS
        assert plan.busy["compute"] < plan.seconds <= plan.busy["compute"] + plan.busy["drive"]
    assert all(IN_TURNS not in plan.busy for plan in planned(Work(MADE_1B)))


@pytest.mark.parametrize(
    ("pool_mib", "samples", "measured"),
    [(32, 1, 9.47e6), (48, 1, 7.14e6), (32, 4, 42.2e6), (64, 4, 21.9e6), (32, 16, 89.1e6), (64, 16, 88.9e6)],
)
def test_a_round_of_a_mixture_reads_what_was_measured(pool_mib: int, samples: int, measured: float) -> None:
    """8 blocks of 16 experts of 768 KiB, of which each token takes 2 at random, as a run of the product reads it."""
    _, generation = planned(Work(MADE_MIXTURE, samples=samples), pinned_bytes=pool_mib * MIB)
    assert generation.read_bytes == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(("pool_mib", "measured"), [(32, 150.2e6), (64, 82.2e6), (96, 15.8e6)])
def test_a_step_of_lora_on_a_mixture_reads_what_was_measured(pool_mib: int, measured: float) -> None:
    """The same model, and 64 tokens, which go to all experts."""
    lora, _ = planned(Work(replace(MADE_MIXTURE, seq=64)), pinned_bytes=pool_mib * MIB)
    assert lora.read_bytes == pytest.approx(measured, rel=0.1)


def test_few_tokens_leave_experts_alone_in_training_too() -> None:
    work = Work(replace(mixture(count=64, per_token=1), seq=16))
    share = 1 - (1 - 1 / 64) ** 16
    in_experts = 6 * 64 * 300_000
    bare = FrozenGroups.of(work, tokens=16)
    assert bare.expected_bytes == pytest.approx(2 * (work.model.numel - in_experts * (1 - share)), rel=1e-6)
    lora, _ = planned(work, cache_bytes=0)
    assert lora.read_bytes < 2 * 2 * work.model.numel * share + 4 * work.model.active_numel


def test_ranks_need_the_experts_of_all_their_tokens() -> None:
    one, several = (planned(Work(mixture(), samples=samples), cache_bytes=0)[1] for samples in (1, 8))
    assert one.read_bytes < several.read_bytes < 8 * one.read_bytes
    machine = replace(SMALL_MACHINE, ranks_per_node=2)
    of_two = planned(Work(mixture(), ranks=2), machine, cache_bytes=0)
    assert all(plan.fits for plan in of_two)
    two_tokens, eight = (FrozenGroups.of(Work(mixture()), tokens=tokens) for tokens in (2, 8))
    assert 2 * FrozenGroups.of(Work(mixture(), ranks=2), tokens=2).expected_bytes == pytest.approx(
        two_tokens.expected_bytes
    )
    assert two_tokens.expected_bytes < eight.expected_bytes


def test_two_blocks_and_two_experts_are_gathered_at_once() -> None:
    model = mixture()
    for plan in planned(Work(model), ON_A_GPU):
        assert plan.memory.device["gathered groups"] == 2 * (2 * (1_000_000 + 300_000) + model.root_numel)


# Gathered


def test_a_host_copies_what_it_gathers_to_generate() -> None:
    machine = replace(SMALL_MACHINE, group_seconds=0.0)
    _, staged = planned(Work(MADE_1B), machine, pinned_bytes=3 * GIB)  # of what stays staged, nothing
    assert staged.seconds == pytest.approx(2 * MADE_1B.numel / machine.host_bytes_per_s)
    _, copied = planned(Work(MADE_1B, ranks=2), replace(machine, ranks_per_node=2), pinned_bytes=3 * GIB)
    # 2 processes share the memory: each reads all of it to compute, and reads and writes all of the blocks for that
    whole, blocks = 2 * MADE_1B.numel, 2 * (MADE_1B.numel - MADE_1B.root_numel)
    assert copied.busy["compute"] == pytest.approx(2 * (whole + 2 * blocks) / machine.host_bytes_per_s, rel=1e-6)


# In 8 and 4 bits


@pytest.mark.parametrize(("bits", "per_element"), [(16, 2.0), (8, 1.0), (4, 0.5625)])
def test_bytes_of_coded_weights(bits: int, per_element: float) -> None:
    model = replace(MADE_1B, vector_numel=2 * WIDTH)
    matrices = 13 * (MADE_1B.block_numel - 2 * WIDTH)
    whole = per_element * matrices + 2 * (model.numel - matrices)
    work = Work(model)
    assert FrozenGroups.of(work, tokens=1, base_bits=bits).whole_bytes == whole
    lora, generation = planned(work, base_bits=bits, cache_bytes=0)
    assert lora.base_bits == generation.base_bits == bits
    assert lora.memory.nvme == generation.memory.nvme == {"frozen weights, in their files": whole}
    assert lora.start_seconds == pytest.approx(START_SECONDS + whole / 3e9)
    block = whole - 2 * model.root_numel
    assert generation.pinned_bytes == pytest.approx(7 * block / 13 + 4 * MIB, abs=MIB)
    read = sum(FrozenGroups.of(work, tokens=1, base_bits=bits).round_read_bytes(0))
    assert read == block
    on_two = FrozenGroups.of(Work(model, ranks=2), tokens=1, base_bits=bits)
    assert 2 * on_two.whole_bytes == pytest.approx(whole, rel=1e-6)


@given(model=st.sampled_from([MADE_1B, mixture()]), pinned_bytes=st.none() | st.integers(1 * MIB, 3 * GIB))
def test_fewer_bits_are_fewer_bytes(model: Transformer, pinned_bytes: int | None) -> None:
    plans = [planned(Work(model), base_bits=bits, pinned_bytes=pinned_bytes) for bits in BASE_BITS]
    for fewer, more in pairwise(plans):
        for less, plan in zip(fewer, more, strict=True):
            assert less.read_bytes <= plan.read_bytes + 1e-6
            assert less.pinned_bytes <= plan.pinned_bytes
            assert less.memory.nvme_bytes < plan.memory.nvme_bytes
            assert less.start_seconds < plan.start_seconds
            assert less.tokens == plan.tokens and less.trained_numel == plan.trained_numel


def test_decoding_takes_memory_traffic() -> None:
    machine = replace(SMALL_MACHINE, group_seconds=0.0)
    plain, decoded = (planned(Work(MADE_1B), machine, base_bits=bits, pinned_bytes=3 * GIB)[1] for bits in (16, 8))
    blocks = MADE_1B.numel - MADE_1B.root_numel
    traffic = (1 + 2) + 2 * 2  # read and decoded, and copied
    assert decoded.seconds - plain.seconds == pytest.approx(traffic * blocks / machine.host_bytes_per_s)


# Counts of mixtures


def test_blocks_without_experts_are_counted_as_they_are() -> None:
    model = mixture()
    assert model.block_numels == [1_000_000] * 2 + [400_000 + 16 * 300_000] * 6
    assert model.numel == 2 * 1_000_000 + 6 * (400_000 + 16 * 300_000) + 512_000
    assert model.active_numel == 2 * 1_000_000 + 6 * (400_000 + 2 * 300_000) + 512_000
    assert model.adapter_numel(4) == 4 * (2 * 6000 + 6 * 5000)  # experts have none
    work = Work(model, groups_per_block=3)
    assert sum(work.group_numels) == model.numel
    assert sum(work.group_active_numels) == pytest.approx(model.active_numel, abs=100)
