"""Live parameters: which groups stay gathered, and how far ahead others are gathered, within a bound on elements.

[Note: What is gathered when]
FSDP2 gathers the root group first and keeps it from forward to backward. It gathers any other group for its forward,
releases it, gathers it again for its backward and releases it again. Four settings change this. A group may stay
gathered from forward to backward (`reshard_after_forward` False), or from one micro-batch's backward to the next one's
forward (`reshard_after_backward` False). A group may gather others ahead of their forward, or of their backward.
Without a list of its own for backward, it gathers the group that ran forward before it.

A group that stays gathered in one of these ways always counts: an evaluation, which has no backward, leaves it
gathered, and it is still there in the next forward. Besides those, the gathered groups are those in compute (a group
and those it is nested in) and those gathered ahead and not used yet. A group whose input needs no gradient, such as an
embedding, is released only at the end of the whole backward: it *lingers*. Elements count once, from the start of their
gather to their release. The buffers that a collective needs meanwhile belong to FSDP2 and are not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from infinity.schedule.pinned import MEMORY_SHARE

ROOT = 0
"""The number of the root group."""


def keeps_all(numel: int, bytes_per_element: int, memory_bytes: float) -> bool:
    """Return True if all groups of a step of several micro-batches stay gathered by default, on one rank of a CPU.

    That takes the memory of compute parameters that stay staged ([Note: Staying staged] in residency.py), which are then
    read once more, and saves two copies of them per micro-batch. bytes_per_element: of a compute parameter and a gradient.
    """
    return numel * bytes_per_element <= MEMORY_SHARE * memory_bytes


@dataclass(frozen=True)
class LiveGroup:
    """A group: its elements, the group it is nested in (None if only in the root), and whether it lingers."""

    numel: int
    outer: int | None = None
    lingers: bool = False


@dataclass(frozen=True)
class LivePlan:
    """The settings of each group, by its number. `peak_numel`: the most elements that are gathered at once."""

    reshard_after_forward: tuple[bool, ...]
    reshard_after_backward: tuple[bool, ...]
    """Between micro-batches; after the last one of a step, everything is released."""
    forward_prefetch: tuple[tuple[int, ...], ...]
    backward_prefetch: tuple[tuple[int, ...] | None, ...]
    """None: the group that FSDP2 finds itself. Empty: none."""
    next_fits: tuple[bool, ...]
    """True if FSDP2 may find a group itself, whichever it is, for a backward in an unexpected order."""
    peak_numel: int

    def gathers(self, group: int, *, micro_batches: int = 1) -> int:
        """Return how often a training step gathers a group."""
        forward = micro_batches if self.reshard_after_backward[group] else 1
        return forward + (micro_batches if self.reshard_after_forward[group] else 0)


def least_live(groups: Sequence[LiveGroup], order: Sequence[int]) -> tuple[int, int]:
    """Return the fewest elements that a pass needs, if none stays or is gathered ahead, and the group that needs
    them."""
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
    """Plan the settings with which at most `live_numel_max` elements are gathered at any time.

    Args:
        groups: the root first.
        order: the other groups in the order in which their forward begins, each once, a group after the one it is
            nested in. A group that no known pass uses may be omitted; the bound holds if one does use it.
        reuse_numel_max: a group stays gathered between two uses with at most so many elements used in between, if the
            bound has room, nearest uses first. 0: only the root stays, between forward and backward.
        prefetch_numel: elements gathered ahead. In backward they include the next group if the bound has room. None:
            only that group; 0: none.
        micro_batches: of a step; only between these can a group stay gathered after its backward.

    Raises ValueError if the bound is less than `least_live`, because no settings fit.
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
    """Sums over the groups, if those in `staying` are always gathered."""

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
        """Return the elements gathered while `group` computes, without groups that stay or are gathered ahead.

        In backward, includes lingering groups that ran forward after it.
        """
        return min(self._coming, self._in_forward[group] + (self._lingering_after[group] if backward else 0))

    def ahead(self, group: int) -> int:
        """Return the elements that gathering `group` ahead adds."""
        return 0 if group in self.staying else self.groups[group].numel

    def any_fits_beside(self, group: int, live_numel_max: int) -> bool:
        """Return True if, during the backward of `group`, any other group would fit if gathered ahead."""
        others = (self.ahead(other) for other in self._largest if other not in self._stacks[group])
        return self.staying_numel + self.in_compute(group, backward=True) + next(others, 0) <= live_numel_max

    def _sum_lingering(self) -> list[int]:
        """Return, by group, the elements that may linger when its backward begins; all if it is not in the order."""
        lingering = [self.ahead(number) if group.lingers else 0 for number, group in enumerate(self.groups)]
        left = sum(lingering)
        lingering_after = [left] * len(self.groups)
        for group in self.order:
            left -= lingering[group]
            lingering_after[group] = left
        lingering_after[ROOT] = 0  # its backward begins first
        return lingering_after


def stack_of(groups: Sequence[LiveGroup], group: int | None) -> list[int]:
    """Return a group and those it is nested in, except the root."""
    stack = []
    while group is not None and group != ROOT:
        stack.append(group)
        group = groups[group].outer
    return stack


def _completed(groups: Sequence[LiveGroup], order: Sequence[int]) -> list[int]:
    """Return the groups in the order in which their forward ends: a nested group ends before its outer group."""
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
    """Return the groups that stay gathered (after forward, after backward), nearest uses first, while they fit."""
    before = [*accumulate((groups[group].numel for group in order), initial=0)]
    turns = [(2 * (before[-1] - before[place + 1]), False, group) for place, group in enumerate(order)]
    if micro_batches > 1:
        turns += [(2 * before[place], True, group) for place, group in enumerate(order)]
        turns.append((0, True, ROOT))
    near = sorted(turn for turn in turns if turn[0] <= reuse_numel_max and reuse_numel_max > 0)

    def peak(count: int) -> int:
        return _bare_peak(groups, order, {ROOT, *(group for _, _, group in near[:count])})

    # Another group never lowers the peak, so bisection finds the first that does not fit.
    stay = near[: bisect_right(range(1, len(near) + 1), live_numel_max, key=peak)]
    return {group for _, backward, group in stay if not backward}, {group for _, backward, group in stay if backward}


def _bare_peak(groups: Sequence[LiveGroup], order: Sequence[int], staying: set[int]) -> int:
    """Return the most elements gathered at once if nothing is gathered ahead."""
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
    """Return what each group gathers ahead if they are used in `sequence`: the next ones, until one does not fit.

    A window reaches at least as far as the previous one, so it includes everything gathered ahead before.
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
            if total[reach + 2] > min(limit[place : reach + 1]):  # for every group that computes until then
                break
            reach += 1
        windows[group] = tuple(other for other in sequence[place + 1 : reach + 1] if other not in model.staying)
    return tuple(windows.get(group, ()) for group in range(len(model.groups)))


def _peak(model: _Model, sequence: Sequence[int], windows: Sequence[tuple[int, ...]], *, backward: bool) -> int:
    ahead = {group: sum(map(model.ahead, windows[group])) for group in sequence}
    return model.staying_numel + max(model.in_compute(g, backward=backward) + ahead[g] for g in sequence)
