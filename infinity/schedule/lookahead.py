"""Floor 3. Which groups should be staged now, given what comes next and how many bytes may be held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def groups_to_stage(upcoming: Iterable[int], group_bytes: Sequence[int], look_ahead_bytes: int) -> list[int]:
    """The next distinct groups of `upcoming`, soonest first, for as long as their bytes fit in `look_ahead_bytes`.

    The next group is always among them. Stops at the first that doesn't fit instead of passing over it: whatever comes
    later would be needed later, and would only stand in its way.
    """
    chosen: dict[int, None] = {}
    total_bytes = 0
    for group in upcoming:
        if group in chosen:
            continue
        total_bytes += group_bytes[group]
        if chosen and total_bytes > look_ahead_bytes:
            break
        chosen[group] = None
    return list(chosen)


def plan_look_ahead(uses: Sequence[int], group_bytes: Sequence[int], look_ahead_bytes: int) -> list[int]:
    """What `groups_to_stage` chooses at every place of a known step, in one pass over it.

    With `place` uses behind us, the groups of `uses[place : ends[place]]` should be staged; `ends` is returned, one longer
    than `uses`. It never falls, so a reader that walks along it starts every read once.
    """
    held = [0] * len(group_bytes)
    ends = []
    end = total_bytes = 0
    for place, used in enumerate(uses):
        while end < len(uses):
            group = uses[end]
            if not held[group]:
                if end > place and total_bytes + group_bytes[group] > look_ahead_bytes:
                    break
                total_bytes += group_bytes[group]
            held[group] += 1
            end += 1
        ends.append(end)
        held[used] -= 1
        if not held[used]:
            total_bytes -= group_bytes[used]
    return [*ends, len(uses)]
