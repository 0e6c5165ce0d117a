"""Floor 17. All checks of the doctor, in order. Runs on the main thread and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from infinity.cli.doctor.findings import Mark, Section
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

_DECISIVE = ("software", "backends", "path", "trial")
"""Sections that must have run before the verdict can be that training works."""


def examine(path: Path) -> Iterator[Section]:
    """Run every check, one section after the other; the last one writes and reads under `path`.

    A check that raises an exception becomes a finding in its section; the others still run.
    """
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
            text = f"could not be looked at: {type(error).__name__}: {error}"
            mark = Mark.FAIL if section.name in _DECISIVE else Mark.WARN
            section.add("check", mark, text, "if nothing above explains it, report it with this line")
        yield section
