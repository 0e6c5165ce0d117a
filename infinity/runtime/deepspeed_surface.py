"""What users and trainers ask an engine for that changes no training, most of it under DeepSpeed's names.

No state of its own: an `Engine` is one of these, and sets the attributes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from infinity.activations.saved_tensors import Activations
from infinity.config import Config
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.live import LiveParameters
from infinity.fsdp2.materialize import load_full
from infinity.fsdp2.names import parameter_names, parameters_by_name
from infinity.fsdp2.sharding import local_of, reshard
from infinity.plan.machine import DriveSpeed
from infinity.runtime.checkpoints import Checkpoints
from infinity.runtime.in_memory import Storage
from infinity.runtime.loss_scale import LossScale, Scalar
from infinity.runtime.micro_batches import MicroBatches
from infinity.runtime.monitors import Event, Monitors, events_of_step
from infinity.runtime.observe import EngineStats, StepMeter, StepProgress
from infinity.runtime.pass_guard import PassGuard
from infinity.runtime.resolved import Resolved, compute_device
from infinity.swap import SwapStats, TraceSummary
from infinity.swap.gradient_lap import RefusingGradient
from infinity.swap.timeline import Timeline

E = TypeVar("E", bound="DeepSpeedSurface")


def _settable(part: str, name: str, doc: str) -> Any:
    """An attribute of a part of the engine, which scripts and trainers may set."""
    return property(
        lambda engine: getattr(getattr(engine, part), name),
        lambda engine, value: setattr(getattr(engine, part), name, value),
        doc=doc,
    )


_OF_CONFIG: Mapping[str, Callable[[Config], Any]] = {
    "amp_enabled": lambda config: False,
    "dump_state": lambda config: config.dump_state,
    "dynamic_loss_scale": lambda config: config.fp16.loss_scale == 0,
    "get_batch_info": lambda config: tuple(config.batch),
    "optimizer_name": lambda config: config.optimizer and config.optimizer.type.lower(),
    "scheduler_name": lambda config: config.scheduler and config.scheduler.type,
    "steps_per_print": lambda config: config.steps_per_print or None,
    "wall_clock_breakdown": lambda config: config.wall_clock_breakdown,
    "zero_optimization": lambda config: config.zero_optimization.stage > 0,
}
"""What DeepSpeed has a method for, without arguments, and the config says."""


class DeepSpeedSurface:
    """Of an `Engine`, which sets these attributes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    config: Config
    _resolved: Resolved
    _storage: Storage
    _progress: StepProgress
    _micro_batches: MicroBatches
    _guard: PassGuard
    _loss_scale: LossScale
    _checkpoints: Checkpoints
    _meter: StepMeter
    _grad_norm: Scalar | None
    _applied: bool
    live: LiveParameters | None
    activations: Activations | None
    monitor: Monitors
    """What every step is written to, as the config says; `monitor.write_events([("name", value, engine.global_samples)])`
    writes events of your own there."""

    # The module.

    def __getattr__(self, name: str) -> Any:
        """What the engine doesn't have, the model may: `engine.parameters()` (the sharded fp32 masters), `engine.training`,
        `engine.state_dict()` (the masters, read from NVMe when they are used), `engine.generate(...)`."""
        if "module" not in self.__dict__:  # not made yet
            raise AttributeError(name)
        if name in _OF_CONFIG:
            return lambda: _OF_CONFIG[name](self.config)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            model = type(self.module).__name__.removeprefix("FSDP")  # fully_shard renames the class
            raise AttributeError(
                f"infinity's engine has no attribute {name!r}, nor has the model {model} that it trains",
                name=name,
                obj=self,
            ) from error

    def train(self: E, mode: bool = True) -> E:
        """Training mode."""
        self.module.train(mode)
        return self

    def eval(self: E) -> E:
        """Evaluation mode."""
        return self.train(False)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's `state_dict`: sharded fp32 masters, read from NVMe when they are used."""
        frozen = {name for p, names in parameter_names(self.module).items() if not p.requires_grad for name in names}
        left_out = frozen if exclude_frozen_parameters else ()
        return {name: value for name, value in self.module.state_dict().items() if name not in left_out}

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Set the model's values from a state dict, or one under "module" as DeepSpeed saves it: sharded as `module_state_dict`
        has them, or whole, the same on all ranks. The optimizer's state stays. `fetch_z3_params` is accepted.

        Raises ConfigError, before anything is set, for names that are missing or too many, unless `strict` is False.
        """
        values = checkpoint.get("module", checkpoint)
        with self._guard.entered():
            reshard(self.module)
            if custom_load_fn is not None:
                custom_load_fn(src=values, dst=self.module)
                return
            if strict and (differing := sorted(self.module.state_dict().keys() ^ values.keys())):
                raise ConfigError(f"the state dict doesn't fit the model: {', '.join(differing[:5])} differ")
            sharded, parameters = {}, parameters_by_name(self.module)
            for name, value in values.items():
                if name in parameters and not isinstance(value, DTensor):
                    load_full(parameters[name], value)
                else:
                    sharded[name] = value
            self.module.load_state_dict(sharded, strict=False)

    def empty_partition_cache(self) -> None:
        """Release what is gathered."""
        with self._guard.entered():
            reshard(self.module)

    # The config.

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.config.batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank."""
        return self.config.batch.micro

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.config.batch.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Samples per step over all ranks from the next step on, by other `gradient_accumulation_steps`.

        Raises ConfigError where these can't give it, or where gradients are applied in the backward (`infinity.update`), which
        more than one micro-batch forbids; InfinityError in the middle of a step.
        """
        self._set_batch(train_batch_size=train_batch_size, gradient_accumulation_steps=None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Samples per micro-batch and rank from now on, with as many micro-batches per step; the data is yours to cut."""
        self._set_batch(train_micro_batch_size_per_gpu=micro_batch_size, train_batch_size=None)

    def _set_batch(self, **sizes: int | None) -> None:
        if self._progress.is_in_step:
            raise InfinityError(
                "the batch sizes of a step that has begun can't change: call step() or zero_grad() first"
            )
        config = self.config.model_copy(update=sizes).resolve(world_size=self.world_size)
        self._check_accumulates(config.batch.accumulation > 1)
        self.config, self._resolved = config, replace(self._resolved, config=config)
        self._micro_batches.resolved = self._resolved
        self._progress.accumulate(config.batch.accumulation)

    def _check_accumulates(self, accumulates: bool) -> None:
        paging = self._resolved.paging
        if accumulates and paging is not None and not paging.all_gradients_wait:
            raise ConfigError(
                'gradients that are accumulated can\'t be applied in the backward: set infinity.update to "forward", or '
                "gradient_accumulation_steps"
            )

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader as `initialize(training_data=...)` makes it; in the dataset's order where `route` isn't "train"."""
        return make_loader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            shuffled=route == "train",
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=self.config.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
        )

    def zero_optimization_stage(self) -> int:
        """The config's, 0 to 3."""
        return self.config.zero_optimization.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a trainer that saves the model may gather it whole on rank 0: the config's
        `stage3_gather_16bit_weights_on_model_save`."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        """Whether compute is in fp16."""
        return self._resolved.compute_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether compute is in bf16."""
        return self._resolved.compute_dtype is torch.bfloat16

    def gradient_clipping(self) -> float:
        """Largest norm of the whole gradient; 0 does not clip."""
        return self.config.gradient_clipping

    # The ranks.

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where batches belong."""
        return compute_device()

    @property
    def local_rank(self) -> int:
        """This rank among those of its machine, as torchrun numbers them."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    # How far the training is.

    lr_scheduler = _settable("_state", "lr_scheduler", "The schedule that `step` steps, or None.")
    global_steps = _settable("_progress", "global_steps", "Optimizer steps so far, skipped ones included.")
    micro_steps = _settable("_progress", "micro_steps", "Backward passes so far.")
    skipped_steps = _settable(
        "_progress", "skipped_steps", "Steps in which nothing was updated, as an fp16 gradient overflowed."
    )

    @property
    def global_samples(self) -> int:
        """Samples of all steps so far, over all ranks."""
        return int(self.global_steps * self.train_batch_size())

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether `step` will step: the last micro-batch of a step has had its backward pass."""
        return self._progress.ends_a_step(self._progress.micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so yourself, until the next step.

        Raises ConfigError for False where gradients are applied in the backward (`infinity.update`).
        """
        self._check_accumulates(not is_boundary)
        self._progress.boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block end no step. Their gradients are reduced all the same, as each rank holds only its
        shards of them. Raises ConfigError as `set_gradient_accumulation_boundary(False)`."""
        self.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._progress.boundary = None

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Accepted, without effect: the backward reduces them."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Refused with InfinityError: it is for a `loss.backward()` of one's own, which the engine would not see."""
        raise InfinityError(
            "scale() is for a loss.backward() of your own: call engine.backward(loss), which scales the loss"
        )

    @property
    def cur_scale(self) -> float:
        """The factor on the loss in the coming backward passes; 1 without fp16."""
        return self._loss_scale.scale

    loss_scale = cur_scale

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of each parameter group, until a schedule sets another."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Betas, or momentum, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def swap_stats(self) -> SwapStats | None:
        """Counters of the swap manager since the start; None if nothing is offloaded."""
        return self._storage.stats()

    @property
    def gradient_bytes(self) -> int:
        """Memory of this rank, in bytes, that holds reduced gradients now: in `.grad`, or where they wait for their update."""
        shown = (p.grad for group in self.optimizer.param_groups for p in group["params"])
        local = (local_of(grad) for grad in shown if grad is not None)
        in_grad = sum(grad.nbytes for grad in local if not isinstance(grad, RefusingGradient))
        return self._storage.paging.waiting_gradients.held_bytes + in_grad

    # What a step took.

    def was_step_applied(self) -> bool:
        """Whether the last step changed weights: False before the first, and after one that fp16 skipped."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the whole gradient at the last step, before clipping (inf or NaN: it was skipped); None before the first."""
        if isinstance(self._grad_norm, torch.Tensor):
            self._grad_norm = float(self._grad_norm)
        return self._grad_norm

    def restart_clock(self) -> None:
        """The next step's seconds and bytes count from now; call it after an evaluation that shouldn't count."""
        self._meter.restart()

    def _events(self, stats: EngineStats) -> list[Event]:
        """What monitors are told of the last step. Waits for the device, as they want numbers."""
        return events_of_step(
            self.global_samples,
            losses=self._progress.step_losses,
            lr=self.get_lr()[0],
            loss_scale=self.cur_scale if self._loss_scale.may_overflow else None,
            grad_norm=self.get_global_grad_norm(),
            stats=stats,
            moves=self._resolved.paging is not None,
        )

    @property
    def timeline(self) -> Timeline | None:
        """Where a trace is noted; None while none runs."""
        return self._storage.timeline

    def start_trace(self) -> None:
        """Note from now on what this rank's training thread and drives do when, until `stop_trace`: see docs/timeline.md.

        Waits until the drives rest. Raises InfinityError when a trace runs already, or if nothing is offloaded.
        """
        self._storage.start_trace()

    def stop_trace(self, path: str | os.PathLike[str] | None = None) -> TraceSummary:
        """End the trace, once the drives rest, and return its figures.

        `path`: gets the events of this rank as JSON, for ui.perfetto.dev or chrome://tracing. Raises InfinityError when no
        trace runs, OSError when the file can't be written.
        """
        return self._storage.stop_trace(path)

    def step_lower_bound_seconds(
        self, *, compute_seconds: float, read_bytes_per_s: float, write_bytes_per_s: float
    ) -> float:
        """The least a step could take on this rank (seconds), moving what it moves: see infinity/plan/lower_bound.py.

        Once a step was taken, that is without what stays in host memory from step to step, or from forward to backward, and
        with what saved activations moved in the last one.
        """
        gathers = self.live.gathers if self.live is not None else None
        read, written = self._storage.step_bytes(micro_batches=self.config.passes, gathers=gathers)
        saved_read, saved_written = self.activations.step_bytes if self.activations is not None else (0, 0)
        drives = DriveSpeed(read_bytes_per_s, write_bytes_per_s)
        return max(compute_seconds, drives.lower_bound_seconds(read + saved_read, written + saved_written))

    # The weights alone.

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor on the device) of each parameter, then of each buffer that is saved, as the loaders of inference
        engines take them; in the dtype of compute where `dtype` is None. The names are those of `save_16bit_model`.

        One group is in memory at a time. A collective: every rank takes all of them, and no step comes in between.
        """
        return self._checkpoints.named_weights(dtype or self._resolved.compute_dtype)

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str | None = None) -> bool:
        """Write the model in the dtype of compute as safetensors. A collective; rank 0 holds a tensor at a time.

        `save_filename` is accepted: the files have the names that readers of safetensors look for.
        """
        self._checkpoints.save_16bit(save_dir)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole model in the dtype of compute, in host memory of rank 0; None elsewhere. A collective."""
        return self._checkpoints.consolidated_16bit(exclude_frozen=exclude_frozen_parameters)


def make_loader(
    data: Any,
    batch_size: int,
    *,
    shuffled: bool = True,
    sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """A loader of each rank's share of a dataset, in the order that DeepSpeed draws if it is `shuffled`."""
    if sampler is None and hasattr(data, "__getitem__"):
        sampler = DistributedSampler(data, shuffle=shuffled)
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
    )
