"""Memory per tier, one line per user, and bytes per step, for every placement of a model's states. Numbers are for one
rank."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

from infinity.plan.strategy import Strategy
from infinity.plan.work import DEFAULT_SCHEME, ROOT, Work
from infinity.schedule import pinned
from infinity.schedule.residency import Candidate, choose_resident, choose_staying, moved_bytes
from infinity.schedule.scheme import COMPUTE_BYTES, Scheme
from infinity.schedule.spilling import GRADIENT_BYTES
from infinity.units import GIB, PAGE_BYTES

HOST_PROCESS_BYTES = GIB // 2
"""Python, torch and their buffers on a machine that computes on its CPU (measured: 0.31 GiB)."""

HOST_PROCESS_WITH_DEVICE_BYTES = 3 * GIB
"""The same with CUDA and NCCL (an assumption)."""

DEVICE_PROCESS_BYTES = 3 * GIB // 2
"""CUDA context, NCCL's buffers and kernels on a device (an assumption)."""

GATHERED_GROUPS = 2
"""Groups gathered at once: the computing one, and the next one."""

SAVED_ON_THE_WAY = 2
"""Blocks whose offloaded activations are on the device at once: one computes, another one's are copied."""

EXCHANGED_COPIES = 4
"""Tensors of a block's exchange of tokens that are alive at once: arrived, computed, returned, weighted."""

GRADIENTS_APPLIED = 2
"""Groups with gradients in host memory at once if updates are in the backward: one arrives while another is applied."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by tier, and by name of their user."""

    device: dict[str, int]
    host: dict[str, int]
    nvme: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def nvme_bytes(self) -> int:
        return sum(self.nvme.values())


@dataclass(frozen=True)
class Part:
    """Elements of one rank that a step treats alike. gathers: of each per step; see `live.LivePlan.gathers`.
    compute_on_nvme: False if gathers read them from ordinary host memory."""

    numel: int
    gathers: int = 2
    compute_on_nvme: bool = True


def candidates_of(part: Part, scheme: Scheme) -> tuple[Candidate, Candidate]:
    """Return the bytes of `part` that a step moves with all state on NVMe: compute parameters, and other state. Units:
    bytes."""
    if not part.compute_on_nvme:  # masters are stored in full
        full = replace(scheme, master_weights="full")
        return Candidate(0, 1, 0, 0), Candidate(math.ceil(full.other_state_bytes() * part.numel), 1, 1, 1)
    return (
        Candidate(COMPUTE_BYTES * part.numel, 1, scheme.compute_reads(part.gathers), 1),
        Candidate(math.ceil(scheme.other_state_bytes() * part.numel), 1, 1, 1),
    )


def step_bytes(part: Part, scheme: Scheme) -> tuple[int, int]:
    """Return the minimum bytes (read, written) of a step with nothing cached."""
    return moved_bytes(candidates_of(part, scheme), (0, 0))


@dataclass(frozen=True)
class HostCache:
    """Bytes that one rank keeps in pinned memory from step to step, by group: compute parameters, and other state."""

    compute: tuple[int, ...] = ()
    other_state: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.compute) + sum(self.other_state)


NO_CACHE = HostCache()


def host_cache_of(work: Work, strategy: Strategy, cache_bytes: int) -> HostCache:
    """Return the contents of a cache of `cache_bytes` with which a step moves least: [Note: What stays]."""
    shards = work.group_shards
    if strategy.optimizer != "nvme":
        return HostCache((0,) * len(shards), (0,) * len(shards))
    on_nvme = strategy.parameters == "nvme"
    parts = [
        Part(shard, work.passes * (1 if group == ROOT else 2), compute_on_nvme=on_nvme)
        for group, shard in enumerate(shards)
    ]
    candidates = [candidate for part in parts for candidate in candidates_of(part, work.scheme)]
    chosen = choose_resident(candidates, cache_bytes)
    return HostCache(tuple(chosen[::2]), tuple(chosen[1::2]))


def updated_in_backward(work: Work, strategy: Strategy, cache: HostCache = NO_CACHE) -> list[int]:
    """Return, by group, the number of elements updated in the backward, applied or speculative. Elements in host
    memory, or with their gradient on NVMe, cannot be updated speculatively."""
    if strategy.update_of(work.scheme) != "backward":
        return [0] * len(work.group_shards)
    shards = [shard - left for shard, left in zip(work.group_shards, work.left_to_forward(strategy), strict=True)]
    if not work.scheme.speculative:
        return shards
    compute, other = strategy.stored_bytes(work.scheme)
    cached = [
        max(math.ceil(of_compute / compute), math.ceil(of_other / other))
        for of_compute, of_other in zip(cache.compute, cache.other_state, strict=True)
    ] or [0] * len(shards)
    spilled = work.gradients_that_spill(strategy)
    return [0 if spills else max(0, shard - kept) for shard, kept, spills in zip(shards, cached, spilled, strict=True)]


def second_slot_bytes(work: Work, strategy: Strategy, cache: HostCache = NO_CACHE) -> int:
    """Return the bytes on NVMe for speculative updates. A durable run has a second slot anyway."""
    if work.durable or not work.scheme.speculative:
        return 0
    return math.ceil(sum(strategy.stored_bytes(work.scheme)) * sum(updated_in_backward(work, strategy, cache)))


def memory_of(
    work: Work, strategy: Strategy, *, pinned_bytes: int, device_is_host: bool, cache: HostCache = NO_CACHE
) -> Memory:
    """Return the memory of one rank, with a pinned pool of `pinned_bytes` besides the host cache. With `device_is_host`
    the CPU computes, so that the device's memory is host memory."""
    gathered = sum(work.group_numels)
    states = states_of(sum(work.stored_numels), work.stage_ranks, strategy, work.scheme, gathered_numel=gathered)
    elsewhere = work.in_flight * sum(work.saved_elsewhere(device_is_host=device_is_host))
    device: dict[str, int] = {}
    if strategy.stage >= 3:
        block = max(work.group_numels[ROOT + 1 :])
        live = gathered if work.keeps_gathered else GATHERED_GROUPS * block + work.group_numels[ROOT]
        device["gathered groups"] = COMPUTE_BYTES * live
    device["gradients of a group, to be reduced"] = (COMPUTE_BYTES + GRADIENT_BYTES) * max(work.group_numels)
    device |= {**activation_lines(work, elsewhere), **states.device}
    if work.head_gradient_bytes:
        device["gradients of the tied head"] = work.head_gradient_bytes
    host, nvme = dict(states.host), dict(states.nvme)
    if work.durable:
        stored = sum(nvme.values())
        nvme |= {"second place of the state": stored, "commit records": record_bytes(stored)}
    if strategy.keeps_compute and device_is_host:
        del device[_GRADIENTS]  # the same as the host's
    elif not strategy.all_gradients_wait(work.scheme):
        host["gradients being applied"] = GRADIENTS_APPLIED * GRADIENT_BYTES * max(work.group_shards)
        if left := work.gradients_that_wait(strategy):
            host[_GRADIENTS] = work.gradient_itemsize * left
    elif strategy.on_host and not strategy.keeps_compute:
        spilled = sum(work.gradients_that_spill(strategy))
        host[_GRADIENTS] = work.gradient_itemsize * work.shard_numel - spilled
        if spilled:
            nvme[_GRADIENTS] = spilled
    if strategy.uses_nvme:
        host["pinned pool"] = pinned_bytes
    if cache.nbytes:
        host["host cache, pinned"] = cache.nbytes
        cached = {_COMPUTE: sum(cache.compute), _GRADIENTS: 0}
        other = sum(cache.other_state)
        nvme = {user: max(0, nbytes - cached.get(user, other)) for user, nbytes in nvme.items()}
    if second := second_slot_bytes(work, strategy, cache):
        nvme["second slot of what the backward updates"] = second
    if elsewhere and work.activations == "cpu":
        host["saved activations, pinned"] = elsewhere
    elif elsewhere:
        host["buffer for saved activations, pinned"] = work.activation_buffer_bytes
        nvme[_SAVED] = elsewhere
    return with_process(Memory(device, host, nvme), device_is_host=device_is_host)


def with_process(memory: Memory, *, device_is_host: bool) -> Memory:
    """Return the memory with that of the process; the memory of a CPU as a device is host memory."""
    if device_is_host:
        host = {"Python and torch": HOST_PROCESS_BYTES, **memory.host, **memory.device}
        return Memory({}, host, memory.nvme)
    device = {"CUDA and NCCL": DEVICE_PROCESS_BYTES, **memory.device}
    return Memory(device, {"Python, torch and CUDA": HOST_PROCESS_WITH_DEVICE_BYTES, **memory.host}, memory.nvme)


# Keys of the JSON report. The lines of a tier add up, so no old name can be kept next to a new one for a release.
_COMPUTE = "16-bit copies"  # deprecated
_GRADIENTS = "gradients"
_SAVED = "saved activations"


def record_bytes(stored_bytes: int) -> int:
    """Return the bytes of the commit records of a durable run. Two exist at once for a moment, each with the checksum
    (4 bytes) of every page (4 KiB) of the state."""
    return 2 * 4 * -(-stored_bytes // PAGE_BYTES)


def states_of(
    numel: int, ranks: int, strategy: Strategy, scheme: Scheme = DEFAULT_SCHEME, *, gathered_numel: int | None = None
) -> Memory:
    """Return one rank's part of the states of a model in all tiers, as far as it lasts from step to step, and the
    parameters that stage 2 keeps gathered (None: all)."""
    scheme = replace(scheme, moment_bytes=strategy.moment_bytes(scheme))
    shard = -(-numel // ranks)
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    nvme: dict[str, int] = {}
    compute_bytes, _ = strategy.stored_bytes(scheme)
    if strategy.stage < 3:
        device["gathered parameters"] = COMPUTE_BYTES * (numel if gathered_numel is None else gathered_numel)
    if strategy.optimizer == "cpu" and strategy.parameters == "none":
        device[_COMPUTE] = COMPUTE_BYTES * shard
    home = {"none": device, "cpu": host, "nvme": nvme}[strategy.optimizer]
    beside_compute = strategy.on_host and not strategy.keeps_compute
    masters = "remainders" if beside_compute and scheme.compute_is_state() else "masters"
    user = f"optimizer state: {masters} and moments" if scheme.moments else f"optimizer state: {masters}"
    home[user] = math.ceil((scheme.other_state_bytes() if beside_compute else scheme.state_bytes) * shard)
    if strategy.all_gradients_wait(scheme):
        (host if strategy.on_host else device)[_GRADIENTS] = GRADIENT_BYTES * shard
    if strategy.keeps_compute:
        device[_GRADIENTS] = GRADIENT_BYTES * shard  # until the step, which copies all of them to the host
    if strategy.on_host:
        (nvme if compute_bytes else host)[_COMPUTE] = COMPUTE_BYTES * shard
    return Memory(device, host, nvme)


def activation_lines(work: Work, elsewhere: int) -> dict[str, int]:
    """Return the device memory of activations and of computing. `elsewhere`: bytes of offloaded saved activations."""
    model, tensor_ranks = work.stage, work.tensor_ranks
    lines = {}
    if elsewhere:
        of_block = model.saved_bytes(work.samples, checkpointing=work.checkpointing, tensor_ranks=tensor_ranks)
        lines["saved activations on their way"] = min(SAVED_ON_THE_WAY, model.layers) * of_block
    if staying := work.in_flight * sum(work.saved_bytes) - elsewhere:
        lines["activation checkpoints" if work.checkpointing else "activations"] = staying
    if work.checkpointing:
        lines["activations of a block"] = model.activation_bytes(work.samples, tensor_ranks=tensor_ranks)
    if work.expert_ranks > 1 and model.experts is not None:
        rows = work.samples * model.seq * model.experts.per_token
        lines["tokens at their experts"] = EXCHANGED_COPIES * COMPUTE_BYTES * rows * model.hidden
    if work.between_groups_bytes:
        lines["hidden states between groups"] = work.between_groups_bytes
    lines["logits"] = model.logits_bytes(work.samples)
    return lines


def bytes_of_step(work: Work, strategy: Strategy) -> tuple[int, int]:
    """Return the bytes (read, written) on one rank's drives in a step with nothing cached, and nothing gathered for
    longer than its use; with spilled gradients and saved activations."""
    if not strategy.uses_nvme:
        return 0, 0
    spilled = work.gradients_that_spill(strategy)
    left = work.left_to_forward(strategy)
    waiting = sum(
        shard if spills else part for shard, spills, part in zip(work.group_shards, spilled, left, strict=True)
    )
    later = replace(work.scheme, update=work.scheme.late)
    read = written = work.passes * (sum(spilled) + sum(work.saved_on_drive))
    for numel, scheme in ((work.shard_numel - waiting, work.scheme), (waiting, later)):
        part = Part(numel, 2 * work.passes, compute_on_nvme=strategy.parameters == "nvme")
        moved = step_bytes(part, scheme)
        read, written = read + moved[0], written + moved[1]
    return read, written


@dataclass(frozen=True)
class Pipeline:
    """The parts of the pinned budget, as in the swap manager."""

    pinned_bytes: int
    """Size of the pool, without the host cache."""
    sub_group_numel: int
    look_ahead_bytes: int
    """Bound for groups read ahead, and for sub-groups too if updates are in the passes."""
    sub_groups_ahead: int
    """Sub-groups read ahead if updates are in the step."""
    staying: frozenset[int] = frozenset()
    """Groups whose compute parameters stay staged from step to step, in `staying_bytes` of the pool."""
    staying_bytes: int = 0


def pipeline_of(
    work: Work,
    strategy: Strategy,
    pinned_bytes: int | None = None,
    memory_bytes: float = math.inf,
    *,
    cache: HostCache | None = NO_CACHE,
) -> Pipeline:
    """Return the pipeline for a pool of `pinned_bytes` (None: a comfortable pool), on a rank with `memory_bytes`.

    cache: None if it is chosen later; a comfortable pool then leaves it the memory for staying groups.
    """
    if not strategy.uses_nvme:
        return Pipeline(0, min(work.shard_numel, pinned.SUB_GROUP_NUMEL_IN_MEMORY), 0, 1)
    group_bytes = _largest_group_bytes(work, strategy)
    per_element: float = sum(strategy.stored_bytes(work.scheme))
    spilled = work.gradients_that_spill(strategy)
    if any(spilled):
        per_element += work.gradient_itemsize
    cut_from = work.shard_numel if strategy.keeps_compute else max(work.group_shards)
    numel = min(pinned.SUB_GROUP_NUMEL_DEFAULT, cut_from)
    if pinned_bytes is not None:
        room = (pinned_bytes - pinned.ACCESS_BYTES - group_bytes) // pinned.PIPELINE_DEPTH
        numel = max(1, min(numel, int(room / per_element)))
    if work.muon:
        numel = max(numel, *(-(-rows // work.stage_ranks) * columns for rows, columns in work.model.block_matrices))
    gather, stepped = pinned.gather_bytes(group_bytes), math.ceil(numel * per_element)
    in_backward = strategy.update_of(work.scheme) == "backward"
    per_element += COMPUTE_BYTES
    waiting = math.ceil(sum(sorted(work.group_shards)[-2:]) * per_element) if in_backward else 0
    staged, spared = _staged_bytes(work, strategy, cache or NO_CACHE), _spared_reads(work, strategy)
    pool = pinned_bytes
    if pool is None:
        held = work.gradient_itemsize * work.gradients_that_wait(strategy) - sum(spilled)
        may_stay = 0 if cache is None else sum(map(operator.mul, staged, map(bool, spared)))
        pool = pinned.comfortable_bytes(gather, stepped, waiting, memory_bytes, held, may_stay)
    room = max(0, pool - pinned.comfortable_bytes(gather, stepped, waiting))
    staying = frozenset(choose_staying(staged, spared, room))
    staying_bytes = sum(staged[group] for group in staying)
    passing = pool - staying_bytes
    ahead = pinned.look_ahead_room(passing, group_bytes), pinned.sub_groups_ahead(passing, stepped)
    return Pipeline(pool, numel, *ahead, staying, staying_bytes)


def _staged_bytes(work: Work, strategy: Strategy, cache: HostCache) -> list[int]:
    """Return the lease bytes of each group's compute parameters; 0 if all of them are cached."""
    if strategy.parameters != "nvme":
        return [0] * len(work.group_shards)
    nbytes = [COMPUTE_BYTES * shard for shard in work.group_shards]
    cached = cache.compute or [0] * len(nbytes)
    return [size if size > of_group else 0 for size, of_group in zip(nbytes, cached, strict=True)]


def _spared_reads(work: Work, strategy: Strategy) -> list[int]:
    """Return, by group, the reads per micro-batch that are saved if compute parameters stay staged, and 0 if none does."""
    if work.keeps_gathered:
        return [0] * len(work.group_shards)
    gathers = [1] + [2] * (len(work.group_shards) - 1)  # the root stays gathered
    scheme, later = work.scheme, replace(work.scheme, update=work.scheme.late)
    return [
        (later if left == shard else scheme).compute_reads(times)
        for times, left, shard in zip(gathers, work.left_to_forward(strategy), work.group_shards, strict=True)
    ]


def pinned_bytes_min(work: Work, strategy: Strategy) -> int:
    """Return the smallest pool with which gathers work; sub-groups become as small as needed."""
    return pinned.PinnedBudget(pinned.gather_bytes(_largest_group_bytes(work, strategy)), 0).nbytes


def _largest_group_bytes(work: Work, strategy: Strategy) -> int:
    return COMPUTE_BYTES * max(work.group_shards) if strategy.parameters == "nvme" else 0
