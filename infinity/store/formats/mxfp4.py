"""The experts of gpt-oss in MXFP4: fp4 with one scale, a power of two, per 32 elements.

`X_blocks` is U8 of shape (experts, outputs, inputs / 32, 16), two codes per byte, the first in the low bits. `X_scales`
is U8: exponents, plus 127. The parameter X has shape (experts, inputs, outputs): `convert_moe_packed_tensors` in
transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import parsing
from infinity.store.foreign import StoredParameter, StoredTensor
from infinity.store.formats.coded import E2M1, Coded, Piece, decode_blocks, expect, nibbles, scale_values, whole

_BLOCK = 32


@dataclass(frozen=True, eq=False)
class Mxfp4Experts(Coded):
    """A stack of matrices, whose transposes are in the file."""

    def row(self, number: int) -> Mxfp4Expert:
        return Mxfp4Expert(self.shape[1:], tuple(_all_of(piece.tensor.row(number)) for piece in self.pieces))

    def fill(self, out: torch.Tensor, first: int, *pieces: torch.Tensor) -> None:
        for matrix, codes, exponents in zip(out, *pieces, strict=True):
            _fill_transposed(matrix, 0, codes, exponents)


@dataclass(frozen=True, eq=False)
class Mxfp4Expert(Coded):
    """One matrix of the stack. Its rows are columns in the file, so each page has elements of all ranks."""

    def fill(self, out: torch.Tensor, first: int, *pieces: torch.Tensor) -> None:
        _fill_transposed(out, first, *pieces)


def parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Return the parameters that these tensors hold, including plain tensors."""
    made: dict[str, StoredParameter] = dict(tensors)
    for name, codes in tensors.items():
        if name.endswith(("_blocks", "_scales")):
            parameter = name.rpartition("_")[0]
            with parsing(f"{codes.path}: the tensors of {parameter} don't fit together", "fetch or save it again"):
                made.pop(name)
                made[parameter] = _experts(tensors[f"{parameter}_blocks"], tensors[f"{parameter}_scales"])
    return made


def _experts(codes: StoredTensor, exponents: StoredTensor) -> Mxfp4Experts:
    if len(codes.shape) != 4 or min(codes.shape) < 1:
        raise ValueError(f"blocks of shape {codes.shape}")
    experts, outputs, blocks, _ = codes.shape
    expect(codes, ["U8"], experts, outputs, blocks, _BLOCK // 2)
    expect(exponents, ["U8"], experts, outputs, blocks)
    return Mxfp4Experts((experts, blocks * _BLOCK, outputs), (Piece(codes), Piece(exponents)))


def _all_of(tensor: StoredTensor) -> Piece:
    return whole(tensor, *tensor.shape)


def _fill_transposed(out: torch.Tensor, first: int, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    """Set `out` to rows from `first` on of the transposed matrix. Products with powers of two are exact in bf16."""
    low, high = first // _BLOCK, -(-(first + len(out)) // _BLOCK)
    codes, scales = codes[:, low:high].flatten(1), scale_values(exponents[:, low:high]).bfloat16()
    columns = (high - low) * _BLOCK
    matrix = torch.empty(len(codes), columns, dtype=torch.bfloat16, device=out.device)
    decode_blocks(matrix, lambda rows: nibbles(codes[rows], E2M1, columns), scales, columns=_BLOCK)
    out.copy_(matrix[:, first - low * _BLOCK :][:, : len(out)].t())
