"""How storage is driven, as one value: it reaches the engine from every door, and single fields of it can be named."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from infinity.aio import IoEngine, IoSettings, PinnedPool
from infinity.units import KIB, MIB

SETTINGS = IoSettings("threads", 64 * KIB, queue_depth=3, rings=2)


def test_settings_are_the_engines() -> None:
    engine = IoEngine(PinnedPool(MIB), SETTINGS)
    assert (engine.backend, engine.block_bytes) == ("threads", 64 * KIB)
    engine.close()


def test_a_field_that_is_named_counts_instead() -> None:
    engine = IoEngine(PinnedPool(MIB), SETTINGS, block_bytes=128 * KIB)
    assert (engine.backend, engine.block_bytes) == ("threads", 128 * KIB)
    engine.close()


def test_in_flight_is_what_all_rings_have_been_given() -> None:
    assert SETTINGS.in_flight_bytes == 2 * 3 * 64 * KIB


def test_a_swap_manager_and_a_measurement_take_them_too(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, io=SETTINGS) as swap:
        assert swap.backend == "threads"
    rates = infinity.measure_drive(nvme_path, nbytes=16 * MIB, rounds=1, seconds=0.01, io=SETTINGS)
    assert rates.backend == "threads"


def test_a_field_that_does_not_exist_is_refused(nvme_path: Path) -> None:
    with pytest.raises(TypeError, match="block_size"):
        IoEngine(PinnedPool(MIB), block_size=MIB)
    with pytest.raises(TypeError, match="block_size"):
        infinity.SwapManager(nvme_path, block_size=MIB)
    with pytest.raises(TypeError, match="block_size"):
        infinity.measure_drive(nvme_path, block_size=MIB)
    assert list(nvme_path.iterdir()) == []
