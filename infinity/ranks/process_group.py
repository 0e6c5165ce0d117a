"""The process group: an existing one, torchrun's, or one of a single rank. Any thread.

[Note: A group after a group]
Ranks meet at torchrun's store, which outlives their group. A second group with the same keys would read the addresses
of the first group's closed sockets, and wait for ever. So each group made here has its own prefix. Its number is equal
on all ranks, because all ranks make the same groups in the same order.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from infinity.errors import InfinityError

_TIMEOUT = timedelta(minutes=30)
_CONNECT_SECONDS_MAX = 20.0
"""Time to reach a launcher's store, which the launcher serves before it starts the ranks."""
_numbers = itertools.count()
_lock = threading.Lock()
_group: dist.ProcessGroup | None = None
_users = 0


def ensure_process_group() -> Callable[[], None]:
    """Make a process group if there is none: a collective if RANK and WORLD_SIZE are set, else of this rank alone.

    Returns a function to call once after use: the last user closes the group, unless it is the caller's.
    """
    global _group, _users
    with _lock:
        if not dist.is_initialized():
            _make_group()
            _group, _users = dist.group.WORLD, 0
        group = _group
        if group is None or group is not dist.group.WORLD:
            return lambda: None
        _users += 1
    return functools.partial(_leave, group)


def _leave(group: dist.ProcessGroup) -> None:
    global _group, _users
    with _lock:
        if group is not _group:
            return  # the caller has closed it and made another one
        _users -= 1
        if _users == 0:
            _group = None
            if group is dist.group.WORLD:
                dist.destroy_process_group()


def _make_group() -> None:
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
    """Make a process group if there is none, as `initialize` would; it stays until the process ends. All arguments are
    accepted for compatibility: rank and number of ranks come from the environment, as set by torchrun."""
    ensure_process_group()


@functools.cache
def _meeting_point(address: str, port: str, rank: int, ranks: int) -> dist.Store:
    """Return the store of the ranks in the environment. Cached, because rank 0 cannot serve it twice."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _check_launcher(address, port)
    store: dist.Store
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=_TIMEOUT)))
    return store


def _check_launcher(address: str, port: str) -> None:
    """Raise InfinityError if the launcher of this rank is gone; torch would wait for it as for a slow one."""
    deadline = time.monotonic() + _CONNECT_SECONDS_MAX
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=_CONNECT_SECONDS_MAX).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InfinityError(
                    f"the launcher of this rank does not answer at {address}:{port} ({error}) and has ended: restart "
                    "the run"
                ) from None
        time.sleep(0.5)
