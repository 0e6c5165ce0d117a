"""Decodes a matrix of codes: by csrc/decode in host memory, by torch's operations on other devices.

[Note: Decoding]
A value is (number - zero) · scale, where a code stands for the number, in fp32. It is rounded to the dtype that the
library of the format computes in, and then to the dtype of compute. csrc/decode does this in one pass over memory, with
all threads of torch ([Note: Rounding] in csrc/decode/kernels.inc). Both ways give the same bits, except for the payload
of a NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from infinity import _decode

INSTRUCTIONS: tuple[str, ...] = tuple(_decode.instruction_sets())
"""Instruction sets of this CPU that csrc/decode supports, fastest first. All give the same numbers."""

_AT_ONCE_NUMEL = 1 << 25
"""Elements that torch's operations decode at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedMatrix:
    """Rows of a matrix as codes, with all that decodes them, on one device.

    lines: the codes as they are in files (2-D, elements of a line adjacent); `layout` says what a line holds. "rows":
    the codes of a row. "words": of every row one word of 32 bits. "nibbles": the 4-bit codes of a column, in words.
    numbers: those of the 4-bit codes; or the dtype of 8-bit codes. scales: one for each group of rows and of columns
    (2-D). zeros: the same (fp32), or None for 0. columns: the number of adjacent columns in a group, or the group of
    each column.

    scale_numbers: the numbers that scales stand for (fp32), if scales are bytes. through: the dtype that values are
    rounded to first. rounds_scales: `decode` rounds scales to the dtype of `out` first. rows: in a group; the first row
    is number `row_in_group` of its group. row, column: the first ones, in `lines`. high_first: the first code of a byte
    is in its high bits (only in "rows"). order: the row of each code of a word of "nibbles", from the lowest bits on.
    """

    lines: torch.Tensor
    numbers: tuple[float, ...] | torch.dtype
    scales: torch.Tensor
    columns: int | torch.Tensor
    zeros: torch.Tensor | None = None
    scale_numbers: torch.Tensor | None = None
    through: torch.dtype | None = None
    rounds_scales: bool = False
    rows: int = 1
    row_in_group: int = 0
    row: int = 0
    column: int = 0
    layout: str = "rows"
    high_first: bool = False
    order: tuple[int, ...] = (*range(8),)

    def decode(self, out: torch.Tensor) -> None:
        """Set `out` (2-D, contiguous) to the values. Raises ValueError if a column is in a group that is not there."""
        matrix = replace(self, scales=self.scales.to(out.dtype)) if self.rounds_scales else self
        if out.device.type == "cpu":
            matrix.decode_compiled(out)
        else:
            matrix.decode_by_torch(out)

    def decode_compiled(
        self, out: torch.Tensor, *, threads: int | None = None, instructions: str = INSTRUCTIONS[0]
    ) -> None:
        """As `decode`, in host memory. `threads` (None: torch's number) include the calling one; the GIL is released."""
        assert out.is_contiguous() and self.lines.stride(1) == 1
        rows, columns = out.shape
        self._check_size(rows, columns)
        numbers = _floats(self.numbers) if isinstance(self.numbers, tuple) else None
        groups = self.columns.to(torch.int32).contiguous() if isinstance(self.columns, torch.Tensor) else None
        through = torch.float32 if self.through in (None, out.dtype) else self.through
        _decode.decode(
            codes=self.lines.data_ptr(),
            line_bytes=self.lines.stride(0) * self.lines.itemsize,
            code="table" if isinstance(self.numbers, tuple) else _name(self.numbers),
            layout=self.layout,
            numbers=_address(numbers),
            high_first=self.high_first,
            order=_address(_integers(self.order)),
            row=self.row,
            column=self.column,
            rows=rows,
            columns=columns,
            rows_in_group=self.rows,
            row_in_group=self.row_in_group,
            columns_in_group=0 if isinstance(self.columns, torch.Tensor) else self.columns,
            group_of_column=_address(groups),
            groups=self.scales.shape[1],
            scales=_factors(self.scales, self.scale_numbers),
            zeros=_factors(self.zeros, None),
            out=out.data_ptr(),
            dtype=_name(out.dtype),
            through=_name(through),
            threads=threads or torch.get_num_threads(),
            instructions=instructions,
        )

    def decode_by_torch(self, out: torch.Tensor) -> None:
        """As `decode`, on any device."""
        rows, width = out.shape
        self._check_size(rows, width)
        scales = self.scales
        if self.scale_numbers is not None:
            scales = self.scale_numbers[scales.view(torch.uint8).int()]
        column = torch.arange(self.column, self.column + width, device=out.device)
        group = self.columns[column] if isinstance(self.columns, torch.Tensor) else column // self.columns
        if int(group.min()) < 0 or int(group.max()) >= scales.shape[1]:
            raise ValueError("a column is in a group that there is not")
        step = max(1, _AT_ONCE_NUMEL // width)
        for low in range(0, rows, step):
            part = out[low : low + step]
            row_group = (torch.arange(low, low + len(part), device=out.device) + self.row_in_group) // self.rows
            values = self._numbers(self.row + low, self.row + low + len(part), width)
            if self.zeros is not None:
                values = values - self.zeros[row_group][:, group]
            values = values * scales[row_group][:, group].float()
            part.copy_(values if self.through is None else values.to(self.through))

    def _numbers(self, first: int, last: int, width: int) -> torch.Tensor:
        """Return the numbers of rows [first, last) of the codes (fp32)."""
        if self.layout == "nibbles":
            codes = codes_of_nibbles(self.lines, self.order, first, last)
        else:
            codes = self.lines.view(torch.uint8)
            if self.layout == "words":
                codes = codes.view(len(codes), -1, 4).transpose(0, 1).flatten(1)
            codes = codes[first:last]
            if isinstance(self.numbers, tuple):
                codes = torch.stack((codes >> 4, codes & 15) if self.high_first else (codes & 15, codes >> 4), -1)
                codes = codes.flatten(1)
        codes = codes[:, self.column :][:, :width]
        if isinstance(self.numbers, tuple):
            return _floats(self.numbers).to(codes.device)[codes.int()]
        return codes.view(self.numbers).float()

    def _check_size(self, rows: int, columns: int) -> None:
        """Assert that everything that is read for so many rows and columns is there."""
        lines, bytes_in_line = self.lines.shape[0], self.lines.shape[1] * self.lines.itemsize
        in_byte = 2 if isinstance(self.numbers, tuple) else 1
        there = {
            "rows": (lines, bytes_in_line * in_byte),
            "words": (bytes_in_line // 4, lines * 4 * in_byte),
            "nibbles": (bytes_in_line * 2, lines),
        }[self.layout]
        assert self.row + rows <= there[0] and self.column + columns <= there[1]
        assert (self.row_in_group + rows - 1) // self.rows < self.scales.shape[0]
        if isinstance(self.columns, int):
            assert (self.column + columns - 1) // self.columns < self.scales.shape[1]
        assert self.zeros is None or self.zeros.shape == self.scales.shape


def codes_of_nibbles(lines: torch.Tensor, order: tuple[int, ...], first: int, last: int) -> torch.Tensor:
    """Return the codes of rows [first, last) of a matrix in the layout "nibbles", one per byte."""
    words = lines.view(torch.uint8)[:, first // 8 * 4 : -(-last // 8) * 4]
    codes = torch.stack((words & 15, words >> 4), -1).view(len(lines), -1, 8)
    by_row = sorted(range(8), key=order.__getitem__)
    return codes[..., by_row].flatten(1).t()[first % 8 :][: last - first]


@functools.cache
def byte_numbers(dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return the numbers that scales of one byte stand for (fp32); uint8 is an exponent of two, plus 127. None for other
    dtypes."""
    if dtype.itemsize > 1:
        return None
    of = torch.float8_e8m0fnu if dtype is torch.uint8 else dtype
    return torch.arange(256, dtype=torch.uint8).view(of).float().to(device)


@functools.cache
def _floats(numbers: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@functools.cache
def _integers(numbers: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _factors(factors: torch.Tensor | None, numbers: torch.Tensor | None) -> tuple[int, str, int, int, int]:
    """Return factors as the compiled decoder expects them."""
    if factors is None:
        return 0, "float32", 0, 0, 0
    dtype = "uint8" if numbers is not None else _name(factors.dtype)
    return factors.data_ptr(), dtype, factors.stride(0), factors.stride(1), _address(numbers)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
