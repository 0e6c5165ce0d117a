"""Live parameters: whatever path a pass takes, no more is gathered than the bound says. FSDP2's rules are played through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.schedule.live import ROOT, LiveGroup, LivePlan, least_live, plan_live


class Fsdp:
    """What FSDP2 does with its groups, move by move, under the levers of a plan; `peak` is the most ever gathered.

    It keeps its own account, of names and not of sums: the set of groups that are gathered, or on their way.
    """

    def __init__(self, groups: Sequence[LiveGroup], plan: LivePlan) -> None:
        self.groups, self.plan = groups, plan
        self.live: set[int] = set()
        self.ahead: set[int] = set()
        self.peak = 0

    def gather(self, *groups: int) -> None:
        for group in groups:
            self.live.add(group)
            self.peak = max(self.peak, sum(self.groups[g].numel for g in self.live))

    def forward(self, path: Sequence[int]) -> list[int]:
        """`path`: the groups as their forward begins, the root first. Returns them as it ended."""
        ended: list[int] = []
        running: list[int] = []
        for group in path:
            while running and not self._within(group, running[-1]):
                ended.append(self._end_forward(running.pop()))
            window = set(self.plan.forward_prefetch[group])
            for stale in self.ahead - window - {group}:  # what the runtime does before a group that was not expected
                self.live.discard(stale)
            self.ahead.discard(group)
            self.gather(group)
            running.append(group)
            self.ahead |= window - self.live
            self.gather(*self.plan.forward_prefetch[group])
        while running:
            ended.append(self._end_forward(running.pop()))
        for stale in self.ahead:
            self.live.discard(stale)
        self.ahead = set()
        return ended

    def backward(self, ended: Sequence[int], *, last: bool, exact: bool) -> None:
        lingering, running = [], []
        for place in range(len(ended) - 1, -1, -1):
            group = ended[place]
            while running and not self._within(group, running[-1]):
                self._end_backward(running.pop(), lingering, last=last)
            self.gather(group)
            running.append(group)
            chosen = self.plan.backward_prefetch[group]
            if exact and chosen is not None:
                self.gather(*chosen)
            elif self.plan.next_fits[group]:
                self.gather(*ended[max(0, place - 1) : place])
        while running:
            self._end_backward(running.pop(), lingering, last=last)
        for group in lingering:
            self._release_after_backward(group, last=last)

    def _within(self, group: int, outer: int) -> bool:
        return outer == ROOT or (
            self.groups[group].outer is not None
            and (self.groups[group].outer == outer or self._within(self.groups[group].outer, outer))
        )

    def _end_forward(self, group: int) -> int:
        if self.plan.reshard_after_forward[group]:
            self.live.discard(group)
        return group

    def _end_backward(self, group: int, lingering: list[int], *, last: bool) -> None:
        if self.groups[group].lingers or group == ROOT:
            lingering.append(group)
        else:
            self._release_after_backward(group, last=last)

    def _release_after_backward(self, group: int, *, last: bool) -> None:
        if last or self.plan.reshard_after_backward[group]:
            self.live.discard(group)


@st.composite
def models(draw: st.DrawFn, *, most: int = 7) -> tuple[list[LiveGroup], list[int]]:
    """A root and other groups, some of them within others; the order in which they are used."""
    groups = [LiveGroup(draw(st.integers(0, 20)))]
    for number in range(1, 1 + draw(st.integers(0, most))):
        around = [None, *_open(groups, number - 1)]
        lingers = draw(st.integers(0, 4)) == 0
        groups.append(LiveGroup(draw(st.integers(1, 20)), draw(st.sampled_from(around)), lingers))
    return groups, list(range(1, len(groups)))


def _open(groups: Sequence[LiveGroup], last: int) -> Iterator[int]:
    """The groups that the next one may lie in: the last one, and those it lies in."""
    group: int | None = last
    while group:
        yield group
        group = groups[group].outer


def settings(least: int, whole: int) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries(
        {
            "live_numel_max": st.integers(least, max(least, whole)),
            "reuse_numel_max": st.integers(0, 2 * whole),
            "micro_batches": st.integers(1, 3),
        },
        optional={"prefetch_numel": st.integers(0, whole)},
    )


def path_of(groups: Sequence[LiveGroup], order: Sequence[int], skipped: set[int]) -> list[int]:
    """The order without some groups, and without what lies in these."""
    path = [ROOT]
    for group in order:
        outer = groups[group].outer
        if group not in skipped and (outer is None or outer in path):
            path.append(group)
    return path


@given(st.data())
def test_the_bound_holds_at_every_instant_of_training_and_evaluation(data: st.DataObject) -> None:
    groups, order = data.draw(models())
    chosen = data.draw(settings(least_live(groups, order)[0], sum(g.numel for g in groups)))
    plan = plan_live(groups, order, **chosen)
    assert plan.peak_numel <= chosen["live_numel_max"]
    fsdp = Fsdp(groups, plan)
    for _ in range(3):
        if data.draw(st.booleans()):
            fsdp.forward([ROOT, *order])
        for micro in range(chosen["micro_batches"]):
            fsdp.backward(fsdp.forward([ROOT, *order]), last=micro == chosen["micro_batches"] - 1, exact=True)
            assert fsdp.peak <= plan.peak_numel
        assert not fsdp.live


@given(st.data())
def test_the_bound_holds_whichever_groups_a_pass_takes(data: st.DataObject) -> None:
    """The plan is made for one path; passes take others, with groups that it never saw."""
    groups, order = data.draw(models())
    chosen = data.draw(settings(least_live(groups, order)[0], sum(g.numel for g in groups)))
    skipped = st.sets(st.sampled_from(order or [0]))
    known = path_of(groups, order, data.draw(skipped))
    chosen["live_numel_max"] = max(chosen["live_numel_max"], least_live(groups, known[1:])[0])
    fsdp = Fsdp(groups, plan_live(groups, known[1:], **chosen))
    for number in range(4):
        path = path_of(groups, order, data.draw(skipped))
        ended = fsdp.forward(path)
        if data.draw(st.booleans()):
            fsdp.backward(ended, last=number % 2 == 0, exact=path == known)
    assert fsdp.peak <= chosen["live_numel_max"]


@given(models(most=4))
def test_a_bound_is_refused_only_where_no_setting_would_do(model: tuple[list[LiveGroup], list[int]]) -> None:
    groups, order = model
    least, worst = least_live(groups, order)
    nothing = ((),) * len(groups)
    peaks = []
    for kept in itertools.product([True, False], repeat=len(order)):
        plan = LivePlan((False, *kept), (True,) * len(groups), nothing, nothing, (False,) * len(groups), 0)
        fsdp = Fsdp(groups, plan)
        fsdp.backward(fsdp.forward([ROOT, *order]), last=True, exact=True)
        peaks.append(fsdp.peak)
    assert least == min(peaks)
    assert plan_live(groups, order, live_numel_max=least).peak_numel == least
    with pytest.raises(ValueError, match=f"group {worst} needs {least}"):
        plan_live(groups, order, live_numel_max=least - 1)


@given(st.data())
def test_as_many_groups_stay_gathered_as_fit_nearest_uses_first(data: st.DataObject) -> None:
    """Without nesting the rule can be said in a line: the last k groups stay, for the largest k that fits."""
    numels = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=7))
    groups = [LiveGroup(3), *map(LiveGroup, numels)]
    order = list(range(1, len(groups)))
    bound = data.draw(st.integers(3 + max(numels), 3 + sum(numels)))
    reuse = data.draw(st.integers(1, 2 * sum(numels)))
    plan = plan_live(groups, order, live_numel_max=bound, reuse_numel_max=reuse)
    near = [k for k in range(len(numels)) if 2 * sum(numels[k + 1 :]) <= reuse]
    fitting = [k for k in near if 3 + sum(numels[k:]) + max(numels[:k], default=0) <= bound]
    kept = [group for group in order if not plan.reshard_after_forward[group]]
    assert kept == order[min(fitting, default=len(order)) :]
    assert [plan.gathers(group) for group in order] == [1 if group in kept else 2 for group in order]


def test_without_a_bound_and_a_distance_fsdp2_does_as_it_does_by_itself() -> None:
    groups = [LiveGroup(5), *[LiveGroup(7)] * 4]
    plan = plan_live(groups, [1, 2, 3, 4], live_numel_max=33, micro_batches=4)
    assert plan.reshard_after_forward == (False, True, True, True, True)
    assert plan.reshard_after_backward == (True,) * 5
    assert plan.forward_prefetch == ((),) * 5
    assert plan.backward_prefetch == (None,) * 5
    assert plan.peak_numel == 5 + 2 * 7


def test_a_bound_of_one_group_beside_the_root_turns_gathering_ahead_off() -> None:
    groups = [LiveGroup(5), *[LiveGroup(7)] * 4]
    plan = plan_live(groups, [1, 2, 3, 4], live_numel_max=12, reuse_numel_max=10**9, prefetch_numel=10**9)
    assert plan.backward_prefetch == (None, (), (), (), ())  # with the root alone, any group fits
    assert plan.forward_prefetch == ((1,), (), (), (), ())
    assert plan.peak_numel == 12


@given(models(), st.data())
def test_a_bound_of_the_whole_model_always_does(model: tuple[list[LiveGroup], list[int]], data: st.DataObject) -> None:
    """Also when the passes seen so far left groups out."""
    groups, order = model
    seen = [group for group in order if data.draw(st.booleans())]
    whole = sum(group.numel for group in groups)
    assert plan_live(groups, seen, live_numel_max=whole, reuse_numel_max=9, prefetch_numel=9).peak_numel <= whole


def test_gathering_runs_ahead_by_elements() -> None:
    groups = [LiveGroup(5), *[LiveGroup(7)] * 5]
    plan = plan_live(groups, [1, 2, 3, 4, 5], live_numel_max=100, prefetch_numel=14)
    assert plan.forward_prefetch == ((1, 2), (2, 3), (3, 4), (4, 5), (5,), ())
    assert plan.backward_prefetch == ((5, 4), None, None, (2, 1), (3, 2), (4, 3))
    plan = plan_live(groups, [1, 2, 3, 4, 5], live_numel_max=100, prefetch_numel=6)
    assert plan.forward_prefetch == ((),) * 6
    assert plan.backward_prefetch == (None,) * 6
    plan = plan_live(groups, [1, 2, 3, 4, 5], live_numel_max=100, prefetch_numel=0)
    assert plan.backward_prefetch == ((),) * 6


def test_between_micro_batches_the_root_and_the_first_groups_stay() -> None:
    groups = [LiveGroup(5), *[LiveGroup(7)] * 4]
    plan = plan_live(groups, [1, 2, 3, 4], live_numel_max=26, reuse_numel_max=14, micro_batches=3)
    assert plan.reshard_after_forward == (False, True, True, True, False)
    assert plan.reshard_after_backward == (False, False, True, True, True)
    assert [plan.gathers(group, micro_batches=3) for group in range(5)] == [1, 4, 6, 6, 3]


def test_ten_thousand_groups_can_be_planned() -> None:
    groups = [LiveGroup(10**9), *[LiveGroup(10**8)] * 10_000]
    order = list(range(1, len(groups)))
    plan = plan_live(groups, order, live_numel_max=10**11, reuse_numel_max=10**12, prefetch_numel=5 * 10**8)
    assert plan.peak_numel == 10**11
    assert plan.reshard_after_forward.count(False) == 1 + 989  # the last group in use leaves room for no other
