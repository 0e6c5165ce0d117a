"""The blocks that the config has in common with DeepSpeed's, each a frozen model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from infinity.config.rules import (
    Amount,
    AnyText,
    AutoCount,
    AutoPositive,
    BlockBytes,
    Count,
    Depth,
    Device,
    ExperimentMode,
    Flag,
    Paths,
    Positive,
    Secret,
    Share,
    SizeOrAll,
    Stage,
    Text,
    names_of,
)
from infinity.units import MIB


class Block(BaseModel):
    """One JSON object of the config.

    `ignored_keys` exist in DeepSpeed and have no effect here; `old_names` are other spellings of a key; `fixed_keys` are
    accepted with one value only: (value, reason); `feature_keys` would change the results if they were on (an `enabled`,
    a size above 1), which is an error, and are ignored otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    old_names: ClassVar[Mapping[str, str]] = {}
    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {}
    feature_keys: ClassVar[frozenset[str]] = frozenset()


def key(default: Any, description: str, *, unit: str = "", in_deepspeed: str = "") -> Any:
    about: JsonDict = {"unit": unit, "in_deepspeed": in_deepspeed}
    return Field(default=default, description=description, json_schema_extra=about)


class AioConfig(Block):
    """How transfers between the drives and pinned memory are cut and queued."""

    block_size: BlockBytes = key(
        MIB,
        "Bytes per submission to the kernel; a transfer is cut into such blocks. If absent or auto: from the drive's "
        "profile (`infinity-bench sweep`), or else the largest request of its block queue.",
        unit="bytes",
        in_deepspeed="1 MiB unless set.",
    )
    queue_depth: Positive = key(
        32,
        "Submissions in flight per ring. If absent or auto: from the drive's profile, or else 32 MiB of blocks.",
        unit="submissions",
        in_deepspeed="8 unless set.",
    )
    intra_op_parallelism: Positive = key(
        1, "I/O threads: another name for `infinity.rings`; the larger of the two is used.", unit="threads"
    )
    ignored_keys = names_of("single_submit overlap_events use_gds")
    old_names = {"thread_count": "intra_op_parallelism", "num_threads": "intra_op_parallelism"}


class OffloadBlock(Block):
    """The keys of both offload blocks."""

    device: Device = key(
        "none", "Where this rank's part is stored: none is the compute device, cpu host memory, nvme the drives."
    )
    nvme_path: Paths | None = key(
        None,
        "Folder on the drive, or a list of folders on several, over which everything is striped by their bandwidth. "
        "Required when `device` is nvme, unless nothing is written there: all frozen parameters stay in the files that "
        "`weights` names, and the others in memory. A missing folder is made if its parent exists.",
        in_deepspeed="One folder only.",
    )
    pin_memory: Flag = key(
        True,
        "Whether host memory of GPU copies is registered with the GPU, so that copies overlap with compute.",
    )


class OffloadParamConfig(OffloadBlock):
    """Where parameters are stored between uses (stage 3)."""

    max_in_cpu: Count = key(
        0,
        "Elements of parameters kept in host memory from step to step when `device` is nvme.",
        unit="elements",
        in_deepspeed="1e9 unless set; here nothing is cached unless asked for.",
    )

    ignored_keys = names_of("buffer_count buffer_size")


class OffloadOptimizerConfig(OffloadBlock):
    """Where optimizer state is stored between steps (stages 1 to 3; nvme needs stage 3)."""

    ratio: Share = key(
        1.0,
        "Share of the optimizer state on NVMe; the bytes of the remaining share stay in host memory, as with "
        "`infinity.host_cache_bytes`.",
        unit="share",
        in_deepspeed="For device cpu only, where it has no effect here.",
    )

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

    stage: Stage = key(
        0,
        "2 shards gradients and optimizer state, 3 parameters too. 0 and 1 are carried out as 2.",
        in_deepspeed="0 shards nothing, 1 the optimizer's state alone; the same numbers in more memory.",
    )
    offload_param: OffloadParamConfig = key(OffloadParamConfig(), "Where parameters are stored between uses.")
    offload_optimizer: OffloadOptimizerConfig = key(
        OffloadOptimizerConfig(), "Where optimizer state is stored between steps."
    )
    sub_group_size: AutoPositive = key(
        "auto",
        "Elements of this rank's shards that are updated as one piece, at most; fewer if the pinned budget doesn't hold "
        "three such sub-groups. Their state is one extent. auto derives it from the pinned budget.",
        unit="elements",
        in_deepspeed="1e9 unless set.",
    )
    stage3_prefetch_bucket_size: AutoCount = key(
        "auto",
        "How far reading and gathering run ahead of use. Reading: this many elements of this rank's shards, and always the "
        "next group; auto is as far as the pinned budget allows. Gathering: this many elements, in backward at least the "
        "next group unless it is 0; auto is that group alone.",
        unit="elements",
        in_deepspeed="5e7 unless set, auto is 0.9 · hidden size²: less than a group here.",
    )
    stage3_param_persistence_threshold: Count = key(
        100_000,
        "Parameters with fewer elements keep their compute parameter (16-bit) in host memory if the others are on NVMe. "
        "auto is 10 · hidden size.",
        unit="elements",
        in_deepspeed="They stay gathered on the device.",
    )
    stage3_model_persistence_threshold: Count = key(
        sys.maxsize,
        "Upper bound on the elements of all parameters that stay because they are small: the first that fit, in the "
        "model's order.",
        unit="elements",
    )
    stage3_max_live_parameters: AutoCount = key(
        "auto",
        "Elements that may be gathered at one time on one rank: a bound that always holds. auto is the sum of the root, a "
        "group, the one gathered ahead of it and those kept by stage3_max_reuse_distance.",
        unit="elements",
        in_deepspeed="1e9 unless set, and for prefetching only; here it always holds.",
    )
    stage3_max_reuse_distance: AutoCount = key(
        "auto",
        "A group that is used again within this many elements stays gathered in between, if the bound on live parameters "
        "has room: fewer bytes to read, more memory. auto is 0: only the root stays, from forward to backward.",
        unit="elements",
        in_deepspeed="1e9 unless set, which keeps most models gathered.",
    )
    stage3_gather_16bit_weights_on_model_save: Flag = key(
        False,
        "Whether a trainer that saves the model gathers its whole 16-bit weights on rank 0. `Engine.save_16bit_model` "
        "never needs that.",
    )
    stage3_module_granularity_threshold: Count = key(
        0,
        "Modules with at most this many elements per submodule (itself counted) are gathered as one, the outermost such "
        "modules; 0 is none. Only with `infinity.wrap` auto.",
        unit="elements",
    )
    reduce_bucket_size: Positive = key(
        500_000_000,
        "Accepted, without effect: gradients are reduced group by group, as `infinity.wrap` makes them. auto is hidden "
        "size².",
        unit="elements",
        in_deepspeed="Elements reduced at one time.",
    )
    mics_shard_size: SizeOrAll = key(
        -1,
        "Ranks that one copy of the model is sharded over; copies are replicated (HSDP). -1 is all ranks. A divisor of "
        "their number. With NVMe, every copy is on the drives of its own ranks.",
        unit="ranks",
        in_deepspeed="Needs mics.MiCS_Init around the model; here the key is enough.",
    )
    zero_hpz_partition_size: Positive = key(
        1,
        "Ranks that parameters are sharded over from forward to backward, in a second copy in device memory; 1 is none. A "
        "divisor of the number of ranks; not available with NVMe.",
        unit="ranks",
        in_deepspeed="The same, with NVMe too.",
    )

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

    enabled: Flag = key(False, "Compute in fp16. Excludes `bf16.enabled`.")
    auto_cast: Flag = key(
        False,
        "Accepted: floating-point inputs are cast to fp16 in any case.",
        in_deepspeed="Inputs are cast only where it is true.",
    )
    loss_scale: Amount = key(0.0, "Factor on the loss; 0 adapts it while training.", unit="factor")
    initial_scale_power: Count = key(16, "The adaptive factor starts at 2 to this power.", unit="power of 2")
    loss_scale_window: Positive = key(1000, "Steps without overflow after which the factor doubles.", unit="steps")
    hysteresis: Positive = key(
        2, "The factor is halved at this overflow; those before it only skip their step.", unit="overflows"
    )
    consecutive_hysteresis: Flag = key(
        False, "Whether every step without overflow refills `hysteresis`, not only those that double the factor."
    )
    min_loss_scale: Amount = key(
        1.0, "The adaptive factor does not fall below this; one more overflow there is an error.", unit="factor"
    )

    ignored_keys = names_of("fp16_master_weights_and_grads fp16_optimizer_states opt_level")


class Bf16Config(Block):
    """Training in bf16 with fp32 masters."""

    enabled: Flag = key(False, "Compute in bf16. Excludes `fp16.enabled`.")

    ignored_keys = names_of(
        """
        bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update
        """
    )


class ActivationCheckpointingConfig(Block):
    """What happens to activations that a checkpointed model saves. The model decides which parts are checkpointed."""

    cpu_checkpointing: Flag = key(
        False,
        "Keep the inputs of checkpointed parts in host memory from forward to backward: as `infinity.offload_activations` "
        "with device cpu, which moves what other parts save, too.",
    )

    ignored_keys = names_of(
        """
        contiguous_memory_optimization number_checkpoints partition_activations profile
        synchronize_checkpoint_boundary
        """
    )


class FlopsProfilerConfig(Block):
    """A report of what the forward of one step computes and how long its parts take, module by module.

    Operations are counted as torch.utils.flop_counter does: matrix products, convolutions and attention.
    """

    enabled: Flag = key(
        False,
        "Whether to write the report, once, on rank 0.",
        in_deepspeed="Element-wise operations, norms and the like are counted, too.",
    )
    profile_step: Positive = key(1, "Steps before the one that is measured, in its first micro-batch.", unit="step")
    module_depth: Depth = key(
        -1, "Depth of nested modules down to which they are summed up by class; -1 is the innermost."
    )
    top_modules: Positive = key(1, "Classes to report at each depth, the largest first.")
    detailed: Flag = key(True, "Whether every module is reported, too.")
    output_file: Text | None = key(None, "Where the report goes; standard output when absent.")
    recompute_fwd_factor: Amount = key(
        0.0,
        "Share of the forward pass that checkpointing computes again; the rate of the backward has it.",
        unit="share",
    )


class FileMonitorConfig(Block):
    """What the monitors say that write files."""

    enabled: Flag = key(False, "Whether every step is written there, by rank 0.")
    output_path: AnyText = key("", "Folder of all jobs; where empty, the one that the training is started in.")
    job_name: Text = key("DeepSpeedJobName", "Folder in it, for this training.")


class TensorboardConfig(FileMonitorConfig):
    """A monitor: files for TensorBoard, by torch.utils.tensorboard. Needs the package tensorboard."""


class CsvMonitorConfig(FileMonitorConfig):
    """A monitor: text files, one for each event, with the columns samples (`step`) and value."""


class WandbConfig(Block):
    """A monitor: a run at Weights & Biases. Needs the package wandb; its environment variables, such as WANDB_MODE, count."""

    enabled: Flag = key(False, "Whether every step is logged there, by rank 0.")
    group: AnyText | None = key(None, "Group of the run.")
    team: AnyText | None = key(None, "Team or user whose run it is; the user's own default when absent.")
    project: Text = key("deepspeed", "Project of the run.")


class CometConfig(Block):
    """A monitor: an experiment at Comet. Needs the package comet_ml; what is absent is left to Comet's own configuration."""

    enabled: Flag = key(False, "Whether steps are logged there, by rank 0.")
    samples_log_interval: Positive = key(
        100, "An event is logged when so many samples have passed since it last was.", unit="samples"
    )
    project: Text | None = key(None, "Project of the experiment.")
    workspace: Text | None = key(None, "Workspace of the project.")
    api_key: Secret | None = key(None, "Key of the user's account; `dump_state` does not show it.")
    experiment_name: Text | None = key(None, "Name of the experiment.")
    experiment_key: Text | None = key(None, "Key of the experiment: 32 to 50 letters and digits.")
    online: Flag | None = key(None, "Whether it is sent to Comet, rather than kept in a file here; sent when absent.")
    mode: ExperimentMode | None = key(
        None, "Whether to go on with the experiment of this key, or to make a new one; absent is either."
    )
