"""`infinity-bench doctor`: runs all checks and prints what they find. Leaves no files. Main thread."""

from __future__ import annotations

import argparse
import errno
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from infinity.cli.arguments import add_json, add_path, check_files, write_json
from infinity.cli.doctor.findings import Finding, Mark, Section
from infinity.cli.doctor.machine_checks import (
    check_backends,
    check_container,
    check_gpu,
    check_huge_pages,
    check_limits,
    check_machine,
    check_software,
)
from infinity.cli.doctor.path_checks import check_drive, check_path, check_trial
from infinity.cli.environment import read_container, read_huge_pages, read_limits, read_machine
from infinity.cli.program import usage_checked
from infinity.errors import StoreError

JSON_FORMAT = 1
"""Incremented when a key of the JSON report changes its meaning or is removed, not when one is added."""

_DECISIVE = ("software", "backends", "path", "trial")
"""Sections whose checks must complete for the verdict that training works."""

_MARKS = {
    Mark.OK: ("ok", "green"),
    Mark.INFO: ("-", "dim"),
    Mark.WARN: ("WARN", "yellow"),
    Mark.FAIL: ("FAIL", "bold red"),
}
_WIDTH_MAX = 120
_WIDTH_MIN = 30

SUMMARY = "check whether training with NVMe works here, and what would make it work better"
DESCRIPTION = """\
Check the machine, its limits and the drive under PATH, and write and read back a few MiB there through the I/O engine.
Leaves no files. Every warning and failure says what to do next."""

EPILOG = """\
examples:
  infinity-bench doctor /local_nvme
  infinity-bench doctor /local_nvme --json - | jq .reasons

exit code: 0 if training with NVMe works here, even with warnings; 1 if it doesn't, with the reason; 2 for wrong usage;
130 after Ctrl-C.
docs/doctor.md lists the keys of --json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "the folder for nvme_path (default: the current directory)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    with usage_checked():
        check_files(options, "json")
    try:
        path = (options.path or Path()).absolute()
        Path.cwd()
    except FileNotFoundError:  # torch's libraries would end the process there
        raise StoreError(errno.ENOENT, "the current directory no longer exists: cd to one that does") from None
    sections = list(_examine(path))
    failures = [finding for section in sections for finding in section.findings if finding.mark is Mark.FAIL]
    if options.json is not None:
        findings = [{"section": one.name, **asdict(finding)} for one in sections for finding in one.findings]
        report = {
            "format": JSON_FORMAT,
            "works": not failures,
            "reasons": [finding.text for finding in failures],
            "path": str(path),
            "sections": {section.name: section.facts for section in sections},
            "findings": findings,
        }
        write_json(report, options.json)
    if options.json != "-":
        _print(path, options.path is None, sections, failures)
    return 1 if failures else 0


def _examine(path: Path) -> Iterator[Section]:
    """Run every check in order; an exception in one becomes a finding of its section."""
    path_section = Section("path", "Path")
    checks: list[tuple[Section, Callable[[Section], None]]] = [
        (Section("software", "Software"), check_software),
        (Section("machine", "Machine"), lambda section: check_machine(section, read_machine())),
        (Section("gpu", "GPU"), check_gpu),
        (Section("container", "Container and rights"), lambda section: check_container(section, read_container())),
        (Section("limits", "Limits"), lambda section: check_limits(section, read_limits(), read_container())),
        (Section("huge_pages", "Huge pages"), lambda section: check_huge_pages(section, read_huge_pages())),
        (Section("backends", "I/O backends"), lambda section: check_backends(section, read_container())),
        (path_section, partial(check_path, path=path)),
        (Section("drive", "Drive"), partial(check_drive, path=path)),
        (Section("trial", "Trial"), partial(check_trial, path=path, path_section=path_section)),
    ]
    for section, check in checks:
        try:
            check(section)
        except Exception as error:
            text = f"the check failed: {type(error).__name__}: {error}"
            mark = Mark.FAIL if section.name in _DECISIVE else Mark.WARN
            section.add("check", mark, text, "if nothing above explains it, report it with this line")
        yield section


def _print(path: Path, by_default: bool, sections: list[Section], failures: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = min(console.width, _WIDTH_MAX)

    def show(text: str, style: str, mark: str = "", mark_style: str = "", name: str = "") -> None:
        """Print mark and name, if any, and `text` wrapped next to them. rich would pad the lines with blanks."""
        head = [(f"{mark:6}", mark_style), (f"{name:17}", "")] if name else []
        indent = " " * sum(len(part) for part, _ in head)
        room = max(width - len(indent), _WIDTH_MIN)
        for number, line in enumerate(textwrap.wrap(_printable(text), room, break_on_hyphens=False)):
            console.print(Text.assemble(*([indent] if number else head), (line, style)), soft_wrap=True)

    if by_default:
        show(f"No PATH given: checking the current directory, {path}", "")
    for section in sections:
        console.print()
        show(section.title, "bold")
        for finding in section.findings:
            show(finding.text, "", *_MARKS[finding.mark], finding.name)
            if finding.next_move:
                show(f"next: {finding.next_move}", "bold", name=" ")
    console.print()
    if failures:
        reasons = "; ".join(finding.text for finding in failures)
        show(f"FAIL: training with NVMe does not work here: {reasons}", "bold red")
    else:
        warnings = sum(finding.mark is Mark.WARN for section in sections for finding in section.findings)
        more = f" ({warnings} warning{'s' * (warnings > 1)} above)" if warnings else ""
        show(f"ok: training with NVMe works in {path}{more}", "bold green")


def _printable(text: str) -> str:
    """Escape control characters in `text`: a path may hold any byte."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )
