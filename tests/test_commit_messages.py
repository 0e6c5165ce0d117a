"""tools/check_commits.py finds commits that don't say what they do, and skips history that it can't see."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is missing")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_commits", ROOT / "tools" / "check_commits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load()


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, message: str, file: str = "infinity/a.py") -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    with (folder / file).open("a") as appended:
        appended.write("x\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", message)


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str]:
    """A repository, and its first commit."""
    git(tmp_path, "init", "-q")
    commit(tmp_path, "Whatever came before the rule.")
    return tmp_path, git(tmp_path, "rev-parse", "HEAD")


def faults(history: tuple[Path, str]) -> list[str]:
    root, first = history
    return [line for name in check.commits(root, first) for line in check.faults(root, name)]


@pytest.mark.parametrize(
    ("message", "file"),
    [
        ("store: name the fields\n\nBecause.", "infinity/a.py"),
        ("Bench results, docs: what it took\n\nBecause.", "infinity/a.py"),
        ("tests: fewer seeds", "tests/a.py"),
        ("docs: say it once", "README.md"),
        ('Revert "anything at all"', "infinity/a.py"),
        (f"a: {'x' * 69}\n\nBecause.", "infinity/a.py"),
    ],
)
def test_a_commit_that_says_what_it_does_passes(history: tuple[Path, str], message: str, file: str) -> None:
    commit(history[0], message, file)
    assert faults(history) == []


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Fix it\n\nBecause.", 'not "area: do one thing"'),
        ("store: name the fields.\n\nBecause.", 'not "area: do one thing"'),
        ("store: name the fields", "no body that says why"),
        (f"a: {'x' * 70}\n\nBecause.", "73 characters, at most 72"),
    ],
)
def test_a_commit_that_does_not_is_named(history: tuple[Path, str], message: str, reason: str) -> None:
    commit(history[0], message)
    (line,) = faults(history)
    assert line.endswith(reason)


def test_history_that_can_not_be_seen_is_skipped(history: tuple[Path, str], tmp_path: Path) -> None:
    root, first = history
    commit(root, "Fix it")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", root.as_uri(), str(shallow))
    for folder, start, reason in (
        (shallow, first, "a shallow clone"),
        (root, "0" * 40, "commit"),
        (Path("/"), first, "git"),
    ):
        with pytest.raises(check.HistoryError, match=reason):
            check.commits(folder, start)
