"""Host buffers of varying size: no memory is lent twice, and held memory is bounded by lent memory."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from infinity.aio import FreeRanges, PinnedSlab
from infinity.device import Device, HostBuffer, HostBuffers

PAGE = 4096


class CountingDevice(Device):
    """Knows which slabs are registered with it."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def register(self, slab: PinnedSlab) -> str | None:
        self.registered.add(id(slab))
        return None

    def unregister(self, slab: PinnedSlab) -> None:
        self.registered.remove(id(slab))


def lend(buffers: HostBuffers, pages: int) -> HostBuffer | None:
    return buffers.try_lend(pages * PAGE, torch.uint8)


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)
"""Pages of the buffers of one step."""


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    steps=st.lists(SIZES, min_size=1, max_size=6),
    bound=st.none() | st.integers(1, 40),
    random=st.randoms(use_true_random=False),
)
def test_what_is_held_is_bounded_by_what_was_lent_at_once(
    steps: list[list[int]], bound: int | None, random: object
) -> None:
    """Buffers of any sizes, some given back in between, all at the end of a step, as of forward and backward."""
    device = CountingDevice()
    buffers = HostBuffers(device, pin=True, bytes_max=None if bound is None else bound * PAGE)
    largest = 0
    for pages_of_step in steps:
        lent: list[tuple[HostBuffer, int]] = []
        for number, pages in enumerate(pages_of_step):
            buffer = lend(buffers, pages)
            assert len(device.registered) == len(buffers._slabs)
            if buffer is None:
                assert bound is not None
                continue
            buffer.tensor.fill_(number)
            lent.append((buffer, number))
            largest = max(largest, pages * PAGE)
            assert buffers.nbytes <= 2 * buffers.lent_bytes_max + largest
            assert bound is None or buffers.nbytes <= bound * PAGE
            if random.random() < 0.3:  # type: ignore[attr-defined]
                lent.pop(random.randrange(len(lent)))[0].give_back()  # type: ignore[attr-defined]
        for buffer, number in reversed(lent):
            assert (buffer.tensor == number).all(), "another buffer had the same memory"
            buffer.give_back()
    buffers.close()
    assert not device.registered


@hypothesis.settings(max_examples=30)
@hypothesis.given(first=SIZES, then=st.lists(SIZES, max_size=4))
def test_stacks_of_any_sizes_end_in_one_slab_of_the_most_that_was_lent(first: list[int], then: list[list[int]]) -> None:
    buffers = HostBuffers(Device(), pin=False)

    def step(sizes: list[int]) -> None:
        for buffer in [lend(buffers, pages) for pages in sizes]:
            assert buffer is not None
            buffer.give_back()

    for sizes in [first, *then]:
        step(sizes)
    most = max(sum(sizes) for sizes in [first, *then]) * PAGE
    assert buffers.lent_bytes_max == most
    for sizes in ([1] * (most // PAGE), first, *then):
        step(sizes)
        assert buffers.nbytes == most


def test_the_same_sizes_in_every_step_make_nothing_after_the_first() -> None:
    device = CountingDevice()
    buffers = HostBuffers(device, pin=True)
    slabs: set[int] = set()
    for _ in range(3):
        lent = [lend(buffers, pages) for pages in (3, 1, 7, 1)]
        assert not slabs or slabs == device.registered
        slabs = set(device.registered)
        for buffer in lent:
            assert buffer is not None
            buffer.give_back()
    assert len(slabs) == 4 and buffers.nbytes == 12 * PAGE


def test_idle_slabs_make_way_while_others_are_lent_for_ever() -> None:
    buffers = HostBuffers(Device(), pin=False)
    kept = lend(buffers, 2)
    for pages in range(1, 40):
        buffer = lend(buffers, pages)
        assert buffer is not None
        buffer.give_back()
    assert kept is not None and buffers.nbytes == (2 + 39) * PAGE


def test_an_interrupted_lend_keeps_no_other_from_its_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = HostBuffers(Device(), pin=False)
    with monkeypatch.context() as patch:
        patch.setattr(FreeRanges, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lend(buffers, 2)
    assert lend(buffers, 2) is not None
    assert buffers.nbytes == 2 * PAGE


def interrupted(ranges: FreeRanges, nbytes: int) -> int | None:
    raise KeyboardInterrupt
