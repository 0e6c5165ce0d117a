"""Writes a torch.distributed.checkpoint from tensors that are read only when they are written. One process, no ranks.

DCP requests each value when it writes it. So a large tensor is a meta tensor in the state dict, cut by rows into pieces
that are read on request: memory is bounded by one piece, for any model.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from infinity.checkpoint.checks import failing_as
from infinity.checkpoint.dcp_storage import Writer, cause_of
from infinity.checkpoint.manifest import FILE_NAME, Manifest, stored_file
from infinity.checkpoint.training_state import encode
from infinity.checkpoint.work_folder import WorkFolder
from infinity.errors import CheckpointError
from infinity.store.files import sync, write_durably

Progress = Callable[[int], None]
Read = Callable[[int, int], torch.Tensor]
"""Reads a tensor's elements, by first index and count, flat, in fp32. May raise CheckpointError."""

_PIECE_NUMEL = 64 << 20
"""Elements that go to one file, and are in memory at once: 256 MiB."""


@contextlib.contextmanager
def new_folder(final: Path, nbytes: int) -> Iterator[Path]:
    """Yield a hidden folder that gets the name `final` when the block ends, and is removed if it fails or is
    interrupted. After a kill, the next writer to the same place removes it.

    Raises CheckpointError if `final` is not empty, can't be created, or fewer than `nbytes` bytes are free.
    """
    task = f"writing the checkpoint {final}"
    with failing_as(task):
        place = final.resolve()  # as a link can't be replaced by a folder
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise CheckpointError(f"{final} exists already: remove it, or name another folder")
        if place.is_mount():
            raise CheckpointError(f"{final} is a mount point: name a folder in it")
        work = WorkFolder.make(place.parent, place.name, nbytes, "the checkpoint")
    try:
        with failing_as(task):
            yield work.new
            sync(work.new)
            work.new.rename(place)
            sync(place.parent)
    finally:
        work.remove()


class UnreadState:
    """The state dict of FSDP2 and its optimizer, in which meta tensors stand for masters and moments until DCP writes
    them. reads: functions that read the meta tensors' values, by DCP's names. nbytes: of all these."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self.model = dict(buffers)
        self.moments: dict[str, dict[str, torch.Tensor]] = {}
        self.groups: list[dict[str, Any]] = []
        self.reads: dict[str, Read] = {}
        self.nbytes = 0

    def add(self, name: str, shape: tuple[int, ...], master: Read) -> None:
        self.model[name] = self._unread(f"model.{name}", shape, master)

    def add_moments(self, name: str, steps: torch.Tensor | None, moments: Mapping[str, Read]) -> None:
        """Add the optimizer's state of a parameter; `steps` is None if the optimizer counts none."""
        shape = tuple(self.model[name].shape)
        self.moments[name] = {} if steps is None else {"step": steps}
        for moment, read in moments.items():
            self.moments[name][moment] = self._unread(f"optimizer.state.{name}.{moment}", shape, read)

    def tie(self, alias: str, name: str) -> None:
        self.model[alias] = self.model[name]
        if f"model.{name}" in self.reads:
            self.add(alias, tuple(self.model[name].shape), self.reads[f"model.{name}"])

    def _unread(self, key: str, shape: tuple[int, ...], read: Read) -> torch.Tensor:
        self.reads[key] = read
        self.nbytes += 4 * math.prod(shape)
        return torch.empty(shape, device="meta")

    def write(
        self, folder: Path, training_states: Iterable[dict[str, Any]], manifest: Manifest, tell: Progress
    ) -> None:
        """Write the checkpoint's files: the state, the training state of each rank, and the manifest. `tell` is called
        with the bytes of each piece. Raises OSError, and CheckpointError if a tensor can't be read."""
        writer = Writer(folder)
        state = {"model": self.model, "optimizer": {"state": self.moments, "param_groups": self.groups}}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(state, storage_writer=writer, planner=_Planner(self.reads, tell), no_dist=True)
        except dcp.CheckpointException as error:
            cause = cause_of(error)
            if isinstance(cause, (CheckpointError, OSError)):
                raise cause from None
            raise CheckpointError(f"writing the checkpoint failed: {cause}") from None
        files = writer.written
        for rank, training_state in enumerate(training_states):
            content = encode(training_state)
            write_durably(folder / f"rank{rank}.pt", content)
            files[f"rank{rank}.pt"] = stored_file(content)
        write_durably(folder / FILE_NAME, replace(manifest, state_format="dcp", files=files).to_json())


class _Planner(dcp.DefaultSavePlanner):
    """DCP's plan, but large tensors are cut by rows, and meta tensors are read when they are written."""

    def __init__(self, reads: Mapping[str, Read], tell: Progress) -> None:
        super().__init__()
        self._reads, self._tell = reads, tell

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in (_cut(item) if item.index.fqn in self._reads else (item,))]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        read = self._reads.get(write_item.index.fqn)
        if read is None:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        row_numel = math.prod(write_item.tensor_data.size[1:])
        numel = math.prod(chunk.sizes)
        tensor = read(chunk.offsets[0] * row_numel, numel)
        self._tell(4 * numel)
        return tensor.view(chunk.sizes)


def _cut(item: WriteItem) -> Iterator[WriteItem]:
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
