"""Runs the stages of a PipelineModule by torch's 1F1B schedule. Training thread only.

Each rank has a stage, a model of its own, and every forward and backward of a micro-batch is a pass of its engine, as in
a loop. torch.distributed.pipelining decides their order and moves activations and their gradients between stages.

[Note: A stage is no FSDP module to torch]
torch's stages treat an FSDP module in a way of their own: the whole stage stays gathered, and unreduced gradients are
summed, from the first backward of a step to its end. That takes memory for all of a stage. So torch sees a plain module,
and each backward reduces and releases group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils._pytree import tree_leaves

from infinity.config import Config
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.coroutines import RandomState
from infinity.ranks.all_ranks import from_all_ranks
from infinity.runtime.meshes import digest_of
from infinity.runtime.micro_batches import LossFn, call_of, loss_in, streams
from infinity.runtime.parts import Parts
from infinity.runtime.pipeline import PipelineModule
from infinity.runtime.resolved import compute_device


def stages_of(model: nn.Module) -> int:
    """Return the number of stages of which `model` is one; 1 if it is whole."""
    return max((module.num_stages for module in model.modules() if isinstance(module, PipelineModule)), default=1)


def check_stages(model: nn.Module, config: Config, *, mesh: object, weights: object) -> None:
    """Raise ConfigError if the model is a stage and `initialize` has an argument or setting that stages exclude."""
    if (stages := stages_of(model)) == 1:
        return
    if not isinstance(model, PipelineModule):
        raise ConfigError("a PipelineModule with num_stages must be the model itself: pass it to initialize as model=")
    zero, infinity = config.zero_optimization, config.infinity
    for name, is_set in (
        ("mesh=", mesh is not None),
        ("weights=", weights is not None),
        ("LoRA adapters", any(hasattr(module, "lora_A") for module in model.modules())),
        ("tensor_parallel.autotp_size", config.tensor_parallel.ranks > 1),
        ("expert_parallel.autoep_size", config.expert_parallel.ranks > 1),
        ("zero_optimization.mics_shard_size", zero.mics_shard_size > 0),
        ("zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size > 1),
        ('infinity.durability "step"', infinity.durability == "step"),
        ('infinity.checkpoint_format "arena"', infinity.checkpoint_format == "arena"),
        ("infinity.micro_batches", infinity.micro_batches > 1),
        ("infinity.micro_batches_at_once", infinity.micro_batches_at_once != "auto"),
        ('infinity.schedule "vertical"', infinity.schedule == "vertical"),
        ("flops_profiler", config.flops_profiler.enabled),
    ):
        if is_set:
            raise ConfigError(
                f"a PipelineModule with num_stages={stages} with {name}, which infinity can't combine: leave one of the two "
                "out"
            )
    check_micro_batches(config, stages)


def check_micro_batches(config: Config, stages: int) -> None:
    """Raise ConfigError if a step has fewer micro-batches than there are stages."""
    if (count := config.batch.accumulation) < stages:
        raise ConfigError(
            f"gradient_accumulation_steps: got {count}, expected at least {stages}, the stages of the PipelineModule, which "
            "work on different micro-batches at a time"
        )


def check_groups(groups: int, pipe: dist.ProcessGroup) -> None:
    """Raise ConfigError if stages have different numbers of parameter groups. A collective."""
    if len({*from_all_ranks(groups, pipe)}) > 1:
        raise ConfigError(
            "stages have different numbers of parameter groups, and a checkpoint has one: give each stage parameters of every "
            "group (of Muon: matrices and others), by another partition_method or fewer stages"
        )


class Stages:
    """Runs this rank's stage of a PipelineModule, with the others.

    forward_pass: context of a micro-batch's forward. backward: that of its backward, given whether it is the step's last.
    scaled: returns a loss as it goes back.
    """

    def __init__(
        self,
        parts: Parts,
        forward_pass: Callable[[], AbstractContextManager[None]],
        backward: Callable[[bool], AbstractContextManager[None]],
        scaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        assert parts.grid.pipe is not None
        self._module, self._pipe = parts.module, parts.grid.pipe
        self._forward_pass, self._backward, self._scaled = forward_pass, backward, scaled
        self.stage, self._count = dist.get_rank(self._pipe), dist.get_world_size(self._pipe)
        self._made: dict[bool, tuple[Any, Schedule1F1B]] = {}
        """By True for training: a schedule, after the shapes of the micro-batches for which it was made."""
        self._batches: Sequence[Any] = ()
        self._random: Sequence[RandomState] = ()
        self._loss_fn: LossFn | None = None
        self._losses: dict[int, torch.Tensor] = {}
        self._is_broken = False
        """True after an error in the middle of a schedule: what other stages have sent may still be on its way."""

    def losses(self, batches: Sequence[Any], loss_fn: LossFn | None) -> list[torch.Tensor]:
        """Run the step's micro-batches forward and, with gradients enabled, backward; return their losses (0-D, fp32) on
        all stages. All stages get the same batches. A collective of `Grid.pipe`.

        Raises ConfigError if micro-batches have different shapes, or if stages have got different batches.
        """
        if self._is_broken:
            raise InfinityError(
                "an earlier step of the pipeline ended in its middle: end all ranks and restart from a checkpoint"
            )
        random = streams(len(batches) * self._count)  # each stage draws other numbers
        self._batches, self._random, self._loss_fn = batches, random[self.stage :: self._count], loss_fn
        trains = torch.is_grad_enabled()
        schedule = self._schedule(trains)
        numbers = torch.arange(len(batches))  # torch moves these; each stage has the data
        run = schedule.step if trains else schedule.eval
        try:
            run(*([numbers] if self.stage == 0 else []), target=numbers, losses=[], return_outputs=False)
            losses = torch.zeros(len(batches), device=compute_device())
            if self.stage == self._count - 1:
                losses = torch.stack([self._losses[number].float().reshape(()) for number in range(len(batches))])
            dist.broadcast(losses, group=self._pipe, group_src=self._count - 1)
            return [*losses]
        except BaseException as error:
            self._is_broken = True
            if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # torch adds the shapes of all arguments
            raise
        finally:
            self._batches, self._random, self._loss_fn = (), (), None
            self._losses.clear()

    def _schedule(self, trains: bool) -> Schedule1F1B:
        """Return the schedule for these micro-batches. A new one begins with a forward, and to train a backward to its
        inputs, that tell all stages the shapes of what they exchange."""
        shapes = [
            [(leaf.shape, leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            for batch in self._batches
        ]
        made = self._made.get(trains)
        if made is not None and made[0] == shapes:
            return made[1]
        if any(others != shapes[0] for others in shapes):
            raise ConfigError(
                "the micro-batches of a step have different shapes, and stages exchange one shape: pad them, or build the "
                "PipelineModule with num_stages=1"
            )
        if len({*from_all_ranks(digest_of(self._batches), self._pipe)}) > 1:
            raise ConfigError(
                "stages of the pipeline have got different batches: give the ranks of all stages the same data, by "
                f"DistributedSampler(data, ranks // {self._count}, rank % (ranks // {self._count})), or the loader of "
                "initialize(training_data=...)"
            )
        stage = _Stage(_Numbered(self._forward), self.stage, self._count, compute_device(), group=self._pipe)
        stage.around_backward = self._around_backward
        schedule = Schedule1F1B(stage, len(self._batches), loss_fn=self._loss, scale_grads=False)
        self._made[trains] = shapes, schedule
        return schedule

    def _forward(self, number: int, values: Sequence[Any]) -> Any:
        if self.stage == 0:
            values = call_of(self._batches[number], self._loss_fn).args
        with self._random[number].within(), self._forward_pass():
            return self._module(*values)

    def _loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        number = int(target)
        with self._random[number].within():
            loss = loss_in(output, self._batches[number], self._loss_fn)
        self._losses[number] = loss.detach()
        return self._scaled(loss / len(self._batches))

    def _around_backward(self, number: int) -> AbstractContextManager[None]:
        return self._backward(number == len(self._batches) - 1)


class _Numbered(nn.Module):
    """What torch takes for the stage: calls `run` with the number of a micro-batch and what came in. It does not hold the
    model as its part: see [Note: A stage is no FSDP module to torch]."""

    def __init__(self, run: Callable[[int, Sequence[Any]], Any]) -> None:
        super().__init__()
        self.run, self.number = run, 0

    def forward(self, *values: Any) -> Any:
        return self.run(self.number, values)


class _Stage(PipelineStage):
    """torch's stage, with the engine's passes around its chunks, which are micro-batches."""

    submod: _Numbered
    around_backward: Callable[[int], AbstractContextManager[None]]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.number = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:  # torch would keep the outputs of all micro-batches
            self.fwd_cache[fwd_chunk_id] = (), []
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.has_backward:
            with self.around_backward(bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
