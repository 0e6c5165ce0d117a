"""What the layout of foreign files promises: whatever the ranges, each is found in the lease where its pages were put."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from infinity.errors import CheckpointError
from infinity.store.foreign import FileRange, ForeignFiles, ForeignRows, StoredTensor, lay_out, read_header
from infinity.store.stored_parameter import JoinedRows

PAGE = 4096
FILES = [Path("a"), Path("b")]

ranges = st.builds(
    FileRange,
    st.sampled_from(FILES),
    st.one_of(st.integers(0, 40_000), st.integers(0, 10).map(lambda page: page * PAGE)),
    st.integers(0, 12_000),
)


def joined(ranges: list[FileRange], padding: int) -> ForeignRows:
    """All rows of what takes these ranges."""
    members = [StoredTensor(one.path, "U8", (one.nbytes,), one.offset, one.nbytes) for one in ranges]
    return ForeignRows(JoinedRows(tuple(members)), 0, sum(one.nbytes for one in ranges), ranges[0].nbytes + padding)


rows = st.builds(joined, st.lists(ranges, min_size=1, max_size=3), st.integers(0, 5000))


@given(st.dictionaries(st.integers(0, 50), rows, max_size=12))
def test_every_range_is_where_it_is_said_to_be(shards: dict[int, ForeignRows]) -> None:
    part = lay_out(shards)
    lease: dict[int, tuple[Path, int]] = {}
    for pages in part.pages:
        assert pages.range.offset % PAGE == pages.range.nbytes % PAGE == pages.lease_offset % PAGE == 0
        for at in range(0, pages.range.nbytes, PAGE):
            assert lease.setdefault(pages.lease_offset + at, (pages.range.path, pages.range.offset + at))
    assert len(lease) * PAGE == sum(pages.range.nbytes for pages in part.pages)  # nothing on top of something else
    for shard, row in shards.items():
        assert part.places[shard][0] + row.padded_bytes <= part.nbytes
        for place, one in zip(part.places[shard], row.ranges, strict=True):
            for byte in (0, one.nbytes // 2, one.nbytes - 1) if one.nbytes else ():
                path, offset = lease[(place + byte) // PAGE * PAGE]
                assert (path, offset + (place + byte) % PAGE) == (one.path, one.offset + byte)
    wanted = {
        (one.path, page)
        for row in shards.values()
        for one in row.ranges
        if one.nbytes
        for page in range(one.offset // PAGE, -(-one.end // PAGE))
    }
    assert len(wanted) == len(lease)  # no page twice, and none in vain


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * 4096, 3 * 4096 + 5])
def test_the_end_of_a_file_is_in_memory_and_the_rest_is_read(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytes(number % 251 for number in range(size))
    path.write_bytes(data)
    files = ForeignFiles([path], lambda path: 0, checksums=True)
    for first in range(0, size, PAGE):
        for nbytes in range(PAGE, size - first + PAGE, PAGE):
            read, end = files.file(path).split_end(FileRange(path, first, nbytes))
            assert read % PAGE == 0
            assert data[first : first + read] + end == data[first : first + nbytes]
    files.close()


def test_a_header_says_where_the_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"x": torch.arange(6.0).view(3, 2), "y": torch.arange(5).to(torch.bfloat16), "z": torch.empty(0, 3)}
    save_file(tensors, path, {"written": "here"})
    data = path.read_bytes()
    found = read_header(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = found[name]
        assert stored.shape == tuple(tensor.shape)
        assert data[stored.offset : stored.offset + stored.nbytes] == tensor.view(torch.uint8).numpy().tobytes()
    assert (found["x"].dtype, found["y"].dtype) == ("F32", "BF16")
    assert found["x"].ranges(1, 2) == (FileRange(path, found["x"].offset + 8, 16),)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b'{"a"',
        *(
            len(text).to_bytes(8, "little") + text
            for text in (
                json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode(),
                json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [4, 0]}}).encode(),
                json.dumps({"a": {"dtype": "F32", "shape": 4}}).encode(),
                json.dumps({"a": 3}).encode(),
            )
        ),
    ],
)
def test_a_damaged_header_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or not safetensors"):
        read_header(path)
