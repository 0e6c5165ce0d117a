"""Floor 5. Giving values to a model that was built without memory: module by module, or from safetensors files.

Nothing larger than the parameters of one module (or one rank's shard of one tensor) is ever held; what goes to the arena goes
there at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import CheckpointError, ConfigError
from infinity.runtime.scalars import scalar_names
from infinity.swap.names import buffer_names, clean_name, parameter_names, parameters_by_name
from infinity.swap.together import together

InitFn = Callable[[nn.Module], Any]


def init_empty() -> torch.device:
    """A context in which modules are built on the meta device: shapes without memory.

    Use it as `with infinity.init_empty(): model = Model()`; `infinity.initialize` then gives the values.
    """
    return torch.device("meta")


def meta_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that have no values yet (all names of a tied one)."""
    return {name for name, p in parameters_by_name(model).items() if p.is_meta}


def check_initializable(model: nn.Module, init_fn: InitFn | None, stored: frozenset[str] | None) -> None:
    """Raise ConfigError, naming them, when modules on the meta device have no way to get values.

    `stored`: what a file gives values to, all parameters among it; None where there is no file.
    """
    if init_fn is not None or callable(getattr(model, "_init_weights", None)):
        return
    lost = [
        name or "the root module"
        for name, module in model.named_modules()
        if (
            (stored is None and any(p.is_meta for p in module.parameters(recurse=False)))
            or any(b.is_meta and _named(name, own) not in (stored or ()) for own, b in _own_buffers(module))
        )
        and not hasattr(module, "reset_parameters")
    ]
    if lost:
        raise ConfigError(
            f"built on the meta device without a reset_parameters() method: {', '.join(lost[:5])}"
            f"{' and more' if len(lost) > 5 else ''}; pass init_fn=... (called with each module) or weights=... to initialize"
        )


def initialize_values(
    model: nn.Module,
    pending: set[str],
    device: torch.device,
    init_fn: InitFn | None,
    stored: frozenset[str] = frozenset(),
) -> None:
    """Give values to the parameters in `pending` and to meta buffers, in module order, with the module's own method.

    Every rank draws the same numbers (given the same seed) and keeps its shard. Buffers in `stored` get memory only: a file
    gives them values afterwards.
    """
    init = init_fn or getattr(model, "_init_weights", None) or (lambda module: module.reset_parameters())
    done: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        owned = {name: p for name, p in module._parameters.items() if p is not None}
        fresh = {name: p for name, p in owned.items() if _named(prefix, name) in pending and p not in done}
        blank = {name: b for name, b in _own_buffers(module) if b.is_meta}
        for name, buffer in blank.items():
            module._buffers[name] = _unset(buffer, device)
        blank = {name: b for name, b in blank.items() if _named(prefix, name) not in stored}
        if not fresh and not blank:
            continue
        with torch.no_grad():
            for name, p in owned.items():
                module._parameters[name] = nn.Parameter(torch.empty(p.shape), requires_grad=p.requires_grad)
        try:
            init(module)
            for name, p in fresh.items():
                value = module._parameters[name]
                assert value is not None
                load_full(p, value)
            lost = [_named(prefix, name) for name in blank if _is_unset(module._buffers[name])]
            if lost:
                raise ConfigError(
                    f"buffers built on the meta device that nothing gave values to: {', '.join(lost)}; set them in the "
                    "module's reset_parameters() or in init_fn=..., or build them on the CPU"
                )
        finally:
            module._parameters.update(owned)
        done.update(fresh.values())


@torch.no_grad()
def load_full(parameter: nn.Parameter, full: torch.Tensor) -> None:
    """Set a sharded parameter from the whole tensor: this rank keeps its rows."""
    local, start = _local_rows(parameter)
    local.copy_(full.reshape(parameter.shape)[start : start + local.shape[0]])


def stored_names(path: str | os.PathLike[str]) -> frozenset[str]:
    """The tensors in safetensors (a file or a folder). Raises CheckpointError as `load_weights` does."""
    with ExitStack() as stack:
        return frozenset(_opened(Path(path), stack))


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Set all parameters and buffers from safetensors: a file, or a folder with `model.safetensors` or its index.

    Each rank reads only its own rows. Names that tied tensors share need to be there once, those of buffers that are not
    persistent need not. Raises CheckpointError, naming the tensors, when some are missing, too many, or of another shape, and
    naming the file when it is damaged.
    """
    with ExitStack() as stack, torch.no_grad():
        where = _opened(Path(path), stack)
        wanted: dict[torch.Tensor, tuple[str, ...]] = {}
        wanted |= dict(parameter_names(model).items())
        wanted |= buffer_names(model, persistent=True)
        optional = buffer_names(model, persistent=False)
        known = {name for names in (*wanted.values(), *optional.values()) for name in names}
        missing = [names[0] for names in wanted.values() if not any(name in where for name in names)]
        unexpected = sorted(set(where) - known)
        if missing or unexpected:
            raise CheckpointError(
                f"{path} doesn't fit the model: "
                + "; ".join(filter(None, [_list("missing", missing), _list("unknown", unexpected)]))
            )
        chosen = {
            tensor: next(name for name in names if name in where)
            for tensor, names in {**wanted, **optional}.items()
            if any(name in where for name in names)
        }
        scalars = scalar_names(model)
        for tensor, name in chosen.items():
            shape = tuple(where[name].get_slice(name).get_shape())
            wanted_shape = () if name in scalars else tuple(tensor.shape)
            if shape != wanted_shape:
                raise CheckpointError(f"{path}: {name} has shape {shape}, the model wants {wanted_shape}")
        for tensor, name in chosen.items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(where[name].get_tensor(name))
                continue
            if name in scalars:
                load_full(tensor, where[name].get_tensor(name))
                continue
            local, start = _local_rows(tensor)
            if local.numel():
                local.copy_(where[name].get_slice(name)[start : start + local.shape[0]])


def _opened(path: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor."""
    where: dict[str, Any] = {}
    for file in _files(path):
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is damaged or not safetensors ({error}): fetch or save it again") from None
        where.update(dict.fromkeys(opened.keys(), opened))
    return where


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def _unset(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a buffer, filled with a value that no initialisation leaves everywhere."""
    made = torch.empty_like(buffer, device=device)
    if made.is_floating_point() or made.is_complex():
        return made.fill_(math.nan)
    return made.zero_() if made.dtype is torch.bool else made.fill_(torch.iinfo(made.dtype).min)


def _is_unset(buffer: torch.Tensor | None) -> bool:
    if buffer is None or buffer.numel() == 0 or buffer.dtype in (torch.bool, torch.uint8):
        return False  # no value to tell by
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().all())
    return bool((buffer == torch.iinfo(buffer.dtype).min).all())


def _local_rows(parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
    """This rank's shard, and the number of its first row in the whole."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return data, 0
    mesh = data.device_mesh
    rows = -(-data.shape[0] // mesh.size(-1))
    return data._local_tensor, rows * mesh.get_local_rank(mesh.ndim - 1)


def _files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix != ".json":
        return [path]
    index = path / "model.safetensors.index.json" if path.is_dir() else path
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            if not all(name == Path(name).name != ".." for name in names):
                raise ValueError("a file outside its folder")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{index} is damaged or not an index of safetensors: fetch or save it again"
            ) from None
        return sorted(index.parent / name for name in names)
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise CheckpointError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")


def _list(what: str, names: list[str]) -> str:
    return f"{what} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" if names else ""


def _named(prefix: str, name: str) -> str:
    return clean_name(f"{prefix}.{name}" if prefix else name)


def named_full_tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU) one after another; a collective when the model is sharded over several ranks.

    Trainable or not; tied parameters come once, under their first name. `dtype` None keeps the masters' fp32.
    """
    scalars = scalar_names(model)
    for parameter, names in parameter_names(model).items():
        whole = full_tensor(parameter.data, dtype or parameter.dtype).cpu()
        yield names[0], whole.reshape(()) if names[0] in scalars else whole


def full_tensor(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter's data, whole, as an ordinary tensor of its own; a collective when it is sharded over several ranks."""
    if not isinstance(data, DTensor):
        return data.to(dtype).clone()
    with together():  # reads the drive: a rank that fails must not leave the others waiting to gather
        local = data._local_tensor.to(dtype).clone()
    gathered: torch.Tensor = DTensor.from_local(
        local, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
    ).full_tensor()
    return gathered
