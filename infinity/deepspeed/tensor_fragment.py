"""Read and set the fp32 master, gradient and optimizer state of one parameter, under DeepSpeed's names.

`param` is one of `engine.parameters()`; the result is None for others and for frozen ones. The `full` functions that read are
collectives. Those that set take the same value on all ranks; each rank keeps its rows. The `local` functions read the rows of
this rank, in the parameter's shape.
"""

from __future__ import annotations

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.fsdp2.materialize import full_tensor, load_full
from infinity.fsdp2.sharding import local_of
from infinity.runtime.engine import engine_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the master."""
    return _full(param, _master(param))


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient before it is unscaled and clipped. Raises InfinityError without `"infinity": {"keep_grad": true}` if
    it was taken out of `.grad`."""
    return _full(param, _grad(param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the optimizer's state of this name, such as "exp_avg"."""
    return _full(param, _state(param, optim_state_key))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master; the compute parameter follows."""
    _set(_master(param), value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient. Raises InfinityError as `safe_get_full_grad`."""
    _set(_grad(param), value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the optimizer's state of this name. Raises InfinityError before the first step, which makes it."""
    _set(_state(param, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    return _local(_master(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    return _local(_grad(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    return _local(_state(param, optim_state_key))


def _master(param: nn.Parameter) -> torch.Tensor | None:
    trained = engine_of(param) if param.requires_grad else None
    return trained[1].data if trained is not None else None


def _grad(param: nn.Parameter) -> torch.Tensor | None:
    trained = engine_of(param)
    return trained[1].grad if trained is not None else None


def _state(param: nn.Parameter, key: str) -> torch.Tensor | None:
    trained = engine_of(param)
    return trained[0].optimizer.state.get(trained[1], {}).get(key) if trained is not None else None


def _full(param: nn.Parameter, sharded: torch.Tensor | None) -> torch.Tensor | None:
    trained = engine_of(param)
    if trained is None or sharded is None:
        return None
    with trained[0]._in_pass("a read of a whole parameter"):
        return full_tensor(sharded, torch.float32)


def _local(sharded: torch.Tensor | None) -> torch.Tensor | None:
    return local_of(sharded).to(torch.float32).clone() if sharded is not None else None


def _set(sharded: torch.Tensor | None, value: torch.Tensor) -> None:
    if sharded is None:
        raise InfinityError(
            "there is nothing to set: the parameter is frozen or of no engine, or it has no gradient or state yet"
        )
    load_full(sharded, value)
