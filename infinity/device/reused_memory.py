"""Memory of a CPU that is mapped once: for gathered parameters, and for gradients that wait for their update. Used by the
training thread, and by autograd's on its behalf.

[Note: Addresses stay, pages move]
Autograd saves views of a gathered parameter in the forward, and reads through them what the backward gathers. So the address of
a parameter never changes. FSDP2 allocates memory at each gather and frees it after it; the kernel then clears each page again,
which takes longer than the copy of the elements. Here each parameter has a range of addresses for good, and pages only while
it is gathered: mremap moves them there from the ranges of tensors that were freed, the longest ago first. It clears nothing,
and the pages may be huge. As many pages are mapped as were ever needed at once, in any order of the tensors.

Gradients that wait are lent memory here, too. They need most when a backward ends and little else is gathered, so both share
pages.

What was mapped together may lie in several mappings later, and before Linux 6.17 one call moves pages of one mapping. So units
of 2 MiB move one at a time if the kernel refuses to move all at once. Where ranges can't be had (no mremap, a limit of address
space, too many parameters), tensors are torch's own.

A freed range is protected: to read a tensor after it was freed ends the process (SIGSEGV), as with FSDP2's own memory.
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
"""Bytes: what a huge page has, and what mremap moves as a whole."""

_NBYTES_MIN = 1 << 20
"""Smaller tensors stay with torch: a range is a multiple of 2 MiB."""

_MAPPINGS_MAX = 50_000
"""A process may have 65 530 by default. A range has one for each of its units at the most, and two around it."""

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP = 1 | 2 | 4
"""MAYMOVE, FIXED, DONTUNMAP: nothing else can be mapped meanwhile where the pages were."""

_MADV_HUGEPAGE = 14
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
for _function in ("mremap", "mmap"):
    getattr(_libc, _function).restype = ctypes.c_void_p


@dataclass(eq=False)
class _Range:
    """Addresses of one tensor, which are given back with this and the last view of the tensor."""

    reserved: mmap.mmap = field(repr=False)
    address: int
    units: int
    present: set[int] = field(default_factory=set)
    """Which of its units have pages."""
    is_protected: bool = False
    """Whether some of it may not be written to. Set before and reset after: `fill` mends what an exception ends in between."""


class ReusedMemory:
    """Of one model. `lend`, or `fill` and `free` of what `tensor` made."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}
        """By address of their tensor."""
        self._free: dict[_Range, None] = {}
        """Those that were freed and still have pages, the longest ago first."""
        self._can_move = _can_move()
        self._mappings = 0
        self._idle: dict[tuple[int, torch.dtype], dict[int, torch.Tensor]] = {}
        """Tensors to lend, by elements and dtype, and by address."""
        self._returned: deque[torch.Tensor] = deque()
        """What was lent and is dropped: the garbage collector may note that at any point, so no more is done there."""

    @property
    def nbytes(self) -> int:
        """What is mapped."""
        return _UNIT * sum(len(range_.present) for range_ in self._ranges.values())

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor (1-D, on the CPU) without memory until `fill`; torch's own where it is small or has no range."""
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
        """A tensor (1-D) with memory, of any content, until the tensor itself is dropped, views of it or not.
        Raises OSError where there is none."""
        if self._returned:
            self._take_back()
        idle = self._idle.setdefault((numel, dtype), {})
        tensor = (
            idle.popitem()[1] if idle else self.tensor(numel, dtype)
        )  # an exception from here on loses addresses alone
        if tensor.data_ptr() not in self._ranges:
            return tensor
        lent = tensor.view(-1)
        weakref.finalize(lent, self._returned.append, tensor).atexit = False
        self.fill(tensor)
        return lent

    def release(self) -> None:
        """Give back all memory that is in no use. What is gathered or lent stays."""
        self._take_back()
        for address in [address for idle in self._idle.values() for address in idle]:
            self._free.pop(self._ranges.pop(address), None)
        self._idle.clear()
        for range_ in self._free:
            _libc.madvise(_pointer(range_.address), _size(range_.units), mmap.MADV_DONTNEED)
            range_.present.clear()
        self._free.clear()

    def fill(self, tensor: torch.Tensor) -> None:
        """A tensor is to be written to: it has memory, of any content. Raises OSError where there is none."""
        range_ = self._ranges.get(tensor.data_ptr())
        if range_ is None:
            return
        if self._returned:
            self._take_back()
        self._free.pop(range_, None)
        unit = 0
        while unit < range_.units:
            end = next((other for other in range(unit, range_.units) if other in range_.present), range_.units)
            if end > unit:
                range_.is_protected = True  # as what moves there is
                end = unit + self._move_to(range_.address + _UNIT * unit, end - unit)
                range_.present.update(range(unit, end))
            unit = max(end, unit + 1)
        if range_.is_protected:
            _protect(range_, mmap.PROT_READ | mmap.PROT_WRITE)
            range_.is_protected = False

    def free(self, tensor: torch.Tensor) -> bool:
        """A tensor is not used any more until `fill`. False where it is not one of these."""
        range_ = self._ranges.get(tensor.data_ptr())
        if range_ is None:
            return False
        if not range_.is_protected:
            range_.is_protected = True
            _protect(range_, _PROT_NONE)
            self._free[range_] = None
        return True

    def _take_back(self) -> None:
        while self._returned:
            tensor = self._returned[0]
            self.free(tensor)
            self._idle.setdefault((tensor.numel(), tensor.dtype), {})[tensor.data_ptr()] = tensor
            self._returned.popleft()

    def _move_to(self, address: int, count: int) -> int:
        """Move pages of the range that was freed the longest ago to up to `count` units. Returns how many. If there are none,
        the first use of the units maps new ones."""
        while self._free:
            source = next(iter(self._free))
            if not source.present:
                del self._free[source]
                continue
            last = first = max(source.present)
            while first - 1 in source.present and last - first + 1 < count:
                first -= 1
            for begin in (first, last):  # all of them at once, or one
                units = last - begin + 1
                source.present.difference_update(range(begin, last + 1))
                if _move(source.address + _UNIT * begin, address, units):
                    return units
                source.present.update(range(begin, last))
            return 1
        return count


def _move(old: int, new: int, units: int) -> bool:
    """Move the pages of units from one address to another. If the kernel doesn't, there are none at either's last unit."""
    if _libc.mremap(_pointer(old), _size(units), _size(units), _MREMAP, _pointer(new)) == new:
        return True
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE  # it may have unmapped what was there
    if _libc.mmap(_pointer(new), _size(units), _PROT_NONE, flags, -1, ctypes.c_long(0)) != new:
        raise _no_memory()
    return False


def _reserve(units: int, numel: int, dtype: torch.dtype) -> tuple[mmap.mmap, torch.Tensor]:
    """Addresses for so many units, without pages, and a tensor over them."""
    reserved = mmap.mmap(-1, _UNIT * (units + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    start = -torch.frombuffer(reserved, dtype=torch.uint8).data_ptr() % _UNIT
    tensor = torch.frombuffer(reserved, dtype=dtype, count=numel, offset=start)
    _libc.madvise(_pointer(tensor.data_ptr()), _size(units), _MADV_HUGEPAGE)  # refused: small pages
    return reserved, tensor


def _can_move() -> bool:
    """Whether this system moves pages and leaves their addresses reserved (Linux 5.7), and addresses cost nothing."""
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
