"""The blocks of the config, each a frozen model: those of DeepSpeed, and `infinity`, which it does not have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from infinity.config import rules
from infinity.config.rules import names_of
from infinity.units import MIB


class Block(BaseModel):
    """One JSON object of the config. The text below a key is its row in docs/config.md.

    `ignored_keys` exist in DeepSpeed and have no effect here; `old_names` are other spellings of a key; `fixed_keys` are
    accepted with one value only: (value, reason); `feature_keys` would change the results if they were on (an `enabled`,
    a size above 1), which is an error, and are ignored otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    old_names: ClassVar[Mapping[str, str]] = {}
    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {}
    feature_keys: ClassVar[frozenset[str]] = frozenset()


class AioConfig(Block):
    """How transfers between the drives and pinned memory are cut and queued."""

    block_size: rules.BlockBytes = MIB
    """Bytes per submission to the kernel; a transfer is cut into such blocks. If absent or auto: from the drive's
    profile (`infinity-bench sweep`), or else the largest request of its block queue. In DeepSpeed: 1 MiB unless set."""
    queue_depth: rules.Positive = 32
    """Submissions in flight per ring. If absent or auto: from the drive's profile, or else 32 MiB of blocks. In
    DeepSpeed: 8 unless set."""
    intra_op_parallelism: rules.Positive = 1
    """I/O threads: another name for `infinity.rings`; the larger of the two is used."""
    ignored_keys = names_of("single_submit overlap_events use_gds")
    old_names = {"thread_count": "intra_op_parallelism", "num_threads": "intra_op_parallelism"}


class OffloadBlock(Block):
    """The keys of both offload blocks."""

    device: rules.Device = "none"
    """Where this rank's part is stored: none is the compute device, cpu host memory, nvme the drives."""
    nvme_path: rules.Paths | None = None
    """Folder on the drive, or a list of folders on several, over which everything is striped by their bandwidth.
    Required when `device` is nvme, unless nothing is written there: all frozen parameters stay in the files that
    `weights` names, and the others in memory. A missing folder is made if its parent exists. In DeepSpeed: One folder
    only."""
    pin_memory: rules.Flag = True
    """Whether host memory of GPU copies is registered with the GPU, so that copies overlap with compute."""


class OffloadParamConfig(OffloadBlock):
    """Where parameters are stored between uses (stage 3)."""

    max_in_cpu: rules.Count = 0
    """Elements of parameters kept in host memory from step to step when `device` is nvme. In DeepSpeed: 1e9 unless set;
    here nothing is cached unless asked for."""

    ignored_keys = names_of("buffer_count buffer_size")


class OffloadOptimizerConfig(OffloadBlock):
    """Where optimizer state is stored between steps (stages 1 to 3; nvme needs stage 3)."""

    ratio: rules.Share = 1.0
    """Share of the optimizer state on NVMe; the bytes of the remaining share stay in host memory, as with
    `infinity.host_cache_bytes`. In DeepSpeed: For device cpu only, where it has no effect here."""

    ignored_keys = names_of(
        """
        buffer_count buffer_size cpuadam_cores_perc fast_init pipeline pipeline_read pipeline_write super_offload
        """
    )


class ZeroConfig(Block):
    """What is sharded over the ranks, where it is stored, and how much of it is live.

    The deprecated switches `cpu_offload` and `cpu_offload_param` are read as `offload_optimizer` and `offload_param`
    with device cpu, and `cpu_offload_use_pin_memory` as their `pin_memory`.
    """

    stage: rules.Stage = 0
    """2 shards gradients and optimizer state, 3 parameters too. 0 and 1 are carried out as 2. In DeepSpeed: 0 shards
    nothing, 1 the optimizer's state alone; the same numbers in more memory."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Where parameters are stored between uses."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Where optimizer state is stored between steps."""
    sub_group_size: rules.AutoPositive = "auto"
    """Elements of this rank's shards that are updated as one piece, at most; fewer if the pinned budget doesn't hold
    three such sub-groups. Their state is one extent. auto derives it from the pinned budget. In DeepSpeed: 1e9 unless
    set."""
    stage3_prefetch_bucket_size: rules.AutoCount = "auto"
    """How far reading and gathering run ahead of use. Reading: this many elements of this rank's shards, and always the
    next group; auto is as far as the pinned budget allows. Gathering: this many elements, in backward at least the next
    group unless it is 0; auto is that group alone. In DeepSpeed: 5e7 unless set, auto is 0.9 · hidden size²: less than
    a group here."""
    stage3_param_persistence_threshold: rules.Count = 100_000
    """Parameters with fewer elements keep their compute parameter (16-bit) in host memory if the others are on NVMe.
    auto is 10 · hidden size. In DeepSpeed: They stay gathered on the device."""
    stage3_model_persistence_threshold: rules.Count = sys.maxsize
    """Upper bound on the elements of all parameters that stay because they are small: the first that fit, in the
    model's order."""
    stage3_max_live_parameters: rules.AutoCount = "auto"
    """Elements that may be gathered at one time on one rank: a bound that always holds. auto is the sum of the root, a
    group, the one gathered ahead of it and those kept by stage3_max_reuse_distance. In DeepSpeed: 1e9 unless set, and
    for prefetching only; here it always holds."""
    stage3_max_reuse_distance: rules.AutoCount = "auto"
    """A group that is used again within this many elements stays gathered in between, if the bound on live parameters
    has room: fewer bytes to read, more memory. auto is 0: only the root stays, from forward to backward. But on one CPU
    rank, all groups of a step of several micro-batches stay if they take, with the gradients, at most a quarter of the
    available memory; frozen parameters exclude this. In DeepSpeed: 1e9 unless set, which keeps most models gathered."""
    stage3_gather_16bit_weights_on_model_save: rules.Flag = False
    """Whether a trainer that saves the model gathers its whole 16-bit weights on rank 0. `Engine.save_16bit_model`
    never needs that."""
    stage3_module_granularity_threshold: rules.Count = 0
    """Modules with at most this many elements per submodule (itself counted) are gathered as one, the outermost such
    modules; 0 is none. Only with `infinity.wrap` auto."""
    reduce_bucket_size: rules.Positive = 500_000_000
    """Accepted, without effect: gradients are reduced group by group, as `infinity.wrap` makes them. auto is hidden
    size². In DeepSpeed: Elements reduced at one time."""
    mics_shard_size: rules.SizeOrAll = -1
    """Ranks that one copy of the model is sharded over; copies are replicated (HSDP). -1 is all ranks. A divisor of
    their number. With NVMe, every copy is on the drives of its own ranks. In DeepSpeed: Needs mics.MiCS_Init around the
    model; here the key is enough."""
    zero_hpz_partition_size: rules.Positive = 1
    """Ranks that parameters are sharded over from forward to backward, in a second copy in device memory; 1 is none. A
    divisor of the number of ranks; not available with NVMe. In DeepSpeed: The same, with NVMe too."""

    ignored_keys = names_of(
        """
        allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint
        enable_sanity_checks fast_init grad_hooks ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
        log_trace_cache_warnings memory_efficient_linear mics_hierarchical_params_gather overlap_comm
        override_module_apply parameter_alignment pipeline_loading_checkpoint reduce_scatter round_robin_gradients
        save_muon_momentum_buffer_in_memory
        stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
        use_multi_rank_bucket_allreduce zenflow zero_quantized_gradients zero_quantized_nontrainable_weights
        zero_quantized_weights zeropp_loco_param
        """
    )
    old_names = {
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    }


class Fp16Config(Block):
    """Training in fp16 with fp32 masters and a loss scale that adapts as DeepSpeed's does.

    A step whose gradient has an inf or NaN on any rank is skipped; the schedule does not advance then.
    """

    enabled: rules.Flag = False
    """Compute in fp16. Excludes `bf16.enabled`."""
    auto_cast: rules.Flag = False
    """Accepted: floating-point inputs are cast to fp16 in any case. In DeepSpeed: Inputs are cast only where it is
    true."""
    loss_scale: rules.Amount = 0.0
    """Factor on the loss; 0 adapts it while training."""
    initial_scale_power: rules.Count = 16
    """The adaptive factor starts at 2 to this power."""
    loss_scale_window: rules.Positive = 1000
    """Steps without overflow after which the factor doubles."""
    hysteresis: rules.Positive = 2
    """The factor is halved at this overflow; those before it only skip their step."""
    consecutive_hysteresis: rules.Flag = False
    """Whether every step without overflow refills `hysteresis`, not only those that double the factor."""
    min_loss_scale: rules.Amount = 1.0
    """The adaptive factor does not fall below this; one more overflow there is an error."""

    ignored_keys = names_of("fp16_master_weights_and_grads fp16_optimizer_states opt_level")


class Bf16Config(Block):
    """Training in bf16 with fp32 masters."""

    enabled: rules.Flag = False
    """Compute in bf16. Excludes `fp16.enabled`."""

    ignored_keys = names_of(
        """
        bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update
        """
    )


class ActivationCheckpointingConfig(Block):
    """What happens to activations that a checkpointed model saves. The model decides which parts are checkpointed."""

    cpu_checkpointing: rules.Flag = False
    """Keep the inputs of checkpointed parts in host memory from forward to backward: as `infinity.offload_activations`
    with device cpu, which moves what other parts save, too."""

    ignored_keys = names_of(
        """
        contiguous_memory_optimization number_checkpoints partition_activations profile
        synchronize_checkpoint_boundary
        """
    )


class TensorParallelConfig(Block):
    """Tensor parallelism: groups of ranks split each matrix and get the same batch; parameters are sharded over the groups.
    [parallelism.md](parallelism.md) says for which models.
    """

    enabled: rules.Flag = True
    """False ignores this block."""
    autotp_size: rules.Count = 0
    """Number of ranks that split a model, by the `tp_plan` that transformers' models have; 0 and 1 split nothing. In
    DeepSpeed: Splits by lists of layer names."""

    ignored_keys = names_of(
        """
        dtype injection_policy_tuple keep_module_on_host partition_config preset_model replace_with_kernel_inject
        tensor_parallel tp_overlap_comm
        """
    )

    @property
    def ranks(self) -> int:
        """Number of ranks that split a model."""
        return max(1, self.autotp_size) if self.enabled else 1


class ExpertParallelConfig(Block):
    """Expert parallelism: each rank has some experts of each block whole, and tokens travel to them.
    [parallelism.md](parallelism.md) says for which models.
    """

    enabled: rules.Flag = False
    """False ignores this block."""
    autoep_size: rules.Positive = 1
    """Number of ranks that share the experts of a block; 1 splits nothing. In DeepSpeed: With stages 0 to 2 only."""

    ignored_keys = names_of(
        """
        expert_pattern grouped_mm_backend moe_layer_pattern preset_model router_pattern use_grouped_mm
        """
    )

    @property
    def ranks(self) -> int:
        """Number of ranks that share the experts of a block."""
        return self.autoep_size if self.enabled else 1


class FlopsProfilerConfig(Block):
    """A report of what the forward of one step computes and how long its parts take, module by module.

    Operations are counted as torch.utils.flop_counter does: matrix products, convolutions and attention.
    """

    enabled: rules.Flag = False
    """Whether to write the report, once, on rank 0. In DeepSpeed: Element-wise operations, norms and the like are
    counted, too."""
    profile_step: rules.Positive = 1
    """Steps before the one that is measured, in its first micro-batch."""
    module_depth: rules.Depth = -1
    """Depth of nested modules down to which they are summed up by class; -1 is the innermost."""
    top_modules: rules.Positive = 1
    """Classes to report at each depth, the largest first."""
    detailed: rules.Flag = True
    """Whether every module is reported, too."""
    output_file: rules.Text | None = None
    """Where the report goes; standard output when absent."""
    recompute_fwd_factor: rules.Amount = 0.0
    """Share of the forward pass that checkpointing computes again; the rate of the backward has it."""


class FileMonitorConfig(Block):
    """What the monitors say that write files."""

    enabled: rules.Flag = False
    """Whether every step is written there, by rank 0."""
    output_path: rules.AnyText = ""
    """Folder of all jobs; where empty, the one that the training is started in."""
    job_name: rules.Text = "DeepSpeedJobName"
    """Folder in it, for this training."""


class TensorboardConfig(FileMonitorConfig):
    """A monitor: files for TensorBoard, by torch.utils.tensorboard. Needs the package tensorboard."""


class CsvMonitorConfig(FileMonitorConfig):
    """A monitor: text files, one for each event, with the columns samples (`step`) and value."""


class WandbConfig(Block):
    """A monitor: a run at Weights & Biases. Needs the package wandb; its environment variables, such as WANDB_MODE, count."""

    enabled: rules.Flag = False
    """Whether every step is logged there, by rank 0."""
    group: rules.AnyText | None = None
    """Group of the run."""
    team: rules.AnyText | None = None
    """Team or user whose run it is; the user's own default when absent."""
    project: rules.Text = "deepspeed"
    """Project of the run."""


class CometConfig(Block):
    """A monitor: an experiment at Comet. Needs the package comet_ml; Comet's own configuration fills absent keys."""

    enabled: rules.Flag = False
    """Whether steps are logged there, by rank 0."""
    samples_log_interval: rules.Positive = 100
    """An event is logged when so many samples have passed since it last was."""
    project: rules.Text | None = None
    """Project of the experiment."""
    workspace: rules.Text | None = None
    """Workspace of the project."""
    api_key: rules.Secret | None = None
    """Key of the user's account; `dump_state` does not show it."""
    experiment_name: rules.Text | None = None
    """Name of the experiment."""
    experiment_key: rules.Text | None = None
    """Key of the experiment: 32 to 50 letters and digits."""
    online: rules.Flag | None = None
    """Whether it is sent to Comet, rather than kept in a file here; sent when absent."""
    mode: rules.ExperimentMode | None = None
    """Whether to go on with the experiment of this key, or to make a new one; absent is either."""


class OffloadActivationsConfig(Block):
    """Where activations that a forward saves are kept until their backward. Large tensors move, parameters never."""

    device: rules.Device = "none"
    """none leaves them on the device; cpu is host memory, nvme the drives with parameters or optimizer state."""
    bytes_min: rules.Bytes = 1 << 20
    """Tensors of fewer bytes stay on the device."""
    host_bytes_max: rules.AutoBytes = "auto"
    """With device cpu: the most host memory they take; the others stay on the device. auto is no bound."""
    buffer_bytes: rules.BudgetBytes = 256 << 20
    """With device nvme: pinned memory for their transfers, counted in `pinned_bytes_max`. A tensor larger than a
    quarter of it stays on the device."""


class InfinityConfig(Block):
    """Settings that DeepSpeed does not have."""

    offload_activations: OffloadActivationsConfig = OffloadActivationsConfig()
    """Where saved activations are kept from forward to backward."""

    pinned_bytes_max: rules.AutoBudgetBytes = "auto"
    """Pinned host memory of this process; every transfer goes through it. auto takes the memory that full speed needs.
    It takes more while the pool and the waiting gradients are within a quarter of this rank's share of the available
    memory (control groups counted): first room for the state of the two largest groups, if updates are in the backward;
    then for compute parameters (2 bytes per element) that stay from step to step and are not read again. A value above
    the first two is used for these compute parameters, too."""
    host_cache_bytes: rules.Bytes = 0
    """Pinned memory that keeps compute parameters (16-bit) and optimizer state from step to step: those that save the
    most transfers; they take no space on the drive. Counted in `pinned_bytes_max`, and no more than they need."""
    gradient_bytes_max: rules.AutoBytes = "auto"
    """Host memory in which the reduced gradients of this process wait for their update; what doesn't fit waits on NVMe, an
    even share of the groups. auto keeps all in host memory if they and `pinned_bytes_max` fit in half of this
    rank's share of the available memory, else what fits there; with `keep_grad`, all. With updates in the backward,
    the gradients of every fourth group wait for the next forward, and with clipping, accumulation or fp16 those of
    all groups; with a bound, reached or not, no group is left to the forward. A gradient takes 4 bytes per
    parameter, or 2 if 16 bits hold all of it: reduced in bf16, or computed in 16 bits and reduced over one process,
    without accumulation."""
    keep_grad: rules.Flag = False
    """Whether `.grad` of parameters on NVMe shows the gradient from the backward until the step, for code that reads or
    clips it. It then takes 4 bytes per parameter of host memory, and nothing is updated in the backward. Otherwise
    `.grad` raises on any use if gradients wait in 16 bits or on NVMe, or groups are updated in the backward."""
    wrap: rules.ClassNames = "auto"
    """Class names of the modules that become groups, one `fully_shard` call each. auto is the repeated blocks, and
    parts of them, or of the other modules, if stage3_max_live_parameters is less than they need."""
    backend: rules.Backend = "auto"
    """How storage is driven; auto takes the drive's profile, or else the first of io_uring, linux_aio and threads that
    the system permits."""
    mix: rules.Mix = "auto"
    """How reads and writes that wait for one drive share it: interleaved, or in bursts of one, then the other; auto
    takes the drive's profile, or else interleaves."""
    rings: rules.Positive = 1
    """Ring threads per drive; each has `aio.queue_depth` submissions in flight."""
    iopoll: rules.Flag = False
    """Whether io_uring polls the drive for completions; its driver needs poll queues."""
    sqpoll: rules.Flag = False
    """Whether a kernel thread polls for io_uring's submissions, which costs a core."""
    lock_memory: rules.Flag = False
    """Whether to lock the pinned memory against swapping (mlock)."""
    checksums: rules.Flag = True
    """Whether a CRC-32C of every 4 KiB written to NVMe is kept in memory and verified at each read, so that training
    stops before it uses bytes that a drive has lost or changed."""
    checkpoint_keep: rules.Count = 0
    """Checkpoints that stay in a folder: a save removes the oldest beyond that; 0 keeps all."""
    checkpoint_format: rules.CheckpointFormat = "dcp"
    """How `save_checkpoint` stores masters and moments: dcp as PyTorch does; arena as they are on NVMe, which only
    copies bytes while training continues."""
    fused: rules.Flag = True
    """Whether the step runs torch's fused AdamW kernel."""
    master_weights: rules.MasterWeights = "split"
    """How an fp32 master weight is stored on NVMe with its bf16 compute parameter: split keeps the 16 bits that this
    lacks, full keeps all 32. The results are the same."""
    moments_dtype: rules.MomentsDtype = "fp32"
    """Element type of Adam's two offloaded moments. fp32 takes 12 bytes of state per parameter. bf16 takes 8 and
    changes the results: moments are rounded stochastically, with random bits that depend only on parameter, element and
    step, so a run can be repeated bit for bit on any number of ranks. 8bit takes 6: each moment is one of 256 values
    times the largest of its block of 256, as in bitsandbytes' 8-bit Adam; blocks are cut from a rank's shard, so the
    results depend on the number of ranks."""
    update: rules.Update = "auto"
    """When the weights of a group are updated: in step, in forward just before the group is gathered, or in backward as
    soon as its gradient is there (a fourth of the groups still in forward, unless `gradient_bytes_max` is set, so that
    neither pass leaves the drive idle). The results are the same. With clipping, accumulation or fp16, the step accepts
    or discards the updates of the backward, which takes memory for gradients and nearly twice the space on NVMe. auto
    is backward. It is forward with `keep_grad`, and if the step would have to accept updates, but the drives have no
    space for the second slot or every group is partly in host memory or has its gradient on NVMe."""
    schedule: rules.Schedule = "auto"
    """Order in which the micro-batches of a step pass through the groups in `Engine.train_batch`: horizontal is one
    micro-batch after the other; vertical is all of them through a group before the next, which reads every group
    twice a step instead of twice a micro-batch, and holds the activations of all of them. The results are the same.
    auto is vertical if the model is on NVMe and its micro-batches can take turns. On one CPU rank a large model
    first takes three horizontal steps and three with two micro-batches at once, and is horizontal from then on if
    vertical would save less than 5 % of the time. With vertical, no loop over `backward` is possible, and
    accumulation needs no memory for gradients that are neither clipped nor scaled."""
    micro_batches_at_once: rules.AutoPositive = "auto"
    """In the vertical schedule: how many micro-batches pass through a group before the next group; a divisor of
    `gradient_accumulation_steps`. With fewer, fewer saved activations are alive, each round reads the groups once
    more, and the sums of all gradients wait for the last round. auto is all; on one rank with schedule auto, as
    many as save no more than is available, and as a step of plain PyTorch takes. The results are the same."""
    micro_batches: rules.Positive = 1
    """Parts into which the engine's forward splits the batch of a whole step, along dimension 0; they run in the
    vertical schedule. For loops and trainers that call the model once a step: `train_micro_batch_size_per_gpu` is that
    batch, and `gradient_accumulation_steps` is 1. The loss is the mean of theirs, weighted by their rows, or the sum if
    the call has `num_items_in_batch`. With transformers' Trainer, auto takes its `gradient_accumulation_steps`."""
    durability: rules.Durability = "none"
    """What stays on the drives when the process ends: nothing (none), or every finished step (step), from which
    `initialize(resume=True)` resumes bit for bit. It takes twice the space there, and all state must be on them."""
    resume_hyperparameters: rules.Whose = "run"
    """Whose learning rate, weight decay, schedule and other optimizer settings count after a resume or the load of a
    checkpoint: the run's, or those of the config at the step that the run has reached. The log names differences."""
    run_name: rules.RunName = "run"
    """NAME of the folder infinity-durable-NAME under each nvme_path, where a durable run keeps its files."""
    reduce_dtype: rules.ReduceDtype = "fp32"
    """Element type in which gradients are reduced over the ranks."""
