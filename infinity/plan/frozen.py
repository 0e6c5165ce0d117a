"""Work on frozen weights that stay in the user's own files: training of adapters, and text generation.

Closed formulas over the engine's own staging policies; nothing is simulated, and no step writes to a drive.
docs/plan.md, "On frozen weights in their files", lists what is counted and assumed. Bytes follow from
`cycle_read_bytes` and `choose_to_stay`. Time is the longest of all overlapping activities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinity.plan.estimate import GATHERED_GROUPS, Memory, activation_lines, with_process
from infinity.plan.frozen_groups import FrozenGroups
from infinity.plan.machine import Machine
from infinity.plan.planner import USABLE, what_lacks
from infinity.plan.program import CLIP_BYTES, NORM_BYTES, PARAMETER_BYTES
from infinity.plan.splits import unsplit
from infinity.plan.work import Work
from infinity.schedule import pinned
from infinity.schedule.scheme import COMPUTE_BYTES
from infinity.schedule.spilling import GRADIENT_BYTES
from infinity.units import format_count

_CAST_BYTES = 6
"""Memory traffic per element of an adapter that torch casts to its compute parameter: fp32 read, 16 bits written."""

START_SECONDS = 5.0
"""Time until the first read: process start, imports of torch and the model's code, model construction (assumed)."""

GATHER_TRAFFIC = 2
"""Memory passes of a gathered byte: read, written. None if gathered in place ([Note: Gathered where it is staged])."""

IN_TURNS = "in turns"
"""Resource for compute that waits: compute, and the drive or the link for routed experts."""

FEW_SHARE = 1 / 4
"""Adapters stay in memory if they have at most this many elements per element in files, as in infinity/swap/plan.py."""


@dataclass(frozen=True)
class FrozenPlan:
    """The plan of one kind of work on files: bytes and seconds of one rank, per training step or per round of
    generation, which makes one token of each sequence."""

    name: str
    per: str
    base_bits: int
    memory: Memory
    reasons: tuple[str, ...]
    pinned_bytes: int
    read_bytes: float
    """Read once the order of the groups is known; an expectation for routed experts."""
    start_seconds: float
    """Time to the first step or round: START_SECONDS, and one read of the files."""
    busy: dict[str, float]
    """Seconds of each resource, and of IN_TURNS; infinite for a missing drive."""
    tokens: int
    """Of all ranks, as are the trained parameters."""
    trained_numel: int = 0

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def seconds(self) -> float:
        """Predicted time; infinite without a drive."""
        return max(self.busy.values())

    @property
    def limit(self) -> str:
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def frozen_plans(
    work: Work,
    machine: Machine,
    *,
    lora_rank: int,
    base_bits: int = 16,
    pinned_bytes: int | None = None,
    cache_bytes: int | None = None,
) -> list[FrozenPlan]:
    """Return the plans for training adapters of `lora_rank` on all linear layers except routed experts, and for
    generation.

    pinned_bytes: size of each rank's pool. None: a comfortable one, and `cache_bytes` more to keep groups in.
    cache_bytes: None is nothing if `pinned_bytes` is given, else all remaining memory. The pool gets no larger than the
    model can use. Each rank computes with the whole model, even if `work` splits it.
    """
    work, asked = unsplit(work), _Asked(base_bits, pinned_bytes, cache_bytes)
    return [_plan_lora(work, machine, lora_rank, asked), _plan_generation(work, machine, asked)]


@dataclass(frozen=True)
class _Asked:
    base_bits: int
    pinned_bytes: int | None
    cache_bytes: int | None


def _plan_lora(work: Work, machine: Machine, rank: int, asked: _Asked) -> FrozenPlan:
    tokens = work.ranks * work.samples_at_once * work.model.seq
    groups, gathered = (FrozenGroups.of(work, tokens=tokens, base_bits=bits) for bits in (asked.base_bits, 16))
    adapters = work.model.adapter_numel(rank)
    shard = -(-adapters // work.ranks)
    elsewhere = sum(work.saved_elsewhere(device_is_host=machine.device_is_host))
    device = {
        "gathered groups": _gathered_bytes(work, gathered),
        "gradients of a group, to be reduced": (COMPUTE_BYTES + GRADIENT_BYTES) * -(-adapters // work.model.layers),
        **activation_lines(work, elsewhere),
    }
    host = {
        "adapters and their optimizer state": math.ceil((COMPUTE_BYTES + work.scheme.other_state_bytes()) * shard),
        "gradients of the adapters": GRADIENT_BYTES * shard,
    }
    if elsewhere:
        host["saved activations, pinned"] = elsewhere
    memory, pool, reasons = _place(work, machine, groups, device, host, asked)
    if adapters > FEW_SHARE * work.model.numel:
        reasons.append(
            f"adapters: {format_count(adapters)} parameters are too many to keep in memory, with "
            f"{format_count(work.model.numel)} frozen ones: lower --lora"
        )
    if work.durable:
        reasons.append("durability: a durable run copies frozen weights into its own files: omit --durability step")
    if work.activations == "nvme":
        reasons.append("saved activations: NVMe would be written to: use --offload-activations cpu")
    always, experts = groups.lora_read_bytes(pinned.look_ahead_room(pool, groups.largest_bytes), work.passes)
    gathers = work.passes * (2 * groups.expected_bytes - groups.root_bytes)
    busy = _moving_seconds(machine, always + experts, gathers)
    busy["compute"] = _lora_seconds(work, machine, rank, expert_gathers=groups.expert_gathers)
    if asked.base_bits < 16:
        written = work.passes * (2 * gathered.expected_bytes - gathered.root_bytes)
        busy["compute"] += (gathers + written) / machine.memory_bytes_per_s(of_host=False)
    if work.model.experts is not None:
        moved = _moving_seconds(machine, experts, 2 * work.passes * groups.expected_experts_bytes)
        busy[IN_TURNS] = busy["compute"] + max(moved.values())
    if work.ranks > 1:
        reduced = GRADIENT_BYTES * adapters / work.model.layers
        busy["network"] = work.passes * (
            2 * _gather_seconds(machine, gathered)
            + machine.gather_seconds(work.ranks * gathered.root_bytes)
            + work.model.layers * machine.gather_seconds(reduced)
        )
    how = asked.base_bits, memory, tuple(reasons), pool, always + experts, _start_seconds(machine, groups), busy
    return FrozenPlan("LoRA on files", "step", *how, work.tokens, adapters)


def _plan_generation(work: Work, machine: Machine, asked: _Asked) -> FrozenPlan:
    model, tokens = work.model, work.ranks * work.samples
    groups, gathered = (FrozenGroups.of(work, tokens=tokens, base_bits=bits) for bits in (asked.base_bits, 16))
    device = {
        "gathered groups": _gathered_bytes(work, gathered),
        "keys and values": model.cache_bytes(work.samples),
        "logits": model.logits_bytes(work.samples) // model.seq,
    }
    memory, pool, reasons = _place(work, machine, groups, device, {}, asked)
    always, experts = groups.round_read_bytes(pinned.look_ahead_room(pool, groups.largest_bytes))
    gathers, written = (each.expected_bytes - each.root_bytes for each in (groups, gathered))
    busy = _moving_seconds(machine, always + experts, gathers)
    stays = machine.device_is_host and work.ranks == 1 and asked.base_bits == 16
    traffic = GATHER_TRAFFIC * work.ranks * (min(written, always + experts) if stays else written)
    if asked.base_bits < 16:
        traffic += gathers + written
    flops_seconds = 2 * work.samples * model.active_numel / machine.flops_per_s
    busy["compute"] = (
        max(flops_seconds, work.ranks * gathered.expected_bytes / machine.memory_bytes_per_s(of_host=False))
        + traffic / machine.memory_bytes_per_s(of_host=False)
        + (len(groups) + groups.expert_gathers) * machine.group_seconds
    )
    if model.experts is not None:
        moved = _moving_seconds(machine, experts, groups.expected_experts_bytes)
        busy[IN_TURNS] = busy["compute"] + max(moved.values())
    if work.ranks > 1:
        busy["network"] = _gather_seconds(machine, gathered)
    how = asked.base_bits, memory, tuple(reasons), pool, always + experts, _start_seconds(machine, groups), busy
    return FrozenPlan("generation from files", "round", *how, tokens)


def _gathered_bytes(work: Work, gathered: FrozenGroups) -> int:
    """Return the bytes gathered at once on each rank: the root, and GATHERED_GROUPS blocks with as many experts."""
    at_once = GATHERED_GROUPS * (max(gathered.always[1:]) + gathered.expert_bytes)
    return work.ranks * (gathered.root_bytes + at_once)


def _place(
    work: Work, machine: Machine, groups: FrozenGroups, device: dict[str, int], host: dict[str, int], asked: _Asked
) -> tuple[Memory, int, list[str]]:
    """Return the memory of one rank, the bytes of its pool, and the reasons against a fit."""
    files = {"frozen weights, in their files": groups.whole_bytes * machine.nodes}
    memory = with_process(Memory(device, host, files), device_is_host=machine.device_is_host)
    gather = pinned.gather_bytes(groups.largest_bytes)
    base, cache_bytes = asked.pinned_bytes, asked.cache_bytes
    if base is None:
        base = pinned.comfortable_bytes(gather, 0)
        if cache_bytes is None:
            cache_bytes = int(USABLE * machine.host_bytes / machine.ranks_per_node) - memory.host_bytes - base
    useful = gather + pinned.ACCESS_BYTES + groups.whole_bytes
    pool = max(base, min(base + (cache_bytes or 0), useful))
    memory.host["pool of staged groups, pinned"] = pool
    least = pinned.PinnedBudget(gather, 0).nbytes
    capacity = machine.drive_bytes or math.inf  # the files already exist
    return memory, pool, what_lacks(memory, machine, drive_room_bytes=capacity, pool=(pool, least))


def _moving_seconds(machine: Machine, read_bytes: float, gathered_bytes: float) -> dict[str, float]:
    seconds = {"drive": math.inf}
    if machine.drive is not None:
        seconds["drive"] = read_bytes / machine.drive_of_rank().read_bytes_per_s
    if not machine.device_is_host:
        seconds["to device"] = gathered_bytes / machine.link_bytes_per_s
    return seconds


def _gather_seconds(machine: Machine, gathered: FrozenGroups) -> float:
    of_blocks = sum(machine.gather_seconds(machine.ranks * nbytes) for nbytes in gathered.always[1:])
    return of_blocks + gathered.expert_gathers * machine.gather_seconds(machine.ranks * gathered.expert_bytes)


def _lora_seconds(work: Work, machine: Machine, rank: int, *, expert_gathers: float) -> float:
    """Return the seconds of a step's compute, of the fixed cost of each use of a group, and of the adapters' update.

    A token takes 2 operations per active frozen parameter in the forward, 2 in the backward, which needs no gradient of
    it, and 2 more if the forward is recomputed; 6 or 8 per parameter of the adapters.
    """
    again = 2 if work.checkpointing else 0
    tokens = work.tokens / work.ranks
    flops = tokens * ((4 + again) * work.model.active_numel + (6 + again) * work.model.adapter_numel(rank))
    uses = work.micro_batches * (2 * (len(work.group_numels) + expert_gathers) - 1)
    per_element = PARAMETER_BYTES + work.scheme.moments * 2 * work.scheme.moment_bytes + _CAST_BYTES
    per_element += NORM_BYTES + CLIP_BYTES if work.clipping else 0
    traffic = per_element * work.model.adapter_numel(rank) / work.ranks
    update_seconds = traffic / machine.memory_bytes_per_s(of_host=True)
    return flops / machine.flops_per_s + uses * machine.group_seconds + update_seconds


def _start_seconds(machine: Machine, groups: FrozenGroups) -> float:
    return START_SECONDS + _moving_seconds(machine, groups.whole_bytes, 0)["drive"]
