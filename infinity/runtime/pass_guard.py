"""Guards the passes of an engine: an exception leaves state that is right, or that refuses to be used. Training thread only.

An exception may come at any line, here too: [Note: What an exception may end] in infinity/swap/health.py. So no handler can be
relied on to run to its end. Each pass is noted when it begins. A later call that finds a pass noted that can't be running any
more cleans up after it.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from infinity.errors import CheckpointError, InfinityError, in_words
from infinity.fsdp2.sharding import abandon_unfinished_pass, gathered_groups, in_backward, reset
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.runtime.observe import StepProgress
from infinity.runtime.parts import Parts
from infinity.swap.health import Health

_LOOK_SECONDS = 0.05
"""Interval at which a call that waits for another thread's checks whether that one has begun a pass."""


class Pass(enum.Enum):
    """The kinds of passes."""

    FORWARD = "a forward"
    BACKWARD = "a backward"
    STEP = "a step"


class Gradients(enum.Enum):
    """State of the current step's gradients. (`Health.PART_STEPPED` marks those that the backward has applied.)"""

    NONE = "no gradients"
    """None since the last step, or dropped."""
    WHOLE = "gradients"
    """Those of the whole model for every micro-batch so far: in `.grad`, or taken by a paged optimizer."""
    PARTIAL = "part of the gradients"
    """An exception interrupted the pass that made or took them. They can only be dropped."""


@dataclass(eq=False)
class PassGuard:
    """Knows which pass of an engine is running, and the state of the gradients.

    [Note: Gradients are looked for]
    Gradients may be dropped without notice (`optimizer.zero_grad()`, `module.zero_grad()`, `parameter.grad = None`). So the
    guard looks for them when it matters. That they are partial can't be seen; it is noted until they are found gone.
    """

    _parts: Parts
    _progress: StepProgress
    _under_way: Pass | None = None
    """The innermost pass that is running, or that never ended."""
    _partial_since: str | None = None
    """What interrupted a backward or a step; None if the gradients are not partial."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held during every call of the engine."""
    _stepping: threading.Thread | None = None
    """The thread that is in a pass, or in the middle of a step; None between steps."""

    @property
    def gradients(self) -> Gradients:
        """State of the gradients now: see [Note: Gradients are looked for]."""
        groups = self._parts.optimizer.param_groups
        if not self._parts.updater.norms and all(p.grad is None for group in groups for p in group["params"]):
            return Gradients.NONE
        return Gradients.WHOLE if self._partial_since is None else Gradients.PARTIAL

    # Threads.

    @contextlib.contextmanager
    def entered(self, *, asleep: bool = False) -> Iterator[None]:
        """Guard a call of the engine, which waits for another thread's save, load or commit.

        Raises InfinityError, before anything is changed, if another thread is in a pass or in the middle of a step: from its
        first forward with gradients to the end of `step`. This call would free what that thread has gathered, and can't wait,
        because that thread may wait for this one. Raises InfinityError also if the engine sleeps, unless it may be `asleep`.
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
                self._parts.health.check_awake()
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
        """Guard a pass: after any exception, what it leaves is right, or refuses to be used."""
        outer, self._under_way = self._under_way, kind
        before, self._stepping = self._stepping, threading.current_thread()
        health, commits = self._parts.health, self._parts.commits
        try:
            if kind is Pass.FORWARD:
                health.check_whole()
                if torch.is_grad_enabled():
                    commits.fix("buffers")
            else:
                health.check_not_torn()
                if kind is Pass.BACKWARD:
                    commits.fix("settings")
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
        """Clean up after an interrupted pass that did not go through the engine."""
        with self.entered():
            if self._under_way is None and not in_backward() and abandon_unfinished_pass(self._parts.module):
                self._parts.paging.recover()

    def settle(self) -> None:
        """Clean up after a backward or step that never ended: a second exception came during its cleanup. (A step may
        run inside a noted forward, if a loop calls the model itself.)"""
        if self._under_way in (Pass.BACKWARD, Pass.STEP):
            self._abandon(self._under_way, None)
            self._under_way = None

    def _abandon(self, kind: Pass, error: BaseException | None) -> None:
        """Clean up what an interrupted pass leaves gathered, staged and in flight. Gradients stay, but those that it was
        to make or to take are partial. If some were applied already, the values are torn."""
        parts, why = self._parts, f"{kind.value} ({in_words(error) if error is not None else 'interrupted'})"
        self._stepping = None
        reset(parts.module)
        parts.paging.recover()
        if parts.activations is not None:
            parts.activations.recover()
        parts.health.settle()
        if kind is Pass.FORWARD:
            return
        if kind is Pass.STEP and isinstance(error, (InfinityError, OSError)):
            return  # before anything was changed
        if parts.health.state is Health.PART_STEPPED:
            parts.health.tear(why)
        else:
            self._partial_since = self._partial_since or why

    def standing(self) -> Iterator[str]:
        """Yield this rank's state for its peers, the step first; read to the end only after an error. Ranks continue
        together only from equal states: a rank that has a group gathered would not gather it with the others."""
        yield f"step {self._progress.global_steps}.{self._progress.micro_steps}"
        yield self._parts.routes.place if self._parts.routes is not None else ""
        yield self._parts.health.state.value
        yield (Gradients.WHOLE if self._partial_since is None else Gradients.PARTIAL).value
        yield f"commit of {self._parts.commits.pending_step}"
        yield f"gathered groups: {gathered_groups(self._parts.module)}"

    # Gradients.

    def await_rest(self, *, awaited: bool) -> None:
        """Note whether the gradients are partial until the backward of the rest, which follows."""
        self._partial_since = "a forward, whose loss had no backward" if awaited else None

    def check_gradients_whole(self) -> None:
        """Raise InfinityError if the gradients are partial, or if `.grad` was set after the gradient was taken. If they
        were partial and are gone, the step begins again."""
        self._parts.updater.check_untouched()
        if self._partial_since is None:
            return
        if self.gradients is Gradients.PARTIAL:
            raise InfinityError(
                f"the gradients of this step are those of a part of the model, since this failed: {self._partial_since}; call "
                "engine.zero_grad() to drop them, and repeat the step from its first micro-batch"
            )
        self._restart_step()

    def check_backward(self) -> None:
        """Raise InfinityError for gradients of a backward that isn't the engine's."""
        if self._under_way is not Pass.BACKWARD:
            raise InfinityError(
                "loss.backward() makes gradients that the engine doesn't count, scale or average: call engine.backward(loss)"
            )

    def zero_grad(self, set_to_none: bool) -> None:
        """`Engine.zero_grad`."""
        with self.entered():
            self.settle()
            self._parts.health.check_not_torn()
            if self._parts.health.state is Health.PART_STEPPED:
                raise InfinityError(
                    "the gradients were applied in the backward already and can't be taken back: call step() after each "
                    'backward, or set infinity.update to "forward"'
                )
            self._partial_since = self._partial_since or "zero_grad"
            self.drop_gradients(set_to_none)
            self._restart_step()

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        self._parts.optimizer.zero_grad(set_to_none)  # the module shows others while a group is gathered
        type(self._parts.module).zero_grad(self._parts.module, set_to_none)

    def discard_step(self) -> None:
        """Discard what the passes since the last step left, before all values are replaced."""
        self.settle()
        reset(self._parts.module)
        self._parts.updater.discard()
        self.drop_gradients()
        self._restart_step()

    def _restart_step(self) -> None:
        self._progress.restart_step()
        self._stepping = None
        self._partial_since = None  # last, so that an interrupted restart is repeated

    # Access to the values.

    def check_between_steps(self) -> None:
        """Raise CheckpointError between a backward and its step, InfinityError if the values are not whole."""
        self.settle()
        self._parts.health.check_not_torn()
        if self.gradients is not Gradients.NONE:
            raise CheckpointError(
                "a checkpoint in the middle of a step would lose the gradients of its micro-batches: save after the step() "
                f"that ends it, after every {self._progress.accumulation} of them"
            )
        self._parts.health.check_whole()

    def check_may_sleep(self) -> None:
        """Raise InfinityError in the middle of a step, and if the values are not whole."""
        self.check_whole()
        if self._progress.is_in_step or self.gradients is not Gradients.NONE:
            raise InfinityError(
                "the gradients of the step that has begun would be lost: call sleep() after step(), or after zero_grad()"
            )

    def check_whole(self) -> None:
        """Raise InfinityError if the values are not those of one step, or are gone."""
        self.settle()
        self._parts.health.check_whole()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Guard a call that reads the values. Raises as `check_whole`, on every rank if on one. A collective, and a pass, so
        that ranks that don't make this call are told."""
        with self.entered(), self._parts.peers.in_pass("a read of the whole model", self.standing):
            with raise_on_all_ranks():
                self.check_whole()
            yield
