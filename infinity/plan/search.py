"""Finds the fastest step for a number of tokens: its micro-batches, and where activations and gradients wait.

[Note: The search]
Each split of the model over ranks, and shape of a step (samples per micro-batch, micro-batches at once, recomputation or
not) is tried with each strategy.
Memory decides the remainder: activations stay on the device, and gradients in host memory, as far as there is room.
Configurations that do not fit are dropped before any simulation. The others are simulated in the order of an estimate,
until the next estimate is no shorter than the shortest simulated step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from infinity.errors import BudgetError
from infinity.plan.estimate import bytes_of_step, memory_of, pipeline_of, updated_in_backward
from infinity.plan.frozen import frozen_plans
from infinity.plan.machine import Machine
from infinity.plan.planner import AS_FAST, USABLE, Placement, place, share_needed, strategies_on, updated_late
from infinity.plan.program import update_bytes
from infinity.plan.splits import OPTIONS, exchange_seconds, gather_seconds, splits_of, unsplit
from infinity.plan.strategy import Strategy
from infinity.plan.work import ROOT, Work
from infinity.schedule.scheme import COMPUTE_BYTES, Scheme, choose_update
from infinity.schedule.spilling import GRADIENT_BYTES

SIMULATED_MAX = 8
"""Steps that a search simulates at most; usually a few suffice."""

HELD_SHARE = 0.8
"""Share of the gradients in a bound; others are updated before their forward: [Note: Balance of the passes]."""


def fastest_work(
    asked: Work,
    machine: Machine,
    *,
    sequences: int,
    left_open: Collection[str],
    pinned_bytes: int | None = None,
    cache_bytes: int | None = None,
) -> Work:
    """Return the work with the fastest step that fits; if none fits, the one that lacks the smallest share of a memory.

    sequences: of a step on all ranks. left_open: the attributes of `Work` to choose.
    """
    found, seconds = None, math.inf
    nearest, least_share = asked, math.inf
    for split in splits_of(asked, machine, left_open):
        ways: list[Placement] = []
        shapes = (shape for shape in _shapes(split, sequences, left_open) if AS_FAST * _least(shape, machine) < seconds)
        for shape, strategy in product(shapes, strategies_on(machine)):
            for work in _placed(shape, machine, strategy, left_open, pinned_bytes):
                # Cached elements are not updated speculatively.
                nbytes = 0 if cache_bytes is None and work.scheme.speculative else cache_bytes
                placed = place(work, machine, strategy, pinned_bytes, nbytes)
                if placed.fits:
                    ways.append(placed)
                elif (share := share_needed(placed.memory, machine)) < least_share:
                    nearest, least_share = work, share
        best, best_seconds = _fastest(ways, seconds / AS_FAST)
        if best is not None:
            found, seconds = best, best_seconds
    found = found or nearest
    return replace(found, scheme=_scheme_of(asked, found.passes), unasked=asked.unasked)


def fastest_lora_work(asked: Work, machine: Machine, *, sequences: int, left_open: Collection[str], **how: Any) -> Work:
    """As `fastest_work`, for adapters on frozen weights (no state, no writes, no split of the model). `how`: as for
    `frozen.frozen_plans`. Each rank has at least one sequence."""
    asked, left_open = unsplit(asked), {*left_open} - {*OPTIONS}
    found, least, fitting = asked, (True, math.inf), set()
    for shape in _shapes(asked, max(1, sequences // asked.ranks) * asked.ranks, left_open):
        for activations in ("none", "cpu") if "activations" in left_open else (asked.activations,):
            way = shape.samples, shape.checkpointing, activations
            if way in fitting:  # with fewer at once it would read more
                continue
            work = replace(shape, activations=activations, unasked=asked.unasked)
            plan, _ = frozen_plans(work, machine, **how)
            rank = not plan.fits, plan.seconds if plan.fits else share_needed(plan.memory, machine)
            if plan.fits:
                fitting.add(way)
            if rank < least:
                found, least = work, rank
    return found


def _moved_activations(way: Placement) -> int:
    """Return the bytes of saved activations that leave the device in a pass."""
    return sum(way.work.saved_elsewhere(device_is_host=way.machine.device_is_host))


def _estimated_seconds(way: Placement) -> float:
    """Estimate the step time, as if everything within a pass overlaps and no passes do."""
    work, machine, strategy, cache = way.work, way.machine, way.strategy, way.cache
    forward, between, backward = _pass_seconds(way)
    in_step = strategy.update_of(work.scheme) == "step"
    if not strategy.uses_nvme:
        traffic = update_bytes(strategy, work.scheme) * work.shard_numel
        updating = traffic / machine.memory_bytes_per_s(of_host=strategy.on_host)
        passing = forward + (work.passes - 1) * between + backward
        return passing + (updating if in_step else max(0.0, updating - forward))
    # State moves in the first forward, in the last backward, and in the step; all other bytes move in every pass.
    compute, other = (math.ceil(nbytes * work.shard_numel) for nbytes in strategy.stored_bytes(work.scheme))
    state_read, state_written = other - sum(cache.other_state), compute + other - cache.nbytes
    plain_read, plain_written = bytes_of_step(work, strategy)
    read = max(0, plain_read - other - sum(cache.compute)) / work.passes
    written = max(0, plain_written - other - compute) / work.passes
    early = sum(updated_in_backward(work, strategy, cache)) / work.shard_numel

    def seconds(busy: float, *, state: float, passing: float) -> float:
        """Estimate a part of the step with these shares of the state, and of the bytes that move in every pass."""
        moved = passing * read + state * state_read, passing * written + state * state_written
        return max(busy, way.drive.lower_bound_seconds(*moved))

    return (
        seconds(forward, state=0 if in_step else 1 - early, passing=0.5)
        + (work.passes - 1) * seconds(between, state=0, passing=1)
        + seconds(backward, state=0 if in_step else early, passing=0.5)
        + seconds(0, state=1 if in_step else 0, passing=0)
    )


def _pass_seconds(way: Placement) -> tuple[float, float, float]:
    """Estimate the first forward, a backward with the next forward, and the last backward, without the drive: the longer of
    computation, network and link in each."""
    work, machine, strategy = way.work, way.machine, way.strategy
    uses = 2 * len(work.group_shards) * work.micro_batches
    computing = (work.flops / machine.flops_per_s + uses * machine.group_seconds) / work.passes
    exchanging, gathering = _network_seconds(work, machine, strategy)
    computing = work.stretch * (exchanging + max(computing, gathering))
    forward, saved = computing / (4 if work.checkpointing else 3), _moved_activations(way)
    from_host = strategy.parameters != "none" or strategy.optimizer == "nvme"
    gathered = COMPUTE_BYTES * work.shard_numel if from_host else 0
    reduced = GRADIENT_BYTES * work.shard_numel if strategy.on_host else 0
    link = machine.link_bytes_per_s
    return (
        max(forward, max(gathered, saved) / link),
        max(computing, max(2 * gathered + saved, saved + reduced) / link),
        max(computing - forward, max(gathered + saved, reduced) / link),
    )


def _network_seconds(work: Work, machine: Machine, strategy: Strategy) -> tuple[float, float]:
    """Return the seconds of a pass in which computations wait for other ranks, and of its gathers and reductions."""
    exchanging = gathering = 0.0
    for group in range(len(work.group_shards)):
        exchanging += sum(exchange_seconds(work, machine, group, backward=backward) for backward in (False, True))
        gathers = 1 if group == ROOT or strategy.stage < 3 else 2
        gathering += gathers * gather_seconds(work, machine, group, COMPUTE_BYTES)
        gathering += work.micro_batches_at_once * gather_seconds(work, machine, group, GRADIENT_BYTES)
    return exchanging, gathering


def _least(work: Work, machine: Machine) -> float:
    return work.stretch * work.flops / machine.flops_per_s


def _fastest(ways: list[Placement], best_seconds: float) -> tuple[Work | None, float]:
    """Return the way with the shortest step, and its seconds, if these are less than `best_seconds`."""
    best = None

    def rank(estimated: tuple[float, Placement]) -> tuple[int, int, int]:
        """Return the sort key: estimate, then bytes written, then activation bytes moved."""
        seconds, way = estimated
        written = bytes_of_step(way.work, way.strategy)[1] - way.cache.nbytes
        return math.floor(math.log(seconds, AS_FAST)), written, _moved_activations(way)

    for estimate, way in sorted(((_estimated_seconds(way), way) for way in ways), key=rank)[:SIMULATED_MAX]:
        if AS_FAST * estimate >= best_seconds:
            break
        with contextlib.suppress(BudgetError):
            seconds = way.simulate().seconds
            if seconds < best_seconds:
                best, best_seconds = way.work, seconds
    return best, best_seconds


def _scheme_of(asked: Work, passes: int) -> Scheme:
    scheme = asked.scheme
    update, speculative = choose_update(
        scheme.update,
        clipping=asked.clipping,
        accumulation=passes,
        loss_scaling=False,
        collective=scheme.collective,
    )
    return replace(scheme, update=update, speculative=speculative)


def _shapes(asked: Work, sequences: int, left_open: Collection[str]) -> Iterator[Work]:
    """Yield the ways to cut a step into micro-batches and run them, the most at once first."""
    recomputed = (False, True) if "checkpointing" in left_open else (asked.checkpointing,)
    of_rank = sequences // asked.data_ranks if sequences % asked.data_ranks == 0 else 0
    for samples in _divisors(of_rank) if "samples" in left_open else [asked.samples]:
        count = of_rank // samples if of_rank % samples == 0 else 0
        at_once = _divisors(count)[::-1] if count >= asked.stages else []
        if "micro_batches_at_once" not in left_open or asked.stages > 1:
            at_once = [passing for passing in at_once if passing == asked.micro_batches_at_once]
        for passing, checkpointing in product(at_once, recomputed):
            yield replace(
                asked,
                samples=samples,
                micro_batches=count,
                micro_batches_at_once=passing,
                checkpointing=checkpointing,
                scheme=_scheme_of(asked, count // passing),
                unasked=False,
            )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _placed(
    shape: Work, machine: Machine, strategy: Strategy, left_open: Collection[str], pinned_bytes: int | None
) -> Iterator[Work]:
    """Yield the shape with activations and gradients placed by memory, with and without speculative updates."""
    for timed in dict.fromkeys((shape, updated_late(shape) if strategy.parameters == "nvme" else shape)):
        for work in _with_activations(timed, machine, strategy) if "activations" in left_open else [timed]:
            waits = strategy.parameters == "nvme" and "gradient_bytes_max" in left_open
            yield from _with_gradients(work, machine, strategy, pinned_bytes) if waits else [work]


def _with_activations(work: Work, machine: Machine, strategy: Strategy) -> Iterator[Work]:
    """Yield all saved activations on the device; or in host memory what does not fit there; or all on NVMe."""

    def room_left(work: Work) -> float:
        return (
            USABLE * machine.device_bytes - memory_of(work, strategy, pinned_bytes=0, device_is_host=False).device_bytes
        )

    work = replace(work, activations="none")
    if machine.device_is_host or room_left(work) >= 0:
        yield work
    else:
        moved = replace(work, activations="cpu")
        tensor = work.saved_tensor_bytes
        staying = max(0, int(room_left(moved)) // work.in_flight // tensor * tensor)
        yield replace(moved, activation_host_bytes_max=max(0, sum(work.saved_bytes) - staying))
    if strategy.uses_nvme and not work.durable and (machine.device_is_host or room_left(work) < 0):
        yield replace(work, activations="nvme")


def _with_gradients(work: Work, machine: Machine, strategy: Strategy, pinned_bytes: int | None) -> Iterator[Work]:
    """Yield gradients all in host memory; or a share that fits and, if speculative, keeps the passes even; or none."""
    host_bytes = machine.host_bytes / machine.ranks_per_node
    spilled = replace(work, gradient_bytes_max=0)

    def room_left(work: Work) -> float:
        pool_bytes = pipeline_of(work, strategy, pinned_bytes, host_bytes, cache=None).pinned_bytes
        memory = memory_of(spilled, strategy, pinned_bytes=pool_bytes, device_is_host=machine.device_is_host)
        return USABLE * host_bytes - memory.host_bytes

    waiting = work.gradient_itemsize * work.gradients_that_wait(strategy)
    if room_left(work) >= waiting:
        yield work
    elif strategy.all_gradients_wait(work.scheme):
        bound = HELD_SHARE * waiting
        while 0 < bound and (room := room_left(replace(work, gradient_bytes_max=int(bound)))) < bound:
            bound = room  # for this bound the pool may be larger
        if bound > 0:
            yield replace(work, gradient_bytes_max=int(bound))
    if not work.scheme.speculative or room_left(spilled) < 0:
        yield spilled
