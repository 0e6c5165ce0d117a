"""The config's block `infinity`: keys that DeepSpeed does not have."""

from __future__ import annotations

from infinity.config.blocks import Block, key
from infinity.config.rules import (
    AutoBudgetBytes,
    AutoBytes,
    AutoPositive,
    Backend,
    BudgetBytes,
    Bytes,
    CheckpointFormat,
    ClassNames,
    Count,
    Device,
    Durability,
    Flag,
    MasterWeights,
    Mix,
    MomentsDtype,
    Positive,
    ReduceDtype,
    RunName,
    Schedule,
    Update,
    Whose,
)


class OffloadActivationsConfig(Block):
    """Where activations that a forward saves are kept until their backward. Large tensors move, parameters never."""

    device: Device = key(
        "none",
        "none leaves them on the device; cpu is host memory, nvme the drives with parameters or optimizer state.",
    )
    bytes_min: Bytes = key(1 << 20, "Tensors of fewer bytes stay on the device.", unit="bytes")
    host_bytes_max: AutoBytes = key(
        "auto",
        "With device cpu: the most host memory they take; the others stay on the device. auto is no bound.",
        unit="bytes",
    )
    buffer_bytes: BudgetBytes = key(
        256 << 20,
        "With device nvme: pinned memory for their transfers, counted in `pinned_bytes_max`. A tensor larger than a "
        "quarter of it stays on the device.",
        unit="bytes",
    )


class InfinityConfig(Block):
    """Settings that DeepSpeed does not have."""

    offload_activations: OffloadActivationsConfig = key(
        OffloadActivationsConfig(), "Where saved activations are kept from forward to backward."
    )

    pinned_bytes_max: AutoBudgetBytes = key(
        "auto",
        "Pinned host memory of this process; every transfer goes through it. auto takes the memory that full speed needs. "
        "It takes more while the pool and the waiting gradients are within a quarter of this rank's share of the available "
        "memory (control groups counted): first room for the state of the two largest groups, if updates are in the "
        "backward; then for compute parameters (2 bytes per element) that stay from step to step and are not read again. A "
        "value above the first two is used for these compute parameters, too.",
        unit="bytes",
    )
    host_cache_bytes: Bytes = key(
        0,
        "Pinned memory that keeps compute parameters (16-bit) and optimizer state from step to step: those that save the "
        "most transfers; they take no space on the drive. Counted in `pinned_bytes_max`, and no more than they need.",
        unit="bytes",
    )
    gradient_bytes_max: AutoBytes = key(
        "auto",
        "Host memory in which the reduced gradients of this process wait for their update; what doesn't fit waits on NVMe, an "
        "even share of the groups. auto keeps all in host memory. With updates in the backward, the gradients of every fourth "
        "group wait for the next forward, and with clipping, accumulation or fp16 those of all groups; with a bound, reached "
        "or not, no group is left to the forward. A gradient takes 4 bytes per parameter, or 2 if 16 bits hold all of it: "
        "reduced in bf16, or computed in 16 bits and reduced over one process, without accumulation.",
        unit="bytes",
    )
    keep_grad: Flag = key(
        False,
        "Whether `.grad` of parameters on NVMe shows the gradient from the backward until the step, for code that reads or "
        "clips it. It then takes 4 bytes per parameter of host memory, and nothing is updated in the backward. Otherwise "
        "`.grad` raises on any use if gradients wait in 16 bits or on NVMe, or groups are updated in the backward.",
    )
    wrap: ClassNames = key(
        "auto",
        "Class names of the modules that become groups, one `fully_shard` call each. auto is the repeated blocks, and "
        "parts of them, or of the other modules, if stage3_max_live_parameters is less than they need.",
    )
    backend: Backend = key(
        "auto",
        "How storage is driven; auto takes the drive's profile, or else the first of io_uring, linux_aio and threads that "
        "the system permits.",
    )
    mix: Mix = key(
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
        "Whether a CRC-32C of every 4 KiB written to NVMe is kept in memory and verified at each read, so that training "
        "stops before it uses bytes that a drive has lost or changed.",
    )
    checkpoint_keep: Count = key(
        0, "Checkpoints that stay in a folder: a save removes the oldest beyond that; 0 keeps all."
    )
    checkpoint_format: CheckpointFormat = key(
        "dcp",
        "How `save_checkpoint` stores masters and moments: dcp as PyTorch does; arena as they are on NVMe, which only "
        "copies bytes while training continues.",
    )
    fused: Flag = key(True, "Whether the step runs torch's fused AdamW kernel.")
    master_weights: MasterWeights = key(
        "split",
        "How an fp32 master weight is stored on NVMe with its bf16 compute parameter: split keeps the 16 bits that this "
        "lacks, full keeps all 32. The results are the same.",
    )
    moments_dtype: MomentsDtype = key(
        "fp32",
        "Element type of Adam's two offloaded moments. fp32 takes 12 bytes of state per parameter. bf16 takes 8 and changes "
        "the results: moments are rounded stochastically, with random bits that depend only on parameter, element and step, "
        "so a run can be repeated bit for bit on any number of ranks. 8bit takes 6: each moment is one of 256 values times "
        "the largest of its block of 256, as in bitsandbytes' 8-bit Adam; blocks are cut from a rank's shard, so the results "
        "depend on the number of ranks.",
    )
    update: Update = key(
        "auto",
        "When the weights of a group are updated: in step, in forward just before the group is gathered, or in backward "
        "as soon as its gradient is there (a fourth of the groups still in forward, unless `gradient_bytes_max` is set, so "
        "that neither pass leaves the drive idle). The results are the same. With clipping, accumulation or fp16, the step "
        "accepts or discards the updates of the backward, which takes memory for gradients and nearly twice the space on "
        "NVMe. auto is backward. It is forward with `keep_grad`, and if the step would have to accept updates, but the "
        "drives have no space for the second slot or every group is partly in host memory or has its gradient on NVMe.",
    )
    schedule: Schedule = key(
        "auto",
        "Order in which the micro-batches of a step pass through the groups in `Engine.train_batch`: horizontal is one "
        "micro-batch after the other; vertical is all of them through a group before the next, which reads every group twice "
        "a step instead of twice a micro-batch, and holds the activations of all of them. The results are the same. auto is "
        "vertical if the model is on NVMe and its micro-batches can take turns. With vertical, no loop over `backward` is "
        "possible, and accumulation needs no memory for gradients that are neither clipped nor scaled.",
    )
    micro_batches_at_once: AutoPositive = key(
        "auto",
        "In the vertical schedule: how many micro-batches pass through a group before the next group; a divisor of "
        "`gradient_accumulation_steps`. With fewer, fewer saved activations are alive, each round reads the groups once more, "
        "and the sums of all gradients wait for the last round. auto is all; on one rank with schedule auto, as many as save "
        "no more than is available, and than all states would take in memory. The results are the same.",
    )
    micro_batches: Positive = key(
        1,
        "Parts into which the engine's forward splits the batch of a whole step, along dimension 0; they run in the vertical "
        "schedule. For loops and trainers that call the model once a step: `train_micro_batch_size_per_gpu` is that batch, and "
        "`gradient_accumulation_steps` is 1. The loss is the mean of theirs, weighted by their rows, or the sum if the call "
        "has `num_items_in_batch`. With transformers' Trainer, auto takes its `gradient_accumulation_steps`.",
    )
    durability: Durability = key(
        "none",
        "What stays on the drives when the process ends: nothing (none), or every finished step (step), from which "
        "`initialize(resume=True)` resumes bit for bit. It takes twice the space there, and all state must be on them.",
    )
    resume_hyperparameters: Whose = key(
        "run",
        "Whose learning rate, weight decay, schedule and other optimizer settings count after a resume or the load of a "
        "checkpoint: the run's, or those of the config at the step that the run has reached. The log names differences.",
    )
    run_name: RunName = key(
        "run", "NAME of the folder infinity-durable-NAME under each nvme_path, where a durable run keeps its files."
    )
    reduce_dtype: ReduceDtype = key("fp32", "Element type in which gradients are reduced over the ranks.")
