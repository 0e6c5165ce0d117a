"""What a durable run's files promise: they stay, are ours alone, and every record that exists is true."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launch
import pytest
from test_commit import place

from infinity.errors import CheckpointError, IoError, StoreError
from infinity.store import durable
from infinity.store.commit import Commit, Record
from infinity.store.durable import DurableRun

LAUNCH = "00000000000000aa"

# Holds a run's files in argv[1], says so, and lives until its input closes; argv[2] "fork" leaves a child that lives on, made
# when the arena was open and used.
HOLDER = """
import os, sys, time
import torch
from infinity.aio import IoEngine, PinnedPool, Priority, Request
from infinity.store.durable import DurableRun
run = DurableRun([sys.argv[1]], "run", 0)
if sys.argv[2:] == ["fork"]:
    run.start_anew("00000000000000aa")
    pool = PinnedPool(4096)
    engine = IoEngine(pool)
    file = run.folders[0].open_arena("rank0.arena", 0)
    file.reserve(4096)
    lease = pool.lease(4096)
    lease.view(torch.uint8).fill_(7)
    engine.wait(engine.start([Request("write", file, 0, lease, 0, 4096, Priority.DEMAND)]))
    if os.fork() == 0:
        time.sleep(60)
print("ready", flush=True)
sys.stdin.read()
"""


LIMITED = """
import resource
from pathlib import Path
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30),) * 2)
"""
RESUME = """
import sys
from infinity.store.durable import DurableRun
run = DurableRun([sys.argv[1]], "run", 0)
print(*(record.commit.step for record in run.records.values()), run.damaged)
"""


def open_run(path: Path) -> DurableRun:
    return DurableRun([path], "run", 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DurableRun]:
    made = open_run(tmp_path)
    made.start_anew(LAUNCH)
    yield made
    made.close()


def commit(run: DurableRun, step: int) -> int:
    where = place()
    count = len(where.sub_groups)
    head = Commit(
        sequence=run.sequence + 1,
        launch=run.launch,
        arena=run.arena,
        step=step,
        slots="0" * count,
        filled="111",
        stepped="111",
        ties=(0,) * count,
    )
    run.write(Record(head, where, b"", b"unpaged_state"))
    return head.sequence


def make_arena(run: DurableRun) -> Path:
    path = run.folders[0].file("arena")
    path.write_bytes(bytes(place().arena_bytes))
    return path


def steps(run: DurableRun) -> list[int]:
    return sorted(record.commit.step for record in run.records.values())


def test_files_are_ours_alone_and_stay(run: DurableRun, tmp_path: Path) -> None:
    commit(run, 1)
    run.close()
    folder = tmp_path / "infinity-durable-run"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {each.name for each in folder.iterdir()} == {"rank0.lock", "rank0.json", "rank0.commit-1"}
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    assert steps(open_run(tmp_path)) == [1]


def test_who_began_without_a_commit_is_noted(run: DurableRun, tmp_path: Path) -> None:
    run.close()
    again = open_run(tmp_path)
    assert again.began_without_commit == LAUNCH
    commit(again, 1)
    again.close()
    assert open_run(tmp_path).began_without_commit is None
    assert DurableRun([tmp_path], "run", 1).began_without_commit is None


def test_a_start_that_is_given_up_leaves_nothing(run: DurableRun, tmp_path: Path) -> None:
    make_arena(run)
    run.give_up()
    assert not list(tmp_path.iterdir())


def test_a_start_that_is_given_up_leaves_the_files_of_others(run: DurableRun, tmp_path: Path) -> None:
    other = DurableRun([tmp_path], "run", 1)
    run.give_up()
    assert [each.name for each in (tmp_path / "infinity-durable-run").iterdir()] == ["rank1.lock"]
    other.give_up()
    assert not list(tmp_path.iterdir())


def test_a_start_that_is_given_up_leaves_what_another_made_meanwhile(run: DurableRun, tmp_path: Path) -> None:
    run.close()
    later = open_run(tmp_path)
    later.start_anew(LAUNCH)
    make_arena(later)
    later.close()
    run.give_up()
    assert {each.name for each in (tmp_path / "infinity-durable-run").iterdir()} >= {"rank0.json", "rank0.arena"}


def test_a_first_commit_stays_where_its_start_is_given_up_right_after(run: DurableRun, tmp_path: Path) -> None:
    commit(run, 1)  # and what was before it is not removed yet
    run.give_up()
    assert steps(open_run(tmp_path)) == [1]


def test_what_is_committed_stays_where_a_start_is_given_up(run: DurableRun, tmp_path: Path) -> None:
    run.leave_one(commit(run, 1))
    make_arena(run)
    run.give_up()
    not_begun = open_run(tmp_path)
    not_begun.give_up()
    gone_on = open_run(tmp_path)
    gone_on.go_on(1, LAUNCH)
    gone_on.give_up()
    assert steps(open_run(tmp_path)) == [1]
    assert (tmp_path / "infinity-durable-run" / "rank0.arena").exists()


def test_a_lock_that_its_owner_removes_meanwhile_is_no_lock(run: DurableRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one who waited for it and the next to come would both have the run."""
    path = run.folders[0].file("lock")
    run.close()
    removed: list[int] = []

    def remove_once(lock: int, operation: int) -> None:
        if not removed:
            path.unlink()
            removed.append(lock)

    monkeypatch.setattr(durable.fcntl, "flock", remove_once)
    lock = durable._lock(path)
    assert removed and os.path.samestat(os.fstat(lock), path.lstat())
    os.close(lock)


def test_two_records_exist_until_the_older_is_let_go(run: DurableRun, tmp_path: Path) -> None:
    run.leave_one(commit(run, 1))
    second = commit(run, 2)
    run.close()
    again = open_run(tmp_path)
    assert steps(again) == [1, 2]
    again.leave_one(second)
    again.close()
    assert steps(open_run(tmp_path)) == [2]


def test_going_on_from_the_older_removes_the_newer(run: DurableRun, tmp_path: Path) -> None:
    first = commit(run, 1)
    run.leave_one(first)
    commit(run, 2)
    make_arena(run)
    run.close()
    again = open_run(tmp_path)
    assert again.go_on(first, LAUNCH).commit.step == 1
    assert commit(again, 2) == first + 1
    again.close()
    assert steps(open_run(tmp_path)) == [1, 2]


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "renamed", "linked"])
def test_a_damaged_record_is_named_and_the_other_one_found(run: DurableRun, tmp_path: Path, harm: str) -> None:
    run.leave_one(commit(run, 1))
    commit(run, 2)
    run.close()
    folder = tmp_path / "infinity-durable-run"
    newest, older = folder / "rank0.commit-0", folder / "rank0.commit-1"
    content = bytearray(newest.read_bytes())
    if harm == "renamed":
        newest.write_bytes(older.read_bytes())
    elif harm == "linked":
        newest.rename(tmp_path / "elsewhere")
        newest.symlink_to(tmp_path / "elsewhere")
    else:
        content[len(content) // 2] ^= 4
        newest.write_bytes({"cut": content[:-1], "flipped": content, "emptied": b""}[harm])
    again = open_run(tmp_path)
    assert steps(again) == [1]
    assert len(again.damaged) == 1
    assert str(newest) in again.damaged[0]
    assert "damaged" in again.damaged[0]


def test_what_a_killed_write_left_is_no_record_and_goes(run: DurableRun, tmp_path: Path) -> None:
    first = commit(run, 1)
    make_arena(run)
    partial = tmp_path / "infinity-durable-run" / ".rank0.commit-0.partial"
    partial.write_bytes(b"half of it")
    run.close()
    again = open_run(tmp_path)
    assert steps(again) == [1]
    assert not again.damaged
    again.go_on(first, LAUNCH)
    assert not partial.exists()


@pytest.mark.parametrize("name", [".rank0.commit-0.partial", "rank0.commit-0"])
def test_a_folder_where_a_record_belongs_is_told_in_words(name: str, run: DurableRun, tmp_path: Path) -> None:
    first = commit(run, 1)
    make_arena(run)
    folder = tmp_path / "infinity-durable-run" / name
    folder.mkdir()
    with pytest.raises(StoreError, match=rf"{name} is a folder where a file of infinity's belongs: move it away"):
        run.leave_one(first)
    run.close()
    again = open_run(tmp_path)
    with pytest.raises(StoreError, match="is a folder where"):
        again.go_on(first, LAUNCH)
    again.close()
    with pytest.raises(StoreError, match="is a folder where"):
        again.start_anew(LAUNCH)
    assert folder.is_dir()


def test_records_are_read_in_the_memory_that_they_take(run: DurableRun, tmp_path: Path) -> None:
    """Where no more can be promised, as on small machines and under a limit of address space; one that is larger than that is
    told in words."""
    commit(run, 1)
    make_arena(run)
    run.close()
    done = launch.code(LIMITED + RESUME, str(tmp_path))
    assert done.stdout == "1 []\n", done.stderr
    with (tmp_path / "infinity-durable-run" / "rank0.commit-1").open("r+b") as record:
        record.truncate(8 << 30)
    done = launch.code(LIMITED + RESUME, str(tmp_path))
    assert "rank0.commit-1 has 8.00 GiB, for which there is no memory" in done.stdout, done.stderr


def test_starting_anew_takes_away_only_this_ranks_files(run: DurableRun, tmp_path: Path) -> None:
    make_arena(run)
    other = tmp_path / "infinity-durable-run" / "rank1.arena"
    other.touch()
    run.start_anew(LAUNCH)
    assert {each.name for each in other.parent.iterdir()} == {"rank0.lock", "rank0.json", "rank1.arena"}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda arena: arena.unlink(), "is missing"),
        (lambda arena: os.truncate(arena, 4096), "4096 bytes instead of"),
        (lambda arena: (arena.unlink(), arena.symlink_to("/dev/zero")), "damaged"),
        (lambda arena: arena.with_name("rank0.json").write_text("{}"), "damaged or missing"),
        (lambda arena: arena.with_name("rank0.json").write_text("[" * 100_000), "damaged or missing"),
        (
            lambda arena: arena.with_name("rank0.json").write_text('{"arena": "x", "drive": 0, "drives": 1}'),
            "belongs to another run",
        ),
    ],
)
def test_an_arena_that_is_not_the_records_own_is_refused(  # type: ignore[no-untyped-def]
    run: DurableRun, tmp_path: Path, harm, words: str
) -> None:
    first = commit(run, 1)
    harm(make_arena(run))
    run.close()
    again = open_run(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        again.go_on(first, LAUNCH)
    again.close()
    assert steps(open_run(tmp_path)) == [1]  # nothing was touched


def test_drives_must_be_named_as_they_were(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    run = DurableRun(paths, "run", 0)
    run.start_anew(LAUNCH)
    first = commit(run, 1)
    make_arena(run)
    run.close()
    swapped = DurableRun([paths[0], tmp_path / "c"], "run", 0)
    with pytest.raises(CheckpointError, match=r"c/infinity-durable-run/rank0.json is damaged or missing"):
        swapped.go_on(first, LAUNCH)
    swapped.close()
    with pytest.raises(CheckpointError, match="drive 1 of the 2 of a run"):
        DurableRun(paths[:1], "run", 0).go_on(first, LAUNCH)


def hold(path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(path), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_live_runs_files_are_never_touched(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        with pytest.raises(StoreError, match=f"in use by process {holder.pid}"):
            open_run(tmp_path)
        DurableRun([tmp_path], "run", 1).close()  # another rank's are free
        DurableRun([tmp_path], "other", 0).close()
    finally:
        holder.kill()
        holder.communicate()
    open_run(tmp_path).close()


def test_a_forked_child_does_not_keep_the_files_of_a_dead_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the lock of its arena: a resume only waits for the kernel to finish the writes."""
    monkeypatch.setattr(durable, "_ENDING_SECONDS_MAX", 5.0)
    holder = hold(tmp_path, "fork")
    try:
        holder.kill()
        holder.wait()
        with contextlib.closing(open_run(tmp_path)) as run:
            run.folders[0].fresh = False
            file = run.folders[0].open_arena("rank0.arena", 0)
            file.close()
    finally:
        os.killpg(holder.pid, 9)


def test_the_same_process_has_them_once(run: DurableRun, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        open_run(tmp_path)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "infinity-durable-run"
    folder.mkdir(mode=0o755)
    with pytest.raises(StoreError, match="only this user can enter"):
        open_run(tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(StoreError, match="only this user can enter"):
        open_run(tmp_path)


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "infinity-durable-run"
    folder.mkdir(mode=0o700)
    (folder / "rank0.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StoreError, match="can't be used"):
        open_run(tmp_path)
    assert not (tmp_path / "precious").exists()


def test_an_arena_that_somebody_writes_to_is_waited_for(
    run: DurableRun, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may still have writes of a killed process: they hold the open file, and with it the lock."""
    monkeypatch.setattr(durable, "_ENDING_SECONDS_MAX", 0.3)
    own = DurableRun([nvme_path], "run", 0)
    own.start_anew(LAUNCH)
    held = own.folders[0].open_arena("rank0.arena", 0)
    own.folders[0].fresh = False
    with pytest.raises(IoError, match="lock"):
        own.folders[0].open_arena("rank0.arena", 0)
    held.close()
    own.folders[0].open_arena("rank0.arena", 0).close()
    own.close()
