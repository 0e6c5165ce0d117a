"""What hypothesis draws in this suite: the same in every run, so that a failure is of the change under test."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st


def test_every_run_draws_the_same_examples() -> None:
    runs: list[list[int]] = []

    @hypothesis.given(st.integers())
    def draw(number: int) -> None:
        runs[-1].append(number)

    for _ in range(2):
        runs.append([])
        draw()
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 10
    assert hypothesis.settings.default.database is None, "what one run found would be tried first by the next"
