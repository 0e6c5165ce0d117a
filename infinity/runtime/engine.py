"""The engine: forward, backward, step, save and load, under the names that users of DeepSpeed know."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from infinity.activations.saved_tensors import Activations
from infinity.checkpoint.commits import Part
from infinity.errors import ConfigError
from infinity.fsdp2.live import LiveParameters
from infinity.fsdp2.names import parameter_names
from infinity.fsdp2.routes import Routes
from infinity.fsdp2.sharding import before_reductions, local_of, reshard
from infinity.fsdp2.vertical import Vertical
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.ranks.peers import Peers
from infinity.runtime.checkpoints import Checkpoints
from infinity.runtime.engine_state import EngineState
from infinity.runtime.flops import FlopsProfile
from infinity.runtime.gradient_norm import Scalar, gradient_factor, scaled_norm
from infinity.runtime.hyperparameters import Hyperparameters
from infinity.runtime.in_memory import AnyCommits, Storage, Updater
from infinity.runtime.loss_scale import make_loss_scale
from infinity.runtime.monitors import Monitors
from infinity.runtime.observe import EngineStats, StepMeter, StepProgress, WallClock
from infinity.runtime.pass_guard import Pass, PassGuard
from infinity.runtime.passes import Passes
from infinity.runtime.resolved import Resolved
from infinity.swap import SwapManager
from infinity.swap.timeline import measured

log = logging.getLogger("infinity")


class Engine(Passes):
    """Trains one model. Made by `infinity.initialize`.

    `engine(batch)` runs the model, `engine.backward(loss)` its backward pass, `engine.step()` the optimizer after every
    `gradient_accumulation_steps` of them. `module` is the sharded model, `optimizer` and `lr_scheduler` are what they say.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        training_dataloader: Any,
        resolved: Resolved,
        swap: SwapManager | None,
        storage: Storage,
        updater: Updater,
        commits: AnyCommits,
        live: LiveParameters | None,
        activations: Activations | None,
        routes: Routes | None,
        vertical: Vertical,
        peers: Peers,
        on_close: Callable[[], None],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.training_dataloader = training_dataloader
        self.config = config = resolved.config
        self._resolved = resolved
        self.swap = swap
        """The swap manager that holds the model; None where nothing rests on NVMe."""
        self._notes_at_start = swap.notes if swap is not None else []
        self._storage, self._updater, self._commits = storage, updater, commits
        self._paging = paging = storage.paging
        self.health = paging.paged.health
        """Whether the values are those of one step, and may be used."""
        self.activations = activations
        """What keeps saved activations elsewhere until their backward; None where they stay."""
        self.live = live
        """What stays gathered between uses, and what is gathered ahead; None below stage 3."""
        self._routes, self._vertical = routes, vertical
        self.peers = peers
        """The other ranks, and whether they still work together."""
        self.client_state: dict[str, Any] = {}
        """Plain values and tensors of your own, such as the position in the data, that go into the commit of each step (with
        `infinity.durability`) as they are when `step` returns; after a resume, what they were."""
        self.numel = sum(p.numel() for p in module.parameters())
        """Parameters of the whole model."""
        self.shard_numel = sum(local_of(p.data).numel() for p in module.parameters())
        """Those of this rank's shards."""
        self.step_stats: EngineStats | None = None
        """What the last optimizer step took; None before the first."""
        self.monitor = Monitors()
        self.wall_clock = WallClock() if config.wall_clock_breakdown else None
        self.flops_profile: FlopsProfile | None = None
        if config.flops_profiler.enabled and dist.get_rank() == 0:
            self.flops_profile = FlopsProfile(module, config.flops_profiler, config.batch, self.shard_numel)
        self._progress = StepProgress(config.batch.accumulation, keeps_losses=config.steps_per_print > 0)
        self._loss_scale = make_loss_scale(config.fp16)
        self._loss_scale.show_on(optimizer)
        self._grad_norm: Scalar | None = None
        self._applied = False
        self._on_close = on_close
        self._closed = False
        self._frozen = {names[0] for p, names in parameter_names(module).items() if not p.requires_grad}
        self._guard = PassGuard(
            module, optimizer, self.health, paging, updater, commits, activations, routes, self._progress
        )
        before_reductions(module, self._guard.check_backward)
        hyperparameters = Hyperparameters(optimizer, lr_scheduler, config.infinity.resume_hyperparameters)
        self._state = EngineState(
            module, optimizer, lr_scheduler, self._loss_scale, hyperparameters, paging, updater, self._progress
        )
        self._checkpoints = Checkpoints(
            module, optimizer, swap, updater, commits, self._state, self._guard, peers, resolved
        )
        self._meter = StepMeter(storage.stats)
        module.zero_grad = partial(_zero_grad_of, weakref.ref(self), weakref.ref(module))  # type: ignore[method-assign]

    # A step.

    def step(self) -> None:
        """At an accumulation boundary: clip, step the optimizer and the schedule, clear the gradients. Else nothing.

        With fp16, a gradient that holds an inf or NaN on any rank leaves optimizer and schedule as they are, is said once, and
        counts in `skipped_steps`; `optimizer.overflow` says whether the last step was such a one.
        A ReduceLROnPlateau is not stepped, as it wants your metric: call `lr_scheduler.step(metric)` when you have one, before
        the next backward.
        """
        with self._in_pass("a step"), self._timing("step"):
            self._check_trains()
            if not self.is_gradient_accumulation_boundary():
                return
            self._guard.settle()
            self.health.check_not_torn()
            self._guard.check_gradients_whole()
            with self._guard.around(Pass.STEP), self._paging.alone():
                self._commits.check_storable(self.client_state)
                self._commits.make()
                self._checkpoints.finish_if_copied()
                reshard(self.module)  # what an evaluation left would be stale after the step, and hides the gradients
                with measured(self.timeline, "gradients", "norm of the gradients"):
                    factor = self._gradient_factor()
                if factor is not None:
                    self._updater.prepare(factor)
                with self.health.change("an optimizer step"):
                    self._change_values(factor)
            if self.activations is not None:
                self.activations.end_step()
            self._note_commit()
            self._report_step()

    def _gradient_factor(self) -> Any:
        """See `gradient_factor`; notes the norm."""
        self._grad_norm, factor = gradient_factor(
            scaled_norm(self.module.parameters(), self._updater.take_gradients()),
            loss_scale=self.cur_scale,
            clipping=self.gradient_clipping(),
            may_overflow=self._loss_scale.may_overflow,
            known_on_host=self._resolved.paging is not None,
        )
        return factor

    def _change_values(self, factor: Any) -> None:
        """All that a step changes, with the gradients multiplied by `factor` (None: they overflowed, nothing is updated)."""
        self._applied = factor is not None
        if self._loss_scale.may_overflow:
            self._note_overflow(factor is None)
        if factor is not None:
            self._updater.step(grad_scale=factor)
            if self.lr_scheduler is not None and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step()
        else:
            self._updater.skip()
        self._guard.drop_gradients()
        self._progress.end_step()

    def _note_overflow(self, overflow: bool) -> None:
        """Whether the step is skipped: the loss scale hears of it, and so do those who ask the optimizer."""
        warning = self._loss_scale.update(overflow=overflow)
        if warning and dist.get_rank() == 0:
            log.warning(warning)
        self._progress.skipped_steps += overflow
        self._loss_scale.show_on(self.optimizer, overflow=overflow)

    def _report_step(self) -> None:
        if self.step_stats is None and self.swap is not None and dist.get_rank() == 0:
            for note in self.swap.notes:  # the pool became present meanwhile
                if note not in self._notes_at_start:
                    log.info(note)
        self.step_stats = self._meter.end_step()
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            skipped = f", {self.skipped_steps} skipped" if self.skipped_steps else ""
            losses = self._progress.step_losses  # of this rank
            loss = f", loss {sum(map(float, losses)):.4f}" if losses else ""
            seconds = self.step_stats.seconds
            log.info("step %d%s%s, lr %s, %.3f s", self.global_steps, skipped, loss, self.get_lr(), seconds)
        if self.monitor.is_writing:
            self.monitor.write_events(self._events(self.step_stats))

    def report_to(self, monitors: Monitors) -> None:
        """For `initialize`: write every step to these from now on, until `close`."""
        self.monitor = monitors
        self._progress.keeps_losses |= monitors.is_writing

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; `step` does so by itself. The step begins anew with its first micro-batch.

        Raises InfinityError where the backward applied them already (`infinity.update`), or tore the values.
        """
        self._guard.zero_grad(set_to_none)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so yourself, until the next step.

        Raises ConfigError for False where gradients are applied in the backward (`infinity.update`).
        """
        paging = self._resolved.paging
        if not is_boundary and paging is not None and not paging.all_gradients_wait:
            raise ConfigError(
                'gradients that are accumulated can\'t be applied in the backward: set infinity.update to "forward", or '
                "gradient_accumulation_steps"
            )
        self._progress.boundary = is_boundary

    # Commits and checkpoints.

    def commit(self, client_state: dict[str, Any] | None = None) -> None:
        """Commit now, with all that was done since the last step, instead of when the next step begins. A collective.

        `client_state`: becomes `engine.client_state`. Raises ConfigError without `infinity.durability` "step", CheckpointError
        between a `backward` and its `step`, where something of `client_state` can't be stored, and where what is to be
        committed couldn't be gone on from; and what a failing write raises. On all ranks when on one; the commit before stays.
        """
        with self._in_pass("a commit"):
            if self._resolved.run_name is None:
                raise ConfigError(
                    'commit() needs infinity.durability "step" in the config: else nothing of a run stays'
                )
            self.peers.check()
            with raise_on_all_ranks():
                self._guard.check_between_steps()
                self._guard.check_whole()
            before, self.client_state = self.client_state, self.client_state if client_state is None else client_state
            try:
                self._note_commit()
            except BaseException:
                self.client_state = before
                raise
            self._commits.make()

    def _note_commit(self) -> None:
        state = self._state
        unpaged_state = partial(state.capture_unpaged, self.client_state)
        late: dict[Part, Any] = {"settings": state.capture_settings, "buffers": state.capture_buffers}
        self._commits.note(self.global_steps, state.training, unpaged_state, late)

    def resume(self, unpaged_state: dict[str, Any]) -> None:
        """For `initialize`: set what a commit kept beside the arena. Raises CheckpointError where it is of another training."""
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
        """Write everything needed to go on to `save_dir/tag` (default tag: global_stepN). A collective.

        `client_state`: a dict of plain values and tensors of your own. `format`: "dcp" or "arena", instead of the config's
        `infinity.checkpoint_format`. With "arena" it returns when the copying has begun, and the checkpoint gets its name in a
        later `step`, or when the next save or load, `finish_checkpoint` or `close` has waited for it; those raise what failed.

        Raises CheckpointError, also between a `backward` and its `step`, as gradients are not stored; an earlier checkpoint
        stays. ConfigError for "arena" where nothing rests on NVMe. `save_latest` and `exclude_frozen_parameters` are accepted:
        the latest is always named, and frozen parameters are always stored.
        """
        with self._in_pass("a save_checkpoint"):
            self._checkpoints.save(save_dir, tag or f"global_step{self.global_steps}", client_state or {}, format)
            return True

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that `save_checkpoint` began to write is there, if one is on its way. A collective.

        Raises CheckpointError on all ranks where that failed on one; the checkpoint before stays then.
        """
        with self._guard.entered():
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
        """Go on from a checkpoint (default: the latest in `load_dir`), written by any number of ranks. A collective.

        `verify`: hold every file to the hash that was taken when it was written, which reads all of them once more.

        Returns its folder and the client_state. Raises CheckpointError when there is none or it is of another model. The model
        always fits strictly, and comes with the optimizer's state: what else is asked for is refused with ConfigError.
        """
        with self._in_pass("a load_checkpoint"):
            if load_module_only or not load_optimizer_states:
                raise ConfigError(
                    "load_checkpoint loads the model with its optimizer state: for weights alone, save_16bit_model writes "
                    "files that initialize(weights=...) reads"
                )
            loaded = self._checkpoints.load(load_dir, tag, schedule=load_lr_scheduler_states, verify=verify)
            if self._resolved.run_name is not None:
                self.commit(loaded[1])
            return loaded

    # The end.

    def close(self) -> None:
        """Wait for what is in flight and give memory and drive space back; commit the last step of a durable run. Idempotent.

        A collective then, and where a checkpoint is on its way; but while an error is being handled, or when a pass has failed
        on one rank, nothing is committed, and that checkpoint is finished without the other ranks, which may be elsewhere: the
        log tells whether it could be. Raises InfinityError if another thread is in the middle of a step; all stays open then.
        """
        if self._closed:
            return
        with contextlib.ExitStack() as last:  # each of these runs, whatever those after it in this list raise
            last.enter_context(self._guard.entered())
            self._closed = True
            last.callback(self.monitor.close)  # last, as it may wait for a network
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
                    self._commits.make()
                    self.finish_checkpoint()
                if self.flops_profile is not None:
                    self.flops_profile.tell_unused(self.global_steps)

    destroy = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _zero_grad_of(engine: weakref.ref[Engine], module: weakref.ref[nn.Module], set_to_none: bool = True) -> None:
    """`zero_grad` of a module that an engine trains, or trained."""
    alive, trained = engine(), module()
    if alive is not None:
        alive.zero_grad(set_to_none)
    elif trained is not None:
        type(trained).zero_grad(trained, set_to_none)
