"""Floor 7. Work on frozen weights that stay in the user's own files: adapters are trained beside them, or text is generated.
Closed formulas over the product's own policies of what stays staged; nothing is simulated and nothing is ever written.

[Note: Frozen weights in the plan]
Which bytes a step or a round reads follows from `cycle_read_bytes` and `choose_to_stay`, as the staging policy asks them, with
the pool's sum. Its time is the longest of what goes on at once: the drive reads ahead without a pause (what a step reads first
is read ahead in the step before it, as nothing of it changes), the link copies, the GPUs gather, and the device computes. In
generation weights pass through memory three times a round: a gather reads and writes them, and the computation reads them.
What can't be read ahead takes turns with compute: routed experts in generation, which nobody knows before their router has run.
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
from infinity.plan.planner import USABLE, why_memory_lacks
from infinity.plan.program import CAST_BYTES, CLIP_BYTES, MOMENT_TRAFFIC_BYTES, NORM_BYTES, PARAMETER_BYTES
from infinity.plan.work import Work
from infinity.schedule import pinned
from infinity.schedule.scheme import COMPUTE_BYTES
from infinity.schedule.spilling import GRADIENT_BYTES
from infinity.units import format_bytes, format_count

START_SECONDS = 5.0
"""Until the first read: the process starts, torch and the model's code are imported, the model is built without memory; an
assumption."""

GATHER_TRAFFIC = 2
"""How often a gathered byte passes through memory before it is computed with: read, and written where it is gathered."""

FEW_SHARE = 1 / 4
"""Adapters stay in memory where they have at most so many elements for each one in files, as in infinity/swap/plan.py."""


@dataclass(frozen=True)
class FrozenPlan:
    """What one kind of work on files comes to. Bytes and seconds are of a step of training, or of a round of generation, which
    makes a token of each sequence; of one rank where nothing else is said.

    Attributes:
        name: for people.
        per: "step" or "round".
        experts_read: of a mixture of experts, "all", or "routed" where those that no token is routed to are left alone; of a
            dense model "".
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
    experts_read: str
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
    work: Work, machine: Machine, *, lora_rank: int, pinned_bytes: int | None = None, cache_bytes: int | None = None
) -> list[FrozenPlan]:
    """Training of adapters, and generation; of a mixture of experts each with all of them read, and with the routed ones.

    Args:
        work: micro-batches as for a training; generation goes on with one token of each of its samples.
        lora_rank: of the adapters on all linear layers of the blocks.
        pinned_bytes: the pool of each rank. None: a comfortable one, and `cache_bytes` more.
        cache_bytes: what the pool has beyond that to keep groups in. None: with `pinned_bytes` none, else all memory that is
            left. The pool gets no larger than the model makes use of.
    """
    choices = (False, True) if work.model.experts is not None else (False,)
    asked = pinned_bytes, cache_bytes
    return [
        *(_plan_lora(work, machine, lora_rank, routed=routed, asked=asked) for routed in choices),
        *(_plan_generation(work, machine, routed=routed, asked=asked) for routed in choices),
    ]


_Asked = tuple[int | None, int | None]
"""The pool, and what it has beyond: see `frozen_plans`."""


def _plan_lora(work: Work, machine: Machine, rank: int, *, routed: bool, asked: _Asked) -> FrozenPlan:
    groups = FrozenGroups.of(work, tokens=work.ranks * work.samples_at_once * work.model.seq if routed else None)
    adapters = work.model.adapter_numel(rank)
    shard = -(-adapters // work.ranks)
    moves = work.moves_activations(device_is_host=machine.device_is_host)
    device = {
        "gathered groups": GATHERED_GROUPS * groups.largest_block_bytes * work.ranks + groups.root_bytes * work.ranks,
        "gradients of a group, to be reduced": (COMPUTE_BYTES + GRADIENT_BYTES) * -(-adapters // work.model.layers),
        **activation_lines(work, activations_move=moves),
    }
    host = {
        "adapters and their optimizer state": (COMPUTE_BYTES + work.scheme.other_state_bytes()) * shard,
        "gradients of the adapters": GRADIENT_BYTES * shard,
    }
    if moves:
        host["saved activations, pinned"] = sum(work.saved_bytes)
    memory, pool = _memory(work, machine, groups, device, host, asked)
    reasons = _why_not(work, machine, groups, memory, pool)
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
    read = groups.lora_read_bytes(pinned.look_ahead_room(pool, groups.largest_bytes), work.passes)
    gathers = work.passes * (2 * groups.expected_bytes - groups.root_bytes)
    busy = _moving_seconds(work, machine, read, gathers) | {"compute": _lora_seconds(work, machine, rank)}
    if work.ranks > 1:
        reduced = GRADIENT_BYTES * adapters / work.model.layers
        busy["network"] = work.passes * (
            _gather_seconds(machine, groups, times=2) + work.model.layers * machine.gather_seconds(reduced)
        )
    return FrozenPlan(
        "LoRA on files",
        "step",
        _experts_in_words(work, routed=routed),
        memory,
        tuple(reasons),
        pool,
        read,
        _start_seconds(work, machine),
        busy,
        work.tokens,
        adapters,
    )


def _plan_generation(work: Work, machine: Machine, *, routed: bool, asked: _Asked) -> FrozenPlan:
    model, tokens = work.model, work.ranks * work.samples
    groups = FrozenGroups.of(work, tokens=tokens if routed else None)
    device = {
        "gathered groups": GATHERED_GROUPS * groups.largest_block_bytes * work.ranks + groups.root_bytes * work.ranks,
        "keys and values": model.cache_bytes(work.samples),
        "logits": model.logits_bytes(work.samples) // model.seq,
    }
    memory, pool = _memory(work, machine, groups, device, {}, asked)
    always, experts = groups.round_read_bytes(pinned.look_ahead_room(pool, groups.largest_bytes))
    busy = _moving_seconds(work, machine, always + experts, groups.expected_bytes)
    computed = work.ranks * FrozenGroups.of(work, tokens=tokens).expected_bytes
    flops_seconds = 2 * work.samples * model.active_numel / machine.flops_per_s
    bytes_per_s = machine.device_bytes_per_s
    if machine.device_is_host:
        bytes_per_s = machine.host_bytes_per_s / machine.ranks_per_node
    busy["compute"] = (
        max(flops_seconds, computed / bytes_per_s)
        + GATHER_TRAFFIC * work.ranks * groups.expected_bytes / bytes_per_s
        + len(groups) * machine.group_seconds
    )
    if experts:
        busy["drive and compute"] = busy["compute"] + _moving_seconds(work, machine, experts, 0)["drive"]
    if work.ranks > 1:
        busy["network"] = _gather_seconds(machine, groups, times=1)
    return FrozenPlan(
        "generation from files",
        "round",
        _experts_in_words(work, routed=routed),
        memory,
        tuple(_why_not(work, machine, groups, memory, pool)),
        pool,
        always + experts,
        _start_seconds(work, machine),
        busy,
        tokens,
    )


def _experts_in_words(work: Work, *, routed: bool) -> str:
    if work.model.experts is None:
        return ""
    return "routed" if routed else "all"


def _memory(
    work: Work, machine: Machine, groups: FrozenGroups, device: dict[str, int], host: dict[str, int], asked: _Asked
) -> tuple[Memory, int]:
    """What one rank holds, and the bytes of its pool."""
    on_host = machine.device_is_host
    process = {"Python and torch": HOST_PROCESS_BYTES} if on_host else {}
    if not on_host:
        process = {"Python, torch and CUDA": HOST_PROCESS_WITH_DEVICE_BYTES}
        device = {"CUDA and NCCL": DEVICE_PROCESS_BYTES, **device}
    others = sum(process.values()) + sum(host.values()) + (sum(device.values()) if on_host else 0)
    left = int(USABLE * machine.host_bytes / machine.ranks_per_node) - others
    pool = _pool_bytes(groups, left, *asked)
    host = {**process, **host, "pool of staged groups, pinned": pool, **(device if on_host else {})}
    files = {"frozen weights, in their files": COMPUTE_BYTES * work.model.numel // machine.ranks_per_node}
    return Memory({} if on_host else device, host, files), pool


def _pool_bytes(groups: FrozenGroups, left: int, pinned_bytes: int | None, cache_bytes: int | None) -> int:
    """See `frozen_plans`; `left`: bytes of host memory."""
    gather = pinned.gather_bytes(groups.largest_bytes)
    base = pinned.comfortable_bytes(gather, 0) if pinned_bytes is None else pinned_bytes
    if cache_bytes is None:
        cache_bytes = left - base if pinned_bytes is None else 0
    useful = gather + pinned.ACCESS_BYTES + groups.whole_bytes
    return max(base, min(base + cache_bytes, useful))


def _why_not(work: Work, machine: Machine, groups: FrozenGroups, memory: Memory, pool: int) -> list[str]:
    capacity = machine.drive_bytes or math.inf  # the files are there already
    reasons = why_memory_lacks(memory, machine, drive_room_bytes=capacity)
    if machine.drive is None:
        reasons.append("NVMe: the machine has no drive")
    least = pinned.PinnedBudget(pinned.gather_bytes(groups.largest_bytes), 0).nbytes
    if pool < least:
        reasons.append(f"pinned pool: {format_bytes(pool)}, and the groups need {format_bytes(least)}")
    if groups.routed and work.ranks > 1:
        reasons.append("experts: ranks take one route through the groups, so several ranks read all of them")
    return reasons


def _moving_seconds(work: Work, machine: Machine, read_bytes: float, gathered_bytes: float) -> dict[str, float]:
    """Of one rank's share of the drives, and of the link to its GPU."""
    seconds = {"drive": math.inf}
    if machine.drive is not None:
        seconds["drive"] = read_bytes / machine.drive_of_rank().read_bytes_per_s
    if not machine.device_is_host:
        seconds["to device"] = gathered_bytes / machine.link_bytes_per_s
    return seconds


def _gather_seconds(machine: Machine, groups: FrozenGroups, *, times: int) -> float:
    """All-gathers of the blocks, each so often, and of the root once."""
    return sum(
        machine.gather_seconds(machine.ranks * nbytes) for nbytes in (*groups.expected[1:] * times, groups.expected[0])
    )


def _lora_seconds(work: Work, machine: Machine, rank: int) -> float:
    """Compute of a step, what each use of a group takes however small it is, and the update of the adapters.

    A token takes 2 operations per active frozen parameter in the forward and 2 in the backward, which has no gradient of it to
    compute, and 2 more where the forward is computed again; 6 or 8 per parameter of the adapters.
    """
    again = 2 if work.checkpointing else 0
    tokens = work.tokens / work.ranks
    flops = tokens * ((4 + again) * work.model.active_numel + (6 + again) * work.model.active_adapter_numel(rank))
    uses = work.micro_batches * (2 * len(work.group_numels) - 1)
    per_element = PARAMETER_BYTES + work.scheme.moments * MOMENT_TRAFFIC_BYTES + CAST_BYTES
    per_element += NORM_BYTES + CLIP_BYTES if work.clipping else 0
    traffic = per_element * work.model.adapter_numel(rank) / work.ranks
    update_seconds = traffic / (machine.host_bytes_per_s / machine.ranks_per_node)
    return flops / machine.flops_per_s + uses * machine.group_seconds + update_seconds


def _start_seconds(work: Work, machine: Machine) -> float:
    shard_bytes = COMPUTE_BYTES * work.shard_numel
    return START_SECONDS + _moving_seconds(work, machine, shard_bytes, 0)["drive"]
