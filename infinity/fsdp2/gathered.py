"""DeepSpeed's `zero.Init` and `zero.GatheredParameters`, for models that infinity shards. Training thread only."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import ConfigError
from infinity.fsdp2.materialize import full_tensor, load_full
from infinity.fsdp2.placements import ranks_alike
from infinity.fsdp2.sharding import reshard
from infinity.ranks.all_ranks import raise_on_all_ranks

_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember_sharded(model: nn.Module) -> None:
    """Register a model whose parameters `GatheredParameters` may gather."""
    _sharded.add(model)


class Init:
    """A context that builds modules without memory for their parameters; buffers are allocated.

    `infinity.initialize` sets the values later, by each module's `_init_weights` or `reset_parameters`, or from
    `weights=...`. A constructor's changes to parameters of its parts have no effect, as in DeepSpeed without
    GatheredParameters.

    Args:
        enabled: False makes the context do nothing.
        module and others, as in DeepSpeed: accepted for compatibility; `initialize` decides where parameters are kept.
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self._enabled = enabled
        self._replaced: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Init:
        if self._enabled:
            _building.append(self)
            self._replaced = nn.Module.register_parameter, nn.Module._apply
            nn.Module.register_parameter = _without_memory(self._replaced[0])  # type: ignore[method-assign]
            nn.Module._apply = _leaving_meta(self._replaced[1])  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._enabled:
            nn.Module.register_parameter, nn.Module._apply = self._replaced  # type: ignore[method-assign]
            _building.remove(self)


_building: list[Init] = []
"""Contexts that are entered now, outermost first."""


@contextlib.contextmanager
def with_memory() -> Iterator[None]:
    """A block in which parameters have memory, also inside `Init`."""
    left = [*_building]
    for init in reversed(left):
        init.__exit__()
    try:
        yield
    finally:
        for init in left:
            init.__enter__()


def _without_memory(register: Any) -> Any:
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and param.dim():  # without dimensions: see EmptyModels
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    return register_parameter


def _leaving_meta(apply: Any) -> Any:
    """`Module._apply` that moves no tensor without memory: cpu(), cuda() and to() change its dtype alone."""

    def _apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype) if tensor.is_meta else fn(tensor)

        applied: nn.Module = apply(module, moved, recurse)
        return applied

    return _apply


class GatheredParameters:
    """A context in which the modules of an initialised model hold the parameters of `params` whole, as fp32 masters.

    Read them through their modules (`layer.weight`, `model.state_dict()`), or use the list from `with ... as whole`:
    the objects in `params` stay sharded. Do not run the model inside. With `modifier_rank`, all ranks take that rank's
    values on exit, and they are written to NVMe; without it, changes are discarded. A collective.

    Args:
        params: a parameter or several.
        modifier_rank: rank whose changes are kept; for parameters of a stage, one of its ranks.
        fwd_module: accepted for compatibility; not needed.
        enabled: False makes the context do nothing.

    Raises ConfigError for parameters without values, before `initialize`.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
        self._modifier_rank = modifier_rank
        self._enabled = enabled
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._whole: dict[nn.Parameter, nn.Parameter] = {}

    def __enter__(self) -> list[nn.Parameter]:
        if not self._enabled:
            return self._params
        if any(p.is_meta for p in self._params):
            raise ConfigError(
                "parameters have no values before initialize: set them in reset_parameters() or _init_weights() of "
                "their module, or pass init_fn=... to initialize"
            )
        for model in _sharded:
            reshard(model)  # gathered parameters would hide the sharded ones
        self._whole = {
            p: nn.Parameter(full_tensor(p.data, torch.float32), requires_grad=p.requires_grad)
            for p in self._params
            if isinstance(p.data, DTensor)
        }
        for model in _sharded:
            for module in model.modules():
                for name, p in module._parameters.items():
                    if p is not None and p in self._whole:
                        self._places.append((module, name, p))
                        module._parameters[name] = self._whole[p]
        return [self._whole.get(p, p) for p in self._params]

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for module, name, p in self._places:
            module._parameters[name] = p
        self._places.clear()
        if self._modifier_rank is not None and kind is None:
            meshes = {p.data.device_mesh for p in self._whole if isinstance(p.data, DTensor)}
            group = next(map(ranks_alike, meshes), None)
            for whole in self._whole.values():
                dist.broadcast(whole.data, self._modifier_rank, group)
            with raise_on_all_ranks(group):  # writes to the arena
                for p, whole in self._whole.items():
                    load_full(p, whole.data)
        self._whole.clear()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted for compatibility. FSDP2 gathers a parameter with its group: a parameter that other modules use must be
    in the root group, or in a group around all of them (`infinity.wrap`)."""
