"""Live parameters: which groups stay gathered, and how far ahead others are, so that a bound on elements holds.

[Note: What is gathered when]
FSDP2 gathers the root group first and keeps it from forward to backward. Any other group is gathered for its forward, released
after it, gathered again for its backward and released after that. Four levers change this: a group may stay gathered from
forward to backward (`reshard_after_forward` False), or from one micro-batch's backward to the next one's forward
(`reshard_after_backward` False); a group may gather others ahead of their forward, or of their backward; without a list of its
own for backward, it gathers the group that ran forward before it.

A group that stays gathered in one of these ways is counted at every instant: an evaluation, which has no backward, leaves it
gathered, and then it is there in the next forward too. Beside those that stay, the groups in compute are gathered (a group, and
those it lies in), and those that were gathered ahead and not used yet. A group whose input needs no gradient, such as an
embedding, is released only when the whole backward has ended: it *lingers*. Elements count once, from the start of their gather
to their release; the buffers that a collective needs meanwhile are FSDP2's own and not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ROOT = 0
"""The number of the root group."""


@dataclass(frozen=True)
class LiveGroup:
    """A group: its elements, the group that it lies in (None beneath the root alone), and whether it lingers."""

    numel: int
    outer: int | None = None
    lingers: bool = False


@dataclass(frozen=True)
class LivePlan:
    """What each group does, by its number. `peak_numel`: the most elements that are gathered at once."""

    reshard_after_forward: tuple[bool, ...]
    reshard_after_backward: tuple[bool, ...]
    """Between micro-batches; after the last one of a step everything is released."""
    forward_prefetch: tuple[tuple[int, ...], ...]
    backward_prefetch: tuple[tuple[int, ...] | None, ...]
    """None: the one that FSDP2 finds itself. Empty: none."""
    next_fits: tuple[bool, ...]
    """Whether FSDP2 may find one itself, whichever that is: for a backward whose order is not the expected one."""
    peak_numel: int

    def gathers(self, group: int, *, micro_batches: int = 1) -> int:
        """How often a group is gathered in a step of training."""
        forward = micro_batches if self.reshard_after_backward[group] else 1
        return forward + (micro_batches if self.reshard_after_forward[group] else 0)


def least_live(groups: Sequence[LiveGroup], order: Sequence[int]) -> tuple[int, int]:
    """The fewest elements with which a pass can run, and the group that takes them: none stays, and none is gathered ahead."""
    model = _Model(groups, order, {ROOT})
    worst = max(range(len(groups)), key=lambda group: model.in_compute(group, backward=True))
    return model.staying_numel + model.in_compute(worst, backward=True), worst


def plan_live(
    groups: Sequence[LiveGroup],
    order: Sequence[int],
    *,
    live_numel_max: int,
    reuse_numel_max: int = 0,
    prefetch_numel: int | None = None,
    micro_batches: int = 1,
) -> LivePlan:
    """Settings with which no more than `live_numel_max` elements are gathered at any instant.

    Args:
        groups: the root first.
        order: the other groups as their forward begins, each once, a group after the one it lies in. A group may be left
            out when no pass is known that uses it; the bound holds if one does.
        reuse_numel_max: a group stays gathered between two uses when at most so many elements are used between them and
            the bound has room, nearest uses first. 0: none does, beyond the root between forward and backward.
        prefetch_numel: elements gathered ahead. In backward the next group is among them whenever the bound has room; None:
            that one alone, 0: none.
        micro_batches: of a step; only between these can a group stay gathered after its backward.

    Raises ValueError where the bound is less than `least_live`: no setting could do with it.
    """
    least, worst = least_live(groups, order)
    if least > live_numel_max:
        raise ValueError(f"group {worst} needs {least} elements gathered at once, more than {live_numel_max}")
    after_forward, after_backward = _staying(groups, order, live_numel_max, reuse_numel_max, micro_batches)
    model = _Model(groups, order, {ROOT, *after_forward, *after_backward})
    forward = _windows(model, (ROOT, *order), live_numel_max, prefetch_numel or 0, least_groups=0, backward=False)
    sequence = (ROOT, *reversed(_completed(groups, order)))
    nearest = 0 if prefetch_numel == 0 else 1
    explicit = _windows(model, sequence, live_numel_max, prefetch_numel or 0, least_groups=nearest, backward=True)
    next_fits = [nearest > 0 and model.any_fits_beside(group, live_numel_max) for group in range(len(groups))]
    return LivePlan(
        tuple(group not in after_forward and group != ROOT for group in range(len(groups))),
        tuple(group not in after_backward for group in range(len(groups))),
        forward,
        tuple(None if fits and len(ahead) <= 1 else ahead for fits, ahead in zip(next_fits, explicit, strict=True)),
        tuple(next_fits),
        max(_peak(model, (ROOT, *order), forward, backward=False), _peak(model, sequence, explicit, backward=True)),
    )


class _Model:
    """Sums over the groups when those in `staying` are gathered throughout."""

    def __init__(self, groups: Sequence[LiveGroup], order: Sequence[int], staying: set[int]) -> None:
        self.groups, self.order, self.staying = groups, order, staying
        self.staying_numel = sum(groups[group].numel for group in staying)
        self._coming = sum(self.ahead(group) for group in range(len(groups)))
        self._stacks = [stack_of(groups, group) for group in range(len(groups))]
        self._in_forward = [sum(map(self.ahead, stack)) for stack in self._stacks]
        self._lingering_after = self._sum_lingering()
        largest = sorted(range(len(groups)), key=self.ahead, reverse=True)
        self._largest = largest[: 1 + max(map(len, self._stacks))]

    def in_compute(self, group: int, *, backward: bool) -> int:
        """Elements gathered while `group` computes, beside those that stay and those gathered ahead.

        In backward: with what lingers from groups that ran forward after it.
        """
        return min(self._coming, self._in_forward[group] + (self._lingering_after[group] if backward else 0))

    def ahead(self, group: int) -> int:
        """Elements that gathering `group` ahead adds."""
        return 0 if group in self.staying else self.groups[group].numel

    def any_fits_beside(self, group: int, live_numel_max: int) -> bool:
        """Whether any one group may be gathered ahead while `group` is in backward, whichever it is."""
        others = (self.ahead(other) for other in self._largest if other not in self._stacks[group])
        return self.staying_numel + self.in_compute(group, backward=True) + next(others, 0) <= live_numel_max

    def _sum_lingering(self) -> list[int]:
        """For each group the elements that may linger when its backward begins; all for a group that is not in the order."""
        lingering = [self.ahead(number) if group.lingers else 0 for number, group in enumerate(self.groups)]
        left = sum(lingering)
        lingering_after = [left] * len(self.groups)
        for group in self.order:
            left -= lingering[group]
            lingering_after[group] = left
        lingering_after[ROOT] = 0  # begins before any other
        return lingering_after


def stack_of(groups: Sequence[LiveGroup], group: int | None) -> list[int]:
    """The group and those it lies in, the root aside."""
    stack = []
    while group is not None and group != ROOT:
        stack.append(group)
        group = groups[group].outer
    return stack


def _completed(groups: Sequence[LiveGroup], order: Sequence[int]) -> list[int]:
    """The groups as their forward ends: one that lies in another ends before it."""
    done: list[int] = []
    running: list[int] = []
    for group in order:
        while running and running[-1] not in stack_of(groups, group):
            done.append(running.pop())
        running.append(group)
    return done + running[::-1]


def _staying(
    groups: Sequence[LiveGroup], order: Sequence[int], live_numel_max: int, reuse_numel_max: int, micro_batches: int
) -> tuple[set[int], set[int]]:
    """The groups that stay gathered (after forward, after backward): nearest uses first, until one does not fit."""
    before = [*accumulate((groups[group].numel for group in order), initial=0)]
    turns = [(2 * (before[-1] - before[place + 1]), False, group) for place, group in enumerate(order)]
    if micro_batches > 1:
        turns += [(2 * before[place], True, group) for place, group in enumerate(order)]
        turns.append((0, True, ROOT))
    near = sorted(turn for turn in turns if turn[0] <= reuse_numel_max and reuse_numel_max > 0)

    def peak(count: int) -> int:
        return _bare_peak(groups, order, {ROOT, *(group for _, _, group in near[:count])})

    # One group more never lowers the peak, so the first that does not fit is found by bisection.
    stay = near[: bisect_right(range(1, len(near) + 1), live_numel_max, key=peak)]
    return {group for _, backward, group in stay if not backward}, {group for _, backward, group in stay if backward}


def _bare_peak(groups: Sequence[LiveGroup], order: Sequence[int], staying: set[int]) -> int:
    """The most elements gathered at once when nothing is gathered ahead."""
    model = _Model(groups, order, staying)
    return model.staying_numel + max(model.in_compute(group, backward=True) for group in range(len(groups)))


def _windows(
    model: _Model,
    sequence: Sequence[int],
    live_numel_max: int,
    prefetch_numel: int,
    *,
    least_groups: int,
    backward: bool,
) -> tuple[tuple[int, ...], ...]:
    """What each group gathers ahead when they are used in `sequence`: the next ones, until one does not fit.

    A window reaches at least as far as the one before it, so what was gathered ahead is always a part of it.
    """
    total = [*accumulate((model.ahead(group) for group in sequence), initial=0)]
    room = live_numel_max - model.staying_numel
    limit = [room - model.in_compute(g, backward=backward) + total[at + 1] for at, g in enumerate(sequence)]
    windows: dict[int, tuple[int, ...]] = {}
    reach = 0
    for place, group in enumerate(sequence):
        reach = max(reach, place)
        while reach + 1 < len(sequence):
            ahead = total[reach + 2] - total[place + 1]
            if ahead > prefetch_numel and reach + 1 - place > least_groups:
                break
            if total[reach + 2] > min(limit[place : reach + 1]):  # of any group that computes until then
                break
            reach += 1
        windows[group] = tuple(other for other in sequence[place + 1 : reach + 1] if other not in model.staying)
    return tuple(windows.get(group, ()) for group in range(len(model.groups)))


def _peak(model: _Model, sequence: Sequence[int], windows: Sequence[tuple[int, ...]], *, backward: bool) -> int:
    ahead = {group: sum(map(model.ahead, windows[group])) for group in sequence}
    return model.staying_numel + max(model.in_compute(g, backward=backward) + ahead[g] for g in sequence)
