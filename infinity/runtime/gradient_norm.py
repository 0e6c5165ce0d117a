"""The norm of the whole gradient, and the factor that undoes the loss scale and clips. Training thread only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import InfinityError
from infinity.fsdp2.sharding import is_alone, local_of

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
