"""Floor 4. Reads of files into a device's memory, past host memory: what whoever does them promises, and kvikio, which does.

GPUDirect Storage by way of kvikio, where that is installed. A read is work of a stream. Called by the training thread.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.errors import IoError

_DRIVER = Path("/proc/driver/nvidia-fs/version")


class DirectRead(Protocol):
    """One read, in its place in a stream. Somebody holds it until the stream has passed that."""

    nbytes: int

    def check(self) -> None:
        """Once the stream has passed it: raise IoError, every time, where it failed or found less than was asked for."""


class DirectReader(Protocol):
    """Reads a few files that somebody else keeps open."""

    def start(self, file: int, offset: int, into: torch.Tensor, stream: Any) -> DirectRead:
        """Have `stream` read file number `file` from byte `offset` on until `into` (1-D, uint8, on the device) is full.

        Does not wait for anything that the device does. What fails is raised by the read's `check`.
        """

    def close(self) -> None:
        """Let go of the files. Every stream has passed what it had to read."""


class KvikioReader:
    """See `DirectReader`; the streams are torch's. kvikio's `pread` is not used, as it waits for the default stream.

    `descriptors`: of the files, which are opened once more through /proc, as they may have no name. Raises IoError where one
    can't be opened so that nothing of it goes through host memory.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        self._files: list[Any] = []
        for descriptor in descriptors:
            path = f"/proc/self/fd/{descriptor}"
            try:
                with defaults.set({"compat_mode": kvikio.CompatMode.OFF}):
                    self._files.append(kvikio.CuFile(path, "r"))
            except Exception as error:  # of several kinds, from C++
                self.close()
                raise IoError(f"cuFile can't open {path}: {error}", operation="open", path=path) from None

    def start(self, file: int, offset: int, into: torch.Tensor, stream: Any) -> DirectRead:
        return _KvikioRead(self._files[file], offset, into, stream.cuda_stream)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()


class _KvikioRead:
    def __init__(self, file: Any, offset: int, into: torch.Tensor, raw_stream: int) -> None:
        self.nbytes = into.numel()
        self._offset = offset
        self._future: Any = None
        self._failure: str | None = None
        try:
            self._future = file.raw_read_async(into, raw_stream, file_offset=offset)
        except Exception as error:  # of several kinds, from C++
            self._failure = str(error)

    def check(self) -> None:
        if self._future is not None:
            future, self._future = self._future, None
            try:
                found = future.check_bytes_done()
            except Exception as error:
                self._failure = str(error)
            else:
                if found != self.nbytes:
                    self._failure = f"only {found} of {self.nbytes} bytes came"
        if self._failure is not None:
            raise IoError(
                f"read of {self.nbytes} bytes at offset {self._offset} past host memory: {self._failure}",
                operation="read",
                offset=self._offset,
                length=self.nbytes,
                backend="kvikio",
            )


def why_not_direct(torch_device: torch.device) -> str | None:
    """The first thing that keeps files from being read into a device's memory directly, in words; None where nothing does."""
    if torch_device.type != "cuda":
        return "there is no CUDA device that computes"
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    if not _DRIVER.exists():
        return f"the kernel module nvidia-fs is not loaded ({_DRIVER} is missing): kvikio would use host memory, too"
    try:
        driver = importlib.import_module("kvikio.cufile_driver")
        if not driver.get("is_gds_available"):
            return "kvikio says that GPUDirect Storage is not available"
    except Exception as error:  # an ImportError, or whatever comes from C++
        return f"kvikio can't be used ({error})"
    return None
