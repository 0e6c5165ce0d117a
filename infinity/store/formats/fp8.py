"""fp8 and packed fp4 with scales per block, per row or per matrix: "fp8" of transformers and DeepSeek, and "mxfp8".

`weight` is F8_E4M3 or F8_E5M2, or I8 with two fp4 codes per byte, the first in the low bits. `weight_scale_inv` (or
`weight_scale`, `scale`, `qscale_weight`) has a scale per block. `weight_block_size` of the config is the size of a
block, and blocks at the edges may be cut. Without it, and for fp4, the blocks divide the matrix evenly. A value is code
· scale in fp32: `Fp8Dequantize` in transformers, `weight_dequant` in DeepSeek-V3's inference/kernel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import parsing
from infinity.store.foreign import StoredParameter, StoredTensor
from infinity.store.formats.coded import E2M1, Coded, Piece, shaped, whole, without_activations
from infinity.store.formats.coded_matrix import CodedMatrix, byte_numbers

CODES = ("F8_E4M3", "F8_E5M2", "I8")
SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""The dtypes of scales. U8 is an exponent, as F8_E8M0."""


@dataclass(frozen=True, eq=False)
class Fp8Blocks(Coded):
    """A matrix, or a stack of them, with a scale per `block` (rows, columns). The others: see `CodedMatrix`."""

    block: tuple[int, int]
    through: torch.dtype | None
    rounds_scales: bool

    def row(self, number: int) -> Fp8Blocks:
        codes, scales = (piece.tensor.row(number) for piece in self.pieces)
        return _blocks(codes, self.shape[1:], scales, self.block, self.through, self.rounds_scales)

    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        codes, scales = pieces
        rows, columns = self.block
        return CodedMatrix(
            lines=codes,
            numbers=E2M1 if codes.dtype is torch.int8 else codes.dtype,
            scales=scales,
            scale_numbers=byte_numbers(scales.dtype, scales.device),
            rows=rows,
            row_in_group=first % rows,
            columns=columns,
            through=self.through,
            rounds_scales=self.rounds_scales,
        )


def parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Return the parameters that these tensors hold, including plain tensors."""
    tensors = without_activations(tensors)
    made: dict[str, StoredParameter] = dict(tensors)
    for name, codes in tensors.items():
        if codes.dtype in CODES:
            problem = f"{codes.path}: {name}, which is in {codes.dtype}, and its scales don't fit together"
            with parsing(problem, "fetch or save it again"):
                scale = _scale_name(name, tensors)
                made[name] = scaled_fp8(codes, tensors[scale], config.get("weight_block_size"))
                made.pop(scale)
    return made


def scaled_fp8(
    codes: StoredTensor,
    scales: StoredTensor,
    block: object,
    *,
    through: torch.dtype | None = None,
    rounds_scales: bool = False,
) -> Fp8Blocks:
    """Return the matrices of these codes and scales. `block`: the configured (rows, columns) per scale, or None. The
    others: see `CodedMatrix`."""
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if codes.dtype == "I8" else 1))
    if len(shape) not in (2, 3) or min(shape) < 1 or scales.dtype not in SCALES:
        raise ValueError(f"codes of shape {codes.shape} with scales in {scales.dtype}")
    stack = shape[:-2]
    grid = scales.shape[len(stack) :]
    if scales.shape[: len(stack)] != stack:
        raise ValueError(f"codes of shape {codes.shape} with scales of shape {scales.shape}")
    if grid in ((), (1,)):
        grid = (1, 1)
    elif grid == (shape[-2],):
        grid = (shape[-2], 1)
    if len(grid) != 2 or min(grid) < 1:
        raise ValueError(f"codes of shape {codes.shape} with scales of shape {scales.shape}")
    block = None if codes.dtype == "I8" else block  # the configured block is that of fp8
    size = _block_of(shape[-2:], grid, block)
    return _blocks(codes, shape, shaped(scales, *stack, *grid), size, through, rounds_scales)


def _blocks(
    codes: StoredTensor,
    shape: tuple[int, ...],
    scales: StoredTensor,
    block: tuple[int, int],
    through: torch.dtype | None,
    rounds_scales: bool,
) -> Fp8Blocks:
    rows = Piece(scales) if len(shape) == 3 else Piece(scales, rows=block[0])
    one = len(shape) == 2 and scales.shape[0] == 1
    pieces = (Piece(codes), whole(scales, *scales.shape) if one else rows)
    return Fp8Blocks(shape, pieces, block, through, rounds_scales)


def _block_of(shape: tuple[int, ...], grid: tuple[int, ...], configured: object) -> tuple[int, int]:
    """Return the numbers of rows and columns that share a scale."""
    if configured is not None:
        rows, columns = map(int, configured)  # type: ignore[call-overload]
        if rows > 0 < columns and grid == (-(-shape[0] // rows), -(-shape[1] // columns)):
            return rows, columns
        raise ValueError(f"a matrix of shape {shape} with scales of shape {grid} for blocks of {rows} x {columns}")
    if shape[0] % grid[0] or shape[1] % grid[1]:
        raise ValueError(f"a matrix of shape {shape} with scales of shape {grid}")
    return shape[0] // grid[0], shape[1] // grid[1]


def _scale_name(name: str, tensors: Mapping[str, StoredTensor]) -> str:
    module = name.removesuffix(".weight")
    names = [f"{name}_scale_inv", f"{name}_scale", f"{module}.scale", f"{module}.qscale_weight"]
    return next((scale for scale in names if scale in tensors), names[0])
