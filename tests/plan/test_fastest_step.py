"""What the search promises: no way that was left out is faster, what was asked for is kept, and what comes nearest is named."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from infinity.cli.plan.machines import PRESETS
from infinity.plan.frozen import frozen_plans
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.planner import Plan, fastest_that_fits, place, plans_for, share_needed
from infinity.plan.search import fastest_lora_work, fastest_work
from infinity.plan.strategy import STRATEGIES
from infinity.plan.transformer import transformer_of
from infinity.plan.work import Work
from infinity.schedule.scheme import Scheme

GB = 1e9
OPEN = ("samples", "micro_batches_at_once", "checkpointing", "activations", "gradient_bytes_max")
SMALL = Machine(
    name="a small one",
    device_bytes=int(5 * GB),
    flops_per_s=40e12,
    device_bytes_per_s=500 * GB,
    link_bytes_per_s=10 * GB,
    host_bytes=int(8 * GB),
    host_bytes_per_s=40 * GB,
    drive_bytes=int(500 * GB),
    drive=DriveSpeed(3 * GB, 1 * GB),
    group_seconds=1e-4,
)


def asked_for(numel: float, *, seq: int = 2048, clipping: bool = True, **settings: Any) -> Work:
    scheme = Scheme("split", "backward", speculative=clipping)
    model = transformer_of(int(numel), seq=seq, vocab=32_000)
    return Work(model, clipping=clipping, scheme=scheme, unasked=True, **settings)


def planned(work: Work, machine: Machine) -> Plan:
    plan = fastest_that_fits(plans_for(work, machine))
    assert plan is not None
    return plan


@pytest.mark.parametrize("clipping", [True, False])
def test_eight_billion_parameters_on_24_gb_reach_the_speed_of_the_gpu_with_large_steps(clipping: bool) -> None:
    machine = PRESETS["rtx4090-gen4"]
    work = fastest_work(asked_for(8 * GB, clipping=clipping), machine, sequences=64, left_open=OPEN)
    plan = planned(work, machine)
    assert work.tokens == 131_072 and plan.strategy.parameters == plan.strategy.optimizer == "nvme"
    assert plan.bound == "compute" and plan.lower_bound_seconds >= 0.95 * plan.step_seconds


def _ways(asked: Work, sequences: int) -> list[Work]:
    """Coarser than those of the search in where things wait, and all shapes."""
    ways = []
    counts = [count for count in range(1, sequences + 1) if sequences % count == 0]
    for count, at_once, recomputed, activations, gradients in product(
        counts, counts, (True, False), ("none", "cpu", "nvme"), (None, 0)
    ):
        if count % at_once == 0:
            speculative = asked.clipping or count > at_once
            ways.append(
                replace(
                    asked,
                    samples=sequences // count,
                    micro_batches=count,
                    micro_batches_at_once=at_once,
                    checkpointing=recomputed,
                    activations=activations,
                    gradient_bytes_max=gradients,
                    scheme=replace(asked.scheme, speculative=speculative),
                )
            )
    return ways


@pytest.mark.parametrize(
    "changes",
    [
        {"device_bytes": int(24 * GB)},
        {"device_bytes": int(2.6 * GB)},
        {"host_bytes": int(5 * GB)},
        {"drive": DriveSpeed(1 * GB, 0.3 * GB)},
    ],
    ids=str,
)
def test_no_way_that_was_left_out_is_faster(changes: dict[str, Any]) -> None:
    machine, asked = replace(SMALL, **changes), asked_for(0.3 * GB, seq=1024)
    found = planned(fastest_work(asked, machine, sequences=8, left_open=OPEN), machine)
    others = (fastest_that_fits(plans_for(work, machine)) for work in _ways(asked, 8))
    fastest = min(plan.step_seconds for plan in others if plan is not None)
    assert found.step_seconds <= 1.05 * fastest


@pytest.mark.parametrize("device_gb", [2.3, 5])
def test_adapters_pass_in_the_micro_batches_that_are_the_fastest_for_them(device_gb: float) -> None:
    machine, asked = replace(SMALL, device_bytes=int(device_gb * GB)), asked_for(0.3 * GB, seq=1024)
    found = fastest_lora_work(asked, machine, sequences=8, left_open=OPEN, lora_rank=16)
    plans = [frozen_plans(work, machine, lora_rank=16)[0] for work in (found, *_ways(asked, 8))]
    assert plans[0].fits and plans[0].seconds == min(plan.seconds for plan in plans if plan.fits)


def test_what_is_not_left_open_is_kept() -> None:
    asked = asked_for(0.3 * GB, samples=2, micro_batches_at_once=4, activations="nvme", gradient_bytes_max=10**8)
    found = fastest_work(asked, SMALL, sequences=16, left_open=())
    assert found == replace(asked, micro_batches=8)


def test_where_nothing_fits_the_nearest_is_found() -> None:
    asked, machine = asked_for(70 * GB), PRESETS["rtx3060-gen4"]

    def least(*works: Work) -> float:
        pairs = product(works, STRATEGIES)
        memories = (place(replace(work, unasked=False), machine, strategy, None, 0).memory for work, strategy in pairs)
        return min(share_needed(memory, machine) for memory in memories)

    found = fastest_work(asked, machine, sequences=8, left_open=OPEN)
    assert 1 < least(found) <= 1.01 * least(*_ways(asked, 8))
