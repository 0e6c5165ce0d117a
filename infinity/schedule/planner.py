"""Floor 3. The plan of a training: does it fit, how long is a step, what limits it, on a machine given as numbers.

The step is simulated (simulator.py) with the memory and bytes of estimate.py. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.schedule.estimate import (
    COPY_BYTES,
    GRADIENT_BYTES,
    STATE_BYTES,
    STRATEGIES,
    Memory,
    Pipeline,
    Strategy,
    Work,
    bytes_of_step,
    memory_of,
    pinned_bytes_min,
    pipeline_of,
)
from infinity.schedule.floor import MASTER_BYTES, DriveSpeed
from infinity.schedule.lookahead import plan_look_ahead
from infinity.schedule.simulator import Interval, Resources, Simulated, Step, SubGroup, Use, simulate
from infinity.units import format_bytes

USABLE = 0.95
"""The share of a memory that can be planned with; the rest goes to fragmentation and to what else lives there."""

ADAM_BYTES = 28
"""Memory traffic of a fused AdamW per element: parameter, gradient and moments read, all but the gradient written."""

CAST_BYTES = 6
"""The same for the new 16-bit copy: read from fp32 and written."""

NORM_BYTES = 12
"""The same for the norm of the gradients and for clipping: read, and read and written again."""

SIMULATED_SUB_GROUPS_MAX = 4096
"""Beyond it, neighbours are simulated as one."""

DAY_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One or more equal nodes. Rates are in bytes per second.

    Attributes:
        name: for people.
        nodes: how many.
        ranks_per_node: GPUs of each; on a machine that computes on its CPU, processes.
        device_is_host: computing on the CPU.
        device_bytes: memory of one GPU; without meaning where `device_is_host`.
        flops_per_s: that one rank reaches while training (not its peak).
        device_bytes_per_s: memory bandwidth of one GPU.
        link_bytes_per_s: between host and one GPU, each way.
        host_bytes, host_bytes_per_s: memory of one node and its bandwidth.
        drive_bytes: capacity of one node's drives together, 0 for none or unknown.
        drive_free_bytes: what of it can be used; None for all.
        drive: what they give together.
        node_link_bytes_per_s: between GPUs of one node, one GPU's way out.
        network_bytes_per_s: one node's way out to the others.
        collective_seconds: of a collective, however small.
        group_seconds: of a use of a group, however small: launches, hooks, Python.
    """

    name: str
    nodes: int = 1
    ranks_per_node: int = 1
    device_is_host: bool = False
    device_bytes: int = 0
    flops_per_s: float
    device_bytes_per_s: float = math.inf
    link_bytes_per_s: float = math.inf
    host_bytes: int
    host_bytes_per_s: float
    drive_bytes: int = 0
    drive_free_bytes: int | None = None
    drive: DriveSpeed | None = None
    node_link_bytes_per_s: float = math.inf
    network_bytes_per_s: float = math.inf
    collective_seconds: float = 0.0
    group_seconds: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def gather_seconds(self, nbytes: float) -> float:
        """An all-gather to `nbytes`, or a reduce-scatter from it, over all ranks.

        Of what a rank must get, the part from its own node comes over the node's links, and that from other nodes once per
        node over the network; the slower of the two decides.
        """
        if self.ranks == 1:
            return 0.0
        inside = nbytes * (self.ranks - 1) / self.ranks / self.node_link_bytes_per_s
        outside = nbytes * (self.nodes - 1) / self.nodes / self.network_bytes_per_s
        return self.collective_seconds + max(inside if self.ranks_per_node > 1 else 0.0, outside)

    def drive_of_rank(self) -> DriveSpeed:
        """One rank's share. Raises BudgetError where there is no drive."""
        if self.drive is None:
            raise BudgetError(f"{self.name} has no drive: plan without NVMe, or say what its drives give")
        share = 1 / self.ranks_per_node
        both = self.drive.together
        return DriveSpeed(
            self.drive.read_bytes_per_s * share,
            self.drive.write_bytes_per_s * share,
            None if both is None else (both[0] * share, both[1] * share),
        )

    def update_bytes_per_s(self, strategy: Strategy) -> float:
        """The memory bandwidth that one rank's optimizer has."""
        on_host = strategy.on_host or self.device_is_host
        return self.host_bytes_per_s / self.ranks_per_node if on_host else self.device_bytes_per_s


@dataclass(frozen=True)
class Plan:
    """What one strategy comes to.

    Attributes:
        strategy, machine, work, pipeline: what was planned.
        memory: of one rank.
        reasons: why it doesn't fit, a sentence each; empty where it does.
        simulated: the step of one rank; None where not even one group fits.
        floor_seconds: the larger of compute and the bytes of the step over the drives' bandwidth.
        plain_bytes: (read, written) of one rank with nothing cached; what stays staged from forward to backward is read once.
    """

    strategy: Strategy
    machine: Machine
    work: Work
    pipeline: Pipeline
    memory: Memory
    reasons: tuple[str, ...]
    simulated: Simulated | None
    floor_seconds: float
    plain_bytes: tuple[int, int]

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def step_seconds(self) -> float:
        """Predicted; infinite where there is no step."""
        return self.simulated.seconds if self.simulated else math.inf

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.work.tokens / self.step_seconds if self.simulated else 0.0

    @property
    def drive_writes_per_day(self) -> float | None:
        """How often a day of training writes the drives' capacity; None where none is known."""
        if not self.strategy.uses_nvme or not self.machine.drive_bytes or self.simulated is None:
            return None
        written = self.simulated.written_bytes * self.machine.ranks_per_node
        return written * DAY_SECONDS / self.step_seconds / self.machine.drive_bytes

    def limits(self) -> list[tuple[str, str, float]]:
        """For each part of the step, what is busiest in it: (part, resource, share of the part's time)."""
        if self.simulated is None:
            return []
        border = self.simulated.gradient_seconds
        parts = (("forward and backward", 0.0, border), ("optimizer step", border, self.simulated.seconds))
        found = []
        for part, start, end in parts:
            if end > start:
                resource, busy = busiest(self.simulated.timeline, start, end)
                found.append((part, resource, busy / (end - start)))
        return found


def busiest(timeline: Sequence[Interval], start: float, end: float) -> tuple[str, float]:
    """The resource that works longest between `start` and `end`, and how long (seconds). Reads and writes are one drive."""
    by_resource: dict[str, list[tuple[float, float]]] = {}
    for resource, _, began, ended in timeline:
        if began < end and ended > start:
            name = "drive" if resource in ("read", "write") else resource.replace("_", " ")
            by_resource.setdefault(name, []).append((max(began, start), min(ended, end)))
    return max(((name, _union(spans)) for name, spans in by_resource.items()), key=lambda item: item[1])


def _union(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def plan_step(work: Work, machine: Machine, strategy: Strategy, *, pinned_bytes: int | None = None) -> Plan:
    """The plan of one strategy. `pinned_bytes`: the pool of each rank; comfortable where None."""
    pipeline = pipeline_of(work, strategy, pinned_bytes)
    memory = memory_of(work, strategy, pinned_bytes=pipeline.pinned_bytes, device_is_host=machine.device_is_host)
    reasons = _why_not(work, machine, strategy, pipeline, memory)
    simulated = None
    plain_bytes = bytes_of_step(work, strategy)
    floor_seconds = work.flops / machine.flops_per_s
    if not strategy.uses_nvme or machine.drive is not None:
        drive = machine.drive_of_rank() if strategy.uses_nvme else DriveSpeed(math.inf, math.inf)
        link = math.inf if machine.device_is_host else machine.link_bytes_per_s
        step = step_of(work, machine, strategy, pipeline)
        try:
            simulated = simulate(step, Resources(drive, link, link))
        except BudgetError as error:
            reasons.append(str(error))
        moved = (simulated.read_bytes, simulated.written_bytes) if simulated else plain_bytes
        floor_seconds = max(floor_seconds, drive.floor_seconds(*moved))
    return Plan(strategy, machine, work, pipeline, memory, tuple(reasons), simulated, floor_seconds, plain_bytes)


def _why_not(work: Work, machine: Machine, strategy: Strategy, pipeline: Pipeline, memory: Memory) -> list[str]:
    ranks = machine.ranks_per_node
    tiers = [
        ("host memory", memory.host_bytes * ranks, USABLE * machine.host_bytes, "a node"),
        ("NVMe", memory.nvme_bytes * ranks, _drive_room(machine), "a node"),
    ]
    if not machine.device_is_host:
        tiers.insert(0, ("GPU memory", memory.device_bytes, USABLE * machine.device_bytes, "a GPU"))
    reasons = []
    for tier, need, have, where in tiers:
        if need > have:
            reasons.append(f"{tier}: {format_bytes(need)} needed of the {format_bytes(have)} that {where} can give")
    if strategy.uses_nvme and machine.drive is None:
        reasons.append("NVMe: the machine has no drive")
    least = pinned_bytes_min(work, strategy)
    if strategy.uses_nvme and pipeline.pinned_bytes < least:
        reasons.append(f"pinned pool: {format_bytes(pipeline.pinned_bytes)}, and the groups need {format_bytes(least)}")
    return reasons


def _drive_room(machine: Machine) -> float:
    return machine.drive_free_bytes if machine.drive_free_bytes is not None else machine.drive_bytes or math.inf


def step_of(work: Work, machine: Machine, strategy: Strategy, pipeline: Pipeline) -> Step:
    """The step of one rank, for the simulator: a group per block, and the root, which stays gathered to the end."""
    groups = work.group_numels
    root = len(groups) - 1
    paged = strategy.parameters == "nvme"
    group_bytes = [-(-numel // work.ranks) * COPY_BYTES if paged else 0 for numel in groups]
    uses: list[Use] = []
    for _ in range(work.micro_batches):
        uses += _uses(work, machine, strategy, groups, group_bytes, [root, *range(root)], backward=False)
        uses += _uses(work, machine, strategy, groups, group_bytes, [*reversed(range(root)), root], backward=True)
    bandwidth = machine.update_bytes_per_s(strategy)
    return Step(
        uses=uses,
        group_bytes=group_bytes,
        ends=plan_look_ahead([use.group for use in uses], group_bytes, pipeline.look_ahead_bytes),
        between_seconds=NORM_BYTES * work.shard_numel / bandwidth,
        sub_groups=_sub_groups(work, strategy, pipeline, bandwidth, device_is_host=machine.device_is_host),
        sub_groups_ahead=pipeline.sub_groups_ahead,
        pool_bytes=pipeline.pinned_bytes,
        overlap_gathers=not machine.device_is_host,
    )


def _uses(
    work: Work,
    machine: Machine,
    strategy: Strategy,
    groups: Sequence[int],
    group_bytes: Sequence[int],
    order: Sequence[int],
    *,
    backward: bool,
) -> list[Use]:
    """One forward or backward over the groups in `order`."""
    tokens = work.samples * work.model.seq
    flops_per_numel = 2 * tokens * ((3 if work.checkpointing else 2) if backward else 1)
    from_host = strategy.parameters != "none" or strategy.optimizer == "nvme"
    itemsize = (
        MASTER_BYTES if strategy.parameters == "cpu" else COPY_BYTES
    )  # FSDP2 copies the master, and casts it there
    uses = []
    for group in order:
        numel = groups[group]
        root = group == len(groups) - 1
        gathered = backward and (root or strategy.stage < 3)
        shard = -(-numel // work.ranks)
        uses.append(
            Use(
                group,
                read_bytes=0 if gathered else group_bytes[group],
                copy_bytes=itemsize * shard if from_host and not gathered and not machine.device_is_host else 0,
                gather_seconds=0.0 if gathered else machine.gather_seconds(COPY_BYTES * numel),
                compute_seconds=flops_per_numel * numel / machine.flops_per_s + machine.group_seconds,
                reduce_seconds=machine.gather_seconds(GRADIENT_BYTES * numel) if backward else 0.0,
                gradient_bytes=GRADIENT_BYTES * shard if backward and strategy.on_host else 0,
                live_bytes=COPY_BYTES * numel,
            )
        )
    return uses


def _sub_groups(
    work: Work, strategy: Strategy, pipeline: Pipeline, bandwidth: float, *, device_is_host: bool
) -> list[SubGroup]:
    """This rank's sub-groups. Where they are very many, neighbours move as one, in a lease of one."""
    shard = work.shard_numel
    count = min(SIMULATED_SUB_GROUPS_MAX, max(1, -(-shard // pipeline.sub_group_numel)))
    numel = shard / count
    state = STATE_BYTES if strategy.optimizer == "nvme" else 0
    per_element = state + COPY_BYTES if strategy.uses_nvme else 0
    lease = pipeline.sub_group_numel * per_element
    to_device = strategy.optimizer == "cpu" and strategy.parameters == "none" and not device_is_host
    one = SubGroup(
        read_bytes=round(state * numel),
        write_bytes=round(per_element * numel),
        lease_bytes=lease,
        update_seconds=(ADAM_BYTES + CAST_BYTES * strategy.on_host) * numel / bandwidth,
        copy_bytes=round(COPY_BYTES * numel) if to_device else 0,
    )
    return [one] * count


def plans_for(work: Work, machine: Machine, *, pinned_bytes: int | None = None) -> list[Plan]:
    """Every strategy that makes a difference on `machine`, from the fastest to the most frugal."""
    differing = [
        each for each in STRATEGIES if not (machine.device_is_host and "cpu" in (each.parameters, each.optimizer))
    ]
    return [plan_step(work, machine, each, pinned_bytes=pinned_bytes) for each in differing]


def fastest_that_fits(plans: Sequence[Plan]) -> Plan | None:
    """Of the plans that fit and that infinity can run, the one with the shortest step; the first of equals."""
    fitting = [plan for plan in plans if plan.fits and plan.strategy.runs]
    return min(fitting, key=lambda plan: plan.step_seconds) if fitting else None
