"""Turns an arena checkpoint into one of torch.distributed.checkpoint, which other tools read. One process, no ranks.

The result is like a checkpoint that `save_checkpoint` writes in the format "dcp".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.dcp_storage import Writer
from infinity.checkpoint.manifest import FILE_NAME, find_checkpoint
from infinity.checkpoint.piecewise import Progress, Unread, new_folder, write_state
from infinity.checkpoint.stored_arena import StoredArena, is_arena_checkpoint
from infinity.checkpoint.training_state import encode
from infinity.errors import CheckpointError
from infinity.store.files import StoredFile, write_durably
from infinity.store.layout import Field

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


def _export(stored: StoredArena, final: Path, progress: Callable[[int], Progress]) -> Path:
    state, unread = _state_of(stored)
    total = sum(tensor.nbytes for tensor in unread.values())
    with new_folder(final, total) as folder:
        writer = Writer(folder)
        write_state(state, unread, writer, progress(total))
        _complete(stored, folder, writer.written)
    return final


def _state_of(stored: StoredArena) -> tuple[dict[str, Any], dict[str, Unread]]:
    """The state dict of FSDP2 + AdamW with meta tensors for masters and moments; and, by key, the values for these."""
    unpaged_state = stored.unpaged_state(0)
    model: dict[str, torch.Tensor] = dict(unpaged_state["buffers"])
    moments: dict[str, dict[str, torch.Tensor]] = {}
    unread = {}
    for param in stored.parameters:
        read = partial(stored.read_verified, param.name)
        unread[f"model.{param.name}"] = Unread(param.shape, partial(read, Field.MASTER))
        model[param.name] = unread[f"model.{param.name}"].in_state_dict()
        steps = unpaged_state["steps"]
        if not param.trained or (steps and param.name not in steps):  # SGD counts none
            continue
        moments[param.name] = {"step": steps[param.name]} if steps else {}
        for name, field in stored.moments_of(param).items():
            moment = Unread(param.shape, partial(read, field))
            moments[param.name][name] = moment.in_state_dict()
            unread[f"optimizer.state.{param.name}.{name}"] = moment
    for alias, name in stored.manifest.aliases.items():
        if name in model:
            model[alias] = model[name]
            if f"model.{name}" in unread:
                unread[f"model.{alias}"] = unread[f"model.{name}"]
    groups = [
        {**group, "params": names}
        for group, names in zip(unpaged_state["param_groups"], _group_names(stored, unpaged_state), strict=True)
    ]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}, unread


def _group_names(stored: StoredArena, unpaged_state: dict[str, Any]) -> list[list[str]]:
    """The parameters of each of the optimizer's groups."""
    groups, names = unpaged_state["param_groups"], unpaged_state["group_names"]
    in_model = [param.name for param in stored.parameters]
    if not (
        isinstance(names, list)
        and len(names) == len(groups)
        and all(isinstance(group, list) and all(name in in_model for name in group) for group in names)
    ):
        raise stored.rank(0).damaged("the parameters of its optimizer's groups are not the model's")
    return names


def _complete(stored: StoredArena, folder: Path, files: dict[str, StoredFile]) -> None:
    """Add the training state of each rank, and the manifest."""
    for rank in range(stored.manifest.ranks):
        unpaged_state = stored.unpaged_state(rank)
        content = encode({key: value for key, value in unpaged_state.items() if key not in _IN_STATE_DICT})
        write_durably(folder / f"rank{rank}.pt", content)
        files[f"rank{rank}.pt"] = StoredFile(len(content), sha256(content).hexdigest())
    write_durably(folder / FILE_NAME, replace(stored.manifest, state_format="dcp", files=files).to_json())
