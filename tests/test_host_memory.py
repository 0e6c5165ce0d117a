"""What may still be taken: the least that the machine and any control group around the process leave, and a rank's share."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.host_memory import available_bytes, control_group_limits, ranks_here
from infinity.units import GIB, MIB

V2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "31 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def version_2(root: Path, files: dict[str, str], path: str = "/job/task") -> Path:
    (root / "sys/fs/cgroup/job/task").mkdir(parents=True)
    common = {
        "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable:   {60 * GIB // 1024} kB",
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": V2,
    }
    return tree(root, common | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(version_2(tmp_path, {"job/memory.max": "max", "job/memory.high": "max"})) == 60 * GIB
    assert available_bytes(tmp_path / "nothing") is None


def test_a_group_leaves_its_limit_less_what_can_not_be_taken_back(tmp_path: Path) -> None:
    stat = (
        f"anon {2 * GIB}\nfile {3 * GIB}\nshmem {GIB}\nactive_file {GIB}\ninactive_file {GIB}\nslab_reclaimable {MIB}"
    )
    files = {"job/memory.max": str(8 * GIB), "job/memory.current": str(6 * GIB), "job/memory.stat": stat}
    assert available_bytes(version_2(tmp_path, files)) == 4 * GIB + MIB


def test_where_a_group_slows_down_counts_as_its_limit(tmp_path: Path) -> None:
    files = {"job/memory.max": str(8 * GIB), "job/memory.high": str(5 * GIB), "job/memory.current": str(GIB)}
    assert available_bytes(version_2(tmp_path, files)) == 4 * GIB
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max")
    assert available_bytes(tmp_path) == 4 * GIB


def test_of_nested_groups_the_one_that_leaves_least_counts(tmp_path: Path) -> None:
    files = {
        "job/memory.max": str(32 * GIB),
        "job/memory.current": str(30 * GIB),
        "job/task/memory.max": str(16 * GIB),
        "job/task/memory.current": str(GIB),
    }
    root = version_2(tmp_path, files)
    assert [limit.limit_bytes for limit in control_group_limits(root)] == [16 * GIB, 32 * GIB]
    assert available_bytes(root) == 2 * GIB
    (root / "sys/fs/cgroup/job/memory.current").write_text(str(40 * GIB))
    assert available_bytes(root) == 0


def test_a_container_sees_its_group_at_the_top(tmp_path: Path) -> None:
    root = version_2(tmp_path, {"memory.max": str(GIB), "memory.current": "0"}, path="/kubepods/pod1/abc")
    assert available_bytes(root) == GIB


def test_version_1_counts_what_its_children_cache(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemAvailable: {60 * GIB // 1024} kB",
        "proc/self/cgroup": "5:cpu:/a\n4:memory:/slurm/job\n0::/elsewhere",
        "proc/self/mountinfo": V1,
        "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/slurm/job/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/slurm/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {MIB}",
    }
    assert available_bytes(tree(tmp_path, files)) == 2 * GIB + MIB


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4), ({"LOCAL_WORLD_SIZE": "?"}, 1)],
)
def test_ranks_are_counted_as_their_launcher_tells(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_here() == ranks


def test_this_machine_says_something_that_can_be() -> None:
    available = available_bytes()
    assert available is None or 0 <= available < 1 << 50
