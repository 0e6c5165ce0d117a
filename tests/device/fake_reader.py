"""Reads past host memory into a device that isn't there (fake.py): in their place in a stream, as late as that comes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch
from fake import FakeRuntime, FakeStream, Hazard

from infinity.errors import IoError


class FakeReader:
    """See `DirectReader` in infinity/device/direct.py. `fails`: numbers of the reads, from 0, that do."""

    def __init__(self, runtime: FakeRuntime, descriptors: Sequence[int], *, fails: Sequence[int] = ()) -> None:
        self.runtime, self.fails = runtime, fails
        self.files = [os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY) for descriptor in descriptors]
        self.asked: list[tuple[int, int]] = []
        """(file, bytes) of each read so far."""
        self.under_way = self.checked = 0

    def start(self, file: int, offset: int, into: torch.Tensor, stream: FakeStream) -> FakeRead:
        read = FakeRead(self, self.files[file], offset, into.numel(), fails=len(self.asked) in self.fails)
        self.asked.append((file, into.numel()))
        self.under_way += 1
        holder = weakref.ref(read)

        def fill(memory: torch.Tensor) -> None:
            held = holder()
            if held is None:
                raise Hazard("a read runs that nobody holds")
            held.run(memory)

        self.runtime.start_read(into, fill, stream)
        return read

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        if self.under_way:
            raise Hazard("files are closed while they are read")


class FakeRead:
    """Holds no memory: the stream does."""

    def __init__(self, reader: FakeReader, file: int, offset: int, nbytes: int, *, fails: bool) -> None:
        self.reader, self.file, self.offset, self.nbytes, self.fails = reader, file, offset, nbytes, fails
        self.ran = False

    def run(self, into: torch.Tensor) -> None:
        self.ran = True
        self.reader.under_way -= 1
        if not self.fails:
            found = bytearray(os.pread(self.file, self.nbytes, self.offset))
            into.copy_(torch.frombuffer(found, dtype=torch.uint8))

    def check(self) -> None:
        if not self.ran:
            raise Hazard("the outcome of a read is looked at before it is known")
        self.reader.checked += 1
        if self.fails:
            raise IoError("the drive has gone")
