"""Floor 3. On which NUMA node new memory lies: near the device or the drive that it is for.

A slab is touched whole when it is made, by the thread that makes it, so a preference of that thread meanwhile is all it takes.
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
    """In the block, what the calling thread touches first lies on `node` while there is room; elsewhere without complaint.

    Does nothing where the node isn't known (None) or the only one, or where the process was given a policy from outside
    (numactl), which is the user's. `notes` gets why the kernel refuses, in words.
    """
    if node is None or not _has_several_nodes() or _policy() != _DEFAULT:
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
    """That of the thread; None where it can't be asked for."""
    found = ctypes.c_int(-1)
    return found.value if _call(1, ctypes.byref(found), None, 0, None, 0) == 0 else None


def _call(which: int, *args: object) -> int:
    """0, or the error number."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return 38  # ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.syscall(numbers[which], *args) == 0 else ctypes.get_errno()


def _has_several_nodes() -> bool:
    return len(list(NODES.glob("node[0-9]*"))) > 1
