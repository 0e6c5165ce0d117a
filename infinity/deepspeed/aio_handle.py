"""DeepSpeed's `ops.op_builder`: its I/O handle, on infinity's I/O engine; imports nothing of DeepSpeed.

A handle owns an engine, and the calls that were not waited for. Locked tensors belong to all handles of the process: a slab
is freed with the last tensor over it, or the last transfer that holds it. Any thread may use both; the bytes move on the
engine's threads.

[Note: What goes directly] A call's range of the file is cut at pages of 4096 bytes. The part between the first and the last cut
goes directly: from the tensor's own memory where that is aligned as the drive requires (512 bytes where it says so, else
4096), else through a slab that lives as long as the call. The edges, each shorter than a page, go through the page cache. So
no page of the cache that an edge makes dirty is written back over bytes that another thread, handle or process writes directly
next to it. Edges are moved when the call is waited for, through the file that the call has opened.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from infinity._aio import Engine, File, PinnedSlab, Priority, Transfer
from infinity.deepspeed.refused import refusal_of
from infinity.errors import IoError
from infinity.units import GIB, MIB, PAGE_BYTES, align_up

log = logging.getLogger("infinity")

_RINGS_MAX, _QUEUE_DEPTH_MAX = 64, 4096  # what the engine takes

_slabs: dict[int, weakref.ref[PinnedSlab]] = {}  # of the locked tensors, by address
_slabs_lock = threading.RLock()  # a slab may be collected, and forgotten, while this thread holds it


class AioHandle:
    """Reads files into tensors and writes tensors to files, under the names of DeepSpeed's `aio_handle`.

    Args:
        block_size: bytes per submission; the engine rounds them up to 4 KiB.
        queue_depth: submissions in flight per thread.
        single_submit, overlap_events: stored and reported only; the engine always submits in batches and overlaps.
        intra_op_parallelism: ring threads, among which every call is divided.

    Tensors may be of any dtype, alignment and device; those of `new_cpu_locked_tensor` are moved without a copy. A failed
    transfer raises IoError, with operation and path, at the call that waits for it.
    """

    def __init__(
        self,
        block_size: int = MIB,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if min(block_size, queue_depth, intra_op_parallelism) < 1:
            raise ValueError(
                "block_size, queue_depth and intra_op_parallelism must be positive, got "
                f"{block_size}, {queue_depth}, {intra_op_parallelism}"
            )
        self._block_size = block_size
        self._queue_depth = queue_depth
        self._single_submit = single_submit
        self._overlap_events = overlap_events
        self._parallelism = intra_op_parallelism
        self._lock = threading.Lock()  # of _pending
        self._pending: list[_Call] = []
        self._engine = Engine(
            block_bytes=min(align_up(block_size), GIB),
            queue_depth=min(queue_depth, _QUEUE_DEPTH_MAX),
            rings=min(intra_op_parallelism, _RINGS_MAX),
        )

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._parallelism

    def get_alignment(self) -> int:
        """Bytes that callers round their pieces to: 512 per thread, as in DeepSpeed. Other pieces work as well."""
        return 512 * self._parallelism

    def async_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Start to read `buffer`'s bytes from `file_offset` of the file; returns 0. `buffer` is filled when `wait` returns."""
        return self._start("read", buffer, os.fspath(filename), file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | os.PathLike[str] | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Start to write `buffer` to `file_offset` of the file (a path, created if needed, or an open file); returns 0."""
        target = fd if filename is None else filename
        if target is None:
            raise TypeError("async_pwrite needs a filename or an fd")
        path = f"/proc/self/fd/{target}" if isinstance(target, int) else os.fspath(target)
        return self._start("write", buffer, path, file_offset)

    def wait(self) -> int:
        """Wait for all calls since the last wait; returns their number. Raises the first IoError after all have ended."""
        calls: list[_Call] = []
        try:
            with self._lock:
                calls, self._pending = self._pending, []
            failures = [failure for call in calls if (failure := call.wait_direct()) is not None]
            for call in calls:
                try:
                    call.finish()
                except Exception as failure:
                    failures.append(failure)
        except BaseException:  # Ctrl-C: the next wait is for them, too
            with self._lock:
                self._pending[:0] = calls
            raise
        if failures:
            raise failures[0]
        return len(calls)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str | os.PathLike[str],
        validate: bool,
        *asynchronous: Any,
        **keywords: Any,
    ) -> int:
        """`pread(buffer, filename, validate, async, file_offset=0)`: returns 0 where `async`, else as `wait`.

        `validate`: read the file again through the page cache and compare; a difference raises IoError.
        """
        is_async, file_offset = _async_and_offset(*asynchronous, **keywords)
        self._start("read", buffer, os.fspath(filename), file_offset, validate)
        return 0 if is_async else self.wait()

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | os.PathLike[str],
        validate: bool,
        *asynchronous: Any,
        **keywords: Any,
    ) -> int:
        """`pwrite(buffer, filename, validate, async, file_offset=0)`; as `pread`."""
        is_async, file_offset = _async_and_offset(*asynchronous, **keywords)
        self._start("write", buffer, os.fspath(filename), file_offset, validate)
        return 0 if is_async else self.wait()

    def sync_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Read, and wait for this and all earlier calls; returns their number."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write, and wait for this and all earlier calls; returns their number."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def read(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool = False, file_offset: int = 0
    ) -> int:
        """Read, and wait for this and all earlier calls; returns 0."""
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool = False, file_offset: int = 0
    ) -> int:
        """Write, and wait for this and all earlier calls; returns 0."""
        self.pwrite(buffer, filename, validate, False, file_offset)
        return 0

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D tensor of `num_elem` zeros of the example's dtype, from which transfers go without a copy.

        It is page-aligned and locked, in huge pages if the kernel gives them, and registered with CUDA if there is one. Raises
        MemoryError where the machine hasn't that much.
        """
        if num_elem <= 0:
            raise ValueError(f"a locked tensor needs at least one element, got {num_elem}")
        nbytes = num_elem * example_tensor.element_size()
        slab = PinnedSlab(nbytes, lock=True)
        address = slab.address
        if torch.cuda.is_available():
            torch.cuda.cudart().cudaHostRegister(address, slab.nbytes, 1)  # refused: copies are synchronous
        with _slabs_lock:
            _slabs[address] = weakref.ref(slab, lambda _: _forget_slab(address))
        return torch.frombuffer(slab, dtype=torch.uint8)[:nbytes].view(example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free a tensor of `new_cpu_locked_tensor`, of any handle, with its last view; returns whether it is one."""
        return _forget_slab(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether transfers with it need no copy: a view of any handle's locked tensor, or pinned by torch."""
        return _slab_of(buffer) is not None or bool(buffer.is_pinned())

    def _start(self, operation: str, buffer: torch.Tensor, path: str, offset: int, validate: bool = False) -> int:
        call = _Call(self._engine, operation, buffer, path, offset, validate)
        with self._lock:
            self._pending.append(call)
        return 0

    def __del__(self) -> None:
        """Wait for calls without a `wait`, and log a failure."""
        try:
            if getattr(self, "_pending", None):
                self.wait()
        except OSError as failure:
            log.warning("a call without a wait() failed: %s", failure)


class AsyncIOBuilder:
    """DeepSpeed's builder of the handle, which needs no compiler here."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> SimpleNamespace:
        return SimpleNamespace(aio_handle=AioHandle)


def __getattr__(name: str) -> Any:
    raise refusal_of(f"infinity.ops.op_builder.{name}") or AttributeError(f"infinity.ops.op_builder has no {name}")


class _Call:
    """One read or write of a tensor: its direct part is in flight, its edges are moved in `finish`."""

    def __init__(
        self, engine: Engine, operation: str, buffer: torch.Tensor, path: str, offset: int, validate: bool
    ) -> None:
        self._operation, self._reads = operation, operation == "read"
        self._buffer = buffer  # the caller may drop it before it waits
        self._path, self._offset, self._validate = path, offset, validate
        self._nbytes = buffer.numel() * buffer.element_size()
        if offset < 0 or self._nbytes == 0:
            raise ValueError(f"{operation} of {self._nbytes} bytes at offset {offset} of {path}: nothing to move")
        self._transfer: Transfer | None = None
        self._file = self._open()
        cut = PAGE_BYTES if self._file.direct else 1
        self._begin = min(align_up(offset, cut), offset + self._nbytes)  # of the direct part
        self._end = max((offset + self._nbytes) // cut * cut, self._begin)
        slab, slab_offset = self._choose_memory(self._file.alignment)
        if not self._reads and not self._in_tensor:
            self._bytes.copy_(_bytes_of(buffer.cpu().contiguous()))
        if self._begin < self._end:
            priority = Priority.PREFETCH if self._reads else Priority.WRITE_BACK
            request = operation, self._file, self._begin, slab, slab_offset, self._end - self._begin, priority
            [self._transfer] = engine.start_batch([request])
        if self._end - self._begin == self._nbytes and not validate:
            self._file.close()  # no descriptor is kept that `finish` doesn't need

    def wait_direct(self) -> Exception | None:
        """Wait for the direct part; returns its error, if any."""
        try:
            if self._transfer is not None:
                self._transfer.wait()
        except OSError as failure:
            return failure
        return None

    def finish(self) -> None:
        """Once all direct parts are done: move the edges, validate if requested, fill the tensor. Raises IoError."""
        try:
            self._move_edges()
            if self._validate:
                self._check_stored()
        except IoError:
            raise
        except OSError as error:
            raise self._failure(error.errno or errno.EIO, error.strerror or str(error)) from error
        if self._reads and not self._in_tensor:
            _copy_bytes(self._buffer, self._bytes)

    def _open(self) -> File:
        """Open the file: to read from one that has the bytes, or to write to one that has room for them."""
        end = self._offset + self._nbytes
        if self._reads:
            file = File(self._path, fine_alignment=True, read_only=True)
            if file.size_bytes < end:
                raise self._failure(errno.ENODATA, f"the file has only {file.size_bytes} bytes")
            return file
        try:
            file = File(self._path, fine_alignment=True)
        except IoError as error:
            if error.errno != errno.ENOENT:
                raise
            file = self._create()
        if file.size_bytes < end:
            file.reserve(end)  # writes that extend the file would run one at a time
        return file

    def _create(self) -> File:
        try:
            return File(self._path, create=True, fine_alignment=True)
        except IoError as error:
            if error.errno != errno.EEXIST:
                raise
            return File(self._path, fine_alignment=True)  # another call has made it meanwhile

    def _choose_memory(self, alignment: int) -> tuple[PinnedSlab, int]:
        """Choose the memory to transfer: the tensor's, or a slab. Returns (slab, offset of the direct part in it)."""
        head_bytes = self._begin - self._offset
        address = self._buffer.data_ptr() + head_bytes
        aligned = self._begin < self._end and address % alignment == 0
        if aligned and self._buffer.device.type == "cpu" and self._buffer.is_contiguous():
            self._bytes = _bytes_of(self._buffer)
            self._in_tensor = True
            slab = _slab_of(self._buffer)
            if slab is None:
                page = address // PAGE_BYTES * PAGE_BYTES
                slab = PinnedSlab.around(page, address - page + self._nbytes - head_bytes)
            return slab, address - slab.address
        first = -head_bytes % alignment
        slab = PinnedSlab(first + self._nbytes)
        self._bytes = torch.frombuffer(slab, dtype=torch.uint8)[first:]
        self._in_tensor = False
        return slab, first + head_bytes

    def _move_edges(self) -> None:
        """Move the bytes outside of the direct part, through the page cache."""
        ends = ((self._offset, self._begin), (self._end, self._offset + self._nbytes))
        edges = [(begin, end) for begin, end in ends if begin < end]
        if not edges:
            return
        memory = self._bytes.numpy().data
        with self._opened.open("rb" if self._reads else "r+b", buffering=0) as file:
            for begin, end in edges:
                file.seek(begin)
                piece = memory[begin - self._offset : end - self._offset]
                moved = file.readinto(piece) if self._reads else file.write(piece)
                if moved != end - begin:
                    raise self._failure(errno.EIO, f"only {moved} of the {end - begin} bytes at {begin} were moved")

    def _check_stored(self) -> None:
        """Raises IoError where the file, read through the page cache, holds other bytes."""
        with self._opened.open("rb") as file:  # buffered, as a single read moves at most 2 GiB
            file.seek(self._offset)
            if file.read(self._nbytes) != self._bytes.numpy().tobytes():
                raise self._failure(errno.EIO, "the file holds other bytes than the tensor")

    @property
    def _opened(self) -> Path:
        """The file that was opened, even if another one has its name now."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    def _failure(self, number: int, reason: str) -> IoError:
        message = f"{self._operation} of {self._nbytes} bytes at offset {self._offset} of {self._path}: {reason}"
        return IoError(message, number, self._operation, self._path, self._offset, self._nbytes)


def _async_and_offset(*positional: Any, **keywords: Any) -> tuple[bool, int]:
    """Parse the arguments (async, file_offset=0); the name of the first is reserved in Python."""
    names = ("async", "file_offset")
    by_name = dict(zip(names, positional, strict=False)) | keywords
    if len(positional) > len(names) or "async" not in by_name or not by_name.keys() <= set(names):
        raise TypeError(f"expected async and file_offset=0 after validate, got {positional} and {keywords}")
    return bool(by_name["async"]), int(by_name.get("file_offset", 0))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor as 1-D bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copy_bytes(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes into a tensor of any layout and device."""
    with torch.no_grad():
        packed = torch.empty(tensor.shape, dtype=tensor.dtype)
        _bytes_of(packed).copy_(source)
        tensor.copy_(packed)


def _slab_of(tensor: torch.Tensor) -> PinnedSlab | None:
    """The slab of a locked tensor that holds all bytes between the tensor's first and last element, or None."""
    if tensor.device.type != "cpu":
        return None
    begin = end = tensor.data_ptr()
    if tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end += (last + 1) * tensor.element_size()
    with _slabs_lock:
        for address, reference in _slabs.items():
            if address <= begin and (slab := reference()) is not None and end <= address + slab.nbytes:
                return slab
    return None


def _forget_slab(address: int) -> bool:
    """Forget the slab of a locked tensor; returns whether there was one at this address."""
    with _slabs_lock:
        is_ours = _slabs.pop(address, None) is not None
    if is_ours and torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address)
    return is_ours
