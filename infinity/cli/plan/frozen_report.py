"""The part of a plan about frozen weights that stay in their files, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity.cli.plan.figures import finite, memory_as_json, memory_table, tiers_on, tokens_per_s
from infinity.cli.tables import table_of
from infinity.plan.frozen import IN_TURNS, START_SECONDS, FrozenPlan
from infinity.plan.machine import Machine
from infinity.units import format_bytes, format_count, format_seconds

TITLE = "On frozen weights in their files"

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
    memories = {plan.name.removesuffix(" from files").removesuffix(" on files"): plan.memory for plan in plans}
    console.print(memory_table(TITLE, memories))


def _table(plans: Sequence[FrozenPlan], machine: Machine) -> Table:
    tiers = {tier: title for tier, title in tiers_on(machine).items() if tier != "nvme"}
    names = ("work", "fits", "per", *tiers.values(), "start", "read", "writes", "time", "tokens/s", "limit")
    table = table_of(*names, words=3, title=TITLE)
    for plan in plans:
        table.add_row(
            plan.name,
            "[green]yes[/]" if plan.fits else "[yellow]no[/]",
            unit_of(plan),
            *(format_bytes(getattr(plan.memory, f"{tier}_bytes")) for tier in tiers),
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


def _words(plans: Sequence[FrozenPlan], lora_rank: int) -> list[str]:
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


def frozen_as_json(plan: FrozenPlan) -> dict[str, Any]:
    """One work; docs/plan.md lists the keys."""
    return {
        "name": plan.name,
        "per": plan.per,
        "base_bits": plan.base_bits,
        "fits": plan.fits,
        "reasons": list(plan.reasons),
        "memory_bytes_per_rank": memory_as_json(plan.memory),
        "pinned_bytes": plan.pinned_bytes,
        "trained_params": plan.trained_numel,
        "tokens": plan.tokens,
        "start_seconds": finite(plan.start_seconds),
        "seconds": finite(plan.seconds),
        "tokens_per_s": plan.tokens_per_s,
        "read_bytes_per_rank": round(plan.read_bytes),
        "written_bytes_per_rank": 0,
        "busy_seconds": {resource: finite(seconds) for resource, seconds in plan.busy.items()},
        "limit": plan.limit,
    }
