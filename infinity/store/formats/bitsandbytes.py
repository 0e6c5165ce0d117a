"""Matrices in 8 or 4 bits as bitsandbytes stores them.

  * int8 (LLM.int8): an int8 code per element, and an fp32 scale per row (`SCB`). An element is code · (scale / 127), as
    in the forward of bitsandbytes' own training.
  * 4 bits (NF4, FP4): a 4-bit index per element into a table of 16 values, the first of two in the high bits; and a
    scale per block of 64 (or so) elements of the flattened matrix, across its rows. An element is value · scale. With
    "double quantisation" scales are coded too: an 8-bit index into a table of 256 values, an fp32 scale per 256 of
    them, and one offset.

The formats: `QuantState.as_dict` and `int8_vectorwise_quant` in bitsandbytes/functional.py,
https://huggingface.co/docs/bitsandbytes. bitsandbytes decodes the blocks here as one long row. If the rows of a matrix
are not whole blocks, bitsandbytes 0.50 on a CPU gives wrong values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.errors import ConfigError, parsing
from infinity.store.foreign import FileRange, StoredParameter, StoredTensor, parse_shape, read_bytes

_STATE = ".quant_state.bitsandbytes__"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_NUMELS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The block sizes that bitsandbytes decodes."""
_AT_ONCE_NUMEL = 1 << 20
"""Elements decoded at once: they stay in the cache of a core."""


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
    flat = StoredTensor(scales.path, scales.dtype, (codes.shape[0],), scales.offset, scales.nbytes)
    return Int8Rows(codes, flat)


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
    table = _floats(where[f"{name}.quant_map"], 16)
    if not torch.equal(table, _bitsandbytes().get_4bit_type(kind, device="cpu")):
        raise ValueError("its quant_map differs from the table in bitsandbytes, which decodes with its own")
    if not nested:
        return FourBitBlocks(codes, scales, shape, kind, block_numel, table)
    at_once, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
    if at_once < 1 or not math.isfinite(offset):
        raise ValueError(f"scales in blocks of {at_once} with offset {offset}")
    scale_scales = _floats(where[f"{name}.nested_absmax"], -(-blocks // at_once))
    scale_table = _floats(where[f"{name}.nested_quant_map"], 256)
    return FourBitBlocks(codes, scales, shape, kind, block_numel, table, scale_table, scale_scales, at_once, offset)


def _floats(stored: StoredTensor, count: int) -> torch.Tensor:
    """Return a small fp32 tensor. Raises ValueError unless it has `count` numbers, all finite."""
    if stored.dtype != "F32" or stored.nbytes != 4 * count:
        raise ValueError(f"{stored.nbytes} bytes in {stored.dtype} instead of {count} numbers in F32")
    numbers = read_bytes(stored).view(torch.float32)
    if not numbers.isfinite().all():
        raise ValueError("numbers that are not finite")
    return numbers


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """A matrix in int8 with a scale per row."""

    codes: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        return *self.codes.ranges(first, count), *self.scales.ranges(first, count)

    def decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        codes = parts[0].view(torch.int8).view(out.shape)
        scales = parts[1].clone().view(_FLOATS[self.scales.dtype]).float().mul(1 / 127)[:, None]
        step = max(1, _AT_ONCE_NUMEL // max(1, out.shape[1]))
        for row in range(0, len(out), step):
            torch.mul(codes[row : row + step], scales[row : row + step], out=out[row : row + step])


@dataclass(frozen=True, eq=False)
class FourBitBlocks:
    """A matrix of 4-bit indices with a scale per block of `block_numel` elements.

    `scale_table`, `scale_scales` (fp32, one per `scales_at_once` scales) and `scale_offset` decode coded scales.
    """

    codes: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    kind: str
    block_numel: int
    table: torch.Tensor
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
        begin, _ = self._blocks(first, len(out))
        skip = first * out.shape[1] - begin * self.block_numel  # elements of the first block that are of the row before
        flat = out.view(-1)
        step = _AT_ONCE_NUMEL if codes.device.type == "cpu" else skip + flat.numel()
        step = -(-step // self.block_numel) * self.block_numel
        for at in range(0, skip + flat.numel(), step):
            numel = min(step, 2 * codes.numel() - at)
            block, blocks = at // self.block_numel, -(-numel // self.block_numel)
            stored = scales[block * self._scale_bytes : (block + blocks) * self._scale_bytes]
            of_blocks = self._scales(stored, begin + block)
            values = self._values(codes[at // 2 : (at + numel) // 2], of_blocks, numel, out.dtype)
            low, high = max(at, skip), min(at + numel, skip + flat.numel())
            flat[low - skip : high - skip].copy_(values[low - at : high - at])

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

    def _values(self, codes: torch.Tensor, scales: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        functional = _bitsandbytes()
        state = functional.QuantState(
            absmax=scales.contiguous(),
            shape=torch.Size([numel]),
            code=self._on(codes.device, "table"),
            blocksize=self.block_numel,
            quant_type=self.kind,
            dtype=dtype,
        )
        values: torch.Tensor = functional.dequantize_4bit(codes.reshape(-1, 1), state)
        return values.view(-1)

    def _on(self, device: torch.device, name: str) -> torch.Tensor:
        """Return a table on a device. It is copied there once."""
        if (device, name) not in self._tables:
            self._tables[device, name] = getattr(self, name).to(device)
        return self._tables[device, name]


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError:
        raise ConfigError(
            "decoding these 4-bit weights needs bitsandbytes: pip install bitsandbytes, or use weights in 8 or 16 bits"
        ) from None
    return bitsandbytes.functional
