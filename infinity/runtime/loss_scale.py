"""The loss scale of fp16, and the factor on the gradients that undoes it and clips. Training thread only.

The scale follows the rules of DeepSpeed's scaler, so a run that moves here keeps the same one in every step. It depends only on
whether the whole gradient is finite, so it is the same on every rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from infinity.config.blocks import Fp16Config
from infinity.errors import InfinityError
from infinity.fsdp2.sharding import is_alone, local_of
from infinity.runtime.resolved import compute_device

log = logging.getLogger("infinity")

GROWTH = 2.0
"""The adaptive factor is multiplied or divided by this."""


class LossScale:
    """A constant factor: 1 without fp16. may_overflow: True with fp16."""

    def __init__(self, scale: float, *, may_overflow: bool = True) -> None:
        self.scale = scale
        self.may_overflow = may_overflow

    def show_on(self, optimizer: torch.optim.Optimizer, *, overflow: bool = False) -> None:
        """Set the attributes that trainers read from an optimizer that scales its loss; nothing without fp16."""
        if self.may_overflow:
            for name, value in (("overflow", overflow), ("cur_scale", self.scale), ("loss_scale", self.scale)):
                setattr(optimizer, name, value)

    def check_overflow(self) -> None:
        """Raise InfinityError if the factor can't fall after a gradient with an inf or NaN."""

    def update(self, *, overflow: bool) -> str | None:
        """Update after a step, whose gradient had an inf or NaN if `overflow`. Returns a warning, or None."""
        return "OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated." if overflow else None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the config's factor."""


class DynamicLossScale(LossScale):
    """A factor that is halved when gradients overflow, and doubled after `loss_scale_window` steps without overflow.

    The first `hysteresis` - 1 overflows only skip their step. Their count restarts with the next doubling, or after every step
    without overflow if `consecutive_hysteresis` is set.
    """

    def __init__(self, config: Fp16Config) -> None:
        super().__init__(2.0**config.initial_scale_power)
        self._config = config
        self._step = 0
        self._last_overflow = -1
        self._hysteresis = config.hysteresis

    def check_overflow(self) -> None:
        """Raise InfinityError if the factor would fall below `min_loss_scale`."""
        if self._hysteresis <= 1 and self.scale <= self._config.min_loss_scale:
            raise InfinityError(
                f"gradients overflow at the least loss scale, fp16.min_loss_scale {self._config.min_loss_scale:g}: the "
                "training diverges, or needs bf16.enabled instead of fp16.enabled"
            )

    def update(self, *, overflow: bool) -> str | None:
        config = self._config
        message: str | None = None
        if overflow:
            message = f"OVERFLOW! Skipping step. Attempted loss scale: {_shown(self.scale)}"
            if self._hysteresis > 1:
                self._hysteresis -= 1
                message += f", but hysteresis is {self._hysteresis + 1}. Reducing hysteresis to {self._hysteresis}"
            else:
                self.scale = max(self.scale / GROWTH, config.min_loss_scale)
                message += f", reducing to {_shown(self.scale)}"
            self._last_overflow = self._step
        else:
            stable = self._step - self._last_overflow - 1
            doubles = stable > 0 and stable % config.loss_scale_window == 0
            if doubles or config.consecutive_hysteresis:
                self._hysteresis = config.hysteresis
            if doubles:
                self.scale *= GROWTH
        self._step += 1
        return message

    def state_dict(self) -> dict[str, Any]:
        counts = {"step": self._step, "last_overflow": self._last_overflow, "hysteresis": self._hysteresis}
        return {"scale": self.scale, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; one with a constant factor changes nothing."""
        if "last_overflow" not in state:
            return
        self.scale, self._step = float(state["scale"]), int(state["step"])
        self._last_overflow, self._hysteresis = int(state["last_overflow"]), int(state["hysteresis"])


def make_loss_scale(config: Fp16Config) -> LossScale:
    """Return the config's loss scale: adaptive if `loss_scale` is 0."""
    if not config.enabled:
        return LossScale(1.0, may_overflow=False)
    return LossScale(config.loss_scale) if config.loss_scale > 0 else DynamicLossScale(config)


def _shown(scale: float) -> str:
    """16777216 rather than 1.67772e+07."""
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"


Scalar = float | torch.Tensor
"""A number, or a tensor (0-D, fp32) on the device whose value the host does not know yet."""


def scaled_norm(
    parameters: Iterable[nn.Parameter],
    taken: Mapping[nn.Parameter, torch.Tensor],
    pipe: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm (0-D) of the whole gradient over all ranks, still multiplied by the loss scale.

    taken: norms (0-D) of gradients that have left `.grad`. pipe: the ranks with the other stages of the model. Raises
    InfinityError if a whole model has no gradient at all.
    """
    norms: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        norm = taken.get(parameter)
        if norm is None and parameter.grad is not None:
            grad = local_of(parameter.grad) if is_alone(parameter.grad) else parameter.grad
            norm = torch.linalg.vector_norm(grad, 2.0)
        if norm is not None:
            norms.setdefault(norm.device_mesh if isinstance(norm, DTensor) else None, []).append(norm)
    if not norms and pipe is None:
        raise InfinityError("step() without gradients: call backward(loss) before it")
    # As torch.nn.utils.get_total_norm computes it, which takes the gradients of one mesh.
    of_meshes = [torch.linalg.vector_norm(torch.stack(of_mesh), 2.0) for of_mesh in norms.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in of_meshes]
    if pipe is not None:
        here = torch.linalg.vector_norm(torch.stack(whole), 2.0) if whole else torch.zeros((), device=compute_device())
        whole = [torch.empty_like(here) for _ in range(dist.get_world_size(pipe))]
        dist.all_gather(whole, here, group=pipe)
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole), 2.0)


def factor_of(loss_scale: float) -> float:
    """Return the factor that undoes the loss scale, rounded to fp32."""
    return float(torch.tensor(1.0 / loss_scale))


def gradient_factor(
    scaled: torch.Tensor, *, loss_scale: float, clipping: float, may_overflow: bool, known_on_host: bool
) -> tuple[Scalar, Any]:
    """Return the norm of the whole gradient without the loss scale, before clipping, and the factor on the gradients.

    The factor undoes the loss scale and clips; None if gradients overflowed, so that the step must be skipped.

    Args:
        scaled: see `scaled_norm`.
        clipping: largest norm of the whole gradient; 0 does not clip.
        may_overflow: True for fp16 gradients.
        known_on_host: True if the optimizer runs on the host, so that the factor must be a number.

    The host waits for the device once, and only for an overflow, or for the clipping factor of an optimizer on the host.
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
