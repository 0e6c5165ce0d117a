"""Writes a checkpoint of torch.distributed.checkpoint out of tensors that are read only when they are written. One
process, no ranks.

DCP asks for each value when it writes it. So a large tensor is a meta tensor in the state dict, cut by rows into pieces, and a
piece is read then: memory is bounded by a piece, however large the model is.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from infinity.checkpoint.dcp_storage import Writer, cause_of
from infinity.checkpoint.draft import check_space, clear_abandoned, failing_as
from infinity.checkpoint.work_folder import WorkFolder
from infinity.errors import CheckpointError
from infinity.store.files import sync

Progress = Callable[[int], None]

_PIECE_NUMEL = 64 << 20
"""Elements that go to one file, and are in memory at once: 256 MiB."""


@dataclass(frozen=True)
class Unread:
    """A tensor to be read when DCP writes it.

    shape: of it. read: from the index of a first element, so many elements, flat, in fp32; may raise CheckpointError.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of it in fp32."""
        return 4 * math.prod(self.shape)

    def in_state_dict(self) -> torch.Tensor:
        """What stands for it in the state dict."""
        return torch.empty(self.shape, device="meta")


@contextlib.contextmanager
def new_folder(final: Path, nbytes: int) -> Iterator[Path]:
    """A hidden folder that gets the name `final` when the block ends, and is removed where it fails or is interrupted; where it
    is killed, by the next that writes to the same place.

    nbytes: that will be written to it. Raises CheckpointError where `final` is there already, can't be made, or that many
    bytes aren't free.
    """
    task = f"writing the checkpoint {final}"
    with failing_as(task):
        place = final.resolve()  # as a link can't be replaced by a folder
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise CheckpointError(f"{final} is there already: remove it, or name another folder")
        if place.is_mount():
            raise CheckpointError(f"{final} is where a file system is mounted: name a folder in it")
        place.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(place.parent)
        check_space(place.parent, nbytes, "the checkpoint")
        work = WorkFolder.make(place.parent, secrets.token_hex(8), place.name)
    try:
        with failing_as(task):
            yield work.new
            sync(work.new)
            work.new.rename(place)
            sync(place.parent)
    finally:
        work.remove()


def write_state(state: dict[str, Any], unread: Mapping[str, Unread], writer: Writer, tell: Progress) -> None:
    """Write the state dict; `unread` are the tensors behind its meta tensors, by DCP's names for them.

    `tell` is called with the bytes of each piece. Raises OSError, and CheckpointError where a tensor can't be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(state, storage_writer=writer, planner=_Planner(unread, tell), no_dist=True)
    except dcp.CheckpointException as error:
        cause = cause_of(error)
        if isinstance(cause, (CheckpointError, OSError)):
            raise cause from None
        raise CheckpointError(f"writing the checkpoint failed: {cause}") from None


class _Planner(dcp.DefaultSavePlanner):
    """DCP's plan, but large tensors are cut by rows, and meta tensors are read when they are written."""

    def __init__(self, unread: Mapping[str, Unread], tell: Progress) -> None:
        super().__init__()
        self._unread, self._tell = unread, tell

    def create_local_plan(self) -> SavePlan:
        """A file for each piece: see `Writer`."""
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in (_cut(item) if item.index.fqn in self._unread else (item,))]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The value to write. Raises CheckpointError where it can't be read."""
        unread = self._unread.get(write_item.index.fqn)
        if unread is None:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        row_numel = math.prod(write_item.tensor_data.size[1:])
        numel = math.prod(chunk.sizes)
        tensor = unread.read(chunk.offsets[0] * row_numel, numel)
        self._tell(4 * numel)
        return tensor.view(chunk.sizes)


def _cut(item: WriteItem) -> Iterator[WriteItem]:
    """The item, cut into pieces of whole rows."""
    data = item.tensor_data
    assert data is not None
    rows = max(1, _PIECE_NUMEL // max(1, math.prod(data.size[1:])))
    if data.size[0] <= rows:
        yield item
        return
    for first in range(0, data.size[0], rows):
        offsets = torch.Size([first, *[0] * (len(data.size) - 1)])
        sizes = torch.Size([min(rows, data.size[0] - first), *data.size[1:]])
        chunk = ChunkStorageMetadata(offsets, sizes)
        yield WriteItem(
            MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)
        )
