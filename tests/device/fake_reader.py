"""Reads past host memory into a device that isn't there (fake.py): as late as the rules allow or, by lot, a little earlier."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import torch
from fake import FakeRuntime, Hazard, span_of

from infinity.device import DirectRead
from infinity.errors import IoError


class FakeReader:
    """See `DirectReader` in infinity/device/direct.py. `fails`: numbers of the reads, from 0, that do."""

    def __init__(self, runtime: FakeRuntime, descriptors: Sequence[int], *, fails: Sequence[int] = ()) -> None:
        self.runtime, self.fails = runtime, fails
        self.files = [os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY) for descriptor in descriptors]
        self.reads: list[FakeRead] = []
        self.lots = random.Random(len(descriptors))

    def start(self, file: int, offset: int, into: torch.Tensor) -> DirectRead:
        self.reads.append(FakeRead(self, self.files[file], offset, into))
        return self.reads[-1]

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        if not all(read.ran for read in self.reads):
            raise Hazard("files are closed while they are read")


class FakeRead:
    """Holds no memory: whoever starts a read has to."""

    def __init__(self, reader: FakeReader, file: int, offset: int, into: torch.Tensor) -> None:
        self.reader, self.file, self.offset, self.nbytes = reader, file, offset, into.numel()
        memory = reader.runtime.start_filling(into)
        self.span = span_of(into)
        self.first = self.span[0] - memory.span[0]
        self.tensor: torch.Tensor | None = None
        self.memory = memory
        self.fails = len(reader.reads) in reader.fails
        self.ran = self.known = False

    def done(self) -> bool:
        if not self.ran and self.reader.lots.random() < 0.3:
            self._run()
        if self.ran:
            self._know()
        return self.ran

    def wait(self) -> None:
        self._run()
        self._know()
        if self.fails:
            raise IoError("the drive has gone")

    def _run(self) -> None:
        if self.ran:
            return
        self.ran = True
        if self.fails:
            return
        with self.reader.runtime.unwatched():
            found = os.pread(self.file, self.nbytes, self.offset)
            into = self.memory.tensor.view(torch.uint8)[self.first : self.first + self.nbytes]
            into.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))

    def _know(self) -> None:
        if not self.known:
            self.known = True
            self.reader.runtime.filling.remove(self.span)
