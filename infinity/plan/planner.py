"""The plan of a training on a machine given as numbers: whether it fits, the step time, and what limits it. Measures
nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infinity.errors import BudgetError
from infinity.plan import estimate
from infinity.plan.estimate import HostCache, Memory, Pipeline
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.program import step_of
from infinity.plan.resources import Simulated
from infinity.plan.simulator import simulate
from infinity.plan.strategy import STRATEGIES, Strategy
from infinity.plan.work import Work
from infinity.schedule.live import keeps_all
from infinity.schedule.scheme import COMPUTE_BYTES
from infinity.schedule.spilling import BUFFER_SHARES
from infinity.schedule.timeline import Interval, total, united
from infinity.units import DAY_SECONDS, format_bytes

USABLE = 0.95
"""Share of a memory that can be planned with."""

RATED_DAYS = 5 * 365
"""Days for which drives are rated, at one drive write per day (DWPD)."""

AS_FAST = 1.02
"""Steps within this factor count as equally fast; no prediction is more exact."""


PASSES_SIMULATED_MAX = 8
"""Passes simulated for a step that does not fit: more take seconds, for a number of little use."""


@dataclass(frozen=True)
class Placement:
    """Where the states of some work are on a machine, with a strategy. reasons: why that does not fit."""

    work: Work
    machine: Machine
    strategy: Strategy
    pipeline: Pipeline
    cache: HostCache
    memory: Memory
    reasons: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def drive(self) -> DriveSpeed:
        """One rank's share of the drives. Raises BudgetError if there is none and the strategy needs one."""
        return self.machine.drive_of_rank() if self.strategy.uses_nvme else DriveSpeed(math.inf, math.inf)

    def simulate(self, *, discards: bool = False) -> Simulated:
        """Simulate a step; `discards` as for `step_of`. Raises BudgetError if not even one group fits."""
        step = step_of(self.work, self.machine, self.strategy, self.pipeline, self.cache, discards=discards)
        return simulate(step, self.drive, math.inf if self.machine.device_is_host else self.machine.link_bytes_per_s)


@dataclass(frozen=True)
class Plan(Placement):
    """The plan of one strategy. Its work is as it will be done (`Work.unasked`)."""

    simulated: Simulated | None
    """None if not even one group fits."""
    lower_bound_seconds: float
    """The larger of compute, and the bytes of the step over the drives' bandwidth."""
    plain_bytes: tuple[int, int]
    """(read, written) of one rank with nothing cached, and nothing staged from forward to backward."""

    @property
    def step_seconds(self) -> float:
        """Predicted step time; infinite without a simulation."""
        return self.simulated.seconds if self.simulated else math.inf

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens / self.step_seconds if self.simulated else 0.0

    @property
    def bound(self) -> str:
        return "compute" if self.lower_bound_seconds <= self.work.flops / self.machine.flops_per_s else "the drive"

    @property
    def hours_per_billion_tokens(self) -> float:
        return 1e9 / self.work.tokens * self.step_seconds / 3600

    @property
    def written_bytes_per_token(self) -> float:
        return self.simulated.written_bytes * self.machine.ranks / self.work.tokens if self.simulated else 0.0

    @property
    def drive_days(self) -> float | None:
        """Lifetime of the drives in days of uninterrupted training; None if nothing is written."""
        daily = self.drive_writes_per_day
        return RATED_DAYS / daily if daily else None

    @property
    def drive_writes_per_day(self) -> float | None:
        """Number of times that a day of training writes the drives' capacity; None if it is unknown."""
        if not self.strategy.uses_nvme or not self.machine.drive_bytes or self.simulated is None:
            return None
        written = self.simulated.written_bytes * self.machine.ranks_per_node
        return written * DAY_SECONDS / self.step_seconds / self.machine.drive_bytes

    @property
    def discarded_bytes(self) -> tuple[int, int]:
        """Additional bytes (read, written) of one rank in a step that discards its speculative updates."""
        if not self.work.scheme.speculative:
            return 0, 0
        early = estimate.updated_in_backward(self.work, self.strategy, self.cache)
        read, written = self.work.scheme.discarded_bytes
        # If compute parameters stay staged, discarding saves no read of a gather.
        not_spared = COMPUTE_BYTES * sum(early[group] for group in self.pipeline.staying)
        return math.ceil(read * sum(early)) + not_spared, math.ceil(written * sum(early))

    def limits(self) -> list[tuple[str, str, float]]:
        """Return (part, resource, share of the part's time) for the busiest resource in each part of the step."""
        if self.simulated is None:
            return []
        middle = self.simulated.gradient_seconds
        names = ("forward and backward", "optimizer step")
        if self.strategy.update_of(self.work.scheme) != "step":
            names = ("forward, backward and updates", "after the backward")
        parts = ((names[0], 0.0, middle), (names[1], middle, self.simulated.seconds))
        limits = []
        for part, start, end in parts:
            if end > start:
                resource, busy = busiest(self.simulated.timeline, start, end)
                limits.append((part, resource, busy / (end - start)))
        return limits


def busiest(timeline: Sequence[Interval], start: float, end: float) -> tuple[str, float]:
    """Return the resource that works longest between `start` and `end`, and its seconds. Reads and writes: "drive"."""
    by_resource: dict[str, list[tuple[float, float]]] = {}
    for resource, _, began, ended in timeline:
        if began < end and ended > start:
            name = "drive" if resource in ("read", "write") else resource.replace("_", " ")
            by_resource.setdefault(name, []).append((max(began, start), min(ended, end)))
    return max(((name, total(united(spans))) for name, spans in by_resource.items()), key=lambda item: item[1])


def plan_step(
    work: Work,
    machine: Machine,
    strategy: Strategy,
    *,
    pinned_bytes: int | None = None,
    cache_bytes: int | None = None,
) -> Plan:
    """Return the plan of one strategy.

    pinned_bytes: size of each rank's pool; None for a comfortable one. cache_bytes: size of each rank's host cache.
    None: all remaining memory, or nothing if that is faster. Durable work caches nothing.

    A cache minimises the bytes moved, but cached elements are not updated speculatively. So it may leave all updates to
    the forward, which waits for the drive while the backward leaves it idle.
    """
    plan = _plan_step(work, machine, strategy, pinned_bytes, cache_bytes)
    is_bound = plan.step_seconds <= AS_FAST * plan.lower_bound_seconds
    if cache_bytes is not None or not plan.cache.nbytes or is_bound or not plan.fits:
        return plan
    for pool in dict.fromkeys((pinned_bytes, plan.pipeline.pinned_bytes)):
        bare = _plan_step(work, machine, strategy, pool, 0)
        if bare.fits and AS_FAST * bare.step_seconds < plan.step_seconds:
            return bare
    return plan


def _plan_step(
    work: Work, machine: Machine, strategy: Strategy, pinned_bytes: int | None, cache_bytes: int | None
) -> Plan:
    """Do `plan_step`; if `cache_bytes` is None, all remaining memory is the cache."""
    if work.unasked and work.scheme.speculative and strategy.update_of(work.scheme) == "backward":
        asked, later = (
            _plan_step(each, machine, strategy, pinned_bytes, cache_bytes)
            for each in (replace(work, unasked=False), updated_late(work))
        )
        return asked if _is_worth_it(asked, later) else later
    if machine.device_is_host and work.ranks == 1 and work.passes > 1 and strategy.stage == 3 and strategy.on_host:
        bytes_per_element = COMPUTE_BYTES + work.gradient_itemsize
        work = replace(work, keeps_gathered=keeps_all(work.shard_numel, bytes_per_element, machine.host_bytes))
    placed = place(work, machine, strategy, pinned_bytes, cache_bytes)
    simulated = None
    plain_bytes = estimate.bytes_of_step(work, strategy)
    lower_bound_seconds = work.flops / machine.flops_per_s
    worth_it = placed.fits or work.passes <= PASSES_SIMULATED_MAX
    if worth_it and (not strategy.uses_nvme or machine.drive is not None):
        try:
            simulated = placed.simulate()
        except BudgetError as error:
            placed = replace(placed, reasons=(*placed.reasons, str(error)))
        moved = (simulated.read_bytes, simulated.written_bytes) if simulated else plain_bytes
        lower_bound_seconds = max(lower_bound_seconds, placed.drive.lower_bound_seconds(*moved))
    return Plan(**vars(placed), simulated=simulated, lower_bound_seconds=lower_bound_seconds, plain_bytes=plain_bytes)


def updated_late(work: Work) -> Work:
    scheme = work.scheme
    return replace(work, scheme=replace(scheme, update=scheme.late, speculative=False)) if scheme.speculative else work


def _is_worth_it(early: Plan, later: Plan) -> bool:
    """Return True if the engine would make default speculative updates, and the step is no longer than without."""
    second = estimate.second_slot_bytes(early.work, early.strategy, early.cache)
    needed = (early.memory.nvme_bytes + second) * early.machine.ranks_per_node
    has_effect = early.discarded_bytes[1] > 0 and needed <= early.machine.drive_room_bytes
    return has_effect and early.step_seconds <= later.step_seconds and early.fits >= later.fits


def some_strategy_fits(work: Work, machine: Machine, *, pinned_bytes: int | None, cache_bytes: int | None) -> bool:
    """Return True if the memory suffices for one of the strategies; simulates no step."""
    work = updated_late(work) if work.unasked else work
    return any(place(work, machine, strategy, pinned_bytes, cache_bytes).fits for strategy in strategies_on(machine))


def place(
    work: Work, machine: Machine, strategy: Strategy, pinned_bytes: int | None, cache_bytes: int | None
) -> Placement:
    host_bytes = machine.host_bytes / machine.ranks_per_node
    on_host = machine.device_is_host
    if work.durable:
        cache_bytes = 0
    elif cache_bytes is None:
        pipeline = estimate.pipeline_of(work, strategy, pinned_bytes, host_bytes, cache=None)
        memory = estimate.memory_of(work, strategy, pinned_bytes=pipeline.pinned_bytes, device_is_host=on_host)
        cache_bytes = max(0, int(USABLE * host_bytes) - memory.host_bytes)
        pinned_bytes = pipeline.pinned_bytes
    cache = estimate.host_cache_of(work, strategy, cache_bytes)
    pipeline = estimate.pipeline_of(work, strategy, pinned_bytes, host_bytes, cache=cache)
    memory = estimate.memory_of(work, strategy, pinned_bytes=pipeline.pinned_bytes, device_is_host=on_host, cache=cache)
    reasons = _why_not(work, machine, strategy, pipeline, memory)
    return Placement(work, machine, strategy, pipeline, cache, memory, tuple(reasons))


def _tiers(memory: Memory, machine: Machine, drive_room_bytes: float) -> list[tuple[str, int, float, str]]:
    ranks = machine.ranks_per_node
    tiers = [
        ("host memory", memory.host_bytes * ranks, USABLE * machine.host_bytes, "a node"),
        ("NVMe", memory.nvme_bytes * ranks, drive_room_bytes, "a node"),
    ]
    if not machine.device_is_host:
        tiers.insert(0, ("GPU memory", memory.device_bytes, USABLE * machine.device_bytes, "a GPU"))
    return tiers


def share_needed(memory: Memory, machine: Machine) -> float:
    """Return the needed share of the scarcest tier; above 1 if it is too small."""
    return max(
        need / have if have else math.inf for _, need, have, _ in _tiers(memory, machine, machine.drive_room_bytes)
    )


def what_lacks(memory: Memory, machine: Machine, *, drive_room_bytes: float, pool: tuple[int, int] | None) -> list[str]:
    """Return a sentence for each tier that lacks memory. pool: bytes of the pinned pool, and the fewest with which it
    works; None if NVMe is not used."""
    reasons = []
    for tier, need, have, where in _tiers(memory, machine, drive_room_bytes):
        if need > have:
            reasons.append(f"{tier}: {format_bytes(need)} needed, {format_bytes(have)} usable on {where}")
    if pool is not None and machine.drive is None:
        reasons.append("NVMe: the machine has no drive")
    if pool is not None and pool[0] < pool[1]:
        reasons.append(f"pinned pool: {format_bytes(pool[0])} is too small, the groups need {format_bytes(pool[1])}")
    return reasons


def _why_not(work: Work, machine: Machine, strategy: Strategy, pipeline: Pipeline, memory: Memory) -> list[str]:
    pool = (pipeline.pinned_bytes, estimate.pinned_bytes_min(work, strategy)) if strategy.uses_nvme else None
    reasons = what_lacks(memory, machine, drive_room_bytes=machine.drive_room_bytes, pool=pool)
    if work.durable and strategy.optimizer != "nvme":
        reasons.append("durability: masters and optimizer state must be on NVMe, where they are committed")
    have, need = work.activation_buffer_bytes, BUFFER_SHARES * work.saved_tensor_bytes
    if work.activations == "nvme" and not strategy.uses_nvme:
        reasons.append("saved activations: they can be on NVMe only if parameters or optimizer state are")
    elif work.activations == "nvme" and have < need:
        reasons.append(
            f"saved activations: their buffer has {format_bytes(have)}, but the largest needs {format_bytes(need)}"
        )
    return reasons


def plans_for(
    work: Work, machine: Machine, *, pinned_bytes: int | None = None, cache_bytes: int | None = None
) -> list[Plan]:
    return [
        plan_step(work, machine, strategy, pinned_bytes=pinned_bytes, cache_bytes=cache_bytes)
        for strategy in strategies_on(machine)
    ]


def strategies_on(machine: Machine) -> list[Strategy]:
    """Return the strategies for `machine`. On a CPU all state that is not on NVMe is in host memory."""
    if not machine.device_is_host:
        return [*STRATEGIES]
    return [some for some in STRATEGIES if some.optimizer == "nvme" or some.parameters == "cpu"]


def fastest_that_fits(plans: Sequence[Plan]) -> Plan | None:
    """Return the plan with the shortest step of those that fit; the first one if several are equally fast."""
    fitting = [plan for plan in plans if plan.fits]
    shortest = min((plan.step_seconds for plan in fitting), default=0.0)
    return next((plan for plan in fitting if plan.step_seconds <= AS_FAST * shortest), None)
