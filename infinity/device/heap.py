"""Gives the kernel back what the C library's heap keeps free. Training thread, and autograd's for it.

[Note: A heap with holes]
torch aligns tensors to 64 bytes. Before version 2.38 glibc finds no place for such a tensor where one of the same size
was freed, if anything small was allocated next to it. So a heap grows in every pass: with 16 micro-batches of 512
tokens of a model of 200 M parameters it had 2 GiB of memory, of which 0.25 GiB were in use. malloc_trim gives back
whole free pages; those used again are mapped and cleared again. So it is called only if the process takes an
eighth more memory than it ever needed.
"""

from __future__ import annotations

import ctypes

from infinity.host_memory import taken_bytes

_SHARE = 9 / 8
"""Memory that the process may take, over what it needed."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class Heap:
    """The heap of this process: `HEAP`."""

    def __init__(self) -> None:
        self._bytes_max = 0
        """Memory that the process may take until the next trim."""

    def trim_if_grown(self) -> None:
        """Give free pages back if the process takes more memory than before. Without malloc_trim, do nothing."""
        if _malloc_trim is None or taken_bytes() <= self._bytes_max:
            return
        _malloc_trim(0)
        self._bytes_max = max(self._bytes_max, int(_SHARE * taken_bytes()))


HEAP = Heap()
