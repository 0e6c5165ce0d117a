"""The paged tensor: a tensor without elements, which are in the arena and are read when needed.

[Note: A tensor without elements]
It is a real tensor (sizes, strides, dtype, a place in autograd) over a storage of zero bytes, because FSDP2 asks for
the storage of its tensors. Nothing may access that storage, so every operation reaches `__torch_dispatch__`, which does
one of four things:

  * a view returns another paged tensor of the same shard (the geometry is computed on the meta device);
  * a factory (`zeros_like`, ...) uses only the geometry;
  * an operation that writes reads the range, runs, and writes the range back;
  * any other operation reads the range into ordinary memory and runs there.

In a step FSDP2 uses none of these: it calls `fsdp_pre_all_gather`, which returns the compute parameter on the device.

[Note: The padded twin]
For a shard smaller than its padded size, FSDP2 makes a zeroed tensor of the padded size, copies the shard into its
beginning and keeps the result. So `new_zeros` of exactly that size returns a twin: zeros that become the padded shard
when the shard is copied to its own place in them. Any other use of a twin before that raises.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from infinity.errors import InfinityError
from infinity.fsdp2.elsewhere import ElsewhereTensor
from infinity.store.layout import MOMENTS, Field
from infinity.swap.shard import CodedShard, PagedShard
from infinity.swap.values import RANGE_NUMEL

_FACTORIES = {
    torch.ops.aten.zeros_like,
    torch.ops.aten.ones_like,
    torch.ops.aten.full_like,
    torch.ops.aten.empty_like,
    torch.ops.aten.rand_like,
    torch.ops.aten.randn_like,
    torch.ops.aten.new_zeros,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_full,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


Entered = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context that guards every access to the arena: `Paging.entered`."""


class _Blank:
    """Shared by a padded twin and its views: `blank` until the shard has been copied into it."""

    def __init__(self) -> None:
        self.blank = True


class PagedTensor(ElsewhereTensor):
    """A view of one field of one shard (fp32). Made by `infinity.SwapManager.page`; behaves like an ordinary tensor."""

    _shard: PagedShard
    _field: Field
    _offset: int
    _entered: Entered
    _twin: _Blank | None

    @staticmethod
    def over(
        shard: PagedShard,
        field: Field,
        entered: Entered,
        device: torch.device,
        *,
        geometry: torch.Tensor | None = None,
        twin: _Blank | None = None,
    ) -> PagedTensor:
        """Return a shard's field as a tensor of its shape, or with the geometry (meta) of another tensor."""
        if geometry is None:
            geometry = torch.empty(shard.shape, device="meta")
        base = torch.empty_strided(geometry.shape, geometry.stride(), dtype=torch.float32, device=device)
        base.untyped_storage().resize_(0)
        paged: PagedTensor = torch.Tensor._make_subclass(PagedTensor, base)
        paged._shard, paged._field, paged._entered = shard, field, entered
        paged._offset, paged._twin = int(geometry.storage_offset()), twin
        return paged

    def materialize(self) -> torch.Tensor:
        """Read the elements from the arena into an ordinary tensor of the same shape on the same device."""
        self._check_not_blank("read")
        if self.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        start, count = self._extent()
        with self._entered():
            flat = self._shard.read(self._field, start, count)
        return flat.as_strided(self.shape, self.stride(), self._offset - start).to(self.device)

    def store(self, values: torch.Tensor) -> None:
        """Set the elements from an ordinary tensor of the same shape, in the arena and in all copies."""
        self._check_not_blank("written")
        if self.numel() == 0:
            return
        start, count = self._extent()
        with self._entered():
            if self.is_contiguous():
                flat = values.detach().to("cpu", torch.float32).reshape(-1)
            else:
                flat = self._shard.read(self._field, start, count, torn=True)  # a load sets values in pieces
                flat.as_strided(self.shape, self.stride(), self._offset - start).copy_(values)
            self._shard.write(self._field, start, flat)

    def forget_codes(self) -> None:
        """Zero moments that are stored as codes, before they are set in pieces: a piece that covers a block in part is
        encoded with the block's other elements."""
        if self._field in MOMENTS and self._shard.has_codes:
            with self._entered():
                for start in range(0, self.numel(), RANGE_NUMEL):
                    self._shard.write(self._field, start, torch.zeros(min(RANGE_NUMEL, self.numel() - start)))

    # Called by FSDP2 inside `ParameterLap.gathering`: see "tensor subclass all-gather extensions" in
    # torch/distributed/fsdp/_fully_shard.

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor], torch.Tensor | None]:
        """Return the padded shard in the dtype of compute; gathered in place: no elements, and its bytes as
        metadata."""
        dtype = mp_policy.param_dtype or self.dtype
        shard = self._shard
        piece = shard.delivery.on_device()
        if shard.gathers_in_place:
            return (torch.empty(0, dtype=dtype),), piece
        if isinstance(shard, CodedShard) and mesh.size() == 1 and dtype is shard.gathered_dtype:  # FSDP2 only copies it
            return (shard.to_be_decoded(piece),), None
        elements = shard.elements(piece).to(dtype)
        return (elements.view(shard.padded_shape) if elements.numel() else elements,), None  # FSDP2 rejects (-1, 0)

    # FSDP2 asks for the signature at every gather of every parameter; building it there takes three times as long.
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: torch.Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: nn.Parameter | None = None,
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        """Return the gathered parameter, in FSDP2's buffer or in the lease."""
        if out is not None:
            return None
        return all_gather_outputs[0] if metadata is None else self._shard.gathered(metadata), ()

    def apply_(self, function: Any) -> Any:
        self.store(self.materialize().apply_(function))
        return self

    def map_(self, other: Any, function: Any) -> Any:
        self.store(self.materialize().map_(_ordinary(other), function))
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedTensor({self._shard.name}, {self._field.value}, size={tuple(self.shape)})"

    def _extent(self) -> tuple[int, int]:
        """Return the first element of the shard in this view, and the number of elements from there to its last."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride(), strict=True))
        return self._offset, reach + 1

    def _check_not_blank(self, verb: str) -> None:
        if self._twin is not None and self._twin.blank:
            raise InfinityError(f"the padded twin of {self._shard.name} is {verb} before the shard was copied into it")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            raise InfinityError(
                f"{func.overloadpacket} would change the shape of a paged tensor in place: use a view of it"
            )
        if func.overloadpacket in _FACTORIES and isinstance(args[0], PagedTensor):
            return _factory(func, args, kwargs)
        arguments = list(zip(func._schema.arguments, args, strict=False))
        arguments += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        written = [v for a, v in arguments if a.alias_info is not None and a.alias_info.is_write]
        aliased = any(a.alias_info is not None and not a.alias_info.is_write for a, _ in arguments)
        if written:
            return _write(func, args, kwargs, written)
        if aliased and isinstance(args[0], PagedTensor):
            return _view(func, args, kwargs)
        return func(*_ordinary(args), **_ordinary(kwargs))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return another view of the same shard; its geometry is computed without elements."""
    base: PagedTensor = args[0]
    start, count = base._extent() if base.numel() else (base._offset, 0)
    flat = torch.empty(start + count, device="meta")
    geometry = func(flat.as_strided(base.shape, base.stride(), base._offset), *args[1:], **kwargs)

    def over(made: Any) -> Any:
        if not isinstance(made, torch.Tensor):
            return made
        if made.dtype != base.dtype:
            raise InfinityError(f"a paged tensor can't be viewed as {made.dtype}: clone() it first")
        return PagedTensor.over(base._shard, base._field, base._entered, base.device, geometry=made, twin=base._twin)

    return tree_map(over, geometry)


def _factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    base: PagedTensor = args[0]
    shard = base._shard
    if func.overloadpacket is torch.ops.aten.new_zeros and not (base._twin and base._twin.blank):
        size = torch.Size(args[1])
        if size == shard.padded_shape and base.shape == shard.shape != size and base._field is Field.MASTER:
            geometry = torch.empty(size, device="meta")
            return PagedTensor.over(shard, base._field, base._entered, base.device, geometry=geometry, twin=_Blank())
    stand_in = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    kwargs = {**kwargs, "device": kwargs.get("device") or base.device}
    made: torch.Tensor = func(stand_in, *args[1:], **kwargs)
    return made


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> Any:
    """Run an in-place operation on ordinary tensors, then store the results."""
    targets = [t for value in written for t in (value if isinstance(value, (list, tuple)) else [value])]
    paged = [t for t in targets if isinstance(t, PagedTensor)]
    if func.overloadpacket is torch.ops.aten.copy_ and len(paged) == 1:
        target, source = args[0], args[1]
        if target._twin is not None and target._twin.blank:
            return _fill_twin(target, source)
        if not target.numel():
            return target
        values = source.materialize() if isinstance(source, PagedTensor) else source
        target.store(values.to(torch.float32).expand(target.shape))
        return target
    stand_ins = {id(t): t.materialize() for t in paged}
    swap = _replacer(lambda t: stand_ins[id(t)] if id(t) in stand_ins else t.materialize())
    result = func(*tree_map(swap, args), **tree_map(swap, kwargs))
    for t in paged:
        t.store(stand_ins[id(t)])
    back = {id(stand_ins[id(t)]): t for t in paged}
    return tree_map(lambda r: back.get(id(r), r), result)


def _fill_twin(target: PagedTensor, source: Any) -> PagedTensor:
    same = isinstance(source, PagedTensor) and source._shard is target._shard and source._field is target._field
    if not same or source._offset != target._offset or source.shape != target.shape:
        raise InfinityError(f"the padded twin of {target._shard.name} can only be filled with its own shard")
    assert target._twin is not None
    target._twin.blank = False
    return target


def _replacer(replace: Callable[[PagedTensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda value: replace(value) if isinstance(value, PagedTensor) else value


def _ordinary(tree: Any) -> Any:
    return tree_map(_replacer(PagedTensor.materialize), tree)
