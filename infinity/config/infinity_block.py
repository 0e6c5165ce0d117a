"""The config's block `infinity`: keys that DeepSpeed does not have."""

from __future__ import annotations

from typing import Annotated, Literal

from infinity.config.blocks import Block, key
from infinity.config.rules import (
    BUDGET_BYTES,
    CACHE_BYTES,
    CLASS_NAMES,
    RUN_NAME,
    Backend,
    CheckpointFormat,
    Count,
    Device,
    Durability,
    Flag,
    MasterWeights,
    Mix,
    MomentsDtype,
    Positive,
    ReduceDtype,
    Schedule,
    Update,
    Whose,
    choice,
    or_auto,
)


class OffloadActivationsConfig(Block):
    """Where activations that a forward saves are kept until their backward. Large tensors move, parameters never."""

    device: Annotated[Device, choice(Device)] = key(
        "none",
        "none leaves them on the device that computes; cpu is host memory, nvme the drives on which parameters or "
        "optimizer state rest.",
    )
    bytes_min: Annotated[int, CACHE_BYTES] = key(1 << 20, "Tensors of fewer bytes stay on the device.", unit="bytes")
    host_bytes_max: Annotated[int | Literal["auto"], or_auto(CACHE_BYTES)] = key(
        "auto",
        "With device cpu: at most so many bytes of host memory; the rest stays on the device. auto is no bound.",
        unit="bytes",
    )
    buffer_bytes: Annotated[int, BUDGET_BYTES] = key(
        256 << 20,
        "With device nvme: pinned memory through which they pass, counted in `pinned_bytes_max`. A tensor larger than a "
        "quarter of it stays on the device.",
        unit="bytes",
    )


class InfinityConfig(Block):
    """Settings that DeepSpeed does not have."""

    offload_activations: OffloadActivationsConfig = key(
        OffloadActivationsConfig(), "Where saved activations are kept from forward to backward."
    )

    pinned_bytes_max: Annotated[int | Literal["auto"], or_auto(BUDGET_BYTES)] = key(
        "auto",
        "Pinned host memory of this process, in bytes; every transfer goes through it. auto takes what the model needs at "
        "full speed, and more as far as the pool, with the gradients that wait, is within a quarter of this rank's share of "
        "the memory that is available here, control groups counted: where updates are in the backward, room for the state of "
        "the two largest groups; then for compute parameters (2 bytes per element) that stay from step to step, so that they "
        "are not read again. What is set beyond the first two is for what stays, too.",
        unit="bytes",
    )
    host_cache_bytes: Annotated[int, CACHE_BYTES] = key(
        0,
        "So much of the pinned memory, in bytes, keeps compute parameters (16-bit) and optimizer state from step to step, "
        "those that spare the most transfers; they take no space on the drive. Counted in `pinned_bytes_max`; no more is "
        "taken than there is to keep.",
        unit="bytes",
    )
    gradient_bytes_max: Annotated[int | Literal["auto"], or_auto(CACHE_BYTES)] = key(
        "auto",
        "Host memory, in bytes, in which the reduced gradients of this process wait for their update; those of the last "
        "groups that don't fit wait on NVMe. auto keeps all in host memory. Where updates are in the backward, those of every "
        "fourth group wait for the next forward, and with clipping, accumulation or fp16 those of all; with a bound no group "
        "is left to the forward, be it reached or not. Gradients take 4 bytes per parameter, or 2 where 16 bits hold all of "
        "one: reduced in bf16, or computed in 16 bits and reduced over one process, without accumulation.",
        unit="bytes",
    )
    keep_grad: Flag = key(
        False,
        "Whether `.grad` of parameters on NVMe shows the gradient from the backward until the step, for those who look at "
        "it or clip it themselves. It then takes 4 bytes per parameter of host memory, and nothing is updated in the "
        "backward. Else `.grad` refuses to be used wherever gradients wait in 16 bits or on NVMe, or groups are updated in "
        "the backward.",
    )
    wrap: Annotated[tuple[str, ...] | Literal["auto"], or_auto(CLASS_NAMES)] = key(
        "auto",
        "Class names of the modules that become groups, one `fully_shard` call each. auto is the repeated blocks, and "
        "parts of them, or of what is left, where stage3_max_live_parameters is less than they need.",
    )
    backend: Annotated[Backend, choice(Backend)] = key(
        "auto",
        "How storage is driven; auto takes the drive's profile, or else the first of io_uring, linux_aio and threads that "
        "the system permits.",
    )
    mix: Annotated[Mix, choice(Mix)] = key(
        "auto",
        "How reads and writes that wait for one drive share it: interleaved, or in bursts of one, then the other; auto "
        "takes the drive's profile, or else interleaves.",
    )
    rings: Positive = key(
        1, "Ring threads per drive; each has `aio.queue_depth` submissions in flight.", unit="threads"
    )
    iopoll: Flag = key(False, "Whether io_uring polls the drive for completions; its driver needs poll queues.")
    sqpoll: Flag = key(False, "Whether a kernel thread polls for io_uring's submissions, which costs a core.")
    lock_memory: Flag = key(False, "Whether to lock the pinned memory against swapping (mlock).")
    checksums: Flag = key(
        True,
        "Whether a CRC-32C of every 4 KiB written to NVMe is kept in memory and verified when it is read, so that "
        "training stops before it uses what a drive has lost or changed.",
    )
    checkpoint_keep: Count = key(
        0, "How many checkpoints stay in a folder: a save removes the oldest beyond that; 0 keeps all."
    )
    checkpoint_format: Annotated[CheckpointFormat, choice(CheckpointFormat)] = key(
        "dcp",
        "How `save_checkpoint` stores masters and moments: dcp as PyTorch does, arena as they lie on NVMe, which takes no "
        "more than a copy of the bytes while training goes on.",
    )
    fused: Flag = key(True, "Whether the step runs torch's fused AdamW kernel.")
    master_weights: Annotated[MasterWeights, choice(MasterWeights)] = key(
        "split",
        "How an fp32 master weight rests on NVMe beside its bf16 compute parameter: split keeps the 16 bits that this "
        "lacks, full keeps all 32. The numbers are the same.",
    )
    moments_dtype: Annotated[MomentsDtype, choice(MomentsDtype)] = key(
        "fp32",
        "In which Adam's two moments are kept on NVMe. bf16 takes 8 bytes of state per parameter where fp32 takes 12, and "
        "changes the numbers: each moment is rounded up or down by chance, with random bits that depend on the parameter, "
        "the element and the step alone, so a run can be repeated bit for bit on any number of ranks. 8bit takes 6 bytes: "
        "each moment is one of 256 values times the largest of its block of 256, as in bitsandbytes' 8-bit Adam; blocks are "
        "those of a rank's shard, so another number of ranks gives other numbers.",
    )
    update: Annotated[Update, choice(Update)] = key(
        "auto",
        "When the weights of a group are updated: in step, in forward just before the group is gathered, or in backward "
        "as soon as its gradient is there (every fourth group in forward even so, unless `gradient_bytes_max` is set, so that "
        "neither pass leaves the drive idle). The numbers are the same. With clipping, accumulation or fp16 the step "
        "accepts what the backward updated, or discards it: that takes memory for gradients and nearly twice the space on "
        "NVMe. auto is "
        "backward. It is forward with `keep_grad`, and where the step would have to accept, but the drives would not have as "
        "much space left as the second slot takes, or nothing could be updated so, as all of it rests partly in host memory "
        "or has its gradient on NVMe.",
    )
    schedule: Annotated[Schedule, choice(Schedule)] = key(
        "auto",
        "In which order the micro-batches of a step pass through the groups in `Engine.train_batch`: horizontal is one "
        "micro-batch after the other; vertical is all of them through a group before the next, which reads every group twice "
        "a step instead of twice a micro-batch, and holds the activations of all of them. The numbers are the same. auto is "
        "vertical where the model rests on NVMe and its micro-batches can take turns. With vertical, no loop over `backward` "
        "is possible, and gradients need no memory under accumulation where they are neither clipped nor scaled.",
    )
    durability: Annotated[Durability, choice(Durability)] = key(
        "none",
        "What stays on the drives when the process ends: none, nothing, or step, every finished step, from which "
        "`initialize(resume=True)` goes on bit for bit. It takes twice the space there, and all state on them.",
    )
    resume_hyperparameters: Annotated[Whose, choice(Whose)] = key(
        "run",
        "Whose learning rate, weight decay, schedule and other settings of the optimizer count where a run is resumed or "
        "a checkpoint loaded: the run's as it had them, or those of the config, at the place in the schedule that the run "
        "has reached. What differs is named in the log.",
    )
    run_name: Annotated[str, RUN_NAME] = key(
        "run", "Of the folder infinity-durable-NAME under each nvme_path in which a durable run keeps its files."
    )
    reduce_dtype: Annotated[ReduceDtype, choice(ReduceDtype)] = key(
        "fp32", "Element type in which gradients are reduced over the ranks."
    )
