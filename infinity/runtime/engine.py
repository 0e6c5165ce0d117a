"""Floor 11. The engine: forward, backward, step, save and load, under the names that users of DeepSpeed know."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from infinity.activations.saved_tensors import Activations
from infinity.checkpoint import arena as checkpoint_arena
from infinity.checkpoint import dcp as checkpoint
from infinity.checkpoint.commits import Commits, Training, check_unpaged_state
from infinity.checkpoint.draft import find
from infinity.checkpoint.stored_arena import is_arena_checkpoint
from infinity.config import Config
from infinity.errors import CheckpointError, ConfigError, InfinityError, in_words
from infinity.fsdp2.live import LiveParameters
from infinity.fsdp2.materialize import named_full_tensors
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.routes import Routes
from infinity.fsdp2.sharding import abandon_unfinished_pass, in_backward, reshard
from infinity.plan.lower_bound import step_lower_bound_seconds
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.ranks.peers import Peers, as_pass
from infinity.runtime.flops import make_flops_profile
from infinity.runtime.hyperparameters import Hyperparameters
from infinity.runtime.loss_scale import make_loss_scale
from infinity.runtime.timing import timed, timing
from infinity.runtime.wall_clock import WallClock
from infinity.swap import PagedOptimizer, SwapManager, SwapStats, TraceSummary
from infinity.swap.health import Health, ModelHealth
from infinity.swap.taken_gradient import TakenGradient
from infinity.swap.timeline import Timeline, measured

log = logging.getLogger("infinity")

_FORWARD, _BACKWARD, _STEP = "a forward", "a backward", "a step"


@dataclass(frozen=True)
class EngineStats:
    """What the last step took: seconds from the end of the step before it, bytes to and from NVMe, and waiting.

    stall_seconds: time the training thread stood waiting for NVMe.
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    stall_seconds: float


class Engine:
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
        config: Config,
        swap: SwapManager | None,
        live: LiveParameters | None,
        activations: Activations | None,
        routes: Routes | None,
        commits: Commits | None,
        peers: Peers,
        compute_dtype: torch.dtype,
        on_close: Callable[[], None],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.config = config
        self.swap = swap
        self.activations = activations
        """What keeps saved activations elsewhere until their backward; None where they stay."""
        self.live = live
        """What stays gathered between uses, and what is gathered ahead; None below stage 3."""
        self.client_state: dict[str, Any] = {}
        """Plain values and tensors of your own, such as the position in the data, that go into the commit of each step (with
        `infinity.durability`) as they are when `step` returns; after a resume, what they were."""
        self._routes = routes
        self._commits = commits
        self.peers = peers
        """The other ranks, and whether they still work together."""
        self._saving: checkpoint_arena.Saving | None = None
        """The checkpoint that is being written while training goes on."""
        self.numel = sum(p.numel() for p in module.parameters())
        """Parameters of the whole model."""
        self.shard_numel = sum(_local(p).numel() for p in module.parameters())
        """Those of this rank's shards."""
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        """Steps in which nothing was updated because an fp16 gradient overflowed; counted in `global_steps` too."""
        self.step_stats: EngineStats | None = None
        """What the last optimizer step took; None before the first."""
        self._compute_dtype = compute_dtype
        self.wall_clock = WallClock() if config.wall_clock_breakdown else None
        self.flops_profile = make_flops_profile(module, config.flops_profiler, config.batch, self.shard_numel)
        self._loss_scale = make_loss_scale(config.fp16)
        self.health = swap.paged.health if swap is not None else ModelHealth()
        """Whether the values are those of one step, and may be used."""
        self._under_way: str | None = None
        """The pass that is going on, or that never ended."""
        self._partial: str | None = None
        """What ended a backward half-way, so that the gradients are of a part of the model, until they are dropped."""
        self._micro_steps_before = 0
        """`micro_steps` when the last step ended."""
        self._on_close = on_close
        self._boundary: bool | None = None
        self._grad_norm: float | torch.Tensor | None = None
        self._applied = False
        self._closed = False
        self._hyperparameters = Hyperparameters(optimizer, lr_scheduler, config.infinity.resume_hyperparameters)
        self._frozen = {names[0] for p, names in parameter_names(module).items() if not p.requires_grad}
        self._mark = self._counters()
        module.zero_grad = partial(_zero_grad_of, weakref.ref(self), weakref.ref(module))  # type: ignore[method-assign]
        if not isinstance(optimizer, PagedOptimizer):  # which does so itself
            health = self.health
            optimizer.register_load_state_dict_post_hook(lambda _: health.mend())
        if config.fp16.enabled:
            self._tell_optimizer(overflow=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the engine doesn't have, the model may: `engine.generate(...)`."""
        if "module" not in self.__dict__:  # not made yet
            raise AttributeError(name)
        return getattr(self.module, name)

    @contextlib.contextmanager
    def _passing(self, what: str) -> Iterator[None]:
        """Around a pass: whatever exception ends it, what it leaves is right, or refuses to be used: see `_abandon`."""
        outer, self._under_way = self._under_way, what
        try:
            if what == _FORWARD:
                self.health.check_whole()
            else:
                self.health.check_not_torn()
            yield
        except BaseException as error:
            self._abandon(what, error)
            self._under_way = outer
            raise
        self._under_way = outer

    def _leave_unfinished_pass(self) -> None:
        """A forward begins: whatever an exception left of one that didn't pass through the engine is made anew."""
        if (
            self._under_way is None
            and not in_backward()
            and abandon_unfinished_pass(self.module)
            and self.swap is not None
        ):
            self.swap.recover()

    def _settle(self) -> None:
        """No backward and no step is going on: one that never ended was ended by an exception that came twice. (In a forward a
        loop may well step, which calls the model itself.)"""
        if self._under_way in (_BACKWARD, _STEP):
            self._abandon(self._under_way, None)
            self._under_way = None

    def _abandon(self, what: str, error: BaseException | None) -> None:
        """Make anew all that a pass leaves which ended half-way: what is gathered, staged and on its way.

        Gradients stay; but of those that it was to make, or to take, it has made a part. They have to be dropped. Where some
        were applied already, the values are torn.
        """
        why = f"{what} ({in_words(error) if error is not None else 'interrupted'})"
        reshard(self.module)
        if self.swap is not None:
            self.swap.recover()
        if self.activations is not None:
            self.activations.recover()
        self.health.settle()
        if what == _FORWARD:
            return
        if what == _STEP and isinstance(error, (InfinityError, OSError)):  # before anything was changed
            if isinstance(self.optimizer, PagedOptimizer):
                self.optimizer.show_taken()
            return
        if self.health.state is Health.AHEAD:
            self.health.tear(why)
        else:
            self._partial = self._partial or why

    def standing(self) -> list[str]:
        """For its peers: where this rank stands after an error. Ranks go on together only from the same place."""
        pending = self._commits.pending_step if self._commits is not None else None
        partial = "part of the gradients" if self._partial is not None else "gradients"
        place = self._routes.place if self._routes is not None else ""
        return [
            f"step {self.global_steps}.{self.micro_steps}",
            place,
            self.health.state.value,
            partial,
            f"commit of {pending}",
        ]

    def _check_gradients_whole(self) -> None:
        if self._partial is None:
            return
        if self._has_gradients():
            raise InfinityError(
                f"the gradients of this step are those of a part of the model, since this failed: {self._partial}; call "
                "engine.zero_grad() to drop them, and begin the step anew with its first micro-batch"
            )
        self._begin_step_anew()

    def _has_gradients(self) -> bool:
        """Whether any gradient came since the last step, or since they were dropped."""
        taken = isinstance(self.optimizer, PagedOptimizer) and bool(self.optimizer.norms)
        return taken or any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"])

    def _begin_step_anew(self) -> None:
        """Its gradients were dropped: with its first micro-batch."""
        self.micro_steps, self._boundary, self._partial = self._micro_steps_before, None, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. With gradients, what it saves for the backward goes where the config keeps activations."""
        with self.forward_pass():
            return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """What `forward` does around the model, for a loop that calls the model itself."""
        saving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.activations is not None and torch.is_grad_enabled():
            saving = self.activations.saving()
        self._leave_unfinished_pass()
        explained = self._routes.explained() if self._routes is not None else contextlib.nullcontext()
        what = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
        with self.peers.in_pass(what, self.standing), self._passing(_FORWARD), timing(self, "fwd"), saving, explained:
            yield

    @as_pass
    @timed("bwd")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward pass of a micro-batch's loss (a scalar), which is divided by the number of accumulation steps first,
        unless `scale_wrt_gas` is False.

        Returns the divided loss. Gradients are reduced over the ranks and summed in fp32 (see `infinity.reduce_dtype`). With
        fp16 they are `cur_scale` times as large until `step`. Raises ConfigError when a parameter was unfrozen since
        `initialize`: nothing would train it.
        """
        if loss.numel() != 1:
            raise ValueError(f"backward takes a scalar loss, got one of shape {tuple(loss.shape)}")
        self._check_none_unfrozen()
        self._settle()
        self._check_gradients_whole()
        if self.live is not None:
            self.live.begin_backward(last=self._ends_a_step(self.micro_steps + 1))
        divided = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        scaled = divided.float() * self.cur_scale if self.config.fp16.enabled else divided
        with self._passing(_BACKWARD):
            if self._commits is not None and self._updates_in_backward():
                self._commits.make()
            if isinstance(self.optimizer, PagedOptimizer):
                self.optimizer.hide_taken()
            scaled.backward(retain_graph=retain_graph)
            self.micro_steps += 1
            if isinstance(self.optimizer, PagedOptimizer):
                self.optimizer.show_taken()
        return divided

    @as_pass
    @timed("step")
    def step(self) -> None:
        """At an accumulation boundary: clip, step the optimizer and the schedule, clear the gradients. Else nothing.

        With fp16, a gradient that holds an inf or NaN on any rank leaves optimizer and schedule as they are, is said once, and
        counts in `skipped_steps`; `optimizer.overflow` says whether the last step was such a one.
        A ReduceLROnPlateau is not stepped, as it wants your metric: call `lr_scheduler.step(metric)` when you have one.
        """
        if not self.is_gradient_accumulation_boundary():
            return
        self._settle()
        self.health.check_not_torn()
        self._check_gradients_whole()
        if isinstance(self.optimizer, PagedOptimizer):
            self.optimizer.hide_taken()
        alone = self.swap.alone() if self.swap is not None else contextlib.nullcontext()
        with self._passing(_STEP), alone:
            if self._commits is not None:
                self._commits.check_storable(self.client_state)
                self._commits.make()
            if self._saving is not None and self._saving.finish_if_copied():
                self._saving = None
            reshard(self.module)  # what an evaluation left would be stale after the step, and hides the gradients
            with measured(self.timeline, "gradients", "norm of the gradients"):
                factor = self._gradient_factor()
            if isinstance(self.optimizer, PagedOptimizer) and factor is not None:
                assert isinstance(factor, float)
                self.optimizer.prepare(factor)
            with self.health.change("an optimizer step"):
                self._change_values(factor)
        if self.activations is not None:
            self.activations.end_step()
        if self._commits is not None:
            self._commits.note(self.global_steps, self._training(), self._unpaged_state)
        self._note_step()

    def _change_values(self, factor: float | torch.Tensor | None) -> None:
        """All that a step changes, with the gradients multiplied by `factor` (None: they overflowed, nothing is updated)."""
        self._applied = factor is not None
        if self.config.fp16.enabled:
            self._note_overflow(factor is None)
        if factor is not None:
            self._step_optimizer(factor)
            if self.lr_scheduler is not None and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step()
        elif isinstance(self.optimizer, PagedOptimizer):
            self.optimizer.skip()
        self._drop_gradients()
        self.global_steps += 1
        self._boundary = None
        self._micro_steps_before = self.micro_steps

    @as_pass
    def commit(self, client_state: dict[str, Any] | None = None) -> None:
        """Commit now, with all that was done since the last step, instead of when the next step begins. A collective.

        `client_state`: becomes `engine.client_state`. Raises ConfigError without `infinity.durability` "step", CheckpointError
        between a `backward` and its `step`, where something of `client_state` can't be stored, and where what is to be
        committed couldn't be gone on from; and what a failing write raises. On all ranks when on one; the commit before stays.
        """
        if self._commits is None:
            raise ConfigError('commit() needs infinity.durability "step" in the config: else nothing of a run stays')
        self.peers.check()
        with raise_on_all_ranks():
            self._check_between_steps()
            self._check_whole()
        kept, self.client_state = self.client_state, self.client_state if client_state is None else client_state
        try:
            self._commits.note(self.global_steps, self._training(), self._unpaged_state)
        except BaseException:
            self.client_state = kept
            raise
        self._commits.make()

    def train(self, mode: bool = True) -> Engine:
        """Training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; `step` does so by itself. The step begins anew with its first micro-batch.

        Raises InfinityError where the backward applied them already (`infinity.update`), or tore the values.
        """
        self._settle()
        self.health.check_not_torn()
        self._check_not_applied()
        self._partial = self._partial or "zero_grad"
        self._drop_gradients(set_to_none)
        self._begin_step_anew()

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)  # the module shows others while a group is gathered
        type(self.module).zero_grad(self.module, set_to_none)

    @property
    def gradient_bytes(self) -> int:
        """Memory of this rank, in bytes, that holds reduced gradients now: in `.grad`, or where they wait for their update."""
        shown = (p.grad for group in self.optimizer.param_groups for p in group["params"])
        kept = self.swap.gradients.held_bytes if self.swap is not None else 0
        own = (_local_of(grad) for grad in shown if grad is not None)
        return kept + sum(grad.nbytes for grad in own if not isinstance(grad, TakenGradient))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether `step` will step: the last micro-batch of a step has had its backward pass."""
        return self._ends_a_step(self.micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so yourself, until the next step.

        Raises ConfigError for False where gradients are applied in the backward (`infinity.update`).
        """
        if not is_boundary and self._updates_in_backward():
            raise ConfigError(
                'gradients that are accumulated can\'t be applied in the backward: set infinity.update to "forward", or '
                "gradient_accumulation_steps"
            )
        self._boundary = is_boundary

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

    def fp16_enabled(self) -> bool:
        """Whether compute is in fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether compute is in bf16."""
        return self.config.bf16.enabled

    def gradient_clipping(self) -> float:
        """Largest norm of the whole gradient; 0 does not clip."""
        return self.config.gradient_clipping

    def was_step_applied(self) -> bool:
        """Whether the last step changed weights: False before the first, and after one that fp16 skipped."""
        return self._applied

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where batches belong."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

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

    @property
    def global_samples(self) -> int:
        """Samples of all steps so far, over all ranks."""
        return self.global_steps * self.train_batch_size()

    def get_global_grad_norm(self) -> float | None:
        """Norm of the whole gradient at the last step, before clipping (inf or NaN: it was skipped); None before the first."""
        if isinstance(self._grad_norm, torch.Tensor):
            self._grad_norm = float(self._grad_norm)
        return self._grad_norm

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
        return self.swap.stats() if self.swap is not None else None

    @property
    def timeline(self) -> Timeline | None:
        """Where a trace is noted; None while none runs."""
        return self.swap.timeline if self.swap is not None else None

    def start_trace(self) -> None:
        """Note from now on what this rank's training thread and drives do when, until `stop_trace`: see docs/timeline.md.

        Waits until the drives rest. Raises InfinityError when a trace runs already, or where nothing rests on NVMe.
        """
        self._traced().start_trace()

    def stop_trace(self, path: str | os.PathLike[str] | None = None) -> TraceSummary:
        """End the trace, once the drives rest, and return its figures.

        `path`: gets the events of this rank as JSON, for ui.perfetto.dev or chrome://tracing. Raises InfinityError when no
        trace runs, OSError when the file can't be written.
        """
        return self._traced().stop_trace(path)

    def restart_clock(self) -> None:
        """The next step's seconds and bytes count from now; call it after an evaluation that shouldn't count."""
        self._mark = self._counters()

    def step_lower_bound_seconds(
        self, *, compute_seconds: float, read_bytes_per_s: float, write_bytes_per_s: float
    ) -> float:
        """The least a step could take on this rank (seconds), moving what it moves: see infinity/plan/lower_bound.py.

        Once a step was taken, that is without what stays in host memory from step to step, or from forward to backward, and
        with what saved activations moved in the last one.
        """
        if self.swap is None:
            return compute_seconds
        gathers = self.live.gathers if self.live is not None else None
        read, written = self.swap.step_bytes(micro_batches=self.gradient_accumulation_steps(), gathers=gathers)
        saved = self.activations.step_bytes if self.activations is not None else (0, 0)
        return step_lower_bound_seconds(
            read_bytes=read + saved[0],
            written_bytes=written + saved[1],
            read_bytes_per_s=read_bytes_per_s,
            write_bytes_per_s=write_bytes_per_s,
            compute_seconds=compute_seconds,
        )

    @as_pass
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
        tag = tag or f"global_step{self.global_steps}"
        if tag != Path(tag).name or tag.startswith(".") or tag == "latest":
            raise CheckpointError(f"a checkpoint tag is one folder name other than 'latest', got {tag!r}")
        form = self._checked_format(format or self.config.infinity.checkpoint_format)
        self.peers.check()
        self.finish_checkpoint()
        with raise_on_all_ranks():
            self._check_between_steps()
            self._check_whole()
        self._make_optimizer_state()
        if self._commits is not None:
            self._commits.make()
        own = {"client_state": client_state or {}}
        keep = self.config.infinity.checkpoint_keep
        if form == "arena":
            assert self.swap is not None
            with raise_on_all_ranks():
                unpaged_state = self._unpaged_state() | own
            self._saving = checkpoint_arena.start(save_dir, tag, self.module, self.swap, unpaged_state, keep=keep)
        else:
            checkpoint.save(save_dir, tag, self.module, self.optimizer, self._training_state() | own, keep=keep)
        return True

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that `save_checkpoint` began to write is there, if one is on its way. A collective.

        Raises CheckpointError on all ranks where that failed on one; the checkpoint before stays then.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.finish()
        except BaseException:
            saving.cancel()
            raise

    @as_pass
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
        if load_module_only or not load_optimizer_states:
            raise ConfigError(
                "load_checkpoint loads the model with its optimizer state: for weights alone, save_16bit_model writes files "
                "that initialize(weights=...) reads"
            )
        self.peers.check()
        self.finish_checkpoint()
        path = find(load_dir, tag)
        if self._commits is not None:  # what was done stays, should loading fail
            self._commits.try_to_make()
        self._make_optimizer_state()
        self._discard_step()
        begin = partial(self.health.tear, "loading a checkpoint")  # all is set by its end, or nothing is right
        if is_arena_checkpoint(path):
            training_state = checkpoint_arena.load(path, self.module, self.optimizer, self.swap, begin, verified=verify)
            self._set_unpaged_state(training_state)
        else:
            training_state = checkpoint.load(path, self.module, self.optimizer, begin, verified=verify)
        self._set_training_state(training_state, schedule=load_lr_scheduler_states)
        self.health.mend()
        if self._commits is not None:
            self.commit(training_state["client_state"])
        return str(path), training_state["client_state"]

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a trainer that saves the model may gather it whole on rank 0: the config's
        `stage3_gather_16bit_weights_on_model_save`."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole model in the dtype of compute, in host memory of rank 0; None elsewhere. A collective."""
        with raise_on_all_ranks():
            self._check_whole()
        reshard(self.module)
        names = {each[0]: (each, p.requires_grad) for p, each in parameter_names(self.module).items()}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in named_full_tensors(self.module, self._compute_dtype):
            all_names, trained = names[name]
            if dist.get_rank() == 0 and (trained or not exclude_frozen_parameters):
                found.update(dict.fromkeys(all_names, tensor))
        if dist.get_rank() != 0:
            return None
        for buffer, all_names in buffer_names(self.module, persistent=True).items():
            found.update(dict.fromkeys(all_names, buffer.detach().cpu().clone()))
        return found

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str | None = None) -> bool:
        """Write the model in the dtype of compute as safetensors. A collective; holds 2 GiB at most on rank 0.

        `save_filename` is accepted: the files have the names that readers of safetensors look for.
        """
        with raise_on_all_ranks():
            self._check_whole()
        checkpoint.save_16bit(save_dir, self.module, self._compute_dtype)
        return True

    save_fp16_model = save_16bit_model

    def close(self) -> None:
        """Wait for what is in flight and give memory and drive space back; commit the last step of a durable run. Idempotent.

        A collective then, and where a checkpoint is on its way; but while an error is being handled, or when a pass has failed
        on one rank, nothing is committed, and that checkpoint is finished without the other ranks, which may be elsewhere: the
        log tells whether it could be.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if sys.exc_info()[0] is None and not self.peers.parted:
                if self._commits is not None:
                    self._commits.make()
                self.finish_checkpoint()
                if self.flops_profile is not None:
                    self.flops_profile.tell_unused(self.global_steps)
        finally:
            self.peers.close()
            try:
                if self._saving is not None:
                    self._saving.finish_alone()
            finally:
                self._close()

    def _close(self) -> None:
        try:
            if self.activations is not None:
                self.activations.close()
        finally:
            self._close_others()

    def _close_others(self) -> None:
        try:
            if self.swap is not None:
                self.swap.close()
        finally:
            self._on_close()

    destroy = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _training_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank beside the tensors."""
        training_state = {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._loss_scale.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "client_state": self.client_state,
            "hyperparameters": self._hyperparameters.told,
            "rng": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            training_state["rng_device"] = torch.cuda.get_rng_state()
        return training_state

    def _set_training_state(self, training_state: dict[str, Any], *, schedule: bool = True) -> None:
        self.global_steps = training_state["global_steps"]
        self.skipped_steps = training_state.get("skipped_steps", 0)
        self._loss_scale.load_state_dict(training_state.get("loss_scale", {}))
        if self.config.fp16.enabled:
            self._tell_optimizer(overflow=False)
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()  # of this run: a step begins
        self._micro_steps_before = self.micro_steps
        if schedule and self.lr_scheduler is not None and training_state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(training_state["lr_scheduler"])
        self._hyperparameters.settle(training_state, schedule=schedule)
        if "rng" in training_state:
            torch.set_rng_state(training_state["rng"])
        if "rng_device" in training_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(training_state["rng_device"])

    def _unpaged_state(self) -> dict[str, Any]:
        """What a commit keeps beside the arena: all that a checkpoint keeps, less masters and moments.

        Raises CheckpointError where parameters that the optimizer steps aren't seen in the model.
        """
        reshard(self.module)  # what an evaluation left gathered hides the parameters that have state
        state, names = self.optimizer.state, parameter_names(self.module)
        hidden = sum(p not in names for group in self.optimizer.param_groups for p in group["params"])
        if hidden:
            raise CheckpointError(
                f"{hidden} parameters of the optimizer are not seen in the model, as where an error ended a pass while they "
                "were gathered: what was committed or saved before stays; go on from that"
            )
        buffers = buffer_names(self.module, persistent=True)
        return self._training_state() | {
            "param_groups": [
                {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
            ],
            "group_names": [
                [names[p][0] for p in group["params"] if p in names] for group in self.optimizer.param_groups
            ],
            "steps": {own[0]: state[p]["step"] for p, own in names.items() if "step" in state.get(p, {})},
            "buffers": {each[0]: buffer.detach() for buffer, each in buffers.items()},
        }

    def resume(self, unpaged_state: dict[str, Any]) -> None:
        """For `initialize`: set what a commit kept beside the arena. Raises CheckpointError where it is of another training."""
        self._set_unpaged_state(unpaged_state)
        self._set_training_state(unpaged_state)
        self.client_state = unpaged_state["client_state"]

    def _training(self) -> Training:
        """What a commit or an arena checkpoint must fit to be gone on from."""
        buffers = {names[0]: tuple(b.shape) for b, names in buffer_names(self.module, persistent=True).items()}
        counts_steps = not isinstance(self.optimizer, PagedOptimizer) or self.optimizer.counts_steps
        return Training(len(self.optimizer.param_groups), buffers, counts_steps)

    def _set_unpaged_state(self, unpaged_state: dict[str, Any]) -> None:
        """Hyper-parameters, steps and buffers. Raises CheckpointError where they are of another training."""
        shards = self.swap.paged.shards if self.swap is not None else ()
        check_unpaged_state(unpaged_state, self._training(), {shard.name for shard in shards if shard.stepped})
        groups, steps, buffers = unpaged_state["param_groups"], unpaged_state["steps"], unpaged_state["buffers"]
        ours = {names[0]: buffer for buffer, names in buffer_names(self.module, persistent=True).items()}
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(saved)
        stepped = {p: steps[names[0]] for p, names in parameter_names(self.module).items() if names[0] in steps}
        if isinstance(self.optimizer, PagedOptimizer):
            self.optimizer.restore_steps(stepped)
        else:
            for parameter, step in stepped.items():
                self.optimizer.state[parameter]["step"].copy_(step)
        with torch.no_grad():
            for name, buffer in ours.items():
                buffer.copy_(buffers[name])

    def _checked_format(self, form: str) -> str:
        """Raises ConfigError where checkpoints can't have it."""
        if form not in ("dcp", "arena"):
            raise ConfigError(f'a checkpoint\'s format is "dcp" or "arena", got {form!r}')
        if form == "arena" and self.swap is None:
            raise ConfigError(
                'checkpoints of format "arena" are what rests on NVMe, and nothing of this training does: use "dcp", or set '
                'offload_param or offload_optimizer to {"device": "nvme", ...}'
            )
        return form

    def _updates_in_backward(self) -> bool:
        return self.swap is not None and self.swap.update_at == "backward"

    def _traced(self) -> SwapManager:
        if self.swap is None:
            raise InfinityError(
                "nothing of this training rests on NVMe, so there is no timeline of it: use torch.profiler, or set "
                'offload_param or offload_optimizer to {"device": "nvme", ...}'
            )
        return self.swap

    def _ends_a_step(self, micro_steps: int) -> bool:
        """Whether a step is due after so many micro-batches."""
        if self._boundary is not None:
            return self._boundary
        return micro_steps > 0 and micro_steps % self.gradient_accumulation_steps() == 0

    def _check_none_unfrozen(self) -> None:
        for parameter, names in parameter_names(self.module).items() if self._frozen else ():
            if parameter.requires_grad and names[0] in self._frozen:
                raise ConfigError(
                    f"parameter {names[0]} was frozen when initialize was called, so it has no optimizer state and is not "
                    "trained: unfreeze it before initialize, or set requires_grad to False again"
                )

    def _discard_step(self) -> None:
        """Forget what the passes since the last step left, even one that an error ended."""
        self._settle()
        reshard(self.module)
        if isinstance(self.optimizer, PagedOptimizer):
            self.optimizer.discard()
        self._drop_gradients()
        self._begin_step_anew()

    def _check_not_applied(self) -> None:
        if self.health.state is Health.AHEAD:
            raise InfinityError(
                "the gradients were applied in the backward already and can't be taken back: call step() after each backward, "
                'or set infinity.update to "forward"'
            )

    def _check_between_steps(self) -> None:
        self._settle()
        self.health.check_not_torn()
        if self._has_gradients():
            raise CheckpointError(
                "a checkpoint in the middle of a step would lose the gradients of its micro-batches: save after the step() "
                f"that ends it, after every {self.gradient_accumulation_steps()} of them"
            )

    def _check_whole(self) -> None:
        self._settle()
        if self.swap is not None:
            self.swap.paged.check_whole()  # and not closed
        self.health.check_whole()

    def _make_optimizer_state(self) -> None:
        """State for every parameter, as a first step would make it, without a step: a checkpoint holds all of it."""
        if isinstance(self.optimizer, PagedOptimizer):
            self.optimizer.init_state()
        elif isinstance(self.optimizer, torch.optim.Adam):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and not self.optimizer.state[parameter]:
                        self.optimizer.state[parameter].update(
                            step=torch.zeros(
                                (), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"
                            ),
                            exp_avg=torch.zeros_like(parameter.data),
                            exp_avg_sq=torch.zeros_like(parameter.data),
                        )
                        if group["amsgrad"]:
                            self.optimizer.state[parameter]["max_exp_avg_sq"] = torch.zeros_like(parameter.data)
        elif isinstance(self.optimizer, torch.optim.SGD):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    # There, even if empty: else torch would take a step to make it.
                    state = self.optimizer.state[parameter]
                    if parameter.requires_grad and group["momentum"] and state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter.data)
        elif not self.optimizer.state:
            get_optimizer_state_dict(self.module, self.optimizer)  # torch makes it by a step that changes nothing

    def _gradient_factor(self) -> float | torch.Tensor | None:
        """What gradients are multiplied by before the step, to undo the loss scale and to clip; None where it must be skipped.

        Notes their norm over all ranks, taken of them as they are. The host waits for the device once, and only where it has to
        know: whether gradients overflowed, or by what a paged optimizer, which runs on the host, clips.
        """
        unscale = float(torch.tensor(1.0 / self.cur_scale))  # as a tensor of fp32 has it
        norm = self._scaled_norm() * unscale
        self._grad_norm = norm
        clipping = self.config.gradient_clipping
        factor: float | torch.Tensor = unscale
        if clipping > 0:  # as torch.nn.utils.clip_grad_norm_ computes it
            factor = torch.clamp(clipping / (norm + 1e-6), max=1.0) * unscale
        if self.config.fp16.enabled or (
            isinstance(factor, torch.Tensor) and isinstance(self.optimizer, PagedOptimizer)
        ):
            known, factor = torch.stack([norm, torch.as_tensor(factor, device=norm.device)]).tolist()
            self._grad_norm = known
            if self.config.fp16.enabled and not math.isfinite(known):
                return None
        return factor

    def _step_optimizer(self, factor: float | torch.Tensor) -> None:
        """Step with the gradients multiplied by `factor`: on their way into the update where the optimizer is paged."""
        if isinstance(self.optimizer, PagedOptimizer):
            assert isinstance(factor, float)
            self.optimizer.step(grad_scale=factor)
            return
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            torch._foreach_mul_([_local_of(p.grad) for p in self.module.parameters() if p.grad is not None], factor)
        self.optimizer.step()

    def _scaled_norm(self) -> torch.Tensor:
        """Norm of the whole gradient as `backward` left it, scaled."""
        taken = self.optimizer.take_gradients() if isinstance(self.optimizer, PagedOptimizer) else {}
        norms = []
        for parameter in self.module.parameters():
            if parameter in taken:
                norms.append(taken[parameter])
            elif parameter.grad is not None:
                norms.append(torch.linalg.vector_norm(parameter.grad, 2.0))
        if not norms:
            raise InfinityError("step() without gradients: call backward(loss) before it")
        norm = torch.linalg.vector_norm(torch.stack(norms), 2.0)  # as torch.nn.utils.get_total_norm computes it
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _note_overflow(self, overflow: bool) -> None:
        """Whether the step is skipped: the loss scale hears of it, and so do those who ask the optimizer."""
        told = self._loss_scale.update(overflow=overflow)
        if told and dist.get_rank() == 0:
            log.warning(told)
        self.skipped_steps += overflow
        self._tell_optimizer(overflow)

    def _tell_optimizer(self, overflow: bool) -> None:
        """What trainers look for on an optimizer that scales its loss."""
        for name, value in (("overflow", overflow), ("cur_scale", self.cur_scale), ("loss_scale", self.cur_scale)):
            setattr(self.optimizer, name, value)

    def _counters(self) -> tuple[float, int, int, float]:
        stats = self.swap.stats() if self.swap is not None else None
        if stats is None:
            return time.perf_counter(), 0, 0, 0.0
        return time.perf_counter(), stats.read_bytes, stats.written_bytes, stats.stall_seconds

    def _note_step(self) -> None:
        now = self._counters()
        seconds, read, written, stall = (b - a for a, b in zip(self._mark, now, strict=True))
        self.step_stats = EngineStats(float(seconds), int(read), int(written), float(stall))
        self._mark = now
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            skipped = f", {self.skipped_steps} skipped" if self.skipped_steps else ""
            log.info("step %d%s, lr %s, %.3f s", self.global_steps, skipped, self.get_lr(), seconds)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return _local_of(parameter.data)


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _zero_grad_of(engine: weakref.ref[Engine], module: weakref.ref[nn.Module], set_to_none: bool = True) -> None:
    """`zero_grad` of a module that an engine trains, or trained."""
    alive, trained = engine(), module()
    if alive is not None:
        alive.zero_grad(set_to_none)
    elif trained is not None:
        type(trained).zero_grad(trained, set_to_none)
