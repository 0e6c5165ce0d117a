"""The common part of all families: the bytes that a coded parameter needs for some rows."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.store.foreign import DTYPES, FileRange, StoredTensor, as_elements
from infinity.store.formats.coded_matrix import CodedMatrix

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of fp4, by code. OCP Microscaling Formats v1.0, 5.3.3."""

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
    """A parameter of several tensors. A family derives from it and defines `matrix`."""

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
        if out.dim() == 2:
            self.matrix(first, len(out), *views).decode(out)
            return
        for number, matrix in enumerate(out):
            self.matrix(0, len(matrix), *(view[number] for view in views)).decode(matrix)

    @abc.abstractmethod
    def matrix(self, first: int, count: int, *pieces: torch.Tensor) -> CodedMatrix:
        """Return rows [first, first + count), from the views of the pieces for them. Of a stack: those of one matrix."""


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
