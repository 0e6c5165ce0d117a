"""The measure of overlap, which needs no device."""

from __future__ import annotations

from types import SimpleNamespace

from overlap import exposed, length, on_the_gpu, union


def test_union_joins_what_touches() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7), (5, 5)]) == [(0, 2), (3, 4)]
    assert length([(0, 1), (0.5, 2), (3, 4)]) == 3


def test_only_what_is_copied_while_nothing_computes_is_exposed() -> None:
    assert exposed([(0, 4)], []) == 4
    assert exposed([(0, 4)], [(0, 4)]) == 0
    assert exposed([(0, 4), (6, 8)], [(1, 2), (3, 7)]) == 1 + 1 + 1
    assert exposed([(0, 1), (0, 1)], [(0.5, 2)]) == 0.5


def test_what_the_profiler_saw_is_told_apart() -> None:
    def event(name: str, begin: float, *, device: str = "CUDA", annotated: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=begin, end=begin + 1)
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotated, time_range=span)

    seen = [
        event("Memcpy HtoD (Pinned -> Device)", 1),
        event("Memcpy DtoH (Device -> Pinned)", 2),
        event("Memcpy DtoD (Device -> Device)", 3),
        event("Memset (Device)", 4),
        event("void at::native::vectorized_elementwise_kernel<4>", 5),
        event("FSDP::all_gather", 6),
        event("a range that a user named", 7, annotated=True),
        event("aten::mm", 8, device="CPU"),
    ]
    assert on_the_gpu(seen) == ([(5, 6)], [(1, 2)], [(2, 3)])
