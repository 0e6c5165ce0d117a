"""Floor 11. Who hears of it when a forward, a backward or a step of the engine begins and ends. Training thread only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from infinity.runtime.flops import FlopsProfile
from infinity.runtime.wall_clock import WallClock
from infinity.swap.timeline import Timeline, measured

P = ParamSpec("P")
R = TypeVar("R")

_IN_A_TRACE = {"fwd": "forward", "bwd": "backward", "step": "step"}


class Timed(Protocol):
    """Who has a clock or a profile where they are wanted, and counts its steps."""

    wall_clock: WallClock | None
    flops_profile: FlopsProfile | None

    @property
    def global_steps(self) -> int: ...

    @property
    def timeline(self) -> Timeline | None: ...


E = TypeVar("E", bound=Timed)


@contextmanager
def timing(engine: Timed, part: str) -> Iterator[None]:
    """Count what happens in the block for `part`, one of PARTS, wherever that is wanted; tell when a step ends."""
    steps, clock, profile = engine.global_steps, engine.wall_clock, engine.flops_profile
    with (
        measured(engine.timeline, "step", _IN_A_TRACE[part]),
        clock.measure(part) if clock is not None else nullcontext(),
        profile.measure(part, steps) if profile is not None else nullcontext(),
    ):
        yield
    stepped = engine.global_steps > steps
    if clock is not None and part == "step":
        clock.report(stepped=stepped)
    if profile is not None and stepped and profile.report():
        engine.flops_profile = None  # told once


def timed(part: str) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """A method whose time counts for `part`."""

    def decorate(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        @functools.wraps(method)
        def run(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with timing(self, part):
                return method(self, *args, **kwargs)

        return run

    return decorate
