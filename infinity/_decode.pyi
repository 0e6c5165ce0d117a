"""Compiled from csrc/decode: numbers from a matrix of codes.

Memory crosses as addresses: infinity/store/formats/coded_matrix.py, which calls this, keeps it and has checked what lies
there. The GIL is released while memory is worked on.
"""

def instruction_sets() -> list[str]:
    """Those that this CPU has, the fastest first: of "avx512", "avx2", "portable"."""

def decode(
    *,
    codes: int,
    line_bytes: int,
    code: str,
    layout: str,
    numbers: int,
    high_first: bool,
    order: int,
    row: int,
    column: int,
    rows: int,
    columns: int,
    rows_in_group: int,
    row_in_group: int,
    columns_in_group: int,
    group_of_column: int,
    groups: int,
    scales: tuple[int, str, int, int, int],
    zeros: tuple[int, str, int, int, int],
    out: int,
    dtype: str,
    through: str,
    threads: int,
    instructions: str,
) -> None:
    """Decode a `Matrix` of csrc/decode/decode.h. code: "table" or a dtype of one byte. scales, zeros: address, dtype, strides
    of rows and columns, and the address of the numbers of a dtype of one byte. Raises ValueError for what does not fit."""
