"""Floor 4. Chunks that go from the drives to the device past host memory: see [Note: Past host memory] in paged_model.py.

Holds the device's memory while something is read into it, whoever wanted that and doesn't any more. Training thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from infinity.device import Device, DirectRead, DirectReader, Incoming, Landing
from infinity.errors import IoError
from infinity.store import Arena
from infinity.swap.chunk import Chunk
from infinity.swap.stager import Stager

log = logging.getLogger("infinity")


class DirectReads:
    """From one arena to one device. Owns the reader.

    stager: of the same arena; it knows what is still to be written, and what counts as waiting.
    """

    def __init__(self, reader: DirectReader, arena: Arena, device: Device, stager: Stager) -> None:
        self._reader, self._arena, self._device, self._stager = reader, arena, device, stager
        self._under_way: list[tuple[torch.Tensor, list[DirectRead]]] = []
        self.read_bytes = 0

    def start(self, chunk: Chunk, dtype: torch.dtype) -> Incoming:
        """Begin to read all that the chunk reads into device memory, as it would lie in a lease, for elements of `dtype`.

        The arena must hold it: `Stager.let_be_read`. What fails is raised when it is handed over.
        """
        self.let_go()
        reads: list[DirectRead] = []

        def fill(into: torch.Tensor) -> Sequence[DirectRead]:
            self._under_way.append((into, reads))
            to_fill = into.view(torch.uint8)
            for span in chunk.reads:
                at = span.lease_offset
                for file, offset, nbytes in self._arena.pieces(span.offset, span.nbytes):
                    reads.append(self._reader.start(file, offset, to_fill[at : at + nbytes]))
                    at += nbytes
                    self.read_bytes += nbytes
            return reads

        numel = chunk.lease_bytes // dtype.itemsize
        return _Coming(self, self._device.start_filling(numel, dtype, fill), reads, chunk.name)

    def let_go(self) -> None:
        """Of the memory that nothing is read into any more."""
        self._under_way = [each for each in self._under_way if not all(read.done() for read in each[1])]

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """A block in which the training thread waits for a read."""
        return self._stager.stalling(f"the read of {name} past host memory")

    def close(self) -> None:
        """Wait for what is under way, which nobody wants any more, and let go of the files."""
        for _, reads in self._under_way:
            for read in reads:
                try:
                    read.wait()
                except IoError as error:
                    log.warning("a read that nobody waits for failed: %s", str(error))
        self._under_way.clear()
        self._reader.close()


class _Coming:
    """Waits for its reads as for any other: the wait is a stall, and what failed has a name."""

    def __init__(self, owner: DirectReads, incoming: Incoming, reads: list[DirectRead], name: str) -> None:
        self.landing: Landing = incoming.landing
        self._owner, self._incoming, self._reads, self._name = owner, incoming, reads, name

    def hand_over(self) -> torch.Tensor:
        come = all(read.done() for read in self._reads)
        try:
            with nullcontext() if come else self._owner.waiting(self._name):
                return self._incoming.hand_over()
        except IoError as error:
            error.concerning(self._name)
            raise
        finally:
            self._owner.let_go()
