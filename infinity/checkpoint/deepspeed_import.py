"""Converts a DeepSpeed checkpoint to one of infinity's, in PyTorch's format. One process, no ranks.

Masters, moments and steps are imported unchanged. So are counters, loss scale, schedule and the user's state if they
are plain data; the result lists what is left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.deepspeed_files import (
    MASTER,
    MOMENTS,
    DeepSpeedCheckpoint,
    as_expected,
    count_of,
    number_of,
    open_deepspeed,
)
from infinity.checkpoint.foreign_pickle import Inert, PickledTensor
from infinity.checkpoint.manifest import LATEST, Manifest
from infinity.checkpoint.piecewise import Progress, UnreadState, new_folder
from infinity.checkpoint.training_state import encode
from infinity.config.rules import names_of
from infinity.errors import CheckpointError, printable
from infinity.store.files import sync, write_durably

_ADAMS = {"adam", "adamw"}
_OF_DEEPSPEED = names_of("""
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size mp_world_size
    checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info num_experts
""")
"""Keys of model states that are DeepSpeed's; all others are the user's own."""


@dataclass(frozen=True)
class Imported:
    """The result of an import, or of a dry run. left_out: descriptions of what is not in it."""

    source: DeepSpeedCheckpoint
    path: Path
    numel: int
    nbytes: int
    training_state: Mapping[str, Any]
    left_out: tuple[str, ...]


def import_deepspeed(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dry: bool = False,
    progress: Callable[[int], Progress] = lambda total: lambda nbytes: None,
) -> Imported:
    """Write a DeepSpeed checkpoint (the latest in `directory`, if `tag` is None) to the new or empty folder `output`,
    as `Engine.save_checkpoint` would. dry: read all but tensors, and write nothing. progress: as for `consolidate`.

    Raises CheckpointError if the checkpoint is damaged, incomplete or not supported, or `output` can't be written or
    lacks the space; no files are then left.
    """
    source, final = open_deepspeed(directory, tag), Path(output)
    with as_expected(source.path):
        kind = source.optimizer_config.get("type", "Adam")
        if not isinstance(kind, str):
            raise ValueError("its optimizer has no name")
        if kind.lower() not in _ADAMS:
            raise CheckpointError(
                f"{source.path} is of the optimizer {printable(kind)}, but only Adam and AdamW can be imported: "
                "start a new training"
            )
        state = _state_of(source)
        training_state, left_out = _training_state_of(source)
        numel = sum(math.prod(parameter.shape) for parameter in source.parameters)
        path = final / source.path.resolve().name
        imported = Imported(source, path, numel, state.nbytes, training_state, left_out)
        if not dry:
            with new_folder(final, state.nbytes) as folder:
                _write(imported, folder, state, progress(state.nbytes))
    return imported


def _write(imported: Imported, folder: Path, state: UnreadState, tell: Progress) -> None:
    path, source = folder / imported.path.name, imported.source
    path.mkdir(mode=0o700)
    manifest = Manifest(
        saved=datetime.now(timezone.utc).isoformat(),
        global_steps=imported.training_state["global_steps"],
        ranks=1,
        files={},
        aliases=dict(source.aliases),
        buffers=list(source.buffers),
        tag=path.name,
        scalars=sorted(parameter.name for parameter in source.parameters if not parameter.shape),
    )
    state.write(path, [dict(imported.training_state)], manifest, tell)
    sync(path)
    write_durably(folder / LATEST, path.name.encode())


def _state_of(source: DeepSpeedCheckpoint) -> UnreadState:
    state = UnreadState({name: buffer.whole() for name, buffer in source.buffers.items()})
    for parameter in source.parameters:
        state.add(parameter.name, parameter.shape or (1,), partial(parameter.read, MASTER))  # as scalars are stored
        if parameter.steps is not None:
            moments = {moment: partial(parameter.read, moment) for moment in MOMENTS}
            state.add_moments(parameter.name, torch.tensor(float(parameter.steps)), moments)
    for alias, name in source.aliases.items():
        state.tie(alias, name)
    for number, group in enumerate(source.groups):
        names = [parameter.name for parameter in source.parameters if parameter.group == number]
        state.groups.append({**_settings(source, group), "params": names})
    return state


def _settings(source: DeepSpeedCheckpoint, group: Mapping[str, Any]) -> dict[str, Any]:
    told = source.optimizer_config.get("params") or {}
    lr, decoupled = number_of(group["lr"], 0.0), group.get("decoupled_weight_decay")
    if decoupled is None:  # not stored by DeepSpeed's own Adams; its engine derives it so from the config
        named = str(source.optimizer_config.get("type", "AdamW"))
        decoupled = named.lower() == "adamw" or bool(told.get("adam_w_mode", True))
    first_beta, second_beta = group["betas"]
    return {
        "lr": lr,
        "betas": (number_of(first_beta, 0.0, 1.0), number_of(second_beta, 0.0, 1.0)),
        "eps": number_of(group["eps"], 0.0),
        "weight_decay": number_of(group["weight_decay"], 0.0),
        "amsgrad": False,
        "maximize": bool(group.get("maximize", False)),
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": bool(decoupled),
        "initial_lr": number_of(group.get("initial_lr", told.get("lr", lr)), 0.0),
    }


def _training_state_of(source: DeepSpeedCheckpoint) -> tuple[dict[str, Any], tuple[str, ...]]:
    told, left_out = source.model_state, ["random numbers: DeepSpeed stores none"]
    client_state = {}
    for key in [key for key in told if key not in _OF_DEEPSPEED]:
        try:
            client_state[key] = _plain(told[key])
            encode({"value": client_state[key]})
        except (CheckpointError, TypeError) as error:
            client_state.pop(key, None)
            why = str(error).split(": ")[0]
            left_out.append(printable(f"client_state[{key!r}]: it is not plain data ({why})"))
    try:
        schedule = _schedule(told.get("lr_scheduler"), source)
    except TypeError as error:
        schedule = None
        left_out.append(printable(f"the learning-rate schedule's state: it is not plain data ({error})"))
    left_out += [
        f"{key}, which has no counterpart" for key in ("data_sampler", "random_ltd") if told.get(key) is not None
    ]
    state = {
        "global_steps": count_of(told["global_steps"]),
        "skipped_steps": count_of(told.get("skipped_steps", 0)),
        "loss_scale": _loss_scale(source.loss_scaler),
        "lr_scheduler": schedule,
        "client_state": client_state,
    }
    return state, tuple(left_out)


def _schedule(stored: Any, source: DeepSpeedCheckpoint) -> Any:
    """Return a schedule's state. torch's own schedules keep theirs. DeepSpeed's store the current iteration, counted
    from 0 from the second step on: [Note: which step has which learning rate]. The formula is in the config."""
    if not isinstance(stored, dict) or stored.keys() != {"last_batch_iteration"}:
        plain = _plain(stored)
        for key in ("last_epoch", "_step_count") if isinstance(plain, dict) else ():
            count_of(plain.get(key, 0), -1)
        return plain
    steps = count_of(stored["last_batch_iteration"], -1) + 1
    rates = [number_of(group["lr"], 0.0) for group in source.groups]
    return {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}


def _loss_scale(scaler: Mapping[str, Any]) -> dict[str, Any]:
    if "cur_iter" not in scaler:
        return {"scale": number_of(scaler.get("cur_scale", 1.0), 0.0)}
    return {
        "scale": number_of(scaler["cur_scale"], 0.0),
        "step": count_of(scaler["cur_iter"]),
        "last_overflow": count_of(scaler["last_overflow_iter"], -1),
        "hysteresis": count_of(scaler.get("cur_hysteresis", 1)),
    }


def _plain(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return the value with its tensors in memory. Raises TypeError for an object, or what contains itself."""
    if id(value) in within:
        raise TypeError("it contains itself")
    within = (*within, id(value))
    if isinstance(value, Inert) or (isinstance(value, type) and issubclass(value, Inert)):
        raise TypeError(value.of)
    if isinstance(value, PickledTensor):
        return value.whole()
    if isinstance(value, dict):
        return {_plain(key): _plain(entry, within) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = type(value)
        return kind(_plain(entry, within) for entry in value)
    return value
