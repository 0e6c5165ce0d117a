"""Converts an arena checkpoint to what `save_checkpoint` writes in the format "dcp", for other tools. One process, no
ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from infinity.checkpoint.checks import damaged
from infinity.checkpoint.manifest import find_checkpoint
from infinity.checkpoint.piecewise import Progress, UnreadState, new_folder
from infinity.checkpoint.stored_arena import StoredArena, is_arena_checkpoint, record_name
from infinity.errors import CheckpointError
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
    """Write the arena checkpoint in a folder (the latest, if `tag` is None) to the new or empty folder `output`.
    Returns that. progress: as for `consolidate`.

    Raises CheckpointError if the checkpoint is damaged or of another format, or `output` can't be written or lacks the
    space; no files are then left.
    """
    path = find_checkpoint(directory, tag)
    if not is_arena_checkpoint(path):
        raise CheckpointError(f"{path} is in PyTorch's format already: use it as it is")
    with StoredArena(path) as stored:
        state = _state_of(stored)
        training_states = (
            {key: value for key, value in stored.unpaged_state(rank).items() if key not in _IN_STATE_DICT}
            for rank in range(stored.manifest.ranks)
        )
        with new_folder(Path(output), state.nbytes) as folder:
            state.write(folder, training_states, stored.manifest, progress(state.nbytes))
    return Path(output)


def _state_of(stored: StoredArena) -> UnreadState:
    unpaged_state = stored.unpaged_state(0)
    steps = unpaged_state["steps"]
    state = UnreadState(unpaged_state["buffers"])
    for param in stored.layout.parameters:
        read = partial(stored.read_verified, param.name)
        state.add(param.name, param.shape, partial(read, Field.MASTER))
        if param.trained and (param.name in steps or not steps):  # SGD counts none
            fields = stored.layout.moments_of(whole=param.whole).items()
            state.add_moments(param.name, steps.get(param.name), {name: partial(read, field) for name, field in fields})
    for alias, name in stored.manifest.aliases.items():
        if name in state.model:
            state.tie(alias, name)
    names_of_groups = _group_names(stored, unpaged_state)
    for group, names in zip(unpaged_state["param_groups"], names_of_groups, strict=True):
        state.groups.append({**group, "params": names})
    return state


def _group_names(stored: StoredArena, unpaged_state: dict[str, Any]) -> list[list[str]]:
    groups, names = unpaged_state["param_groups"], unpaged_state["group_names"]
    in_model = [param.name for param in stored.layout.parameters]
    if not (
        isinstance(names, list)
        and len(names) == len(groups)
        and all(isinstance(group, list) and all(name in in_model for name in group) for group in names)
    ):
        raise damaged(stored.path / record_name(0), "the parameters of its optimizer's groups are not the model's")
    return names
