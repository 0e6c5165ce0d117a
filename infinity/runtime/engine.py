"""The engine: forward, backward, step, save and load, under the names that users of DeepSpeed know."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from infinity.checkpoint.commits import Part
from infinity.device import SetAside
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.fsdp2.coroutines import RandomState
from infinity.fsdp2.names import parameter_names
from infinity.fsdp2.running_statistics import mixtures_explained
from infinity.fsdp2.sharding import before_reductions, held_parameters, local_of, reduced_at_end, reshard, sharded_of
from infinity.fsdp2.vertical import MicroBatch
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks
from infinity.runtime.batch_parts import rows_of, split_alike, with_loss
from infinity.runtime.checkpoints import Checkpoints
from infinity.runtime.deepspeed_surface import DeepSpeedSurface
from infinity.runtime.engine_state import EngineState
from infinity.runtime.flops import FlopsProfile
from infinity.runtime.hyperparameters import Hyperparameters
from infinity.runtime.loss_scale import Scalar, factor_of, gradient_factor, make_loss_scale, scaled_norm
from infinity.runtime.lr_schedules import is_driven_by_metric
from infinity.runtime.micro_batches import (
    LossFn,
    MicroBatches,
    call_of,
    loss_in,
    loss_of_call,
    mean_over_ranks,
    streams,
)
from infinity.runtime.monitors import Monitors
from infinity.runtime.observe import EngineStats, StepMeter, StepProgress, WallClock
from infinity.runtime.parts import Parts
from infinity.runtime.pass_guard import Pass, PassGuard
from infinity.runtime.stages import Stages
from infinity.swap.health import Health
from infinity.swap.timeline import measured

log = logging.getLogger("infinity")


class Engine(DeepSpeedSurface):
    """Trains one model. Made by `infinity.initialize`.

    `engine(batch)` runs the model, `engine.backward(loss)` its backward pass, and `engine.step()` the optimizer after every
    `gradient_accumulation_steps` of them. `module` is the sharded model.
    """

    training_dataloader: Any = None

    def __init__(self, parts: Parts, on_close: Callable[[], None]) -> None:
        self.module = module = parts.module
        self.optimizer = parts.optimizer
        self.config = config = parts.resolved.config
        self.swap = parts.swap
        """The swap manager that holds the model; None if nothing is offloaded."""
        self.health = parts.health
        """Tells if the values are those of one step, and may be used."""
        self.activations = parts.activations
        """Offloads saved activations until their backward; None if they stay."""
        self.live = parts.live
        """Parameters that stay gathered between uses, or are gathered ahead; None below stage 3."""
        self.peers = parts.peers
        """The other ranks."""
        self.client_state: dict[str, Any] = {}
        """Your own plain values and tensors, such as the position in the data. With `infinity.durability`, the commit of each
        step has them as they are when `step` returns, and a resume restores them."""
        self.numel = sum(p.numel() for p in parts.ties.counted(module))
        """Parameters of the whole model."""
        if parts.grid.pipe is not None:
            self.numel = sum(from_all_ranks(self.numel, parts.grid.pipe))
        self.shard_numel = sum(local_of(p.data).numel() for p in module.parameters())
        """Parameters in this rank's shards."""
        self.step_stats: EngineStats | None = None
        """Measurements of the last optimizer step; None before the first."""
        self.monitor = Monitors()
        self.wall_clock = WallClock() if config.wall_clock_breakdown else None
        self.flops_profile: FlopsProfile | None = None
        if config.flops_profiler.enabled and dist.get_rank() == 0:
            self.flops_profile = FlopsProfile(module, config.flops_profiler, self.shard_numel)
        self._parts, self._storage, self._updater, self._vertical = parts, parts.storage, parts.updater, parts.vertical
        self._notes_at_start = parts.swap.notes if parts.swap is not None else []
        self._micro_batches = MicroBatches(parts)
        self._progress = StepProgress(config.batch.accumulation, keeps_losses=config.steps_per_print > 0)
        self._loss_scale = make_loss_scale(config.fp16)
        self._loss_scale.show_on(self.optimizer)
        self._grad_norm: Scalar | None = None
        self._buffers_aside = SetAside(())
        self._applied = False
        self._on_close = on_close
        self._closed = False
        self._frozen = {names[0] for p, names in parameter_names(module).items() if not p.requires_grad}
        self._guard = PassGuard(parts, self._progress)
        before_reductions(module, self._guard.check_backward)
        hyperparameters = Hyperparameters(self.optimizer, parts.lr_scheduler, config.infinity.resume_hyperparameters)
        self._state = EngineState(parts, self._loss_scale, hyperparameters, self._progress)
        self._checkpoints = Checkpoints(parts, self._state, self._guard)
        self._meter = StepMeter(self._storage.transferred)
        self._stages: Stages | None = None
        if parts.grid.pipe is not None:
            self._stages = Stages(parts, self.forward_pass, self._backward_in_stage, self._scaled)
        module.zero_grad = partial(_zero_grad_of, weakref.ref(self), weakref.ref(module))  # type: ignore[method-assign]
        _engines.add(self)

    # A micro-batch.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. With gradients, saved activations are offloaded as the config says.

        With `infinity.micro_batches`, a forward with gradients splits its batch along dimension 0, and runs the parts in the
        vertical schedule. It returns an output of the model's type that has the loss of the whole batch, and nothing else.

        Raises InfinityError for a stage of a PipelineModule, as `backward` and `step` do.
        """
        self._check_whole_model()
        if self.splits:
            with self._in_pass("a forward"):
                calls = split_alike(args, kwargs, self.config.infinity.micro_batches)
            if len(calls) > 1:
                return self._forward_in_parts(calls, summed=kwargs.get("num_items_in_batch") is not None)
        with self.forward_pass():
            return self.module(*args, **kwargs)

    @property
    def splits(self) -> bool:
        """True if a forward would split its batch now."""
        return torch.is_grad_enabled() and self.config.infinity.micro_batches > 1

    def loss_in_parts(
        self, compute: Callable[..., torch.Tensor], inputs: Mapping[str, Any], *, summed: bool
    ) -> torch.Tensor:
        """For trainers, with `infinity.micro_batches`: return the loss (a scalar) of a batch that is split as by `forward`.

        `compute(forward, **inputs)` is called for each part, calls `forward` once, and returns the part's loss. `summed`: True
        if each is a share of the whole loss; else the losses are averaged over the rows.
        """
        with self._in_pass("a forward"):
            calls = split_alike((), dict(inputs), self.config.infinity.micro_batches)
        loss: torch.Tensor = self._forward_in_parts([call._replace(around=compute) for call in calls], summed=summed)
        return loss

    def _forward_in_parts(self, calls: Sequence[MicroBatch], *, summed: bool) -> Any:
        outputs: list[Any] = []
        rows = [rows_of(call) for call in calls]

        def loss_of(part: int, output: Any) -> torch.Tensor:
            loss = loss_in(output).reshape(())
            if part == len(calls) - 1:
                outputs.append(output)
            elif part == 0:
                with_loss(output, loss.detach())  # raises before any backward
            if summed:
                return loss
            return loss / len(calls) if len({*rows}) == 1 else loss * (rows[part] / sum(rows))

        losses = self._losses_at_once(calls, streams(len(calls)), loss_of)
        assert losses is not None  # it raises instead
        with self._in_backward(1):
            loss = self._vertical.join(losses, self._scaled)
        self._guard.await_rest(awaited=self._vertical.awaits_rest)
        return with_loss(outputs[-1], loss)

    def _losses_at_once(
        self,
        calls: Sequence[MicroBatch],
        random: Sequence[RandomState],
        loss_of: Callable[[int, Any], torch.Tensor],
        functions: Sequence[Any] = (),
    ) -> Iterator[torch.Tensor] | None:
        """See `MicroBatches.losses_at_once`. In a step that the FLOPs profiler counts, all forwards end before the backward."""
        goes_back = self.flops_profile is None or not self.flops_profile.is_due(self.global_steps)
        return self._micro_batches.losses_at_once(
            self.forward_pass, calls, random, loss_of, functions=functions, goes_back=goes_back
        )

    @contextlib.contextmanager
    def forward_pass(self, *, micro_batches: int = 1) -> Iterator[None]:
        """Do what `forward` does around the model, for a loop that calls the model itself with this many micro-batches."""
        saves, routes, nothing = torch.is_grad_enabled(), self._parts.routes, contextlib.nullcontext
        in_16_bits = self._parts.resolved.compute_dtype is not torch.float32
        self._guard.begin_forward()
        with (
            self._in_pass("a forward" if saves else "a forward without gradients"),
            self._guard.around(Pass.FORWARD),
            self._timing("fwd", micro_batches),
            self.activations.saving() if saves and self.activations is not None else nothing(),
            routes.explained() if routes is not None else nothing(),
            mixtures_explained(self.module) if in_16_bits else nothing(),
        ):
            yield

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward pass of a micro-batch's loss (a scalar), divided by the number of accumulation steps unless
        `scale_wrt_gas` is False. Returns the divided loss.

        Gradients are reduced over the ranks and summed in fp32 (see `infinity.reduce_dtype`). With fp16 they are `cur_scale`
        times as large until `step`. Raises ConfigError if a parameter was unfrozen after `initialize`, which would not train
        it, or if `infinity.schedule` is "vertical", which requires `train_batch`.
        """
        self._check_whole_model()
        if self.config.infinity.schedule == "vertical" and self.config.micro_batches_at_once > 1:
            raise ConfigError(
                'infinity.schedule "vertical" runs all micro-batches of a step at once: call engine.train_batch(data_iter), or '
                'set it to "auto"'
            )

        def check() -> None:
            if loss.numel() != 1:
                raise ValueError(f"backward takes a scalar loss, got one of shape {tuple(loss.shape)}")
            if retain_graph and self._vertical.awaits_rest:
                raise InfinityError(
                    "a batch that is split (infinity.micro_batches) keeps no graph: leave retain_graph out"
                )

        divided = loss / self._progress.accumulation if scale_wrt_gas else loss
        self._backward(1, iter([divided]), partial(_backward_from, retain_graph=retain_graph), check)
        return divided

    def _backward(
        self,
        count: int,
        losses: Iterator[torch.Tensor],
        run: Callable[[Iterator[torch.Tensor]], None],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Run the backward of `count` micro-batches: `run` takes their divided losses, scaled. `check` runs first, inside
        the pass, so that its error reaches all ranks."""
        divided: list[torch.Tensor] = []

        def scaled() -> Iterator[torch.Tensor]:
            for loss in losses:
                divided.append(loss.detach())
                yield reduced_at_end(self.module, self._scaled(loss))
                del loss  # frees its graph before the next one exists

        with self._in_backward(count, check):
            run(scaled())
            self._vertical.end()
            self._progress.end_backward(divided)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.float() * self._loss_scale.scale if self._loss_scale.may_overflow else loss

    @contextlib.contextmanager
    def _in_backward(self, count: int, check: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Run the block as the backward of `count` micro-batches, after `check`."""
        with self._in_pass("a backward"), self._timing("bwd"):
            check()
            self._check_trains()
            _check_none_unfrozen(self.module, self._frozen)
            self._guard.settle()
            if self._vertical.awaits_rest:
                self._guard.await_rest(awaited=False)
            self._guard.check_gradients_whole()
            last = self._progress.ends_a_step(self._progress.micro_steps + count)
            if self.live is not None:
                self.live.begin_backward(last=last)
            self._updater.expect(factor_of(self._loss_scale.scale) if last else None)
            with self._guard.around(Pass.BACKWARD):
                if self._parts.resolved.updates_in_backward:
                    self._parts.commits.make()
                try:
                    yield
                except BaseException:
                    self._vertical.abandon()
                    raise

    @contextlib.contextmanager
    def _backward_in_stage(self, last: bool) -> Iterator[None]:
        """Run the block as the backward of one micro-batch of a stage, the `last` one of a step or not."""
        self._progress.boundary = last
        with self._in_backward(1):
            yield
            self._progress.end_backward((), 1)

    def _check_whole_model(self) -> None:
        if self._stages is not None:
            raise InfinityError(
                "the model is a stage of a PipelineModule, which can't make a pass without the other stages: call "
                "engine.train_batch(data_iter) for whole steps, and engine.eval_batch(data_iter)"
            )

    def _check_trains(self) -> None:
        if not self._parts.resolved.trains:
            raise ConfigError(
                'there is no optimizer to train with: name one in the config, such as "optimizer": {"type": "AdamW", "params": '
                '{"lr": 1e-4}}, or pass optimizer= to initialize'
            )

    # A whole step.

    def train_batch(self, data_iter: Iterator[Any] | None = None, *, loss_fn: LossFn | None = None) -> torch.Tensor:
        """Train one step: forward and backward of `gradient_accumulation_steps` micro-batches, then `step`.

        `data_iter`: gives the micro-batches; None takes those of the data loader that `initialize` made, epoch after epoch. The
        model is called with a micro-batch: a mapping is its keyword arguments, a tuple or list its arguments. It returns the
        loss, or an output that has it as `.loss`, under "loss" or first. With a `loss_fn` (or that of a PipelineModule), a
        micro-batch is (inputs, labels), and the loss is loss_fn(outputs, labels).

        `infinity.schedule` sets the order in which micro-batches pass through groups; the numbers are the same. Each
        micro-batch has its own random stream, seeded from the CPU's generator: dropout differs from that of a loop over
        forward and backward.

        With stages of a PipelineModule, all stages take the same micro-batches, of one shape, in torch's 1F1B schedule.

        Returns the mean loss (0-D, fp32) over the micro-batches and ranks. Raises StopIteration at the end of the data, before
        anything changes; InfinityError in the middle of a step; ConfigError if `infinity.schedule` is "vertical" and the
        model's micro-batches can't take turns.
        """
        self.health.check_awake()
        if self._progress.is_in_step:
            raise InfinityError(
                "train_batch takes a whole step, and this one has begun: call step() or zero_grad() first"
            )
        loss_fn = self._micro_batches.loss_fn_or(loss_fn)
        batches = self._micro_batches.take(data_iter, self.training_dataloader)
        if loss_fn is not None and self.splits:
            raise ConfigError(
                "train_batch with a loss_fn takes gradient_accumulation_steps micro-batches: set that, and "
                "infinity.micro_batches to 1"
            )
        if self._stages is not None:
            return self._train_in_stages(self._stages, batches, loss_fn)
        random, losses, began = streams(len(batches)), [], time.perf_counter()

        def divided(computed: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
            for loss in computed:
                losses.append(loss.detach())
                yield loss / len(batches)
                del loss

        try:
            while len(losses) < len(batches):
                count = self._micro_batches.at_once
                some = slice(len(losses), len(losses) + count)
                computed = None
                if count > 1:
                    calls = [call_of(batch, loss_fn) for batch in batches[some]]
                    loss_of = partial(_loss_of, batches[some], loss_fn)
                    computed = self._losses_at_once(calls, random[some], loss_of, functions=[loss_fn])
                if computed is not None:
                    self._progress.boundary = some.stop == len(batches)
                    self._backward(count, divided(computed), self._vertical.backward)
                    continue
                for batch, stream in zip(batches[some], random[some], strict=True):
                    with stream.within():
                        loss = loss_of_call(self.forward, batch, loss_fn)
                    self._progress.boundary = len(losses) + 1 == len(batches)
                    self._backward(1, divided([loss]), _backward_from)
                    del loss
            self.step()
            self._micro_batches.end_step(time.perf_counter() - began)
        finally:
            self._progress.boundary = None
        return mean_over_ranks(losses)

    def _train_in_stages(self, stages: Stages, batches: Sequence[Any], loss_fn: LossFn | None) -> torch.Tensor:
        self._check_trains()
        with self._in_pass("a train_batch"):
            try:
                losses = stages.losses(batches, loss_fn)
                self._parts.ties.sum_gradients()
                self._progress.end_backward([loss / len(losses) for loss in losses], 0)
                self._step()
            finally:
                self._progress.boundary = None
        return mean_over_ranks(losses, self._parts.grid.data.get_group())

    def eval_batch(self, data_iter: Iterator[Any], *, loss_fn: LossFn | None = None) -> torch.Tensor:
        """Return the mean loss (0-D, fp32) of as many micro-batches as `train_batch` takes, without gradients and in
        evaluation mode."""
        self.health.check_awake()
        loss_fn = self._micro_batches.loss_fn_or(loss_fn)
        batches, trains = self._micro_batches.take(data_iter, self.training_dataloader), self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                if self._stages is not None:
                    with self._in_pass("an eval_batch"):
                        losses = self._stages.losses(batches, loss_fn)
                    return mean_over_ranks(losses, self._parts.grid.data.get_group())
                losses = [loss_of_call(self.forward, batch, loss_fn) for batch in batches]
        finally:
            self.module.train(trains)
        return mean_over_ranks(losses)

    def step(self) -> None:
        """At an accumulation boundary, clip, step optimizer and schedule, and clear the gradients; else do nothing.

        With fp16, an inf or NaN in a gradient of any rank skips the step: optimizer and schedule stay as they are, the log
        says so, `skipped_steps` counts it, and `optimizer.overflow` is True until the next step. A schedule that a metric
        drives (ReduceLROnPlateau) is not stepped: call `lr_scheduler.step(metric)` yourself, before the next backward.
        """
        self._check_whole_model()
        self._step()

    def _step(self) -> None:
        with self._in_pass("a step"), self._timing("step"):
            self._check_trains()
            if not self._progress.ends_a_step(self._progress.micro_steps):
                return
            self._guard.settle()
            self.health.check_not_torn()
            self._guard.check_gradients_whole()
            with self._guard.around(Pass.STEP), self._parts.paging.alone():
                self._parts.commits.check_storable(self.client_state)
                self._parts.commits.make()
                self._checkpoints.finish_if_copied()
                reshard(
                    self.module
                )  # groups that an evaluation left gathered would become stale, and hide the gradients
                with measured(self._storage.timeline, "gradients", "norm of the gradients"):
                    self._grad_norm, factor = gradient_factor(
                        scaled_norm(
                            self._parts.ties.counted(self.module), self._updater.take_gradients(), self._parts.grid.pipe
                        ),
                        loss_scale=self._loss_scale.scale,
                        clipping=self.config.gradient_clipping,
                        may_overflow=self._loss_scale.may_overflow,
                        known_on_host=self._parts.resolved.paging is not None,
                    )
                if factor is None:
                    self._loss_scale.check_overflow()
                else:
                    self._updater.prepare(factor)
                with self.health.change("an optimizer step"):
                    failure = self._change_values(factor)
            if self.activations is not None:
                self.activations.end_step()
            self._note_commit()
            self._report_step()
            if failure is not None:
                raise failure

    def _change_values(self, factor: Any) -> Exception | None:
        """Change everything that a step changes, with the gradients multiplied by `factor`; None skips the step. Returns
        what the schedule raised: the values are those of the step, as in a loop that steps both."""
        overflow, failure = factor is None, None
        self._applied = not overflow
        if self._loss_scale.may_overflow:
            warning = self._loss_scale.update(overflow=overflow)
            if warning and dist.get_rank() == 0:
                log.warning(warning)
            self._progress.skipped_steps += overflow
            self._loss_scale.show_on(self.optimizer, overflow=overflow)
        if overflow:
            self._updater.skip()
        else:
            self._updater.step(grad_scale=factor)
            lr_scheduler = self._parts.lr_scheduler
            if lr_scheduler is not None and not is_driven_by_metric(lr_scheduler):
                try:
                    lr_scheduler.step()
                except Exception as error:
                    failure = error
        self._guard.drop_gradients()
        self._progress.end_step()
        return failure

    def _report_step(self) -> None:
        if self.step_stats is None and self.swap is not None and dist.get_rank() == 0:
            for note in self.swap.notes:  # new ones since the pool became resident
                if note not in self._notes_at_start:
                    log.info(note)
        self.step_stats = self._meter.end_step()
        every = self.config.steps_per_print
        if every and self._progress.global_steps % every == 0:
            skipped = f", {self.skipped_steps} skipped" if self.skipped_steps else ""
            losses = self._progress.step_losses
            loss = f", loss {sum(map(float, losses)):.4f}" if losses else ""
            seconds = self.step_stats.seconds
            log.info("step %d%s%s, lr %s, %.3f s", self.global_steps, skipped, loss, self.get_lr(), seconds)
        if self.monitor.is_writing:
            self.monitor.write_events(self._events(self.step_stats))

    def report_to(self, monitors: Monitors) -> None:
        """For `initialize`: write the events of every step to these monitors until `close`."""
        self.monitor = monitors
        self._progress.keeps_losses |= monitors.is_writing

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `step` does by itself. The current step begins again with its first micro-batch.

        Raises InfinityError if the backward has applied them already (`infinity.update`), or left torn values.
        """
        self._guard.zero_grad(set_to_none)

    # Around them.

    @contextlib.contextmanager
    def _in_pass(self, name: str, *, last: bool = False, asleep: bool = False) -> Iterator[None]:
        with self._guard.entered(asleep=asleep), self.peers.in_pass(name, self._guard.standing, last=last):
            yield

    @contextlib.contextmanager
    def _timing(self, part: Literal["fwd", "bwd", "step"], micro_batches: int = 1) -> Iterator[None]:
        """Measure the block as `part` for every report that is enabled; write the reports when a step ends."""
        steps, clock, profile = self._progress.global_steps, self.wall_clock, self.flops_profile
        with (
            measured(self._storage.timeline, "step", {"fwd": "forward", "bwd": "backward", "step": "step"}[part]),
            clock.measure(part) if clock is not None else contextlib.nullcontext(),
            profile.measure(part, steps, micro_batches) if profile is not None else contextlib.nullcontext(),
        ):
            yield
        stepped = self._progress.global_steps > steps
        if clock is not None and part == "step":
            clock.report(stepped=stepped)
        if profile is not None and stepped and profile.report(self.config.batch):
            self.flops_profile = None

    # Commits and checkpoints.

    def commit(self, client_state: dict[str, Any] | None = None) -> None:
        """Commit now instead of when the next step begins, with all changes since the last step. A collective.

        `client_state`: becomes `engine.client_state`. Raises ConfigError without `infinity.durability` "step"; CheckpointError
        between a `backward` and its `step`, if `client_state` can't be stored, or if a run could not resume from the commit;
        and the error of a failed write. If one rank fails, all raise, and the previous commit stays.
        """
        with self._in_pass("a commit"):
            if self._parts.resolved.run_name is None:
                raise ConfigError('commit() needs infinity.durability "step" in the config')
            self.peers.check()
            with raise_on_all_ranks():
                self._guard.check_between_steps()
            before, self.client_state = self.client_state, self.client_state if client_state is None else client_state
            try:
                self._note_commit()
            except BaseException:
                self.client_state = before
                raise
            self._parts.commits.make()

    def _note_commit(self) -> None:
        state = self._state
        unpaged_state = partial(state.capture_unpaged, self.client_state)
        late: dict[Part, Any] = {"settings": state.capture_settings, "buffers": state.capture_buffers}
        self._parts.commits.note(self._progress.global_steps, state.training, unpaged_state, late)

    def resume(self, unpaged_state: dict[str, Any]) -> None:
        """For `initialize`: restore a commit's state outside the arena. Raises CheckpointError if it is of another training."""
        self._state.restore_unpaged(unpaged_state)
        self._state.restore_training(unpaged_state)
        self.client_state = unpaged_state["client_state"]

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        format: str | None = None,
    ) -> bool:
        """Write a checkpoint to `save_dir/tag` (default tag: global_stepN), from which training can resume. A collective.

        `client_state`: a dict of plain values and tensors of your own. `format`: "dcp" or "arena", instead of the config's
        `infinity.checkpoint_format`. With "arena" it returns when copying has begun. A later `step`, save or load,
        `finish_checkpoint` or `close` completes the checkpoint, and raises its errors.

        Raises CheckpointError, also between a `backward` and its `step`, because gradients are not stored; an earlier
        checkpoint stays. Raises ConfigError for "arena" if nothing is offloaded. `save_latest` and
        `exclude_frozen_parameters` are accepted: "latest" is always written, and frozen parameters are always stored.
        """
        if save_dir is None:
            raise CheckpointError("save_checkpoint got no folder to save to (save_dir is None)")
        with self._in_pass("a save_checkpoint"):
            self._checkpoints.save(save_dir, tag or f"global_step{self.global_steps}", client_state or {}, format)
            return True

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that `save_checkpoint` started is complete, if there is one. A collective.

        Raises CheckpointError on all ranks if it failed on one; the previous checkpoint stays.
        """
        with self._in_pass("a finish_checkpoint"):
            self._checkpoints.finish()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        verify: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resume from a checkpoint (default: the latest in `load_dir`), written by any number of ranks. A collective.

        `verify`: compare the hash of every file with the one taken when it was written, which reads all files once more.

        Returns its folder and the client_state; (None, {}), with a warning, if no tag is named and `load_dir` holds none.
        Raises CheckpointError if it is damaged or of another model; ConfigError for a load without optimizer state. The model
        must match in every name.
        """
        with self._in_pass("a load_checkpoint"):
            if load_module_only or not load_optimizer_states:
                raise ConfigError(
                    "load_checkpoint loads the model with its optimizer state: for weights alone, save_16bit_model writes "
                    "files that initialize(weights=...) reads"
                )
            loaded = self._checkpoints.load(load_dir, tag, schedule=load_lr_scheduler_states, verify=verify)
            if self._parts.resolved.run_name is not None and loaded[0] is not None:
                self.commit(loaded[1])
            return loaded

    # Memory for others.

    def sleep(self, level: int = 1) -> None:
        """Between two steps, free memory until `wake`, for a rollout or an evaluation by others. A collective.

        `level` 1 frees device memory; if nothing is offloaded, parameters and optimizer state move to host memory. 2 also
        frees pinned host memory, except for data that has no place on NVMe.

        Training continues bit for bit. Until `wake`, every call that needs the model raises InfinityError. Raises
        InfinityError in the middle of a step, ConfigError for level 2 if nothing is offloaded.
        """
        if level not in (1, 2):
            raise ConfigError(f"sleep takes level 1 (the device) or 2 (pinned host memory, too), got {level!r}")
        with self._in_pass("a sleep"):
            with raise_on_all_ranks():
                self._guard.check_may_sleep()
            self._checkpoints.finish()
            self._parts.commits.make()
            reshard(self.module)
            try:
                with raise_on_all_ranks():
                    if self.activations is not None:
                        self.activations.trim()
                    self._storage.sleep(pinned=level == 2)
                    buffers = self.module.buffers()
                    self._buffers_aside = SetAside(buffer for buffer in buffers if buffer.device.type != "cpu")
            except BaseException:
                self._buffers_aside.put_back()
                self._storage.wake()
                raise
            self.health.sleep()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take back the memory that `sleep` freed; do nothing if the engine is awake. A collective.

        Raises MemoryError or torch's OutOfMemoryError if others hold it; the engine is still asleep then.
        """
        with self._in_pass("a wake", asleep=True):
            if self.health.state is not Health.ASLEEP:
                return
            with raise_on_all_ranks():
                self._buffers_aside.put_back()
                self._storage.wake()
            self.health.wake()
            self.restart_clock()

    def offload_states(
        self, include: Any = None, device: str = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """DeepSpeed's name for `sleep(1)`, or `sleep(2)` if `device` is "nvme". All states move; `include` is ignored."""
        self.sleep(2 if getattr(device, "value", device) == "nvme" else 1)

    def reload_states(self, non_blocking: bool = False) -> None:
        """DeepSpeed's name for `wake`."""
        self.wake()

    # The end.

    def close(self) -> None:
        """Wait for transfers in flight, free memory and drive space, and commit the last step of a durable run. Idempotent.

        A collective for a durable run or an unfinished checkpoint. While an error is being handled, or after a pass failed
        on one rank, it commits nothing and completes the checkpoint without the other ranks, which may have left; the log says
        if that succeeded. Raises InfinityError if another thread is in the middle of a step; the engine stays open then.
        """
        if self._closed:
            return
        with contextlib.ExitStack() as last:  # runs all of these, last first, even if one raises
            last.enter_context(self._guard.entered(asleep=True))
            self.health.wake()  # the rest needs no memory
            self._closed = True
            last.callback(self.monitor.close)  # may wait for a network
            last.callback(self._on_close)
            last.callback(self._storage.close)
            if self.activations is not None:
                last.callback(self.activations.close)
            last.callback(self._checkpoints.finish_alone)
            last.callback(self.peers.close)
            if sys.exc_info()[0] is not None:
                self.peers.leave("a close after an error", self._guard.standing)
            elif not self.peers.parted:
                with self._in_pass("a close", last=True):
                    self._parts.commits.make()
                    self.finish_checkpoint()
                if self.flops_profile is not None:
                    self.flops_profile.warn_unused(self.global_steps)

    destroy = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def engine_of(parameter: nn.Parameter) -> tuple[Engine, nn.Parameter] | None:
    """Return the engine that trains a model with this parameter, and its sharded master, or None. Frees gathered groups."""
    for engine in _engines:
        if (sharded := sharded_of(engine.module, parameter)) is not None:
            engine.empty_partition_cache()
            return engine, sharded
    return None


def _zero_grad_of(engine: weakref.ref[Engine], module: weakref.ref[nn.Module], set_to_none: bool = True) -> None:
    """The `zero_grad` of a module that an engine trains or has trained."""
    alive, trained = engine(), module()
    if alive is not None:
        alive.zero_grad(set_to_none)
    elif trained is not None:
        type(trained).zero_grad(trained, set_to_none)


def _loss_of(batches: Sequence[Any], loss_fn: LossFn | None, number: int, output: Any) -> torch.Tensor:
    return loss_in(output, batches[number], loss_fn)


def _backward_from(losses: Iterator[torch.Tensor], *, retain_graph: bool = False) -> None:
    torch.autograd.backward([*losses], retain_graph=retain_graph)


def _check_none_unfrozen(module: nn.Module, frozen: set[str]) -> None:
    """Raise ConfigError if a parameter of `frozen` requires a gradient now, or if a new parameter is not sharded."""
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
