"""Checkpoints in PyTorch's format (torch.distributed.checkpoint), and 16-bit models as safetensors.

A checkpoint is `DIR/TAG/`: masters and moments under the names that FSDP2 + AdamW uses, written tensor by tensor; a small file
per rank with the training state; and a manifest with the hash of every file, taken while it was written. The folder is renamed
when complete; then `DIR/latest` names it. DCP reshards on load, so the number of ranks may change.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from infinity.checkpoint import model_files
from infinity.checkpoint.checks import check_resumable, check_same_model, damaged, failing_as, refusing, verify
from infinity.checkpoint.commits import check_same_groups
from infinity.checkpoint.dcp_storage import Planner, Reader, Writer, cause_of
from infinity.checkpoint.draft import Draft, manifest_of
from infinity.checkpoint.manifest import others, stored_file
from infinity.checkpoint.model_files import ModelFiles
from infinity.checkpoint.training_state import RANDOM_STATES, decode, encode
from infinity.errors import CheckpointError, parsing
from infinity.fsdp2.materialize import named_full_tensors
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.scalars import scalar_names
from infinity.fsdp2.sharding import reset, reshard
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks
from infinity.store.files import open_regular, write_durably
from infinity.swap.paged_tensor import PagedTensor

_T = TypeVar("_T")

_GROUPS = "optimizer.param_groups."
"""Begins the keys of the settings of parameter groups."""
_SETTING_NUMEL_MAX = 1 << 16
"""Largest tensor that is read as such a setting: a learning rate has one element."""


def save(
    directory: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    training_state: dict[str, Any],
    *,
    keep: int = 0,
    pipe: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; of those in `directory`, `keep` stay (0: all). `pipe`: the ranks with the stages of the model.
    A collective.

    Raises CheckpointError on every rank if any rank's `training_state` can't be stored, training can't resume from the
    state, or the folder can't be written to or lacks space. An earlier checkpoint stays until the new one is read back.
    """
    draft = Draft(directory, tag)
    state = _state_of(model, optimizer)
    tensors = _with_stages(state, pipe)
    unstepped = [names for of_stage in _of_stages(training_state["unstepped"], pipe) for names in of_stage]
    training_state = training_state | {"unstepped": unstepped}
    manifests = _of_stages(manifest_of(model, training_state["global_steps"], tag, "dcp"), pipe)
    manifest = replace(
        manifests[0],
        aliases={alias: name for one in manifests for alias, name in one.aliases.items()},
        buffers=[*dict.fromkeys(name for one in manifests for name in one.buffers)],
        scalars=sorted({name for one in manifests for name in one.scalars}),
    )
    with raise_on_all_ranks():
        blob = encode(training_state)
        with refusing(draft.task):
            _check_resumable(state, optimizer)
        if dist.get_rank() == 0:
            draft.make(sum(nbytes for _, nbytes in tensors.values()))
    try:
        files = Writer(draft.folder)
        failure = _failure_of(partial(dcp.save, state, storage_writer=files))
        with raise_on_all_ranks():
            if failure is not None:
                raise CheckpointError(f"{draft.task} failed: {failure}")
            with failing_as(draft.task):
                write_durably(draft.folder / f"rank{dist.get_rank()}.pt", blob)
        written = {**files.written, f"rank{dist.get_rank()}.pt": stored_file(blob)}
        prove = partial(_check, draft.folder, tensors, everything=False)
        draft.complete_on_all_ranks(manifest, written, prove, keep)
    finally:
        draft.discard()


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    begin: Callable[[dict[str, Any]], None],
    *,
    verified: bool = True,
    pipe: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read the checkpoint in the folder `path` into the model and the optimizer, whose state must exist. A collective.

    begin: called with the training state before the first value changes; failures until then change nothing. verified:
    first read every file, each rank a part of them, and compare its hash with the manifest. Parsed files are always
    compared. pipe: as for `save`.

    Returns this rank's training state (for a rank that did not exist then, rank 0's without its random states). Raises
    CheckpointError on every rank if the checkpoint is damaged (names a file) or another model's (names tensors).
    """
    with raise_on_all_ranks():
        reset(model)  # gathered values would be stale afterwards
        state = _state_of(model, optimizer)
    tensors = _with_stages(state, pipe)
    names = parameter_names(model)
    ours = [group["params"] for group in state["optimizer"].pop("param_groups")]
    frozen = {name for of in _of_stages([n[0] for p, n in names.items() if not p.requires_grad], pipe) for name in of}
    with raise_on_all_ranks():
        training_state = _check(path, tensors, everything=verified)
    groups = _read_groups(path)
    with raise_on_all_ranks():
        theirs = [group.pop("params") for group in groups]
        trained = [[[name for name in g if name not in frozen] for g in groups_of] for groups_of in (theirs, ours)]
        order = check_same_groups(path, {"param_groups": groups, "group_names": trained[0]}, trained[1])
        for group, place in zip(optimizer.param_groups, order, strict=True):
            theirs[place] = [names[p][0] for p in group["params"]]
        training_state["group_names"] = theirs
    begin(training_state)
    for moment in (value for values in optimizer.state.values() for value in values.values()):
        if isinstance(moment, DTensor) and isinstance(moment._local_tensor, PagedTensor):
            moment._local_tensor.forget_codes()
    failure = _failure_of(partial(dcp.load, state, storage_reader=Reader(path), planner=Planner()))
    with raise_on_all_ranks():
        if failure is not None:
            raise damaged(path, failure)
    for group, place in zip(optimizer.param_groups, order, strict=True):
        group.update(groups[place])
    for parameter, all_names in names.items():
        if "step" in optimizer.state.get(parameter, {}):  # moments were loaded in place
            steps = state["optimizer"]["state"][all_names[0]]["step"]
            optimizer.state[parameter]["step"].copy_(torch.as_tensor(steps))
    return training_state


def save_16bit(
    directory: str | os.PathLike[str], model: nn.Module, dtype: torch.dtype, pipe: dist.ProcessGroup | None = None
) -> None:
    """Write the whole model as safetensors, in files of at most SAFETENSORS_BYTES_MAX with an index. A collective. An
    older model there stays until this one is complete; foreign files are not removed. `pipe`: as for `save`."""
    root = Path(directory)
    reshard(model)
    scalars = scalar_names(model)
    buffers = {names[0]: buffer.detach() for buffer, names in buffer_names(model, persistent=True).items()}
    tensors = {
        names[0]: (dtype, () if names[0] in scalars else tuple(p.shape)) for p, names in parameter_names(model).items()
    } | {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
    of_stages = _of_stages(tensors, pipe)
    tensors = {name: described for of_stage in of_stages for name, described in of_stage.items()}
    here = itertools.chain(named_full_tensors(model, dtype), ((name, buffer.cpu()) for name, buffer in buffers.items()))
    task = f"writing the model to {root}"
    files: ModelFiles | None = None
    failure: Exception | None = None
    with contextlib.ExitStack() as closing:
        with raise_on_all_ranks(), failing_as(task):
            if dist.get_rank() == 0:
                files = ModelFiles(root, tensors, bytes_max=model_files.SAFETENSORS_BYTES_MAX)
                closing.callback(files.close)
        for name, tensor in here if pipe is None else _from_stages(here, of_stages, pipe):
            if files is not None and failure is None:  # after a failure the others still need this rank to gather
                try:
                    files.add(name, [tensor])
                except OSError as error:
                    failure = error
        with raise_on_all_ranks(), failing_as(task):
            if failure is not None:
                raise failure
            if files is not None:
                files.finish()


def _from_stages(
    here: Iterator[tuple[str, torch.Tensor]],
    of_stages: Sequence[Mapping[str, tuple[torch.dtype, tuple[int, ...]]]],
    pipe: dist.ProcessGroup,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all stages, on the CPU; those of this stage are `here`. A collective."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    for number, described in enumerate(of_stages):
        for name, (dtype, shape) in described.items():
            tensor = torch.empty(shape, dtype=dtype)
            with raise_on_all_ranks():
                if number == dist.get_rank(pipe):
                    _, tensor = next(here)
            if any(name in earlier for earlier in of_stages[:number]):  # a copy
                continue
            sent = tensor.to(device).contiguous()
            dist.broadcast(sent.view(-1).view(torch.uint8), group=pipe, group_src=number)
            yield name, sent.cpu()


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _of_stages(here: _T, pipe: dist.ProcessGroup | None) -> list[_T]:
    """Return the values of all stages. A collective of `pipe`; None if the model is whole."""
    return [here] if pipe is None else from_all_ranks(here, pipe)


def _with_stages(state: dict[str, Any], pipe: dist.ProcessGroup | None) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return shape and bytes of all stages' tensors by key. Name all stages' parameters in the groups of `state`, which rank
    0 writes. A collective of `pipe`."""
    groups = zip(*_of_stages(state["optimizer"]["param_groups"], pipe), strict=True)
    state["optimizer"]["param_groups"] = [
        {**g[0], "params": [*dict.fromkeys(name for one in g for name in one["params"])]} for g in groups
    ]
    values = flatten_state_dict(state)[0].items()
    tensors = {k: v for k, v in values if isinstance(v, torch.Tensor) and not k.startswith(_GROUPS)}
    here = {key: (tuple(tensor.shape), tensor.numel() * tensor.itemsize) for key, tensor in tensors.items()}
    return {key: described for of_stage in _of_stages(here, pipe) for key, described in of_stage.items()}


def _failure_of(collective: Callable[[], object]) -> BaseException | str | None:
    """Run a collective of DCP, and return its failure, which other ranks may not have."""
    try:
        collective()
    except OSError as error:
        return error
    except dcp.CheckpointException as error:
        return cause_of(error)
    return None


def _check_resumable(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    keys_of = {name: values.keys() for name, values in state["optimizer"]["state"].items() if values}
    steps = {name for name, keys in keys_of.items() if "step" in keys}
    stepped = {name for group in state["optimizer"]["param_groups"] for name in group["params"]} & state["model"].keys()
    check_resumable(keys_of.keys(), steps, counts_steps=bool(steps), stepped=stepped)
    lacking = sum(bool(values) for values in optimizer.state.values()) - len(keys_of)
    if lacking:
        raise CheckpointError(f"{lacking} parameters of the optimizer are not in the model: resume from another")


def _check(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], int]], *, everything: bool) -> dict[str, Any]:
    """Raise CheckpointError unless the checkpoint is whole and has these tensors. Returns the training state as `load`
    does."""
    file = path / f"rank{dist.get_rank()}.pt"
    is_own = file.is_file()
    file = file if is_own else path / "rank0.pt"
    verify(path, {".metadata", file.name}, everything=everything)
    try:
        with open_regular(file) as opened:
            training_state = decode(opened)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no rank0.pt, so save_checkpoint did not write it: read it with torch.distributed.checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise damaged(file, error) from None
    if not {"global_steps", "lr_scheduler", "client_state"} <= training_state.keys():
        raise damaged(file, "it holds something else")
    try:
        stored = {k: tuple(t.size) for k, t in Reader(path).tensors().items() if not k.startswith(_GROUPS)}
    except CheckpointError as error:
        raise CheckpointError(f"{error}: {others(path.parent, but=path.name)}") from None
    check_same_model(path, {key: shape for key, (shape, _) in tensors.items()}, stored)
    return {key: value for key, value in training_state.items() if is_own or key not in RANDOM_STATES}


def _read_groups(path: Path) -> list[dict[str, Any]]:
    """Return the parameter groups of a checkpoint as they are stored, with names of parameters. A collective. Raises
    CheckpointError on every rank."""
    reader = Reader(path)
    values: dict[str, Any] = {}
    with raise_on_all_ranks(), parsing(f"{path} is damaged", "load another checkpoint"):
        for key, entry in reader.read_metadata().state_dict_metadata.items():
            if key.startswith(_GROUPS):
                values[key.removeprefix(_GROUPS)] = None
                if isinstance(entry, TensorStorageMetadata):
                    if entry.size.numel() > _SETTING_NUMEL_MAX:
                        raise ValueError(f"{key} has {entry.size.numel()} elements")
                    values[key.removeprefix(_GROUPS)] = torch.empty(entry.size, dtype=entry.properties.dtype)
    state = {"optimizer": {"param_groups": values}}
    failure = _failure_of(partial(dcp.load, state, storage_reader=reader, planner=Planner()))
    with raise_on_all_ranks(), parsing(f"{path} is damaged", "load another checkpoint"):
        if failure is not None:
            raise damaged(path, failure)
        groups: list[dict[str, Any]] = [{} for _ in {key.split(".")[0] for key in values}]
        for key, value in values.items():
            number, *outer, last = key.split(".")
            inner = groups[int(number)]
            for part in outer:  # a setting that is a dict
                inner = inner.setdefault(part, {})
            inner[last] = value
        for group in groups:
            group["params"] = [str(name) for name in group["params"]]
    return groups
