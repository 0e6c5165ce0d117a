"""Floor 3. What should be staged now, given what comes next and how many bytes may be held.

"Groups" are whatever is staged as a whole: groups of parameters and, where they are updated in the passes, sub-groups.

[Note: Farthest next use]
What is held is what is used soonest, whether it is still to be read or was used just now; so a group that was used is given up
exactly when its next use is farther than that of all others that fit. From the end of forward into backward, where the order
turns round, these are the groups used last, and each byte that is held there spares a read: as many as any way of holding so
many bytes spares, to within the group that fits in part only (a group is gathered from one piece of memory).

[Note: As early as the bytes allow]
Reads start in the order of need, which is that of their deadlines, each as soon as its bytes fit. Bandwidth and compute times
say when a read has to start at the latest, and the bytes that may be held when it can start at the earliest; nothing is gained
by waiting in between, since room that stays empty serves nobody, and a drive that rests now is later for everything after. So
the times are needed to predict a stall (simulator.py), not to decide.

  No way to order and to time the reads lets any use begin earlier: (1) where all groups have the same size; (2) whatever their
  sizes, if it has the largest group's bytes less to hold, even if it may read them in pieces, by turns.

Proof. Let S be another way, and look at the first use i that begins earlier in S than with us. All before it begin with us no
later than in S, so at every moment up to then we have given free whatever S has. Go back from the end of our read of i to the
last moment t at which our drive rested; from t on it read q, ..., i without a pause. If t is the beginning, S can't have read
the groups up to i before us. If not, q didn't fit just before t: it and what we held of the groups before it were more than L
bytes. (1) So we held as many groups as anybody may hold; of those up to i, S has begun to read no more than we have, needs as
long for the others, and is not earlier. (2) We held more than L less q, at least what S may hold; so S has read no more bytes
of the groups up to i than we have, and is not earlier. (The next group alone may exceed the bound, in S as with us.) ∎

With sizes that differ there can be another order that is on time where this one isn't: a large group first, for which there is
room now, and the small one that is needed before it later, when there would have been no room for the large one any more.
Finding it is a knapsack problem; by (2) all it can gain is what one group more of look-ahead gains too, and the pool has more
room than that (pinned.py). tests/schedule/test_lookahead.py compares with all orders and times of small steps.
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

    A run asks anew at every use, for only then it knows that the step still goes as expected, and looks no farther than its
    bytes reach; the simulator asks for all places at once, where asking anew would cost the square of the step.

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
