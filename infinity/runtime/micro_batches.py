"""The micro-batches of a step: taken from the data, one by one or all at once through the model. Training thread only."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity.aio import absent_bytes
from infinity.errors import ConfigError
from infinity.fsdp2.coroutines import RandomState
from infinity.fsdp2.kept_state import KeptState
from infinity.fsdp2.vertical import Memory, MicroBatch, Turn, Vertical
from infinity.host_memory import available_bytes, taken_bytes
from infinity.runtime.pipeline import PipelineModule
from infinity.runtime.resolved import Resolved, compute_device

log = logging.getLogger("infinity")

_SAVED_BYTES = 1 << 30
_PLAIN_STATE_BYTES = 16
"""Of one element: master, gradient and two moments in fp32."""
LossFn = Callable[[Any, Any], torch.Tensor]


class MicroBatches:
    """Those of a step of one model: where they come from, and their losses.

    looks_at_memory: whether micro-batches that take turns because `infinity.schedule` is "auto" give up when the device has no
    memory for what they save.
    """

    def __init__(self, module: nn.Module, resolved: Resolved, vertical: Vertical, *, looks_at_memory: bool) -> None:
        self._module, self.resolved, self._vertical = module, resolved, vertical
        self._looks_at_memory = looks_at_memory
        self._data: Iterator[Any] | None = None
        self._most_at_once: int | None = None
        """For how many memory was found to suffice, where "auto" looks for it."""
        self._gave_up_vertical = False
        """Whether "auto" has found, and said, that the micro-batches of this model can't take turns."""

    def loss_fn_or(self, loss_fn: LossFn | None) -> LossFn | None:
        """`loss_fn`, or that of the model where it has one."""
        return loss_fn or (self._module.loss_fn if isinstance(self._module, PipelineModule) else None)

    @property
    def at_once(self) -> int:
        """How many micro-batches of this step take turns; 1 if they come one after the other."""
        may = self.resolved.paging is not None and not self._gave_up_vertical
        if self.resolved.schedule == "vertical" or (self.resolved.schedule == "auto" and may):
            asked = self.resolved.config.micro_batches_at_once
            return next(k for k in range(self._most_at_once or asked, 0, -1) if asked % k == 0)
        return 1

    def losses_at_once(
        self,
        forward_pass: Callable[..., contextlib.AbstractContextManager[None]],
        calls: Sequence[MicroBatch],
        random: Sequence[RandomState],
        loss_of: Callable[[int, Any], torch.Tensor],
        *,
        functions: Sequence[Any] = (),
        goes_back: bool = True,
    ) -> Iterator[torch.Tensor] | None:
        """The losses of all micro-batches, which take turns inside `forward_pass`, for the backward of `Vertical`; None where
        they can't, which the log says.

        loss_of: the loss of the number of a micro-batch and what its forward returned. functions: where it may keep state.
        goes_back: see `Vertical.forward`.
        """
        config = self.resolved.config
        alone = dist.get_world_size() == 1  # else each rank would see another figure
        looks = alone and config.infinity.micro_batches_at_once == "auto" and self._looks_at_memory
        is_whole_step = config.infinity.micro_batches > 1 or len(calls) == config.batch.accumulation

        def loss_in_turn(micro_batch: int, turn: Turn) -> torch.Tensor:
            with turn.random.within():
                return turn.context.run(loss_of, micro_batch, turn.output)

        while True:
            state = KeptState(self._module, self._vertical.groups, functions)
            with forward_pass(micro_batches=len(calls)):
                fits = self._vertical.forward(
                    calls,
                    random,
                    state,
                    is_whole_step=is_whole_step,
                    goes_back=goes_back,
                    memory=Memory(_memory_now, self._saved_bytes_max) if looks else None,
                )
            if fits:
                losses = self._vertical.losses(loss_in_turn)
                first = [next(losses)]
                if self._vertical.accepts(state):
                    return _and_then(first, losses)
                del first, losses
            if (share := self._vertical.share_that_fits) is not None:
                looks = False
                if self._takes_fewer(int(share * len(calls)), len(calls)):
                    return None
                continue
            if not self._vertical.once_more:
                break
            if dist.get_rank() == 0 and (why := self._vertical.why_not_back):
                log.info("the forwards of all micro-batches end before a backward begins, as %s", why)
        why = f"the micro-batches of this model can't take turns: {self._vertical.why_not_now}"
        if self.resolved.config.infinity.micro_batches > 1:
            raise ConfigError(f"{why}; set infinity.micro_batches to 1, and gradient_accumulation_steps instead")
        if self.resolved.schedule == "vertical":
            raise ConfigError(f'{why}; set infinity.schedule to "auto" or "horizontal"')
        if self._vertical.why_not is not None:
            self._gave_up_vertical = True
            if dist.get_rank() == 0:
                log.info('infinity.schedule "auto" is "horizontal" here: %s', why)
        return None

    @property
    def _saved_bytes_max(self) -> int:
        """What plain PyTorch would have in memory of states, or so little that it doesn't matter."""
        numel: int = sum(p.numel() for p in self._module.parameters())
        return max(_SAVED_BYTES, _PLAIN_STATE_BYTES * numel)

    def _takes_fewer(self, count: int, of: int) -> bool:
        """Memory suffices for what `count` micro-batches save. Whether so many, or fewer, are at once from the next step on. If
        all were asked for, the log tells what they take."""
        why = self._vertical.why_not_now
        if self.resolved.config.infinity.micro_batches > 1 or self.resolved.schedule == "vertical":
            log.info(
                "%d micro-batches at once: %s; activation checkpointing and infinity.offload_activations take less",
                of,
                why,
            )
            return False
        self._most_at_once = max(1, count)
        self._gave_up_vertical = self.at_once == 1
        how = '"horizontal" here' if self._gave_up_vertical else f"{self.at_once} of {of} micro-batches at once"
        log.info('infinity.schedule "auto" is %s: %s', how, why)
        return True

    def take(self, data_iter: Iterator[Any] | None, loader: Any) -> list[Any]:
        """The micro-batches of a step: of `data_iter`, or where that is None of a data loader, epoch after epoch. Raises
        StopIteration where there are not enough."""
        if data_iter is None:
            if loader is None:
                raise ConfigError("train_batch needs data_iter, as initialize was given no training_data")
            data_iter = self._data = self._data or _epochs(loader)
        elif not hasattr(data_iter, "__next__"):
            raise TypeError(f"data_iter is a {type(data_iter).__name__}: make an iterator of it once, by iter(...)")
        count = self.resolved.config.batch.accumulation
        batches = list(itertools.islice(data_iter, count))
        if len(batches) < count:
            raise StopIteration(f"the data ended after {len(batches)} of the {count} micro-batches of a step")
        device = compute_device()
        if device.type == "cpu":
            return batches
        return [tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch) for batch in batches]


def streams(count: int) -> list[RandomState]:
    """Random numbers for so many micro-batches, the same in every schedule."""
    seed = int(torch.randint(2**62, ()))
    return [RandomState.seeded(seed + number) for number in range(count)]


def loss_of_call(forward: Callable[..., Any], batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """The loss of one micro-batch."""
    call = call_of(batch, loss_fn)
    return loss_in(forward(*call.args, **call.kwargs), batch, loss_fn)


def _and_then(first: list[torch.Tensor], losses: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield first.pop()  # held by its user alone
    yield from losses


def call_of(batch: Any, loss_fn: LossFn | None) -> MicroBatch:
    """What the model is called with for a micro-batch."""
    inputs = batch
    if loss_fn is not None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(f"with a loss_fn a micro-batch is (inputs, labels), got a {type(batch).__name__}")
        inputs = batch[0]
    if isinstance(inputs, Mapping):
        return MicroBatch((), dict(inputs))
    return MicroBatch(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def loss_in(output: Any, batch: Any = None, loss_fn: LossFn | None = None) -> torch.Tensor:
    """The loss in what the model returned."""
    if loss_fn is not None:
        loss = loss_fn(output, batch[1])
        if loss.numel() != 1:
            raise ValueError(f"backward takes a scalar loss, and the loss_fn gave one of shape {tuple(loss.shape)}")
        return loss
    loss = output
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(
            f"the model returned a {type(output).__name__} without a scalar loss: return the loss, or give train_batch a "
            "loss_fn"
        )
    return loss


def _memory_now() -> tuple[int | None, int]:
    """Return the bytes of the device's memory that are free (None if unknown), and those that this process has taken."""
    if torch.cuda.is_available():
        taken = torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - taken), taken
    available, absent = available_bytes(), absent_bytes()
    return None if available is None else available - absent, taken_bytes() + absent


def mean_over_ranks(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean (0-D, fp32) over these and those of the other ranks."""
    mean = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
    if dist.get_world_size() > 1:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean


def _epochs(loader: Any) -> Iterator[Any]:
    """The batches of a data loader, epoch after epoch, each in an order of its own."""
    for epoch in itertools.count():
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return
