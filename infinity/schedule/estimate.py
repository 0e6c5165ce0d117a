"""Floor 3. Memory per tier, a line per user, and bytes per step, for every way to place a model's states.

Of one rank; all ranks are equal. What is counted is what infinity and FSDP2 hold: fp32 masters, fp32 moments and fp32
gradients, each sharded over all ranks, and 16-bit copies of what is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.schedule import pinned
from infinity.schedule.floor import MASTER_BYTES, MOMENT_BYTES, step_bytes
from infinity.schedule.transformer import Transformer
from infinity.units import GIB

COPY_BYTES = 2
"""One element of what is gathered (bf16)."""

GRADIENT_BYTES = 4
"""One element of a reduced gradient (fp32)."""

STATE_BYTES = MASTER_BYTES + 2 * MOMENT_BYTES

HOST_PROCESS_BYTES = GIB // 2
"""Python, torch and their buffers on a machine that computes on its CPU (0.31 GiB were measured)."""

HOST_PROCESS_WITH_DEVICE_BYTES = 3 * GIB
"""The same with CUDA and NCCL; an assumption."""

DEVICE_PROCESS_BYTES = 3 * GIB // 2
"""CUDA context, NCCL's buffers and kernels on a device; an assumption."""

GATHERED_GROUPS = 2
"""Groups gathered at once: the one that computes, and the one that is gathered meanwhile."""


@dataclass(frozen=True)
class Strategy:
    """Where the states of a model rest.

    Attributes:
        name: for people.
        stage: of ZeRO; 2 keeps parameters gathered from forward to backward, 3 gathers them for each use.
        parameters, optimizer: "none" (the device), "cpu" or "nvme", as in offload_param and offload_optimizer.
        runs: whether infinity can run it. It can't update in host memory what rests on a GPU.
    """

    name: str
    stage: int
    parameters: str = "none"
    optimizer: str = "none"
    runs: bool = True

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.parameters, self.optimizer)

    @property
    def on_host(self) -> bool:
        """Whether the update happens in host memory."""
        return self.optimizer != "none"


STRATEGIES = (
    Strategy("stage 2", 2),
    Strategy("stage 2, optimizer on CPU", 2, optimizer="cpu", runs=False),
    Strategy("stage 3", 3),
    Strategy("stage 3, optimizer on CPU", 3, optimizer="cpu", runs=False),
    Strategy("stage 3, all on CPU", 3, parameters="cpu", optimizer="cpu"),
    Strategy("stage 3, optimizer on NVMe", 3, optimizer="nvme"),
    Strategy("stage 3, all on NVMe", 3, parameters="nvme", optimizer="nvme"),
)
"""From the fastest to the most frugal, as experts try them by hand."""


@dataclass(frozen=True)
class Work:
    """What one rank does in a step.

    Attributes:
        model: the whole model.
        ranks: over which it is sharded.
        samples: of one micro-batch of one rank.
        micro_batches: per step.
        checkpointing: whether activations are kept at the blocks' borders only, and computed again.
        groups_per_block: into how many groups of its own the parts of a block are wrapped.
    """

    model: Transformer
    ranks: int = 1
    samples: int = 1
    micro_batches: int = 1
    checkpointing: bool = True
    groups_per_block: int = 1

    @property
    def shard_numel(self) -> int:
        """Parameters of one rank."""
        return -(-self.model.numel // self.ranks)

    @property
    def group_numel(self) -> int:
        """Parameters of the largest group."""
        return max(self.group_numels)

    @property
    def group_numels(self) -> list[int]:
        """Parameters of each group in the order of the forward, the root last."""
        parts = self.groups_per_block
        even = self.model.block_numel // parts
        block = [even] * (parts - 1) + [self.model.block_numel - even * (parts - 1)]
        return block * self.model.layers + [self.model.root_numel]

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.ranks * self.samples * self.micro_batches * self.model.seq

    @property
    def flops(self) -> float:
        """Of a step on one rank."""
        return self.micro_batches * self.model.flops(self.samples, checkpointing=self.checkpointing)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by tier, each with its users by name."""

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


def memory_of(work: Work, strategy: Strategy, *, pinned_bytes: int, device_is_host: bool) -> Memory:
    """What one rank holds. `device_is_host`: computing on the CPU, so that what the device holds is in host memory too."""
    states = states_of(work.model.numel, work.ranks, strategy)
    device = {**_working_memory(work, strategy), **states.device}
    host = dict(states.host)
    if strategy.uses_nvme:
        host["pinned pool"] = pinned_bytes
    if device_is_host:
        return Memory({}, {"Python and torch": HOST_PROCESS_BYTES, **host, **device}, states.nvme)
    return Memory(
        {"CUDA and NCCL": DEVICE_PROCESS_BYTES, **device},
        {"Python, torch and CUDA": HOST_PROCESS_WITH_DEVICE_BYTES, **host},
        states.nvme,
    )


def states_of(numel: int, ranks: int, strategy: Strategy) -> Memory:
    """One rank's part of the states of a model of `numel` parameters, wherever they rest: what lasts from step to step, and
    the parameters that stage 2 keeps gathered."""
    shard = -(-numel // ranks)
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    nvme: dict[str, int] = {}
    if strategy.stage < 3:
        device["gathered parameters"] = COPY_BYTES * numel
    elif strategy.optimizer == "cpu" and strategy.parameters == "none":
        device["16-bit copies"] = COPY_BYTES * shard
    home = {"none": device, "cpu": host, "nvme": nvme}[strategy.optimizer]
    home["optimizer state: masters and moments"] = STATE_BYTES * shard
    (host if strategy.on_host else device)["gradients"] = GRADIENT_BYTES * shard
    if strategy.uses_nvme:
        nvme["16-bit copies"] = COPY_BYTES * shard
        if strategy.parameters != "nvme":
            host["16-bit copies"] = COPY_BYTES * shard
    return Memory(device, host, nvme)


def _working_memory(work: Work, strategy: Strategy) -> dict[str, int]:
    """Of the device, while it computes."""
    model = work.model
    lines = {}
    if strategy.stage >= 3:
        lines["gathered groups"] = COPY_BYTES * (GATHERED_GROUPS * work.group_numels[0] + model.root_numel)
    lines["gradients of a group, to be reduced"] = (COPY_BYTES + GRADIENT_BYTES) * work.group_numel
    if work.checkpointing:
        lines["activation checkpoints"] = model.checkpoint_bytes(work.samples)
        lines["activations of a block"] = model.activation_bytes(work.samples)
    else:
        lines["activations"] = model.activation_bytes(work.samples, model.layers)
    lines["logits"] = model.logits_bytes(work.samples)
    return lines


def bytes_of_step(work: Work, strategy: Strategy) -> tuple[int, int]:
    """Bytes (read, written) of one rank's drives in a step, with nothing cached (`floor.step_bytes`)."""
    if not strategy.uses_nvme:
        return 0, 0
    return step_bytes(
        trained_numel=work.shard_numel,
        paged_numel=work.shard_numel if strategy.parameters == "nvme" else 0,
        copy_itemsize=COPY_BYTES,
        state_on_nvme=strategy.optimizer == "nvme",
        micro_batches=work.micro_batches,
    )


@dataclass(frozen=True)
class Pipeline:
    """What follows from the pinned budget, as in the swap manager.

    Attributes:
        pinned_bytes: of the pool.
        sub_group_numel: elements stepped together.
        look_ahead_bytes: that groups read ahead may hold.
        sub_groups_ahead: read ahead in the step.
    """

    pinned_bytes: int
    sub_group_numel: int
    look_ahead_bytes: int
    sub_groups_ahead: int


def pipeline_of(work: Work, strategy: Strategy, pinned_bytes: int | None = None) -> Pipeline:
    """The pipeline within `pinned_bytes`, or with a comfortable pool where None."""
    if not strategy.uses_nvme:
        return Pipeline(0, min(work.shard_numel, pinned.SUB_GROUP_NUMEL_DEFAULT), 0, 1)
    group_bytes = -(-work.group_numel // work.ranks) * COPY_BYTES if strategy.parameters == "nvme" else 0
    per_element = COPY_BYTES + (STATE_BYTES if strategy.optimizer == "nvme" else 0)
    numel = pinned.SUB_GROUP_NUMEL_DEFAULT
    if pinned_bytes is not None:
        numel = max(1, (pinned_bytes - pinned.ACCESS_BYTES) // pinned.PIPELINE_DEPTH // per_element)
    numel = min(numel, -(-work.group_numel // work.ranks))
    pool = pinned_bytes or pinned.comfortable_bytes(pinned.gather_bytes(group_bytes), numel * per_element)
    return Pipeline(
        pool,
        numel,
        pinned.look_ahead_room(pool, group_bytes),
        pinned.sub_groups_ahead(pool, numel * per_element),
    )


def pinned_bytes_min(work: Work, strategy: Strategy) -> int:
    """The smallest pool with which the gathers work; sub-groups become as small as they must."""
    group_bytes = -(-work.group_numel // work.ranks) * COPY_BYTES if strategy.parameters == "nvme" else 0
    return pinned.PinnedBudget(pinned.gather_bytes(group_bytes), 0).nbytes
