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
from infinity.fsdp2.placements import as_sharded
from infinity.fsdp2.sharding import local_of
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks
from infinity.runtime.resolved import compute_device


class LayerSpec:
    """A layer to be built: `typename(*args, **kwargs)`."""

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"LayerSpec takes a class of modules, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, args, kwargs

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is the same module as the others of its `key`. Each stage that uses it has a copy, and copies stay equal.
    forward_fn: called with the module and the input instead of the module's forward. tied_weight_attr is accepted: all
    parameters are shared."""

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
        self._specs = {layer.key: layer for layer in reversed(layers) if isinstance(layer, TiedLayerSpec)}
        """By key: the first layer, whose module all stages build."""
        self._calls: list[Callable[[Any], Any]] = []
        bounds = [0, len(layers)]
        if self.num_stages > 1:
            bounds = _bounds(_weights(layers, partition_method), self.num_stages)
        self._tied_across = _tied_across(layers, bounds)
        """Keys of the TiedLayerSpecs that several stages use, and so have copies of."""
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

    def copies(self) -> dict[str, nn.Parameter]:
        """Return this stage's parameters, by name, of which other stages have copies too."""
        starts = tuple(f"tied_modules.{key}." for key in self._tied_across)
        return {name: parameter for name, parameter in self.named_parameters() if name.startswith(starts)}

    def _added(self, layer: Any, place: int, number: int) -> Callable[[Any], Any]:
        """Add a layer, and return the function to call for it. number: of modules before it, in all stages."""
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = self._specs[layer.key].build()
            module, forward_fn = self.tied_modules[layer.key], layer.forward_fn
            return module if forward_fn is None else lambda value: forward_fn(module, value)
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(module, nn.Module):
            self.layers.add_module(str(number), module)
        elif not callable(module):
            raise ConfigError(f"layer {place} of a PipelineModule is a {type(layer).__name__}, and can't be called")
        return module


class Ties:
    """Keeps equal what several stages have of a TiedLayerSpec, as DeepSpeed does. The copies begin with the values of the first
    of these stages, and every step updates each of them with the sum of all their gradients.

    The sum is known after the last backward of all stages. Until then these gradients stay in `.grad`: `PagingOptions.tied`.
    """

    def __init__(self, model: nn.Module, pipe: dist.ProcessGroup | None) -> None:
        self._pipe = pipe
        self._here: dict[str, Any] = model.copies() if isinstance(model, PipelineModule) else {}
        shapes = {name: local_of(p.data).shape for name, p in self._here.items()}
        self._copies: dict[str, tuple[torch.Size, int]] = {}
        """By name of each parameter with copies, in the same order on all stages: the shape of a shard, and the first stage."""
        for stage, of_stage in enumerate(from_all_ranks(shapes, pipe) if pipe is not None else ()):
            self._copies = {name: (shape, stage) for name, shape in of_stage.items()} | self._copies
        stage = dist.get_rank(pipe)
        self._earlier = frozenset(p for name, p in self._here.items() if self._copies[name][1] != stage)

    def counted(self, model: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters of this stage, except copies of those that an earlier stage has."""
        return (parameter for parameter in model.parameters() if parameter not in self._earlier)

    @torch.no_grad()
    def share_values(self) -> None:
        """Set all copies to the values of the first. A collective."""
        for name, (shape, first) in self._copies.items():
            values, data = torch.empty(shape, device=compute_device()), getattr(self._here.get(name), "data", None)
            with raise_on_all_ranks():
                if data is not None:
                    values.copy_(local_of(data))
            dist.broadcast(values, group=self._pipe, group_src=first)
            with raise_on_all_ranks():
                if data is not None:
                    data.copy_(as_sharded(values.to(data.device), data))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Set the gradients of all copies to their sum, before the step. A collective."""
        for name, (shape, _) in self._copies.items():
            parameter = self._here.get(name)
            grad = parameter.grad if parameter is not None else None
            if not any(from_all_ranks(grad is not None, self._pipe)):
                continue
            total = local_of(grad) if grad is not None else torch.zeros(shape, device=compute_device())
            dist.all_reduce(total, group=self._pipe)
            if parameter is not None and grad is None:
                parameter.grad = as_sharded(total, parameter.data)


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


def _tied_across(layers: Sequence[Any], bounds: Sequence[int]) -> frozenset[str]:
    """Return the keys of the TiedLayerSpecs whose uses are in several stages. Raises ConfigError if stages share a parameter
    in another way: each would update a copy of its own."""
    stage_of: dict[Any, int] = {}
    across = set()
    for stage, (first, end) in enumerate(pairwise(bounds)):
        for place in range(first, end):
            layer = layers[place]
            for one in [layer.key] if isinstance(layer, TiedLayerSpec) else _parameters(layer):
                if stage_of.setdefault(one, stage) == stage:
                    continue
                if not isinstance(one, str):
                    raise ConfigError(
                        f"a parameter of layer {place} is used in stages {stage_of[one]} and {stage}: make its layers "
                        "TiedLayerSpecs of one key, or use a partition_method that puts its uses into one stage"
                    )
                across.add(one)
    return frozenset(across)
