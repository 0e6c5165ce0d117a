"""Floor 11. What users and trainers ask a DeepSpeed engine for, under its names: getters, and what they pass on to the module.

No state and no logic of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from infinity.fsdp2.sharding import local_of
from infinity.runtime.loss_scale import LossScale
from infinity.runtime.offload import Offload
from infinity.runtime.progress import Progress
from infinity.runtime.resolved import Resolved
from infinity.runtime.shard import compute_device
from infinity.swap import SwapStats
from infinity.swap.taken_gradient import TakenGradient

E = TypeVar("E", bound="DeepSpeedSurface")


class DeepSpeedSurface:
    """Of an `Engine`, which sets these attributes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    _resolved: Resolved
    _offload: Offload
    _progress: Progress
    _loss_scale: LossScale

    # The module.

    def __getattr__(self, name: str) -> Any:
        """What the engine doesn't have, the model may: `engine.generate(...)`."""
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

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.module.training

    def parameters(self) -> Iterator[nn.Parameter]:
        """The sharded parameters (fp32 masters)."""
        return self.module.parameters()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The sharded parameters with the module's names for them."""
        return self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's: sharded masters, read from NVMe when they are used."""
        return self.module.state_dict(*args, **kwargs)

    # The config.

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self._resolved.batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank."""
        return self._resolved.batch.micro

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self._resolved.batch.train

    def zero_optimization_stage(self) -> int:
        """The config's, 0 to 3."""
        return self._resolved.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a trainer that saves the model may gather it whole on rank 0: the config's
        `stage3_gather_16bit_weights_on_model_save`."""
        return self._resolved.gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        """Whether compute is in fp16."""
        return self._resolved.compute_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether compute is in bf16."""
        return self._resolved.compute_dtype is torch.bfloat16

    def gradient_clipping(self) -> float:
        """Largest norm of the whole gradient; 0 does not clip."""
        return self._resolved.gradient_clipping

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

    @property
    def global_steps(self) -> int:
        """Steps so far, skipped ones included."""
        return self._progress.global_steps

    @property
    def micro_steps(self) -> int:
        """Backward passes so far."""
        return self._progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps in which nothing was updated because an fp16 gradient overflowed; counted in `global_steps` too."""
        return self._progress.skipped_steps

    @property
    def global_samples(self) -> int:
        """Samples of all steps so far, over all ranks."""
        return self.global_steps * self.train_batch_size()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether `step` will step: the last micro-batch of a step has had its backward pass."""
        return self._progress.ends_a_step(self._progress.micro_steps)

    @property
    def cur_scale(self) -> float:
        """The factor on the loss in the coming backward passes; 1 without fp16."""
        return self._loss_scale.scale

    @property
    def loss_scale(self) -> float:
        """Another name of `cur_scale`."""
        return self.cur_scale

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def swap_stats(self) -> SwapStats | None:
        """Counters of the swap manager since the start; None where nothing rests on NVMe."""
        return self._offload.stats()

    @property
    def gradient_bytes(self) -> int:
        """Memory of this rank, in bytes, that holds reduced gradients now: in `.grad`, or where they wait for their update."""
        shown = (p.grad for group in self.optimizer.param_groups for p in group["params"])
        local = (local_of(grad) for grad in shown if grad is not None)
        in_grad = sum(grad.nbytes for grad in local if not isinstance(grad, TakenGradient))
        return self._offload.waiting_gradient_bytes + in_grad
