"""Matrices in 8 or 4 bits as bitsandbytes stores them.

  * int8 (LLM.int8): an int8 code per element, and an fp32 scale per row (`SCB`). An element is code · (scale / 127), as
    in the forward of bitsandbytes' own training.
  * 4 bits (NF4, FP4): a 4-bit index per element into a table of 16 values, the first of two in the high bits; and a
    scale per block of 64 (or so) elements of the flattened matrix, across its rows. An element is value · scale. With
    "double quantisation" scales are coded too: an 8-bit index into a table of 256 values, an fp32 scale per 256 of
    them, and one offset.

The formats: `QuantState.as_dict` and `int8_vectorwise_quant` in bitsandbytes/functional.py,
https://huggingface.co/docs/bitsandbytes. Values are those of bitsandbytes, whose version 0.50 gives others on a CPU if
the rows of a matrix are not whole blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.errors import parsing
from infinity.store.foreign import FileRange, StoredParameter, StoredTensor, parse_shape, read_bytes
from infinity.store.formats.coded import Coded, Piece, shaped
from infinity.store.formats.coded_matrix import CodedMatrix

_STATE = ".quant_state.bitsandbytes__"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*(value / 12 for value in _FP4), *(-value / 12 for value in _FP4)),
}
"""The values of codes. bitsandbytes uses these and ignores the table in a file."""
_BLOCK_NUMELS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The block sizes that bitsandbytes decodes."""


def parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Return the parameters that these tensors hold, including plain tensors. Names and states describe the format, so
    `config` is not used."""
    parts = _parts(tensors)
    made: dict[str, StoredParameter] = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for part in sorted(parts & tensors.keys()):
        name = f"{part.removesuffix('.SCB')}.weight" if part.endswith(".SCB") else part.partition(_STATE)[0]
        if name not in tensors or not (part.endswith(".SCB") or _STATE in part):
            continue
        problem = f"{tensors[name].path}: the parts of {name}, which is in 4 or 8 bits, don't fit together"
        with parsing(problem, "fetch or save it again"):
            if part.endswith(".SCB"):
                layout = tensors.get(f"{name.removesuffix('.weight')}.weight_format")
                made[name] = _int8_rows(tensors[name], tensors[part], layout)
            else:
                state = json.loads(read_bytes(tensors[part]).numpy().tobytes())
                made[name] = _four_bit_blocks(name, tensors, part.partition(_STATE)[2], state)
    return made


def _parts(names: Iterable[str]) -> frozenset[str]:
    """Return the names of parts of coded parameters, except the codes, which have the parameter's name."""
    parts: set[str] = set()
    for name in names:
        if _STATE in name:
            whole = name[: name.index(_STATE)]
            parts |= {
                name,
                *(f"{whole}.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
            }
        elif name.endswith(".SCB"):
            parts |= {name, f"{name.removesuffix('.SCB')}.weight_format"}
    return frozenset(parts)


def _int8_rows(codes: StoredTensor, scales: StoredTensor, layout: StoredTensor | None) -> Int8Rows:
    if layout is not None and int(read_bytes(layout).sum()) != 0:
        raise ValueError("its weight_format is not 0 (rows)")
    if (
        codes.dtype != "I8"
        or len(codes.shape) != 2
        or math.prod(scales.shape) != codes.shape[0]
        or scales.dtype not in _FLOATS
    ):
        raise ValueError(
            f"codes of shape {codes.shape} in {codes.dtype} with scales of shape {scales.shape} in {scales.dtype}"
        )
    if codes.nbytes != math.prod(codes.shape) or scales.nbytes != codes.shape[0] * _FLOATS[scales.dtype].itemsize:
        raise ValueError("the size of a tensor does not match its shape")
    return Int8Rows(codes.shape, (Piece(codes), Piece(shaped(scales, codes.shape[0]))))


def _four_bit_blocks(
    name: str, where: Mapping[str, StoredTensor], kind: str, state: Mapping[str, Any]
) -> FourBitBlocks:
    codes, scales = where[name], where[f"{name}.absmax"]
    shape, block_numel = parse_shape(state["shape"]), int(state["blocksize"])
    nested = f"{name}.nested_absmax" in where
    if state["quant_type"] != kind or kind not in ("nf4", "fp4") or block_numel not in _BLOCK_NUMELS:
        raise ValueError(f"{state['quant_type']} in blocks of {block_numel} under the name of {kind}")
    numel = math.prod(shape)
    blocks = -(-numel // block_numel)
    if len(shape) != 2 or min(shape) < 1 or numel % 2 or codes.nbytes != numel // 2:
        raise ValueError(f"{codes.nbytes} bytes of codes for the shape {shape}")
    if scales.nbytes != blocks * (1 if nested else 4) or scales.dtype != ("U8" if nested else "F32"):
        raise ValueError(f"{scales.nbytes} bytes of scales in {scales.dtype} for {blocks} blocks")
    table = tuple(_floats(where[f"{name}.quant_map"], 16).tolist())
    if table != tuple(torch.tensor(_TABLES[kind]).tolist()):
        raise ValueError("its quant_map differs from the table that bitsandbytes decodes with")
    if not nested:
        return FourBitBlocks(codes, scales, shape, block_numel, table)
    at_once, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
    if at_once < 1 or not math.isfinite(offset):
        raise ValueError(f"scales in blocks of {at_once} with offset {offset}")
    scale_scales = _floats(where[f"{name}.nested_absmax"], -(-blocks // at_once))
    scale_table = _floats(where[f"{name}.nested_quant_map"], 256)
    return FourBitBlocks(codes, scales, shape, block_numel, table, scale_table, scale_scales, at_once, offset)


def _floats(stored: StoredTensor, count: int) -> torch.Tensor:
    """Return a small fp32 tensor. Raises ValueError unless it has `count` numbers, all finite."""
    if stored.dtype != "F32" or stored.nbytes != 4 * count:
        raise ValueError(f"{stored.nbytes} bytes in {stored.dtype} instead of {count} numbers in F32")
    numbers = read_bytes(stored).view(torch.float32)
    if not numbers.isfinite().all():
        raise ValueError("numbers that are not finite")
    return numbers


@dataclass(frozen=True, eq=False)
class Int8Rows(Coded):
    """A matrix in int8 with a scale per row."""

    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        codes, scales = pieces
        return CodedMatrix(
            lines=codes, numbers=torch.int8, scales=scales.float().mul(1 / 127)[:, None], columns=self.shape[1]
        )


@dataclass(frozen=True, eq=False)
class FourBitBlocks:
    """A matrix of 4-bit indices with a scale per block of `block_numel` elements.

    `scale_table`, `scale_scales` (fp32, one per `scales_at_once` scales) and `scale_offset` decode coded scales.
    """

    codes: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    block_numel: int
    table: tuple[float, ...]
    scale_table: torch.Tensor | None = None
    scale_scales: torch.Tensor | None = None
    scales_at_once: int = 256
    scale_offset: float = 0.0
    _tables: dict[tuple[torch.device, str], torch.Tensor] = field(default_factory=dict, repr=False)

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        """Return the ranges of whole blocks of codes, and of their scales."""
        begin, end = self._blocks(first, count)
        elements = min(end * self.block_numel, math.prod(self.shape)) - begin * self.block_numel
        codes, scales = self.codes, self.scales
        return (
            FileRange(codes.path, codes.offset + begin * self.block_numel // 2, max(0, -(-elements // 2))),
            FileRange(scales.path, scales.offset + begin * self._scale_bytes, (end - begin) * self._scale_bytes),
        )

    def decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        codes, scales = parts
        count, width = out.shape
        begin, _ = self._blocks(first, count)
        skip = first * width - begin * self.block_numel  # elements of the first block that are of the row before
        rows = 1 if width % self.block_numel else count  # blocks that reach across rows: decoded as one long row
        CodedMatrix(
            lines=codes.view(rows, -1),
            numbers=self.table,
            high_first=True,
            scales=self._scales(scales, begin).view(rows, -1),
            columns=self.block_numel,
            column=skip,
        ).decode(out.view(rows, -1))

    @property
    def _scale_bytes(self) -> int:
        return 4 if self.scale_table is None else 1

    def _blocks(self, first: int, count: int) -> tuple[int, int]:
        """Return the range of blocks that contain rows [first, first + count)."""
        row = math.prod(self.shape[1:])
        begin = first * row // self.block_numel
        return begin, -(-(first + count) * row // self.block_numel) if count else begin

    def _scales(self, stored: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the scales of the blocks from `begin` on (fp32)."""
        if self.scale_table is None or self.scale_scales is None:
            return stored.clone().view(torch.float32)
        number = torch.arange(begin, begin + stored.numel(), device=stored.device) // self.scales_at_once
        table, scales = self._on(stored.device, "scale_table"), self._on(stored.device, "scale_scales")
        return table[stored.long()] * scales[number] + self.scale_offset

    def _on(self, device: torch.device, name: str) -> torch.Tensor:
        """Return a table on a device. It is copied there once."""
        if (device, name) not in self._tables:
            self._tables[device, name] = getattr(self, name).to(device)
        return self._tables[device, name]
