"""Plain tensors in the arena, by name, for engines other than FSDP2. Used by the training thread only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from infinity.aio import Lease
from infinity.errors import BudgetError, InfinityError
from infinity.swap.machinery import Machinery
from infinity.swap.stager import Chunk, ChunkState, Span
from infinity.units import align_up, format_bytes


@dataclass(eq=False)
class PlainTensor:
    """A registered tensor. `lost`: the reason why its last write failed."""

    chunk: Chunk
    shape: torch.Size
    dtype: torch.dtype
    lost: str | None = None

    def lose(self, why: str) -> None:
        """Record that a write of it has failed."""
        self.lost = why


class TensorStore:
    """Tensors by name, on the drives and in the pinned pool of one swap manager: see `SwapManager.tensors`."""

    def __init__(self, machinery: Machinery) -> None:
        self._open: Machinery | None = machinery
        self.by_name: dict[str, PlainTensor] = {}

    @property
    def _machinery(self) -> Machinery:
        if self._open is None:
            raise InfinityError("this SwapManager is closed")
        return self._open

    @property
    def leases(self) -> list[Lease]:
        """The leases of tensors in use."""
        chunks = (entry.chunk for entry in self.by_name.values())
        return [chunk.lease for chunk in chunks if chunk.state is ChunkState.IN_USE and chunk.lease is not None]

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Store a copy of `tensor` (any shape and dtype, dense, on the CPU) under `name`.

        Raises ValueError for a name that is taken, StoreError if space is missing, BudgetError if it exceeds the pool.
        """
        self._check_can_be_stored(name, tensor)
        nbytes = tensor.numel() * tensor.itemsize
        machinery = self._machinery
        if align_up(nbytes) > machinery.pool.nbytes:
            raise BudgetError(
                f"tensor {name!r} of {format_bytes(nbytes)} is larger than the pinned pool of "
                f"{format_bytes(machinery.pool.nbytes)}: raise pinned_bytes_max to at least {align_up(nbytes)}"
            )
        extent = machinery.arena.reserve([nbytes], f"tensor {name!r}")[0]
        span = (Span(extent.offset, 0, extent.nbytes),)
        entry = PlainTensor(Chunk(name, extent.nbytes, span, span), tensor.shape, tensor.dtype)
        entry.chunk.on_lost = entry.lose
        lease = machinery.stager.occupy(entry.chunk)
        try:
            lease.view(tensor.dtype, 0, tensor.numel()).view(tensor.shape).copy_(tensor.detach())
        except BaseException:
            machinery.stager.release(entry.chunk, keep=False)
            raise
        machinery.stager.write_back(entry.chunk)
        self.by_name[name] = entry

    def prefetch(self, name: str) -> bool:
        """Start reading `name` if there is room now. Returns True if it is being read, or in memory."""
        entry = self._entry(name)
        if entry.chunk.state is not ChunkState.ON_NVME:
            return entry.chunk.state is not ChunkState.WRITING
        return self._machinery.stager.prefetch(entry.chunk)

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the tensor in pinned memory, read-only, until the end of the block."""
        entry, tensor = self._acquire(name)
        try:
            yield tensor
        finally:
            self._machinery.stager.release(entry.chunk, keep=False)

    @contextlib.contextmanager
    def update(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the tensor in pinned memory, to be changed in place; it is written in the background after the block.

        If the block raises, the stored bytes are unchanged.
        """
        entry, tensor = self._acquire(name)
        try:
            yield tensor
        except BaseException:
            self._machinery.stager.release(entry.chunk, keep=False)
            raise
        self._machinery.stager.write_back(entry.chunk)

    def flush(self) -> None:
        """Wait until all updates are on the drive (fdatasync). Raises IoError if a write failed."""
        self._machinery.stager.settle_all()
        self._machinery.arena.file.sync()

    def close(self) -> None:
        """End the use of all tensors."""
        self._open = None

    def _check_can_be_stored(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.by_name:
            raise ValueError(f"a tensor named {name!r} is registered already: use update() to change it")
        if tensor.numel() == 0:
            raise ValueError(f"tensor {name!r} has no elements")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(
                f"tensor {name!r} is {tensor.layout} on {tensor.device}: only ordinary dense tensors are stored"
            )

    def _entry(self, name: str) -> PlainTensor:
        try:
            return self.by_name[name]
        except KeyError:
            raise KeyError(f"no tensor named {name!r} is registered") from None

    def _acquire(self, name: str) -> tuple[PlainTensor, torch.Tensor]:
        entry = self._entry(name)
        if entry.chunk.state is ChunkState.IN_USE:
            raise InfinityError(f"tensor {name!r} is in use already")
        stager = self._machinery.stager
        stager.settle(entry.chunk)
        if entry.lost is not None:
            raise InfinityError(
                f"tensor {name!r} is lost, part of it old and part new, since a write of it failed: {entry.lost}; register it "
                "again under another name"
            )
        lease = stager.acquire(entry.chunk)
        return entry, lease.view(entry.dtype, 0, entry.shape.numel()).view(entry.shape)
