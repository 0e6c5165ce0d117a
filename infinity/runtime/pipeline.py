"""DeepSpeed's PipelineModule as a plain sequential model, for `Engine.train_batch`.

Its layers are groups like those of any model, sharded over all ranks. The vertical schedule (`infinity.schedule`) replaces
stages: all micro-batches of a step pass through a layer before the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError

log = logging.getLogger("infinity")


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
        loss_fn: of (outputs, labels), for `Engine.train_batch` and `Engine.eval_batch`.
        activation_checkpoint_interval: if not 0, the backward recomputes the activations of each layer with parameters; each
            one separately, for any interval, because a layer is a group.
        seed_layers, base_seed, seed_fn: seed the generators before each layer is built, with base_seed plus its index.
        num_stages, topology, partition_method, activation_checkpoint_func, checkpointable_layers, dynamic_shape: accepted.
            Every rank runs all layers, so `train_batch_size` counts all ranks.
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
        if (num_stages or 1) > 1 or topology is not None:
            log.info("PipelineModule: there are no stages here; every rank runs all layers, sharded over all ranks")
        self.loss_fn = loss_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.layers = nn.ModuleList()
        self.tied_modules = nn.ModuleDict()
        """By key. In the root group, because a forward_fn may use their parameters without calling them."""
        self._calls: list[Callable[[Any], Any]] = []
        for place, layer in enumerate(layers):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + place)
            self._calls.append(self._added(layer, place))

    def forward(self, *inputs: Any) -> Any:
        value = inputs[0] if len(inputs) == 1 else inputs
        for call in self._calls:
            saves = isinstance(call, nn.Module) and any(True for _ in call.parameters())
            if self.activation_checkpoint_interval and saves and torch.is_grad_enabled():
                value = checkpoint(call, value, use_reentrant=False)
            else:
                value = call(value)
        return value

    def _added(self, layer: Any, place: int) -> Callable[[Any], Any]:
        """Add a layer, and return the function to call for it."""
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module, forward_fn = self.tied_modules[layer.key], layer.forward_fn
            return module if forward_fn is None else lambda value: forward_fn(module, value)
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(module, nn.Module):
            self.layers.append(module)
        elif not callable(module):
            raise ConfigError(f"layer {place} of a PipelineModule is a {type(layer).__name__}, and can't be called")
        return module
