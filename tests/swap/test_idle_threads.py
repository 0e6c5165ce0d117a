"""Whether OpenMP's idle threads spin or sleep follows the waits of the steps, and nothing but a training's steps is changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import infinity
from infinity.aio import DriveLimit
from infinity.swap import idle_threads, paging
from infinity.swap.idle_threads import IdleThreads, SleepChoice
from swap.blocks import batch, sharded


def choices(shares: Sequence[float]) -> list[bool]:
    choice = SleepChoice()
    chosen = []
    for share in shares:
        choice.note_step(share)
        chosen.append(choice.sleeps)
    return chosen


@pytest.mark.parametrize(
    ("shares", "sleeps"),
    [
        ([0.5, 0.5, 0.5], [False, True, True]),
        ([0.5, 0.3, 0.5, 0.3], [False] * 4),  # one alone says little
        ([0.5, 0.5, 0.2, 0.2, 0.2], [False, True, True, True, True]),  # what it costs at most
        ([0.5, 0.5, 0.1, 0.2, 0.1, 0.2], [False, True, True, True, True, True]),
        ([0.5, 0.5, 0.1, 0.1, 0.9, 0.9, 0.9], [False, True, True, False, False, False, False]),  # for good
        ([0.1] * 5 + [0.4] * 2, [False] * 6 + [True]),
    ],
)
def test_two_steps_in_a_row_decide(shares: list[float], sleeps: list[bool]) -> None:
    assert choices(shares) == sleeps


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
        monkeypatch.setattr(idle_threads.time, "perf_counter", lambda: self.seconds)
        self.threads = IdleThreads(lambda: self.waited, compute_here=compute_here, start=Sleep)  # type: ignore[arg-type]

    def step(self, *, waited: float, forwards: int = 1) -> int:
        """What slept in it."""
        for _ in range(forwards):
            self.threads.begin_pass()
        slept = Sleep.now
        self.seconds += 10
        self.waited += waited
        self.threads.end_step()
        assert Sleep.now == 0
        self.seconds += 100  # what a user does between steps is no part of them
        self.waited += 50
        return slept


def test_threads_sleep_in_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    assert [steps.step(waited=5, forwards=3) for _ in range(4)] == [0, 0, 1, 1]
    assert [steps.step(waited=1) for _ in range(4)] == [1, 1, 0, 0]


def test_a_step_that_an_exception_ends_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    assert [steps.step(waited=5) for _ in range(3)] == [0, 0, 1]
    steps.threads.begin_pass()
    assert Sleep.now == 1
    steps.threads.leave_step()
    assert Sleep.now == 0
    steps.threads.leave_step()
    assert steps.step(waited=5) == 1


def test_threads_are_left_alone_where_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, compute_here=False)
    assert [steps.step(waited=9) for _ in range(4)] == [0] * 4


def test_a_step_without_a_forward_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for _ in range(5):
        steps.step(waited=9, forwards=0)
    assert steps.step(waited=9) == 0


@pytest.mark.usefixtures("one_rank")
def test_threads_sleep_in_the_passes_of_a_training_that_waits(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Sleep.now = 0
    monkeypatch.setattr(paging, "IdleThreads", partial(IdleThreads, start=Sleep))
    model = sharded(width=512)
    slow = [DriveLimit(latency_seconds=0.02)]
    slept: list[int] = []
    model.register_forward_hook(lambda *_: slept.append(Sleep.now))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB", drive_limits=slow) as swap:
        swap.page(model, infinity.PagingOptions(sub_group_size=65536))
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)

        def step(number: int) -> None:
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(4):
            step(number)
            assert Sleep.now == 0
        with torch.no_grad():
            model(batch(0))
        assert slept == [0, 0, 1, 1, 0]

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        hook = model.blocks[1].register_full_backward_hook(fail)  # type: ignore[index, union-attr]
        with pytest.raises(KeyboardInterrupt):
            step(4)
        hook.remove()
        swap.flush()
        with torch.no_grad():
            model(batch(0))
        assert slept[-2:] == [1, 0]
        model(batch(5))
        assert Sleep.now == 1
    assert Sleep.now == 0
