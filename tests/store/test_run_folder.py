"""What the run folder promises: a locked place of one's own, that is gone when the run is, however the run ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import InfinityError, StoreError
from infinity.store import run_folder
from infinity.store.run_folder import RunFolder, free_bytes, remove_stale

# Makes a run folder in argv[1], tells its path, and lives until its input closes.
HOLDER = """
import sys
from infinity.store.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that holds a run folder."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-c", HOLDER, str(root)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder(tmp_path)
    yield holder
    holder.kill()


def test_folder_is_private_and_tells_whose_it_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.path.parent == folder.root == tmp_path
    assert folder.path.name.startswith(f"infinity-run-{os.getpid()}-")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [folder.path / "lock"]} == {"lock": 0}
    assert json.loads((folder.path / "run.json").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.close()


def test_folder_is_locked_while_the_run_lives(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with (folder.path / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.close()


def test_only_the_last_folder_of_a_path_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"nvme_path {tmp_path}/a/b/c can't be made \({tmp_path}/a does not exist\)"):
        RunFolder(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []
    folder = RunFolder(tmp_path / "a")
    assert folder.path.is_dir()
    folder.close()
    assert list((tmp_path / "a").iterdir()) == []


def test_relative_path_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("swap")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert folder.path.parent == tmp_path / "swap"
    folder.close()
    assert list((tmp_path / "swap").iterdir()) == []


def test_close_removes_everything_and_may_be_called_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (folder.path / "sub").mkdir()
    (folder.path / "sub" / "file").write_text("x")
    folder.close()
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_second_close_does_not_close_a_descriptor_of_somebody_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.close()
    with (tmp_path / "other").open("w") as other:
        folder.close()
        os.fstat(other.fileno())


def test_forgotten_folder_goes_with_its_owner(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    del folder
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_living_process_stays_and_of_a_killed_one_goes(holder: Holder, tmp_path: Path) -> None:
    RunFolder(tmp_path).close()
    assert list(tmp_path.iterdir()) == [holder.path]
    holder.kill()
    assert list(tmp_path.iterdir()) == [holder.path]
    folder = RunFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.close()


def test_two_runs_share_a_path(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert first.path != second.path
    second.close()
    assert list(tmp_path.iterdir()) == [first.path]
    first.close()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    mine = tmp_path / "data"
    mine.mkdir()
    (tmp_path / "infinity-run-notes.txt").write_text("x")
    (tmp_path / "infinity-run-1-0").mkdir()  # without a lock: being made or removed just now
    remove_stale(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "infinity-run-notes.txt", "infinity-run-1-0"}


def test_forked_child_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    child = os.fork()
    if child == 0:
        folder.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert folder.path.is_dir()
    RunFolder(tmp_path).close()
    assert folder.path.is_dir()  # still locked
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_forked_child_that_exits_leaves_the_folder_too(tmp_path: Path) -> None:
    """As a data loader's worker does: through the interpreter's exit, with its finalizers. The parent's exit removes it."""
    script = (
        "import os, sys\n"
        "from infinity.store.run_folder import RunFolder\n"
        "folder = RunFolder(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert folder.path.is_dir()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []


def test_space_and_folder_of_a_killed_run_are_free_though_a_forked_child_lives(nvme_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from infinity.aio import IoEngine, PinnedPool\n"
        "from infinity.store.arena import Arena\n"
        "from infinity.store.run_folder import RunFolder\n"
        "engine = IoEngine(PinnedPool(4096))\n"
        "arena = Arena(RunFolder(sys.argv[1]), engine, name='rank0.arena')\n"
        "arena.reserve([1 << 20], 'the test')\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(child, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(nvme_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]  # noqa: PTH115
        assert not [link for link in links if str(nvme_path) in link or "io_uring" in link]
        remove_stale(nvme_path)
        assert list(nvme_path.iterdir()) == []
    finally:
        parent.stdin.close()  # which ends the child, too
        parent.stdout.read()


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError, match=r"/file is a file, not a folder: choose another nvme_path") as caught:
        RunFolder(file)
    assert str(file) in str(caught.value)
    assert isinstance(caught.value, InfinityError) and isinstance(caught.value, OSError)
    with pytest.raises(StoreError, match=r"/file is a file, not a folder"):
        RunFolder(file / "below")
    assert file.read_text() == "x"


def test_path_that_can_not_be_made_is_refused() -> None:
    with pytest.raises(StoreError, match=r"nvme_path /proc/none/swap can't be made \(/proc/none does not exist\)"):
        RunFolder("/proc/none/swap")


def test_path_that_is_not_writable_is_refused() -> None:
    with pytest.raises(StoreError, match=r"nvme_path /proc is not writable .*: change its owner or choose another"):
        RunFolder("/proc")


def test_missing_space_is_told_with_what_for_and_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: 1 << 30)
    folder.check_free(1 << 30, "optimizer state")
    with pytest.raises(StoreError) as caught:
        folder.check_free(3 << 30, "optimizer state")
    assert str(caught.value.strerror) == (
        f"optimizer state: 3.00 GiB are needed on {tmp_path}, where 1.00 GiB are free: "
        "free 2.00 GiB more or choose another nvme_path"
    )
    folder.close()


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    total = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= total.f_blocks * total.f_frsize


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_that_can_not_be_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def refuse(*_: object) -> None:
        raise failure

    monkeypatch.setattr(run_folder, "write_durably", refuse)
    with pytest.raises((StoreError, KeyboardInterrupt)) as caught:
        RunFolder(tmp_path)
    if isinstance(failure, OSError):
        assert str(tmp_path) in str(caught.value)
        assert "free space" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_folders_and_links_of_others_stay(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "lock").touch()
    (precious / "data").touch()
    (tmp_path / "infinity-run-1-link").symlink_to(precious)
    linked = tmp_path / "infinity-run-2-lock"
    linked.mkdir()
    (linked / "lock").symlink_to(precious / "lock")
    piped = tmp_path / "infinity-run-3-pipe"
    piped.mkdir()
    os.mkfifo(piped / "lock")
    before = {path.name for path in tmp_path.iterdir()}
    remove_stale(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before - {piped.name}  # ours, and its lock is free
    assert sorted(path.name for path in precious.iterdir()) == ["data", "lock"]


def test_a_dead_run_of_another_user_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    theirs = tmp_path / "infinity-run-1-theirs"
    theirs.mkdir()
    (theirs / "lock").touch()
    os.chown(theirs, 65534, 65534)
    remove_stale(tmp_path)
    assert theirs.is_dir()


def test_a_place_where_everybody_may_rename_is_noted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "place")
    assert folder.notes == []
    (tmp_path / "place").chmod(0o777)
    assert "chmod +t" in folder.notes[0]
    (tmp_path / "place").chmod(0o1777)
    assert folder.notes == []
    folder.close()


def test_a_symlinked_place_is_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = RunFolder(tmp_path / "link")
    assert [each.name for each in (tmp_path / "real").iterdir()] == [folder.path.name]
    folder.close()
    assert list((tmp_path / "real").iterdir()) == []


def test_what_is_made_is_for_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = RunFolder(tmp_path)
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.path.iterdir()} == {0o600}
    folder.close()
