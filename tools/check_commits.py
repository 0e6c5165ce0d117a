#!/usr/bin/env python3
"""Whether every commit says what it does: a subject "area: do one thing" of at most 72 characters, and a body that says why.

Looks at the commits after FIRST, without merges and reverts, whose words git chooses. A commit of tests and docs alone may do
without a body. Exits with 1 and a line for each that doesn't hold; with 0 and the reason where history can't be seen.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "d268531"
"""The last commit from before this rule."""
EXCUSED = {"4bde93c", "6005e6b", "7e058a8"}
"""Commits from before this check that have no body."""

SUBJECT_LENGTH_MAX = 72
SUBJECT = re.compile(r"[A-Za-z][\w ,./-]*: \S.*[^.\s]")
WITHOUT_BODY = re.compile(r"(tests|docs|bench)/|.*\.md$")


class HistoryError(Exception):
    """Why the commits can't be looked at."""


def main() -> int:
    try:
        wrong = [line for commit in commits(ROOT, FIRST) for line in faults(ROOT, commit)]
    except HistoryError as error:
        print(f"commits: skipped: {error}")
        return 0
    for line in wrong:
        print(f"commits: {line}", file=sys.stderr)
    return 1 if wrong else 0


def git(root: Path, *arguments: str) -> str:
    """What git says. Raises HistoryError in its words."""
    try:
        done = subprocess.run(
            ["git", "-c", f"safe.directory={root}", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise HistoryError("git is missing") from None
    except subprocess.CalledProcessError as error:
        raise HistoryError((error.stderr.strip() or "git failed").splitlines()[0]) from None
    return done.stdout


def commits(root: Path, first: str) -> list[str]:
    """The commits after `first`, newest first. Raises HistoryError where it isn't among those that HEAD comes from."""
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise HistoryError("a shallow clone: git fetch --unshallow")
    if git(root, "merge-base", first, "HEAD").strip() != git(root, "rev-parse", first).strip():
        raise HistoryError(f"HEAD does not come from the commit {first}")
    return git(root, "rev-list", "--no-merges", f"{first}..HEAD").split()


def faults(root: Path, commit: str) -> list[str]:
    """What is wrong with the words of a commit, a line each."""
    subject, _, body = git(root, "show", "--no-patch", "--format=%s%n%b", commit).partition("\n")
    if subject.startswith('Revert "') or commit[: len(FIRST)] in EXCUSED:
        return []
    name, lines = f"{commit[:10]} {subject!r}", []
    if len(subject) > SUBJECT_LENGTH_MAX:
        lines.append(f"{name}: {len(subject)} characters, at most {SUBJECT_LENGTH_MAX}")
    if not SUBJECT.fullmatch(subject):
        lines.append(f'{name}: not "area: do one thing"')
    if not body.strip():
        files = git(root, "show", "--format=", "--name-only", commit).split("\n")
        if not all(WITHOUT_BODY.match(file) for file in files if file):
            lines.append(f"{name}: no body that says why")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
