"""Gradients on their way from the device that computes to the host memory in which they are used.

Started on the thread that reduces them, awaited by the update that needs them; never by anybody in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch

from infinity.device import CopyEvent, Device, HostBuffer, HostBuffers
from infinity.units import align_up

_ALIGN = 64
"""Bytes: each gradient begins where a vector kernel likes it."""


class HostGradient:
    """One gradient (1-D). On a CPU it is used where it lies."""

    def __init__(self, tensor: torch.Tensor, copy_event: CopyEvent | None = None, keeps: object = None) -> None:
        self.numel, self.dtype = tensor.numel(), tensor.dtype
        self._tensor, self._copy_event, self._keeps = tensor, copy_event, keeps

    def wait(self) -> torch.Tensor:
        """Its elements in host memory, once they are there."""
        if self._copy_event is not None:
            self._copy_event.wait()
            self._copy_event = None
        return self._tensor


class _Lent:
    """Keeps a buffer lent for as long as somebody holds this."""

    def __init__(self, buffer: HostBuffer, copy_events: Sequence[CopyEvent]) -> None:
        finalizer = weakref.finalize(self, _end, buffer, copy_events)
        finalizer.atexit = False


class HostGradients:
    """Brings gradients from `device` to the host, one buffer of `host_memory` for all that come together."""

    def __init__(self, device: Device, host_memory: HostBuffers) -> None:
        self._device, self._host_memory = device, host_memory
        self._last: CopyEvent | None = None
        """Of the copy that was started last: all go through one stream, so when it has ended, all have."""

    def start(self, gradients: Sequence[torch.Tensor]) -> list[HostGradient]:
        """Begin to bring gradients (1-D, on the device, as the current stream leaves them) to the host, in this order.

        The caller may forget them at once, and must not change them in place.
        """
        if not self._device.is_discrete or not gradients:
            return [HostGradient(gradient) for gradient in gradients]
        places = [*accumulate((align_up(gradient.nbytes, _ALIGN) for gradient in gradients), initial=0)]
        buffer = self._host_memory.lend(places[-1], torch.uint8)
        copy_events: list[CopyEvent] = []
        lent = _Lent(buffer, copy_events)
        started = []
        for at, gradient in zip(places, gradients, strict=False):
            into = buffer.tensor[at : at + gradient.nbytes].view(gradient.dtype)
            copy_events.append(self._device.start_d2h(gradient, into))
            started.append(HostGradient(into, copy_events[-1], lent))
            self._last = copy_events[-1]
        return started

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory (1-D) for gradients that are fetched into it, for as long as somebody holds the tensor itself."""
        if not self._device.is_discrete:
            return torch.empty(numel, dtype=dtype)
        buffer = self._host_memory.lend(numel, dtype)
        tensor = buffer.tensor.view(-1)
        weakref.finalize(tensor, self._take_memory_back, buffer).atexit = False
        return tensor

    def fetch(self, gradient: torch.Tensor, into: torch.Tensor) -> CopyEvent | None:
        """Begin to bring a gradient to its place in host memory, converted to the dtype of that; the copy event fires
        when it is there (None where it is already), and so does `settle`."""
        if not self._device.is_discrete:
            into.copy_(gradient)
            return None
        self._last = self._device.start_d2h(gradient.to(into.dtype), into)
        return self._last

    def to_device(self, fetched: torch.Tensor) -> torch.Tensor:
        """What came before (1-D, copied) on the device, for what the current stream does from now on; a `fetch` of what that
        makes of it may go to the same place."""
        return self._device.start_h2d(fetched).on_device()

    def settle(self) -> None:
        """Wait until everything that was fetched so far has come."""
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
