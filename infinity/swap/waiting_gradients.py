"""Gradients between the backward and the update: in 16 bits if that is exact, on NVMe if memory doesn't suffice.

Used by the training thread, and by autograd's on its behalf. Those of resident shards are small and stay in `.grad`.

[Note: Gradients in 16 bits]
FSDP2 delivers every reduced gradient in fp32. If it was reduced in bf16, or computed in 16 bits and reduced over one
rank only, 16 bits hold it exactly, and 16 are kept. A second gradient for a parameter before its update (from a model
used twice in a step, or from another micro-batch) makes a sum that needs more bits. So the gradients of its sub-group
are first widened to fp32, and stay in host memory until the update. So the kept gradient is torch's `.grad` bit for
bit.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.aio import Lease
from infinity.device import CopyEvent, Device, HostBuffer, HostBuffers, ReusedMemory
from infinity.optim.kernel import accumulate
from infinity.store.layout import Piece
from infinity.swap.group import PagedGroup
from infinity.swap.paged_model import PagedModel
from infinity.swap.stager import Chunk, Span
from infinity.swap.sub_group import PagedSubGroup
from infinity.swap.timeline import measured
from infinity.units import align_up


@dataclass(eq=False)
class HostGradient:
    """Gradients (1-D) in host memory, complete once `copy_event` has fired; on a CPU where they are. `keeps`: keeps the
    memory lent."""

    tensor: torch.Tensor
    copy_event: CopyEvent | None = None
    keeps: object = None

    def wait(self) -> torch.Tensor:
        """Wait until the elements are in host memory, and return them."""
        if self.copy_event is not None:
            self.copy_event.wait()
            self.copy_event = None
        return self.tensor


class WaitingGradients:
    """Keeps the gradients of the groups that it `takes`, in `dtype`, until their update.

    host_gradients: brings them from the device. takes_all: also take fp32 gradients instead of leaving them in `.grad`.
    """

    def __init__(
        self, paged: PagedModel, host_gradients: HostGradients, dtype: torch.dtype, *, takes_all: bool
    ) -> None:
        self._stager, self._host_gradients = paged.stager, host_gradients
        self._dtype = dtype
        self.takes_all = takes_all or dtype is not torch.float32
        """True if no gradient stays in `.grad`, except those of resident shards."""
        self._spilled = {
            sub: _gradient_chunk(sub, paged) for sub in paged.sub_groups if sub.gradient_extent is not None
        }
        self._spilling = {sub.layout.space for sub in self._spilled}
        """Numbers of the groups with gradients that wait on NVMe."""
        for sub, chunk in self._spilled.items():
            sub.chunk.after += (chunk,)
        self._held: dict[PagedSubGroup, HostGradient] = {}
        self.kept_shards: set[int] = set()
        """Numbers of the shards with a gradient that arrived since the last step and is kept here. Read-only."""
        self._moved = (0, 0)
        """Bytes (read, written) since the last step."""
        self._moved_before: tuple[int, int] | None = None
        """Bytes (read, written) in the last step that moved any."""

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that hold gradients which arrived since the last step."""
        return sum(held.tensor.nbytes for held in self._held.values())

    def takes(self, group: PagedGroup) -> bool:
        """Return True if gradients of the group are kept here instead of by torch."""
        return group.timing.gradients_wait and (self.takes_all or group.index in self._spilling)

    def sums_in_place(self, group: PagedGroup) -> bool:
        """Return True if `take` can add to kept gradients of the group where they are."""
        return not self._host_gradients.device.is_discrete and group.index not in self._spilling

    def take(
        self,
        group: PagedGroup,
        grads: Mapping[int, torch.Tensor],
        *,
        sums: Collection[int] = (),
        in_place: bool = False,
    ) -> None:
        """Keep gradients of a group, by shard number (1-D, on any device; fp32, or 16 bits if these are exact).

        If a shard has a kept gradient already (`kept_shards`), the sum is kept, and the new one, in fp32, becomes the
        sum; with `in_place` it stays as it is (`sums_in_place`). `sums`: shards whose gradient needs fp32, mostly as it is
        a sum already. Raises IoError if a transfer failed; the values are torn if a gradient was lost by it.
        """
        for sub in group.members:
            pieces = [piece for piece in sub.layout.pieces if piece.shard in grads]
            if not pieces:
                continue
            came = [piece.shard for piece in pieces]
            adds = not self.kept_shards.isdisjoint(came)
            dtype = self._dtype if not sums or set(came).isdisjoint(sums) else torch.float32
            if adds or dtype is not self._dtype:
                self._widen(sub)
            with measured(self._stager.timeline, "gradients", sub.chunk.name):
                if sub in self._spilled and sub not in self._held and dtype is self._dtype:
                    self._spill(sub, pieces, grads)
                else:
                    if sub not in self._held:
                        self._held[sub] = HostGradient(self._host_gradients.memory(sub.layout.numel, dtype))
                    held = self._held[sub]
                    if adds:
                        held.wait()  # for the last micro-batch's gradients, not for any of this one
                    held.copy_event = self._put(held.tensor, pieces, grads, in_place=in_place) or held.copy_event
        self.kept_shards.update(grads)

    def held(self, sub: PagedSubGroup) -> torch.Tensor | None:
        """Return the waiting gradients of a sub-group (1-D, read-only); None if they are on NVMe."""
        held = self._held.get(sub)
        return held.tensor if held is not None else None

    def whole(self, group: PagedGroup, shard: int) -> torch.Tensor:
        """Return a copy (1-D) of a shard's gradient, all of which is in host memory."""
        pieces = [(sub, piece) for sub in group.members for piece in sub.layout.pieces if piece.shard == shard]
        return torch.cat([self._held[sub].wait()[at.offset : at.offset + at.numel] for sub, at in pieces])

    def claim(self, sub: PagedSubGroup) -> torch.Tensor | None:
        """Remove and return the kept gradients of a sub-group (1-D), for an update that settles them; None if it will
        find them in its lease."""
        held = self._held.pop(sub, None)
        return held.tensor if held is not None else None

    def staged(self, sub: PagedSubGroup, lease: Lease) -> torch.Tensor:
        """Return the gradients (1-D) that waited on NVMe, from the lease of a sub-group's update."""
        return lease.view(self._dtype, sub.layout.nbytes, sub.layout.numel)

    def forget(self, shards: Collection[int]) -> None:
        """Begin the next step for these shards: drop their gradients."""
        self.kept_shards.difference_update(shards)
        for sub in [*self._held]:
            if self.kept_shards.isdisjoint([piece.shard for piece in sub.layout.pieces]):
                del self._held[sub]
        if any(self._moved):
            self._moved_before, self._moved = self._moved, (0, 0)

    def step_bytes(self, micro_batches: int) -> tuple[int, int]:
        """Return the bytes (read, written) that a backward moves: as in the last step, or for so many micro-batches."""
        if self._moved_before is not None:
            return self._moved_before
        spilled = sum(sub.layout.gradient_bytes for sub in self._spilled)
        return spilled * (micro_batches - 1), spilled * micro_batches

    def _put(
        self,
        memory: torch.Tensor,
        pieces: Sequence[Piece],
        grads: Mapping[int, torch.Tensor],
        *,
        in_place: bool = False,
    ) -> CopyEvent | None:
        """Start to copy gradients to `memory`, added to those already there. The event fires when all have arrived."""
        copy_event = None
        for piece in pieces:
            grad = grads[piece.shard]
            numel = min(piece.numel, grad.numel() - piece.start)  # without the padding
            if numel <= 0:
                continue
            grad = grad[piece.start : piece.start + numel]
            place = memory[piece.offset : piece.offset + numel]
            if piece.shard in self.kept_shards:
                if in_place:
                    accumulate(place, grad)
                    continue
                grad.add_(self._host_gradients.to_device(place))
            copy_event = self._host_gradients.fetch(grad, place)
        return copy_event

    def _spill(self, sub: PagedSubGroup, pieces: Sequence[Piece], grads: Mapping[int, torch.Tensor]) -> None:
        chunk = self._spilled[sub]
        begun = not self.kept_shards.isdisjoint([piece.shard for piece in sub.layout.pieces])
        lease = self._stager.acquire(chunk) if begun else self._stager.occupy(chunk)
        nbytes = sub.layout.gradient_bytes
        self._moved = (self._moved[0] + nbytes * begun, self._moved[1] + nbytes)
        try:
            copy_event = self._put(lease.view(self._dtype, 0, sub.layout.numel), pieces, grads)
        except BaseException:
            self._host_gradients.settle()
            self._stager.release(chunk, keep=False)
            raise
        self._stager.write_back(chunk, copy_event=copy_event)

    def _widen(self, sub: PagedSubGroup) -> None:
        """Convert a sub-group's 16-bit gradients to fp32 in host memory: see [Note: Gradients in 16 bits]."""
        held = self._held.get(sub)
        if self._dtype is torch.float32 or (held is not None and held.tensor.dtype is torch.float32):
            return
        if held is not None:
            self._held[sub] = HostGradient(held.wait().float())
            return
        if self.kept_shards.isdisjoint([piece.shard for piece in sub.layout.pieces]):
            return
        chunk = self._spilled[sub]
        lease = self._stager.acquire(chunk)
        try:
            self._held[sub] = HostGradient(lease.view(self._dtype, 0, sub.layout.numel).float())
        finally:
            self._stager.release(chunk, keep=False)


def _gradient_chunk(sub: PagedSubGroup, paged: PagedModel) -> Chunk:
    assert sub.gradient_extent is not None
    nbytes = sub.layout.gradient_bytes
    span = (Span(sub.gradient_extent.offset, 0, nbytes),)
    return Chunk(f"gradient of {sub.chunk.name}", nbytes, span, span, on_lost=paged.health.tear)


_ALIGN = 64
"""Bytes: the alignment of each gradient, for vector kernels."""


class _Lent:
    """Keeps a buffer lent for as long as it is referenced."""

    def __init__(self, buffer: HostBuffer, copy_events: Sequence[CopyEvent]) -> None:
        finalizer = weakref.finalize(self, _end, buffer, copy_events)
        finalizer.atexit = False


class HostGradients:
    """Brings gradients from `device` to the host, with one buffer of `host_memory` for all that start together."""

    def __init__(self, device: Device, host_memory: HostBuffers) -> None:
        self.device, self._host_memory = device, host_memory
        self.reused = ReusedMemory()
        """Host memory of a CPU device, shared with gathered parameters."""
        self._last: CopyEvent | None = None
        """The event of the last copy. All copies use one stream, so when it has ended, all have."""

    def start(self, gradients: Sequence[torch.Tensor]) -> list[HostGradient]:
        """Start to copy gradients (1-D, on the device, as the current stream leaves them) to the host, in this order.

        The caller may drop them at once, and must not change them in place.
        """
        if not self.device.is_discrete or not gradients:
            return [HostGradient(gradient) for gradient in gradients]
        places = [*itertools.accumulate((align_up(gradient.nbytes, _ALIGN) for gradient in gradients), initial=0)]
        buffer = self._host_memory.lend(places[-1], torch.uint8)
        copy_events: list[CopyEvent] = []
        lent = _Lent(buffer, copy_events)
        started = []
        for at, gradient in zip(places, gradients, strict=False):
            into = buffer.tensor[at : at + gradient.nbytes].view(gradient.dtype)
            copy_events.append(self.device.start_d2h(gradient, into))
            started.append(HostGradient(into, copy_events[-1], lent))
            self._last = copy_events[-1]
        return started

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory (1-D) for fetched gradients, until the tensor itself is dropped."""
        if not self.device.is_discrete:
            return self.reused.lend(numel, dtype)
        buffer = self._host_memory.lend(numel, dtype)
        tensor = buffer.tensor.view(-1)
        weakref.finalize(tensor, self._take_memory_back, buffer).atexit = False
        return tensor

    def fetch(self, gradient: torch.Tensor, into: torch.Tensor) -> CopyEvent | None:
        """Start to copy a gradient to its place in host memory, converted to the dtype there. The returned event fires
        when it is there, and `settle` waits for it; None if it is there already."""
        if not self.device.is_discrete:
            into.copy_(gradient)
            return None
        self._last = self.device.start_d2h(gradient.to(into.dtype), into)
        return self._last

    def to_device(self, fetched: torch.Tensor) -> torch.Tensor:
        """Return a fetched gradient (1-D, copied) on the device, for later work of the current stream. The result may
        be fetched to the same place."""
        return self.device.start_h2d(fetched).on_device()

    def settle(self) -> None:
        """Wait until everything fetched so far has arrived."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def _take_memory_back(self, buffer: HostBuffer) -> None:
        self.settle()
        buffer.give_back()


def _end(buffer: HostBuffer, copy_events: Sequence[CopyEvent]) -> None:
    for copy_event in copy_events[-1:]:
        copy_event.wait()
    buffer.give_back()
