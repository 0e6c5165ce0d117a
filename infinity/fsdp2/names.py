"""The only map between parameters and their names in checkpoints and for users.

Wrappers around a module (activation checkpointing, torch.compile) are not part of these names, as in
torch.distributed.checkpoint. So a file fits a model with or without wrappers.
"""

from __future__ import annotations

import torch
from torch import nn

_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


def clean_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return every parameter with its names, in module order; a tied one has several, its own first."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(clean_name(name))
    return {parameter: tuple(names) for parameter, names in names_of.items()}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters under each of their names."""
    return {name: parameter for parameter, names in parameter_names(model).items() for name in names}


def buffer_names(model: nn.Module, *, persistent: bool) -> dict[torch.Tensor, tuple[str, ...]]:
    """Return every buffer with its names; if `persistent`, only buffers that a checkpoint holds."""
    names_of: dict[torch.Tensor, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and not (persistent and name in module._non_persistent_buffers_set):
                names_of.setdefault(buffer, []).append(clean_name(f"{prefix}.{name}" if prefix else name))
    return {buffer: tuple(names) for buffer, names in names_of.items()}
