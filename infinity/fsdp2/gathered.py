"""Models that are built without memory, and parameters that are looked at or set whole. Training thread only.

DeepSpeed's `zero.Init` and `zero.GatheredParameters`, as far as scripts use them around models that infinity shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import ConfigError
from infinity.fsdp2.materialize import full_tensor, load_full
from infinity.fsdp2.sharding import reshard
from infinity.ranks.all_ranks import raise_on_all_ranks

_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember_sharded(model: nn.Module) -> None:
    """Models whose parameters `GatheredParameters` finds."""
    _sharded.add(model)


class Init:
    """A context in which modules are built without memory for their parameters; buffers are real.

    `infinity.initialize` gives the values afterwards, module by module, with each module's own `_init_weights` or
    `reset_parameters`, or from `weights=...`. What the constructor of a larger module does to parameters of its parts has no
    effect, as under DeepSpeed without GatheredParameters.

    Args:
        enabled: whether to do anything.
        module and others, as DeepSpeed names them: accepted for compatibility; `initialize` is told where parameters rest.
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self._enabled = enabled
        self._register: Any = None

    def __enter__(self) -> Init:
        if self._enabled:
            self._register = nn.Module.register_parameter
            nn.Module.register_parameter = _without_memory(self._register)  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._enabled:
            nn.Module.register_parameter = self._register  # type: ignore[method-assign]


def _without_memory(register: Any) -> Any:
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and param.dim():  # see EmptyModels of what has none
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    return register_parameter


class GatheredParameters:
    """A context in which the modules of an initialised model hold the parameters of `params` whole, as fp32 masters.

    Read them through their modules (`layer.weight`, `model.state_dict()`), or take the list that `with ... as whole` gives: the
    objects in `params` stay sharded. Don't run the model inside. With `modifier_rank`, that rank's values are everybody's
    afterwards, on NVMe too; without it, changes are forgotten. A collective.

    Args:
        params: a parameter or several.
        modifier_rank: whose changes count.
        fwd_module: accepted; the modules are found without it.
        enabled: whether to do anything.

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
                "parameters have no values before initialize: set them in reset_parameters() or _init_weights() of their "
                "module, or pass init_fn=... to initialize"
            )
        for model in _sharded:
            reshard(model)  # what is gathered now hides the sharded parameters
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
            for whole in self._whole.values():
                dist.broadcast(whole.data, self._modifier_rank)
            with raise_on_all_ranks():  # writes to the drive
                for p, whole in self._whole.items():
                    load_full(p, whole.data)
        self._whole.clear()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted. FSDP2 gathers a parameter with its group: one that other modules use must lie in the root group, or in a group
    around both (`infinity.wrap`)."""
