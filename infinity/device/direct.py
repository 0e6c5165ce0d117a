"""Floor 4. Direct reads: from files into a device's memory, bypassing host memory.

GPUDirect Storage through kvikio, where that is installed. A read is work of a stream. Called by the training thread.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.errors import IoError

_DRIVER = Path("/proc/driver/nvidia-fs/version")


def direct_reader_for(torch_device: torch.device, descriptors: Sequence[int]) -> DirectReader | str:
    """A reader of these files into the memory of `torch_device`; or a message why there is none."""
    why_not = why_not_direct(torch_device)
    if why_not is not None:
        return why_not
    try:
        return DirectReader(descriptors)
    except Exception as error:  # IoError, or an error of another version of kvikio
        return str(error)


class DirectReader:
    """Reads files that its user keeps open. kvikio's `pread` is not used, since it waits for the default stream.

    `descriptors`: of the files, which are reopened through /proc, since they may have no name. Raises IoError where one can't
    be opened for direct reads.
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

    def start(self, file: int, offset: int, into: torch.Tensor, stream: torch.cuda.Stream) -> DirectRead:
        """Have `stream` read file number `file` from byte `offset` on until `into` (1-D, uint8, on the device) is full.

        Does not wait for the device. Failures are raised by the read's `check`.
        """
        return DirectRead(self._files[file], offset, into, stream.cuda_stream)

    def close(self) -> None:
        """Close the files. All streams must have passed their reads."""
        for file in self._files:
            file.close()
        self._files.clear()


class DirectRead:
    """One read in a stream. Its user holds it until the stream has passed it."""

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
        """Call once the stream has passed it. Raises IoError, in every call, where it failed or read too few bytes."""
        if self._future is not None:
            future, self._future = self._future, None
            try:
                nbytes = future.check_bytes_done()
            except Exception as error:
                self._failure = str(error)
            else:
                if nbytes != self.nbytes:
                    self._failure = f"only {nbytes} of {self.nbytes} bytes came"
        if self._failure is not None:
            raise IoError(
                f"read of {self.nbytes} bytes at offset {self._offset} past host memory: {self._failure}",
                operation="read",
                offset=self._offset,
                length=self.nbytes,
                backend="kvikio",
            )


def why_not_direct(torch_device: torch.device) -> str | None:
    """Why files can't be read directly into a device's memory; None where they can."""
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
