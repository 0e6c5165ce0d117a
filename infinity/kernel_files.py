"""The small text files under /proc and /sys, where a missing one is no error but something not known."""

from __future__ import annotations

import re
from pathlib import Path


def text_of(file: Path) -> str | None:
    """What stands in the file, without white space around it; None where it is missing, empty, or not for us."""
    try:
        return file.read_text(errors="surrogateescape").strip() or None
    except OSError:
        return None


def number_of(file: Path) -> int | None:
    """The integer that stands in the file; None where there is none."""
    try:
        return int(text_of(file) or "")
    except ValueError:
        return None


def chosen_of(file: Path) -> str | None:
    """The word in brackets, as in "always [madvise] never"; without brackets, the whole text."""
    text = text_of(file)
    match = re.search(r"\[(\S+)\]", text or "")
    return match[1] if match else text
