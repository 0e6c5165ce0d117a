"""Keeps float buffers, such as BatchNorm's running statistics, in fp32 if the model computes in 16 bits.

[Note: Statistics in fp32]
FSDP2 casts parameters and inputs to the compute dtype, but not buffers. torch's batch and instance norm need weights
and statistics of one dtype; the input may have another. 16-bit statistics would hardly change, because most of a
batch's contribution is below the rounding. So they stay fp32, as under autocast. Their module sees its gathered
parameters in fp32 too, and returns its output in the dtype of its input, even if it has no parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.errors import InfinityError
from infinity.fsdp2.scalars import showing


def keep_statistics_in_fp32(model: nn.Module) -> None:
    """Make each module with a running mean compute with it in fp32. See the note of this file."""
    for module in model.modules():
        if module._buffers.get("running_mean") is not None and not isinstance(module, torch.jit.ScriptModule):
            kind = type(module)
            module.__class__ = showing(kind, module._parameters, lambda p: p.float(), {"forward": _forward_of(kind)})


@contextlib.contextmanager
def mixtures_explained(model: nn.Module) -> Iterator[None]:
    """Around a forward in 16 bits: if an operation mixes fp32 with them, raise an error that names possible buffers."""
    try:
        yield
    except RuntimeError as error:
        if ("Float" not in (text := str(error)) and "float" not in text) or not ("BFloat16" in text or "Half" in text):
            raise
        names = {module: name for name, module in model.named_modules()}
        running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        inside = [module for module in reversed(running) if isinstance(module, nn.Module) and module in names]
        buffers = [
            f"{names[module]}.{name}".removeprefix(".")
            for module in dict.fromkeys([*inside, *names])
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype is torch.float32
        ]
        if not inside or not buffers:
            raise
        others = ", ..." if len(buffers) > 3 else ""
        raise InfinityError(
            f"{names[inside[0]] or 'the root module'} mixes fp32 with the 16-bit compute dtype ({text}): float buffers "
            f"stay fp32 ({', '.join(itertools.islice(buffers, 3))}{others}), and so do results of them; cast those to "
            "the dtype of the input in the forward, as in x * self.scale.to(x.dtype)"
        ) from error


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward for a class of modules that casts its output to the dtype of the input."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = kind.forward(self, *args, **kwargs)
        given = next(x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        return made.to(given) if isinstance(made, torch.Tensor) and given.is_floating_point else made

    return forward
