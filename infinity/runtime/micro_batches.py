"""The micro-batches of a step: from the data, and one by one or together through the model. Training thread only."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from infinity.aio import absent_bytes
from infinity.errors import ConfigError
from infinity.fsdp2.coroutines import RandomState
from infinity.fsdp2.kept_state import KeptState
from infinity.fsdp2.vertical import Memory, MicroBatch, Turn
from infinity.host_memory import available_bytes, taken_bytes
from infinity.runtime.parts import Parts
from infinity.runtime.pipeline import PipelineModule
from infinity.runtime.resolved import compute_device
from infinity.schedule.spilling import GRADIENT_BYTES

log = logging.getLogger("infinity")

_SAVED_BYTES = 1 << 30
"""Saved activations (bytes) that never matter."""
_PLAIN_STATE_BYTES = 16
"""Bytes of one element in plain PyTorch: master, gradient and two moments in fp32."""
_STEPS_TO_TRY = 3
"""The first records the order of a step, and the second fills the pool by it."""
_LITTLE = 0.05
"""Share of a step's time for which more memory is not taken."""
LossFn = Callable[[Any, Any], torch.Tensor]


class MicroBatches:
    """Takes the micro-batches of one model's steps, and computes their losses."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._vertical = parts, parts.vertical
        self._data: Iterator[Any] | None = None
        self._most_at_once: int | None = None
        """Number for which memory was found to suffice, if "auto" measured it."""
        self._gave_up_vertical = False
        """True after "auto" found, and logged, that this model's micro-batches can't take turns, or need not."""
        self._numel = sum(parameter.numel() for parameter in parts.module.parameters())
        may_try = self._measures and compute_device().type == "cpu" and _PLAIN_STATE_BYTES * self._numel > _SAVED_BYTES
        self._tried: list[float] | None = [] if may_try else None
        """Seconds of the steps that "auto" has tried (see `end_step`); None if it tries none."""

    def loss_fn_or(self, loss_fn: LossFn | None) -> LossFn | None:
        """Return `loss_fn`, or else the model's."""
        module = self._parts.module
        return loss_fn or (module.loss_fn if isinstance(module, PipelineModule) else None)

    @property
    def at_once(self) -> int:
        """Number of micro-batches of this step that take turns; 1 if they run one after the other."""
        if not self._may_take_turns:
            return 1
        most = self._most_at_once or self._asked
        if self._decides_by_trying:
            most = 1 if len(self._tried or ()) < _STEPS_TO_TRY else self._fewest_at_once
        return next(k for k in range(most, 0, -1) if self._asked % k == 0)

    @property
    def _asked(self) -> int:
        return self._parts.resolved.config.micro_batches_at_once

    @property
    def _may_take_turns(self) -> bool:
        resolved = self._parts.resolved
        schedule, may = resolved.config.infinity.schedule, resolved.paging is not None and not self._gave_up_vertical
        return schedule == "vertical" or (schedule == "auto" and may)

    @property
    def _decides_by_trying(self) -> bool:
        return self._tried is not None and self._asked > 1 and self._parts.resolved.config.infinity.schedule == "auto"

    @property
    def _fewest_at_once(self) -> int:
        return next(k for k in range(2, self._asked + 1) if self._asked % k == 0)

    @property
    def _measures(self) -> bool:
        """True if "auto" decides by measurements, which on several ranks would differ."""
        auto = self._parts.resolved.config.infinity.micro_batches_at_once == "auto"
        return auto and self._parts.activations is None and dist.get_world_size() == 1

    def end_step(self, seconds: float) -> None:
        """End a step of `train_batch`. A few steps of a large model run first one micro-batch after the other, then two
        at once. If all at once would, by these, be little faster, "auto" is "horizontal", which needs less memory."""
        if self._tried is None or not (self._decides_by_trying and self._may_take_turns):
            return
        self._tried.append(seconds)
        if len(self._tried) < 2 * _STEPS_TO_TRY:
            return
        one, few = self._tried[_STEPS_TO_TRY - 1], self._tried[-1]
        saved = (one - few) * (1 - 1 / self._asked) / (1 - 1 / self._fewest_at_once)
        self._tried = None
        if saved < _LITTLE * one:
            self._gave_up_vertical = True
            log.info(
                'infinity.schedule "auto" is "horizontal" here: it takes less memory, and all %d micro-batches at once '
                "would save %.1f %% of a step's time",
                self._asked,
                max(0.0, 100 * saved / one),
            )

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
        """Return the losses of micro-batches that take turns inside `forward_pass`, for `Vertical.backward`; None, with a
        log line, if they can't take turns.

        loss_of: returns the loss for the number of a micro-batch and its output. functions: others that may keep state.
        goes_back: see `Vertical.forward`.
        """
        vertical, config = self._vertical, self._parts.resolved.config
        measures = self._measures
        is_whole_step = config.infinity.micro_batches > 1 or len(calls) == config.batch.accumulation

        def loss_in_turn(micro_batch: int, turn: Turn) -> torch.Tensor:
            with turn.random.within():
                return turn.context.run(loss_of, micro_batch, turn.output)

        while True:
            state = KeptState(self._parts.module, vertical.groups, functions)
            with forward_pass(micro_batches=len(calls)):
                fits = vertical.forward(
                    calls,
                    random,
                    state,
                    is_whole_step=is_whole_step,
                    goes_back=goes_back,
                    memory=Memory(_memory_now, self._saved_bytes_max()) if measures else None,
                )
            if fits:
                losses = vertical.losses(loss_in_turn)
                first = [next(losses)]
                if vertical.accepts(state):
                    return _and_then(first, losses)
                del first, losses
            if (share := vertical.share_that_fits) is not None:
                measures = False
                if self._takes_fewer(int(share * len(calls)), len(calls)):
                    return None
                continue
            if not vertical.once_more:
                break
            if dist.get_rank() == 0 and (why := vertical.why_not_back):
                log.info("all forwards of a step end before its first backward: %s", why)
        why = f"the micro-batches of this model can't take turns: {vertical.why_not_now}"
        if config.infinity.micro_batches > 1:
            raise ConfigError(f"{why}; set infinity.micro_batches to 1, and gradient_accumulation_steps instead")
        if config.infinity.schedule == "vertical":
            raise ConfigError(f'{why}; set infinity.schedule to "auto" or "horizontal"')
        if vertical.why_not is not None:
            self._gave_up_vertical = True
            if dist.get_rank() == 0:
                log.info('infinity.schedule "auto" is "horizontal" here: %s', why)
        return None

    def _saved_bytes_max(self) -> int:
        """Return the bytes of saved activations with which a step takes no more memory than plain PyTorch."""
        swap = self._parts.swap
        pinned_bytes = swap.stats().pinned_bytes if swap is not None else 0
        return max(_SAVED_BYTES, (_PLAIN_STATE_BYTES - GRADIENT_BYTES) * self._numel - pinned_bytes)

    def _takes_fewer(self, count: int, of: int) -> bool:
        """Run fewer micro-batches at once from the next step on, as memory suffices for `count`. Returns False, with a log
        line, if the config asks for all."""
        why, infinity = self._vertical.why_not_now, self._parts.resolved.config.infinity
        if infinity.micro_batches > 1 or infinity.schedule == "vertical":
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
        """Return the micro-batches of a step from `data_iter`, or else from a data loader, epoch after epoch. Raises
        StopIteration if there are not enough."""
        if data_iter is None:
            if loader is None:
                raise ConfigError("train_batch needs data_iter, as initialize was given no training_data")
            data_iter = self._data = self._data or _epochs(loader)
        elif not hasattr(data_iter, "__next__"):
            raise TypeError(f"data_iter is a {type(data_iter).__name__}: make an iterator of it once, by iter(...)")
        count = self._parts.resolved.config.batch.accumulation
        batches = list(itertools.islice(data_iter, count))
        if len(batches) < count:
            raise StopIteration(f"the data ended after {len(batches)} of the {count} micro-batches of a step")
        device = compute_device()
        if device.type == "cpu":
            return batches
        return [tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch) for batch in batches]


def streams(count: int) -> list[RandomState]:
    """Return random numbers for each of `count` micro-batches, the same in every schedule."""
    seed = int(torch.randint(2**62, ()))
    return [RandomState.seeded(seed + number) for number in range(count)]


def loss_of_call(forward: Callable[..., Any], batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """Return the loss of one micro-batch."""
    call = call_of(batch, loss_fn)
    return loss_in(forward(*call.args, **call.kwargs), batch, loss_fn)


def _and_then(first: list[torch.Tensor], losses: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield first.pop()  # so that only the caller holds it
    yield from losses


def call_of(batch: Any, loss_fn: LossFn | None) -> MicroBatch:
    """Return the arguments of the model for a micro-batch."""
    inputs = batch
    if loss_fn is not None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(f"with a loss_fn a micro-batch is (inputs, labels), got a {type(batch).__name__}")
        inputs = batch[0]
    if isinstance(inputs, Mapping):
        return MicroBatch((), dict(inputs))
    return MicroBatch(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def loss_in(output: Any, batch: Any = None, loss_fn: LossFn | None = None) -> torch.Tensor:
    """Return the loss in the model's output."""
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


def mean_over_ranks(losses: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the mean (0-D, fp32) of these losses and those of the other ranks of `group` (None: all)."""
    mean = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return mean


def _epochs(loader: Any) -> Iterator[Any]:
    """Yield the batches of a data loader, epoch after epoch, each in its own order; end if it is empty."""
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
