"""The doctor's checks of the machine. They import torch and the compiled core themselves: an import error becomes a
finding."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import infinity
from infinity.cli.doctor.findings import Mark, Section, count_text, size_text
from infinity.cli.environment import Facts
from infinity.cli.program import signals_held
from infinity.kernel_files import text_of
from infinity.plan.program import ADAM_BYTES
from infinity.torch_versions import REQUIREMENT, TESTED, why_too_old, why_untested
from infinity.units import GIB, MIB, format_bytes

SLAB_BYTES = 64 * MIB
"""Large enough for huge pages, small enough for any machine that trains."""

_OPEN_FILES_MIN = 256
_MEMORY_BYTES_MIN = 1 * GIB
_AIO_REQUESTS_MIN = 1024


def check_software(section: Section) -> None:
    versions = {"infinity_version": infinity.__version__, "python_version": platform.python_version()}
    section.facts = {**versions, "torch_version": None}
    section.add("infinity", Mark.OK, infinity.__version__)
    section.add("python", Mark.OK, f"{platform.python_version()} ({platform.python_implementation()})")
    try:
        with signals_held():  # an exception raised by Ctrl-C while torch loads may abort the process
            import torch
    except Exception as error:  # a missing CUDA library raises OSError
        section.add("torch", Mark.FAIL, f"torch can't be loaded: {error}", "install torch again: pip install torch")
    else:
        version = section.facts["torch_version"] = torch.__version__
        move = f"install a version that infinity is tested on: pip install '{REQUIREMENT}'"
        if why_too_old(version) is not None:
            section.add("torch", Mark.FAIL, f"{version}; infinity needs {TESTED}", move)
        else:
            untested = why_untested(version) is not None
            text = f"{version}; infinity is tested on {TESTED}" if untested else version
            section.warn_if(untested, "torch", text, move)
    try:
        from infinity import _aio  # noqa: F401
    except ImportError as error:
        move = "build it for this Python: make setup in a checkout, or pip install again"
        section.add("core", Mark.FAIL, f"the compiled core can't be loaded: {error}", move)


def check_machine(section: Section, machine: Facts) -> None:
    section.facts = machine.copy()
    system = f"{machine['distribution'] or 'Linux'}, kernel {machine['kernel']}, {machine['architecture']}"
    section.add("system", Mark.INFO, system)
    cpus = f"{machine['cpus']} for this process"
    if machine["cpus_online"]:
        cpus += f", {machine['cpus_online']} in the machine"
    if machine["numa_nodes"]:
        cpus += f", {machine['numa_nodes']} NUMA node{'s' * (machine['numa_nodes'] > 1)}"
    section.add("cpus", Mark.INFO, cpus)
    available, limit = machine["memory_available_bytes"], machine["memory_limit_bytes"]
    text = f"{size_text(machine['memory_bytes'])}, {size_text(available)} available"
    if limit is not None:
        used = machine["memory_limit_used_bytes"]
        text += f"; a control group allows {format_bytes(limit)}" + (f", {format_bytes(used)} used" if used else "")
    low = any(nbytes is not None and nbytes < _MEMORY_BYTES_MIN for nbytes in (available, limit))
    move = "end other programs or raise the container's memory limit: Python, torch and a small pool take about 1 GiB"
    section.warn_if(low, "memory", text, move)
    if machine["swap_bytes"]:
        text = f"{format_bytes(machine['swap_bytes'])}, {format_bytes(machine['swap_free_bytes'] or 0)} free"
        section.add("swap", Mark.INFO, f"{text}; infinity.lock_memory keeps the pool out of it")
    elif machine["swap_bytes"] is not None:
        section.add("swap", Mark.INFO, "none")
    rate = section.facts["memory_bytes_per_s"] = None if low else _memory_bytes_per_s()
    if rate is not None:
        seconds = ADAM_BYTES * 1e9 / rate
        text = f"{rate / 1e9:.1f} GB/s, so updating 1 B parameters in host memory takes {seconds:.2g} s"
        section.add("memory_speed", Mark.INFO, text)


def _memory_bytes_per_s() -> float | None:
    """Measure the bytes per second that a copy reads and writes, as the planner does; None without torch."""
    try:
        import torch

        from infinity.cli.plan.here import copy_rate
    except Exception:  # reported by `check_software`
        return None
    return 2 * copy_rate(torch.device("cpu"))


def check_gpu(section: Section) -> None:
    """Check CUDA. Without a device, CUDA is not initialized, and the CPU is checked instead."""
    section.facts = {"cuda_version": None, "driver_version": None, "available": False, "devices": []}
    try:
        import torch
    except Exception:
        section.add("cuda", Mark.INFO, "not checked, as torch can't be loaded")
        return
    driver = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text_of(Path("/proc/driver/nvidia/version")) or "")
    version = torch.version.cuda or torch.version.hip
    section.facts |= {"cuda_version": version, "driver_version": driver[1] if driver else None}
    present = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    if version and present and torch.cuda.is_available():
        section.add("cuda", Mark.OK, f"CUDA {version}, driver {driver[1] if driver else 'unknown'}")
        devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        gpus = [{"name": device.name, "memory_bytes": device.total_memory} for device in devices]
        section.facts |= {"available": True, "devices": gpus}
        for number, device in enumerate(devices):
            section.add(f"device_{number}", Mark.OK, f"{device.name}, {format_bytes(device.total_memory)}")
        return
    if not version:
        move = "install the CUDA build of torch (pytorch.org/get-started) to train on the GPU"
        text = "this torch is built for the CPU" + (", but there is a GPU" if present else "")
        section.warn_if(present, "cuda", text, move, otherwise=Mark.INFO)
    elif not present:
        section.add("cuda", Mark.INFO, f"no GPU here: training runs on the CPU (torch is built for CUDA {version})")
    else:
        move = "run nvidia-smi; check the driver's version, and that CUDA_VISIBLE_DEVICES is not empty"
        section.add("cuda", Mark.WARN, f"there is a GPU, but torch (CUDA {version}) can't use it", move)
    from infinity.device import why_slow

    why = why_slow(torch.bfloat16)
    section.facts["cpu_multiplies_in_bf16"] = why is None
    text = why or "bf16 multiplies with vector instructions of this CPU"
    section.warn_if(why is not None, "bf16", text, 'train without "bf16" in the config, or on a GPU')


def check_container(section: Section, container: Facts) -> None:
    section.facts = container
    section.add("container", Mark.INFO, container["kind"] or "none detected")
    if container["gvisor"]:
        move = "run under the machine's own kernel (docker run --runtime=runc) for io_uring, huge pages and full speed"
        section.add("gvisor", Mark.WARN, "the kernel is gVisor's: every system call goes through a sandbox", move)
    if container["seccomp"] == "filter":
        section.add("seccomp", Mark.INFO, "a filter restricts system calls; the backends below show which it refuses")
    elif container["seccomp"]:
        section.add("seccomp", Mark.OK if container["seccomp"] == "off" else Mark.INFO, container["seccomp"])
    words = {0: "allowed for all", 1: "allowed for one group and CAP_SYS_ADMIN", 2: "off for all"}
    setting = container["io_uring_disabled"]
    if setting is not None:
        text = f"kernel.io_uring_disabled is {setting}: {words.get(setting, 'unknown')}"
        section.add("io_uring_sysctl", Mark.OK if setting == 0 else Mark.INFO, text)
    if container["cap_ipc_lock"] is not None:
        text = "held: locked memory has no limit" if container["cap_ipc_lock"] else "not held: the memlock limit counts"
        section.add("cap_ipc_lock", Mark.INFO, text)


def check_limits(section: Section, limits: Facts, container: Facts) -> None:
    section.facts = limits
    soft = limits["memlock_soft_bytes"]
    text = f"{size_text(soft)} (at most {size_text(limits['memlock_hard_bytes'])})"
    if soft is None or container["cap_ipc_lock"]:
        why = "no limit" if soft is None else f"{text}, but CAP_IPC_LOCK lifts it"
        section.add("memlock", Mark.OK, f"{why}: a pool of any size can be registered and locked")
    else:
        text += ": a larger pool is not registered with io_uring (more CPU per byte), nor locked (infinity.lock_memory)"
        move = "ulimit -l unlimited, or docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in a systemd unit"
        section.add("memlock", Mark.WARN, text, move)
    files = limits["open_files_soft"]
    text = "no limit" if files is None else f"{files} (at most {count_text(limits['open_files_hard'])})"
    few = files is not None and files < _OPEN_FILES_MIN
    section.warn_if(few, "open_files", text, "raise it: ulimit -n 4096")
    if limits["file_size_bytes"] is not None:
        text = f"no file may grow beyond {format_bytes(limits['file_size_bytes'])}, and a rank's state is one file"
        section.add("file_size", Mark.WARN, text, "lift it: ulimit -f unlimited")
    if limits["aio_max_nr"] is not None and limits["aio_nr"] is not None:
        left = limits["aio_max_nr"] - limits["aio_nr"]
        text = f"{left} of {limits['aio_max_nr']} requests of kernel AIO are free"
        move = f"sysctl -w fs.aio-max-nr={max(1 << 20, 2 * limits['aio_max_nr'])} (as root)"
        section.warn_if(left < _AIO_REQUESTS_MIN, "kernel_aio", text, move)


def check_huge_pages(section: Section, pages: Facts) -> None:
    """Check the settings, and what the kernel gives to a trial slab."""
    section.facts = pages | {"trial_bytes": SLAB_BYTES, "trial_huge": None, "trial_notes": []}
    allow = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root, on the host)"
    if pages["enabled"] is None:
        section.add("transparent", Mark.WARN, "this kernel has no transparent huge pages", "use a kernel that has them")
    else:
        text = f"{pages['enabled']} (defrag: {pages['defrag'] or 'unknown'})"
        section.warn_if(pages["enabled"] == "never", "transparent", text, allow)
    for pool in pages["reserved"]:
        text = f"{pool['total']} of {format_bytes(pool['page_bytes'])}, {pool['free']} free: memory that nothing else can use"
        section.add("reserved", Mark.INFO, text)
    from infinity.aio import PinnedSlab

    try:
        slab = PinnedSlab(SLAB_BYTES)
    except MemoryError as error:
        section.add("trial", Mark.FAIL, str(error), "free memory, or raise the container's memory limit")
        return
    section.facts |= {"trial_huge": slab.huge_pages, "trial_notes": list(slab.notes)}
    if slab.huge_pages and not slab.notes:
        section.add("trial", Mark.OK, f"a slab of {format_bytes(SLAB_BYTES)} is in huge pages")
        return
    text = "; ".join(slab.notes) or f"a slab of {format_bytes(SLAB_BYTES)} is in small pages"
    section.add("trial", Mark.WARN, text, f"{allow}; echo 1 > /proc/sys/vm/compact_memory joins fragmented memory")


def check_backends(section: Section, container: Facts) -> None:
    """Check which backends work here, best first; "auto" takes the first that works."""
    from infinity.aio import probe

    probed = probe()
    chosen = next((name for name, available, _ in probed if available), None)
    keys = ("name", "available", "reason")
    section.facts = {"chosen": chosen, "probed": [dict(zip(keys, answer, strict=True)) for answer in probed]}
    better = chosen is not None
    for name, available, reason in probed:
        better = better and name != chosen
        if available:
            section.add(name, Mark.OK, reason + (' ("auto" takes it)' if name == chosen else ""))
        elif chosen is None:
            section.add(name, Mark.FAIL, reason, _backend_move(name, container))
        else:
            section.warn_if(better, name, reason, _backend_move(name, container), otherwise=Mark.INFO)


def _backend_move(name: str, container: Facts) -> str:
    if name == "io_uring":
        if container["gvisor"]:
            return "gVisor has no io_uring: run under the machine's own kernel (docker run --runtime=runc)"
        if container["io_uring_disabled"] == 2 or (
            container["io_uring_disabled"] == 1 and not container["cap_sys_admin"]
        ):
            return "sysctl -w kernel.io_uring_disabled=0 (as root, on the host)"
        if container["seccomp"] == "filter":
            calls = "io_uring_setup, io_uring_enter and io_uring_register"
            profile = f"a seccomp profile that allows {calls} (docker run --security-opt seccomp=PROFILE.json)"
            return f"start the container with {profile}"
    return "do what the line above says; until then the next backend in the list is used"
