"""Reads small text files under /proc and /sys; a missing file means unknown, not an error."""

from __future__ import annotations

import re
from pathlib import Path


def text_of(file: Path) -> str | None:
    """Return the file's text without surrounding white space; None if it is missing, empty or unreadable."""
    try:
        return file.read_text(errors="surrogateescape").strip() or None
    except OSError:
        return None


def number_of(file: Path) -> int | None:
    """Return the integer in the file, or None."""
    try:
        return int(text_of(file) or "")
    except ValueError:
        return None


def chosen_of(file: Path) -> str | None:
    """Return the word in brackets, as in "always [madvise] never"; without brackets, the whole text."""
    text = text_of(file)
    match = re.search(r"\[(\S+)\]", text or "")
    return match[1] if match else text
