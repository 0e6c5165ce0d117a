"""The formats of compressed-tensors, and ModelOpt's, which have other names. Its NVFP4's global scale multiplies.

  * pack-quantized: `weight_packed` has codes of 4 or 8 bits in I32, the first in the lowest bits. An integer is its
    code minus half the range. `weight_scale` has a scale per row or per group of columns. `weight_g_idx` is the group
    of each column if they are not in order. `weight_zero_point` is packed like the weight, but down the rows.
    `weight_shape` has the rows and columns.
  * int-, float- and naive-quantized: `weight` is I8 or fp8, `weight_zero_point` I8.
  * nvfp4-pack-quantized: two fp4 codes per byte, the first in the low bits; an fp8 scale per 16 columns, to be divided
    by `weight_global_scale`.
  * mxfp4-pack-quantized: the same with 32 columns, and with exponents of two as scales.

Values are computed in the dtype of the scales: `_dequantize` in compressed_tensors/quantization/lifecycle. Values of
fp4 are rounded to bf16 first, as in `unpack_fp4_from_uint8`, but not in ModelOpt (`NVFP4QTensor.dequantize`). ModelOpt
rounds scales of fp8 to the dtype of compute (`FP8QTensor.dequantize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import ConfigError, parsing, printable
from infinity.store.foreign import DTYPES, StoredParameter, StoredTensor, read_bytes
from infinity.store.formats.coded import E2M1, Coded, Piece, expect, shaped, whole, without_activations
from infinity.store.formats.coded_matrix import CodedMatrix, byte_numbers
from infinity.store.formats.fp8 import scaled_fp8

_FORMATS = {
    "dense",
    "mixed-precision",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
}
_FLOATS = ("BF16", "F16", "F32")
_BITS = (4, 8)
_INT4 = (*map(float, range(-8, 8)),)


@dataclass(frozen=True, eq=False)
class IntGroups(Coded):
    """A matrix of integers, with a scale and optionally a zero per row or group of columns.

    Pieces: codes, scales, zeros if `zeros`, and the group of each column if `ordered`. packed: the bits of a code in an
    I32; 0 if codes are I8.
    """

    packed: int
    zeros: bool
    ordered: bool

    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        codes, scales, *others = pieces
        zeros = self._zeros(others[0], first, count).float() if self.zeros else None
        if self.packed == 8:  # packed codes have half the range added
            zeros = torch.full((1, 1), 128.0, device=codes.device) + (0 if zeros is None else zeros)
        return CodedMatrix(
            lines=codes,
            numbers=_INT4 if self.packed == 4 else torch.uint8 if self.packed else torch.int8,
            scales=scales.expand(count, -1),
            zeros=None if zeros is None else zeros.expand(count, scales.shape[1]),
            columns=others[-1] if self.ordered else self.shape[1] // scales.shape[1],
            through=scales.dtype,
        )

    def _zeros(self, zeros: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return the zeros of rows [first, first + count)."""
        if not self.packed:
            return zeros
        number = torch.arange(first, first + count, device=zeros.device)
        in_word = 32 // self.packed
        shifts = number.remainder(in_word).mul(self.packed).to(torch.int32)[:, None]
        words = zeros[number // in_word - first // in_word]
        return (words >> shifts & (1 << self.packed) - 1) - (1 << self.packed - 1)


@dataclass(frozen=True, eq=False)
class Fp4Groups(Coded):
    """A matrix of fp4 with a scale per group of columns. A global scale, if any, divides or multiplies these."""

    divides: bool
    through: torch.dtype | None

    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        codes, scales, *of_all = pieces
        numbers = byte_numbers(scales.dtype, scales.device)
        assert numbers is not None
        for factor in of_all:
            numbers = numbers / factor.view(()) if self.divides else numbers * factor.view(())
        return CodedMatrix(
            lines=codes,
            numbers=E2M1,
            scales=scales,
            scale_numbers=numbers,
            columns=self.shape[1] // scales.shape[1],
            through=self.through,
        )


def parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Return the parameters that these tensors hold, including plain tensors."""
    groups = [dict(group) for group in dict(config.get("config_groups") or {}).values()]
    _check_known(config, groups)
    schemes = [dict(group["weights"]) for group in groups if group.get("weights")]
    tensors = without_activations(tensors)
    made: dict[str, StoredParameter] = dict(tensors)
    for name in tensors:
        weight = name.removesuffix("_packed")
        if (name == weight and tensors[name].dtype not in ("I8", "F8_E4M3", "F8_E5M2")) or _is_part(name):
            continue
        with parsing(f"{tensors[name].path}: the tensors of {weight} don't fit together", "fetch or save it again"):
            parts = {key: tensors.get(f"{weight}_{key}") for key in ("zero_point", "g_idx", "global_scale", "shape")}
            made[weight] = _parameter(tensors[name], tensors[f"{weight}_scale"], parts, schemes)
            for part in ("packed", "scale", *parts):
                made.pop(f"{weight}_{part}", None)
    return made


def modelopt_parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Return the parameters that ModelOpt's files hold in FP8 and NVFP4, including plain tensors."""
    tensors = without_activations(tensors)
    made: dict[str, StoredParameter] = dict(tensors)
    for weight, codes in tensors.items():
        if codes.dtype not in ("U8", "F8_E4M3") or _is_part(weight):
            continue
        with parsing(f"{codes.path}: the tensors of {weight} don't fit together", "fetch or save it again"):
            scale = tensors[f"{weight}_scale"]
            if codes.dtype == "U8":
                of_all = tensors[f"{weight}_scale_2"]
                made[weight] = _fp4_groups(codes, scale, of_all, divides=False, through=None)
            else:
                made[weight] = scaled_fp8(codes, scale, None, rounds_scales=scale.dtype in _FLOATS)
            for part in ("scale", "scale_2"):
                made.pop(f"{weight}_{part}", None)
    return made


def _is_part(name: str) -> bool:
    return name.endswith(("_scale", "_zero_point", "_scale_2"))


def _check_known(config: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise ConfigError if the config has a format, sparsity or transform that is not supported."""
    formats = {str(one.get("format") or "dense") for one in (config, *groups)}
    sparsity = str(dict(config.get("sparsity_config") or {}).get("format", "dense"))
    for unknown in sorted(formats - _FORMATS) + ([sparsity] if sparsity != "dense" else []):
        raise ConfigError(
            f"compressed-tensors' format {printable(unknown)!r} is not supported: use weights in another format"
        )
    if dict(config.get("transform_config") or {}).get("config_groups"):
        raise ConfigError("compressed-tensors' transform_config is not supported: use weights without transforms")


def _parameter(
    codes: StoredTensor,
    scale: StoredTensor,
    parts: Mapping[str, StoredTensor | None],
    schemes: list[dict[str, Any]],
) -> StoredParameter:
    if codes.dtype == "U8":
        return _fp4_groups(codes, scale, parts["global_scale"], divides=True, through=torch.bfloat16)
    if scale.dtype not in _FLOATS:
        raise ValueError(f"scales in {scale.dtype}")
    if codes.dtype in ("F8_E4M3", "F8_E5M2"):
        block = next((scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")), None)
        if block is None and scale.shape[:1] not in ((), (1,), codes.shape[:1]):
            raise ValueError(f"{codes.shape[0]} rows with scales of shape {scale.shape}")
        return scaled_fp8(codes, scale, block, through=DTYPES[scale.dtype])
    rows, width = expect(codes, ["I32", "I8"], *codes.shape).shape
    packed = 0
    if codes.dtype == "I32":
        packed = _bits(schemes, width, parts["shape"])
        width = width * 32 // packed
    if scale.shape == (1,):
        scales = whole(scale, 1, 1)
    else:
        groups = scale.shape[1]
        sizes = {int(scheme.get("group_size") or 0) for scheme in schemes}
        width = next((groups * size for size in sizes if 0 <= width - groups * size < 8), width)
        scales = Piece(expect(scale, _FLOATS, rows, groups))
        if width % groups:
            raise ValueError(f"a matrix of {width} columns with scales for {groups} groups")
    groups = scales.tensor.shape[1]
    pieces = [Piece(codes), scales]
    if (zeros := parts["zero_point"]) is not None:
        words = 32 // packed if packed else 1
        lines = scales.tensor.shape[0]
        pieces.append(Piece(expect(zeros, ["I32" if packed else "I8"], -(-lines // words), groups), rows=words))
    if (order := parts["g_idx"]) is not None:
        pieces.append(whole(expect(order, ["I32"], width), width))
    return IntGroups((rows, width), tuple(pieces), packed, zeros is not None, order is not None)


def _bits(schemes: list[dict[str, Any]], words: int, shape: StoredTensor | None) -> int:
    """Return the bits of packed integers: if schemes differ, those with which the columns in `shape` need `words`."""
    bits = {int(scheme["num_bits"]) for scheme in schemes if scheme.get("type", "int") == "int"}
    if len(bits) > 1 and shape is not None:
        _, columns = read_bytes(expect(shape, ["I64", "I32"], 2)).view(DTYPES[shape.dtype]).tolist()
        bits = {number for number in bits if -(-columns * number // 32) == words} or bits
    if len(bits) != 1 or not bits <= {*_BITS}:
        raise ValueError(f"integers of {sorted(bits)} bits instead of only 4 or only 8")
    return bits.pop()


def _fp4_groups(
    codes: StoredTensor,
    scale: StoredTensor,
    of_all: StoredTensor | None,
    *,
    divides: bool,
    through: torch.dtype | None,
) -> Fp4Groups:
    rows, width = codes.shape[0], 2 * codes.shape[1]
    groups = scale.shape[1]
    expect(scale, ["F8_E4M3"] if of_all is not None else ["U8", "F8_E8M0"], rows, groups)
    if width % groups:
        raise ValueError(f"a matrix of {width} columns with scales for {groups} groups")
    pieces = [Piece(expect(codes, ["U8"], rows, width // 2)), Piece(scale)]
    if of_all is not None:
        pieces.append(whole(expect(shaped(of_all, 1, 1), ["F32"], 1, 1), 1, 1))
    return Fp4Groups((rows, width), tuple(pieces), divides, through)
