"""The top level of the JSON with all its blocks, and the batch sizes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field, PrivateAttr

from infinity.config.blocks import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    Block,
    FlopsProfilerConfig,
    Fp16Config,
    ZeroConfig,
    key,
)
from infinity.config.infinity_block import InfinityConfig
from infinity.config.monitors import CometConfig, CsvMonitorConfig, TensorboardConfig, WandbConfig
from infinity.config.optimizers import OptimizerConfig, SchedulerConfig
from infinity.config.rules import INTERVAL, Amount, Flag, Positive, config_error, names_of
from infinity.errors import ConfigError


class Batch(NamedTuple):
    """A solved batch: `train` = `micro` · `accumulation` · world size, all in samples but `accumulation` (passes)."""

    train: int
    micro: int
    accumulation: int


class TopLevel(Block):
    """All keys of the config: `Config` without the checks that concern several keys."""

    train_batch_size: Positive | None = key(None, "Samples per optimizer step over all ranks.", unit="samples")
    train_micro_batch_size_per_gpu: Positive | None = key(
        None, "Samples per forward and backward pass on one rank.", unit="samples"
    )
    gradient_accumulation_steps: Positive | None = key(
        None, "Micro-batches per optimizer step, each a forward and a backward.", unit="micro-batches"
    )
    gradient_clipping: Amount = key(
        1.0,
        "Largest norm of the whole gradient; 0 does not clip.",
        unit="norm",
        in_deepspeed="0 unless set, before 0.19.8.",
    )
    steps_per_print: Annotated[int, INTERVAL] = key(
        10,
        "Optimizer steps between two progress lines; 0 (or Infinity) prints none.",
        unit="steps",
        in_deepspeed="Prints none unless set, by a logger of its own; here by the logger named infinity, at level INFO.",
    )
    wall_clock_breakdown: Flag = key(
        False,
        "Whether to print the milliseconds of forward, backward and step, of every micro-batch and of every step. Waits "
        "for the device around each.",
        in_deepspeed="Prints the parts of backward too.",
    )
    dump_state: Flag = key(
        False,
        "Whether to print the whole config, as it was understood, at the start.",
        in_deepspeed="Prints the state of its engine.",
    )
    dataloader_drop_last: Flag = key(
        False,
        "Whether the loader that `initialize(training_data=...)` returns leaves out a last batch that is not full.",
    )
    optimizer: Annotated[OptimizerConfig, Field(discriminator="type")] | None = key(
        None,
        "The optimizer; the caller brings one when absent. Without either, a model can be run, not trained.",
    )
    scheduler: Annotated[SchedulerConfig, Field(discriminator="type")] | None = key(
        None, "The learning-rate schedule; constant, or the caller's, when absent."
    )
    zero_optimization: ZeroConfig = key(ZeroConfig(), "What is sharded over the ranks, and where it rests.")
    aio: AioConfig = key(AioConfig(), "How transfers are cut and queued.")
    infinity: InfinityConfig = key(InfinityConfig(), "Settings that DeepSpeed does not have.")
    bf16: Bf16Config = key(Bf16Config(), "Training in bf16.")
    fp16: Fp16Config = key(Fp16Config(), "Training in fp16.")
    activation_checkpointing: ActivationCheckpointingConfig = key(
        ActivationCheckpointingConfig(), "What happens to saved activations."
    )
    flops_profiler: FlopsProfilerConfig = key(FlopsProfilerConfig(), "A count of floating-point operations.")
    tensorboard: TensorboardConfig = key(TensorboardConfig(), "Figures of every step for TensorBoard.")
    csv_monitor: CsvMonitorConfig = key(CsvMonitorConfig(), "Figures of every step as text.")
    wandb: WandbConfig = key(WandbConfig(), "Figures of every step at Weights & Biases.")
    comet: CometConfig = key(CometConfig(), "Figures of steps at Comet.")

    ignored_keys = names_of(
        """
        aot autotuning checkpoint comms_logger compile
        data_parallel_size data_types datastates_ckpt disable_allgather disable_python_gc eigenvalue
        fp32_allreduce gradient_predivide_factor graph_harvesting hybrid_engine inference log_level memory_breakdown
        mesh_param nebula pipeline prescale_gradients seq_parallel_communication_data_type
        sparse_attention sparse_gradients timers use_data_before_expert_parallelism
        use_node_local_storage vocabulary_size weight_quantization zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer
        """
    )
    old_names: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {
        "gradient_allreduce_op": ("mean", "gradients are averaged over the ranks"),
        "managed_gradient_accumulation": (True, "the engine counts the backwards of a step"),
    }

    feature_keys: ClassVar[frozenset[str]] = names_of(
        """
        amp compression_training curriculum_learning data_efficiency elasticity expert_parallel
        progressive_layer_drop quantize_training sequence_parallel_size tensor_parallel torch_autocast
        """
    )
    """Keys that change what is computed once they are on (an `enabled`, a size above 1): refused then, ignored otherwise."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    _auto: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Dotted names of the keys in the source that exist in DeepSpeed and mean nothing here, in source order."""
        return self._ignored

    @property
    def auto(self) -> tuple[str, ...]:
        """Dotted names of the values that the source leaves to `resolve` by writing "auto"; empty once resolved."""
        return self._auto

    @property
    def batch(self) -> Batch:
        """The three batch sizes as plain integers. Raises ConfigError before `resolve` has solved them."""
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps
        if train is None or micro is None or accumulation is None:
            raise ConfigError("config: the batch sizes are not solved yet; call Config.resolve(world_size=...) first")
        return Batch(train, micro, accumulation)

    @property
    def uses_nvme(self) -> bool:
        """Whether parameters or optimizer state rest on drives."""
        zero = self.zero_optimization
        return "nvme" in (zero.offload_param.device, zero.offload_optimizer.device)

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """Folders on the drives where parameters or optimizer state rest; empty where neither does, and where all that rests on
        NVMe is to be in files of the user."""
        zero = self.zero_optimization
        for block in (zero.offload_param, zero.offload_optimizer):
            if block.device == "nvme" and block.nvme_path is not None:
                return (block.nvme_path,) if isinstance(block.nvme_path, str) else block.nvme_path
        return ()

    @property
    def io_rings(self) -> int:
        """Ring threads to start: the larger of `infinity.rings` and `aio.intra_op_parallelism`."""
        return max(self.infinity.rings, self.aio.intra_op_parallelism)


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, *, world_size: int) -> Batch:
    """The three batch sizes from the known ones: `train` = `micro` · `accumulation` · `world_size`.

    Two give the third. With `train` alone one pass is accumulated; otherwise missing sizes are 1.
    Raises ConfigError, showing the product, when they contradict each other.
    """
    derived = [
        name
        for name, value in (("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", accumulation))
        if value is None
    ]
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = max(1, train // (accumulation * world_size))
    elif accumulation is None:
        accumulation = max(1, train // (micro * world_size))
    product = micro * accumulation * world_size
    if product != train:
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        raise config_error(
            "config",
            [
                f"train_batch_size: got {train}, expected {' · '.join(names)} · world size = "
                f"{micro} · {accumulation} · {world_size} = {product}"
                + (f" ({' and '.join(derived)} derived, rounded down)" if derived else "")
            ],
        )
    return Batch(train, micro, accumulation)
