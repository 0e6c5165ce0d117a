"""DeepSpeed's PipelineModule: a sequential model, or this rank's stage of one, for `Engine.train_batch`.

Layers are groups like those of any model. Without stages all ranks shard all layers. With stages, those of a stage shard
its layers, under the names that they have in the whole model; infinity/runtime/stages.py runs the stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError
from infinity.fsdp2.first_values import init_empty


class LayerSpec:
    """A layer to be built: `typename(*args, **kwargs)`."""

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"LayerSpec takes a class of modules, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, args, kwargs

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is the same module as the others of its `key`. forward_fn: called with the module and the input instead of
    the module's forward. tied_weight_attr is accepted: all parameters are shared."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn = key, forward_fn


class PipelineModule(nn.Module):
    """Calls layers one after the other, each with the output of the previous one.

    Args:
        layers: LayerSpecs, modules and functions.
        num_stages: number of stages, a divisor of the ranks: with 2 stages of 8 ranks, ranks 0 to 3 have the first. The
            process group must exist. Layers of other stages are not built. None for that of `topology`, or 1.
        topology: an object whose `get_dim("pipe")` is the number of stages.
        loss_fn: of (outputs, labels), for `Engine.train_batch` and `Engine.eval_batch`.
        partition_method: what stages have equal shares of: "parameters" (trained ones), "uniform" (layers) or "type:REGEX"
            (layers whose class or function has such a name).
        activation_checkpoint_interval: if not 0, the backward recomputes the activations of each layer with parameters; each
            one separately, for any interval, because a layer is a group.
        seed_layers, base_seed, seed_fn: seed the generators before each layer is built, with base_seed plus its index. With
            stages, initial values depend on the number of stages otherwise.
        activation_checkpoint_func, checkpointable_layers, dynamic_shape: accepted.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: Any = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        self.num_stages = int(num_stages or (topology.get_dim("pipe") if topology is not None else 1))
        self.stage = _stage_of_rank(self.num_stages)
        self.loss_fn = loss_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.layers = nn.ModuleList()
        self.tied_modules = nn.ModuleDict()
        """By key. In the root group, because a forward_fn may use their parameters without calling them."""
        self._calls: list[Callable[[Any], Any]] = []
        bounds = [0, len(layers)]
        if self.num_stages > 1:
            bounds = _bounds(_weights(layers, partition_method), self.num_stages)
            _check_apart(layers, bounds)
        number = 0
        for place, layer in enumerate(layers):
            if bounds[self.stage] <= place < bounds[self.stage + 1]:
                if seed_layers:
                    (seed_fn or torch.manual_seed)(base_seed + place)
                self._calls.append(self._added(layer, place, number))
            number += isinstance(layer, (LayerSpec, nn.Module)) and not isinstance(layer, TiedLayerSpec)

    def forward(self, *inputs: Any) -> Any:
        value = inputs[0] if len(inputs) == 1 else inputs
        for call in self._calls:
            saves = isinstance(call, nn.Module) and any(True for _ in call.parameters())
            if self.activation_checkpoint_interval and saves and torch.is_grad_enabled():
                value = checkpoint(call, value, use_reentrant=False)
            else:
                value = call(value)
        return value

    def _added(self, layer: Any, place: int, number: int) -> Callable[[Any], Any]:
        """Add a layer, and return the function to call for it. number: of modules before it, in all stages."""
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module, forward_fn = self.tied_modules[layer.key], layer.forward_fn
            return module if forward_fn is None else lambda value: forward_fn(module, value)
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(module, nn.Module):
            self.layers.add_module(str(number), module)
        elif not callable(module):
            raise ConfigError(f"layer {place} of a PipelineModule is a {type(layer).__name__}, and can't be called")
        return module


def _stage_of_rank(num_stages: int) -> int:
    if num_stages == 1:
        return 0
    if not dist.is_initialized():
        raise ConfigError(
            f"PipelineModule with num_stages={num_stages} builds the layers of this rank: call infinity.init_distributed() "
            "before it"
        )
    ranks = dist.get_world_size()
    if num_stages < 1 or ranks % num_stages:
        raise ConfigError(f"num_stages of a PipelineModule: got {num_stages}, expected a divisor of the {ranks} ranks")
    return dist.get_rank() // (ranks // num_stages)


def _weights(layers: Sequence[Any], method: str) -> list[int]:
    """Return what each layer adds to its stage. Raises ConfigError for an unknown method."""
    kind, _, pattern = method.partition(":")
    if kind == "uniform":
        return [1] * len(layers)
    if kind == "type" and pattern:
        kinds = [getattr(layer, "typename", type(layer) if isinstance(layer, nn.Module) else layer) for layer in layers]
        return [int(re.search(pattern, getattr(kind, "__name__", ""), re.IGNORECASE) is not None) for kind in kinds]
    if kind != "parameters":
        raise ConfigError(
            f'partition_method of a PipelineModule: got {method!r}, expected "parameters", "uniform" or "type:REGEX"'
        )
    with init_empty():
        built = [layer.build() if isinstance(layer, LayerSpec) else layer for layer in layers]
    return [sum(parameter.numel() for parameter in _parameters(module) if parameter.requires_grad) for module in built]


def _parameters(layer: Any) -> Iterator[nn.Parameter]:
    return layer.parameters() if isinstance(layer, nn.Module) else iter(())


def _bounds(weights: Sequence[int], stages: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers. The sum of the squares of the stages' weights is the
    least; of equal ones, later stages have more layers."""
    if len(weights) < stages:
        raise ConfigError(f"num_stages of a PipelineModule: got {stages}, expected at most the {len(weights)} layers")
    totals = [0, *accumulate(weights)]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for stage in range(1, stages + 1):
        ends = range(stage, len(weights) - stages + stage + 1)
        best = {
            end: min(
                (cost + (totals[end] - totals[start]) ** 2, [*bounds, end])
                for start, (cost, bounds) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[len(weights)][1]


def _check_apart(layers: Sequence[Any], bounds: Sequence[int]) -> None:
    """Raise ConfigError if stages share a parameter: each would update a copy of its own."""
    stage_of: dict[Any, int] = {}
    for stage, (first, end) in enumerate(pairwise(bounds)):
        for place in range(first, end):
            layer = layers[place]
            shared = [layer.key] if isinstance(layer, TiedLayerSpec) else _parameters(layer)
            for one in shared:
                if stage_of.setdefault(one, stage) != stage:
                    user = f"TiedLayerSpec {one!r}" if isinstance(one, str) else f"a parameter of layer {place}"
                    raise ConfigError(
                        f"{user} is used in stages {stage_of[one]} and {stage}, and can't be tied across stages: use a "
                        "LayerSpec of its own in each, or a partition_method that puts its uses into one stage"
                    )
