"""Places new memory on the NUMA node of the device or drive that it is for.

A slab is touched by the thread that makes it, and by those that are started meanwhile: so it is enough to set that thread's
preference, which they inherit.
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
"""Numbers of set_mempolicy(2) and get_mempolicy(2), which the C library doesn't wrap."""

_DEFAULT, _PREFERRED = 0, 1
_NODES_MAX = 1024


@contextlib.contextmanager
def near(node: int | None, notes: list[str]) -> Iterator[None]:
    """Memory that the calling thread touches first in the block, or a thread that it starts there touches first at any time, is
    placed on `node` while it has room, else elsewhere.

    Does nothing where the node is unknown (None) or the only one, or where the user has set a policy (numactl). If the kernel
    refuses, the reason is appended to `notes`.
    """
    if node is None or len(list(NODES.glob("node[0-9]*"))) < 2 or _policy() != _DEFAULT:
        yield
        return
    mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
    mask[node // 64] = 1 << (node % 64)
    error = _call(0, _PREFERRED, mask, _NODES_MAX)
    if error:
        notes.append(
            f"pinned memory can't be put on NUMA node {node}, which is nearest (set_mempolicy gave {os.strerror(error)}): it "
            f"lies where the process runs; start it with numactl --cpunodebind={node} --membind={node}, or allow the call"
        )
    try:
        yield
    finally:
        if not error:
            _call(0, _DEFAULT, None, 0)


def _policy() -> int | None:
    """The policy of the thread; None where the kernel does not tell."""
    policy = ctypes.c_int(-1)
    return policy.value if _call(1, ctypes.byref(policy), None, 0, None, 0) == 0 else None


def _call(call: int, *args: object) -> int:
    """0, or the error number."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return 38  # ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.syscall(numbers[call], *args) == 0 else ctypes.get_errno()
