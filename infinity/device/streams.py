"""A device with its own memory: the order of copies, in terms of streams, events and memory.

Owns one stream per direction and orders all work on them. Streams, events and copies are in cuda.py; tests use a fake
runtime.

[Note: The order of copies]
    H2D            Memory is allocated on the H2D stream. No other stream writes to it, so a copy into it waits for no
                   compute. An event is recorded after the copy. The stream that uses the bytes waits for it and is
                   recorded as a user, so that the memory is not reused for the next copy while it is being read.
    D2H            The D2H stream waits for an event of the stream that computed the bytes, recorded when the copy is
                   started. The source is recorded as used by the D2H stream, so it may be dropped at once.
    host memory    is used only after the event of the copy that reads or writes it has fired. Another copy may use it
                   if its stream runs after that copy: a sum may be written to where its first part was read from.

No code waits for a whole stream or for the device. A dropped copy needs no cleanup: its memory returns to the H2D
stream, which reuses it in order, and its host bytes are free when its copy event has fired.
"""

from __future__ import annotations

import torch

from infinity.aio import PinnedSlab
from infinity.device.cuda import CudaRuntime
from infinity.device.staging import CopyEvent, Device, InFlightCopy


def device_for(torch_device: torch.device) -> Device:
    return StreamDevice(CudaRuntime(torch_device)) if torch_device.type == "cuda" else Device()


class StreamCopyEvent(CopyEvent):
    """The copy event of an event in a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _Copied(InFlightCopy):
    """A copy to the device, in flight or done: [Note: The order of copies]."""

    def __init__(self, runtime: CudaRuntime, taken: torch.Tensor, event: torch.cuda.Event) -> None:
        super().__init__(taken, StreamCopyEvent(event))
        self._runtime, self._event = runtime, event

    def on_device(self) -> torch.Tensor:
        user = self._runtime.current_stream()
        user.wait_event(self._event)
        self._runtime.note_use(self._taken, user)
        return self._taken


class StreamDevice(Device):
    """Copies while the device computes; asynchronous if the host memory is pinned."""

    is_discrete = True

    def __init__(self, runtime: CudaRuntime) -> None:
        self.torch_device = runtime.torch_device
        self._runtime = runtime
        self._h2d = runtime.new_stream()
        self._d2h = runtime.new_stream()

    @property
    def numa_node(self) -> int | None:
        return self._runtime.numa_node

    def register(self, slab: PinnedSlab) -> str | None:
        return self._runtime.pin(slab)

    def unregister(self, slab: PinnedSlab) -> None:
        for stream in (self._h2d, self._d2h):  # an exception may have come between the start of a copy and its event
            stream.record_event().synchronize()
        self._runtime.unpin(slab)

    def start_h2d(self, staged: torch.Tensor) -> InFlightCopy:
        taken = self._runtime.empty(staged.numel(), staged.dtype, self._h2d)
        self._runtime.start_copy(taken, staged, self._h2d)
        return _Copied(self._runtime, taken, self._h2d.record_event())

    def copy_event(self) -> CopyEvent:
        return StreamCopyEvent(self._h2d.record_event())

    def start_d2h(self, source: torch.Tensor, into: torch.Tensor) -> CopyEvent:
        self._d2h.wait_event(self._runtime.current_stream().record_event())
        self._runtime.start_copy(into, source, self._d2h)
        self._runtime.note_use(source, self._d2h)
        return StreamCopyEvent(self._d2h.record_event())
