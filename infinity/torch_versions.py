"""The tested versions of torch, and messages about others.

pyproject.toml and tools/setup_venv.py name the same range (checked by tests). `make test-torch` tests each version in
turn.
"""

from __future__ import annotations

import re

OLDEST = (2, 13)
NEWEST = (2, 15)

TESTED = "2.13 to 2.15"
REQUIREMENT = "torch>=2.13,<2.16"


ANYWAY = "INFINITY_ANY_TORCH"
"""Environment variable that allows an older torch, for machines with a fixed one."""


def why_too_old(version: str) -> str | None:
    """Return the reason why infinity can't run on this torch (`torch.__version__`), or None."""
    if _release(version) >= OLDEST:
        return None
    return f"infinity needs torch {TESTED}, but this is torch {version}: pip install '{REQUIREMENT}'"


def why_untested(version: str) -> str | None:
    """Return a warning about a torch newer than the tested ones, or None."""
    if _release(version) <= NEWEST:
        return None
    return (
        f"torch {version} is newer than the tested versions, {TESTED}; if it fails or computes other numbers, "
        f"pip install '{REQUIREMENT}'"
    )


def _release(version: str) -> tuple[int, ...]:
    """Return (2, 15) for "2.15.0+cu132"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
