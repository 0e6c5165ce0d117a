"""GPTQ and AWQ: matrices stored with their inputs down the rows, decoded in fp16's arithmetic.

Both have `qweight` and `qzeros` in I32, and fp16 `scales` of shape (groups, outputs) for groups of inputs. A value is
(code - zero) · scale.

  * GPTQ, 4 or 8 bits: a word of `qweight` has the codes of several inputs of one output, the first in the lowest bits.
    A word of `qzeros` has those of several outputs. `g_idx` is the group of each input; it is used if `desc_act` says
    that they are not in order. From each word of zeros a word of ones is subtracted, except in "gptq_v2". It borrows
    from the next code if a zero is 0: `convert_gptq_v1_to_v2_format_module` in GPTQModel's utils/model.py, and
    `dequantize_weight` in its nn_modules/qlinear.
  * AWQ "gemm", 4 bits: a word has the codes of eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7: `dequantize_gemm` in
    AutoAWQ's utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import ConfigError, parsing, printable
from infinity.store.foreign import StoredParameter, StoredTensor
from infinity.store.formats.coded import Coded, Piece, expect, whole
from infinity.store.formats.coded_matrix import CodedMatrix, codes_of_nibbles

_PARTS = ("qweight", "qzeros", "scales")
_FLOATS = ("F16", "BF16", "F32")
_NUMBERS = (*map(float, range(16)),)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, eq=False)
class GptqColumns(Coded):
    """A matrix in GPTQ's codes of `bits`; `ones` is to be added to words of zeros.

    Pieces: codes, zeros, scales, and the group of each input if they are not in order.
    """

    bits: int
    ones: int

    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        codes, words, scales, *order = pieces
        zeros = _unpacked(words + self.ones, self.bits).flatten(1)[:, first % (32 // self.bits) :][:, :count]
        return CodedMatrix(
            lines=codes,
            layout="words",
            numbers=_NUMBERS if self.bits == 4 else torch.uint8,
            scales=scales.t(),
            zeros=zeros.float().t(),
            columns=order[0] if order else self.shape[1] // len(scales),
            through=scales.dtype,
        )


@dataclass(frozen=True, eq=False)
class AwqColumns(Coded):
    """A matrix in AWQ's codes. Pieces: codes, zeros, scales."""

    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        codes, words, scales = pieces
        return CodedMatrix(
            lines=codes,
            layout="nibbles",
            order=_AWQ_ORDER,
            numbers=_NUMBERS,
            scales=scales.t(),
            zeros=codes_of_nibbles(words, _AWQ_ORDER, first % 8, first % 8 + count).float(),
            columns=self.shape[1] // len(scales),
            row=first % 8,
            through=scales.dtype,
        )


def gptq_parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Return the parameters that GPTQ's files hold, including plain tensors."""
    form = str(config.get("checkpoint_format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise ConfigError(f"GPTQ's format {printable(form)!r} is not supported: use weights in gptq or gptq_v2")
    return _joined(tensors, (*_PARTS, "g_idx"), lambda parts: _gptq(parts, config, zeros_less=form == "gptq"))


def awq_parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Return the parameters that AWQ's files hold, including plain tensors."""
    form, bits = str(config.get("version", "gemm")).lower(), config.get("bits", 4)
    if form != "gemm" or bits != 4:
        raise ConfigError(
            f"AWQ's format {printable(form)!r} with {bits} bits is not supported: use 4-bit weights in gemm"
        )
    return _joined(tensors, _PARTS, lambda parts: _awq(parts, config))


def _joined(
    tensors: Mapping[str, StoredTensor],
    names: Sequence[str],
    parameter_of: Callable[[Sequence[StoredTensor]], StoredParameter],
) -> dict[str, StoredParameter]:
    """Return the parameters, each made of the tensors `names` of a module, and the other tensors."""
    made: dict[str, StoredParameter] = dict(tensors)
    for name in tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            with parsing(f"{tensors[name].path}: the tensors of {module} don't fit together", "fetch or save it again"):
                made[f"{module}.weight"] = parameter_of([tensors[f"{module}.{part}"] for part in names])
            for part in names:
                made.pop(f"{module}.{part}", None)
    return made


def _gptq(parts: Sequence[StoredTensor], config: Mapping[str, Any], *, zeros_less: bool) -> GptqColumns:
    codes, zeros, scales, order = parts
    bits = int(config["bits"])
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits instead of 4 or 8")
    (inputs,), (groups, outputs) = expect(order, ["I32"], *order.shape).shape, scales.shape
    in_word = 32 // bits
    if inputs % in_word or outputs % in_word:
        raise ValueError(f"a matrix of shape {(outputs, inputs)}")
    _check_groups(inputs, groups, config)
    pieces = [
        Piece(expect(codes, ["I32"], inputs // in_word, outputs), across=True),
        Piece(expect(zeros, ["I32"], groups, outputs // in_word), rows=in_word, across=True),
        Piece(expect(scales, _FLOATS, groups, outputs), across=True),
    ]
    if config.get("desc_act"):
        pieces.append(whole(order, inputs))
    return GptqColumns((outputs, inputs), tuple(pieces), bits, 0xFFFFFFFF // ((1 << bits) - 1) if zeros_less else 0)


def _awq(parts: Sequence[StoredTensor], config: Mapping[str, Any]) -> AwqColumns:
    codes, zeros, scales = parts
    (inputs, words), (groups, outputs) = codes.shape, scales.shape
    if outputs != 8 * words:
        raise ValueError(f"a matrix of {8 * words} rows with scales for {outputs}")
    _check_groups(inputs, groups, config)
    pieces = (
        Piece(expect(codes, ["I32"], inputs, words), rows=8, across=True),
        Piece(expect(zeros, ["I32"], groups, words), rows=8, across=True),
        Piece(expect(scales, _FLOATS, groups, outputs), across=True),
    )
    return AwqColumns((outputs, inputs), pieces)


def _check_groups(inputs: int, groups: int, config: Mapping[str, Any]) -> None:
    size = int(config["group_size"])
    size = size if size > 0 else inputs
    if groups != inputs // size or inputs % size:
        raise ValueError(f"{inputs} inputs in {groups} groups of {size}")


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of each word, the one in the lowest bits first, in a new last dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return words[..., None] >> shifts & (1 << bits) - 1
