"""What an exception leaves of a forward, a backward or a step: right, or refused in words. Training thread only.

An exception may come at any line, the lines here included: see [Note: What an exception may end] in infinity/swap/health.py. So
nothing depends on a handler that ran to its end. A pass is noted when it begins; who finds one noted that cannot be going on
any more makes anew what it left.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.activations.saved_tensors import Activations
from infinity.errors import CheckpointError, InfinityError, in_words
from infinity.fsdp2.routes import Routes
from infinity.fsdp2.sharding import abandon_unfinished_pass, gathered_groups, in_backward, reset
from infinity.runtime.in_memory import AnyCommits, AnyPaging, Updater
from infinity.runtime.observe import StepProgress
from infinity.swap.health import Health, ModelHealth

_LOOK_SECONDS = 0.05
"""How often a call that waits for one on another thread looks whether that has begun a pass."""


class Pass(enum.Enum):
    """What may be going on."""

    FORWARD = "a forward"
    BACKWARD = "a backward"
    STEP = "a step"


class Gradients(enum.Enum):
    """What the gradients of the step that is due are. (Those that the backward applied already are `Health.PART_STEPPED`.)"""

    NONE = "no gradients"
    """None came since the last step, or they were dropped. A step can't be taken; a checkpoint can."""
    WHOLE = "gradients"
    """Those of the whole model, of every micro-batch so far: in `.grad`, or taken by a paged optimizer. A backward adds to
    them, the step takes them."""
    PARTIAL = "part of the gradients"
    """An exception ended what made or took them. They can only be dropped."""


@dataclass(eq=False)
class PassGuard:
    """Around the passes of one engine. Knows what is going on, and what the gradients are.

    [Note: Gradients are looked for]
    Gradients may be dropped in many ways (`optimizer.zero_grad()`, `module.zero_grad()`, `parameter.grad = None`), and none of
    them tells. So whether there are any is looked for when it matters. Only that they are partial can't be seen, and is noted,
    until they are found gone.
    """

    _module: nn.Module
    _optimizer: torch.optim.Optimizer
    health: ModelHealth
    _paging: AnyPaging
    _updater: Updater
    _commits: AnyCommits
    _activations: Activations | None
    _routes: Routes | None
    _progress: StepProgress
    _under_way: Pass | None = None
    """The innermost pass that is going on, or that never ended."""
    _partial_since: str | None = None
    """What ended a backward or a step half-way; None where the gradients are not partial."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held during every call of the engine."""
    _stepping: threading.Thread | None = None
    """The thread that is in a pass, or in the middle of a step; None between steps."""

    @property
    def gradients(self) -> Gradients:
        """What they are now: see [Note: Gradients are looked for]."""
        groups = self._optimizer.param_groups
        if not self._updater.norms and all(p.grad is None for group in groups for p in group["params"]):
            return Gradients.NONE
        return Gradients.WHOLE if self._partial_since is None else Gradients.PARTIAL

    def _note_partial(self, why: str | None) -> None:
        """The one door of what is noted; the first reason stays."""
        self._partial_since = None if why is None else self._partial_since or why

    # Threads.

    @contextlib.contextmanager
    def entered(self, *, asleep: bool = False) -> Iterator[None]:
        """Around a call of the engine, which waits for another thread's save, load or commit.

        Raises InfinityError, before anything is touched, if another thread is in a pass, or in the middle of a step, from its
        first forward with gradients to the end of `step`: what it has gathered would be freed under it. It does not wait for
        that end, as the other thread may wait for this one. InfinityError also if the engine sleeps, unless it may be `asleep`.
        """
        if in_backward():  # autograd's own threads
            yield
            return
        self._check_thread()
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            self._check_thread()
        try:
            self._check_thread()
            if not asleep:
                self.health.check_awake()
            yield
        finally:
            self._lock.release()

    def _check_thread(self) -> None:
        stepping = self._stepping
        if stepping is not None and stepping is not threading.current_thread() and stepping.is_alive():
            raise InfinityError(
                f"thread {stepping.name!r} is in the middle of a step with this engine: make this call on that thread, or "
                "between two steps"
            )

    # Passes.

    @contextlib.contextmanager
    def around(self, kind: Pass) -> Iterator[None]:
        """Around a pass: whatever exception ends it, what it leaves is right, or refuses to be used."""
        outer, self._under_way = self._under_way, kind
        before, self._stepping = self._stepping, threading.current_thread()
        try:
            if kind is Pass.FORWARD:
                self.health.check_whole()
                if torch.is_grad_enabled():
                    self._commits.fix("buffers")
            else:
                self.health.check_not_torn()
                if kind is Pass.BACKWARD:
                    self._commits.fix("settings")
            yield
        except BaseException as error:
            self._abandon(kind, error)
            self._under_way = outer
            raise
        self._under_way = outer
        if kind is Pass.STEP:
            self._stepping = None
        elif not torch.is_grad_enabled():
            self._stepping = before

    def begin_forward(self) -> None:
        """Make anew whatever an exception left of a pass that didn't go through the engine."""
        with self.entered():
            if self._under_way is None and not in_backward() and abandon_unfinished_pass(self._module):
                self._paging.recover()

    def settle(self) -> None:
        """No backward and no step is going on: one that never ended was ended by an exception that came twice. (In a forward a
        loop may well step, which calls the model itself.)"""
        if self._under_way in (Pass.BACKWARD, Pass.STEP):
            self._abandon(self._under_way, None)
            self._under_way = None

    def _abandon(self, kind: Pass, error: BaseException | None) -> None:
        """Make anew all that a pass leaves which ended half-way: kind is gathered, staged and on its way.

        Gradients stay. Those that the pass was to make, or to take, are partial. Where some were applied already, the values
        are torn.
        """
        why = f"{kind.value} ({in_words(error) if error is not None else 'interrupted'})"
        self._stepping = None
        reset(self._module)
        self._paging.recover()
        if self._activations is not None:
            self._activations.recover()
        self.health.settle()
        if kind is Pass.FORWARD:
            return
        if kind is Pass.STEP and isinstance(error, (InfinityError, OSError)):
            return  # before anything was changed
        if self.health.state is Health.PART_STEPPED:
            self.health.tear(why)
        else:
            self._note_partial(why)

    def standing(self) -> Iterator[str]:
        """For the peers: where this rank stands, its step first. After an error ranks go on together from one place alone: what
        is gathered on one of them only, its next pass would not gather with the others. Read to its end only after an error."""
        gradients = Gradients.WHOLE if self._partial_since is None else Gradients.PARTIAL
        yield f"step {self._progress.global_steps}.{self._progress.micro_steps}"
        yield self._routes.place if self._routes is not None else ""
        yield self.health.state.value
        yield gradients.value
        yield f"commit of {self._commits.pending_step}"
        yield f"gathered groups: {gathered_groups(self._module)}"

    # Gradients.

    def await_rest(self, *, awaited: bool) -> None:
        """Whether the gradients are a part, and a backward of the rest follows."""
        self._partial_since = "a forward, whose loss had no backward" if awaited else None

    def check_gradients_whole(self) -> None:
        """Raise InfinityError where the gradients are partial, or somebody set `.grad` of one that was taken. Where they were
        partial, and are gone, the step begins anew."""
        self._updater.check_untouched()
        if self._partial_since is None:
            return
        if self.gradients is Gradients.PARTIAL:
            raise InfinityError(
                f"the gradients of this step are those of a part of the model, since this failed: {self._partial_since}; call "
                "engine.zero_grad() to drop them, and begin the step anew with its first micro-batch"
            )
        self._begin_step_anew()

    def check_backward(self) -> None:
        """Raise InfinityError if gradients come of a backward that isn't the engine's."""
        if self._under_way is not Pass.BACKWARD:
            raise InfinityError(
                "loss.backward() makes gradients that the engine doesn't count, scale or average: call engine.backward(loss)"
            )

    def zero_grad(self, set_to_none: bool) -> None:
        """As `Engine.zero_grad`."""
        with self.entered():
            self.settle()
            self.health.check_not_torn()
            if self.health.state is Health.PART_STEPPED:
                raise InfinityError(
                    "the gradients were applied in the backward already and can't be taken back: call step() after each "
                    'backward, or set infinity.update to "forward"'
                )
            self._note_partial("zero_grad")
            self.drop_gradients(set_to_none)
            self._begin_step_anew()

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Those of the optimizer's parameters, and of all others."""
        self._optimizer.zero_grad(set_to_none)  # the module shows others while a group is gathered
        type(self._module).zero_grad(self._module, set_to_none)

    def discard_step(self) -> None:
        """All values are to be set anew: forget what the passes since the last step left."""
        self.settle()
        reset(self._module)
        self._updater.discard()
        self.drop_gradients()
        self._begin_step_anew()

    def _begin_step_anew(self) -> None:
        self._progress.begin_step_anew()
        self._stepping = None
        self._note_partial(None)  # last: who is interrupted before it begins the step anew once more

    # Who wants to look at the values.

    def check_between_steps(self) -> None:
        """Raise CheckpointError between a backward and its step, InfinityError where the values are torn."""
        self.settle()
        self.health.check_not_torn()
        if self.gradients is not Gradients.NONE:
            raise CheckpointError(
                "a checkpoint in the middle of a step would lose the gradients of its micro-batches: save after the step() "
                f"that ends it, after every {self._progress.accumulation} of them"
            )

    def check_may_sleep(self) -> None:
        """Raise InfinityError in the middle of a step, and where the values are not whole."""
        self.check_whole()
        if self._progress.is_in_step or self.gradients is not Gradients.NONE:
            raise InfinityError(
                "the gradients of the step that has begun would be lost: call sleep() after step(), or after zero_grad()"
            )

    def check_whole(self) -> None:
        """Raise InfinityError where the values are not those of one step, or gone."""
        self.settle()
        self.health.check_whole()
