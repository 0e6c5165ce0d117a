"""Floor 3. Which groups should be staged now, given what comes next and how many bytes may be held.

[Note: Farthest next use]
What is held is what is used soonest, whether it is still to be read or was used just now; so a group that was used is given up
exactly when its next use is farther than that of all others that fit. From the end of forward into backward, where the order
turns round, these are the groups used last, and each byte that is held there spares a read: as many as any way of holding so
many bytes spares, to within the group that fits in part only (a group is gathered from one piece of memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


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


def cycle_read_bytes(
    uses: Sequence[int], read_bytes: Sequence[int], choose: Callable[[Iterable[int]], Iterable[int]]
) -> int:
    """Bytes read in a cycle of uses when `choose` decides what stays after each.

    A use reads nothing where what is used stayed since its last use.

    Args:
        uses: numbers of what is used, in order. Nothing stays beyond its end.
        read_bytes: by place in `uses`, what staging it there reads.
        choose: what should be staged, given what comes next: `groups_to_stage` with its limits.
    """
    total = 0
    stayed: set[int] = set()
    for place, unit in enumerate(uses):
        if unit not in stayed:
            total += read_bytes[place]
        rest = (uses[later] for later in range(place + 1, len(uses)))
        stayed = {each for each in choose(rest) if each in stayed or each == unit}
    return total
