"""A plan, for people and for programs: tables, words, JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity.cli.plan.answer import Answer
from infinity.cli.plan.figures import finite, memory_as_json, memory_table, tiers_on, tokens_per_s
from infinity.cli.plan.frozen_report import frozen_as_json, print_frozen, unit_of
from infinity.cli.plan.training_config import config_for
from infinity.cli.tables import table_of
from infinity.plan.planner import RATED_DAYS, Plan
from infinity.units import DAY_SECONDS, format_bytes, format_count, format_seconds

JSON_FORMAT = 1
"""Raised when a key of the JSON report changes its meaning or goes away; new keys may come without."""

_WIDTH = 1000
"""Characters that a table may take, whatever the terminal: a column that is cut short says nothing."""

# --- For people ---


def print_report(told: Answer) -> None:
    """Everything, on standard output, the verdicts first."""
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)
    plans, chosen, first = told.plans, told.chosen, told.plans[0]
    console.print(_about(first))
    console.print()
    for line in verdicts(told):
        console.print(line)
    console.print()
    console.print(_table(plans, chosen))
    console.print("GPU, host and NVMe are memory of one rank; read and written are of all ranks in a step.")
    for plan in plans:
        for reason in plan.reasons:
            console.print(f"{plan.strategy.name}: [yellow]does not fit[/], {escape(reason)}")
    if not all(plan.strategy.runs for plan in plans):
        console.print("not yet: infinity can't update in host memory what rests on a GPU; planned for comparison")
    print_frozen(console, told.frozen, first.machine, told.lora_rank)
    shown = chosen or plans[-1]
    console.print()
    console.print(memory_table(shown.strategy.name, {"bytes": shown.memory}))
    for line in words(shown):
        console.print(line)
    if shown.work.groups_per_block > 1 and chosen is not None:
        console.print(
            "name the classes of those parts in infinity.wrap of the config, as many as make the groups planned"
        )


def verdicts(told: Answer) -> list[str]:
    """What fits and what doesn't, a line each; and where full training doesn't, what would make it fit."""
    lines = []
    eased = f" with {' '.join(told.eased)}, which changes no number" if told.eased else ""
    if (chosen := told.chosen) is not None:
        figures = f"{format_seconds(chosen.step_seconds)} a step, {tokens_per_s(chosen.tokens_per_s)} tokens/s"
        lines.append(f"full training: [bold green]fits as {chosen.strategy.name}[/]{eased}: {figures}")
    else:
        reasons = "; ".join(told.plans[-1].reasons)
        lines.append(f"full training: [bold red]does not fit[/]{eased and f', not even{eased}'}: {escape(reasons)}")
    for plan, name in zip(told.frozen, (f"LoRA of rank {told.lora_rank}", "generation"), strict=True):
        added = f" with {' '.join(told.frozen_eased)}" if told.frozen_eased and plan is told.frozen[0] else ""
        if plan.fits:
            figures = f"{format_seconds(plan.seconds)} a {unit_of(plan)}, {tokens_per_s(plan.tokens_per_s)} tokens/s"
            lines.append(f"{name}: [bold green]fits on frozen weights in their files[/]{added}: {figures}")
        else:
            lines.append(f"{name}: [bold red]does not fit[/]: {escape('; '.join(plan.reasons))}")
    if chosen is None:
        enough = f"for full training, tried and enough: {'; or '.join(told.remedies)}"
        next_move = "for full training a smaller model, or another machine: no two changes of the arguments are enough"
        lines.append(f"next: {enough if told.remedies else next_move}")
    return lines


def _about(plan: Plan) -> str:
    work, machine = plan.work, plan.machine
    model = work.model
    nodes = f"{machine.nodes} x " if machine.nodes > 1 else ""
    ranks = "one rank" if machine.ranks == 1 else f"{nodes}{machine.ranks_per_node} ranks"
    active = ""
    if (experts := model.experts) is not None:
        routed = f"{experts.per_token} of {experts.count} experts in {len(experts.blocks)} blocks"
        active = f", {format_count(model.active_numel)} of them active ({routed})"
    micro_batches = "one micro-batch a step"
    if work.micro_batches > 1:
        micro_batches = f"{work.micro_batches} micro-batches {'at once' if work.schedule == 'vertical' else 'a step'}"
    recomputed = "recomputed in the backward" if work.checkpointing else "kept"
    recomputed += {"none": "", "cpu": ", saved in host memory", "nvme": ", saved on NVMe"}[work.activations]
    return (
        f"[bold]{format_count(model.numel)} parameters[/]{active}: {model.layers} blocks, hidden size "
        f"{model.hidden}, vocabulary {model.vocab}; {work.samples} x {model.seq} tokens a micro-batch and rank, "
        f"{micro_batches}, activations {recomputed}\n[bold]{escape(machine.name)}[/]: {ranks}, "
        f"{machine.flops_per_s / 1e12:.3g} TFLOP/s each"
    )


def _table(plans: list[Plan], chosen: Plan | None) -> Table:
    tiers = tiers_on(plans[0].machine)
    numbers = ("read", "written", "lower bound", "step", "tokens/s", "DWPD")
    table = table_of("strategy", "fits", *tiers.values(), *numbers, words=2)
    for plan in plans:
        read = written = step = tokens = ""
        if plan.simulated is not None:
            ranks = plan.machine.ranks
            read, written = _short(plan.simulated.read_bytes * ranks), _short(plan.simulated.written_bytes * ranks)
            step, tokens = format_seconds(plan.step_seconds), tokens_per_s(plan.tokens_per_s)
        daily = plan.drive_writes_per_day
        table.add_row(
            plan.strategy.name,
            "[green]yes[/]" if plan.fits and plan.strategy.runs else "not yet" if plan.fits else "[yellow]no[/]",
            *(_short(getattr(plan.memory, f"{tier}_bytes")) for tier in tiers),
            read,
            written,
            format_seconds(plan.lower_bound_seconds),
            step,
            tokens,
            "" if daily is None else f"{daily:.3g}",
            style="bold" if plan is chosen else "",
        )
    return table


def _short(nbytes: int) -> str:
    """Bytes for a narrow column: three digits, and nothing for none."""
    number, unit = format_bytes(nbytes).split()
    return f"{float(number):.{max(0, 4 - len(number.split('.')[0]) - 1)}f} {unit}" if nbytes else ""


def words(plan: Plan) -> list[str]:
    lines = []
    for part, resource, share in plan.limits():
        lines.append(f"{part}: limited by {_LIMITS.get(resource, resource)}, busy {share:.0%} of its time")
    if plan.simulated is not None and plan.strategy.uses_nvme:
        lines.append(
            f"waiting for the drive: {format_seconds(plan.simulated.stall_seconds)} of "
            f"{format_seconds(plan.step_seconds)} a step; "
            f"{plan.step_seconds / plan.lower_bound_seconds:.2f} times the lower bound"
        )
    read, written = plan.discarded_bytes
    if written and plan.simulated is not None:
        more = max(0.0, plan.discarding_seconds() - plan.step_seconds)
        lines.append(
            "updated in the backward, for the step to accept; one that clips or overflows discards it, which costs a rank "
            f"{format_bytes(read)} more read, {format_bytes(written)} more written and {format_seconds(more)}"
        )
    elif plan.work.unasked and plan.work.scheme.update == "forward":
        lines.append(
            "updated in the forward: in the backward it would be no faster, or lack the space on NVMe for a second slot"
        )
    daily = plan.drive_writes_per_day
    if daily == 0:
        lines.append("wear: none, since all that is written anew stays in the host cache")
    elif daily is not None:
        lines.append(
            f"wear: {daily:.3g} drive writes per day; drives rated for 1 a day over 5 years last "
            f"{format_seconds(RATED_DAYS * DAY_SECONDS / daily, digits=2)}"
        )
    return lines


_LIMITS = {
    "to device": "the link from host to GPU",
    "to host": "the link from GPU to host",
    "update": "the memory that the update reads and writes",
}


# --- For programs ---


def as_json(told: Answer, nvme_path: str) -> dict[str, Any]:
    """The whole result; docs/plan.md lists the keys."""
    plans, chosen = told.plans, told.chosen
    work, machine = plans[0].work, plans[0].machine
    model, drive = work.model, machine.drive
    experts, mixed = model.experts, drive.mixed if drive else None
    return {
        "format": JSON_FORMAT,
        "model": {
            "params": model.numel,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "vocab": model.vocab,
            "seq": model.seq,
            "active_params": model.active_numel,
            "experts": experts
            and {
                "count": experts.count,
                "per_token": experts.per_token,
                "blocks": len(experts.blocks),
            },
        },
        "machine": {
            "name": machine.name,
            "nodes": machine.nodes,
            "ranks_per_node": machine.ranks_per_node,
            **{name: finite(getattr(machine, name)) for name in _RATES},
            "read_bytes_per_s": drive.read_bytes_per_s if drive else None,
            "write_bytes_per_s": drive.write_bytes_per_s if drive else None,
            "mixed_bytes_per_s": sum(mixed) if mixed else None,
        },
        "batch": work.samples,
        "accumulation": work.micro_batches,
        "schedule": work.schedule,
        "checkpointing": work.checkpointing,
        "groups_per_block": work.groups_per_block,
        "offload_activations": work.activations,
        "activation_buffer_bytes": work.activation_buffer_bytes,
        "clipping": work.clipping,
        "master_weights": work.scheme.master_weights,
        "update": work.scheme.update,
        "speculative": work.scheme.speculative,
        "durability": "step" if work.durable else "none",
        "moments": work.scheme.moments,
        "tokens_per_step": work.tokens,
        "chosen": chosen.strategy.name if chosen else None,
        "config": config_for(chosen, nvme_path) if chosen else None,
        "eased": list(told.eased),
        "remedies": told.remedies,
        "strategies": [_plan_as_json(plan) for plan in plans],
        "lora_rank": told.lora_rank,
        "lora_eased": list(told.frozen_eased),
        "frozen": [frozen_as_json(plan) for plan in told.frozen],
    }


_RATES = (
    "flops_per_s",
    "device_bytes",
    "device_bytes_per_s",
    "link_bytes_per_s",
    "host_bytes",
    "host_bytes_per_s",
    "drive_bytes",
    "node_link_bytes_per_s",
    "network_bytes_per_s",
)


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": plan.strategy.name,
        "stage": plan.strategy.stage,
        "offload_param": plan.strategy.parameters,
        "offload_optimizer": plan.strategy.optimizer,
        "runs": plan.strategy.runs,
        "fits": plan.fits,
        "update": plan.strategy.update_of(plan.work.scheme),
        "speculative": plan.discarded_bytes[1] > 0,
        "reasons": list(plan.reasons),
        "memory_bytes_per_rank": memory_as_json(plan.memory),
        "pinned_bytes": plan.pipeline.pinned_bytes,
        "cache_bytes": plan.cache.nbytes,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "plain_read_bytes_per_rank": plan.plain_bytes[0],
        "plain_written_bytes_per_rank": plan.plain_bytes[1],
    }
    if plan.simulated is not None:
        simulated = plan.simulated
        result |= {
            "step_seconds": plan.step_seconds,
            "gradient_seconds": simulated.gradient_seconds,
            "stall_seconds": simulated.stall_seconds,
            "tokens_per_s": plan.tokens_per_s,
            "read_bytes_per_rank": simulated.read_bytes,
            "written_bytes_per_rank": simulated.written_bytes,
            "to_device_bytes_per_rank": simulated.to_device_bytes,
            "to_host_bytes_per_rank": simulated.to_host_bytes,
            "pool_bytes_peak": simulated.pool_bytes_peak,
            "live_bytes_peak": simulated.live_bytes_peak,
            "discarded_read_bytes_per_rank": plan.discarded_bytes[0],
            "discarded_written_bytes_per_rank": plan.discarded_bytes[1],
            "drive_writes_per_day": plan.drive_writes_per_day,
            "limits": [{"part": part, "resource": resource, "share": share} for part, resource, share in plan.limits()],
        }
    return result
