"""The common part of all families: the bytes that a coded parameter needs for some rows, and the arithmetic of decoding.

[Note: Decoding]
A value is (code - zero) · scale. It is computed and rounded as in the library of the format, then rounded to the dtype
of compute. Decoding runs in chunks that stay in the cache of a core, with torch's operations. These are vectorised, use
all threads of torch, and give the same on a GPU, to which the codes are copied.

  * 4-bit codes: two bytes index a table that has the four values of each pair of bytes.
  * fp8: on a CPU torch converts it element by element. Instead, the bits of e4m3 are moved to those of fp16, which
    gives the value over 256.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.store.foreign import DTYPES, FileRange, StoredTensor, as_elements

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of fp4, by code. OCP Microscaling Formats v1.0, 5.3.3."""

_AT_ONCE_NUMEL = {"cpu": 1 << 18}
"""Elements decoded at once, by kind of device: on a CPU they stay in the cache of a core."""
_AT_ONCE_NUMEL_ELSEWHERE = 1 << 25

_ACTIVATIONS = ("input", "output", "activation", "q", "k", "v")
_OF_ACTIVATIONS = tuple(f".{of}_{part}" for of in _ACTIVATIONS for part in ("scale", "global_scale", "zero_point"))


def without_activations(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without the scales and zero points of activations, which are not quantised here."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_OF_ACTIVATIONS)}


@dataclass(frozen=True)
class Piece:
    """A tensor of a coded parameter.

    rows: the number of rows of the parameter that share a row of the tensor; 0 if every row needs the whole tensor.
    across: True if they share a column instead.
    """

    tensor: StoredTensor
    rows: int = 1
    across: bool = False

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        low, number = self._shared(first, count)
        if not self.across:
            return self.tensor.ranges(low, number)
        lines, columns = self.tensor.shape
        size = self.tensor.nbytes // (lines * columns)
        if number in (0, columns):
            return (FileRange(self.tensor.path, self.tensor.offset, number * lines * size),)
        starts = (self.tensor.offset + (line * columns + low) * size for line in range(lines))
        return tuple(FileRange(self.tensor.path, start, number * size) for start in starts)

    def view(self, parts: Sequence[torch.Tensor], first: int, count: int) -> torch.Tensor:
        """Return the bytes of `ranges` as a tensor of some rows, or columns."""
        _, number = self._shared(first, count)
        elements = [as_elements(part, DTYPES[self.tensor.dtype]) for part in parts]
        lines = self.tensor.shape[0] if self.across else number
        whole = elements[0] if len(elements) == 1 else torch.cat(elements)
        return whole.view(lines, *((number,) if self.across else self.tensor.shape[1:]))

    def _shared(self, first: int, count: int) -> tuple[int, int]:
        """Return the first row or column that these rows of the parameter need, and the number of them."""
        if not count:
            return 0, 0
        if not self.rows:
            return 0, self.tensor.shape[1 if self.across else 0]
        return first // self.rows, -(-(first + count) // self.rows) - first // self.rows


@dataclass(frozen=True, eq=False)
class Coded(abc.ABC):
    """A parameter of several tensors. A family derives from it and defines `fill`."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def ranges(self, first: int, count: int) -> tuple[FileRange, ...]:
        return tuple(file_range for piece in self.pieces for file_range in piece.ranges(first, count))

    def decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        views, at = [], 0
        for piece in self.pieces:
            end = at + len(piece.ranges(first, len(out)))
            views.append(piece.view(parts[at:end], first, len(out)))
            at = end
        self.fill(out, first, *views)

    @abc.abstractmethod
    def fill(self, out: torch.Tensor, first: int, *pieces: torch.Tensor) -> None:
        """Set `out`, rows from `first` on, from the views of the pieces for these rows."""


def whole(tensor: StoredTensor, *shape: int) -> Piece:
    """Return a piece in another shape that every row needs completely."""
    return Piece(shaped(tensor, *shape), rows=0)


def shaped(tensor: StoredTensor, *shape: int) -> StoredTensor:
    """Return the tensor in another shape. Raises ValueError if the number of elements differs."""
    if math.prod(tensor.shape) != math.prod(shape):
        raise ValueError(f"a tensor of shape {tensor.shape} instead of {shape}")
    return replace(tensor, shape=shape)


def expect(tensor: StoredTensor, dtypes: Iterable[str], *shape: int) -> StoredTensor:
    """Return the tensor. Raises ValueError if its dtype or shape differs."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise ValueError(f"{tensor.dtype} of shape {tensor.shape} instead of {'/'.join(dtypes)} of shape {shape}")
    return tensor


def decode_blocks(
    out: torch.Tensor,
    values: Callable[[slice], torch.Tensor],
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    columns: int | torch.Tensor,
    through: torch.dtype | None = None,
) -> None:
    """Set the matrix `out` to (values - zeros) · scales, computed in the dtype of `scales`: [Note: Decoding].

    Args:
        out: a contiguous matrix.
        values: returns the unscaled values of some rows, in new memory if they have the dtype of `scales`.
        scales, zeros: one per row and group of columns.
        columns: the number of adjacent columns in a group, or the group of each column.
        through: the dtype that values are rounded to before the dtype of `out`.
    """

    def blocks(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(len(matrix), scales.shape[1], -1) if aligned else matrix

    def spread(factors: torch.Tensor) -> torch.Tensor:
        if aligned:
            return factors[:, :, None]
        if isinstance(columns, int):
            return factors.repeat_interleave(columns, 1)[:, : out.shape[1]]
        return factors[:, columns]

    if scales.dtype is torch.float16:  # slow to convert on a CPU; products are exact in fp32
        scales, zeros, through = scales.float(), None if zeros is None else zeros.float(), torch.float16
    through = None if through is out.dtype else through
    aligned = isinstance(columns, int) and out.shape[1] == columns * scales.shape[1]
    step = max(1, _AT_ONCE_NUMEL.get(out.device.type, _AT_ONCE_NUMEL_ELSEWHERE) // out.shape[1])
    for low in range(0, len(out), step):
        rows = slice(low, min(low + step, len(out)))
        chunk = values(rows).to(scales.dtype)
        if zeros is not None:
            blocks(chunk).sub_(spread(zeros[rows]))
        direct = chunk.dtype is out.dtype and through is None
        torch.mul(blocks(chunk), spread(scales[rows]), out=blocks(out[rows] if direct else chunk))
        if not direct:
            out[rows].copy_(chunk if through is None else chunk.to(through).float())


def row_scales(scales: torch.Tensor, first: int, count: int, rows: int) -> torch.Tensor:
    """Return the scale of each of rows [first, first + count), of which `rows` share one.

    scales: those of the blocks that these rows touch.
    """
    if rows == 1:
        return scales
    numbers = torch.arange(first, first + count, device=scales.device) // rows - first // rows
    return scales[numbers]


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as fp32, exactly. Bytes are exponents of two, plus 127."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()


def fp8_values(codes: torch.Tensor) -> torch.Tensor:
    """Return fp8 as fp32, exactly."""
    if codes.device.type != "cpu" or codes.dtype is not torch.float8_e4m3fn:
        return codes.float()
    bits = codes.view(torch.uint8)
    if int(torch.bitwise_and(bits, 0x7F).max()) == 0x7F:  # there is a NaN
        return codes.float()
    moved = bits.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return moved.view(torch.float16).float().mul_(256)


def nibbles(codes: torch.Tensor, table: Sequence[float], columns: int) -> torch.Tensor:
    """Return the values of 4-bit codes, the first of two in the low bits, as rows of `columns` (bf16).

    table: the 16 values, exact in bf16.
    """
    flat = codes.contiguous().view(torch.uint8).view(-1)
    if flat.numel() % 2:
        flat = torch.nn.functional.pad(flat, (0, 1))
    index = as_elements(flat, torch.int16).to(torch.int32).add_(1 << 15)
    four = torch.index_select(_table(tuple(table), codes.device), 0, index).view(torch.bfloat16)
    return four[: codes.numel() * codes.itemsize * 2].view(len(codes), -1)[:, :columns]


@functools.cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return the four values of each pair of bytes as one int64, from the smallest int16 on."""
    pairs = torch.arange(-(1 << 15), 1 << 15)
    numbers = torch.stack([pairs >> shift & 15 for shift in (0, 4, 8, 12)], 1)
    return torch.tensor(values, dtype=torch.bfloat16)[numbers].view(torch.int64).view(-1).to(device)
