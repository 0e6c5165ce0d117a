"""Tensors over pinned slabs, and the slab of a tensor. Process-wide; any thread.

Keeps no memory alive: a slab is freed with the last tensor over it, or the last transfer that holds it.
"""

from __future__ import annotations

import threading
import weakref

import torch

from infinity._aio import PinnedSlab

_lock = threading.RLock()  # a slab may be collected, and forgotten, while this thread holds it
_slabs: dict[int, weakref.ref[PinnedSlab]] = {}  # by address


def new_locked_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor of zeros in page-aligned, locked memory, in huge pages where the kernel gives them.

    It is registered with CUDA where there is one. Raises MemoryError where the machine hasn't that much.
    """
    if numel <= 0:
        raise ValueError(f"a locked tensor needs at least one element, got {numel}")
    slab = PinnedSlab(numel * dtype.itemsize, lock=True)
    address = slab.address
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostRegister(address, slab.nbytes, 1)  # refused: copies are synchronous
    with _lock:
        _slabs[address] = weakref.ref(slab, lambda _: _forget(address))
    return torch.frombuffer(slab, dtype=torch.uint8)[: numel * dtype.itemsize].view(dtype)


def free_locked_tensor(tensor: torch.Tensor) -> bool:
    """Forget a tensor of `new_locked_tensor`, whose memory is freed with its last view; returns whether it is one."""
    return _forget(tensor.data_ptr())


def slab_of(tensor: torch.Tensor) -> PinnedSlab | None:
    """The slab that holds all bytes between the tensor's first and last element, or None."""
    if tensor.device.type != "cpu":
        return None
    begin = tensor.data_ptr()
    end = begin + _span_bytes(tensor)
    with _lock:
        for address, reference in _slabs.items():
            if address <= begin and (slab := reference()) is not None and end <= address + slab.nbytes:
                return slab
    return None


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _forget(address: int) -> bool:
    with _lock:
        is_ours = _slabs.pop(address, None) is not None
    if is_ours and torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address)
    return is_ours
