"""Offloads activations that autograd saves from their forward to their backward.

Used by the thread that runs forward and backward.

[Note: What moves, and when it is forgotten]
Autograd's saved-tensor hooks show every tensor that a forward saves, and ask for it in the backward, last saved first.
The storage of a tensor moves as a whole if it is large and floating-point, and the forward computed it: queries, keys
and values are views of one storage, and each of them would keep all of it. Parameters stay, because FSDP2 frees and
refills them. So does a part of a storage that needs no gradient, because it may belong to a buffer of the model. A
storage that several operations save moves once and comes back once. When one is fetched, those saved before it are
prefetched.

A tensor is forgotten when autograd drops it: after its backward, or with its graph (an unused loss, an exception).
Python may report this at any time on any thread; the space is freed at the next save, fetch or close.

An exception may interrupt this code at any line. Then `recover` forgets all saved tensors, and a backward of them
raises.

With activation checkpointing a forward saves the inputs of checkpointed blocks, and those move. Tensors that the
recomputation saves do not move, because they are used at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.activations.stores import ActivationStore, ArenaActivationStore, HostActivationStore
from infinity.device import HostBuffers, device_for
from infinity.errors import InfinityError
from infinity.swap import SwapManager


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Settings for offloading saved activations."""

    device: str
    """"none" for no offload; "cpu" for host memory, "nvme" for the model's drives."""
    bytes_min: int
    """Smaller tensors (bytes) stay on the device."""
    host_bytes_max: int | None
    """With "cpu": upper bound of host memory (bytes); None for no bound."""
    pin_memory: bool
    """True if that memory is registered with the GPU."""


def make_activations(
    options: ActivationOptions, swap: SwapManager | None, torch_device: torch.device
) -> tuple[Activations | None, list[str]]:
    """Return the `Activations` for `options`, or None if nothing moves, and notes. "nvme" needs a paged model."""
    if options.device == "none":
        return None, []
    device = swap.paging.device if swap is not None else device_for(torch_device)
    if options.device == "cpu" and not device.is_discrete:
        return None, ['offload_activations to "cpu" has no effect: the model computes on the CPU']
    store: ActivationStore
    if options.device == "nvme":
        assert swap is not None
        store = ArenaActivationStore(*swap.paging.activation_buffers())
    else:
        store = HostActivationStore(
            device, HostBuffers(device, pin=options.pin_memory, bytes_max=options.host_bytes_max)
        )
    return Activations(store, bytes_min=options.bytes_min), []


@dataclass(eq=False)
class _Entry:
    """A storage that was moved. `handles`: number of autograd's references to it; `asked`: those fetched again."""

    number: int
    item: Any
    handles: int = 0
    asked: int = 0
    back: torch.Tensor | None = field(default=None, repr=False)
    """Its bytes (1-D), for further fetches."""
    is_lost: bool = False


@dataclass(frozen=True)
class _Stayed:
    """Autograd's replacement for a saved tensor that stays. torch leaves it to the hooks to compare versions."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise InfinityError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward needs was changed in place after it was "
                "saved: use an operation that is not in place there"
            )
        return self.tensor


class _Handle:
    """Autograd's replacement for a saved tensor: a view of a storage that was moved."""

    def __init__(self, entry: _Entry, tensor: torch.Tensor) -> None:
        self.entry = entry
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def of(self, storage: torch.Tensor) -> torch.Tensor:
        """Return the tensor, given the bytes (1-D) of its storage."""
        whole = storage[: storage.numel() // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        return whole.as_strided(self._shape, self._stride, self._offset)


class Activations:
    """Moves the saved activations of a model: see the note of this file.

    store: where they are kept. bytes_min: smaller storages stay on the device.
    """

    def __init__(self, store: ActivationStore, *, bytes_min: int) -> None:
        self._store = store
        self._bytes_min = bytes_min
        self._entries: dict[int, _Entry] = {}
        """By number, in the order in which they were saved."""
        self._known: dict[tuple[object, ...], tuple[StorageWeakRef, _Entry]] = {}
        self._ended: deque[_Entry] = deque()
        """One entry for each handle that autograd dropped."""
        self._moving = False
        """True while a tensor is being moved, or after an exception interrupted a move."""
        self.moved = 0
        """Number of storages moved since the start; also the number of the next one."""
        self._drive_bytes = (0, 0)
        """The store's drive bytes at the end of the last step."""
        self.step_bytes = (0, 0)
        """Bytes (read, written) on the drives in the last step."""

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Move tensors that are saved inside the block: a forward that a backward follows."""
        self.recover()
        self._forget()
        self._known.clear()  # FSDP2 refills storages, and leaves their versions as they were
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def recover(self) -> None:
        """After an exception ended a pass: forget all saved tensors if it interrupted a move."""
        if not self._moving:
            return
        entries, self._entries = [*self._entries.values()], {}
        self._known.clear()
        for entry in entries:
            entry.back, entry.is_lost = None, True
        self._store.reset([entry.item for entry in entries])
        self._moving = False

    def end_step(self) -> None:
        """End the step: count later moves for the next one."""
        before, self._drive_bytes = self._drive_bytes, self._store.drive_bytes
        self.step_bytes = self._drive_bytes[0] - before[0], self._drive_bytes[1] - before[1]

    def trim(self) -> None:
        """Between steps: give memory back that nothing is kept in."""
        self._forget()
        self._store.trim()

    def close(self) -> None:
        """Forget everything; backward passes of earlier forwards fail."""
        self._forget()
        for entry in self._entries.values():
            self._store.drop(entry.item)
        self._entries.clear()
        self._known.clear()
        self._store.close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Mark a move: any exception in the block, even an asynchronous one, leaves the mark for `recover`."""
        moving, self._moving = self._moving, True
        yield
        self._moving = moving

    def _pack(self, tensor: torch.Tensor) -> _Stayed | _Handle:
        # With its history, a node's own output would keep the graph alive for ever.
        stayed = _Stayed(tensor.detach(), tensor._version)
        if not self._is_worth_it(tensor):
            return stayed
        with self._noting():
            self._forget()
            entry = self._find(tensor) or self._put(tensor)
            if entry is None:
                return stayed
            entry.handles += 1
            handle = _Handle(entry, tensor)
            weakref.finalize(handle, self._ended.append, entry).atexit = False
            return handle

    def _unpack(self, packed: _Stayed | _Handle) -> torch.Tensor:
        if isinstance(packed, _Stayed):
            return packed.unchanged()
        entry = packed.entry
        with self._noting():
            if entry.is_lost:
                raise InfinityError(
                    "the saved activations of this forward are lost, because an exception interrupted another pass "
                    "while activations were being moved: repeat the forward"
                )
            self._forget()
            if entry.back is None:
                entry.back = self._store.fetch(entry.item)
                earlier = (number for number in reversed(self._entries) if number < entry.number)
                self._store.start_fetch(self._entries[number].item for number in earlier)
            tensor = packed.of(entry.back)
            entry.asked += 1
            if entry.asked >= entry.handles:
                entry.back, entry.asked = None, 0
            return tensor

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or not tensor.is_floating_point():
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._bytes_min or isinstance(tensor._base, nn.Parameter):
            return False
        return not tensor.is_leaf if tensor.requires_grad else nbytes == tensor.nbytes

    def _find(self, tensor: torch.Tensor) -> _Entry | None:
        """Return the entry of the same storage if it was saved before, still kept and unchanged; else None."""
        storage, entry = self._known.get(_key(tensor), (None, None))
        if storage is None or storage.expired() or entry is None or entry.number not in self._entries:
            return None
        return entry

    def _put(self, tensor: torch.Tensor) -> _Entry | None:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        item = self._store.try_put(whole)
        if item is None:
            return None
        entry = _Entry(self.moved, item)
        self.moved += 1
        self._entries[entry.number] = entry
        self._known[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), entry
        return entry

    def _forget(self) -> None:
        with self._noting():
            while self._ended:
                entry = self._ended.popleft()
                entry.handles -= 1
                if entry.handles == 0 and self._entries.pop(entry.number, None) is not None:
                    entry.back = None
                    self._store.drop(entry.item)
            if len(self._known) > 2 * len(self._entries) + 64:
                self._known = {
                    key: (storage, entry) for key, (storage, entry) in self._known.items() if not storage.expired()
                }


def _key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what tensors with equal bytes in one storage have in common. Views share the version of their base. Parts
    made by torch's `unsafe_chunk`, as in nn.GRU, have no base and versions of their own."""
    whole = tensor._base if tensor._base is not None else tensor
    return tensor.untyped_storage()._cdata, tensor._version, whole.storage_offset(), whole.numel()
