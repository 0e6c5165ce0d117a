"""Parameters without dimensions (such as CLIP's logit_scale), which have no row to shard, or without elements.

Parameters without elements are frozen: no update changes them, and FSDP2 cannot reduce their gradient.

[Note: A row for what has none]
A parameter without dimensions is held with shape (1,) before anything is sharded, and is then handled like any other:
sharded, paged, stepped, clipped, in checkpoints and commits. Two places show it without dimensions. The model's code
sees a view of the gathered parameter, because type promotion differs. Weight files store it in the shape that other
programs expect; a checkpoint's manifest names it (`scalars`) for exports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.fsdp2.guarded import carry_hooks
from infinity.fsdp2.names import parameter_names

_MARK = "_infinity_scalars"
"""Attribute of a module's class: names of the parameters that it shows without dimensions."""


def hold_as_rows(model: nn.Module) -> None:
    """Replace each parameter without dimensions by one of shape (1,), and freeze those without elements."""
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and p.numel() > 0)
    rows: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        scalars = {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 0}
        for name, p in scalars.items():
            if p not in rows:
                rows[p] = nn.Parameter(p.detach().reshape(1), requires_grad=p.requires_grad)
                carry_hooks(p, rows[p])
            module._parameters[name] = rows[p]
        if scalars:
            marked = {_MARK: frozenset(scalars)}
            module.__class__ = showing(type(module), scalars, lambda p: p.reshape(()), marked)
            module._register_load_state_dict_pre_hook(partial(_load_as_rows, marked[_MARK]))


def _load_as_rows(names: Collection[str], state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Let `load_state_dict` take the values of an ordinary model."""
    for name in {prefix + name for name in names} & state_dict.keys():
        if state_dict[name].dim() == 0:
            state_dict[name] = state_dict[name].reshape(1)


def scalar_names(model: nn.Module) -> frozenset[str]:
    """Return all names of the parameters that `hold_as_rows` replaced."""
    rows = {module._parameters[name] for module in model.modules() for name in getattr(type(module), _MARK, ())}
    return frozenset(name for p, names in parameter_names(model).items() if p in rows for name in names)


def showing(
    kind: type[nn.Module],
    names: Iterable[str],
    form: Callable[[torch.Tensor], torch.Tensor],
    attributes: dict[str, Any],
) -> type[nn.Module]:
    """Return a subclass of `kind` with these `attributes` that shows the gathered parameters `names` through `form`."""

    def shown(name: str) -> property:
        def view(module: nn.Module) -> torch.Tensor | None:
            p = module._parameters[name]
            return p if p is None or isinstance(p, DTensor) else form(p)

        return property(view)

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {name: shown(name) for name in names} | attributes | named)
