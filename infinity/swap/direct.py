"""Floor 8. Chunks that go from the drives to the device past host memory: see [Note: Past host memory] in parameter_lap.py.

Holds what is under way, whoever wanted that and doesn't any more. Training thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from infinity.device import Device, DirectRead, DirectReader, InFlightCopy
from infinity.errors import IoError
from infinity.store.arena import Arena
from infinity.swap.chunk import Chunk
from infinity.swap.stager import Stager


class DirectReads:
    """From one arena to one device. Owns the reader.

    stager: of the same arena; it knows what is still to be written, and what counts as waiting.
    """

    def __init__(self, reader: DirectReader, arena: Arena, device: Device, stager: Stager) -> None:
        self._reader, self._arena, self._device, self._stager = reader, arena, device, stager
        self._under_way: list[InFlightCopy] = []
        self.read_bytes = 0

    def start(self, chunk: Chunk) -> InFlightCopy:
        """Begin to read all that the chunk reads into device memory (bytes), as it would lie in a lease.

        The arena must hold it: `Stager.let_be_read`. What fails is raised when it is asked for.
        """

        def fill(into: torch.Tensor, stream: Any) -> Sequence[DirectRead]:
            reads = []
            for span in chunk.reads:
                at = span.lease_offset
                for file, offset, nbytes in self._arena.pieces(span.offset, span.nbytes):
                    reads.append(self._reader.start(file, offset, into[at : at + nbytes], stream))
                    at += nbytes
                self.read_bytes += span.nbytes
            return reads

        in_flight = self._device.start_filling(chunk.lease_bytes, torch.uint8, fill)
        self.drop_in_flight()
        self._under_way.append(in_flight)
        return _Coming(self, in_flight, chunk.name)

    def drop_in_flight(self) -> None:
        """Of what has come."""
        self._under_way = [in_flight for in_flight in self._under_way if not in_flight.copy_event.done()]

    def waiting(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A block in which the training thread waits for a read."""
        return self._stager.stalling(f"the read of {name} past host memory")

    def close(self) -> None:
        """Wait for what is under way, which nobody wants any more, and let go of the files."""
        for in_flight in self._under_way:
            in_flight.copy_event.wait()
        self._under_way.clear()
        self._reader.close()


class _Coming:
    """Waits for its reads as for any other: the wait is a stall, and what failed has a name."""

    def __init__(self, owner: DirectReads, in_flight: InFlightCopy, name: str) -> None:
        self.copy_event = in_flight.copy_event
        self._owner, self._in_flight, self._name = owner, in_flight, name

    def on_device(self) -> torch.Tensor:
        if not self.copy_event.done():
            with self._owner.waiting(self._name):
                self.copy_event.wait()
        self._owner.drop_in_flight()
        try:
            return self._in_flight.on_device()
        except IoError as error:
            error.concerning(self._name)
            raise
