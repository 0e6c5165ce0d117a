"""Loads weights from safetensors into the shards of a model, and yields its whole tensors one by one.

At most one tensor, or one rank's shard of it, is in memory at a time; paged values go to the arena at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import CheckpointError, InfinityError, parsing
from infinity.fsdp2.adapters import is_copy, names_in_files
from infinity.fsdp2.experts import parts_in_files, place_in_stack, with_parts
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.placements import as_sharded, has_whole_rows, place_in_whole, ranks_alike
from infinity.fsdp2.scalars import scalar_names
from infinity.fsdp2.sharding import local_of
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.store.foreign import CODES, FOREIGN_DTYPES, Stack, StoredParameter, StoredTensor, read_header
from infinity.store.formats import parameters_in
from infinity.store.formats.gptq import GptqColumns
from infinity.store.stored_parameter import read_rows, stored_parameter
from infinity.units import PAGE_BYTES

log = logging.getLogger("infinity")

_T = TypeVar("_T")

_IGNORED = "_keys_to_ignore_on_load_unexpected"
"""The attribute in which transformers' models list unused tensors of published files, such as layers for speculative
decoding."""

_MOVED = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
"""Endings of buffers' names, and a pattern for the names of such buffers elsewhere in old files. transformers ignores
these too if a model has such a buffer: `_adjust_missing_and_unexpected_keys` in its modeling_utils.py."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def fits(parameter: torch.Tensor, full: torch.Tensor) -> bool:
    """Return True if a whole tensor has the shape of a parameter, or one element, as that: [Note: A row for what has none]
    in scalars.py."""
    return full.shape == parameter.shape or full.numel() == parameter.numel() == 1


@torch.no_grad()
def load_full(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Set this rank's shard of a parameter, or of a tensor sharded like one, from the whole tensor.

    Raises InfinityError if that has another shape.
    """
    if not fits(parameter, full):
        raise InfinityError(
            f"a tensor of shape {tuple(full.shape)} is no value of a parameter of shape {tuple(parameter.shape)}: pass one of "
            "its shape"
        )
    local_of(parameter.data).copy_(full.reshape(parameter.shape)[place_in_whole(parameter.data)])


def stored_names(path: str | os.PathLike[str]) -> frozenset[str]:
    """Return the names of parameters and buffers in safetensors (a file or a folder). Raises as `stored_parameters`."""
    return frozenset(stored_parameters(path))


def stored_parameters(path: str | os.PathLike[str]) -> dict[str, StoredParameter]:
    """Return the contents of safetensors (as for `load_weights`) by parameter name. Raises CheckpointError if a file is
    damaged, ConfigError if its format is not supported or a package that decodes it is missing."""
    place = Path(path)
    return parameters_in(_by_name(place, read_header), place if place.is_dir() else place.parent)


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a hash of safetensors: the name, shape and place of each tensor, and a page of its values."""
    seen = hashlib.blake2b()
    with ExitStack() as stack:
        where = _by_name(Path(path), read_header)
        files = {file: stack.enter_context(file.open("rb")) for file in sorted({t.path for t in where.values()})}
        for name, tensor in sorted(where.items()):
            page = min(tensor.nbytes, PAGE_BYTES)
            values = os.pread(files[tensor.path].fileno(), page, tensor.offset + (tensor.nbytes - page) // 2)
            seen.update(repr((name, tensor.path.name, tensor.dtype, tensor.shape, tensor.offset)).encode() + values)
    return seen.hexdigest()


def frozen_in_files(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, StoredParameter]:
    """Return the frozen parameters that can stay in safetensors (as for `load_weights`): place by first name. Raises as
    `stored_parameters`."""
    where = stored_parameters(path)
    resting: dict[str, StoredParameter] = {}
    found_as = names_in_files(model, where)
    for parameter, names in parameter_names(model).items():
        if parameter.requires_grad or not parameter.numel() or is_copy(names[0]) or not has_whole_rows(parameter):
            continue
        stored = _stored(found_as(names), where)
        if stored is None or (isinstance(stored, StoredTensor) and stored.dtype not in FOREIGN_DTYPES):
            continue
        if stored.shape == tuple(parameter.shape) != ():
            resting[names[0]] = stored
    return resting


def _stored(names: Sequence[str], where: Mapping[str, StoredParameter]) -> StoredParameter | None:
    """Return the stored form of a parameter with these names; None if the files lack it."""
    stored = stored_parameter(names, [parts for name in names for parts in parts_in_files(name)], where)
    if stored is not None:
        return stored
    for name in names:
        stack, number = place_in_stack(name) or ("", 0)
        if isinstance(of_all := where.get(stack), Stack) and number < of_all.shape[0]:
            return of_all.row(number)
    return None


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, but: Collection[str] = ()) -> None:
    """Set all parameters and buffers from safetensors: a file, or a folder with `model.safetensors` or its index.

    `but`: first names of parameters to skip, because they stay in these files or do not come from them. Each rank reads
    only its own rows. Tied tensors need one of their names; non-persistent buffers may be missing. Raises
    CheckpointError naming tensors that are missing, unknown or of another shape, or a damaged file.
    """
    with ExitStack() as stack, torch.no_grad():
        where = open_tensors(Path(path), stack)
        required: dict[torch.Tensor, tuple[str, ...]] = {}
        required |= dict(parameter_names(model).items())
        required |= buffer_names(model, persistent=True)
        names_of = {**required, **buffer_names(model, persistent=False)}
        parameters = stored_parameters(path)
        found_as = names_in_files(model, parameters)
        in_files = {tensor: found_as(names) for tensor, names in names_of.items()}
        stored_as = {
            tensor: stored for tensor, names in in_files.items() if (stored := _stored(names, parameters)) is not None
        }
        known = {name for names in in_files.values() for name in with_parts(names)}
        missing = sorted({names[0] for tensor, names in required.items() if tensor not in stored_as} - {*but})
        ignored = [pattern for m in model.modules() for pattern in getattr(m, _IGNORED, None) or ()]
        ignored += [p for end, p in _MOVED.items() if any(name.endswith(end) for n in names_of.values() for name in n)]
        unexpected = sorted(
            name
            for name in set(parameters) - known
            if not any(re.search(pattern, name) for pattern in ignored)
            and not (_is_bias_of_gptq(name, parameters) and not where[name].get_tensor(name).any())
        )
        if missing or unexpected:
            raise CheckpointError(
                f"{path} does not match the model: "
                + "; ".join(filter(None, [_list("missing", missing), _list("unknown", unexpected)]))
            )
        scalars = scalar_names(model)
        for tensor, stored in stored_as.items():
            name = names_of[tensor][0]
            expected = () if name in scalars else tuple(tensor.shape)
            if stored.shape != expected:
                raise CheckpointError(f"{path}: {name} has shape {stored.shape}, the model expects {expected}")
            if isinstance(stored, StoredTensor) and stored.dtype in CODES and tensor.is_floating_point():
                raise CheckpointError(
                    f"{path}: {name} is in {stored.dtype}, but the file has no information to decode it"
                )
        for tensor, stored in stored_as.items():
            if names_of[tensor][0] in but:
                continue
            local, place = local_of(tensor.data), place_in_whole(tensor.data)
            name = next((name for name in with_parts(in_files[tensor]) if parameters.get(name) is stored), "")
            if not name or not isinstance(stored, StoredTensor):
                rows = torch.empty(local.shape[:1] + tensor.shape[1:])
                read_rows(stored, place[0].start if place else 0, rows)
                local.copy_(rows[(slice(None), *place[1:])[: rows.dim()]])
                continue
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(where[name].get_tensor(name))
            elif names_of[tensor][0] in scalars:
                load_full(tensor, where[name].get_tensor(name))
            elif local.numel():
                local.copy_(where[name].get_slice(name)[place])


def _is_bias_of_gptq(name: str, parameters: Mapping[str, StoredParameter]) -> bool:
    """Whether this is the bias of a matrix of GPTQ. AutoGPTQ writes one of zeros for layers that have none."""
    return name.endswith(".bias") and isinstance(parameters.get(f"{name.removesuffix('bias')}weight"), GptqColumns)


def open_tensors(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor, by name."""

    def opened(file: Path) -> dict[str, Any]:
        with parsing(f"{file} is damaged or not safetensors", "fetch or save it again"):
            tensors = stack.enter_context(safe_open(file, framework="pt"))
        return dict.fromkeys(tensors.keys(), tensors)

    return _by_name(path, opened)


def _by_name(path: Path, tensors_in: Callable[[Path], Mapping[str, _T]]) -> dict[str, _T]:
    """Return the result of `tensors_in` for each tensor in safetensors: a file, an index, or a folder with either.

    With an index, only the tensors that it names are returned, each from the file that it names. In a folder with a
    single file and an index the single file is used, as in transformers' `from_pretrained`. Raises CheckpointError.
    """
    single, index = path / SINGLE, path / INDEX if path.is_dir() else path
    if path.is_file() and path.suffix != ".json":
        return dict(tensors_in(path))
    if single.is_file():
        if index.is_file():
            _say_single_counts(path)
        return dict(tensors_in(single))
    if not index.is_file():
        raise CheckpointError(f"{path} has neither model.safetensors nor model.safetensors.index.json")
    with parsing(f"{index} is damaged or not an index of safetensors", "fetch or save it again"):
        file_of: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        if not all(name == Path(name).name != ".." for name in file_of.values()):
            raise ValueError("it names a file of another folder")
    files = {name: tensors_in(index.parent / name) for name in sorted({*file_of.values()})}
    for name, file in file_of.items():
        if name not in files[file]:
            raise CheckpointError(f"{index.parent / file} lacks {name}, which {index.name} lists: fetch both again")
    return {name: files[file][name] for name, file in file_of.items()}


@functools.cache
def _say_single_counts(folder: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning("%s has both %s and %s: using the former, as from_pretrained does", folder, SINGLE, INDEX)


def _list(heading: str, names: list[str]) -> str:
    return f"{heading} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" if names else ""


def named_full_tensors(
    model: nn.Module, dtype: torch.dtype | None, *, device: torch.device | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor on the CPU or on `device`) for each parameter; a collective if sharded over several ranks.

    Includes frozen parameters; tied ones come once, under their first name. `dtype` None keeps the masters' fp32.
    """
    scalars = scalar_names(model)
    for parameter, names in parameter_names(model).items():
        whole = full_tensor(parameter.data, dtype or parameter.dtype).to(device or "cpu")
        yield names[0], whole.reshape(()) if names[0] in scalars else whole


def full_tensor(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter's whole data as a new ordinary tensor; a collective if it is sharded over several ranks."""
    if not isinstance(data, DTensor):
        return data.to(dtype).clone()
    if not data.numel():  # FSDP2's shard has no rows then, and torch can't gather it
        return torch.empty(data.shape, dtype=dtype, device=data.device)
    # reads the arena: a rank that fails must not leave the others waiting in the gather
    with raise_on_all_ranks(ranks_alike(data.device_mesh)):
        local = data._local_tensor.to(dtype).clone()
    return gathered(local, data)


def gathered(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which this rank has the rows `local`, sharded as `like`. A collective."""
    if not isinstance(like, DTensor) or not like.numel():
        return local.reshape(like.shape)
    return as_sharded(local, like).full_tensor()
