"""The only list of FSDP2's private modules, classes and attributes that infinity uses, checked on import.

If torch has moved one, the first import raises ImportError, so that no step fails on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule

from infinity.torch_versions import ANYWAY, REQUIREMENT, TESTED

try:
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext

    FSDPParam = _fsdp_param.FSDPParam
    free_storage = _fsdp_param.free_storage
    collect_grad_tensors = _fsdp_param_group.collect_grad_tensors
    FSDPParamGroup = _fsdp_param_group.FSDPParamGroup
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torch {torch.__version__} lacks private parts of FSDP2 that infinity needs ({error}): infinity works with "
        f"torch {TESTED}, pip install '{REQUIREMENT}'"
    ) from error

__all__ = [
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "TrainingState",
    "collect_grad_tensors",
    "free_storage",
]

USED: dict[type, tuple[str, ...]] = {
    FSDPModule: ("_get_fsdp_state",),
    FSDPState: (
        *("_state_ctx", "_training_state", "_mp_policy", "_auto_reshard_after_forward", "_is_root", "_lazy_init"),
        *("_register_root_post_backward_final_callback", "_root_post_backward_final_callback"),
        *("_cast_output_dtype", "_register_pre_backward_hook", "_pre_backward"),
    ),
    FSDPStateContext: ("all_states", "iter_forward_root", "post_backward_final_callback_queued"),
    FSDPParamGroup: (
        *("fsdp_params", "is_sharded", "mesh_info", "post_forward_mesh_info", "reshard_after_backward"),
        *("use_training_state", "post_backward", "_training_state", "_reshard_after_forward"),
        *("_all_gather_comm", "_reduce_scatter_comm", "_reset_sharded_params", "reduce_grads"),
        *("unshard", "wait_for_unshard", "pre_forward", "post_forward", "_to_unsharded", "_to_sharded"),
        *("_register_post_backward_hook", "_reduce_dtype", "_all_reduce_hook", "gradient_divide_factor"),
        *("reduce_scatter_unused_params", "unshard_in_backward", "_all_gather_result", "mp_policy"),
    ),
    FSDPParam: (
        *("_unsharded_param", "sharded_param", "sharded_size", "unsharded_accumulated_grad"),
        *("_setattr_on_modules", "to_sharded", "to_sharded_dtensor", "all_gather_outputs", "_param_fqn"),
        *("init_all_gather_outputs", "free_unsharded_param", "_unsharded_inner_tensors", "_module_info"),
    ),
}
"""Private attributes used, by class."""


def moved() -> list[str]:
    """Return the names in `USED` that this torch lacks."""
    return [f"{of.__name__}.{name}" for of, names in USED.items() for name in names if name not in {*_names_in(of)}]


def _names_in(of: type) -> Iterator[str]:
    """Yield the names that a class defines or that its methods use, including attributes that they set."""
    for base in of.__mro__[:-1]:
        yield from vars(base)
        yield from getattr(base, "__annotations__", ())
        for value in vars(base).values():
            for function in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
                yield from getattr(getattr(function, "__code__", None), "co_names", ())


if (missing := moved()) and os.environ.get(ANYWAY) != "1":
    raise ImportError(
        f"torch {torch.__version__} lacks private parts of FSDP2 that infinity needs ({', '.join(missing)}): infinity "
        f"works with torch {TESTED}, pip install '{REQUIREMENT}', or set {ANYWAY}=1 to try this one"
    )
