"""Activations that autograd saves, kept elsewhere from their forward to their backward: which ones, and for how long.

`make_activations` chooses the store (stores.py). Runs on the thread that runs forward and backward.

[Note: What moves, and when it is forgotten]
Autograd's saved-tensor hooks show every tensor that a forward saves, and ask for it again in the backward, last saved first. A
tensor moves if it is large, holds floating-point numbers, fills its storage (a view of a part would keep the whole) and is no
parameter (FSDP2 frees and refills those by itself). A tensor that several operations save moves once and comes back once. While
one comes back, those saved before it are prefetched.

A tensor is forgotten when autograd has let go of it: after its backward, or when the graph is dropped without one (a loss that
is thrown away, an exception). Python may tell so at any moment and on any thread, so it is only noted then; the place is given
free the next time that something is saved or asked for, or the engine closes.

An exception may end this code itself, at any line. Then it is unknown what is where: `recover` forgets all that was saved so
far, and a backward that asks for any of it is refused.

With activation checkpointing a forward saves the inputs of what is checkpointed, and those move. What the recomputation in the
backward saves stays where it is, because it is used at once.
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
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.activations.stores import ActivationStore, ArenaActivationStore, HostActivationStore
from infinity.device import HostBuffers, device_for
from infinity.errors import InfinityError
from infinity.swap import SwapManager


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Where what a forward saves is kept until its backward."""

    device: str
    """"none" leaves it where it is; "cpu" is host memory, "nvme" the drives of the model."""
    bytes_min: int
    """Tensors of fewer bytes stay where they are."""
    host_bytes_max: int | None
    """At most so many bytes of host memory, with "cpu". None is no bound."""
    pin_memory: bool
    """Whether that memory is registered with the GPU."""


def make_activations(
    options: ActivationOptions, swap: SwapManager | None, torch_device: torch.device
) -> tuple[Activations | None, list[str]]:
    """What moves saved activations, or None where nothing does; and notes. "nvme" takes a model that `swap` pages."""
    if options.device == "none":
        return None, []
    device = swap.paging.device if swap is not None else device_for(torch_device)
    if options.device == "cpu" and not device.is_discrete:
        return None, ["activations in host memory are where they are anyway: the CPU is the device that computes"]
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
    """A tensor that was moved. `handles`: how many of autograd's saved tensors it stands for; `asked`: how many of these were
    asked for since it came back."""

    number: int
    item: Any
    shape: torch.Size
    stride: tuple[int, ...]
    handles: int = 0
    asked: int = 0
    back: torch.Tensor | None = field(default=None, repr=False)
    """The tensor, for those who still ask."""
    is_lost: bool = False


class _Handle:
    """What autograd holds instead of a tensor."""

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry


class Activations:
    """See the note of this file.

    store: where they are kept. bytes_min: smaller tensors stay where they are.
    """

    def __init__(self, store: ActivationStore, *, bytes_min: int) -> None:
        self._store = store
        self._bytes_min = bytes_min
        self._entries: dict[int, _Entry] = {}
        """By number, ascending: in the order in which they were saved."""
        self._known: dict[tuple[object, ...], tuple[StorageWeakRef, _Entry]] = {}
        self._ended: deque[_Entry] = deque()
        """One for each handle that autograd let go of."""
        self._moving = False
        """Whether something is being put away, or brought back, or was when an exception came."""
        self.moved = 0
        """Tensors that were moved since the start; each has its number of these."""
        self._drive_bytes = (0, 0)
        """As they were at the end of the last step."""
        self.step_bytes = (0, 0)
        """Bytes (read, written) that the last step's took of the drives."""

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward that a backward follows: what is saved in it moves."""
        self.recover()
        self._forget()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def recover(self) -> None:
        """After a pass that an exception ended: where it ended this code too, forget all that was saved."""
        if not self._moving:
            return
        entries, self._entries = [*self._entries.values()], {}
        self._known.clear()
        for entry in entries:
            entry.back, entry.is_lost = None, True
        self._store.reset([entry.item for entry in entries])
        self._moving = False

    def end_step(self) -> None:
        """What moves from now on belongs to the next step."""
        before, self._drive_bytes = self._drive_bytes, self._store.drive_bytes
        self.step_bytes = self._drive_bytes[0] - before[0], self._drive_bytes[1] - before[1]

    def close(self) -> None:
        """Forget everything; backward passes of forwards before this fail."""
        self._forget()
        for entry in self._entries.values():
            self._store.drop(entry.item)
        self._entries.clear()
        self._known.clear()
        self._store.close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Around what moves something: an exception in it, an asynchronous one included, leaves the note for `recover`."""
        moving, self._moving = self._moving, True
        yield
        self._moving = moving

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Handle:
        if not self._is_worth_it(tensor):
            return tensor.detach()  # a node's own output would keep the graph for ever with its history
        with self._noting():
            self._forget()
            entry = self._find(tensor) or self._put(tensor)
            if entry is None:
                return tensor.detach()
            entry.handles += 1
            handle = _Handle(entry)
            weakref.finalize(handle, self._ended.append, entry).atexit = False
            return handle

    def _unpack(self, packed: torch.Tensor | _Handle) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        entry = packed.entry
        with self._noting():
            if entry.is_lost:
                raise InfinityError(
                    "what this forward saved for its backward is lost, since an exception ended another pass while saved "
                    "activations moved: do the forward again"
                )
            self._forget()
            if entry.back is None:
                flat = self._store.fetch(entry.item)
                entry.back = flat.as_strided(entry.shape, entry.stride)
                earlier = (number for number in reversed(self._entries) if number < entry.number)
                self._store.start_fetch(self._entries[number].item for number in earlier)
            tensor = entry.back
            entry.asked += 1
            if entry.asked >= entry.handles:
                entry.back, entry.asked = None, 0
            return tensor

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        nbytes = tensor.numel() * tensor.itemsize
        if type(tensor) is not torch.Tensor or nbytes < self._bytes_min or not tensor.is_floating_point():
            return False
        if isinstance(tensor._base, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return False
        whole = tensor.untyped_storage().nbytes() == nbytes
        return whole and is_non_overlapping_and_dense_or_false(tensor)

    def _find(self, tensor: torch.Tensor) -> _Entry | None:
        """The entry of the same elements, if they were saved before, are still kept, and have not changed since."""
        storage, entry = self._known.get(_key(tensor), (None, None))
        if storage is None or storage.expired() or entry is None or entry.number not in self._entries:
            return None
        return entry

    def _put(self, tensor: torch.Tensor) -> _Entry | None:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), 0)
        item = self._store.try_put(flat)
        if item is None:
            return None
        entry = _Entry(self.moved, item, tensor.shape, tensor.stride())
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
    storage = tensor.untyped_storage()._cdata
    return storage, tensor._version, tensor.dtype, tensor.shape, tensor.stride()
