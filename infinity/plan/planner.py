"""Floor 7. The plan of a training: does it fit, how long is a step, what limits it, on a machine given as numbers.

The step is simulated (simulator.py) with the memory and bytes of estimate.py. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.plan.estimate import (
    NOTHING_KEPT,
    STRATEGIES,
    Kept,
    Memory,
    Pipeline,
    Strategy,
    Work,
    bytes_of_step,
    kept_of,
    memory_of,
    pinned_bytes_min,
    pipeline_of,
)
from infinity.plan.lower_bound import DriveSpeed
from infinity.plan.simulator import (
    Pause,
    Program,
    Resources,
    Simulated,
    Step,
    SubGroup,
    Use,
    look_ahead_of,
    simulate,
)
from infinity.schedule.activations import BUFFER_SHARES, IN_HAND_SHARES
from infinity.schedule.gradients import GRADIENT_BYTES
from infinity.schedule.scheme import ADAM_MOMENTS, COMPUTE_BYTES, MASTER_BYTES, Scheme
from infinity.schedule.timeline import Interval
from infinity.units import format_bytes

USABLE = 0.95
"""The share of a memory that can be planned with; the rest goes to fragmentation and to what else lives there."""

PARAMETER_BYTES = 12
"""Memory traffic of a fused update per element: parameter and gradient read, the parameter written. A split master's two halves
are the parameter."""

MOMENT_TRAFFIC_BYTES = 8
"""The same for each moment: read and written."""

ADAM_BYTES = PARAMETER_BYTES + ADAM_MOMENTS * MOMENT_TRAFFIC_BYTES
"""The same for AdamW."""

CAST_BYTES = 6
"""The same for a new 16-bit copy that torch makes: read from fp32 and written. The kernel for what rests on NVMe writes it in
the same pass."""

NORM_BYTES = 4
"""The same for the norm of the gradients."""

CLIP_BYTES = 8
"""The same for clipping: read and written again. What rests on NVMe is scaled while it is updated."""

SIMULATED_SUB_GROUPS_MAX = 4096
"""Beyond it, neighbours are simulated as one."""

AS_FAST = 1.02
"""Steps that are longer by less than this count as equal; no prediction is that exact."""

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
        kept: what stays in pinned memory from step to step, of one rank.
        memory: of one rank.
        reasons: why it doesn't fit, a sentence each; empty where it does.
        simulated: the step of one rank; None where not even one group fits.
        lower_bound_seconds: the larger of compute and the bytes of the step over the drives' bandwidth.
        plain_bytes: (read, written) of one rank with nothing cached, and nothing staged from forward to backward.
    """

    strategy: Strategy
    machine: Machine
    work: Work
    pipeline: Pipeline
    kept: Kept
    memory: Memory
    reasons: tuple[str, ...]
    simulated: Simulated | None
    lower_bound_seconds: float
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
        names = ("forward and backward", "optimizer step")
        if self.strategy.update_of(self.work.scheme) != "step":
            names = ("forward, backward and updates", "after the backward")
        parts = ((names[0], 0.0, border), (names[1], border, self.simulated.seconds))
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


def plan_step(
    work: Work,
    machine: Machine,
    strategy: Strategy,
    *,
    pinned_bytes: int | None = None,
    cache_bytes: int | None = None,
) -> Plan:
    """The plan of one strategy.

    Args:
        work, machine, strategy: what is planned.
        pinned_bytes: the pool of each rank, beside its host cache; comfortable where None.
        cache_bytes: host memory of each rank that keeps copies and state from step to step; what is left where None, and
            without a meaning where the work is durable, which keeps nothing there.
    """
    pipeline, kept, memory, reasons = _place(work, machine, strategy, pinned_bytes, cache_bytes)
    simulated = None
    plain_bytes = bytes_of_step(work, strategy)
    lower_bound_seconds = work.flops / machine.flops_per_s
    if not strategy.uses_nvme or machine.drive is not None:
        drive = machine.drive_of_rank() if strategy.uses_nvme else DriveSpeed(math.inf, math.inf)
        link = math.inf if machine.device_is_host else machine.link_bytes_per_s
        step = step_of(work, machine, strategy, pipeline, kept)
        try:
            simulated = simulate(step, Resources(drive, link, link))
        except BudgetError as error:
            reasons.append(str(error))
        moved = (simulated.read_bytes, simulated.written_bytes) if simulated else plain_bytes
        lower_bound_seconds = max(lower_bound_seconds, drive.lower_bound_seconds(*moved))
    return Plan(
        strategy, machine, work, pipeline, kept, memory, tuple(reasons), simulated, lower_bound_seconds, plain_bytes
    )


def some_strategy_fits(work: Work, machine: Machine, *, pinned_bytes: int | None, cache_bytes: int | None) -> bool:
    """Whether there is room for what one of the strategies that infinity can run takes; no step is simulated for it."""
    return any(
        not _place(work, machine, each, pinned_bytes, cache_bytes)[-1] for each in _differing_on(machine) if each.runs
    )


def _place(
    work: Work, machine: Machine, strategy: Strategy, pinned_bytes: int | None, cache_bytes: int | None
) -> tuple[Pipeline, Kept, Memory, list[str]]:
    """What is where, and why that doesn't fit."""
    pipeline = pipeline_of(work, strategy, pinned_bytes, machine.host_bytes / machine.ranks_per_node)
    on_host = machine.device_is_host
    memory = memory_of(work, strategy, pinned_bytes=pipeline.pinned_bytes, device_is_host=on_host)
    if work.durable:
        cache_bytes = 0
    elif cache_bytes is None:
        cache_bytes = max(0, int(USABLE * machine.host_bytes / machine.ranks_per_node) - memory.host_bytes)
    kept = kept_of(work, strategy, cache_bytes)
    memory = memory_of(work, strategy, pinned_bytes=pipeline.pinned_bytes, device_is_host=on_host, kept=kept)
    return pipeline, kept, memory, _why_not(work, machine, strategy, pipeline, memory)


def _why_not(work: Work, machine: Machine, strategy: Strategy, pipeline: Pipeline, memory: Memory) -> list[str]:
    ranks = machine.ranks_per_node
    tiers = [
        ("host memory", memory.host_bytes * ranks, USABLE * machine.host_bytes, "a node"),
        ("NVMe", memory.nvme_bytes * ranks, drive_room(machine), "a node"),
    ]
    if not machine.device_is_host:
        tiers.insert(0, ("GPU memory", memory.device_bytes, USABLE * machine.device_bytes, "a GPU"))
    reasons = []
    for tier, need, have, where in tiers:
        if need > have:
            reasons.append(f"{tier}: {format_bytes(need)} needed of the {format_bytes(have)} that {where} can give")
    if work.durable and strategy.optimizer != "nvme":
        reasons.append("durability: masters and optimizer state must rest on NVMe, where they are committed")
    if strategy.uses_nvme and machine.drive is None:
        reasons.append("NVMe: the machine has no drive")
    least = pinned_bytes_min(work, strategy)
    if strategy.uses_nvme and pipeline.pinned_bytes < least:
        reasons.append(f"pinned pool: {format_bytes(pipeline.pinned_bytes)}, and the groups need {format_bytes(least)}")
    return reasons + _why_activations_stay(work, strategy)


def _why_activations_stay(work: Work, strategy: Strategy) -> list[str]:
    if work.activations != "nvme":
        return []
    if not strategy.uses_nvme:
        return ["saved activations: they go to NVMe only where parameters or optimizer state rest there"]
    have, need = work.activation_buffer_bytes, BUFFER_SHARES * work.saved_tensor_bytes
    if have < need:
        return [f"saved activations: their buffer has {format_bytes(have)}, and the largest needs {format_bytes(need)}"]
    return []


def drive_room(machine: Machine) -> float:
    """Bytes that one node's drives can hold; infinite where unknown."""
    return machine.drive_free_bytes if machine.drive_free_bytes is not None else machine.drive_bytes or math.inf


def step_of(work: Work, machine: Machine, strategy: Strategy, pipeline: Pipeline, kept: Kept = NOTHING_KEPT) -> Step:
    """The step of one rank, for the simulator: a group per block, and the root, which stays gathered to the end."""
    program = _Programmer(work, machine, strategy, pipeline, kept)
    items = program.items()
    buffer_bytes = work.activation_buffer_bytes if strategy.uses_nvme else 0
    return Step(
        program=items,
        group_bytes=program.group_bytes,
        ends=look_ahead_of(
            items,
            program.group_bytes,
            look_ahead_bytes=pipeline.look_ahead_bytes + buffer_bytes // IN_HAND_SHARES,
            sub_groups_ahead=pipeline.sub_groups_ahead,
        ),
        pool_bytes=pipeline.pinned_bytes + buffer_bytes,
        overlap_gathers=not machine.device_is_host,
    )


class _Programmer:
    """Writes down what the training thread of one rank does in a step."""

    def __init__(self, work: Work, machine: Machine, strategy: Strategy, pipeline: Pipeline, kept: Kept) -> None:
        self._work, self._machine, self._strategy = work, machine, strategy
        self._numels, self._shards = work.group_numels, work.group_shards
        self._root = len(self._numels) - 1
        copy, rest = strategy.stored_bytes(work.scheme)
        nothing = (0,) * len(self._shards)
        self._copies = [copy * n - there for n, there in zip(self._shards, kept.copies or nothing, strict=True)]
        """By group: bytes of copies that rest on NVMe, and of the rest of the state."""
        self._rest = [rest * n - there for n, there in zip(self._shards, kept.rest or nothing, strict=True)]
        self.group_bytes = [copy * n if away else 0 for n, away in zip(self._shards, self._copies, strict=True)]
        """The lease of each group: the whole copy, unless all of it stays."""
        self._spilled = work.gradients_that_spill(strategy)
        """By group: bytes of gradients that wait on NVMe."""
        moves = work.moves_activations(device_is_host=machine.device_is_host)
        self._saved = work.saved_bytes if moves else [0] * len(self._shards)
        """By group: bytes of activations that a pass brings away from the device and back; of those, the drive's."""
        self._saved_on_drive = work.saved_on_drive if strategy.uses_nvme else [0] * len(self._shards)
        self._lease_bytes = pipeline.sub_group_numel * (copy + rest + work.gradient_itemsize * any(self._spilled))
        count = sum(-(-numel // pipeline.sub_group_numel) for numel in self._shards)
        self._sub_group_numel = pipeline.sub_group_numel * max(1.0, count / SIMULATED_SUB_GROUPS_MAX)
        self._update_bytes_per_s = machine.update_bytes_per_s(strategy)
        self._update = strategy.update_of(work.scheme)
        self._program: list[Use | SubGroup | Pause] = []

    def items(self) -> Program:
        """All of the step."""
        for micro_batch in range(self._work.micro_batches):
            self._forward(updated=self._update == "forward" and micro_batch == 0)
            self._backward(updated=self._update == "backward", first=micro_batch == 0)
        if self._update != "backward":
            clip = CLIP_BYTES if self._work.clipping and self._strategy.optimizer != "nvme" else 0
            seconds = (NORM_BYTES + clip) * self._work.shard_numel / self._update_bytes_per_s
            self._program.append(Pause(seconds, reads_go_on=not any(self._spilled)))
        if self._update == "step":
            self._step()
        return self._program

    def _forward(self, *, updated: bool) -> None:
        """What a use saved is written once the next one is under way, where the device computes by itself."""
        behind = not self._machine.device_is_host
        used: list[tuple[int, int]] = []
        for group in (self._root, *range(self._root)):
            if updated:
                self._update_group(group, into=group if self.group_bytes[group] else None)
            self._use(group, backward=False, made=updated)
            used.append((group, len(self._program) - 1))
            if len(used) > behind:
                self._save(*used[-1 - behind])
        if behind:
            self._save(*used[-1])

    def _save(self, group: int, place: int) -> None:
        """The saved activations of a use that go to the drive."""
        self._program += [each._replace(write_bytes=each.lease_bytes, after=place) for each in self._passing(group)]

    def _restore(self, group: int) -> None:
        """What the backward of a group needs of those."""
        self._program += [each._replace(read_bytes=each.lease_bytes) for each in self._passing(group)]

    def _passing(self, group: int) -> list[SubGroup]:
        """Saved activations of a group that pass through the buffer, in as many pieces as that takes."""
        nbytes = self._saved_on_drive[group]
        count = max(1, math.ceil(nbytes / max(1, self._work.activation_buffer_bytes // BUFFER_SHARES)))
        return (
            [SubGroup(lease_bytes=round(nbytes / count), what=f"activations of group {group}")] * count
            if nbytes
            else []
        )

    def _backward(self, *, updated: bool, first: bool) -> None:
        """Where the device computes by itself, what is done with the gradients of a group is done once the next one is under
        way: it is updated, or they spill, or the `first` ones are read again and those of this micro-batch added."""
        behind = not self._machine.device_is_host
        used: list[tuple[int, int]] = []

        def finish(group: int, place: int) -> None:
            if updated:
                self._update_group(group, after=place)
            elif self._spilled[group]:
                self._spill(group, place, again=not first)

        for group in (*reversed(range(self._root)), self._root):
            self._restore(group)
            self._use(group, backward=True)
            used.append((group, len(self._program) - 1))
            if len(used) > behind:
                finish(*used[-1 - behind])
        if behind:
            finish(*used[-1])

    def _spill(self, group: int, place: int, *, again: bool) -> None:
        """The gradients that a use gave, written where they wait for the update."""
        nbytes = self._spilled[group]
        count = max(1, math.ceil(self._shards[group] / self._sub_group_numel))
        one = SubGroup(
            read_bytes=round(nbytes / count) if again else 0,
            write_bytes=round(nbytes / count),
            lease_bytes=round(nbytes / count),
            update_seconds=(nbytes + GRADIENT_BYTES * self._shards[group]) / count / self._update_bytes_per_s,
            after=place,
        )
        self._program += [one] * count

    def _use(self, group: int, *, backward: bool, made: bool = False) -> None:
        """One use of a group, in forward or backward; `made`: its copy was just made, or brought along."""
        work, machine, strategy = self._work, self._machine, self._strategy
        tokens = work.samples * work.model.seq
        flops_per_numel = 2 * tokens * ((3 if work.checkpointing else 2) if backward else 1)
        from_host = strategy.parameters != "none" or strategy.optimizer == "nvme"
        itemsize = (
            MASTER_BYTES if strategy.parameters == "cpu" else COMPUTE_BYTES
        )  # FSDP2 copies the master, and casts it there
        numel, shard = self._numels[group], self._shards[group]
        gathered = self._stays_gathered(group, backward=backward)
        self._program.append(
            Use(
                group,
                read_bytes=0 if gathered or made else self._copies[group],
                compute_bytes=itemsize * shard if from_host and not gathered and not machine.device_is_host else 0,
                gather_seconds=0.0 if gathered else machine.gather_seconds(COMPUTE_BYTES * numel),
                compute_seconds=flops_per_numel * numel / machine.flops_per_s + machine.group_seconds,
                reduce_seconds=machine.gather_seconds(GRADIENT_BYTES * numel) if backward else 0.0,
                gradient_bytes=GRADIENT_BYTES * shard if backward and strategy.on_host else 0,
                saved_bytes=0 if backward else self._saved[group],
                restored_bytes=self._saved[group] if backward else 0,
                live_bytes=COMPUTE_BYTES * numel,
            )
        )

    def _stays_gathered(self, group: int, *, backward: bool) -> bool:
        return backward and (group == self._root or self._strategy.stage < 3)

    def _update_group(self, group: int, *, into: int | None = None, after: int | None = None) -> None:
        """The sub-groups of one group. In the backward its gather has brought the copy, if it was gathered there."""
        brought = after is not None and not self._stays_gathered(group, backward=True)
        copies = self._copies[group] if self._work.scheme.compute_is_state() and not brought else 0
        rest = self._rest[group]
        read = copies + rest + self._spilled[group]
        self._add_sub_groups(self._shards[group], read, self._copies[group] + rest, into=into, after=after)

    def _step(self) -> None:
        """All sub-groups, those that stay in memory evenly between the others."""
        copies, rest = sum(self._copies), sum(self._rest)
        read = rest + (copies if self._work.scheme.compute_is_state() else 0) + sum(self._spilled)
        self._add_sub_groups(self._work.shard_numel, read, rest + copies)

    def _add_sub_groups(
        self, numel: int, read_bytes: int, written_bytes: int, *, into: int | None = None, after: int | None = None
    ) -> None:
        """So many elements in sub-groups. Where those of a step are very many, neighbours move as one, in a lease of one."""
        count = max(1, math.ceil(numel / self._sub_group_numel))
        strategy = self._strategy
        traffic = update_bytes(strategy, self._work.scheme) * numel / count
        to_device = strategy.optimizer == "cpu" and strategy.parameters == "none" and not self._machine.device_is_host
        one = SubGroup(
            read_bytes=round(read_bytes / count),
            write_bytes=round(written_bytes / count),
            lease_bytes=self._lease_bytes if read_bytes or written_bytes else 0,
            update_seconds=traffic / self._update_bytes_per_s,
            compute_bytes=round(COMPUTE_BYTES * numel / count) if to_device else 0,
            into=into,
            after=after,
        )
        self._program += [one] * count


def update_bytes(strategy: Strategy, scheme: Scheme) -> int:
    """Memory traffic of an update per element, the norm and clipping aside."""
    fused = PARAMETER_BYTES + scheme.moments * MOMENT_TRAFFIC_BYTES
    if not strategy.on_host:
        return fused
    if strategy.optimizer != "nvme":
        return fused + CAST_BYTES
    split = scheme.master_weights == "split" and strategy.parameters == "nvme"
    return fused if split else fused + COMPUTE_BYTES


def plans_for(
    work: Work, machine: Machine, *, pinned_bytes: int | None = None, cache_bytes: int | None = None
) -> list[Plan]:
    """Every strategy that makes a difference on `machine`, from the fastest to the most frugal; see `plan_step`."""
    return [
        plan_step(work, machine, each, pinned_bytes=pinned_bytes, cache_bytes=cache_bytes)
        for each in _differing_on(machine)
    ]


def _differing_on(machine: Machine) -> list[Strategy]:
    return [each for each in STRATEGIES if not (machine.device_is_host and "cpu" in (each.parameters, each.optimizer))]


def fastest_that_fits(plans: Sequence[Plan]) -> Plan | None:
    """Of the plans that fit and that infinity can run, the one with the shortest step; the first of those as fast as that."""
    fitting = [plan for plan in plans if plan.fits and plan.strategy.runs]
    shortest = min((plan.step_seconds for plan in fitting), default=0.0)
    return next((plan for plan in fitting if plan.step_seconds <= AS_FAST * shortest), None)
