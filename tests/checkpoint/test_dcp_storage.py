"""DCP's index, whatever its bytes are, is read to what DCP wrote or refused; it never runs what it names."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
from pathlib import Path, PosixPath
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import MakesFolder
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from infinity.checkpoint.dcp_storage import Planner, Reader
from infinity.errors import CheckpointError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An index as DCP writes it, for every dtype there is."""
    folder = tmp_path_factory.mktemp("written")
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
    state = {str(dtype): torch.zeros(3, 2, dtype=dtype) for dtype in dtypes}
    dcp.save({"model": state, "lr": 0.5}, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


def read(folder: Path, content: bytes) -> Metadata:
    (folder / ".metadata").write_bytes(content)
    return Reader(folder).read_metadata()


def test_what_dcp_writes_is_read(written: bytes, tmp_path: Path) -> None:
    ours, theirs = read(tmp_path, written), pickle.loads(written)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


@pytest.mark.parametrize("called", [os.system, subprocess.Popen, eval, getattr, torch.load, PosixPath.unlink, print])
def test_nothing_that_does_anything_can_be_named(called: Any, tmp_path: Path) -> None:
    class Spiteful:
        def __reduce__(self) -> tuple[Any, ...]:
            return called, ("x",)

    with pytest.raises(CheckpointError, match=r"is not permitted in a checkpoint|damaged"):
        read(tmp_path, pickle.dumps(Spiteful()))


@pytest.mark.inputs
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    max_examples=3 * hypothesis.settings.default.max_examples,
)
@hypothesis.given(st.data())
def test_changed_bytes_are_refused_or_an_index(written: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(written)
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        assert isinstance(read(tmp_path, bytes(content[: data.draw(st.integers(0, len(content)))])), Metadata)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", "..", 7])
def test_no_file_outside_the_folder_is_read(name: Any, written: bytes, tmp_path: Path) -> None:
    metadata = pickle.loads(written)
    metadata.storage_data = {key: _StorageInfo(name, 0, 1) for key in metadata.storage_data}
    with pytest.raises(CheckpointError, match="not the name of a file"):
        read(tmp_path, pickle.dumps(metadata))


def test_values_that_are_no_tensors_run_nothing(tmp_path: Path) -> None:
    dcp.save({"value": MakesFolder(tmp_path / "ran")}, checkpoint_id=tmp_path / "made", no_dist=True)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"value": None}, storage_reader=Reader(tmp_path / "made"), planner=Planner(), no_dist=True)
    assert not (tmp_path / "ran").exists()
