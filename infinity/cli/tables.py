"""The tables that commands print."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table


def table_of(*names: str, words: int = 0, title: str | None = None) -> Table:
    """Return a table with these columns. The first `words` of them hold text, the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < words else "right", no_wrap=True)
    return table


def print_facts(facts: Mapping[str, object]) -> None:
    table = Table(show_header=False)
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, str(value))
    Console().print(table)
