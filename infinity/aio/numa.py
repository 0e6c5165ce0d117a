"""Places new memory on the NUMA node of its device or drive.

The pages of a slab are first touched by the thread that makes it, and by threads started meanwhile, which inherit that
thread's memory policy. So it is enough to set the policy of that thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

NODES = Path("/sys/devices/system/node")

_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Numbers of set_mempolicy(2) and get_mempolicy(2), which the C library does not wrap."""

_DEFAULT, _PREFERRED = 0, 1
_NODES_MAX = 1024


@contextlib.contextmanager
def near(node: int | None, notes: list[str]) -> Iterator[None]:
    """Place memory that the calling thread touches first in the block on `node`, or elsewhere if the node is full.

    Threads started in the block inherit this for all their memory. Does nothing if the node is unknown (None) or the
    only one, or if the user has set a policy (numactl). If the kernel refuses, the reason is appended to `notes`.
    """
    if node is None or len(list(NODES.glob("node[0-9]*"))) < 2 or _policy() != _DEFAULT:
        yield
        return
    mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
    mask[node // 64] = 1 << (node % 64)
    error = _call(0, _PREFERRED, mask, _NODES_MAX)
    if error:
        notes.append(
            f"pinned memory can't be placed on NUMA node {node}, the nearest (set_mempolicy gave "
            f"{os.strerror(error)}), and is where the process runs; start it with numactl --cpunodebind={node} "
            f"--membind={node}, or allow the call"
        )
    try:
        yield
    finally:
        if not error:
            _call(0, _DEFAULT, None, 0)


def _policy() -> int | None:
    """Return the thread's policy; None if the kernel does not say."""
    policy = ctypes.c_int(-1)
    return policy.value if _call(1, ctypes.byref(policy), None, 0, None, 0) == 0 else None


def _call(call: int, *args: object) -> int:
    """Make a system call; return 0 or the error number."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return 38  # ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.syscall(numbers[call], *args) == 0 else ctypes.get_errno()
