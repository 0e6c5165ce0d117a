"""Floor 4. A device with memory of its own: which copy waits for what, in terms of streams, events and memory.

Owns one stream for each direction and decides the order of everything on them; how a stream, an event or a copy is made is the
runtime's matter (cuda.py; a fake in the tests, which holds this file to its promises).

[Note: The order of copies]
    to the device      memory is made on the inward stream, which nobody else writes to, so a copy into it waits for nothing
                       that computes. Its event is recorded behind it; the stream that uses the bytes waits for that event, and
                       is noted as a user, so that the memory is not given to the next copy while it is still read.
    to the host        the outward stream waits for an event of the stream that computed the bytes, recorded when the copy is
                       asked for; the source is noted as used by the outward stream, so it may be forgotten at once.
    past host memory   reads of a drive into memory of the device are work of the inward stream, too. The host waits for the
                       event behind them before it hands the memory over: only then is it known whether they went well.
    host memory        is touched only after the copy event of the copy that reads or writes it has fired; by another copy also
                       where its stream comes after that one: a sum may go back to where its first part was taken from.

Nobody waits for a whole stream, or for the device. A copy that is dropped before it was asked for needs no care: its memory
goes back to the inward stream, which reuses it in its own order; the host bytes are free when its copy event has fired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from infinity.aio import PinnedSlab
from infinity.device.direct import DirectRead
from infinity.device.staging import CopyEvent, Fill, InFlightCopy


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it; never blocks."""

    def synchronize(self) -> None:
        """Block until it has."""


class Stream(Protocol):
    """Work that the device does in order."""

    def record_event(self) -> Event:
        """The point behind all work so far."""

    def wait_event(self, event: Event) -> None:
        """Work from now on begins only when the event's stream has passed it."""


class Runtime(Protocol):
    """What a kind of device offers."""

    torch_device: torch.device

    @property
    def numa_node(self) -> int | None:
        """That of the host memory which is nearest; None where nobody says."""

    def pin(self, slab: PinnedSlab) -> str | None:
        """Register a slab with the copy engine; in words why that was refused, or None."""

    def unpin(self, slab: PinnedSlab) -> None:
        """Undo `pin`; nothing to do for a slab that was not pinned."""

    def new_stream(self) -> Stream:
        """A stream beside all others."""

    def current_stream(self) -> Stream:
        """The stream of whoever asks."""

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Device memory (1-D), made on `stream`: when it is freed, later work of that stream may reuse it, and no other before
        that work is done."""

    def start_copy(self, into: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy on `stream`; returns before the copy has run where the host memory is pinned."""

    def note_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`stream` uses the tensor's memory too, as far as its work reaches when the tensor is freed."""


class StreamCopyEvent:
    """A copy event that an event tells."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _Copied:
    """On its way, or there: [Note: The order of copies]."""

    def __init__(self, runtime: Runtime, taken: torch.Tensor, event: Event) -> None:
        self.copy_event: CopyEvent = StreamCopyEvent(event)
        self._runtime, self._taken, self._event = runtime, taken, event

    def on_device(self) -> torch.Tensor:
        user = self._runtime.current_stream()
        user.wait_event(self._event)
        self._runtime.note_use(self._taken, user)
        return self._taken


class _Filled:
    """Being filled by reads, or full."""

    def __init__(self, copied: _Copied, reads: Sequence[DirectRead]) -> None:
        self.copy_event = copied.copy_event
        self._copied, self._reads = copied, reads

    def on_device(self) -> torch.Tensor:
        self.copy_event.wait()
        for read in self._reads:
            read.check()
        return self._copied.on_device()


class StreamDevice:
    """Copies beside what is computed, asynchronously where the host memory could be pinned."""

    is_discrete = True

    def __init__(self, runtime: Runtime) -> None:
        self.torch_device = runtime.torch_device
        self._runtime = runtime
        self._inward = runtime.new_stream()
        self._outward = runtime.new_stream()

    @property
    def numa_node(self) -> int | None:
        return self._runtime.numa_node

    def register(self, slab: PinnedSlab) -> str | None:
        return self._runtime.pin(slab)

    def unregister(self, slab: PinnedSlab) -> None:
        self._runtime.unpin(slab)

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        taken = self._runtime.empty(staged.numel(), staged.dtype, self._inward)
        self._runtime.start_copy(taken, staged, self._inward)
        return _Copied(self._runtime, taken, self._inward.record_event())

    def start_filling(self, numel: int, dtype: torch.dtype, fill: Fill) -> InFlightCopy:
        filled = self._runtime.empty(numel, dtype, self._inward)
        reads = fill(filled, self._inward)
        return _Filled(_Copied(self._runtime, filled, self._inward.record_event()), reads)

    def copy_event(self) -> CopyEvent:
        return StreamCopyEvent(self._inward.record_event())

    def start_d2h(self, found: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        self._outward.wait_event(self._runtime.current_stream().record_event())
        self._runtime.start_copy(into, found, self._outward)
        self._runtime.note_use(found, self._outward)
        return StreamCopyEvent(self._outward.record_event())
