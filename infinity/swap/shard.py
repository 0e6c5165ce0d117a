"""The paged shard: this rank's piece of one parameter, with reads and writes of its values. A shard in a foreign file
is read from there and never written: [Note: Foreign files] in infinity/store/foreign.py.

[Note: Gathered where it is staged]
A frozen group that stays staged has its elements at one address for good, and nothing changes them. With a single CPU
rank they are the memory of the gathered parameters, without a copy: FSDP2 gathers a tensor without elements, and
`fsdp_post_all_gather` adds them. A forward that writes to such a weight raises (guarded.py); the group is read again.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from infinity.errors import InfinityError
from infinity.optim.coded_moments import blocks_of, decode, encode
from infinity.optim.kernel import join, split
from infinity.optim.small_moments import key_of
from infinity.store.foreign import (
    FileRange,
    ForeignFiles,
    ForeignRows,
    StoredParameter,
    StoredTensor,
    as_elements,
    lay_out,
)
from infinity.store.layout import BLOCK_NUMEL, Field
from infinity.swap.group import Delivery, PagedGroup
from infinity.swap.stager import Chunk, Span, Stager
from infinity.swap.sub_group import PagedSubGroup
from infinity.swap.values import RANGE_NUMEL, PieceOf, Values, ranges_of
from infinity.units import align_up


class GradientState(enum.Enum):
    """The place and the owner of a shard's gradient since the last step."""

    NONE = "none"
    """None has arrived, or torch keeps it, only in `.grad`."""
    ARRIVED = "arrived"
    """Reduced, and in `.grad` until all of its group have arrived. (With a single CPU rank, all gradients of a group
    are taken at once, where autograd left them.)"""
    TAKING = "taking"
    """Being taken. An exception now loses it, and the step has to start again."""
    TAKEN = "taken"
    """Kept until the update, in host memory or on NVMe (waiting_gradients.py); `.grad` is a stand-in. A further
    gradient may arrive and is added."""
    APPLIED = "applied"
    """Used by the backward to update its group, now or before the backward ends. No further gradient may arrive."""


_GRADIENT_ALLOWED = {
    GradientState.NONE: {GradientState.ARRIVED, GradientState.TAKING, GradientState.APPLIED},
    GradientState.ARRIVED: {GradientState.TAKING, GradientState.APPLIED},
    GradientState.TAKING: {GradientState.TAKEN, GradientState.ARRIVED},
    GradientState.TAKEN: {GradientState.ARRIVED, GradientState.TAKING},
    GradientState.APPLIED: set[GradientState](),
}


@dataclass(eq=False)
class PagedShard:
    """This rank's piece of one parameter.

    shape: as FSDP2 and the user see the piece. padded_shape: as it is gathered. delivery: brings its compute parameter
    to the device with others of its group. place: its bytes there. gathered_dtype: of these bytes. first: the index of
    its first element in the whole parameter. resident: its compute parameter, if in host memory (1-D, padded). filled:
    true once it was given values. stepped: true once its moments were written; until then they read as zero.
    """

    name: str
    index: int
    shape: torch.Size
    padded_shape: torch.Size
    trained: bool
    group: PagedGroup = field(repr=False)
    delivery: Delivery = field(repr=False)
    place: slice
    gathered_dtype: torch.dtype
    pieces: Sequence[PieceOf] = field(repr=False)
    values: Values = field(repr=False)
    first: int = 0
    resident: torch.Tensor | None = field(default=None, repr=False)
    filled: bool = False
    stepped: bool = False
    gradient: GradientState = GradientState.NONE

    @cached_property
    def key(self) -> int:
        """The key of the random numbers that round its moments, if these have 16 bits."""
        return key_of(self.name)

    @property
    def sub_groups(self) -> list[PagedSubGroup]:
        """The sub-groups that hold a piece of it."""
        return [sub for sub, _ in self.pieces]

    def move_gradient_to(self, state: GradientState) -> None:
        """Change `gradient`; the only place that does. The end of a step leads to NONE from every state."""
        assert state is GradientState.NONE or state in _GRADIENT_ALLOWED[self.gradient], f"{self.gradient} -> {state}"
        self.gradient = state

    def elements(self, piece: torch.Tensor) -> torch.Tensor:
        """Return its compute parameter (1-D, padded, in `gathered_dtype`) from the bytes of its delivery."""
        return piece[self.place].view(self.gathered_dtype)

    @cached_property
    def gathers_in_place(self) -> bool:
        """True if the gathered parameter uses the lease's memory: see [Note: Gathered where it is staged]."""
        group, dtype = self.group, self.gathered_dtype
        in_form = dtype == self.values.compute_dtype and self.place.start % dtype.itemsize == 0
        stays_as_it_is = group.may_gather_in_place and group.is_frozen and self.resident is None
        return stays_as_it_is and in_form and self.padded_shape.numel() > 0

    def gathered(self, piece: torch.Tensor) -> torch.Tensor:
        """Return `elements`, with a storage that ends where they end."""
        elements = self.elements(piece)
        return torch.from_numpy(elements.view(torch.uint8).numpy()).view(elements.dtype)

    def read(self, name: Field, start: int, numel: int, *, torn: bool = False) -> torch.Tensor:
        """Return elements [start, start + numel) of the master or a moment (1-D, fp32, on the CPU) in ordinary memory.

        Raises InfinityError after a torn step, unless `torn`, or if the swap manager is closed.
        """
        (self.values.health.check_not_closed if torn else self.values.health.check_whole)()
        if name is not Field.MASTER and self.has_codes:
            return self._read_coded(name, start, numel)
        if name is not Field.MASTER or not self._split:
            return self._read(name, start, numel, torch.float32)
        compute = self._read(Field.COMPUTE, start, numel, self.values.compute_dtype)
        remainder = self._read(Field.REMAINDER, start, numel, torch.int16)
        ties = []
        for sub, at, low, count in self._ranges(start, numel):
            in_range = sub.ties[(sub.ties >= low) & (sub.ties < low + count)]
            ties.append(in_range + (at - start - low))
        return join(compute, remainder, torch.cat(ties))

    def write(self, name: Field, start: int, values: torch.Tensor) -> None:
        """Set elements [start, start + values.numel()) of the master (and compute parameter) or a moment (1-D).

        Raises IoError if a transfer failed. The values are then torn: a part of them may be new.
        """
        self.values.health.check_not_closed()
        self.values.health.check_not_part_stepped()
        with self.values.health.change(f"setting {self.name}"):
            self._set(name, start, values)

    def set_resident(self, start: int, values: torch.Tensor) -> None:
        """Set elements of the resident compute parameter, after the device has copied the old ones."""
        assert self.resident is not None
        self.group.forget_resident()
        self.resident[start : start + values.numel()].copy_(values)

    def refresh_resident(self) -> None:
        """Set the resident compute parameter from the master."""
        for start in range(0, self.shape.numel(), RANGE_NUMEL):
            numel = min(RANGE_NUMEL, self.shape.numel() - start)
            self.set_resident(start, self.read(Field.MASTER, start, numel))

    @property
    def _split(self) -> bool:
        return any(sub.layout.split for sub in self.sub_groups)

    @property
    def has_codes(self) -> bool:
        """True if its moments are 8-bit codes."""
        return any(sub.layout.coded for sub in self.sub_groups)

    def _ranges(self, start: int, numel: int) -> Iterator[tuple[PagedSubGroup, int, int, int]]:
        return ranges_of(self.pieces, start, numel)

    def _set(self, name: Field, start: int, values: torch.Tensor) -> None:
        if name is not Field.MASTER:
            write = self._write_coded if self.has_codes else self._write
            write(name, start, values)
            self.stepped = True
            return
        if self._split:
            self._write_split(start, values)
        else:
            self._write(name, start, values)
        if self.resident is not None:
            self.set_resident(start, values)
        elif self.values.has_compute_field and not self._split:
            self._write(Field.COMPUTE, start, values)
        self.filled = True

    def _read_coded(self, name: Field, start: int, numel: int) -> torch.Tensor:
        first = start // BLOCK_NUMEL * BLOCK_NUMEL
        codes = self._read(name, first, start + numel - first, torch.uint8)
        scales = torch.empty(blocks_of(codes.numel()))

        def take(staged: torch.Tensor, block: int) -> None:
            scales[block - first // BLOCK_NUMEL :][: staged.numel()].copy_(staged)

        self._access_scales(name, first, codes.numel(), take, write=False)
        return decode(codes, scales, signed=name is Field.MOMENT_1)[start - first :]

    def _write_coded(self, name: Field, start: int, values: torch.Tensor) -> None:
        """Encode and write `values`. Blocks that they cover only in part are decoded first. Padding is set to zero,
        because it is never stepped."""
        first, end = start // BLOCK_NUMEL * BLOCK_NUMEL, start + values.numel()
        last = min(align_up(end, BLOCK_NUMEL), self.padded_shape.numel())
        if (first, last) != (start, end):
            whole = self._read_coded(name, first, last - first)
            whole[self.shape.numel() - first :] = 0
            whole[start - first : end - first] = values
            values = whole
        codes, scales = encode(values, signed=name is Field.MOMENT_1)

        def give(staged: torch.Tensor, block: int) -> None:
            staged.copy_(scales[block - first // BLOCK_NUMEL :][: staged.numel()])

        self._write(name, first, codes)
        self._access_scales(name, first, codes.numel(), give, write=True)

    def _access_scales(
        self, name: Field, start: int, numel: int, move: Callable[[torch.Tensor, int], None], *, write: bool
    ) -> None:
        """Call `move(scales, first block)` for the blocks of elements [start, start + numel), from a block's start."""
        ranges = (
            (sub, at // BLOCK_NUMEL, sub.layout.first_scale(name) + low // BLOCK_NUMEL, blocks_of(count))
            for sub, at, low, count in self._ranges(start, numel)
        )
        self.values.access(self.group, ranges, Field.SCALES, f"scales of {self.name}", move, write=write)

    def _write_split(self, start: int, values: torch.Tensor) -> None:
        compute = torch.empty(values.numel(), dtype=self.values.compute_dtype)
        remainder = torch.empty(values.numel(), dtype=torch.int16)
        ties = split(values.contiguous(), compute, remainder)
        self._write(Field.COMPUTE, start, compute)
        self._write(Field.REMAINDER, start, remainder)
        for sub, at, low, count in self._ranges(start, values.numel()):
            first = at - start
            in_range = ties[(ties >= first) & (ties < first + count)]
            sub.set_ties(in_range + (low - first), low, low + count)

    def _read(self, name: Field, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(numel, dtype=dtype)

        def take(staged: torch.Tensor, at: int) -> None:
            out[at - start : at - start + staged.numel()].copy_(staged)

        label = f"{name.value} of {self.name}"
        self.values.access(self.group, self._ranges(start, numel), name, label, take, write=False)
        return out

    def _write(self, name: Field, start: int, values: torch.Tensor) -> None:
        def give(staged: torch.Tensor, at: int) -> None:
            staged.copy_(values[at - start : at - start + staged.numel()])

        label = f"{name.value} of {self.name}"
        self.values.access(self.group, self._ranges(start, values.numel()), name, label, give, write=True)


@dataclass(eq=False, kw_only=True)
class ForeignShard(PagedShard):
    """A frozen shard: `rows` of the data in foreign files, in `gathered_dtype`."""

    rows: ForeignRows
    files: ForeignFiles = field(repr=False)
    stager: Stager = field(repr=False)

    def read(self, name: Field, start: int, numel: int, *, torn: bool = False) -> torch.Tensor:
        """Return elements [start, start + numel) (1-D, fp32, on the CPU) in ordinary memory. Raises IoError, and
        InfinityError if the swap manager is closed."""
        assert name is Field.MASTER, "a frozen parameter has no moments"
        self.values.health.check_not_closed()
        out = torch.empty(numel)
        for at in range(start, start + numel, RANGE_NUMEL):
            count = min(RANGE_NUMEL, start + numel - at)
            out[at - start : at - start + count].copy_(self._read_elements(at, count))
        return out

    def write(self, name: Field, start: int, values: torch.Tensor) -> None:
        """Accept values that equal those of the file. Raises InfinityError for others."""
        if not self._are_there(self.read(name, start, values.numel()), values.to(torch.float32)):
            raise InfinityError(
                f"{self.name} is frozen and stored in {self.rows.ranges[0].path}, which is never written: build the "
                "model with other weights, or without the weights= that contain it"
            )

    def elements(self, piece: torch.Tensor) -> torch.Tensor:
        return as_elements(piece[self.place], self.gathered_dtype)

    def _are_there(self, there: torch.Tensor, values: torch.Tensor) -> bool:
        return torch.equal(there.view(torch.int32), values.contiguous().view(torch.int32))

    def _read_elements(self, start: int, numel: int) -> torch.Tensor:
        whole, itemsize = self.rows.ranges[0], self.gathered_dtype.itemsize
        as_bytes = StoredTensor(whole.path, "U8", (whole.nbytes,), whole.offset, whole.nbytes)
        with self._staged(ForeignRows(as_bytes, start * itemsize, numel * itemsize)) as (stored,):
            return stored.clone().view(self.gathered_dtype).float()

    @contextlib.contextmanager
    def _staged(self, rows: ForeignRows) -> Iterator[Sequence[torch.Tensor]]:
        """Yield the bytes of each range of `rows`, in a lease of their own."""
        part = lay_out({0: rows})
        parts = [spans_of(self.files, pages.range, pages.lease_offset) for pages in part.pages]
        reads, fills = (tuple(one for some in kind for one in some) for kind in zip(*parts, strict=True))
        chunk = Chunk(self.name, part.nbytes, reads, (), fills=fills)
        lease = self.stager.acquire(chunk)
        try:
            yield [
                lease.view(torch.uint8, place, file_range.nbytes)
                for place, file_range in zip(part.places[0], rows.ranges, strict=True)
            ]
        finally:
            self.stager.release(chunk, keep=False)


@dataclass(eq=False, kw_only=True)
class CodedShard(ForeignShard):
    """A frozen shard in an encoded form (infinity/store/stored_parameter.py). `places`: the bytes of each of its ranges
    in the delivery. `coded`: the decoder to `gathered_dtype`, the dtype of compute."""

    places: Sequence[slice]
    coded: StoredParameter

    def elements(self, piece: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.padded_shape.numel(), dtype=self.gathered_dtype, device=piece.device)
        self._decode_delivery(piece, out)
        return out

    def to_be_decoded(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the padded shape that decodes `elements` when it is copied."""
        return ToBeDecoded(partial(self._decode_delivery, piece), self.padded_shape, self.gathered_dtype, piece.device)

    def _decode_delivery(self, piece: torch.Tensor, out: torch.Tensor) -> None:
        """Decode the shard into `out` (1-D, padded)."""
        self._decode([piece[place] for place in self.places], self.rows.first, out[: self.shape.numel()])
        out[self.shape.numel() :].zero_()

    gathers_in_place = False

    def _are_there(self, there: torch.Tensor, values: torch.Tensor) -> bool:
        """Compare up to rounding: the values may come from a run with another dtype of compute."""
        return torch.allclose(there, values, rtol=torch.finfo(torch.bfloat16).eps, atol=0.0)

    def _read_elements(self, start: int, numel: int) -> torch.Tensor:
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-(start + numel) // row)
        out = torch.empty((last - first) * row, dtype=self.gathered_dtype)
        with self._staged(ForeignRows(self.coded, self.rows.first + first, last - first)) as parts:
            self._decode(parts, self.rows.first + first, out)
        return out[start - first * row : start - first * row + numel].float()

    def _decode(self, parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
        if out.numel():
            self.coded.decode(parts, first, out.view(-1, *self.shape[1:]))


class ToBeDecoded(torch.Tensor):
    """A tensor without elements. Copying it decodes them into the target, which is the gathered parameter on one rank."""

    @staticmethod
    def __new__(
        cls, decode: Callable[[torch.Tensor], None], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> ToBeDecoded:
        made: ToBeDecoded = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._decode_to = decode
        return made

    _decode_to: Callable[[torch.Tensor], None]
    """Decodes into a tensor (1-D)."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.view.default:
            whole = args[0]
            return cls(whole._decode_to, (whole.numel(),), whole.dtype, whole.device)
        assert func is torch.ops.aten.copy_.default and args[0].dtype is args[1].dtype, func
        args[1]._decode_to(args[0].view(-1))
        return args[0]


def spans_of(
    files: ForeignFiles, pages: FileRange, lease_offset: int
) -> tuple[tuple[Span, ...], tuple[tuple[int, torch.Tensor], ...]]:
    """Return a chunk's `reads` of whole pages of a file, and its `fills`, the parts that are in host memory."""
    file = files.file(pages.path)
    nbytes, end = file.split_end(pages)
    reads = (Span(pages.offset, lease_offset, nbytes, file),) if nbytes else ()
    fills = ((lease_offset + nbytes, torch.frombuffer(bytearray(end), dtype=torch.uint8)),) if end else ()
    return reads, fills
