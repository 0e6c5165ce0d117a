"""The passes of a step: forward and backward of a micro-batch, or of all micro-batches of the step at once.

An `Engine` is one of these, and sets the attributes. Training thread only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity.aio import absent_bytes
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.coroutines import RandomState
from infinity.fsdp2.kept_state import KeptState
from infinity.fsdp2.names import parameter_names
from infinity.fsdp2.routes import Routes
from infinity.fsdp2.running_statistics import mixtures_explained
from infinity.fsdp2.sharding import held_parameters
from infinity.fsdp2.vertical import MicroBatch, Vertical
from infinity.host_memory import available_bytes
from infinity.ranks.peers import Peers
from infinity.runtime.deepspeed_surface import DeepSpeedSurface
from infinity.runtime.flops import FlopsProfile
from infinity.runtime.gradient_norm import factor_of
from infinity.runtime.in_memory import AnyCommits, Updater
from infinity.runtime.observe import WallClock
from infinity.runtime.pass_guard import Pass, PassGuard
from infinity.runtime.pipeline import PipelineModule
from infinity.swap.timeline import measured

log = logging.getLogger("infinity")

LossFn = Callable[[Any, Any], torch.Tensor]


class Passes(DeepSpeedSurface):
    """Of an `Engine`, which sets these attributes."""

    peers: Peers
    wall_clock: WallClock | None
    flops_profile: FlopsProfile | None
    training_dataloader: Any
    _routes: Routes | None
    _vertical: Vertical
    _guard: PassGuard
    _updater: Updater
    _commits: AnyCommits
    _frozen: set[str]
    _data: Iterator[Any] | None = None
    """Of `training_dataloader`, epoch after epoch."""
    _gave_up_vertical = False
    """Whether "auto" has found, and said, that the micro-batches of this model can't take turns."""

    # A micro-batch.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. With gradients, what it saves for the backward goes where the config keeps activations."""
        with self.forward_pass():
            return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def forward_pass(self, *, micro_batches: int = 1) -> Iterator[None]:
        """What `forward` does around the model, for a loop that calls the model itself. `micro_batches`: of the call."""
        saving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.activations is not None and torch.is_grad_enabled():
            saving = self.activations.saving()
        self._guard.begin_forward()
        explained = self._routes.explained() if self._routes is not None else contextlib.nullcontext()
        name = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
        in_16_bits = self._resolved.compute_dtype is not torch.float32
        mixtures = mixtures_explained(self.module) if in_16_bits else contextlib.nullcontext()
        around = self._guard.around(Pass.FORWARD)
        with self._in_pass(name), around, self._timing("fwd", micro_batches), saving, explained, mixtures:
            yield

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward pass of a micro-batch's loss (a scalar), which is divided by the number of accumulation steps first,
        unless `scale_wrt_gas` is False.

        Returns the divided loss. Gradients are reduced over the ranks and summed in fp32 (see `infinity.reduce_dtype`). With
        fp16 they are `cur_scale` times as large until `step`. Raises ConfigError when a parameter was unfrozen since
        `initialize`: nothing would train it; and where `infinity.schedule` is "vertical", which takes `train_batch`.
        """
        if self._resolved.backwards_per_step < self.gradient_accumulation_steps():
            raise ConfigError(
                'infinity.schedule "vertical" runs all micro-batches of a step at once: call engine.train_batch(data_iter), or '
                'set it to "auto"'
            )
        return self._backward([loss], retain_graph, scale_wrt_gas)[0]

    def _backward(self, losses: Sequence[torch.Tensor], retain_graph: bool, scale_wrt_gas: bool) -> list[torch.Tensor]:
        """One backward over the losses of as many micro-batches; the divided losses."""
        with self._in_pass("a backward"), self._timing("bwd"):
            for loss in losses:
                if loss.numel() != 1:
                    raise ValueError(f"backward takes a scalar loss, got one of shape {tuple(loss.shape)}")
            self._check_trains()
            _check_none_unfrozen(self.module, self._frozen)
            self._guard.settle()
            self._guard.check_gradients_whole()
            last = self._progress.ends_a_step(self._progress.micro_steps + len(losses))
            if self.live is not None:
                self.live.begin_backward(last=last)
            self._updater.expect(factor_of(self.cur_scale) if last else None)
            parts = self.gradient_accumulation_steps() if scale_wrt_gas else 1
            divided = [loss / parts if scale_wrt_gas else loss for loss in reversed(losses)]
            scaled = [loss.float() * self.cur_scale if self._loss_scale.may_overflow else loss for loss in divided]
            with self._guard.around(Pass.BACKWARD):
                if self._resolved.updates_in_backward:
                    self._commits.make()
                try:
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
                except RuntimeError as error:
                    if "storage of size 0" not in str(error):
                        raise
                    raise InfinityError(
                        "a second backward through the model (create_graph=True) needs parameters that were freed after the "
                        "first: parameters on NVMe have theirs where all groups stay in the pinned pool (a larger "
                        'infinity.pinned_bytes_max, infinity.update "step"); else leave second derivatives out'
                    ) from error
                self._vertical.end()
                self._progress.end_backward(losses, parts)
            return divided[::-1]

    def _check_trains(self) -> None:
        if not self._resolved.trains:
            raise ConfigError(
                'there is no optimizer to train with: name one in the config, such as "optimizer": {"type": "AdamW", "params": '
                '{"lr": 1e-4}}, or pass optimizer= to initialize'
            )

    # A whole step.

    def train_batch(self, data_iter: Iterator[Any] | None = None, *, loss_fn: LossFn | None = None) -> torch.Tensor:
        """Train one step: forward and backward of `gradient_accumulation_steps` micro-batches, then `step`.

        `data_iter`: gives the micro-batches; None takes those of the data loader that `initialize` made, epoch after epoch. The
        model is called with a micro-batch: a mapping is its keyword arguments, a tuple or list its arguments. It returns the
        loss, or something that has it as `.loss`, under "loss" or first. With a `loss_fn` (or that of a PipelineModule), a
        micro-batch is (inputs, labels), and the loss is loss_fn(outputs, labels).

        Which micro-batch passes through which group when is said by `infinity.schedule`; the numbers are the same. Each draws
        random numbers of a stream of its own, whose seed the CPU's generator gives: dropout differs from that of a loop over
        forward and backward.

        Returns the mean of the losses (0-D, fp32) over the micro-batches and ranks. Raises StopIteration where the iterator
        ends, before anything was changed; InfinityError in the middle of a step; ConfigError where `infinity.schedule` is
        "vertical" and the model's micro-batches can't take turns.
        """
        if self._progress.is_in_step:
            raise InfinityError(
                "train_batch takes a whole step, and this one has begun: call step() or zero_grad() first"
            )
        loss_fn, batches = loss_fn or self._own_loss_fn, self._take(data_iter)
        random = self._streams(len(batches))
        losses = self._forward_at_once(batches, random, loss_fn) if self._is_vertical else None
        try:
            if losses is not None:
                self._progress.boundary = True
                self._backward(losses, False, True)
            else:
                losses = []
                for batch, stream in zip(batches, random, strict=True):
                    with stream.within():
                        losses.append(self._forward_loss(batch, loss_fn))
                    self._progress.boundary = len(losses) == len(batches)
                    self._backward(losses[-1:], False, True)
                    losses[-1] = losses[-1].detach()
            self.step()
        finally:
            self._progress.boundary = None
        return _mean_over_ranks(losses)

    def eval_batch(self, data_iter: Iterator[Any], *, loss_fn: LossFn | None = None) -> torch.Tensor:
        """The mean loss (0-D, fp32) of as many micro-batches, without gradients and in evaluation mode; else as
        `train_batch`."""
        loss_fn = loss_fn or self._own_loss_fn
        batches, trains = self._take(data_iter), self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                losses = [self._forward_loss(batch, loss_fn) for batch in batches]
        finally:
            self.module.train(trains)
        return _mean_over_ranks(losses)

    @property
    def _own_loss_fn(self) -> LossFn | None:
        return self.module.loss_fn if isinstance(self.module, PipelineModule) else None

    @property
    def _is_vertical(self) -> bool:
        """Whether the micro-batches of this step are to take turns. One alone has nobody to take turns with."""
        if self.gradient_accumulation_steps() == 1:
            return False
        if self._resolved.schedule == "auto":
            return self._resolved.paging is not None and not self._gave_up_vertical
        return self._resolved.schedule == "vertical"

    def _forward_loss(self, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
        """The loss of one micro-batch."""
        call = _call_of(batch, loss_fn)
        return _loss_of(self.forward(*call.args, **call.kwargs), batch, loss_fn)

    def _forward_at_once(
        self, batches: Sequence[Any], random: Sequence[RandomState], loss_fn: LossFn | None
    ) -> list[torch.Tensor] | None:
        """The losses of all micro-batches; None where they can't take turns, which the log says."""
        state = KeptState(self.module, self._vertical.groups, [loss_fn])
        with self.forward_pass(micro_batches=len(batches)):
            calls = [_call_of(batch, loss_fn) for batch in batches]
            alone = dist.get_world_size() == 1  # else each rank would see another figure
            look = _memory_left if alone and self._resolved.schedule == "auto" and self.activations is None else None
            turns = self._vertical.forward(calls, random, state, available_bytes=look)
        losses = []
        for turn, batch in zip(reversed(turns or []), reversed(batches), strict=turns is not None):
            with turn.random.within():
                losses.append(turn.context.run(_loss_of, turn.output, batch, loss_fn))
        if turns is not None and self._vertical.accepts(state):
            return losses[::-1]
        why = f"the micro-batches of this model can't take turns: {self._vertical.why_not_now}"
        if self._resolved.schedule == "vertical":
            raise ConfigError(f'{why}; set infinity.schedule to "auto" or "horizontal"')
        if self._vertical.why_not is not None:
            self._gave_up_vertical = True
            if dist.get_rank() == 0:
                log.info('infinity.schedule "auto" is "horizontal" here: %s', why)
        return None

    def _take(self, data_iter: Iterator[Any] | None) -> list[Any]:
        """The micro-batches of a step. Raises StopIteration where there are not enough."""
        if data_iter is None:
            if self.training_dataloader is None:
                raise ConfigError("train_batch needs data_iter, as initialize was given no training_data")
            data_iter = self._data = self._data or _epochs(self.training_dataloader)
        elif not hasattr(data_iter, "__next__"):
            raise TypeError(f"data_iter is a {type(data_iter).__name__}: make an iterator of it once, by iter(...)")
        count = self.gradient_accumulation_steps()
        batches = list(itertools.islice(data_iter, count))
        if len(batches) < count:
            raise StopIteration(f"the data ended after {len(batches)} of the {count} micro-batches of a step")
        if self.device.type == "cpu":
            return batches
        return [tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), batch) for batch in batches]

    @staticmethod
    def _streams(count: int) -> list[RandomState]:
        """Random numbers for so many micro-batches, the same in every schedule."""
        seed = int(torch.randint(2**62, ()))
        return [RandomState.seeded(seed + number) for number in range(count)]

    # Around them.

    @contextlib.contextmanager
    def _in_pass(self, name: str, *, last: bool = False) -> Iterator[None]:
        with self._guard.entered(), self.peers.in_pass(name, self._guard.standing, last=last):
            yield

    @contextlib.contextmanager
    def _timing(self, part: Literal["fwd", "bwd", "step"], micro_batches: int = 1) -> Iterator[None]:
        """Count what happens in the block for `part`, wherever that is wanted; tell when a step ends."""
        steps, clock, profile = self.global_steps, self.wall_clock, self.flops_profile
        with (
            measured(self.timeline, "step", {"fwd": "forward", "bwd": "backward", "step": "step"}[part]),
            clock.measure(part) if clock is not None else contextlib.nullcontext(),
            profile.measure(part, steps, micro_batches) if profile is not None else contextlib.nullcontext(),
        ):
            yield
        stepped = self.global_steps > steps
        if clock is not None and part == "step":
            clock.report(stepped=stepped)
        if profile is not None and stepped and profile.report():
            self.flops_profile = None  # told once


def _call_of(batch: Any, loss_fn: LossFn | None) -> MicroBatch:
    """What the model is called with for a micro-batch."""
    inputs = batch
    if loss_fn is not None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(f"with a loss_fn a micro-batch is (inputs, labels), got a {type(batch).__name__}")
        inputs = batch[0]
    if isinstance(inputs, Mapping):
        return MicroBatch((), dict(inputs))
    return MicroBatch(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def _loss_of(output: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """The loss in what the model returned."""
    if loss_fn is not None:
        return loss_fn(output, batch[1])
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


def _memory_left() -> int | None:
    """What the device may still take (bytes)."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    available = available_bytes()
    return None if available is None else available - absent_bytes()


def _mean_over_ranks(losses: Sequence[torch.Tensor]) -> torch.Tensor:
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


def _check_none_unfrozen(module: nn.Module, frozen: set[str]) -> None:
    """Raise ConfigError where a parameter of `frozen` requires a gradient now, or one has come that is not sharded."""
    held = held_parameters(module)
    for parameter in module.parameters():
        if parameter not in held:
            name, *_ = parameter_names(module)[parameter]
            raise ConfigError(
                f"parameter {name} was put into the model after initialize, so it is not sharded and not trained: change the "
                "model (resize_token_embeddings, a new head, adapters) before initialize"
            )
    for parameter, names in parameter_names(module).items() if frozen else ():
        if parameter.requires_grad and names[0] in frozen:
            raise ConfigError(
                f"parameter {names[0]} was frozen when initialize was called, so it has no optimizer state and is not "
                "trained: unfreeze it before initialize, or set requires_grad to False again"
            )
