"""What the plan promises of tensor, expert and pipeline parallelism: state is divided and counted once, what is gathered gets
less, exchanges take what the links give, and the search leaves no faster split out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.estimate import bytes_of_step, memory_of
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.planner import Plan, fastest_that_fits, plan_step, plans_for
from infinity.plan.search import fastest_work
from infinity.plan.splits import OPTIONS, exchange_seconds, gather_seconds, problem_of, splits_of
from infinity.plan.strategy import STRATEGIES
from infinity.plan.transformer import Experts, Transformer, dense_transformer
from infinity.plan.work import ROOT, Work
from infinity.schedule.scheme import Scheme

GB = 1e9
IN_MEMORY, ALL_NVME = STRATEGIES[2], STRATEGIES[-1]
CLUSTER = Machine(
    name="two nodes",
    nodes=2,
    ranks_per_node=4,
    device_bytes=int(6 * GB),
    flops_per_s=40e12,
    device_bytes_per_s=500 * GB,
    link_bytes_per_s=10 * GB,
    host_bytes=int(32 * GB),
    host_bytes_per_s=40 * GB,
    drive_bytes=int(500 * GB),
    drive=DriveSpeed(3 * GB, 1 * GB),
    node_link_bytes_per_s=100 * GB,
    network_bytes_per_s=20 * GB,
)
DENSE = dense_transformer(layers=8, hidden=1024, heads=16, seq=256, vocab=4000)


def mixture(*, layers: int = 6, hidden: int = 512, numel: int = 10**6, others: int = 2 * 10**6) -> Transformer:
    """Eight experts of `numel` in every block but the first, two per token."""
    experts = Experts(8, 2, numel, 0, (*range(1, layers),), dense_block_numel=others)
    return Transformer(layers, hidden, 8, 256, 4000, others + 8 * numel, 4 * 10**6, experts=experts)


@st.composite
def split_works(draw: st.DrawFn) -> Work:
    """A work of 16 ranks with one split, possible or none."""
    size = draw(st.sampled_from([2, 4, 8]))
    name = draw(st.sampled_from([*OPTIONS]))
    layers, hidden, count = draw(st.integers(8, 12)), 64 * draw(st.integers(1, 9)), draw(st.integers(1, 6))
    dense = dense_transformer(layers=layers, hidden=hidden, heads=8, seq=64, vocab=draw(st.integers(10, 999)))
    numel = draw(st.integers(1, 10**5))
    model = mixture(layers=layers, hidden=hidden, numel=numel, others=numel) if name == "expert_ranks" else dense
    settings: dict[str, Any] = {name: size, "checkpointing": draw(st.booleans())}
    return Work(model, ranks=16, samples=draw(st.integers(1, 3)), micro_batches=count, **settings)


@given(work=split_works())
def test_all_ranks_together_have_the_state_once_and_each_tensor_rank_a_copy_of_norms(work: Work) -> None:
    assert problem_of(work) is None
    model, count = work.model, len(work.group_shards)
    copies = (work.tensor_ranks - 1) * (model.root_vector_numel + model.layers * model.vector_numel)
    divided = model.numel + copies
    if work.stages > 1:  # the root's tied embedding is in the first and in the last stage
        blocks = work.model.numel - work.model.root_numel
        root = work.model.root_numel if model.tied_numel else work.model.root_numel / 2
        divided = blocks * math.ceil(model.layers / work.stages) / model.layers + root
    assert 0 <= work.shard_numel * work.stage_ranks - divided < work.stage_ranks
    assert 0 <= sum(work.group_shards) - work.shard_numel <= count
    scheme = replace(work.scheme, update="forward", speculative=False)
    read, written = bytes_of_step(replace(work, micro_batches=1, scheme=scheme), ALL_NVME)
    assert (read, written) == (14 * work.shard_numel, 12 * work.shard_numel)


@given(work=split_works())
def test_a_split_gathers_its_part_and_computes_as_much_per_token(work: Work) -> None:
    model, whole = work.model, replace(work, tensor_ranks=1, expert_ranks=1, stages=1)
    vectors = model.root_vector_numel + model.layers * model.vector_numel
    experts, count = sum(model.expert_numels), len(work.group_numels)
    part = (model.numel - experts - vectors) / work.tensor_ranks + vectors + experts / work.expert_ranks
    if work.stages == 1:
        assert 0 <= sum(work.group_numels) - part <= 2 * count
        assert work.ranks * work.flops / work.tokens == pytest.approx(whole.ranks * whole.flops / whole.tokens)
    else:
        assert work.ranks * work.flops / work.tokens >= whole.ranks * whole.flops / whole.tokens * (1 - 1e-9)


@given(work=split_works())
def test_more_ranks_to_a_split_need_no_more_memory_for_the_model(work: Work) -> None:
    name = next(name for name in OPTIONS if getattr(work, name) > 1)
    works = [replace(work, **{name: count}) for count in (1, 2, 4, 8)]  # type: ignore[arg-type]
    users = ("gathered groups", "gathered parameters", "gradients of a group, to be reduced", "activations of a block")
    for strategy in STRATEGIES:
        memories = [memory_of(each, strategy, pinned_bytes=0, device_is_host=False).device for each in works]
        held = [sum(memory.get(user, 0) for user in users) for memory in memories]
        assert all(more <= less + 24 for less, more in pairwise(held)), "beyond rounding"
        assert held[-1] < held[0] or (name == "stages" and strategy.stage == 3)


def test_collectives_take_what_their_ranks_share() -> None:
    """Of 2 x 4 ranks; every rank takes part, so that the gathers of a node share its network."""
    data = CLUSTER.gather_seconds(40 * GB, 4, apart=2)  # two of each node: two gathers
    assert data == pytest.approx(max(40 * 3 / 4 / 100, 2 * 40 / 2 / 20))
    assert CLUSTER.gather_seconds(40 * GB, 2) == pytest.approx(40 / 2 / 100)  # neighbours
    assert CLUSTER.gather_seconds(40 * GB, 2, apart=4) == pytest.approx(4 * 40 / 2 / 20)  # none in a node
    assert CLUSTER.gather_seconds(40 * GB, 8) == CLUSTER.gather_seconds(40 * GB)
    assert CLUSTER.exchange_seconds(40 * GB, 4) == pytest.approx(40 * 3 / 4 / 100)
    assert CLUSTER.exchange_seconds(40 * GB, 8) == pytest.approx(4 * 40 / 2 / 20)
    assert CLUSTER.gather_seconds(GB, 1) == CLUSTER.exchange_seconds(GB, 1) == 0


def test_blocks_exchange_hidden_states_and_tokens_and_stages_pass_them_on() -> None:
    hidden = 2 * 3 * 256 * 1024  # bytes of three samples
    tensors = Work(DENSE, ranks=8, samples=3, tensor_ranks=4)
    forward, backward = (exchange_seconds(tensors, CLUSTER, 1, backward=each) for each in (False, True))
    assert forward == pytest.approx(2 * 2 * hidden * 3 / 4 / (100 * GB))  # two all-reduces, each two gathers
    assert backward == 2 * forward  # and the recomputed forward
    assert exchange_seconds(replace(tensors, checkpointing=False), CLUSTER, 1, backward=True) == forward
    assert exchange_seconds(tensors, CLUSTER, ROOT, backward=False) == 0
    experts = Work(mixture(hidden=1024), ranks=8, samples=3, expert_ranks=4)
    assert exchange_seconds(experts, CLUSTER, 1, backward=False) == 0  # a block without experts
    there_and_back = exchange_seconds(experts, CLUSTER, 2, backward=False)
    assert there_and_back == pytest.approx(2 * 2 * hidden * 3 / 4 / (100 * GB))  # two experts for each token
    stages = Work(DENSE, ranks=8, samples=3, stages=2)
    assert exchange_seconds(stages, CLUSTER, 1, backward=True) == 0
    assert exchange_seconds(stages, CLUSTER, ROOT, backward=True) == pytest.approx(4 * hidden / (20 * GB))
    block = DENSE.block_numel
    assert gather_seconds(stages, CLUSTER, 2, 2) == pytest.approx(2 * block * 3 / 4 / (100 * GB))  # within a node
    split = 2 * (block + 3 * DENSE.vector_numel) / 4  # gathered by each four times in a node
    assert gather_seconds(tensors, CLUSTER, 2, 2) == pytest.approx(4 * split / 2 / (20 * GB))
    others, owned = 2 * 2 * 10**6, 2 * 8 * 10**6 / 4
    assert gather_seconds(experts, CLUSTER, 2, 2) == pytest.approx((others / 2 + 4 * owned / 2) / (20 * GB))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 6), (4, 6)])
def test_stages_wait_for_the_first_and_the_last_micro_batch(stages: int, micro_batches: int) -> None:
    fast = replace(CLUSTER, device_bytes=10**12, node_link_bytes_per_s=math.inf, network_bytes_per_s=math.inf)
    work = Work(DENSE, ranks=8, samples=8, stages=stages, micro_batches=micro_batches, clipping=False)
    plan = plan_step(work, fast, IN_MEMORY)
    assert plan.simulated is not None and plan.bound == "compute"
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert 1 - plan.lower_bound_seconds / plan.simulated.gradient_seconds == pytest.approx(bubble, abs=1e-3)


def counted() -> list[tuple[Work, float, float, float]]:
    """The works of the table "Counted on four ranks" in docs/parallelism.md: bytes read and written, elements gathered."""
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    rows = re.findall(r"^\| (.+) \| (\d) \| (.+) MB \| (.+) MB \| (.+) M \|$", page, flags=re.MULTILINE)
    works, about = [], ""
    for name, ranks, *figures in rows:
        about, count = name if name != "the same" else about, int(ranks)
        numel = round(1e6 * float(re.findall(r"([\d.]+) M parameters", about)[0]))
        read, written, gathered = (1e6 * float(figure) for figure in figures)
        if "autotp" in about:
            work = Work(Transformer(4, 512, 8, 64, 1000, numel // 5, numel // 5), ranks=4, tensor_ranks=count)
        else:  # three blocks of eight experts: three matrices of 512 x 1024
            others = (numel - 24 * 3 * 512 * 1024) // 4
            experts = Experts(8, 2, 3 * 512 * 1024, 0, (0, 1, 2))
            model = Transformer(3, 512, 8, 64, 1000, others + 8 * experts.numel, others, experts=experts)
            work = Work(model, ranks=4, expert_ranks=count)
        works.append((work, read, written, gathered))
    return works


@pytest.mark.parametrize(("work", "read", "written", "gathered"), counted())
def test_a_step_moves_and_gathers_what_was_counted_on_four_ranks(
    work: Work, read: float, written: float, gathered: float
) -> None:
    """To the digits of the page: compute parameters stayed staged, as there was room."""
    work = replace(work, scheme=Scheme("split", "forward"), clipping=False)
    plan = plan_step(work, replace(CLUSTER, nodes=1), ALL_NVME, cache_bytes=0, pinned_bytes=10**9)
    assert plan.simulated is not None
    moved = plan.simulated.read_bytes, plan.simulated.written_bytes
    assert moved == (pytest.approx(read, rel=3e-3), pytest.approx(written, rel=3e-3))
    assert sum(work.group_numels) == pytest.approx(gathered, rel=6e-3)


def test_all_three_splits_are_counted() -> None:
    assert len(counted()) == 6


OPEN = ("samples", "micro_batches_at_once", "checkpointing", "activations", "gradient_bytes_max")


def planned(work: Work, machine: Machine) -> Plan:
    plan = fastest_that_fits(plans_for(work, machine))
    assert plan is not None
    return plan


@pytest.mark.parametrize("network", [1 * GB, 20 * GB, 1000 * GB])
@pytest.mark.parametrize(
    ("model", "sequences"), [(DENSE, 4), (DENSE, 32), (mixture(numel=10**7), 8), (mixture(numel=10**7), 32)]
)
def test_no_split_that_was_left_out_is_faster(model: Transformer, network: float, sequences: int) -> None:
    machine = replace(CLUSTER, network_bytes_per_s=network)
    asked = Work(model, ranks=8, scheme=Scheme("split", "backward", speculative=True), unasked=True)
    found = planned(fastest_work(asked, machine, sequences=sequences, left_open={*OPEN, *OPTIONS}), machine)
    seconds = {}
    for split in splits_of(asked, machine, OPTIONS):
        if sequences % split.data_ranks == 0 and sequences // split.data_ranks >= split.stages:
            work = fastest_work(split, machine, sequences=sequences, left_open=OPEN)
            assert work.tokens == found.work.tokens == sequences * model.seq
            seconds[split] = planned(work, machine).step_seconds
    assert len(seconds) > 1
    assert found.step_seconds <= 1.05 * min(seconds.values())


def test_a_model_whose_blocks_are_too_large_to_gather_fits_in_parts() -> None:
    asked = Work(mixture(numel=10**8), ranks=8)
    how: dict[str, Any] = {"sequences": 8, "left_open": OPEN}
    whole = fastest_work(asked, CLUSTER, **how)
    assert fastest_that_fits(plans_for(whole, CLUSTER)) is None
    how["left_open"] = {*OPEN, *OPTIONS}
    assert planned(fastest_work(asked, CLUSTER, **how), CLUSTER).work.expert_ranks > 1
