"""The groups to stage by definition: computed from scratch from all coming uses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


def groups_to_stage(upcoming: Iterable[Unit], group_bytes: Any, look_ahead_bytes: int) -> list[Unit]:
    """The next distinct groups of `upcoming`, soonest first, for as long as their bytes fit in `look_ahead_bytes`; the next
    one always. See infinity/schedule/readahead.py."""
    chosen: dict[Unit, None] = {}
    total_bytes = 0
    for group in upcoming:
        if group in chosen:
            continue
        total_bytes += group_bytes[group]
        if chosen and total_bytes > look_ahead_bytes:
            break
        chosen[group] = None
    return list(chosen)
