"""DeepSpeed's `comm`: torch.distributed, and `init_distributed`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from infinity.ranks.process_group import init_distributed

__all__ = ["get_local_rank", "init_distributed"]


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
