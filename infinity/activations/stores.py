"""Stores for tensors that are offloaded for a short time, last in first out: host memory, and the arena.

A store owns the bytes of its items until they are dropped. Used by one thread at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any, Protocol

import torch

from infinity.aio import Lease, PoolPart
from infinity.device import CopyEvent, Device, HostBuffer, HostBuffers, InFlightCopy
from infinity.errors import BudgetError, InfinityError
from infinity.schedule.spilling import BUFFER_SHARES, IN_HAND_SHARES
from infinity.store.arena import Arena, Extent, Scratch
from infinity.swap.stager import Chunk, ChunkState, Span, Stager
from infinity.units import align_up, format_bytes

log = logging.getLogger("infinity")


class ActivationStore(Protocol):
    """A store of 1-D tensors of the compute device. Each store has its own kind of items."""

    drive_bytes: tuple[int, int]
    """Bytes (read, written) on drives since the start."""

    def try_put(self, tensor: torch.Tensor) -> Any | None:
        """Store a tensor as the current stream leaves it; the caller may drop it. Returns None if there is no room.

        Raises StoreError without space on the drives, IoError if a transfer failed.
        """

    def start_fetch(self, items: Iterable[Any]) -> None:
        """Start fetching the items needed next, soonest first, as far as the store has room."""

    def fetch(self, item: Any) -> torch.Tensor:
        """Return the tensor on the device; may be repeated. Raises IoError, or InfinityError if it was lost."""

    def drop(self, item: Any) -> None:
        """Forget the item."""

    def reset(self, items: Iterable[Any]) -> None:
        """Forget everything, `items` included, after an exception."""

    def trim(self) -> None:
        """Between steps: moves everything out of memory that may be elsewhere, and gives idle memory back. Raises IoError."""

    def close(self) -> None:
        """Free the store; every item was dropped."""


@dataclass(eq=False)
class _InHost:
    buffer: HostBuffer
    copy_event: CopyEvent
    """Event of the copy that was started last."""
    in_flight: InFlightCopy | None = None
    """The copy back, from its start until `fetch`."""


class HostActivationStore:
    """Host memory up to a bound. Owns `host_memory`."""

    def __init__(self, device: Device, host_memory: HostBuffers) -> None:
        self._device, self._host_memory = device, host_memory
        self.drive_bytes = 0, 0
        self._told = False

    def try_put(self, tensor: torch.Tensor) -> _InHost | None:
        buffer = self._host_memory.try_lend(tensor.numel(), tensor.dtype)
        if buffer is None:
            if not self._told:
                self._told = True
                size = format_bytes(self._host_memory.bytes_max or 0)
                log.info("saved activations fill their %s of host memory: further ones stay on the device", size)
            return None
        return _InHost(buffer, self._device.start_d2h(tensor, buffer.tensor))

    def start_fetch(self, items: Iterable[_InHost]) -> None:
        for item in islice(items, 1):  # a fetched item takes device memory
            self._start(item)

    def fetch(self, item: _InHost) -> torch.Tensor:
        self._start(item)
        assert item.in_flight is not None
        tensor, item.in_flight = item.in_flight.on_device(), None
        return tensor if self._device.is_discrete else tensor.clone()

    def drop(self, item: _InHost) -> None:
        item.copy_event.wait()
        item.in_flight = None
        item.buffer.give_back()

    def reset(self, items: Iterable[_InHost]) -> None:
        for item in items:
            item.copy_event.wait()
        self._host_memory.reset()

    def trim(self) -> None:
        self._host_memory.trim()

    def close(self) -> None:
        self._host_memory.close()

    def _start(self, item: _InHost) -> None:
        if item.in_flight is None:
            item.copy_event.wait()
            copy = self._device.start_h2d(item.buffer.tensor)
            item.copy_event, item.in_flight = copy.copy_event, copy


@dataclass(eq=False)
class _InArena:
    chunk: Chunk
    extents: list[Extent]
    nbytes: int
    numel: int
    dtype: torch.dtype
    lost: str | None = None

    def lose(self, why: str) -> None:
        self.lost = why


class ArenaActivationStore:
    """The arena, through a part of the pinned pool: items are copied there, written, and read before use.

    A share of the part keeps the newest items, which are needed first and use no drive. Extents are reused: [Note: The
    most that was taken].
    """

    def __init__(self, stager: Stager, part: PoolPart, arena: Arena) -> None:
        self._stager, self._part = stager, part
        self._places = Scratch(arena, "saved activations")
        self._in_hand: dict[_InArena, CopyEvent] = {}
        """Items in their leases and not written yet, oldest first; the device may still copy into or out of them."""
        self._ending: deque[_InArena] = deque()
        """Items dropped while being written."""
        self.drive_bytes = 0, 0
        self._told = False

    def try_put(self, tensor: torch.Tensor) -> _InArena | None:
        nbytes = align_up(tensor.nbytes)
        if nbytes > self._part.nbytes // BUFFER_SHARES:
            if not self._told:
                self._told = True
                log.info(
                    "a saved activation of %s is too large to offload and stays on the device: to offload it, set "
                    "infinity.offload_activations.buffer_bytes to at least %d",
                    format_bytes(nbytes),
                    BUFFER_SHARES * nbytes,
                )
            return None
        self._sweep()
        item = self._item(tensor, nbytes)
        try:
            lease = self._with_room(partial(self._stager.occupy, item.chunk))
            into = lease.view(tensor.dtype, 0, tensor.numel())
            self._in_hand[item] = self._stager.device.start_d2h(tensor, into)
            self._write_early()
        except BaseException:
            self._abandon(item)
            raise
        return item

    def start_fetch(self, items: Iterable[_InArena]) -> None:
        self._stager.reap()
        room = self._part.nbytes - self._part.nbytes // BUFFER_SHARES
        coming = []
        for item in items:
            room -= item.nbytes
            if room < 0:
                break
            if item not in self._in_hand:
                coming.append(item.chunk)
        self._stager.want(coming)

    def fetch(self, item: _InArena) -> torch.Tensor:
        if item in self._in_hand:
            self._in_hand[item].wait()
            assert item.chunk.lease is not None
            tensor, self._in_hand[item] = self._copied(item, item.chunk.lease)
            return tensor
        if item.lost is None:
            self._stager.settle(item.chunk)
        if item.lost is not None:
            raise InfinityError(f"{item.chunk.name} is lost, because its write failed: {item.lost}; repeat the step")
        lease = self._with_room(partial(self._stager.acquire, item.chunk))
        tensor, copy_event = self._copied(item, lease)
        self.drive_bytes = self.drive_bytes[0] + item.nbytes, self.drive_bytes[1]
        self._stager.release(item.chunk, keep=False, copy_event=copy_event)
        return tensor

    def drop(self, item: _InArena) -> None:
        if item in self._in_hand:
            copy_event = self._in_hand.pop(item)
            copy_event.wait()
            self._stager.release(item.chunk, keep=False, copy_event=copy_event)
        self._stager.drop(item.chunk)
        self._ending.append(item)
        self._sweep()

    def reset(self, items: Iterable[_InArena]) -> None:
        for copy_event in self._in_hand.values():
            copy_event.wait()
        self._in_hand.clear()
        self._ending.clear()
        self._stager.recover(())
        self._places.reset()

    def trim(self) -> None:
        while self._in_hand:  # of a forward whose backward is still to come
            self._write_first()
        self._stager.settle_all()
        self.close()

    def close(self) -> None:
        self._stager.drop_all()
        while self._ending:
            self._end(self._ending.popleft())

    def _item(self, tensor: torch.Tensor, nbytes: int) -> _InArena:
        while self._ending and nbytes > self._places.free_bytes:
            self._end(self._ending.popleft())
        extents = self._places.take(nbytes)
        starts = accumulate((extent.nbytes for extent in extents), initial=0)
        spans = tuple(Span(extent.offset, start, extent.nbytes) for extent, start in zip(extents, starts, strict=False))
        chunk = Chunk(f"saved activation of {format_bytes(tensor.nbytes)}", nbytes, spans, spans)
        item = _InArena(chunk, extents, nbytes, tensor.numel(), tensor.dtype)
        chunk.on_lost = item.lose
        return item

    def _copied(self, item: _InArena, lease: Lease) -> tuple[torch.Tensor, CopyEvent]:
        in_flight = self._stager.device.start_h2d(lease.view(item.dtype, 0, item.numel))
        tensor = in_flight.on_device()
        return tensor if self._stager.device.is_discrete else tensor.clone(), in_flight.copy_event

    def _with_room(self, take: Callable[[], Lease]) -> Lease:
        """Return a lease; if there is no room, write items in hand first, the oldest first."""
        while True:
            try:
                return take()
            except BudgetError:
                if not self._in_hand:
                    raise
                self._write_first()

    def _write_early(self) -> None:
        """Write the oldest items whose copy has ended, as long as more is in hand than its share."""
        while sum(item.nbytes for item in self._in_hand) > self._part.nbytes // IN_HAND_SHARES:
            if not next(iter(self._in_hand.values())).done():
                break
            self._write_first()
            self._stager.reap()

    def _write_first(self) -> None:
        item = next(iter(self._in_hand))
        self._in_hand.pop(item).wait()
        self.drive_bytes = self.drive_bytes[0], self.drive_bytes[1] + item.nbytes
        self._stager.write_back(item.chunk)

    def _sweep(self) -> None:
        """Free the extents of dropped items whose writes have ended."""
        for _ in range(len(self._ending)):
            item = self._ending.popleft()
            if item.chunk.state is ChunkState.WRITING and not all(t.done for t in item.chunk.transfers):
                self._ending.append(item)
            else:
                self._end(item)

    def _abandon(self, item: _InArena) -> None:
        """Undo a failed `try_put`: no caller will drop the item."""
        if item in self._in_hand:
            self.drop(item)
            return
        if item.chunk.state is ChunkState.IN_USE:
            self._stager.release(item.chunk, keep=False)
        self._ending.append(item)

    def _end(self, item: _InArena) -> None:
        """Wait for the item's write, then free its extents."""
        try:
            self._stager.settle(item.chunk)
        except OSError as error:
            log.warning("the write of a discarded saved activation failed: %s", str(error))
        except BaseException:
            self._ending.append(item)
            raise
        self._places.give_back(item.extents)
