"""Compiled from csrc/optim: Adam in one pass over memory, and the master weight as copy and remainder.

Memory is passed as addresses, unchecked: infinity/optim/kernel.py checks it, and the caller keeps it alive. Any thread may
call; the GIL is released meanwhile. Dtypes: "float32", "bfloat16", "float16", and "uint8" for coded moments, with scales.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def instruction_sets() -> list[str]:
    """Return the instruction sets of this CPU, fastest first: of "avx512", "avx2", "portable"."""

def update(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    step: float,
    grad_scale: float,
    grad_dtype: str,
    compute_dtype: str,
    moments_dtype: str,
    pieces: Sequence[tuple[int, int, int, int, int, int, int]],
    numel: int,
    exp_avg: int,
    exp_avg_sq: int,
    scales: int,
    master: int,
    copy: int,
    remainder: int,
    staged: int,
    ties: npt.NDArray[np.int32],
    pages: int,
    expected: npt.NDArray[np.uint32],
    threads: int,
    instructions: str,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], int]:
    """Update the elements of `pieces`: (address of the gradient, offset, numel, start, shard_numel, key, place), ascending.

    Of the addresses `scales`, `master`, `copy`, `remainder`, `staged` and `pages`, 0 means none. `compute_dtype` is that of
    `copy` if there is a master. `pages`: address of the pages (4096 bytes) with the `expected` checksums (0 if unknown); the
    fields in them are verified before they change, and summed after.

    Returns the ties of the sub-group, the new checksums (0 for pages of no field), and the number of the first wrong page, or
    -1; with a wrong page, the fields are torn. Raises ValueError for arguments that do not fit.
    """

def join(
    *,
    copy: int,
    remainder: int,
    numel: int,
    ties: npt.NDArray[np.int32],
    master: int,
    threads: int,
    instructions: str,
) -> None:
    """Set `master` (fp32) from `copy` (bf16), `remainder` (16-bit) and their ties."""

def split(
    *, master: int, numel: int, copy: int, remainder: int, threads: int, instructions: str
) -> npt.NDArray[np.int32]:
    """Set `copy` and `remainder` from `master`, and return the ties that were rounded up."""

def accumulate(*, grad_dtype: str, grads: int, numel: int, sums: int, threads: int, instructions: str) -> None:
    """Add `numel` gradients at `grads` to those at `sums` (fp32)."""

def norms(*, gradients: Sequence[tuple[str, int, int]], threads: int, instructions: str) -> npt.NDArray[np.float32]:
    """Return the 2-norm of each gradient (dtype, address, numel)."""
