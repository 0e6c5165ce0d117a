"""Memory that the C library's heap keeps free goes back to the kernel."""

from __future__ import annotations

import pytest

from infinity import host_memory


def test_it_is_given_back_if_an_eighth_more_is_taken_than_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, trims = [100], []
    needed = 100

    def trim(pad: int) -> None:
        trims.append(taken[0])
        taken[0] = needed

    monkeypatch.setattr(host_memory, "taken_bytes", lambda: taken[0])
    monkeypatch.setattr(host_memory, "_malloc_trim", trim)
    this = host_memory.Heap()
    for now in (100, 110, 112, 113, 130, 100, 113):
        taken[0] = now
        this.trim_if_grown()
    assert trims == [100, 113, 130, 113]
    needed = 200
    for now in (200, 225, 226, 220, 100, 113):
        taken[0] = now
        this.trim_if_grown()
    assert trims[4:] == [200, 226]


def test_without_malloc_trim_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_malloc_trim", None)
    host_memory.Heap().trim_if_grown()


def test_this_c_library_gives_back_what_is_free() -> None:
    if host_memory._malloc_trim is None:
        pytest.skip("this C library has no malloc_trim")
    small = [bytearray(100 << 10) for _ in range(2000)]  # of the heap, as each is below the least size that is mapped
    between = small[::2]
    before = host_memory.taken_bytes()
    del small
    host_memory.Heap().trim_if_grown()
    assert host_memory.taken_bytes() < before - (50 << 20)
    assert len(between) == 1000
