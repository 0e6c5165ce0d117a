"""Findings of the doctor's checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from infinity.units import KIB, format_bytes


class Mark(str, enum.Enum):
    """Severity of a finding. OK: as it should be. INFO: neither good nor bad. WARN: training works, but slower or less
    safely than it could. FAIL: training with NVMe does not work here."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report. next_move: what to do about it; every WARN and FAIL has one."""

    name: str
    mark: Mark
    text: str
    next_move: str = ""


@dataclass
class Section:
    """The result of one check: `facts` for programs (JSON types under stable snake_case keys), `findings` for people."""

    name: str
    title: str
    facts: dict[str, object] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, mark: Mark, text: str, next_move: str = "") -> None:
        self.findings.append(Finding(name, mark, text, next_move))

    def warn_if(self, bad: bool, name: str, text: str, next_move: str, *, otherwise: Mark = Mark.OK) -> None:
        """Add a warning if `bad`, else a finding that needs no next move."""
        self.add(name, Mark.WARN if bad else otherwise, text, next_move if bad else "")


def size_text(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else format_bytes(nbytes)


def kib_text(kib: int | None) -> str:
    if kib is None:
        return "unknown size"
    return "any size" if kib >= (1 << 31) - 1 else format_bytes(kib * KIB)


def count_text(value: int | None) -> str:
    return "?" if value is None else str(value)
