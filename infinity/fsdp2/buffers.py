"""Host memory that FSDP2's collectives use again and again, where a CPU computes. Any thread.

[Note: Reused buffers]
Every block that glibc maps for a buffer is cleared page by page when it is first touched, and unmapped when it is dropped. For
200 M parameters the fp32 buffers of a step's reductions are 1.6 GB, 400 000 minor faults: more time than the copies into them.
So they come from here and return when the last tensor over them is gone. No caller has to give one back, and an exception,
at whatever line, can't lend one twice: what it interrupts is garbage.

gloo's own thread lets go of its tensors some time after the collective has returned: milliseconds on an idle machine, more on a
busy one, and the blocks would be late. So a collective works on tensors over the same memory that are not lent. After one that
failed its blocks are never lent again, as gloo may still be writing to them.

Over one rank FSDP2 copies what goes into a reduction to what comes out of it. It is given the same tensor for both, and torch's
copy of a tensor to itself does nothing.
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
    """Have the collectives of the groups of a model take their buffers from one store, which is returned.

    alone: whether the model is sharded over one rank. What the user made of a collective stays. The largest group but
    the root says what may lie idle: the root's buffers are allocated each time if they are larger.
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
    """Host memory that is lent as tensors, and comes back when they and all their views are gone.

    idle_bytes_max: how much may wait to be lent again; what comes back beyond it is freed.
    """

    def __init__(self, idle_bytes_max: int) -> None:
        self.made = 0
        """Blocks that were newly allocated."""
        self._idle_bytes_max = idle_bytes_max
        self._idle: dict[int, torch.Tensor] = {}
        """By id. Blocks come back on any thread, at any line: only what the interpreter does in one piece touches this."""
        self._lent: dict[int, torch.Tensor] = {}
        """By address; as `_idle`."""
        self._abandoned: list[tuple[torch.Tensor, ...]] = []

    @property
    def idle_bytes(self) -> int:
        """Of blocks that wait to be lent again."""
        return sum(block.nbytes for block in [*self._idle.values()])

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor (1-D) of `numel` elements, whatever they are."""
        nbytes = numel * dtype.itemsize
        by_size = sorted(self._idle.values(), key=lambda block: block.nbytes)
        fitting = [block for block in by_size if block.nbytes >= nbytes]
        block = self._idle.pop(id(fitting[0]), None) if fitting else None
        if block is None:
            if by_size and not fitting:
                self._idle.pop(id(by_size[0]), None)  # so that blocks which fit nothing any more leave
            block = torch.empty(nbytes, dtype=torch.uint8)
            self.made += 1
        lent = block.numpy()[:nbytes]  # what torch keeps for as long as there is a tensor over it
        self._lent[block.data_ptr()] = block
        weakref.finalize(lent, self._take_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype) if numel else torch.empty(0, dtype=dtype)

    def collect(
        self, collective: Callable[..., Any], *tensors: torch.Tensor, async_op: bool = False, **others: Any
    ) -> Any:
        """Have a collective work on what was lent. See [Note: Reused buffers]."""
        if async_op:
            return collective(*tensors, async_op=True, **others)
        try:
            return collective(*map(self._unlent, tensors), **others)
        except BaseException:
            self._abandoned.append(tensors)
            raise

    def _unlent(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._lent.get(tensor.untyped_storage().data_ptr())
        if block is None:  # not from here
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
    """See [Note: Reused buffers]."""

    def __init__(self, buffers: ReusedBuffers, *, alone: bool) -> None:
        self._buffers, self._alone = buffers, alone
        self._goes_in: weakref.ref[torch.Tensor] | None = None
        """Over one rank: what was lent for a reduction that has not been given where its result goes."""

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
