"""Sharded parameters used as tensors in the user's program: performs or rejects what torch cannot do with them.

[Note: Sharded and ordinary tensors]
FSDP2's parameters are DTensors. torch rejects operations between a DTensor and an ordinary tensor, with an obscure
message. On one rank a shard is the whole parameter. So reads and writes element by element (an average of weights, a
teacher, a backup), views and in-place writes run on the shard there. On several ranks nothing is gathered implicitly,
because a rank that gathers alone would wait for ever. Computing with a parameter outside its forward is always
rejected: it would use the fp32 master, and its gradient would bypass FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import InfinityError
from infinity.fsdp2.names import parameter_names
from infinity.fsdp2.sharding import in_backward

_aten = torch.ops.aten
_WAYS = (
    "read it by full_tensor(), on all ranks; set it in zero.GatheredParameters or by loading; compute with it in the "
    "model's forward, or in a method registered by torch.distributed.fsdp.register_fsdp_forward_method(model, name)"
)


class ShardedTensor(DTensor):
    """A DTensor that is a parameter or was derived from one. See the note of this file."""

    __slots__ = ()
    _infinity_name: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = next(tensor for tensor in tensors if isinstance(tensor, ShardedTensor))
        ordinary = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and tensor.numel() != 1]
        by_element = not ordinary or _is_by_element(func, args, tensors, ordinary)
        if not by_element or (ordinary and first.device_mesh.size() > 1):
            name = first._infinity_name
            raise InfinityError(
                f"{func.overloadpacket} mixes sharded parameter {name} with an ordinary tensor: {_WAYS}"
            )
        on_shard = first.device_mesh.size() == 1 and (ordinary or func._schema.is_mutable or _is_view(func))
        stand_ins = {
            id(tensor): tensor._local_tensor if on_shard else _unnamed(tensor)
            for tensor in tensors
            if isinstance(tensor, DTensor)
        }
        given = {id(stand_ins[id(tensor)]): tensor for tensor in tensors if isinstance(tensor, DTensor)}
        made = func(*_replaced(args, stand_ins), **_replaced(kwargs, stand_ins))

        def shown(value: Any) -> Any:
            if id(value) in given or not isinstance(value, torch.Tensor):
                return given.get(id(value), value)
            if on_shard and _is_view(func):
                mesh = first.device_mesh
                value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return _named(value, first._infinity_name) if isinstance(value, DTensor) else value

        return tree_map(shown, made)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unnamed(self).__reduce_ex__(protocol)


def name_parameters(model: nn.Module) -> None:
    """Make the sharded parameters of a model name themselves in errors about unsupported operations."""
    for parameter, names in parameter_names(model).items():
        if isinstance(parameter, DTensor):  # others are ignored by FSDP2
            _named(parameter, names[0])
    model.register_forward_pre_hook(_check_data, prepend=True)
    model.__dict__["__deepcopy__"] = _refuse_deepcopy


def _check_data(module: nn.Module, args: Any) -> None:
    """Raise InfinityError if a parameter was assigned another tensor as `.data`, and undo that: it has no shard."""
    changed: list[Any] = [p for p in module.parameters() if isinstance(p, ShardedTensor) and p.data_ptr()]
    for parameter in changed:
        parameter.data = _unnamed(parameter)
    if changed:
        raise InfinityError(
            f"parameter {changed[0]._infinity_name} is sharded, so another tensor can't be assigned to its .data; the "
            "old values were restored: set values in place (p.data.copy_(values)), after a p.data.clone() to keep the "
            "old"
        )


def _refuse_deepcopy(memo: Any) -> Any:
    raise InfinityError(
        "a sharded model can't be copied: copy it before infinity.initialize, as an average of weights "
        "(AveragedModel(copy.deepcopy(model))) updated from the sharded parameters, or keep p.detach().clone() of each"
    )


def _is_by_element(func: Any, args: Any, tensors: list[torch.Tensor], ordinary: list[torch.Tensor]) -> bool:
    """Return True if the call sets a parameter or works element by element on equal shapes, unseen by autograd."""
    packet = func.overloadpacket
    if packet is _aten.equal:
        return True
    if in_backward() or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return False
    if func._schema.is_mutable and isinstance(args[0], DTensor):
        return True
    shapes = {tensor.shape for tensor in tensors if isinstance(tensor, DTensor)}
    alike = all(tensor.shape in shapes for tensor in ordinary)
    return alike and (
        torch.Tag.pointwise in func.tags or packet is _aten.copy_ or packet.__name__.startswith("_foreach_")
    )


def _is_view(func: Any) -> bool:
    """Return True if the operation returns a view with its own place among shards (not `detach`)."""
    aliased = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
    return aliased and func.overloadpacket is not _aten.detach


def _replaced(tree: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    return tree_map(lambda value: stand_ins.get(id(value), value), tree)


def _named(tensor: Any, name: str) -> Any:
    tensor.__class__ = ShardedTensor
    tensor._infinity_name = name
    return tensor


def _unnamed(tensor: Any) -> Any:
    return DTensor(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
