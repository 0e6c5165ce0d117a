"""The memory of a gathered parameter that is sharded over one rank. Training thread only.

[Note: Gathering alone]
Over one rank there is nothing to gather: FSDP2 copies what it is given into a storage of its own. A model that is only run
gives it nothing to copy, and the parameter gets its elements afterwards, in `fsdp_post_all_gather`. (In a training there is
little to gain by that alone, and glibc kept a third of a GiB more of what was freed in another order.) Three ways:

  * copied into a storage that FSDP2 allocates and frees. Autograd saves views of the parameter in the forward, and finds the
    elements of the next gather in them, because the storage is the same one. So it is wherever autograd may be recording.
  * lent: the parameter's memory is that of the caller, until FSDP2 frees it. No byte is moved. Views of the parameter must not
    outlive the gather, so this is for passes without autograd. Whether one does is seen when FSDP2 frees it, as something
    has the lent storage then: that is an error, and never a wrong number. A forward that writes to the parameter ends in an
    error too (guarded.py), and recovery drops the caller's memory; a write past torch leaves no trace.
  * lodged: the caller has the elements at the same place whenever they are gathered, and the parameter's memory is that, for
    good. No byte is moved, and autograd's views find the elements there. The caller may change them once FSDP2 has freed the
    parameter. A training finds a write past torch too, by the checksums of trained parameters.

FSDP2 frees and allocates what it takes for the inner tensors of the parameter (`resize_` of their storage). It gets this
object as the only one of them, and so tells when it is done with what was lent.

[Note: Huge pages]
A parameter is allocated anew in each gather. glibc reuses blocks of up to 32 MiB; each larger one is a mapping of its own,
whatever thresholds are set, and its faults take longer than the copy. So these are put into huge pages, with a fault for each
2 MiB. (To have glibc keep large blocks, M_MMAP_MAX, is as fast, and takes twice the memory.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.fsdp2.guarded import set_memory
from infinity.units import align_up

_MAPPED_BYTES = 32 << 20
"""glibc maps each block above this for itself (HEAP_MAX_SIZE / 2)."""

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Have the memory of a tensor that was just allocated in huge pages, if it is large and the CPU's."""
    if tensor.nbytes <= _MAPPED_BYTES or tensor.device.type != "cpu" or _madvise is None:
        return
    address = tensor.untyped_storage().data_ptr()
    begin = align_up(address, _HUGE_PAGE_BYTES)
    end = (address + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)  # refused: small pages


class UnshardedMemory:
    """What FSDP2 takes for an inner tensor of one parameter, which is made over `tensor`."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        """What is copied into (1-D)."""
        self._nbytes = 0
        """What FSDP2 takes for allocated."""
        self._lent: _Lent | None = None
        self.tensor.untyped_storage().resize_(0)

    def fill(self, write: Callable[[torch.Tensor], object]) -> None:
        """The parameter has memory of its own, with the elements that `write` sets (1-D)."""
        self._nbytes = self.nbytes
        if self.tensor.untyped_storage().size() != self.nbytes:
            self.tensor.untyped_storage().resize_(self.nbytes)
        advise_huge_pages(self.tensor)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.tensor):
            write(self.tensor)

    def lend(self, parameter: nn.Parameter, elements: torch.Tensor, freed: Callable[[], None]) -> None:
        """The parameter's memory is that of `elements` (1-D, on the CPU) until FSDP2 frees it, or `take_back`.

        freed: called when FSDP2 frees it.
        """
        self._nbytes = self.nbytes
        elements = torch.from_numpy(elements.view(torch.uint8).numpy()).view(elements.dtype)  # a storage of its own
        before = parameter.data
        set_memory(parameter, elements.view(parameter.shape))
        self._lent = _Lent(parameter, before, elements, freed, _holders(elements))

    def take_back(self, *, copy: bool) -> None:
        """What was lent may change: if FSDP2 hasn't freed the parameter, it has a copy of its own, or is to free it now."""
        lent = self._lent
        if lent is not None:
            if copy:
                self.fill(lambda storage: storage.copy_(lent.elements))
            set_memory(lent.parameter, lent.before)
            self._lent = None

    # What FSDP2 asks of a tensor and its storage: `alloc_storage` and `free_storage` in _fsdp_param.py.

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def itemsize(self) -> int:
        return self.tensor.itemsize

    def numel(self) -> int:
        return self.tensor.numel()

    def untyped_storage(self) -> UnshardedMemory:
        return self

    def size(self) -> int:
        return self._nbytes

    def resize_(self, nbytes: int) -> None:
        self._nbytes = nbytes
        if nbytes:
            return
        lent = self._lent
        if lent is None:
            self.tensor.untyped_storage().resize_(0)
            return
        self._lent = None
        set_memory(lent.parameter, lent.before)
        outlives = _holders(lent.elements) > lent.holders - 1  # the parameter was one of them
        lent.freed()
        if outlives:
            raise InfinityError(
                f"a view of a frozen weight of shape {tuple(lent.parameter.shape)} is held after its group's forward, which "
                "ran without gradients: autograd saved it under torch.enable_grad() inside the forward, or the model keeps it. "
                "Enable gradients around the call of the model, or make the view anew where it is used"
            )


class LodgedMemory(UnshardedMemory):
    """That of `elements` (1-D, on the CPU), for good."""

    def __init__(self, elements: torch.Tensor) -> None:
        super().__init__(0, elements.dtype, elements.device)
        self.tensor = torch.from_numpy(elements.view(torch.uint8).numpy()).view(elements.dtype)  # a storage of its own
        self._nbytes = self.nbytes

    def leave(self) -> None:
        """The elements are somebody else's from now on; FSDP2 has freed the parameter."""
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)

    def resize_(self, nbytes: int) -> None:
        self._nbytes = nbytes


@dataclass(eq=False)
class _Lent:
    parameter: nn.Parameter
    before: torch.Tensor
    """What its memory was."""
    elements: torch.Tensor
    freed: Callable[[], None]
    holders: int
    """Who had the storage of the elements when they were lent."""


def _holders(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
