#!/usr/bin/env python3
"""`make release-check`: everything that must hold before a release, each line with what it took.

    python tools/release_check.py --quick            what takes a minute or two: for every day, and for CI
    python tools/release_check.py --version 0.2.0    all of it, hours with the torches, for the release of that number

CONTRIBUTING.md has the whole checklist; this is the part of it that a machine can do. Exits with 1 if any check failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASED = re.compile(r"## (\d+\.\d+\.\d+) – (\d{4}-\d{2}-\d{2})")


class CheckError(Exception):
    """Why a check failed."""


@dataclass(frozen=True)
class Check:
    """promise: what holds when it passed. slow: whether it takes more than a minute."""

    promise: str
    run: Callable[[], None]
    slow: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description="Check everything that must hold before a release.")
    parser.add_argument("--quick", action="store_true", help="leave out what takes more than a minute")
    parser.add_argument("--version", help="the number to release; without it nothing is asked of number and changelog")
    options = parser.parse_args()
    version = [Check(f"everything says {options.version}", lambda: says_version(options.version))]
    failed = 0
    try:
        for check in [*(version if options.version else []), *CHECKS]:
            if check.slow and options.quick:
                say("left out", check.promise)
                continue
            failed += not passed(check)
    except KeyboardInterrupt:
        print("\nrelease_check: interrupted", file=sys.stderr)
        return 130
    print(f"\n{failed} failed" if failed else "\nall passed" + ", of those that were run" * options.quick)
    return 1 if failed else 0


def passed(check: Check) -> bool:
    began = time.monotonic()
    try:
        check.run()
    except CheckError as error:
        say("FAILED", check.promise, f"{error}")
        return False
    say("ok", f"{check.promise} ({time.monotonic() - began:.0f} s)")
    return True


def say(how: str, *lines: str) -> None:
    print(f"{how:<10}" + "\n          ".join(lines), flush=True)


def command(*words: str) -> Callable[[], None]:
    """Return a check that a command exits with 0; its failure shows the last lines of output."""

    def run() -> None:
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            tail = "\n          ".join(done.stdout.splitlines()[-15:])
            raise CheckError(f"{' '.join(words)}: exit status {done.returncode}\n          {tail}")

    return run


def nothing_uncommitted() -> None:
    changed = git("status", "--short").splitlines()
    if changed:
        raise CheckError(
            f"{len(changed)} changed or new files, such as {changed[0].split()[-1]}: commit or remove them"
        )


def pages_are_current() -> None:
    for page, words in {
        "docs/config.md": ("-m", "infinity.config"),
        "docs/machines.md": ("tools/make_machines_page.py",),
    }.items():
        made = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise CheckError(f"{' '.join(words)}: {(made.stderr.splitlines() or ['no output'])[-1]}")
        if made.stdout != (ROOT / page).read_text():
            raise CheckError(f"{page} is old: python {' '.join(words)} > {page}")


def says_version(version: str) -> None:
    """The package, the changelog and the citation have this number, and no tag has it yet but on this commit."""
    said = re.search(r'^__version__ = "(.+)"$', (ROOT / "infinity" / "__init__.py").read_text(), re.M)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    log = (ROOT / "CHANGELOG.md").read_text()
    first, newest = re.findall(r"^## .+$", log, re.M)[0], RELEASED.search(log)
    wrong = [
        *([] if said and said[1] == version else [f"infinity/__init__.py says {said[1] if said else 'nothing'}"]),
        *([] if cited and cited[1] == version else [f"CITATION.cff says {cited[1] if cited else 'nothing'}"]),
        *([] if newest and newest[1] == version and first == newest[0] else [f"CHANGELOG.md begins with {first!r}"]),
    ]
    tag = f"v{version}"
    if tag in git("tag", "--list").split() and git("rev-parse", f"{tag}^{{commit}}") != git("rev-parse", "HEAD"):
        wrong.append(f"the tag {tag} is on another commit")
    if wrong:
        raise CheckError("; ".join(wrong))


def git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CheckError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


CHECKS = (
    Check("nothing is uncommitted", nothing_uncommitted),
    Check("every commit says what and why", command(sys.executable, "tools/check_commits.py")),
    Check("generated pages are what their programs write", pages_are_current),
    Check("the site builds, and every link leads somewhere", command("make", "docs", "ARGS=--no-picture")),
    Check("style, layout and types", command("make", "lint")),
    Check("a wheel works where neither compiler nor liburing is", command("make", "test-wheel")),
    Check("wheels for every Python here, and the source distribution", command("make", "wheels"), slow=True),
    Check("the tests, from a clean checkout", command("bash", ".ci/run"), slow=True),
    Check("the integrations", command("make", "test-integrations"), slow=True),
    Check("what the tests leave out because it takes minutes", command("make", "test-long"), slow=True),
    Check("every torch of the range", command("make", "test-torch"), slow=True),
    Check("the core under fuzzers", command("make", "fuzz", "SECONDS=60"), slow=True),
    Check("kills and faults", command("make", "torture", "SEEDS=300", "KILLS=20", "INPUTS=100"), slow=True),
    Check("the demo", command("make", "demo"), slow=True),
)


if __name__ == "__main__":
    sys.exit(main())
