"""DeepSpeed's `comm`: torch.distributed, and `init_distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from infinity.ranks.process_group import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
