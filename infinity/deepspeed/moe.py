"""DeepSpeed's `moe.utils`. Experts are ordinary parameters here, sharded over all ranks, so no group needs to be split."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def is_moe_param(param: torch.Tensor) -> bool:
    """Return True if DeepSpeed would reduce the parameter's gradient over some of the ranks only."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: int | float | None = None,
) -> list[dict[str, Any]]:
    """Return the groups unchanged, in a list."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
