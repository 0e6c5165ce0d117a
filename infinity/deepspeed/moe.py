"""DeepSpeed's `moe.utils`. Experts are ordinary parameters here, sharded over all ranks, so no group needs to be split."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether the model has layers of DeepSpeed's MoE, which none can have here, and how many experts one has."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed would reduce a parameter's gradient over other ranks than those of all."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: int | float | None = None,
) -> list[dict[str, Any]]:
    """The groups as they are, in a list."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
