"""Parameters and optimizer state between the arena, the pinned pool and FSDP2."""

from infinity.schedule.timeline import TraceSummary
from infinity.swap.hosted_optimizer import HostedOptimizer, PagedSGD
from infinity.swap.manager import SwapManager, SwapStats
from infinity.swap.options import PagingOptions
from infinity.swap.paged_adam import PagedAdam, PagedAdamW
from infinity.swap.paged_muon import PagedMuon
from infinity.swap.paged_optimizer import PagedOptimizer
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.paging import Paging
from infinity.swap.tensor_store import TensorStore

__all__ = [
    "HostedOptimizer",
    "PagedAdam",
    "PagedAdamW",
    "PagedMuon",
    "PagedOptimizer",
    "PagedSGD",
    "PagedTensor",
    "Paging",
    "PagingOptions",
    "SwapManager",
    "SwapStats",
    "TensorStore",
    "TraceSummary",
]
