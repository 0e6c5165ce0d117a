"""CPU memory that is mapped once, for gathered parameters and for gradients that wait for their update.

Used by the training thread and, for it, by autograd's threads.

[Note: Addresses stay, pages move]
Autograd saves views of a gathered parameter in the forward, and reads the backward's gather through them, so its
address never changes. FSDP2 allocates memory at each gather and frees it afterwards; the kernel then clears each page
again, which takes longer than copying the elements. Here each parameter has a permanent range of addresses, with pages
only while it is gathered. mremap moves pages there from freed tensors, the longest free first. It clears nothing, and
the pages may be huge. Only as many pages are mapped as were ever needed at once.

Gradients that wait are lent memory here too: they need most when a backward ends and little is gathered.

Pages mapped together may later be in several mappings, and before Linux 6.17 one call moves pages of one mapping only.
So units of 2 MiB move one at a time if the kernel refuses to move all at once. If ranges are not available (no mremap,
a limit of address space, too many parameters), torch allocates the tensors.

A freed range is protected: reading a freed tensor ends the process (SIGSEGV), as with FSDP2's own memory.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from infinity.kernel_files import number_of

_UNIT = 2 << 20
"""Bytes of a huge page; mremap moves whole units."""

_NBYTES_MIN = 1 << 20
"""Smaller tensors (bytes) are allocated by torch, because a range is a multiple of 2 MiB."""

_MAPPINGS_MAX = 50_000
"""Maximum number of mappings (a process may have 65 530 by default): a range has at most one per unit, and two more."""

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP = 1 | 2 | 4
"""MAYMOVE, FIXED, DONTUNMAP: no other mapping can take the source addresses meanwhile."""

_MADV_HUGEPAGE = 14
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
for _function in ("mremap", "mmap"):
    getattr(_libc, _function).restype = ctypes.c_void_p


@dataclass(eq=False)
class _Range:
    """Addresses of one tensor, released together with the last view of the tensor."""

    reserved: mmap.mmap = field(repr=False)
    address: int
    units: int
    present: set[int] = field(default_factory=set)
    """Numbers of its units that have pages."""
    is_protected: bool = False
    """True if parts may be unwritable. Set before and reset after, so that `fill` repairs an interrupted change."""


class ReusedMemory:
    """The reused memory of one model: `lend`, or `fill` and `free` tensors made by `tensor` that it `holds`."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}
        """By address of the tensor."""
        self._free: dict[_Range, None] = {}
        """Freed ranges with pages, the longest free first."""
        self._can_move = _can_move()
        self._mappings = 0
        self._idle: dict[tuple[int, torch.dtype], dict[int, torch.Tensor]] = {}
        """Tensors to lend, by elements and dtype, then by address."""
        self._returned: deque[torch.Tensor] = deque()
        """Dropped loans. The garbage collector may append at any point, so all other work is done later."""

    @property
    def nbytes(self) -> int:
        """Mapped bytes."""
        return _UNIT * sum(len(range_.present) for range_ in self._ranges.values())

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D CPU tensor without memory until `fill`; torch allocates it if it is small or gets no range, and
        `holds` is then False."""
        nbytes = numel * dtype.itemsize
        units = -(-nbytes // _UNIT)
        if nbytes < _NBYTES_MIN or not self._can_move or self._mappings + units + 2 > _MAPPINGS_MAX:
            return torch.empty(numel, dtype=dtype)
        try:
            reserved, tensor = _reserve(units, numel, dtype)
        except OSError:
            return torch.empty(numel, dtype=dtype)
        self._ranges[tensor.data_ptr()] = _Range(reserved, tensor.data_ptr(), units)
        self._mappings += units + 2
        return tensor

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor, lent until it is dropped. Raises OSError if there is no memory."""
        if self._returned:
            self._take_back()
        idle = self._idle.setdefault((numel, dtype), {})
        tensor = (
            idle.popitem()[1] if idle else self.tensor(numel, dtype)
        )  # an exception from here on loses addresses alone
        if not self.holds(tensor):
            return tensor
        lent = tensor.view(-1)
        weakref.finalize(lent, self._returned.append, tensor).atexit = False
        self.fill(tensor)
        return lent

    def release(self) -> None:
        """Unmap all unused memory. Gathered and lent memory stays."""
        self._take_back()
        for address in [address for idle in self._idle.values() for address in idle]:
            range_ = self._ranges.pop(address)
            self._mappings -= range_.units + 2
            self._free.pop(range_, None)
        self._idle.clear()
        for range_ in self._free:
            _libc.madvise(_pointer(range_.address), _size(range_.units), mmap.MADV_DONTNEED)
            range_.present.clear()
        self._free.clear()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor has a range here."""
        return tensor.data_ptr() in self._ranges

    def fill(self, tensor: torch.Tensor) -> None:
        """Give a tensor writable, uninitialised memory. Raises OSError if there is none."""
        range_ = self._ranges[tensor.data_ptr()]
        if self._returned:
            self._take_back()
        self._free.pop(range_, None)
        unit = 0
        while unit < range_.units:
            end = next((other for other in range(unit, range_.units) if other in range_.present), range_.units)
            if end > unit:
                range_.is_protected = True  # like the pages that move there
                end = unit + self._move_to(range_.address + _UNIT * unit, end - unit)
                range_.present.update(range(unit, end))
            unit = max(end, unit + 1)
        if range_.is_protected:
            _protect(range_, mmap.PROT_READ | mmap.PROT_WRITE)
            range_.is_protected = False

    def free(self, tensor: torch.Tensor) -> None:
        """Release a tensor's memory until `fill`."""
        range_ = self._ranges[tensor.data_ptr()]
        if not range_.is_protected:
            range_.is_protected = True
            _protect(range_, _PROT_NONE)
            self._free[range_] = None

    def _take_back(self) -> None:
        while self._returned:
            tensor = self._returned[0]
            self.free(tensor)
            self._idle.setdefault((tensor.numel(), tensor.dtype), {})[tensor.data_ptr()] = tensor
            self._returned.popleft()

    def _move_to(self, address: int, count: int) -> int:
        """Move pages of the longest-freed range to up to `count` units; return how many, or `count` without any."""
        while self._free:
            source = next(iter(self._free))
            if not source.present:
                del self._free[source]
                continue
            last = first = max(source.present)
            while first - 1 in source.present and last - first + 1 < count:
                first -= 1
            for begin in (first, last):  # all at once, or else one
                units = last - begin + 1
                source.present.difference_update(range(begin, last + 1))
                if _move(source.address + _UNIT * begin, address, units):
                    return units
                source.present.update(range(begin, last))
            return 1
        return count


def _move(old: int, new: int, units: int) -> bool:
    """Move the pages of units. Returns False if the kernel refuses; the last unit of either range then has no pages."""
    if _libc.mremap(_pointer(old), _size(units), _size(units), _MREMAP, _pointer(new)) == new:
        return True
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE  # mremap may have unmapped the target
    if _libc.mmap(_pointer(new), _size(units), _PROT_NONE, flags, -1, ctypes.c_long(0)) != new:
        raise _no_memory()
    return False


def _reserve(units: int, numel: int, dtype: torch.dtype) -> tuple[mmap.mmap, torch.Tensor]:
    """Reserve addresses for `units` without pages, and return them with a tensor over them."""
    reserved = mmap.mmap(-1, _UNIT * (units + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    start = -torch.frombuffer(reserved, dtype=torch.uint8).data_ptr() % _UNIT
    tensor = torch.frombuffer(reserved, dtype=dtype, count=numel, offset=start)
    _libc.madvise(_pointer(tensor.data_ptr()), _size(units), _MADV_HUGEPAGE)  # if refused, pages are small
    return reserved, tensor


def _can_move() -> bool:
    """Return True if mremap keeps source addresses reserved (Linux 5.7), and reserved addresses are free of charge."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if limited or number_of(Path("/proc/sys/vm/overcommit_memory")) not in (0, 1):
        return False
    (_, source), (_, target) = _reserve(1, 3, torch.uint8), _reserve(1, 3, torch.uint8)
    source[:] = 1
    old, new = source.data_ptr(), target.data_ptr()
    if _libc.mremap(_pointer(old), _size(1), _size(1), _MREMAP, _pointer(new)) != new:
        return False
    return bool((target == 1).all() and (source == 0).all())


def _protect(range_: _Range, protection: int) -> None:
    if _libc.mprotect(_pointer(range_.address), _size(range_.units), protection):
        raise _no_memory()


def _no_memory() -> OSError:
    return OSError(ctypes.get_errno(), "no memory for gathered parameters and gradients")


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _size(units: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(_UNIT * units)
