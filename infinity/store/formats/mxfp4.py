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
from infinity.store.formats.coded import E2M1, Coded, Piece, expect, whole
from infinity.store.formats.coded_matrix import CodedMatrix, byte_numbers

_BLOCK = 32


@dataclass(frozen=True, eq=False)
class Mxfp4Experts(Coded):
    """A stack of matrices, or one of them, whose transposes are in the file. So each page has elements of all ranks."""

    def row(self, number: int) -> Mxfp4Experts:
        rows = (piece.tensor.row(number) for piece in self.pieces)
        return Mxfp4Experts(self.shape[1:], tuple(whole(row, *row.shape) for row in rows))

    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        codes, exponents = pieces
        return CodedMatrix(
            lines=codes.flatten(1),
            layout="nibbles",
            numbers=E2M1,
            scales=exponents.t()[first // _BLOCK :],
            scale_numbers=byte_numbers(exponents.dtype, exponents.device),
            rows=_BLOCK,
            row_in_group=first % _BLOCK,
            columns=1,
            row=first,
            through=torch.bfloat16,
        )


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
