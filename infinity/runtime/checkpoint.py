"""Floor 5. Checkpoints in PyTorch's own format (torch.distributed.checkpoint), and 16-bit models as safetensors.

A checkpoint is `DIR/TAG/`: the masters and moments under the names that FSDP2 + AdamW uses, written tensor by tensor, and a
small file per rank with the rest. It is written under another name and renamed when it is whole; `DIR/latest` names it last.
DCP reshards on load, so another number of ranks is fine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from infinity.errors import CheckpointError
from infinity.runtime.materialize import named_full_tensors
from infinity.swap import PagedAdam
from infinity.swap.names import buffer_names, parameter_names
from infinity.units import GIB

_LATEST = "latest"
SAFETENSORS_BYTES_MAX = 2 * GIB
"""Bytes per file of a 16-bit model: also what saving holds in memory at once."""


def save(
    directory: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rest: dict[str, Any],
) -> None:
    """Write a checkpoint. `rest` (plain values and tensors only) is this rank's own. A collective.

    Raises CheckpointError when `rest` can't be stored or the folder can't be written.
    """
    blob = _encode(rest)
    root = Path(directory)
    final, partial = root / tag, root / f".{tag}.partial"
    problem = ""
    if dist.get_rank() == 0:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            problem = f"can't write a checkpoint to {root}: {error.strerror}"
    _agree(problem)
    try:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        # A file per tensor: the writer holds all tensors of a file until it is complete.
        writer = dcp.FileSystemWriter(partial, single_file_per_rank=False, thread_count=1, overwrite=True)
        dcp.save(state, storage_writer=writer)
        (partial / f"rank{dist.get_rank()}.pt").write_bytes(blob)
    except OSError as error:
        problem = f"writing the checkpoint {final} failed: {error}"
    except dcp.CheckpointException as error:
        for inner, _ in error.failures.values():
            if isinstance(inner, (KeyboardInterrupt, SystemExit)):  # DCP catches these too
                shutil.rmtree(partial, ignore_errors=True)
                raise inner from None
        problem = f"writing the checkpoint {final} failed: {next(iter(error.failures.values()))[0]}"
    _agree(problem, cleanup=partial)
    if dist.get_rank() == 0:
        old = root / f".{tag}.old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)  # whatever happens from here on, a whole checkpoint stands under one of the names
        partial.rename(final)
        note = root / f".{_LATEST}.partial"
        note.write_text(tag)
        note.rename(root / _LATEST)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(
    directory: str | os.PathLike[str], tag: str | None, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint into the model and the optimizer, whose state must exist. A collective.

    Returns its folder and what this rank stored beside it (rank 0's, less "rng", where the number of ranks has grown).
    Raises CheckpointError when there is none, or it is of another model (naming the tensors).
    """
    root = Path(directory)
    if tag is None:
        if not (root / _LATEST).is_file():
            raise CheckpointError(
                f"{root} holds no checkpoint: there is no file named {_LATEST!r}; pass tag=... or another folder"
            )
        tag = (root / _LATEST).read_text().strip()
    path = root / tag
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is not a checkpoint (no .metadata in it)")
    _reshard(model)  # what is gathered now would be stale
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    _check_fits(path, state)
    with optimizer.loading() if isinstance(optimizer, PagedAdam) else contextlib.nullcontext():
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    for group, saved in zip(optimizer.param_groups, _saved_groups(state, model, optimizer), strict=True):
        group.update(saved)
    _restore_steps(state, model, optimizer)
    own = path / f"rank{dist.get_rank()}.pt"
    rest = _decode(own if own.is_file() else path / "rank0.pt")
    if not own.is_file():
        rest.pop("rng", None)
    return path, rest


def save_16bit(directory: str | os.PathLike[str], model: nn.Module, dtype: torch.dtype) -> None:
    """Write the whole model as safetensors, in files of at most SAFETENSORS_BYTES_MAX with an index. A collective."""
    root = Path(directory)
    writer = dist.get_rank() == 0
    _reshard(model)
    if writer:
        root.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    total = part_bytes = 0

    def flush() -> None:
        save_file(part, root / f".part{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(part))
        part.clear()

    for name, tensor in named_full_tensors(model, dtype):
        if not writer:
            continue
        nbytes = tensor.numel() * tensor.itemsize
        if part and part_bytes + nbytes > SAFETENSORS_BYTES_MAX:
            flush()
            part_bytes = 0
        part[name] = tensor.contiguous()
        part_bytes += nbytes
        total += nbytes
    if writer:
        for buffer, names in buffer_names(model, persistent=True).items():
            part[names[0]] = buffer.detach().cpu().contiguous()
        flush()
        _name_files(root, files, total)
    dist.barrier()


def _name_files(root: Path, files: list[list[str]], total: int) -> None:
    for stale in [*root.glob("model*.safetensors"), *root.glob("model.safetensors.index.json")]:
        stale.unlink()
    if len(files) == 1:
        (root / ".part0.safetensors").rename(root / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (root / f".part{number}.safetensors").rename(root / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _reshard(model: nn.Module) -> None:
    """Free whatever is gathered, so that the model's parameters are the sharded masters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check_fits(path: Path, state: dict[str, Any]) -> None:
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = _flatten(state)
    stored = {key: tuple(m.size) for key, m in saved.items() if isinstance(m, TensorStorageMetadata)}
    ours = {key: tuple(v.shape) for key, v in wanted.items() if isinstance(v, torch.Tensor)}
    missing = sorted(set(ours) - set(stored))
    extra = sorted(set(stored) - set(ours))
    reshaped = [
        f"{k} is {stored[k]} there and {ours[k]} here" for k in sorted(set(ours) & set(stored)) if ours[k] != stored[k]
    ]
    if missing or extra or reshaped:
        parts = []
        for what, names in (("missing there", missing), ("unknown here", extra), ("of another shape", reshaped)):
            if names:
                parts.append(f"{len(names)} tensors {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
        raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(parts)}")


def _flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat.update(_flatten(value, name))
        else:
            flat[name] = value
    return flat


def _saved_groups(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The loaded hyper-parameters, in the order of the optimizer's groups (DCP keeps them by parameter name)."""
    names = parameter_names(model)
    by_name = {name: group for group in state["optimizer"]["param_groups"] for name in group["params"]}
    found = []
    for group in optimizer.param_groups:
        saved = by_name[names[group["params"][0]][0]]
        found.append({key: value for key, value in saved.items() if key != "params"})
    return found


def _restore_steps(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Moments are loaded in place; the step counts are small tensors of their own."""
    for parameter, names in parameter_names(model).items():
        if parameter in optimizer.state:
            loaded = state["optimizer"]["state"][names[0]]["step"]
            optimizer.state[parameter]["step"].copy_(torch.as_tensor(loaded))


def _encode(rest: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(rest, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"client_state can't be stored ({type(error).__name__}): it may hold numbers, strings, tensors, lists and dicts"
        ) from None
    return buffer.getvalue()


def _decode(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return loaded


def _agree(problem: str, cleanup: Path | None = None) -> None:
    """All ranks go on together or raise together."""
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next(filter(None, problems), "")
    if first:
        if cleanup is not None and dist.get_rank() == 0:
            shutil.rmtree(cleanup, ignore_errors=True)
        raise CheckpointError(first)
