"""What several drives promise: the same training bit for bit, bytes on each in proportion to its bandwidth, nothing left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worse_drives import DriveLimit, worse_drives

import infinity
from infinity.swap import SwapStats
from infinity.units import MIB


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(nvme_path: Any, backend: str, mix: str = "auto") -> tuple[list[float], SwapStats | None]:
    """Losses of three steps of a small model, and what was moved."""
    drive = {"device": "nvme", "nvme_path": nvme_path} if nvme_path else {"device": "none"}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), *(nn.Sequential(nn.Linear(300, 300), nn.ReLU()) for _ in range(3)))
    settings = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "infinity": {"pinned_bytes_max": "16MiB", "backend": backend, "mix": mix},
        "aio": {"block_size": "64KiB"},
    }
    engine, *_ = infinity.initialize(model=model, config=settings)
    try:
        losses = []
        for _ in range(3):
            loss = engine(torch.ones(4, 8)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, engine.swap_stats()
    finally:
        engine.close()


@pytest.mark.parametrize("mix", ["interleaved", "bursts"])
def test_training_over_two_drives_equals_memory(nvme_path: Path, backend: str, mix: str) -> None:
    paths = [nvme_path / "a", nvme_path / "b"]
    losses, stats = trained([str(path) for path in paths], backend, mix)
    assert losses == trained(None, backend)[0]
    assert stats is not None
    assert len(stats.drives) == 2
    assert all(drive.read_bytes > 0 and drive.written_bytes > 0 for drive in stats.drives)
    assert sum(drive.read_bytes for drive in stats.drives) == stats.read_bytes
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_a_slower_drive_is_given_fewer_bytes(nvme_path: Path) -> None:
    paths = [nvme_path / "fast", nvme_path / "slow"]
    limits = [DriveLimit(bytes_per_s=200e6, path=paths[0]), DriveLimit(bytes_per_s=50e6, path=paths[1])]
    with (
        worse_drives(limits),
        infinity.SwapManager(paths, pinned_bytes_max=32 * MIB, block_bytes=64 << 10) as swap,
    ):
        values = torch.randn(4 << 20)
        swap.tensors.register("values", values)
        swap.flush()
        with swap.tensors.use("values") as read:
            assert torch.equal(read, values)
        fast, slow = swap.stats().drives
        assert 2.5 < fast.written_bytes / slow.written_bytes < 6
        assert any("striping over 2 drives" in note for note in swap.notes)


def test_one_bad_path_of_two_leaves_nothing_behind(nvme_path: Path) -> None:
    (nvme_path / "file").touch()
    with pytest.raises(infinity.StoreError, match="file is a file, not a folder"):
        infinity.SwapManager([nvme_path / "good", nvme_path / "file" / "below"], bandwidths=[1.0, 1.0])
    assert list((nvme_path / "good").iterdir()) == []


def test_the_same_path_twice_is_refused_by_the_config() -> None:
    drive = {"device": "nvme", "nvme_path": ["/mnt/a", "/mnt/../mnt/a"]}
    with pytest.raises(infinity.ConfigError, match="list of different paths"):
        infinity.initialize(
            model=nn.Linear(2, 2),
            config={
                "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": 3, "offload_param": drive},
            },
        )
