"""Reads /proc and /sys: machine, container, limits, huge pages, as the doctor's facts. Judges and changes nothing.

docs/doctor.md defines each key; None if the kernel does not report it. `root` holds /proc, /sys and /run.
"""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

from infinity.host_memory import control_group_limits, machine_memory
from infinity.kernel_files import chosen_of, number_of, text_of

Facts = dict[str, Any]

_ROOT = Path("/")
_CAP_IPC_LOCK = 14
_CAP_SYS_ADMIN = 21
_ALL_USERS = ["0", "0", "4294967295"]
"""uid_map of a process in the machine's own user namespace."""
_GVISOR_VERSION = "Sun Jan 10 15:06:54 PST 2016"
"""The constant build date of gVisor's kernel."""


def read_machine(root: Path = _ROOT) -> Facts:
    """Read processors and memory. The memory limit is the lowest of the control groups around this process."""
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        distribution = None
    memory = machine_memory(root)
    limit = min(control_group_limits(root), key=lambda limit: limit.limit_bytes, default=None)
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "distribution": distribution,
        "cpus": len(os.sched_getaffinity(0)),
        "cpus_online": os.cpu_count(),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
        "swap_bytes": memory.get("SwapTotal"),
        "swap_free_bytes": memory.get("SwapFree"),
        "memory_limit_bytes": limit.limit_bytes if limit else None,
        "memory_limit_used_bytes": limit.used_bytes if limit else None,
    }


def read_container(root: Path = _ROOT) -> Facts:
    """Read the container around the process, and its restrictions. In a user namespace of its own, as in rootless
    containers, capabilities don't count."""
    pairs = (line.partition(":") for line in (text_of(root / "proc/self/status") or "").splitlines())
    status = {name: value.strip() for name, _, value in pairs}
    users = (text_of(root / "proc/self/uid_map") or "").split()
    inside = users != _ALL_USERS if users else None
    capabilities = int(status["CapEff"], 16) if "CapEff" in status else None
    if inside and capabilities is not None:
        capabilities = 0
    no_new = status.get("NoNewPrivs")
    return {
        "kind": _container_kind(root),
        "gvisor": _GVISOR_VERSION in (text_of(root / "proc/version") or ""),
        "seccomp": {"0": "off", "1": "strict", "2": "filter"}.get(status.get("Seccomp", "")),
        "no_new_privileges": None if no_new is None else no_new != "0",
        "io_uring_disabled": number_of(root / "proc/sys/kernel/io_uring_disabled"),
        "user_namespace": inside,
        "cap_ipc_lock": None if capabilities is None else bool(capabilities >> _CAP_IPC_LOCK & 1),
        "cap_sys_admin": None if capabilities is None else bool(capabilities >> _CAP_SYS_ADMIN & 1),
    }


def read_limits(root: Path = _ROOT) -> Facts:
    """Read the limits of this process (None: no limit), and of kernel AIO on the whole machine."""
    facts: Facts = {}
    for kind, *names in (
        (resource.RLIMIT_MEMLOCK, "memlock_soft_bytes", "memlock_hard_bytes"),
        (resource.RLIMIT_FSIZE, "file_size_bytes"),
        (resource.RLIMIT_NOFILE, "open_files_soft", "open_files_hard"),
    ):
        for name, limit in zip(names, resource.getrlimit(kind), strict=False):
            facts[name] = None if limit == resource.RLIM_INFINITY else limit
    facts["aio_max_nr"] = number_of(root / "proc/sys/fs/aio-max-nr")
    facts["aio_nr"] = number_of(root / "proc/sys/fs/aio-nr")
    return facts


def read_huge_pages(root: Path = _ROOT) -> Facts:
    """Read the settings of transparent huge pages, and the reserved pools of hugetlb pages by size."""
    settings = root / "sys/kernel/mm/transparent_hugepage"
    reserved = []
    for pool in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        if total := number_of(pool / "nr_hugepages"):
            size = int(pool.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
            reserved.append({"page_bytes": size, "total": total, "free": number_of(pool / "free_hugepages") or 0})
    return {
        "enabled": chosen_of(settings / "enabled"),
        "defrag": chosen_of(settings / "defrag"),
        "page_bytes": number_of(settings / "hpage_pmd_size"),
        "reserved": reserved,
    }


def _container_kind(root: Path) -> str | None:
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    name = text_of(root / "run/systemd/container")
    if name:
        return name
    return next((kind for kind in ("docker", "lxc") if f"/{kind}/" in (text_of(root / "proc/self/cgroup") or "")), None)
