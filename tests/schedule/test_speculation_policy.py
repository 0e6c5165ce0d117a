"""When the policy speculates: never for long where it loses, always where it wins, by any order of clips."""

from __future__ import annotations

import itertools

from infinity.schedule.scheme import SpeculationPolicy


def discarded_and_accepted(clips: tuple[bool, ...]) -> tuple[int, int]:
    policy, counts = SpeculationPolicy(), {True: 0, False: 0}
    for clipped in clips:
        counts[clipped] += policy.speculates
        policy.note(as_expected=not clipped)
    return counts[True], counts[False]


def test_a_run_that_never_clips_updates_every_step_early() -> None:
    assert discarded_and_accepted((False,) * 100) == (0, 100)


def test_a_run_that_always_clips_loses_two_steps() -> None:
    assert discarded_and_accepted((True,) * 100) == (2, 0)


def test_a_single_clip_costs_one_step() -> None:
    assert discarded_and_accepted((False,) * 10 + (True,) + (False,) * 10) == (1, 20)


def test_no_order_of_clips_loses_more_than_half_of_what_it_clips_and_two() -> None:
    for clips in itertools.product((False, True), repeat=12):
        discarded, _ = discarded_and_accepted(clips)
        assert discarded <= 2 + len(clips) // 2
