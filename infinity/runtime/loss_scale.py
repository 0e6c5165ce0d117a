"""The factor on the loss that keeps fp16 gradients from vanishing, and how it adapts; and the factor on the gradients that
undoes it, and clips. Training thread only.

A pure state machine of numbers, with the rules of DeepSpeed's scaler, so that a run which moves here sees the same factor in
every step. Every rank keeps one, and all agree, because all hear the same: whether the whole gradient is finite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.config.blocks import Fp16Config
from infinity.errors import InfinityError
from infinity.fsdp2.sharding import is_alone, local_of

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


Scalar = float | torch.Tensor
"""A number, or a tensor (0-D, fp32) of the device whose value the host has not asked for yet."""


def scaled_norm(parameters: Iterable[nn.Parameter], taken: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """Norm (0-D) of the whole gradient over all ranks, as `backward` left it: still multiplied by the loss scale.

    taken: norms (0-D) of gradients that are not in `.grad` any more. Raises InfinityError where there is no gradient at all.
    """
    norms = []
    for parameter in parameters:
        if parameter in taken:
            norms.append(taken[parameter])
        elif parameter.grad is not None:
            grad = local_of(parameter.grad) if is_alone(parameter.grad) else parameter.grad
            norms.append(torch.linalg.vector_norm(grad, 2.0))
    if not norms:
        raise InfinityError("step() without gradients: call backward(loss) before it")
    norm = torch.linalg.vector_norm(torch.stack(norms), 2.0)  # as torch.nn.utils.get_total_norm computes it
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def factor_of(loss_scale: float) -> float:
    """What undoes the loss scale, as a tensor of fp32 has it."""
    return float(torch.tensor(1.0 / loss_scale))


def gradient_factor(
    scaled: torch.Tensor, *, loss_scale: float, clipping: float, may_overflow: bool, known_on_host: bool
) -> tuple[Scalar, Any]:
    """(norm of the whole gradient with the loss scale undone, before clipping; factor) of gradients of this `scaled_norm`.

    factor: what they are multiplied by, to undo the loss scale and to clip; a `Scalar`, and a number where it is to be known on
    the host. None where they overflowed, and the step must be skipped.
    clipping: largest norm of the whole gradient; 0 does not clip. may_overflow: gradients are of fp16. known_on_host: the
    optimizer runs on the host. The host waits for the device once, and only where it has to know: whether gradients
    overflowed, or by what an optimizer on the host clips.
    """
    unscale = factor_of(loss_scale)
    norm = scaled * unscale
    factor: Scalar = unscale
    if clipping > 0:  # as torch.nn.utils.clip_grad_norm_ computes it
        factor = torch.clamp(clipping / (norm + 1e-6), max=1.0) * unscale
    if not may_overflow and not (known_on_host and isinstance(factor, torch.Tensor)):
        assert isinstance(factor, float) or not known_on_host
        return norm, factor
    norm_value, factor_value = torch.stack([norm, torch.as_tensor(factor, device=norm.device)]).tolist()
    overflow = may_overflow and not math.isfinite(norm_value)
    return norm_value, None if overflow else factor_value
