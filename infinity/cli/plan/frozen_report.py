"""The part of a plan about frozen weights that stay in their files, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity.plan.frozen import IN_TURNS, START_SECONDS, FrozenPlan
from infinity.plan.machine import Machine
from infinity.units import format_bytes, format_count, format_seconds

TITLE = "On frozen weights in their files"

_TIERS = (("device", "GPU"), ("host", "host"), ("nvme", "NVMe"))

_LIMITS = {"to device": "link", IN_TURNS: "turns"}


def print_frozen(console: Console, plans: Sequence[FrozenPlan], machine: Machine, lora_rank: int) -> None:
    """Rows, reasons, assumptions and memory, on `console`."""
    console.print()
    console.print(_table(plans, machine))
    for plan in plans:
        for reason in plan.reasons:
            console.print(f"{plan.name}: [yellow]does not fit[/], {escape(reason)}")
    for line in _words(plans, lora_rank):
        console.print(line)
    console.print()
    console.print(_memory_table(plans))


def _table(plans: Sequence[FrozenPlan], machine: Machine) -> Table:
    table = Table(title=TITLE, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("work", "fits", "per"):
        table.add_column(name, no_wrap=True)
    tiers = [(tier, title) for tier, title in _TIERS[:2] if tier == "host" or not machine.device_is_host]
    for name in (*(title for _, title in tiers), "start", "read", "writes", "time", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for plan in plans:
        table.add_row(
            plan.name,
            "[green]yes[/]" if plan.fits else "[yellow]no[/]",
            unit_of(plan),
            *(format_bytes(getattr(plan.memory, f"{tier}_bytes")) for tier, _ in tiers),
            _seconds(plan.start_seconds),
            format_bytes(plan.read_bytes * machine.ranks),
            "none",
            _seconds(plan.seconds),
            "" if math.isinf(plan.seconds) else tokens_per_s(plan.tokens_per_s),
            "" if math.isinf(plan.seconds) else _LIMITS.get(plan.limit, plan.limit),
        )
    return table


def _seconds(seconds: float) -> str:
    return "" if math.isinf(seconds) else format_seconds(seconds)


def unit_of(plan: FrozenPlan) -> str:
    """What its seconds and bytes are of; a round of one sequence makes one token."""
    return "token" if plan.per == "round" and plan.tokens == 1 else plan.per


def tokens_per_s(rate: float) -> str:
    """Such as "154" or "12.3k"."""
    return f"{rate:.3g}" if rate < 1000 else format_count(rate)


def _words(plans: Sequence[FrozenPlan], lora_rank: int) -> list[str]:
    """The meaning of the rows, a sentence each."""
    trained = max(plan.trained_numel for plan in plans)
    lines = [
        f"adapters: rank {lora_rank} on all linear layers of the blocks, {format_count(trained)} parameters, in memory with "
        "their optimizer",
        f"start: until the first step or token, {START_SECONDS:g} s for the process and its imports (assumed) and the files "
        "read once",
        "what stays staged is not read again: set pinned_bytes_max to the pool that is planned; wear: none",
    ]
    if any(plan.per == "round" and plan.tokens > 1 for plan in plans):
        lines.append("a round makes one token of each sequence")
    bits = plans[0].base_bits
    if bits < 16:
        lines.append(
            f"weights: {bits} bits of the blocks' matrices in files and pool, decoded where they are gathered, as fast as "
            "memory is (assumed)"
        )
    if any(IN_TURNS in plan.busy for plan in plans):
        lines.append(
            "experts: those are read that a token of any rank is routed to, expected if all are equally likely; their router "
            "says which, so that reading them and computing take turns"
        )
    return lines


def _memory_table(plans: Sequence[FrozenPlan]) -> Table:
    """A column for each work, as most users of memory are in all of them."""
    title = f"{TITLE}: memory of one rank"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("tier", no_wrap=True)
    table.add_column("user", no_wrap=True)
    for plan in plans:
        name = plan.name.removesuffix(" from files").removesuffix(" on files")
        table.add_column(name, justify="right", no_wrap=True)
    for tier, title in _TIERS:
        of_plans = [getattr(plan.memory, tier) for plan in plans]
        users = dict.fromkeys(user for lines in of_plans for user in lines)
        for number, user in enumerate(users):
            cells = (format_bytes(lines[user]) if user in lines else "" for lines in of_plans)
            table.add_row("" if number else title, user, *cells)
        if users:
            sums = (f"[bold]{format_bytes(sum(lines.values()))}[/]" for lines in of_plans)
            table.add_row("", "[bold]sum[/]", *sums, end_section=True)
    return table


def frozen_as_json(plan: FrozenPlan) -> dict[str, Any]:
    """One work; docs/plan.md lists the keys."""
    return {
        "name": plan.name,
        "per": plan.per,
        "base_bits": plan.base_bits,
        "fits": plan.fits,
        "reasons": list(plan.reasons),
        "memory_bytes_per_rank": {tier: getattr(plan.memory, tier) for tier, _ in _TIERS},
        "pinned_bytes": plan.pinned_bytes,
        "trained_params": plan.trained_numel,
        "tokens": plan.tokens,
        "start_seconds": _finite(plan.start_seconds),
        "seconds": _finite(plan.seconds),
        "tokens_per_s": plan.tokens_per_s,
        "read_bytes_per_rank": round(plan.read_bytes),
        "written_bytes_per_rank": 0,
        "busy_seconds": {resource: _finite(seconds) for resource, seconds in plan.busy.items()},
        "limit": plan.limit,
    }


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
