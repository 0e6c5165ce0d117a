"""Reused host memory for FSDP2's collectives on a CPU. Any thread.

[Note: Reused buffers]
glibc maps new memory for each large buffer and unmaps it when the buffer is dropped; the kernel clears every page on
first touch. For 200 M parameters the fp32 reduction buffers of a step are 1.6 GB: 400 000 minor faults, more time than
the copies into them. So buffers are lent from here and return by themselves when the last tensor over them is dropped.
An exception at any line cannot cause a double loan, because the interrupted objects are simply garbage.

gloo's thread drops its tensors some time after the collective has returned: milliseconds on an idle machine, longer on
a busy one. To get the blocks back in time, a collective works on unlent tensors over the same memory. After a failed
collective its blocks are never lent again, because gloo may still be writing to them.

On one rank a reduction copies its input to its output. It gets the same tensor for both, and torch then copies nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.fsdp2.private import DefaultAllGather, DefaultReduceScatter
from infinity.fsdp2.sharding import ShardedGroup, param_groups_of


def reuse_buffers(groups: Sequence[ShardedGroup], *, alone: bool) -> ReusedBuffers:
    """Make the collectives of a model's groups take their buffers from one store, and return the store.

    alone: True if the model is sharded over one rank. Collectives that the user replaced are left unchanged. The
    largest group other than the root bounds the idle memory, so larger root buffers are allocated each time.
    """
    nbytes = {group.name: 4 * sum(parameter.shape.numel() for parameter in group.parameters) for group in groups}
    buffers = ReusedBuffers(3 * max(nbytes[name] for name in nbytes if name != "root" or len(nbytes) == 1))
    gather, reduction = _Gather(buffers), _Reduction(buffers, alone=alone)
    for param_group in (p for group in groups for p in param_groups_of(group.module)):
        if type(param_group._all_gather_comm) is DefaultAllGather:
            param_group._all_gather_comm = gather
        if type(param_group._reduce_scatter_comm) is DefaultReduceScatter:
            param_group._reduce_scatter_comm = reduction
    return buffers


class ReusedBuffers:
    """Host memory that is lent as tensors, and returns when the tensor and all its views are dropped.

    idle_bytes_max: upper bound of idle memory; blocks returned beyond it are freed.
    """

    def __init__(self, idle_bytes_max: int) -> None:
        self.made = 0
        """Number of blocks allocated."""
        self._idle_bytes_max = idle_bytes_max
        self._idle: dict[int, torch.Tensor] = {}
        """By id. Blocks return on any thread, at any line, so only atomic operations of the interpreter touch this."""
        self._lent: dict[int, torch.Tensor] = {}
        """By address; same rule as `_idle`."""
        self._abandoned: list[tuple[torch.Tensor, ...]] = []

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle blocks."""
        return sum(block.nbytes for block in [*self._idle.values()])

    def release(self) -> None:
        """Free what waits to be lent again."""
        self._idle.clear()

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor of `numel` elements."""
        nbytes = numel * dtype.itemsize
        by_size = sorted(self._idle.values(), key=lambda block: block.nbytes)
        fitting = [block for block in by_size if block.nbytes >= nbytes]
        block = self._idle.pop(id(fitting[0]), None) if fitting else None
        if block is None:
            if by_size and not fitting:
                self._idle.pop(id(by_size[0]), None)  # so that blocks that no longer fit anything are dropped
            block = torch.empty(nbytes, dtype=torch.uint8)
            self.made += 1
        lent = block.numpy()[:nbytes]  # torch keeps this alive while a tensor over it exists
        self._lent[block.data_ptr()] = block
        weakref.finalize(lent, self._take_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype) if numel else torch.empty(0, dtype=dtype)

    def collect(
        self, collective: Callable[..., Any], *tensors: torch.Tensor, async_op: bool = False, **others: Any
    ) -> Any:
        """Run a collective on lent tensors: [Note: Reused buffers]."""
        if async_op:
            return collective(*tensors, async_op=True, **others)
        try:
            return collective(*map(self._unlent, tensors), **others)
        except BaseException:
            self._abandoned.append(tensors)
            raise

    def _unlent(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._lent.get(tensor.untyped_storage().data_ptr())
        if block is None:  # not lent by this store
            return tensor
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return tensor.new_empty(0).set_(block.untyped_storage(), *place)

    def _take_back(self, block: torch.Tensor) -> None:
        self._lent.pop(block.data_ptr(), None)
        if self.idle_bytes + block.nbytes <= self._idle_bytes_max:
            self._idle[id(block)] = block


class _Gather(DefaultAllGather):
    def __init__(self, buffers: ReusedBuffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._buffers.lend(_numel(size), dtype)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        collective = super().__call__
        return self._buffers.collect(collective, output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduction(DefaultReduceScatter):
    """Reduce-scatter that uses one buffer for input and output on one rank: [Note: Reused buffers]."""

    def __init__(self, buffers: ReusedBuffers, *, alone: bool) -> None:
        self._buffers, self._alone = buffers, alone
        self._goes_in: weakref.ref[torch.Tensor] | None = None
        """On one rank: the input buffer of a reduction whose output is not yet allocated."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel = _numel(size)
        goes_in = self._goes_in() if self._goes_in is not None else None
        self._goes_in = None
        if goes_in is not None and goes_in.dtype == dtype and goes_in.numel() == numel:
            return goes_in
        buffer = self._buffers.lend(numel, dtype)
        if self._alone:
            self._goes_in = weakref.ref(buffer)
        return buffer

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        collective = super().__call__
        return self._buffers.collect(collective, output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def _numel(size: Sequence[int | torch.SymInt]) -> int:
    return math.prod(int(length) for length in size)
