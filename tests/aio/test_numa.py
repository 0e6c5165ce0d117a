"""Pinned memory near the device or the drive: asked for around the making of a slab, survived where it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.aio import near, numa
from infinity.device import cuda
from infinity.device.cuda import CudaRuntime


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
    monkeypatch.setattr(numa, "NODES", tmp_path)
    if numa._policy() != numa._DEFAULT:
        pytest.skip("the kernel doesn't tell of a policy here, or this process was given one")
    yield
    assert numa._policy() == numa._DEFAULT


@pytest.mark.usefixtures("two_nodes")
def test_a_node_is_preferred_while_a_slab_is_made_and_not_after() -> None:
    notes: list[str] = []
    with near(0, notes):
        assert notes or numa._policy() == numa._PREFERRED
    with pytest.raises(MemoryError), near(0, notes):
        raise MemoryError
    with near(None, notes):
        assert numa._policy() == numa._DEFAULT


@pytest.mark.usefixtures("two_nodes")
def test_a_node_that_is_refused_is_said_with_what_to_do() -> None:
    notes: list[str] = []
    with near(1000, notes):
        assert numa._policy() == numa._DEFAULT
    assert len(notes) == 1 and "NUMA node 1000" in notes[0] and "numactl" in notes[0]


@pytest.mark.usefixtures("two_nodes")
def test_a_policy_from_outside_is_left_alone() -> None:
    notes: list[str] = []
    with near(0, notes):
        if notes:
            pytest.skip(notes[0])
        with near(1000, notes):
            pass
        assert not notes and numa._policy() == numa._PREFERRED


def test_on_one_node_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(numa, "_call", lambda *args: pytest.fail("a call"))
    with near(0, []):
        pass


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_node_of_a_gpu_is_that_of_its_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, node: int | None
) -> None:
    place: Any = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(cuda, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    (tmp_path / "0000:c1:00.0").mkdir()
    if text is not None:
        (tmp_path / "0000:c1:00.0" / "numa_node").write_text(text)
    assert CudaRuntime(torch.device("cuda", 0)).numa_node == node
    del place.pci_bus_id
    assert CudaRuntime(torch.device("cuda", 0)).numa_node is None
