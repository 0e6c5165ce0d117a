"""Work on frozen weights that stay in the user's own files: adapters are trained on them, or text is generated.
Closed formulas over the product's own policies of what stays staged; nothing is simulated and nothing is ever written.

docs/plan.md, "On frozen weights in their files", says what is counted and what is assumed. Bytes follow from `cycle_read_bytes`
and `choose_to_stay`, as the staging policy asks them, with the pool's sum. Time is the longest of what overlaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinity.plan.estimate import (
    DEVICE_PROCESS_BYTES,
    GATHERED_GROUPS,
    HOST_PROCESS_BYTES,
    HOST_PROCESS_WITH_DEVICE_BYTES,
    Memory,
    activation_lines,
)
from infinity.plan.frozen_groups import FrozenGroups
from infinity.plan.machine import Machine
from infinity.plan.planner import USABLE, what_lacks
from infinity.plan.program import CLIP_BYTES, NORM_BYTES, PARAMETER_BYTES
from infinity.plan.work import Work
from infinity.schedule import pinned
from infinity.schedule.scheme import COMPUTE_BYTES
from infinity.schedule.spilling import GRADIENT_BYTES
from infinity.units import format_count

_CAST_BYTES = 6
"""Memory traffic of an element of an adapter whose 16-bit copy torch makes: fp32 read, 16 bits written."""

START_SECONDS = 5.0
"""Until the first read: the process starts, torch and the model's code are imported, the model is built without memory; an
assumption."""

GATHER_TRAFFIC = 2
"""How often a gathered byte passes through memory before it is computed with: read, and written where it is gathered. Not where
it is staged for good ([Note: Gathered where it is staged] in infinity/swap/shard.py)."""

IN_TURNS = "in turns"
"""The resource of what compute waits for: it, and the drive or the link for routed experts."""

FEW_SHARE = 1 / 4
"""Adapters stay in memory where they have at most so many elements for each one in files, as in infinity/swap/plan.py."""


@dataclass(frozen=True)
class FrozenPlan:
    """What one kind of work on files comes to. Bytes and seconds are of a step of training, or of a round of generation, which
    makes a token of each sequence; of one rank where nothing else is said.

    Attributes:
        name: for people.
        per: "step" or "round".
        base_bits: of the blocks' matrices in the files.
        memory: of one rank.
        reasons: why it doesn't fit, a sentence each; empty where it does.
        pinned_bytes: of the pool.
        read_bytes: from the drive, once the order of the groups is known; expected, where experts are routed.
        start_seconds: until the first step or round: START_SECONDS, and the files read once.
        busy: seconds that each resource needs, and those that take turns; without a drive, infinite for the drive.
        tokens: of all ranks.
        trained_numel: parameters of all adapters.
    """

    name: str
    per: str
    base_bits: int
    memory: Memory
    reasons: tuple[str, ...]
    pinned_bytes: int
    read_bytes: float
    start_seconds: float
    busy: dict[str, float]
    tokens: int
    trained_numel: int = 0

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def seconds(self) -> float:
        """Predicted; infinite where there is no drive."""
        return max(self.busy.values())

    @property
    def limit(self) -> str:
        """The resource that needs longest."""
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
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
    """Training of adapters, and generation.

    Args:
        work: micro-batches as for a training; generation goes on with one token of each of its samples.
        lora_rank: of the adapters on all linear layers of the blocks, but for those of routed experts.
        base_bits: of the blocks' matrices in the files, of BASE_BITS.
        pinned_bytes: the pool of each rank. None: a comfortable one, and `cache_bytes` more.
        cache_bytes: what the pool has beyond that to keep groups in. None: with `pinned_bytes` none, else all memory that is
            left. The pool gets no larger than the model makes use of.
    """
    asked = _Asked(base_bits, pinned_bytes, cache_bytes)
    return [_plan_lora(work, machine, lora_rank, asked), _plan_generation(work, machine, asked)]


@dataclass(frozen=True)
class _Asked:
    """See `frozen_plans`."""

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
            f"adapters: {format_count(adapters)} are too many to stay in memory beside {format_count(work.model.numel)} "
            "frozen parameters: lower --lora"
        )
    if work.durable:
        reasons.append(
            "durability: a durable run copies frozen weights into its own files: leave --durability step out"
        )
    if work.activations == "nvme":
        reasons.append("saved activations: to NVMe they would be written: use --offload-activations cpu")
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
    return FrozenPlan(
        "LoRA on files",
        "step",
        asked.base_bits,
        memory,
        tuple(reasons),
        pool,
        always + experts,
        _start_seconds(machine, groups),
        busy,
        work.tokens,
        adapters,
    )


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
    return FrozenPlan(
        "generation from files",
        "round",
        asked.base_bits,
        memory,
        tuple(reasons),
        pool,
        always + experts,
        _start_seconds(machine, groups),
        busy,
        tokens,
    )


def _gathered_bytes(work: Work, gathered: FrozenGroups) -> int:
    """At once, on each rank: the root, and of the blocks GATHERED_GROUPS, with as many experts beside them."""
    at_once = GATHERED_GROUPS * (max(gathered.always[1:]) + gathered.expert_bytes)
    return work.ranks * (gathered.root_bytes + at_once)


def _place(
    work: Work, machine: Machine, groups: FrozenGroups, device: dict[str, int], host: dict[str, int], asked: _Asked
) -> tuple[Memory, int, list[str]]:
    """What one rank holds, the bytes of its pool (see `frozen_plans`), and the reasons why that doesn't fit."""
    if machine.device_is_host:
        device, host = {}, {"Python and torch": HOST_PROCESS_BYTES, **host, **device}
    else:
        device = {"CUDA and NCCL": DEVICE_PROCESS_BYTES, **device}
        host = {"Python, torch and CUDA": HOST_PROCESS_WITH_DEVICE_BYTES, **host}
    gather = pinned.gather_bytes(groups.largest_bytes)
    base, cache_bytes = asked.pinned_bytes, asked.cache_bytes
    if base is None:
        base = pinned.comfortable_bytes(gather, 0)
        if cache_bytes is None:
            cache_bytes = int(USABLE * machine.host_bytes / machine.ranks_per_node) - sum(host.values()) - base
    useful = gather + pinned.ACCESS_BYTES + groups.whole_bytes
    pool = max(base, min(base + (cache_bytes or 0), useful))
    host["pool of staged groups, pinned"] = pool
    memory = Memory(device, host, {"frozen weights, in their files": groups.whole_bytes * machine.nodes})
    least = pinned.PinnedBudget(gather, 0).nbytes
    capacity = machine.drive_bytes or math.inf  # the files are there already
    return memory, pool, what_lacks(memory, machine, drive_room_bytes=capacity, pool=(pool, least))


def _moving_seconds(machine: Machine, read_bytes: float, gathered_bytes: float) -> dict[str, float]:
    """Of one rank's share of the drives, and of the link to its GPU."""
    seconds = {"drive": math.inf}
    if machine.drive is not None:
        seconds["drive"] = read_bytes / machine.drive_of_rank().read_bytes_per_s
    if not machine.device_is_host:
        seconds["to device"] = gathered_bytes / machine.link_bytes_per_s
    return seconds


def _gather_seconds(machine: Machine, gathered: FrozenGroups) -> float:
    """All-gathers of the blocks and of their experts, each once."""
    of_blocks = sum(machine.gather_seconds(machine.ranks * nbytes) for nbytes in gathered.always[1:])
    return of_blocks + gathered.expert_gathers * machine.gather_seconds(machine.ranks * gathered.expert_bytes)


def _lora_seconds(work: Work, machine: Machine, rank: int, *, expert_gathers: float) -> float:
    """Compute of a step, what each use of a group takes however small it is, and the update of the adapters.

    A token takes 2 operations per active frozen parameter in the forward and 2 in the backward, which has no gradient of it to
    compute, and 2 more where the forward is computed again; 6 or 8 per parameter of the adapters.
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
