"""Methods of an engine that do not train, mostly under DeepSpeed's names. `Engine` inherits them and sets the attributes."""

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
from infinity.fsdp2.materialize import fits, load_full
from infinity.fsdp2.names import parameter_names, parameters_by_name
from infinity.fsdp2.sharding import local_of, reshard
from infinity.plan.machine import DriveSpeed
from infinity.runtime.checkpoints import Checkpoints
from infinity.runtime.in_memory import InMemory
from infinity.runtime.loss_scale import LossScale, Scalar
from infinity.runtime.monitors import Event, Monitors, events_of_step
from infinity.runtime.observe import EngineStats, StepMeter, StepProgress
from infinity.runtime.parts import Parts
from infinity.runtime.pass_guard import PassGuard
from infinity.runtime.resolved import compute_device
from infinity.runtime.stages import check_micro_batches
from infinity.swap import SwapManager, SwapStats, TraceSummary
from infinity.swap.gradient_lap import RefusingGradient
from infinity.swap.timeline import Timeline

E = TypeVar("E", bound="DeepSpeedSurface")


def _settable(part: str, name: str, doc: str) -> Any:
    """Return a property for an attribute of a part of the engine, which scripts and trainers may set."""
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
    "zero_gather_16bit_weights_on_model_save": lambda config: (
        config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    ),
    "zero_optimization": lambda config: config.zero_optimization.stage > 0,
    "zero_optimization_stage": lambda config: config.zero_optimization.stage,
}
"""Methods of DeepSpeed without arguments whose results are in the config."""


class DeepSpeedSurface:
    """Base class of `Engine`, which sets these attributes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    config: Config
    _parts: Parts
    _storage: SwapManager | InMemory
    _progress: StepProgress
    _guard: PassGuard
    _loss_scale: LossScale
    _checkpoints: Checkpoints
    _meter: StepMeter
    _grad_norm: Scalar | None
    _applied: bool
    swap: SwapManager | None
    live: LiveParameters | None
    activations: Activations | None
    monitor: Monitors
    """Writes the events of every step as configured; `monitor.write_events([("name", value, engine.global_samples)])` writes
    your own."""

    # The module.

    def __getattr__(self, name: str) -> Any:
        """Look up other names in the model: `engine.parameters()` (the sharded fp32 masters), `engine.training`,
        `engine.state_dict()` (the masters, read from NVMe on use), `engine.generate(...)`."""
        if "module" not in self.__dict__:  # not made yet
            raise AttributeError(name)
        if name in _OF_CONFIG:
            return lambda: _OF_CONFIG[name](self.config)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            model = type(self.module).__name__
            raise AttributeError(
                f"infinity's engine has no attribute {name!r}, nor has the model {model} that it trains",
                name=name,
                obj=self,
            ) from error

    def train(self: E, mode: bool = True) -> E:
        """Set training mode."""
        self.module.train(mode)
        return self

    def eval(self: E) -> E:
        """Set evaluation mode."""
        return self.train(False)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's `state_dict`: sharded fp32 masters, read from NVMe on use."""
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
        """Set the model's values from a state dict, or from one under "module" as in DeepSpeed's files. Tensors are sharded as
        in `module_state_dict`, or whole and equal on all ranks. Optimizer state stays. `fetch_z3_params` is accepted.

        Raises ConfigError, before anything is set, for a tensor of another shape, and for missing and unknown names, unless
        `strict` is False.
        """
        values = checkpoint.get("module", checkpoint)
        with self._guard.entered():
            reshard(self.module)
            if custom_load_fn is not None:
                custom_load_fn(src=values, dst=self.module)
                return
            here = self.module.state_dict()
            if strict and (differing := sorted(here.keys() ^ values.keys())):
                raise ConfigError(f"the state dict doesn't fit the model: {', '.join(differing[:5])} differ")
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and name in here and not fits(here[name], value):
                    raise ConfigError(
                        f"the state dict doesn't fit the model: {name} has shape {tuple(value.shape)}, and the model's has "
                        f"{tuple(here[name].shape)}"
                    )
            sharded, parameters = {}, parameters_by_name(self.module)
            for name, value in values.items():
                if name in parameters and not isinstance(value, DTensor):
                    load_full(parameters[name], value)
                else:
                    sharded[name] = value
            self.module.load_state_dict(sharded, strict=False)

    def empty_partition_cache(self) -> None:
        """Free all gathered groups."""
        with self._guard.entered():
            reshard(self.module)

    # The config.

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per step."""
        return self.config.batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per micro-batch and rank."""
        return self.config.batch.micro

    def train_batch_size(self) -> int:
        """Return the samples per step over all ranks."""
        return self.config.batch.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per step over all ranks from the next step on, by changing `gradient_accumulation_steps`.

        Raises ConfigError if no number of micro-batches gives it, or for several micro-batches if the backward applies
        gradients (`infinity.update`); InfinityError in the middle of a step.
        """
        self._set_batch(train_batch_size=train_batch_size, gradient_accumulation_steps=None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per micro-batch and rank, with the same micro-batches per step; you cut the data accordingly."""
        self._set_batch(train_micro_batch_size_per_gpu=micro_batch_size, train_batch_size=None)

    def _set_batch(self, **sizes: int | None) -> None:
        if self._progress.is_in_step:
            raise InfinityError(
                "the batch sizes of a step that has begun can't change: call step() or zero_grad() first"
            )
        resolved = self._parts.resolved
        shares = self.world_size // (resolved.stages * resolved.tensor_ranks)
        config = self.config.model_copy(update=sizes).resolve(world_size=shares * self.config.tensor_parallel.ranks)
        check_micro_batches(config, resolved.stages)
        self._check_accumulates(config.batch.accumulation > 1)
        self.config, self._parts.resolved = config, replace(self._parts.resolved, config=config)
        self._progress.accumulate(config.batch.accumulation)

    def _check_accumulates(self, accumulates: bool) -> None:
        paging = self._parts.resolved.paging
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
        """Return a loader of this rank's share of a dataset, as `initialize(training_data=...)` does: in DeepSpeed's random
        order if `route` is "train", else in the dataset's."""
        if data_sampler is None and hasattr(dataset, "__getitem__"):
            same = self._parts.resolved.tensor_ranks  # neighbours that get the same share
            ranks = self.world_size // self._parts.resolved.stages  # each stage gets all shares
            shares, share = ranks // same, dist.get_rank() % ranks // same
            data_sampler = DistributedSampler(dataset, shares, share, shuffle=route == "train")
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=self.config.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
        )

    def fp16_enabled(self) -> bool:
        """Return True if compute is in fp16."""
        return self._parts.resolved.compute_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return True if compute is in bf16."""
        return self._parts.resolved.compute_dtype is torch.bfloat16

    def gradient_clipping(self) -> float:
        """Return the largest norm of the whole gradient; 0 does not clip."""
        return self.config.gradient_clipping

    # The ranks.

    @property
    def device(self) -> torch.device:
        """Device of the model and of its batches."""
        return compute_device()

    @property
    def local_rank(self) -> int:
        """Number of this rank on its machine, from torchrun."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """Number of this rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    # How far the training is.

    lr_scheduler = _settable("_parts", "lr_scheduler", "The schedule that `step` steps, or None.")
    global_steps = _settable("_progress", "global_steps", "Optimizer steps so far, including skipped ones.")
    micro_steps = _settable("_progress", "micro_steps", "Backward passes so far.")
    skipped_steps = _settable(
        "_progress", "skipped_steps", "Steps that updated nothing, because an fp16 gradient overflowed."
    )

    @property
    def global_samples(self) -> int:
        """Samples of all steps so far, over all ranks."""
        return int(self.global_steps * self.train_batch_size())

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if `step` will step: the last micro-batch of a step has had its backward pass."""
        return self._progress.ends_a_step(self._progress.micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Override `is_gradient_accumulation_boundary` until the next step. Raises ConfigError for False if the backward
        applies gradients (`infinity.update`)."""
        self._check_accumulates(not is_boundary)
        self._progress.boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let no backward pass in the block end a step. Gradients are still reduced, because each rank holds only its shards.
        Raises ConfigError as `set_gradient_accumulation_boundary(False)`."""
        self.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._progress.boundary = None

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: the backward reduces gradients."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Raise InfinityError: it is for your own `loss.backward()`, which the engine would not see."""
        raise InfinityError(
            "scale() is for a loss.backward() of your own: call engine.backward(loss), which scales the loss"
        )

    @property
    def cur_scale(self) -> float:
        """Factor on the loss in the next backward pass; 1 without fp16."""
        return self._loss_scale.scale

    loss_scale = cur_scale

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of each parameter group, until a schedule sets another."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the betas, or momentum, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def swap_stats(self) -> SwapStats | None:
        """Return the swap manager's counters since the start; None if nothing is offloaded."""
        return self._storage.stats()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's memory with reduced gradients: in `.grad`, or waiting for their update."""
        shown = (p.grad for group in self.optimizer.param_groups for p in group["params"])
        local = (local_of(grad) for grad in shown if grad is not None)
        in_grad = sum(grad.nbytes for grad in local if not isinstance(grad, RefusingGradient))
        waiting = self.swap.paging.waiting_gradients.held_bytes if self.swap is not None else 0
        return waiting + in_grad

    # What a step took.

    def was_step_applied(self) -> bool:
        """Return True if the last step changed weights: False before the first, and after one that fp16 skipped."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping (inf or NaN if it was skipped); None before the first."""
        if isinstance(self._grad_norm, torch.Tensor):
            self._grad_norm = float(self._grad_norm)
        return self._grad_norm

    def restart_clock(self) -> None:
        """Count the next step's seconds and bytes from now, as after an evaluation."""
        self._meter.restart()

    def _events(self, stats: EngineStats) -> list[Event]:
        """Return the last step's events for monitors. Waits for the device."""
        return events_of_step(
            self.global_samples,
            losses=self._progress.step_losses,
            lr=self.get_lr()[0],
            loss_scale=self.cur_scale if self._loss_scale.may_overflow else None,
            grad_norm=self.get_global_grad_norm(),
            stats=stats,
            moves=self._parts.resolved.paging is not None,
        )

    @property
    def timeline(self) -> Timeline | None:
        """The running trace, or None."""
        return self._storage.timeline

    def start_trace(self) -> None:
        """Record the events of this rank's training thread and drives until `stop_trace`: see docs/timeline.md.

        Waits until no transfer is in flight. Raises InfinityError if a trace is running, or if nothing is offloaded.
        """
        self._storage.start_trace()

    def stop_trace(self, path: str | os.PathLike[str] | None = None) -> TraceSummary:
        """End the trace after the last transfer, and return its figures.

        `path`: file for this rank's events, as JSON for ui.perfetto.dev or chrome://tracing. Raises InfinityError if no trace
        is running, OSError if the file can't be written.
        """
        return self._storage.stop_trace(path)

    def step_lower_bound_seconds(
        self, *, compute_seconds: float, read_bytes_per_s: float, write_bytes_per_s: float
    ) -> float:
        """Return a lower bound of the step time (seconds) on this rank, for its bytes: see infinity/plan/lower_bound.py.

        After the first step, the bytes exclude data that stays in host memory, and include saved activations of the last step.
        """
        gathers = self.live.gathers if self.live is not None else None
        read, written = self._storage.step_bytes(micro_batches=self.config.passes, gathers=gathers)
        saved_read, saved_written = self.activations.step_bytes if self.activations is not None else (0, 0)
        drives = DriveSpeed(read_bytes_per_s, write_bytes_per_s)
        return max(compute_seconds, drives.lower_bound_seconds(read + saved_read, written + saved_written))

    # The weights alone.

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor on the device) of each parameter and saved buffer, for the loaders of inference engines.

        `dtype`: None for the compute dtype. The names are those of `save_16bit_model`. One group is in memory at a time. A
        collective: every rank takes all tensors, without a step in between.
        """
        return self._checkpoints.named_weights(dtype or self._parts.resolved.compute_dtype)

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str | None = None) -> bool:
        """Write the model in the compute dtype as safetensors. A collective; rank 0 holds a tensor at a time.
        `save_filename` is accepted: the files have the standard names."""
        self._checkpoints.save_16bit(save_dir)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole model in the compute dtype, in host memory of rank 0; None on other ranks. A collective."""
        return self._checkpoints.consolidated_16bit(exclude_frozen=exclude_frozen_parameters)
