"""What should be staged now, given what comes next and how many bytes may be held.

"Groups" are whatever is staged as a whole: groups of parameters and, where they are updated in the passes, sub-groups. Those to
stage are the next distinct ones, soonest first, for as long as their bytes fit; the next one always. The first that doesn't fit
ends them, and is not passed over: whatever comes later is needed later, and would only stand in its way.

[Note: Farthest next use]
The groups used soonest are held, whether they are still to be read or were used just now. So a used group is given up exactly
when its next use is farther than that of all others that fit. From the end of forward into backward, where the order turns
round, these are the groups used last, and each byte held there spares a read. No way of holding so many bytes spares more, but
for the group that fits in part only (a group is gathered from one piece of memory).

[Note: As early as the bytes allow]
Reads start in the order of need, each as soon as its bytes fit. Bandwidth and compute times say when a read has to start at the
latest; the bytes that may be held say when it can start at the earliest. Waiting in between gains nothing: empty room serves
nobody, and an idle drive delays all that comes after. So the times are needed to predict a stall (simulator.py), not to decide.

  No way to order and to time the reads lets any use begin earlier: (1) where all groups have the same size; (2) whatever their
  sizes, if it has the largest group's bytes less to hold, even if it may read them in pieces, by turns.

Proof. Let S be another way, and look at the first use i that begins earlier in S than with us. All before it begin with us no
later than in S, so at every moment up to then we have freed whatever S has. Go back from the end of our read of i to the last
moment t at which our drive was idle; from t on it read q, ..., i without a pause. If t is the beginning, S can't have read
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

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

UNTIL_THE_END = math.inf
"""The place after all uses: no use passes it."""

_NOW = -1.0


def plan_look_ahead(uses: Sequence[int], group_bytes: Sequence[int], look_ahead_bytes: int) -> list[int]:
    """What should be staged at every place of a known step, in one pass over it.

    A run asks anew at every use, since only then it knows that the step still goes as expected, and looks no farther than its
    bytes reach. The simulator asks for all places at once; asking anew would cost it the square of the step.

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


class LookAhead:
    """What should be staged for the uses to come, kept up to date as uses pass. It looks at a use once when it enters and once
    when it leaves; choosing anew would cost as much as is held, at every use.

    Units are numbers. The uses to come are a sequence of (place, unit): the use at `place` needs the unit, places never fall,
    and one use may need several. ~unit stands for a unit that is needed there only until it is `done`. Units that are needed
    `now` come before all.

    The sequence is pulled as far as it is chosen, and one further. After any change, `fit` chooses anew.

    Args:
        coming: the sequence.
        limits: of each, the bytes by unit, and how many of them may be chosen. The first unit always is.
    """

    def __init__(self, coming: Iterator[tuple[float, int]], *limits: tuple[Sequence[int], int]) -> None:
        self._coming = coming
        self._limits = limits
        self._chosen_bytes = [0] * len(limits)
        self._sequence: deque[tuple[float, int]] = deque()
        """The part of the sequence that is chosen."""
        self._first = 0
        """The number of its first entry; those that follow have the numbers that follow."""
        self._given_up: list[tuple[float, int]] = []
        """Entries that were pulled and are not chosen, soonest last."""
        self._keys: dict[int, deque[int]] = {}
        """By unit that is chosen: twice the number of each of its entries, and one more where it is needed until it is done."""
        self._done: set[int] = set()
        self._passed = 0.0
        self.changed: dict[int, None] = {}
        """Units that were chosen, or not any more, or are needed at another moment, since somebody cleared this."""

    def __contains__(self, unit: int) -> bool:
        return unit in self._keys

    def __iter__(self) -> Iterator[int]:
        """What is chosen, soonest first."""
        return iter(sorted(self._keys, key=lambda unit: self._keys[unit][0]))

    def key(self, unit: int) -> int | None:
        """The less, the sooner it is needed; None where it is not chosen."""
        keys = self._keys.get(unit)
        return keys[0] if keys else None  # none are left for a moment in `_drop`, which an exception may end

    def pass_to(self, place: float) -> None:
        """The uses before `place` are over, and nothing is needed now any more."""
        self._passed = max(self._passed, place)
        while self._sequence and self._sequence[0][0] < place:
            _, unit = self._sequence.popleft()
            self._drop(unit, self._first, 0)
            self._first += 1
        while self._given_up and self._given_up[-1][0] < place:
            self._given_up.pop()

    def need_now(self, units: Sequence[int]) -> None:
        """These units are needed before all others (as ~unit: until they are done), instead of those told before."""
        self.pass_to(_NOW + 1)
        for unit in reversed(units):
            self._first -= 1
            self._sequence.appendleft((_NOW, unit))
            self._take(unit, self._first, front=True)

    def done(self, unit: int) -> None:
        """From now on the unit is needed no more where it was until now."""
        self._done.add(unit)
        keys = self._keys.get(unit)
        if keys is not None:
            self._set(unit, deque(key for key in keys if not key & 1))

    def fit(self) -> None:
        """Choose as much as the limits allow."""
        while len(self._keys) > 1 and not self._fits(None):
            self._given_up.append(self._sequence.pop())
            self._drop(self._given_up[-1][1], self._first + len(self._sequence), -1)
        while (entry := self._next()) is not None:
            if not self._fits(entry[1]):
                self._given_up.append(entry)
                return
            self._sequence.append(entry)
            self._take(entry[1], self._first + len(self._sequence) - 1, front=False)

    def _next(self) -> tuple[float, int] | None:
        while (entry := self._given_up.pop() if self._given_up else next(self._coming, None)) is not None:
            over = entry[0] < self._passed or (entry[1] < 0 and ~entry[1] in self._done)
            if not over or entry[0] == _NOW:
                return entry
        return None

    def _fits(self, unit: int | None) -> bool:
        """Whether the chosen units fit, together with `unit` if one is given."""
        if unit is not None:
            unit = unit if unit >= 0 else ~unit
            if unit in self._keys or not self._keys:
                return True
        for chosen, (unit_bytes, bytes_max) in zip(self._chosen_bytes, self._limits, strict=True):
            if chosen + (0 if unit is None else unit_bytes[unit]) > bytes_max:
                return False
        return True

    def _take(self, unit: int, number: int, *, front: bool) -> None:
        key = 2 * number
        if unit < 0:
            unit, key = ~unit, key + 1
        keys = self._keys.get(unit)
        if keys is None:
            self._keys[unit] = deque((key,))
            self._count(unit, 1)
        elif front:
            keys.appendleft(key)
            self.changed[unit] = None
        else:
            keys.append(key)

    def _drop(self, unit: int, number: int, end: int) -> None:
        """An entry left the sequence, at its beginning (end 0) or its end (-1). One that was done left it before."""
        key = 2 * number
        if unit < 0:
            unit, key = ~unit, key + 1
        keys = self._keys.get(unit)
        if keys is None or keys[end] != key:
            return
        if end == 0:
            keys.popleft()
        else:
            keys.pop()
        if not keys or end == 0:
            self._set(unit, keys)

    def _set(self, unit: int, keys: deque[int]) -> None:
        """Only these entries of a unit are left."""
        if keys:
            self._keys[unit] = keys
            self.changed[unit] = None
        else:
            del self._keys[unit]
            self._count(unit, -1)

    def _count(self, unit: int, sign: int) -> None:
        for number, (unit_bytes, _) in enumerate(self._limits):
            self._chosen_bytes[number] += sign * unit_bytes[unit]
        self.changed[unit] = None


def cycle_read_bytes(
    uses: Sequence[int], read_bytes: Sequence[int], next_cycle: Iterable[int], *limits: tuple[Sequence[int], int]
) -> int:
    """Bytes read in a cycle of uses, one of many, when after each use the units stay staged that a look-ahead chooses.

    A use reads nothing if its unit stayed since its last use.

    Args:
        uses: the unit of each use, in order.
        read_bytes: by place in `uses`, the bytes that staging the unit there reads.
        next_cycle: the units that are chosen for the cycle after this one, in their order; of these, those with a use may stay
            beyond the end.
        limits: as for `LookAhead`.
    """
    ends = [(UNTIL_THE_END, unit) for unit in next_cycle]
    first, stayed = _read_in_cycle(uses, read_bytes, ends, limits, set())
    return _read_in_cycle(uses, read_bytes, ends, limits, stayed)[0] if stayed else first


def _read_in_cycle(
    uses: Sequence[int],
    read_bytes: Sequence[int],
    ends: Sequence[tuple[float, int]],
    limits: Sequence[tuple[Sequence[int], int]],
    stayed: set[int],
) -> tuple[int, set[int]]:
    """Bytes read in a cycle at whose beginning so many have `stayed`, and what stays at its end."""
    total = 0
    ahead = LookAhead(chain(((float(place), unit) for place, unit in enumerate(uses)), ends), *limits)
    ahead.fit()
    ahead.changed.clear()
    for place, unit in enumerate(uses):
        if unit not in stayed:
            total += read_bytes[place]
        ahead.pass_to(place + 1)
        ahead.fit()
        stayed.add(unit)
        stayed -= {other for other in ahead.changed if other not in ahead}
        if unit not in ahead:
            stayed.discard(unit)
        ahead.changed.clear()
    return total, stayed
