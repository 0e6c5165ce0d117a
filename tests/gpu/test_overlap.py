"""The measure of overlap, which needs no device."""

from __future__ import annotations

from overlap import exposed, length, union


def test_union_joins_what_touches() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7), (5, 5)]) == [(0, 2), (3, 4)]
    assert length([(0, 1), (0.5, 2), (3, 4)]) == 3


def test_only_what_is_copied_while_nothing_computes_is_exposed() -> None:
    assert exposed([(0, 4)], []) == 4
    assert exposed([(0, 4)], [(0, 4)]) == 0
    assert exposed([(0, 4), (6, 8)], [(1, 2), (3, 7)]) == 1 + 1 + 1
    assert exposed([(0, 1), (0, 1)], [(0.5, 2)]) == 0.5
