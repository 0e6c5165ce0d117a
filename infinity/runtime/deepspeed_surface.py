"""What users and trainers ask an engine for that changes no training, most of it under DeepSpeed's names.

No state of its own: an `Engine` is one of these, and sets the attributes.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from infinity.activations.saved_tensors import Activations
from infinity.config import Config
from infinity.fsdp2.live import LiveParameters
from infinity.fsdp2.sharding import local_of
from infinity.plan.lower_bound import DriveSpeed
from infinity.runtime.checkpoints import Checkpoints
from infinity.runtime.in_memory import Storage
from infinity.runtime.loss_scale import LossScale, Scalar
from infinity.runtime.monitors import Event, Monitors, events_of_step
from infinity.runtime.observe import EngineStats, StepMeter, StepProgress
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


class DeepSpeedSurface:
    """Of an `Engine`, which sets these attributes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    config: Config
    _resolved: Resolved
    _storage: Storage
    _progress: StepProgress
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
        return getattr(self.module, name)

    def train(self: E, mode: bool = True) -> E:
        """Training mode."""
        self.module.train(mode)
        return self

    def eval(self: E) -> E:
        """Evaluation mode."""
        return self.train(False)

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

    @property
    def cur_scale(self) -> float:
        """The factor on the loss in the coming backward passes; 1 without fp16."""
        return self._loss_scale.scale

    loss_scale = cur_scale

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

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
