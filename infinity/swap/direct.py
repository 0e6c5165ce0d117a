"""Floor 4. Chunks that go from the drives to the device past host memory: see [Note: Past host memory] in paged_model.py.

Holds what is under way, whoever wanted that and doesn't any more. Training thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from infinity.device import Device, DirectRead, DirectReader, Incoming
from infinity.errors import IoError
from infinity.store import Arena
from infinity.swap.chunk import Chunk
from infinity.swap.stager import Stager


class DirectReads:
    """From one arena to one device. Owns the reader.

    stager: of the same arena; it knows what is still to be written, and what counts as waiting.
    """

    def __init__(self, reader: DirectReader, arena: Arena, device: Device, stager: Stager) -> None:
        self._reader, self._arena, self._device, self._stager = reader, arena, device, stager
        self._under_way: list[Incoming] = []
        self.read_bytes = 0

    def start(self, chunk: Chunk, dtype: torch.dtype) -> Incoming:
        """Begin to read all that the chunk reads into device memory, as it would lie in a lease, for elements of `dtype`.

        The arena must hold it: `Stager.let_be_read`. What fails is raised when it is handed over.
        """

        def fill(into: torch.Tensor, stream: Any) -> Sequence[DirectRead]:
            reads = []
            to_fill = into.view(torch.uint8)
            for span in chunk.reads:
                at = span.lease_offset
                for file, offset, nbytes in self._arena.pieces(span.offset, span.nbytes):
                    reads.append(self._reader.start(file, offset, to_fill[at : at + nbytes], stream))
                    at += nbytes
                self.read_bytes += span.nbytes
            return reads

        incoming = self._device.start_filling(chunk.lease_bytes // dtype.itemsize, dtype, fill)
        self.let_go()
        self._under_way.append(incoming)
        return _Coming(self, incoming, chunk.name)

    def let_go(self) -> None:
        """Of what has come."""
        self._under_way = [incoming for incoming in self._under_way if not incoming.landing.done()]

    def waiting(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A block in which the training thread waits for a read."""
        return self._stager.stalling(f"the read of {name} past host memory")

    def close(self) -> None:
        """Wait for what is under way, which nobody wants any more, and let go of the files."""
        for incoming in self._under_way:
            incoming.landing.wait()
        self._under_way.clear()
        self._reader.close()


class _Coming:
    """Waits for its reads as for any other: the wait is a stall, and what failed has a name."""

    def __init__(self, owner: DirectReads, incoming: Incoming, name: str) -> None:
        self.landing = incoming.landing
        self._owner, self._incoming, self._name = owner, incoming, name

    def hand_over(self) -> torch.Tensor:
        if not self.landing.done():
            with self._owner.waiting(self._name):
                self.landing.wait()
        self._owner.let_go()
        try:
            return self._incoming.hand_over()
        except IoError as error:
            error.concerning(self._name)
            raise
