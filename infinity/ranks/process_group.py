"""Floor 2. The process group: the one that is there, torchrun's, or one of a single rank. Training thread only.

[Note: A group after a group]
Ranks meet at a store that outlives the group they make: torchrun's. A second group that used the same keys would read the
addresses of the first, whose sockets are closed, and wait for ever. So each group of ours has a prefix of its own, numbered
alike on all ranks because all of them make the same groups in the same order.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)
_numbers = itertools.count()


def ensure_process_group() -> Callable[[], None]:
    """Make a process group where there is none. Returns what closes it if it is ours, else what does nothing.

    A collective where RANK and WORLD_SIZE are set, as torchrun does; else a group of this rank alone.
    """
    if dist.is_initialized():
        return lambda: None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store: dist.Store = dist.HashStore()
    rank, ranks = 0, 1
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        store = dist.PrefixStore(f"infinity-{next(_numbers)}", _meeting_point(*place, rank, ranks))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    return _close


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make a process group where there is none, as `initialize` would; it stays until the process ends.

    All arguments are accepted for compatibility: rank and number of ranks come from the environment, as torchrun sets it.
    """
    ensure_process_group()


@functools.cache
def _meeting_point(address: str, port: str, rank: int, ranks: int) -> dist.Store:
    """The store of the ranks that the environment names. Kept: where rank 0 serves it, it can't be served twice."""
    store: dist.Store
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=_TIMEOUT)))
    return store


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
