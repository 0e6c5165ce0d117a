"""Floor 11. The passes of a step: forward and backward of a micro-batch.

An `Engine` is one of these, and sets the attributes. Training thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.fsdp2.names import parameter_names
from infinity.fsdp2.routes import Routes
from infinity.ranks.peers import Peers
from infinity.runtime.deepspeed_surface import DeepSpeedSurface
from infinity.runtime.flops import FlopsProfile
from infinity.runtime.gradient_norm import factor_of
from infinity.runtime.in_memory import AnyCommits, Updater
from infinity.runtime.observe import WallClock
from infinity.runtime.pass_guard import Pass, PassGuard
from infinity.swap.timeline import measured


class Passes(DeepSpeedSurface):
    """Of an `Engine`, which sets these attributes."""

    peers: Peers
    wall_clock: WallClock | None
    flops_profile: FlopsProfile | None
    _routes: Routes | None
    _guard: PassGuard
    _updater: Updater
    _commits: AnyCommits
    _frozen: set[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

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
        self._guard.begin_forward()
        explained = self._routes.explained() if self._routes is not None else contextlib.nullcontext()
        name = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
        around = self._guard.around(Pass.FORWARD)
        with self._in_pass(name), around, self._timing("fwd"), saving, explained:
            yield

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward pass of a micro-batch's loss (a scalar), which is divided by the number of accumulation steps first,
        unless `scale_wrt_gas` is False.

        Returns the divided loss. Gradients are reduced over the ranks and summed in fp32 (see `infinity.reduce_dtype`). With
        fp16 they are `cur_scale` times as large until `step`. Raises ConfigError when a parameter was unfrozen since
        `initialize`: nothing would train it.
        """
        with self._in_pass("a backward"), self._timing("bwd"):
            if loss.numel() != 1:
                raise ValueError(f"backward takes a scalar loss, got one of shape {tuple(loss.shape)}")
            _check_none_unfrozen(self.module, self._frozen)
            self._guard.settle()
            self._guard.check_gradients_whole()
            last = self._progress.ends_a_step(self._progress.micro_steps + 1)
            if self.live is not None:
                self.live.begin_backward(last=last)
            self._updater.expect(factor_of(self.cur_scale) if last else None)
            divided = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
            scaled = divided.float() * self.cur_scale if self._loss_scale.may_overflow else divided
            with self._guard.around(Pass.BACKWARD):
                if self._resolved.updates_in_backward:
                    self._commits.make()
                scaled.backward(retain_graph=retain_graph)
                self._progress.micro_steps += 1
            return divided

    def _in_pass(self, name: str, *, last: bool = False) -> contextlib.AbstractContextManager[None]:
        return self.peers.in_pass(name, self._guard.standing, last=last)

    @contextlib.contextmanager
    def _timing(self, part: Literal["fwd", "bwd", "step"]) -> Iterator[None]:
        """Count what happens in the block for `part`, wherever that is wanted; tell when a step ends."""
        steps, clock, profile = self.global_steps, self.wall_clock, self.flops_profile
        with (
            measured(self.timeline, "step", {"fwd": "forward", "bwd": "backward", "step": "step"}[part]),
            clock.measure(part) if clock is not None else contextlib.nullcontext(),
            profile.measure(part, steps) if profile is not None else contextlib.nullcontext(),
        ):
            yield
        stepped = self.global_steps > steps
        if clock is not None and part == "step":
            clock.report(stepped=stepped)
        if profile is not None and stepped and profile.report():
            self.flops_profile = None  # told once


def _check_none_unfrozen(module: nn.Module, frozen: set[str]) -> None:
    """Raise ConfigError where a parameter of `frozen` requires a gradient now."""
    for parameter, names in parameter_names(module).items() if frozen else ():
        if parameter.requires_grad and names[0] in frozen:
            raise ConfigError(
                f"parameter {names[0]} was frozen when initialize was called, so it has no optimizer state and is not "
                "trained: unfreeze it before initialize, or set requires_grad to False again"
            )
