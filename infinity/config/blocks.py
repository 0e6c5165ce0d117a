"""The blocks that the config has in common with DeepSpeed's, each a frozen model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from infinity.config.rules import (
    BLOCK_BYTES,
    SIZE_OR_ALL,
    STAGE,
    Amount,
    AutoCount,
    AutoPositive,
    Count,
    Device,
    Flag,
    Paths,
    Positive,
    Share,
    Text,
    choice,
    integer,
    names_of,
)
from infinity.units import MIB


class Block(BaseModel):
    """One JSON object of the config.

    `ignored_keys` exist in DeepSpeed and have no effect here; `old_names` are other spellings of a key; `fixed_keys` are
    accepted with one value only: (value, reason).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    old_names: ClassVar[Mapping[str, str]] = {}
    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {}


def key(default: Any, description: str, *, unit: str = "", in_deepspeed: str = "") -> Any:
    """A key of a block. For the reference: the `unit` of a number, and what is otherwise `in_deepspeed`.

    `default` is `...` where the key is shared by blocks, which give the default.
    """
    about: JsonDict = {"unit": unit, "in_deepspeed": in_deepspeed}
    return Field(default=default, description=description, json_schema_extra=about)


class AioConfig(Block):
    """How transfers between the drives and pinned memory are cut and queued."""

    block_size: Annotated[int, BLOCK_BYTES] = key(
        MIB,
        "Bytes per submission to the kernel; a transfer is cut into such blocks. Where absent or auto: the drive's "
        "profile (`infinity-bench sweep`), or else what its block queue passes on as one request.",
        unit="bytes",
        in_deepspeed="1 MiB unless set.",
    )
    queue_depth: Positive = key(
        32,
        "Submissions in flight per ring. Where absent or auto: the drive's profile, or else 32 MiB of blocks.",
        unit="submissions",
        in_deepspeed="8 unless set.",
    )
    intra_op_parallelism: Positive = key(
        1, "I/O threads; another name for `infinity.rings`, and the larger of the two is used.", unit="threads"
    )
    ignored_keys = names_of("single_submit overlap_events use_gds")
    old_names = {"thread_count": "intra_op_parallelism", "num_threads": "intra_op_parallelism"}


class OffloadBlock(Block):
    """What both offload blocks say."""

    device: Annotated[Device, choice(Device)] = key(
        "none", "Where this rank's part rests: none is the device that computes, cpu host memory, nvme the drives."
    )
    nvme_path: Paths | None = key(
        None,
        "Folder on the drive, or a list of folders on several, over which everything is striped by their bandwidth; required "
        "when `device` is nvme, unless nothing is to be written there: where all parameters that are not trained rest in the "
        "files that `weights` names, and the others in memory. A folder that doesn't exist is made, if the one "
        "that it is in exists.",
        in_deepspeed="One folder only.",
    )
    pin_memory: Flag = key(
        True,
        "Whether host memory that a GPU copies from and to is registered with it, so that copies run beside what it computes: "
        "FSDP2's own when `device` is cpu, what lies between the drives and the GPU when it is nvme.",
    )


class OffloadParamConfig(OffloadBlock):
    """Where parameters rest between uses (stage 3)."""

    max_in_cpu: Count = key(
        0,
        "Elements of parameters kept in host memory from step to step when `device` is nvme.",
        unit="elements",
        in_deepspeed="1e9 unless set; here nothing is cached unless asked for.",
    )

    ignored_keys = names_of("buffer_count buffer_size")


class OffloadOptimizerConfig(OffloadBlock):
    """Where the optimizer's state rests between steps (stages 1 to 3; nvme needs stage 3)."""

    ratio: Share = key(
        1.0,
        "Share of the optimizer's state that rests on NVMe; as many bytes as the others take stay in host memory, as with "
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
    """What is sharded over the ranks, where it rests, and how much of it is live.

    The deprecated switches `cpu_offload` and `cpu_offload_param` are read as `offload_optimizer` and `offload_param`
    with device cpu, and `cpu_offload_use_pin_memory` as their `pin_memory`.
    """

    stage: Annotated[int, STAGE] = key(
        0,
        "2 shards gradients and optimizer state, 3 parameters too. 0 and 1 are carried out as 2.",
        in_deepspeed="0 shards nothing, 1 the optimizer's state alone; the same numbers in more memory.",
    )
    offload_param: OffloadParamConfig = key(OffloadParamConfig(), "Where parameters rest between uses.")
    offload_optimizer: OffloadOptimizerConfig = key(
        OffloadOptimizerConfig(), "Where the optimizer's state rests between steps."
    )
    sub_group_size: AutoPositive = key(
        "auto",
        "At most this many elements of this rank's shards are stepped together, fewer where the pinned budget doesn't "
        "hold three such sub-groups; their state is one extent. auto derives it from the pinned budget.",
        unit="elements",
        in_deepspeed="1e9 unless set.",
    )
    stage3_prefetch_bucket_size: AutoCount = key(
        "auto",
        "How far reading and gathering run ahead of use. Read: so many elements of this rank's shards, the next group "
        "always; auto is as far as the pinned budget allows. Gathered: so many elements, in backward the next group "
        "unless it is 0; auto is that one alone.",
        unit="elements",
        in_deepspeed="5e7 unless set, auto is 0.9 · hidden size²: less than a group here.",
    )
    stage3_param_persistence_threshold: Count = key(
        100_000,
        "Parameters of fewer elements keep their compute parameter (16-bit) in host memory where the others' are on NVMe. "
        "auto is 10 · hidden size.",
        unit="elements",
        in_deepspeed="They stay gathered on the device.",
    )
    stage3_model_persistence_threshold: Count = key(
        sys.maxsize,
        "An upper bound on the elements of all parameters that stay because they are small: the first in the model's "
        "order that fit.",
        unit="elements",
    )
    stage3_max_live_parameters: AutoCount = key(
        "auto",
        "Elements that may be gathered at one time on one rank: a bound that always holds. auto is what the root, a "
        "group, the one gathered ahead of it and those kept by stage3_max_reuse_distance come to.",
        unit="elements",
        in_deepspeed="1e9 unless set, and for prefetching only; here it always holds.",
    )
    stage3_max_reuse_distance: AutoCount = key(
        "auto",
        "A group that is used again within this many elements stays gathered in between, as long as the bound on live "
        "parameters has room: fewer bytes to read, more memory. auto is 0: none does, beyond the root from forward to "
        "backward.",
        unit="elements",
        in_deepspeed="1e9 unless set, which keeps most models gathered.",
    )
    stage3_gather_16bit_weights_on_model_save: Flag = key(
        False,
        "Whether a trainer that saves the model gathers its 16-bit weights whole on rank 0. `Engine.save_16bit_model` "
        "writes them without that, whatever is set here.",
    )
    stage3_module_granularity_threshold: Count = key(
        0,
        "Modules with at most this many elements per submodule (itself counted) are gathered as one, the outermost such; "
        "0 is none. For `infinity.wrap` auto: class names in it say themselves what is a group.",
        unit="elements",
    )
    reduce_bucket_size: Positive = key(
        500_000_000,
        "Accepted, without effect: gradients are reduced group by group, as `infinity.wrap` makes them. auto is hidden "
        "size².",
        unit="elements",
        in_deepspeed="Elements reduced at one time.",
    )
    mics_shard_size: Annotated[int, SIZE_OR_ALL] = key(
        -1,
        "Ranks that one copy of the model is sharded over, copies being replicated (HSDP); -1 is all ranks. It divides "
        "their number. With NVMe, every copy rests on the drives of its own ranks.",
        unit="ranks",
        in_deepspeed="Needs mics.MiCS_Init around the model; here the key is enough.",
    )
    zero_hpz_partition_size: Positive = key(
        1,
        "Ranks that parameters are sharded over from forward to backward, in a second copy in the memory of the device; 1 "
        "is none. It divides the number of ranks, and is not available with NVMe.",
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
    """Training in fp16 with fp32 masters and a factor on the loss, which moves as DeepSpeed's does.

    A step whose gradient holds an inf or NaN on any rank is skipped; the schedule does not advance then.
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
    """What happens to activations that a checkpointed model saves. Which parts are checkpointed, the model decides."""

    cpu_checkpointing: Flag = key(
        False,
        "Keep what checkpointed parts save, their inputs, in host memory from forward to backward: as "
        "`infinity.offload_activations` with device cpu, which moves what other parts save too.",
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
    profile_step: Positive = key(
        1, "So many steps are taken before the one that is measured, in its first micro-batch.", unit="step"
    )
    module_depth: Annotated[int, integer(-1)] = key(
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
