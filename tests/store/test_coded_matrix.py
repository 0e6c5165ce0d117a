"""Both decoders of coded matrices give the same bits: the compiled one with every instruction set, whatever the layout, the
groups and the place of the first row and column; and torch's operations, which run on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.store.formats.coded import E2M1
from infinity.store.formats.coded_matrix import INSTRUCTIONS, CodedMatrix, byte_numbers

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EIGHT_BITS = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def drawn(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)


def scales_of(dtype: torch.dtype, random: torch.Generator, *shape: int) -> dict[str, Any]:
    """Scales of any size, some of them subnormal, infinite or not a number."""
    if dtype.itemsize == 1:
        return {"scales": drawn(random, *shape).view(dtype), "scale_numbers": byte_numbers(dtype, CPU)}
    sizes = torch.exp2(torch.randint(-150, 128, shape, generator=random).float())
    return {"scales": (torch.randn(shape, generator=random) * sizes).to(dtype)}


@st.composite
def matrices(draw: st.DrawFn) -> tuple[CodedMatrix, int, int]:
    """A matrix, and how many of its rows and columns there are to be decoded."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layout = draw(st.sampled_from(["rows", "words", "nibbles"]))
    four_bits = layout == "nibbles" or draw(st.booleans())
    rows, columns = draw(st.integers(1, 200)), draw(st.integers(1, 300))
    row = draw(st.integers(0, 20))
    column = draw(st.integers(0, 20)) if layout == "rows" else 0
    in_byte = 2 if four_bits else 1
    if layout == "rows":
        lines = drawn(random, row + rows, -(-(column + columns) // in_byte))
    elif layout == "words":
        lines = drawn(random, -(-columns // (4 * in_byte)), 4 * (row + rows)).view(torch.int32)
    else:
        lines = drawn(random, columns, 4 * -(-(row + rows) // 8))
    in_group = draw(st.sampled_from([1, 1, 2, 9]))
    first = draw(st.integers(0, in_group - 1))
    width = draw(st.sampled_from([1, 3, 16, 24, 32, 128, 400]))
    groups = -(-(column + columns) // width)
    order = torch.randint(0, groups, (column + columns,), generator=random, dtype=torch.int32)
    shape = -(-(first + rows) // in_group), groups
    scale_dtype = draw(st.sampled_from([*DTYPES, torch.uint8, torch.float8_e4m3fn]))
    numbers = draw(st.sampled_from([E2M1, tuple(map(float, range(-8, 8)))] if four_bits else EIGHT_BITS))
    integers = numbers is not E2M1 and (four_bits or numbers in (torch.uint8, torch.int8))
    factors = {"zeros": torch.randint(-8, 9, shape, generator=random).float(), **scales_of(scale_dtype, random, *shape)}
    if not (integers and draw(st.booleans())):
        factors["zeros"] = None
    for name in ("scales", "zeros"):
        if factors[name] is not None and draw(st.booleans()):
            factors[name] = factors[name].t().contiguous().t()
    matrix = CodedMatrix(
        lines=lines,
        numbers=numbers,
        **factors,
        columns=order if draw(st.booleans()) else width,
        through=draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
        rows=in_group,
        row_in_group=first,
        row=row,
        column=column,
        layout=layout,
        high_first=layout == "rows" and draw(st.booleans()),
        order=tuple(draw(st.permutations(range(8)))),
    )
    return matrix, rows, columns


def bits(values: torch.Tensor) -> torch.Tensor:
    """All that a NaN says is that it is one."""
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values).view(torch.uint8)


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from(DTYPES), st.integers(1, 3))
def test_every_way_gives_the_same(drawn: tuple[CodedMatrix, int, int], dtype: torch.dtype, threads: int) -> None:
    matrix, rows, columns = drawn
    expected = torch.empty(rows, columns, dtype=dtype)
    matrix.decode_by_torch(expected)
    for instructions in INSTRUCTIONS:
        around = torch.full((rows * columns + 64,), 7.0, dtype=dtype)
        out = around[32 : 32 + rows * columns].view(rows, columns)
        matrix.decode_compiled(out, threads=threads, instructions=instructions)
        assert torch.equal(bits(out), bits(expected)), instructions
        assert (around[:32] == 7).all() and (around[-32:] == 7).all()


@pytest.mark.parametrize("width", [128, 17, None], ids=["even groups", "odd groups", "in no order"])
@pytest.mark.parametrize("layout", ["rows", "words", "nibbles"])
def test_large_ones_are_stored_past_the_caches(layout: str, width: int | None) -> None:
    random = torch.Generator().manual_seed(0)
    rows, columns = 1100, 2047 if width == 17 else 2048
    shapes = {"rows": (rows, 1024), "words": (256, rows * 4), "nibbles": (columns, -(-rows // 8) * 4)}
    matrix = CodedMatrix(
        lines=drawn(random, *shapes[layout]),
        numbers=E2M1,
        scales=torch.rand(16 if width is None else -(-columns // width), rows).t(),
        columns=width or torch.randint(0, 16, (columns,), generator=random),
        layout=layout,
    )
    values = [torch.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2)]
    matrix.decode_by_torch(values[0])
    matrix.decode(values[1])
    assert torch.equal(*values)


@pytest.mark.parametrize("group", [-1, 4])
def test_groups_that_are_not_there_are_refused(group: int) -> None:
    columns = torch.tensor([0, 3, group, 2] * 8)
    matrix = CodedMatrix(
        lines=torch.zeros(2, 16, dtype=torch.uint8), numbers=E2M1, scales=torch.ones(2, 4), columns=columns
    )
    for decode in (matrix.decode, matrix.decode_by_torch):
        with pytest.raises(ValueError, match="a column is in a group that there is not"):
            decode(torch.empty(2, 32))
