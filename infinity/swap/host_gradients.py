"""Floor 4. Gradients on their way from the device that computes to the host memory in which they are used.

Started on the thread that reduces them, awaited by the update that needs them; never by anybody in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from infinity.device import Device, HostBuffer, HostBuffers, Landing
from infinity.units import align_up

_ALIGN = 64
"""Bytes: each gradient begins where a vector kernel likes it."""


class HostGradient:
    """One gradient (1-D). On a CPU it is used where it lies."""

    def __init__(self, tensor: torch.Tensor, landing: Landing | None = None, keeps: object = None) -> None:
        self.numel, self.dtype = tensor.numel(), tensor.dtype
        self._tensor, self._landing, self._keeps = tensor, landing, keeps

    def wait(self) -> torch.Tensor:
        """Its elements in host memory, once they are there."""
        if self._landing is not None:
            self._landing.wait()
            self._landing = None
        return self._tensor


class _Lent:
    """Keeps a buffer lent for as long as somebody holds this."""

    def __init__(self, buffer: HostBuffer, landings: Sequence[Landing]) -> None:
        finalizer = weakref.finalize(self, _end, buffer, landings)
        finalizer.atexit = False


class HostGradients:
    """Brings gradients to the host, one buffer for all that come together.

    device: asked for each time, as a model is paged after its optimizer's manager is made. pin: whether to pin the buffers.
    """

    def __init__(self, device: Callable[[], Device], *, pin: bool) -> None:
        self._device, self._pin = device, pin
        self._buffers: HostBuffers | None = None
        self._last: Landing | None = None
        """Of the copy that was started last: all go through one stream, so when it has landed, all have."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that were made."""
        return self._buffers.nbytes if self._buffers is not None else 0

    @property
    def notes(self) -> list[str]:
        """What the machine refused."""
        return self._buffers.notes if self._buffers is not None else []

    def start(self, gradients: Sequence[torch.Tensor]) -> list[HostGradient]:
        """Begin to bring gradients (1-D, on the device, as the current stream leaves them) to the host, in this order.

        The caller may forget them at once, and must not change them in place.
        """
        device = self._device()
        if not device.copies:
            return [HostGradient(gradient) for gradient in gradients]
        if self._buffers is None:
            self._buffers = HostBuffers(device, pin=self._pin)
        places = [*accumulate((align_up(gradient.nbytes, _ALIGN) for gradient in gradients), initial=0)]
        buffer = self._buffers.lend(places[-1], torch.uint8)
        landings: list[Landing] = []
        lent = _Lent(buffer, landings)
        found = []
        for at, gradient in zip(places, gradients, strict=False):
            into = buffer.tensor[at : at + gradient.nbytes].view(gradient.dtype)
            landings.append(device.start_give(gradient, into))
            found.append(HostGradient(into, landings[-1], lent))
            self._last = landings[-1]
        return found

    def close(self) -> None:
        """No gradient is used any more; what is still on its way is waited for."""
        if self._last is not None:
            self._last.wait()
        if self._buffers is not None:
            self._buffers.close()


def _end(buffer: HostBuffer, landings: Sequence[Landing]) -> None:
    for landing in landings[-1:]:
        landing.wait()
    buffer.give_back()
