"""Functions that can pause at any depth while others run. Training thread only.

[Note: What a pause leaves behind]
A greenlet has its own stack and context variables and shares all other thread state.
torch's thread state must be correct for whichever greenlet runs. Random generators and saved-tensor hooks are switched
with the greenlet: activation checkpointing calls a block inside such hooks. Inside any other context (no_grad,
autocast, a dispatch mode, warnings.catch_warnings) a function cannot pause, because the others would run in that
context too. It also cannot end with such a setting changed.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import GreenletExit, greenlet
from torch.nn.utils import parametrize
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack


class CannotPause(Exception):
    """A function cannot pause here; the message says why."""


@dataclass(frozen=True)
class RandomState:
    """State of torch's generators: the CPU's, and that of the current GPU."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @staticmethod
    def now() -> RandomState:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return RandomState(torch.get_rng_state(), cuda)

    @staticmethod
    def seeded(seed: int) -> RandomState:
        """Return the state after `torch.manual_seed(seed)`; the generators stay unchanged."""
        before = RandomState.now()
        torch.manual_seed(seed)
        seeded = RandomState.now()
        before.set()
        return seeded

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Use these generator states inside the block, and restore the previous ones after it."""
        before = RandomState.now()
        self.set()
        try:
            yield
        finally:
            before.set()

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


class Coroutine:
    """Runs `function` in a copy of the caller's context variables until it pauses, and continues it from there.

    random: the generator states it starts with.
    """

    def __init__(self, function: Callable[[], Any], random: RandomState) -> None:
        self._greenlet = greenlet(self._run)
        self._greenlet.gr_context = self.context = contextvars.copy_context()
        self._function = function
        self.random = random
        """Generator states for when it continues."""
        self._surroundings, self._hooks_outside = _surroundings(), _count_hooks()
        self.waits_for: Any = None
        """The argument of the last `pause`."""
        self.result: Any = None
        """The function's return value, once it is done."""

    @property
    def is_done(self) -> bool:
        return bool(self._greenlet.dead)

    def go_on(self) -> None:
        """Run it until it pauses or is done; raise what it raises."""
        with self.random.within():
            try:
                self._greenlet.switch()
            finally:
                self.random = RandomState.now()

    def pause(self, waits_for: Any) -> None:
        """Called inside the function: return to the caller of `go_on`. Raises CannotPause: see the note above."""
        if elsewhere := self._elsewhere():
            raise CannotPause(f"its blocks are called inside a context ({elsewhere})")
        self.waits_for = waits_for
        hooks = _take_hooks(leave=self._hooks_outside)
        try:
            assert self._greenlet.parent is not None
            self._greenlet.parent.switch()
        finally:
            _put_on(hooks)

    def end(self) -> None:
        """End it where it paused; its context managers exit as after an exception."""
        if self._greenlet:
            self._greenlet.throw(GreenletExit)

    def _run(self) -> None:
        self.result = self._function()
        if elsewhere := self._elsewhere():
            raise CannotPause(f"a forward changes a torch setting ({elsewhere})")

    def _elsewhere(self) -> str | None:
        """Return the name of a setting that changed since this coroutine was made, or None."""
        here = _surroundings()
        return next((name for name, now in here.items() if now != self._surroundings[name]), None)


_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _surroundings() -> dict[str, object]:
    """Return torch's settings and contexts of this thread, by name."""
    return {
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "autocast on the GPU": torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        "attention kernels": [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTION_KERNELS],
        "stream": torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else None,
        "function modes": _len_torch_function_stack(),
        "dispatch modes": _len_torch_dispatch_stack(),
        "filters of warnings": id(warnings.filters),
        "parametrizations cached": parametrize._cache_enabled,
        **{name: get() for name, (get, _) in _SETTINGS.items()},
    }


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "gradients": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "precision of matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}
"""torch settings that a plain call changes: (get, set)."""


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore `_SETTINGS` if CannotPause ends the block."""
    before = {name: get() for name, (get, _) in _SETTINGS.items()}
    try:
        yield
    except CannotPause:
        for name, (get, put) in _SETTINGS.items():
            if get() != before[name]:
                put(before[name])
        raise


@contextlib.contextmanager
def without_saving() -> Iterator[None]:
    """Disable the current saved-tensor hooks inside the block."""
    hooks = _take_hooks(leave=0)
    try:
        yield
    finally:
        _put_on(hooks)


def _take_hooks(*, leave: int) -> list[tuple[Any, Any]]:
    """Remove all but the first `leave` active saved-tensor hooks, and return the removed ones, innermost last."""
    hooks: list[tuple[Any, Any]] = []
    top: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
    while (innermost := top(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        hooks.insert(0, innermost)
    _put_on(hooks[:leave])
    return hooks[leave:]


def _put_on(hooks: list[tuple[Any, Any]]) -> None:
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _count_hooks() -> int:
    hooks = _take_hooks(leave=0)
    _put_on(hooks)
    return len(hooks)
