"""The versions of torch that infinity is tested on, and what is said of others.

pyproject.toml and tools/setup_venv.py name the same range; tests/test_torch_versions.py sees to it. `make test-torch` runs the
tests on one version after another.
"""

from __future__ import annotations

import re

OLDEST = (2, 13)
NEWEST = (2, 15)

TESTED = "2.13 to 2.15"
REQUIREMENT = "torch>=2.13,<2.16"
"""For pip."""


ANYWAY = "INFINITY_ANY_TORCH"
"""The environment variable that has an older torch tried: for machines whose torch is given."""


def why_too_old(version: str) -> str | None:
    """Why infinity can't run on this torch (`torch.__version__`), where that is known."""
    if _release(version) >= OLDEST:
        return None
    return f"infinity needs torch {TESTED}, and this is torch {version}: pip install '{REQUIREMENT}'"


def why_untested(version: str) -> str | None:
    """What to know of a torch that is newer than those tested."""
    if _release(version) <= NEWEST:
        return None
    return (
        f"torch {version} is newer than those that infinity is tested on, {TESTED}; should it fail or compute other numbers, "
        f"pip install '{REQUIREMENT}'"
    )


def _release(version: str) -> tuple[int, ...]:
    """Of "2.15.0+cu132" (2, 15)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
