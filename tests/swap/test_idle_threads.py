"""Whether OpenMP's idle threads spin or sleep follows the waits of the steps, and nothing but a training's steps is changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from swap.blocks import batch, sharded

import infinity
from infinity.swap import idle_threads, paging
from infinity.swap.idle_threads import IdleThreads, SleepChoice


def choices(steps: Sequence[tuple[float, float]]) -> str:
    """After each step of so many seconds and waits, beyond a training's first: whether threads spin or sleep in the next."""
    choice = SleepChoice()
    for _ in range(2):
        choice.note_step(1.0, 0.9)
    chosen = ""
    for seconds, waited in steps:
        choice.note_step(seconds, waited)
        chosen += "s" if choice.sleeps else "-"
    return chosen


WAITS, HIDES, COMPUTES = (10.0, 5.0), (10.0, 2.0), (10.0, 1.0)
LONGER = (11.0, 5.0)
"""As a step that waits, and gets longer where threads sleep: what it waits for hides no compute."""
SHORT = (8.5, 5.0)


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ([WAITS] * 4, "--ss"),
        ([WAITS, WAITS, HIDES] * 2, "------"),  # a few say little
        ([COMPUTES] * 5 + [WAITS] * 3, "-------s"),
        ([WAITS] * 3 + [HIDES] * 6, "--sssssss"),
        ([WAITS] * 3 + [COMPUTES] * 3 + [WAITS] * 4, "--sss-----"),  # for good
        ([WAITS] * 3 + [COMPUTES, COMPUTES, HIDES] * 2, "--sssssss"),
        ([WAITS] * 3 + [LONGER] * 3 + [WAITS] * 4, "--sss-----"),
        ([WAITS] * 3 + [LONGER, WAITS, LONGER], "--ssss"),  # one that isn't longer is enough
        ([WAITS] * 6 + [LONGER] * 6, "--ssssssssss"),  # the drive, later
        ([SHORT, *[WAITS] * 6], "--sssss"),
    ],
)
def test_steps_in_a_row_decide(steps: list[tuple[float, float]], chosen: str) -> None:
    assert choices(steps) == chosen


class Sleep:
    """Stands in for `EarlySleep`."""

    now = 0

    def __init__(self) -> None:
        Sleep.now += 1

    def end(self) -> None:
        Sleep.now -= 1


class Steps:
    """Steps of ten seconds each, by clocks of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, compute_here: bool = True) -> None:
        Sleep.now = 0
        self.seconds = self.waited = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)
        self.threads = IdleThreads(compute_here=compute_here, start=Sleep)  # type: ignore[arg-type]

    def step(self, *, waited: float, forwards: int = 1) -> int:
        """What slept in it."""
        for _ in range(forwards):
            self.threads.begin_pass(self.waited)
        slept = Sleep.now
        self.seconds += 10
        self.waited += waited
        self.threads.end_step(self.waited)
        assert Sleep.now == 0
        self.seconds += 100  # what a user does between steps is no part of them
        self.waited += 50
        return slept


def test_threads_sleep_in_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    assert [steps.step(waited=5, forwards=3) for _ in range(7)] == [0, 0, 0, 0, 0, 1, 1]
    assert [steps.step(waited=1) for _ in range(5)] == [1, 1, 1, 0, 0]


def test_a_step_that_an_exception_ends_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    assert [steps.step(waited=5) for _ in range(6)] == [0, 0, 0, 0, 0, 1]
    steps.threads.begin_pass(steps.waited)
    assert Sleep.now == 1
    steps.threads.leave_step()
    assert Sleep.now == 0
    steps.threads.leave_step()
    assert steps.step(waited=5) == 1


def test_threads_are_left_alone_where_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, compute_here=False)
    assert [steps.step(waited=9) for _ in range(7)] == [0] * 7


def test_a_step_without_a_forward_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for _ in range(7):
        steps.step(waited=9, forwards=0)
    assert steps.step(waited=9) == 0


@pytest.mark.usefixtures("one_rank")
def test_threads_sleep_in_the_steps_of_a_training_alone(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Sleep.now = 0
    monkeypatch.setattr(paging, "IdleThreads", partial(IdleThreads, start=Sleep))  # type: ignore[arg-type]
    monkeypatch.setattr(idle_threads, "_SLEEP_FROM", 0.0)  # however little it waits here
    monkeypatch.setattr(idle_threads, "_SPIN_BELOW", 0.0)
    monkeypatch.setattr(idle_threads, "_LONGER_MAX", 1e9)
    model = sharded(width=512)
    slept: list[int] = []
    model.register_forward_hook(lambda *_: slept.append(Sleep.now))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap:
        swap.page(model, infinity.PagingOptions(sub_group_size=65536))
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)

        def step(number: int) -> None:
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(7):
            step(number)
            assert Sleep.now == 0
        with torch.no_grad():
            model(batch(0))
        assert slept == [0, 0, 0, 0, 0, 1, 1, 0]

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        hook = model.blocks[1].register_full_backward_hook(fail)  # type: ignore[index, union-attr]
        with pytest.raises(KeyboardInterrupt):
            step(5)
        hook.remove()
        assert (slept[-1], Sleep.now) == (1, 1)
        with torch.no_grad():
            model(batch(0))
        assert slept[-1] == 0
        model(batch(6))  # of a step that never comes
        assert Sleep.now == 1
        with torch.no_grad():
            model(batch(0))
        assert slept[-1] == 0
        model(batch(6))
    assert Sleep.now == 0
