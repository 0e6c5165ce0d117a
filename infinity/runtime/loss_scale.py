"""The factor on the loss that keeps fp16 gradients from vanishing, and how it adapts. Training thread only.

A pure state machine of numbers, with the rules of DeepSpeed's scaler, so that a run which moves here sees the same factor in
every step. Every rank keeps one, and all agree, because all hear the same: whether the whole gradient is finite.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from infinity.config import Fp16Config
from infinity.errors import InfinityError

log = logging.getLogger("infinity")

GROWTH = 2.0
"""The adaptive factor is multiplied or divided by this."""


class LossScale:
    """A factor that stays as it is: 1 where fp16 is off. may_overflow: whether fp16 is on."""

    def __init__(self, scale: float, *, may_overflow: bool = True) -> None:
        self.scale = scale
        self.may_overflow = may_overflow

    def show_on(self, optimizer: torch.optim.Optimizer, *, overflow: bool = False) -> None:
        """Set what trainers look for on an optimizer that scales its loss; nothing where fp16 is off."""
        if self.may_overflow:
            for name, value in (("overflow", overflow), ("cur_scale", self.scale), ("loss_scale", self.scale)):
                setattr(optimizer, name, value)

    def update(self, *, overflow: bool) -> str | None:
        """After every step: whether its gradient held an inf or NaN. Returns what there is to tell."""
        return "OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated." if overflow else None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A fixed factor is the config's, whatever the checkpoint was trained with."""


class DynamicLossScale(LossScale):
    """Halved when gradients overflow, doubled after `loss_scale_window` steps in which none did.

    The first `hysteresis` - 1 overflows only skip their step. What was used up of them comes back with the next doubling, or
    after every step without overflow where `consecutive_hysteresis` is set.
    """

    def __init__(self, config: Fp16Config) -> None:
        super().__init__(2.0**config.initial_scale_power)
        self._config = config
        self._step = 0
        self._last_overflow = -1
        self._hysteresis = config.hysteresis

    def update(self, *, overflow: bool) -> str | None:
        """As above. Raises InfinityError where the factor would fall below `min_loss_scale`."""
        message = None
        if overflow:
            message = self._shrink()
            self._last_overflow = self._step
        else:
            self._grow()
        self._step += 1
        return message

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint was; one without an adaptive factor changes nothing."""
        if "last_overflow" not in state:
            return
        self.scale, self._step = float(state["scale"]), int(state["step"])
        self._last_overflow, self._hysteresis = int(state["last_overflow"]), int(state["hysteresis"])

    def _shrink(self) -> str:
        attempted = f"OVERFLOW! Skipping step. Attempted loss scale: {_shown(self.scale)}"
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return f"{attempted}, but hysteresis is {self._hysteresis + 1}. Reducing hysteresis to {self._hysteresis}"
        least = self._config.min_loss_scale
        if self.scale <= least:
            raise InfinityError(
                f"gradients overflow at the least loss scale, fp16.min_loss_scale {least:g}: the training diverges, or needs "
                "bf16.enabled instead of fp16.enabled"
            )
        self.scale = max(self.scale / GROWTH, least)
        return f"{attempted}, reducing to {_shown(self.scale)}"

    def _grow(self) -> None:
        stable = self._step - self._last_overflow - 1
        doubles = stable > 0 and stable % self._config.loss_scale_window == 0
        if doubles or self._config.consecutive_hysteresis:
            self._hysteresis = self._config.hysteresis
        if doubles:
            self.scale *= GROWTH


def make_loss_scale(config: Fp16Config) -> LossScale:
    """What the config asks for: adaptive where `loss_scale` is 0."""
    if not config.enabled:
        return LossScale(1.0, may_overflow=False)
    return LossScale(config.loss_scale) if config.loss_scale > 0 else DynamicLossScale(config)


def _shown(scale: float) -> str:
    """16777216 rather than 1.67772e+07."""
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"
