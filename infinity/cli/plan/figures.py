"""What the report on full training and that on frozen weights share."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.table import Table

from infinity.cli.tables import table_of
from infinity.plan.estimate import Memory
from infinity.plan.machine import Machine
from infinity.units import format_bytes, format_count

TIERS = {"device": "GPU", "host": "host", "nvme": "NVMe"}
"""Titles of the attributes of `Memory`."""


def tiers_on(machine: Machine) -> dict[str, str]:
    """Those that the machine has: no GPU where it computes on its CPU."""
    return {tier: title for tier, title in TIERS.items() if tier != "device" or not machine.device_is_host}


def memory_table(title: str, memories: Mapping[str, Memory]) -> Table:
    """The bytes of each user, with a column for each of `memories`."""
    table = table_of("tier", "user", *memories, words=2, title=f"{title}: memory of one rank")
    for tier, name in TIERS.items():
        bytes_of = [getattr(memory, tier) for memory in memories.values()]
        users = dict.fromkeys(user for lines in bytes_of for user in lines)
        for number, user in enumerate(users):
            cells = (format_bytes(lines[user]) if user in lines else "" for lines in bytes_of)
            table.add_row("" if number else name, user, *cells)
        if users:
            sums = (f"[bold]{format_bytes(sum(lines.values()))}[/]" for lines in bytes_of)
            table.add_row("", "[bold]sum[/]", *sums, end_section=True)
    return table


def memory_as_json(memory: Memory) -> dict[str, dict[str, int]]:
    return {tier: getattr(memory, tier) for tier in TIERS}


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(value) else value


def tokens_per_s(rate: float) -> str:
    """Such as "154" or "12.3k"."""
    return f"{rate:.3g}" if rate < 1000 else format_count(rate)
