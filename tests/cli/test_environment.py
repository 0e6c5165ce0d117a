"""What is read of machine, container and limits, on small trees that look like / ."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cli.environment import read_container, read_huge_pages, read_limits, read_machine

GIB = 1 << 30
ALL_USERS = "         0          0 4294967295"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture(autouse=True)
def outside_of_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def test_memory_and_nodes(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\nSwapTotal: 512 kB\nSwapFree: 256 kB",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
        },
    )
    machine = read_machine(tmp_path)
    assert (machine["memory_bytes"], machine["memory_available_bytes"]) == (2048 * 1024, 1024 * 1024)
    assert (machine["swap_bytes"], machine["swap_free_bytes"]) == (512 * 1024, 256 * 1024)
    assert machine["numa_nodes"] == 2
    assert machine["memory_limit_bytes"] is None
    assert 0 < machine["cpus"]


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job/task",
            "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "sys/fs/cgroup/user/memory.max": "max",
            "sys/fs/cgroup/user/job/memory.max": str(2 * GIB),
            "sys/fs/cgroup/user/job/memory.current": str(GIB),
            "sys/fs/cgroup/user/job/task/memory.max": str(3 * GIB),
        },
    )
    machine = read_machine(tmp_path)
    assert (machine["memory_limit_bytes"], machine["memory_limit_used_bytes"]) == (2 * GIB, GIB)


def test_a_container_sees_its_own_group_of_version_1_at_the_top(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/elsewhere",
            "proc/self/mountinfo": "30 23 0:27 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
            "31 23 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
            "sys/fs/cgroup/cpu/memory.limit_in_bytes": "1",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096",
        },
    )
    machine = read_machine(tmp_path)
    assert (machine["memory_limit_bytes"], machine["memory_limit_used_bytes"]) == (GIB, 4096)


def test_a_path_that_only_the_host_sees_falls_back_to_the_top(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/abc",
            "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw",
            "sys/fs/cgroup/memory.max": str(GIB),
        },
    )
    assert read_machine(tmp_path)["memory_limit_bytes"] == GIB


def test_the_number_that_means_no_limit_is_none(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a",
            "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert read_machine(tmp_path)["memory_limit_bytes"] is None


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("run/systemd/container", "lxc", "lxc"),
        ("proc/self/cgroup", "0::/docker/0123", "docker"),
        ("proc/self/cgroup", "0::/user.slice", None),
    ],
)
def test_kind_of_container(tmp_path: Path, file: str, text: str, kind: str | None) -> None:
    assert read_container(tree(tmp_path, {file: text}))["kind"] == kind


def test_what_a_container_forbids(tmp_path: Path) -> None:
    status = "Name:\tpython\nCapEff:\t{:016x}\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1"
    files = {
        "proc/self/status": status.format(1 << 14),
        "proc/self/uid_map": ALL_USERS,
        "proc/sys/kernel/io_uring_disabled": "1",
        "proc/version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016",
    }
    container = read_container(tree(tmp_path, files))
    assert (container["seccomp"], container["no_new_privileges"], container["io_uring_disabled"]) == ("filter", True, 1)
    assert (container["cap_ipc_lock"], container["cap_sys_admin"], container["user_namespace"]) == (True, False, False)
    assert container["gvisor"]


def test_capabilities_of_a_user_namespace_lift_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/status": f"CapEff:\t{(1 << 41) - 1:016x}", "proc/self/uid_map": "0 1000 1"}
    container = read_container(tree(tmp_path, files))
    assert (container["user_namespace"], container["cap_ipc_lock"], container["cap_sys_admin"]) == (True, False, False)


def test_huge_pages(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise madvise [never]",
            "sys/kernel/mm/transparent_hugepage/hpage_pmd_size": "2097152",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "8",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "3",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
        },
    )
    pages = read_huge_pages(tmp_path)
    assert (pages["enabled"], pages["defrag"], pages["page_bytes"]) == ("madvise", "never", 2 << 20)
    assert pages["reserved"] == [{"page_bytes": 2 << 20, "total": 8, "free": 3}]


def test_nothing_to_read_is_nothing_known(tmp_path: Path) -> None:
    machine, container = read_machine(tmp_path), read_container(tmp_path)
    assert (machine["memory_bytes"], machine["memory_limit_bytes"], machine["numa_nodes"]) == (None, None, None)
    assert (container["kind"], container["seccomp"], container["cap_ipc_lock"], container["gvisor"]) == (
        None,
        None,
        None,
        False,
    )
    assert read_huge_pages(tmp_path)["enabled"] is None
    assert read_limits(tmp_path)["aio_max_nr"] is None
