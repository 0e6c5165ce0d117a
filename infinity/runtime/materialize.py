"""Floor 5. Giving values to a model that was built without memory: module by module, or from safetensors files.

Nothing larger than the parameters of one module (or one rank's shard of one tensor) is ever held; what goes to the arena goes
there at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import CheckpointError, ConfigError

InitFn = Callable[[nn.Module], Any]


def init_empty() -> torch.device:
    """A context in which modules are built on the meta device: shapes without memory.

    Use it as `with infinity.init_empty(): model = Model()`; `infinity.initialize` then gives the values.
    """
    return torch.device("meta")


def meta_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that have no values yet (all names of a tied one)."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta}


def check_initializable(model: nn.Module, init_fn: InitFn | None, *, parameters: bool = True) -> None:
    """Raise ConfigError, naming them, when modules on the meta device have no way to get values."""
    if init_fn is not None or callable(getattr(model, "_init_weights", None)):
        return
    lost = [
        name or "the root module"
        for name, module in model.named_modules()
        if (
            (parameters and any(p.is_meta for p in module.parameters(recurse=False)))
            or any(b.is_meta for b in module.buffers(recurse=False))
        )
        and not hasattr(module, "reset_parameters")
    ]
    if lost:
        raise ConfigError(
            f"built on the meta device without a reset_parameters() method: {', '.join(lost[:5])}"
            f"{' and more' if len(lost) > 5 else ''}; pass init_fn=... (called with each module) or weights=... to initialize"
        )


def initialize_values(model: nn.Module, pending: set[str], device: torch.device, init_fn: InitFn | None) -> None:
    """Give values to the parameters in `pending` and to meta buffers, in module order, with the module's own method.

    Every rank draws the same numbers (given the same seed) and keeps its shard.
    """
    init = init_fn or getattr(model, "_init_weights", None) or (lambda module: module.reset_parameters())
    done: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        owned = {name: p for name, p in module._parameters.items() if p is not None}
        fresh = {name: p for name, p in owned.items() if _join(prefix, name) in pending and p not in done}
        blank = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        if not fresh and not blank:
            continue
        for name, buffer in blank.items():
            module._buffers[name] = _unset(buffer, device)
        with torch.no_grad():
            for name, p in owned.items():
                module._parameters[name] = nn.Parameter(torch.empty(p.shape), requires_grad=p.requires_grad)
        try:
            init(module)
            for name, p in fresh.items():
                value = module._parameters[name]
                assert value is not None
                load_full(p, value)
            lost = [_join(prefix, name) for name in blank if _is_unset(module._buffers[name])]
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
    local.copy_(full[start : start + local.shape[0]])


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Set all parameters from safetensors: a file, or a folder with `model.safetensors` or its index.

    Each rank reads only its own rows. Names that tied parameters share need to be there once. Raises CheckpointError, naming
    the tensors, when some are missing, too many, or of another shape.
    """
    files = _files(Path(path))
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    with ExitStack() as stack, torch.no_grad():
        where: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            where.update(dict.fromkeys(opened.keys(), opened))
        known = {name for names in aliases.values() for name in names}
        missing = [names[0] for names in aliases.values() if not any(name in where for name in names)]
        unexpected = sorted(set(where) - known - {name for name, _ in model.named_buffers()})
        if missing or unexpected:
            raise CheckpointError(
                f"{path} doesn't fit the model: "
                + "; ".join(filter(None, [_list("missing", missing), _list("unknown", unexpected)]))
            )
        chosen = {parameter: next(name for name in names if name in where) for parameter, names in aliases.items()}
        for parameter, name in chosen.items():
            shape = tuple(where[name].get_slice(name).get_shape())
            if shape != tuple(parameter.shape):
                raise CheckpointError(f"{path}: {name} has shape {shape}, the model wants {tuple(parameter.shape)}")
        for name, buffer in model.named_buffers():
            if name in where:
                stored = where[name].get_tensor(name)
                if stored.shape != buffer.shape:
                    raise CheckpointError(
                        f"{path}: {name} has shape {tuple(stored.shape)}, the model wants {tuple(buffer.shape)}"
                    )
                buffer.copy_(stored)
        for parameter, name in chosen.items():
            local, start = _local_rows(parameter)
            if local.numel():
                local.copy_(where[name].get_slice(name)[start : start + local.shape[0]])


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
    rows = -(-data.shape[0] // data.device_mesh.size())
    return data._local_tensor, rows * data.device_mesh.get_local_rank()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise CheckpointError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")


def _list(what: str, names: list[str]) -> str:
    return f"{what} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" if names else ""


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def named_full_tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU) one after another; a collective when the model is sharded over several ranks.

    Trainable or not; tied parameters come once, under their first name. `dtype` None keeps the masters' fp32.
    """
    for name, parameter in model.named_parameters():
        data = parameter.data
        if isinstance(data, DTensor):
            local = data._local_tensor.to(dtype or data.dtype).clone()
            whole = DTensor.from_local(
                local, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
            ).full_tensor()
        else:
            whole = data.to(dtype or data.dtype)
        yield name, whole.cpu()
