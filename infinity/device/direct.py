"""Floor 2. Reads of files into a device's memory, past host memory: what whoever does them promises, and kvikio, which does.

GPUDirect Storage by way of kvikio, where that is installed. Called by the training thread; kvikio's threads move the bytes.
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
    """One read on its way."""

    nbytes: int

    def done(self) -> bool:
        """Whether it has ended; never blocks."""

    def wait(self) -> None:
        """Block until it has. Raises IoError, every time, where it failed or found less than was asked for."""


class DirectReader(Protocol):
    """Reads a few files that somebody else keeps open."""

    def start(self, file: int, offset: int, into: torch.Tensor) -> DirectRead:
        """Begin to read file number `file` from byte `offset` on until `into` (1-D, uint8, on the device) is full.

        No stream knows of it: nobody may use that memory from before the call until the read has ended, and somebody has to
        hold it. What fails is raised by the read's `wait`.
        """

    def close(self) -> None:
        """Let go of the files. Every read has ended."""


class KvikioReader:
    """See `DirectReader`.

    Args:
        descriptors: of the files, which are opened once more through /proc, as they may have no name.
        threads: that read at once. One pool serves the whole process; whoever set KVIKIO_NTHREADS has chosen already.
        task_bytes: of each of their reads.

    Raises IoError where a file can't be opened so.
    """

    def __init__(self, descriptors: Sequence[int], *, threads: int, task_bytes: int) -> None:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        defaults.set("num_threads", max(threads, int(defaults.get("num_threads"))))
        self._task_bytes = task_bytes
        self._files: list[Any] = []
        for descriptor in descriptors:
            path = f"/proc/self/fd/{descriptor}"
            try:
                self._files.append(kvikio.CuFile(path, "r"))
            except Exception as error:  # of several kinds, from C++
                self.close()
                raise IoError(f"kvikio can't open {path}: {error}", operation="open", path=path) from None

    def start(self, file: int, offset: int, into: torch.Tensor) -> DirectRead:
        return _KvikioRead(self._files[file], offset, into, self._task_bytes)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()


class _KvikioRead:
    def __init__(self, file: Any, offset: int, into: torch.Tensor, task_bytes: int) -> None:
        self.nbytes = into.numel()
        self._offset = offset
        self._future: Any = None
        self._failure: str | None = None
        try:
            self._future = file.pread(into, file_offset=offset, task_size=task_bytes)
        except Exception as error:  # of several kinds, from C++
            self._failure = str(error)

    def done(self) -> bool:
        return self._future is None or bool(self._future.done())

    def wait(self) -> None:
        if self._future is not None:
            future, self._future = self._future, None
            try:
                found = future.get()  # once only
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
