"""Floor 10. Turns an arena checkpoint into one of torch.distributed.checkpoint, which other tools read. One process, no ranks.

Tensors are read when DCP writes them, one piece at a time, so memory is bounded by a piece however large the model is. The
result is like a checkpoint that `save_checkpoint` writes in the format "dcp".
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from infinity.checkpoint.dcp_storage import Writer, cause_of
from infinity.checkpoint.draft import check_space, failing_as
from infinity.checkpoint.manifest import FILE_NAME, find_checkpoint
from infinity.checkpoint.stored_arena import StoredArena, is_arena_checkpoint
from infinity.checkpoint.training_state import encode
from infinity.errors import CheckpointError
from infinity.store.files import StoredFile, sync, write_durably
from infinity.store.layout import Field

Progress = Callable[[int], None]

_PIECE_NUMEL = 64 << 20
"""Elements that go to one file, and are in memory at once: 256 MiB."""

_IN_STATE_DICT = ("param_groups", "group_names", "steps", "buffers")
"""Keys of the unpaged state that DCP's format has in its state dict."""


def export(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tag: str | None = None,
    progress: Callable[[int], Progress] = lambda total: lambda nbytes: None,
) -> Path:
    """Write the arena checkpoint in a folder (the latest there, where `tag` is None) as one of torch.distributed.checkpoint.

    Args:
        output: the folder of the new one, which must not exist, or be empty.
        progress: called with the bytes of all masters and moments; it returns a function that is called with those written.

    Returns its folder. Raises CheckpointError where the checkpoint is damaged or of another format, or `output` can't be
    written or lacks the space; nothing is left then.
    """
    path = find_checkpoint(directory, tag)
    if not is_arena_checkpoint(path):
        raise CheckpointError(f"{path} is in PyTorch's format already: use it as it is")
    with StoredArena(path) as stored:
        return _export(stored, Path(output), progress)


@dataclass(frozen=True)
class _Values:
    """The master or a moment of one parameter, to be read when DCP writes it."""

    parameter: str
    field: Field
    nbytes: int


def _export(stored: StoredArena, final: Path, progress: Callable[[int], Progress]) -> Path:
    state, values = _state_of(stored)
    total = sum(tensor.nbytes for tensor in values.values())
    partial = final.parent / f".infinity-export-{secrets.token_hex(8)}"
    task = f"writing the checkpoint {final}"
    with failing_as(task):
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise CheckpointError(f"{final} is there already: remove it, or name another folder")
        final.parent.mkdir(parents=True, exist_ok=True)
        check_space(final.parent, total, "the checkpoint")
        partial.mkdir(mode=0o700)
    try:
        writer = Writer(partial)
        _write(state, _Planner(stored, values, progress(total)), writer, task)
        with failing_as(task):
            _complete(stored, partial, writer.written)
            partial.rename(final)
            sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _state_of(stored: StoredArena) -> tuple[dict[str, Any], dict[str, _Values]]:
    """The state dict of FSDP2 + AdamW with meta tensors for masters and moments; and, by key, the values for these."""
    unpaged_state = stored.unpaged_state(0)
    model: dict[str, torch.Tensor] = dict(unpaged_state["buffers"])
    moments: dict[str, dict[str, torch.Tensor]] = {}
    values = {}
    for param in stored.parameters:
        model[param.name] = torch.empty(param.shape, device="meta")
        nbytes = 4 * math.prod(param.shape)
        values[f"model.{param.name}"] = _Values(param.name, Field.MASTER, nbytes)
        steps = unpaged_state["steps"]
        if not param.trained or (steps and param.name not in steps):  # SGD counts none
            continue
        moments[param.name] = {"step": steps[param.name]} if steps else {}
        for name, field in stored.moments_of(param).items():
            moments[param.name][name] = torch.empty(param.shape, device="meta")
            values[f"optimizer.state.{param.name}.{name}"] = _Values(param.name, field, nbytes)
    for alias, name in stored.manifest.aliases.items():
        if name in model:
            model[alias] = model[name]
            if f"model.{name}" in values:
                values[f"model.{alias}"] = values[f"model.{name}"]
    groups = [
        {**group, "params": names}
        for group, names in zip(unpaged_state["param_groups"], _group_names(stored, unpaged_state), strict=True)
    ]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}, values


def _group_names(stored: StoredArena, unpaged_state: dict[str, Any]) -> list[list[str]]:
    """The parameters of each of the optimizer's groups."""
    groups, names = unpaged_state["param_groups"], unpaged_state.get("group_names")
    if names is None and len(groups) == 1:
        return [list(unpaged_state["steps"])]
    if names is None:
        raise CheckpointError(
            f"{stored.path} was saved by an earlier version, which did not note the parameters of each of its {len(groups)} "
            'groups: load it and save it with format="dcp"'
        )
    in_model = [param.name for param in stored.parameters]
    if not (
        isinstance(names, list)
        and len(names) == len(groups)
        and all(isinstance(group, list) and all(name in in_model for name in group) for group in names)
    ):
        raise stored.rank(0).damaged("the parameters of its optimizer's groups are not the model's")
    return names


class _Planner(dcp.DefaultSavePlanner):
    """DCP's plan, but large tensors are cut by rows, and meta tensors are read when they are written."""

    def __init__(self, stored: StoredArena, values: dict[str, _Values], tell: Progress) -> None:
        super().__init__()
        self._stored, self._values, self._tell = stored, values, tell

    def create_local_plan(self) -> SavePlan:
        """A file for each piece: see `Writer`."""
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in (_cut(item) if item.index.fqn in self._values else (item,))]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The value to write. Raises CheckpointError where the arena files are damaged."""
        values = self._values.get(write_item.index.fqn)
        if values is None:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        row_numel = math.prod(write_item.tensor_data.size[1:])
        numel = math.prod(chunk.sizes)
        tensor = self._stored.read_verified(values.parameter, values.field, chunk.offsets[0] * row_numel, numel)
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


def _write(state: dict[str, Any], planner: _Planner, writer: Writer, task: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        cause = cause_of(error)
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise CheckpointError(f"{task} failed: {cause}") from None


def _complete(stored: StoredArena, partial: Path, files: dict[str, StoredFile]) -> None:
    """Add the training state of each rank, and the manifest."""
    for rank in range(stored.manifest.ranks):
        unpaged_state = stored.unpaged_state(rank)
        content = encode({key: value for key, value in unpaged_state.items() if key not in _IN_STATE_DICT})
        write_durably(partial / f"rank{rank}.pt", content)
        files[f"rank{rank}.pt"] = StoredFile(len(content), sha256(content).hexdigest())
    write_durably(partial / FILE_NAME, replace(stored.manifest, state_format="dcp", files=files).to_json())
    sync(partial)
