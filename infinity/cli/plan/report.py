"""Reports of a plan: tables and text, and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity.cli.arguments import values_of
from infinity.cli.plan.answer import Answer
from infinity.cli.plan.training_config import config_for, schedule_of
from infinity.cli.tables import table_of
from infinity.plan.estimate import Memory
from infinity.plan.frozen import IN_TURNS, START_SECONDS, FrozenPlan
from infinity.plan.machine import Machine
from infinity.plan.planner import Plan
from infinity.plan.work import Work
from infinity.units import DAY_SECONDS, format_bytes, format_count, format_seconds

JSON_FORMAT = 1
"""Incremented when a key of the JSON report changes its meaning or is removed, not when one is added."""

_TIERS = {"device": "GPU", "host": "host", "nvme": "NVMe"}

_LIMITS = {
    "to device": "the link from host to GPU",
    "to host": "the link from GPU to host",
    "update": "the memory that the update reads and writes",
}
_FROZEN_LIMITS = {"to device": "link", IN_TURNS: "turns"}

_FROZEN_TITLE = "On frozen weights in their files"

_WIDTH = 1000
"""Largest width of a table in characters, on any terminal, so that no column is cut short."""

# --- For people ---


def print_report(told: Answer) -> None:
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)
    plans, chosen, frozen = told.plans, told.chosen, told.frozen
    machine = plans[0].machine
    console.print(_about(plans[0]), "", *_verdicts(told), "", sep="\n")
    console.print(_table(plans, chosen))
    console.print("GPU, host and NVMe are memory of one rank; read and written are bytes of all ranks in a step.")
    _print_reasons(console, {plan.strategy.name: plan.reasons for plan in plans})
    console.print()
    console.print(_frozen_table(frozen, machine))
    _print_reasons(console, {plan.name: plan.reasons for plan in frozen})
    console.print(*_frozen_words(told), "", sep="\n")
    memories = {plan.name.removesuffix(" from files").removesuffix(" on files"): plan.memory for plan in frozen}
    console.print(_memory_table(_FROZEN_TITLE, memories))
    shown = chosen or plans[-1]
    console.print()
    console.print(_memory_table(shown.strategy.name, {"bytes": shown.memory}))
    for line in _words(shown):
        console.print(line)
    if shown.work.groups_per_block > 1 and chosen is not None:
        console.print(
            "name the classes of those parts in infinity.wrap of the config, so that it makes the planned groups"
        )


def _print_reasons(console: Console, reasons_of: Mapping[str, Sequence[str]]) -> None:
    for name, reasons in reasons_of.items():
        for reason in reasons:
            console.print(f"{name}: [yellow]does not fit[/], {escape(reason)}")


def _verdicts(told: Answer) -> list[str]:
    lines = []
    eased = f" with {' '.join(told.eased)}, which changes no number" if told.eased else ""
    if (chosen := told.chosen) is not None:
        figures = f"{format_seconds(chosen.step_seconds)} a step, {_rate(chosen.tokens_per_s)} tokens/s"
        lines.append(f"full training: [bold green]fits as {chosen.strategy.name}[/]{eased}: {figures}")
    else:
        reasons = "; ".join(told.plans[-1].reasons)
        lines.append(f"full training: [bold red]does not fit[/]{eased and f', not even{eased}'}: {escape(reasons)}")
    for plan, name in zip(told.frozen, (f"LoRA of rank {told.lora_rank}", "generation"), strict=True):
        added = f" with {' '.join(told.frozen_eased)}" if told.frozen_eased and plan is told.frozen[0] else ""
        if plan.fits:
            figures = f"{format_seconds(plan.seconds)} a {_unit_of(plan)}, {_rate(plan.tokens_per_s)} tokens/s"
            lines.append(f"{name}: [bold green]fits on frozen weights in their files[/]{added}: {figures}")
        else:
            lines.append(f"{name}: [bold red]does not fit[/]: {escape('; '.join(plan.reasons))}")
    if chosen is None:
        enough = f"changes that would make full training fit: {'; or '.join(told.remedies)}"
        next_move = "use a smaller model or another machine: no two changes of the arguments make full training fit"
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
    spilled = work.gradient_bytes_max
    gradients = f", gradients beyond {format_bytes(spilled)} on NVMe" if spilled is not None else ""
    return (
        f"[bold]{format_count(model.numel)} parameters[/]{active}: {model.layers} blocks, hidden size "
        f"{model.hidden}, vocabulary {model.vocab}; {_passing(work)}{gradients}\n[bold]{escape(machine.name)}[/]: {ranks}, "
        f"{machine.flops_per_s / 1e12:.3g} TFLOP/s each{_split(work)}"
    )


def _split(work: Work) -> str:
    words = {
        "tensor_ranks": "neighbours split each matrix (tensor_parallel.autotp_size)",
        "expert_ranks": "neighbours share the experts of a block (expert_parallel.autoep_size)",
        "stages": "stages of a pipeline (num_stages of PipelineModule)",
    }
    return "".join(f"; {getattr(work, name)} {text}" for name, text in words.items() if getattr(work, name) > 1)


def _passing(work: Work) -> str:
    micro_batches = "one micro-batch a step"
    if work.micro_batches > 1:
        at_once = {1: "a step", work.micro_batches: "at once"}
        how = at_once.get(work.micro_batches_at_once, f"a step, {work.micro_batches_at_once} at once")
        micro_batches = f"{work.micro_batches} micro-batches {how}"
    activations = "recomputed in the backward" if work.checkpointing else "kept"
    activations += {"none": "", "cpu": ", saved in host memory", "nvme": ", saved on NVMe"}[work.activations]
    if work.activations == "cpu" and (most := work.activation_host_bytes_max) is not None:
        activations += f" (the first {format_bytes(most)}) and on the GPU"
    return (
        f"{work.samples} x {work.model.seq} tokens a micro-batch and rank, {micro_batches}, activations {activations}"
    )


def _table(plans: list[Plan], chosen: Plan | None) -> Table:
    tiers = _tiers_on(plans[0].machine)
    numbers = ("read", "written", "lower bound", "step", "tokens/s", "DWPD")
    table = table_of("strategy", "fits", *tiers.values(), *numbers, words=2)
    for plan in plans:
        read = written = step = tokens = ""
        if plan.simulated is not None:
            ranks = plan.machine.ranks
            read, written = _short(plan.simulated.read_bytes * ranks), _short(plan.simulated.written_bytes * ranks)
            step, tokens = format_seconds(plan.step_seconds), _rate(plan.tokens_per_s)
        daily = plan.drive_writes_per_day
        table.add_row(
            plan.strategy.name,
            "[green]yes[/]" if plan.fits else "[yellow]no[/]",
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
    number, unit = format_bytes(nbytes).split()
    return f"{float(number):.{max(0, 4 - len(number.split('.')[0]) - 1)}f} {unit}" if nbytes else ""


def _words(plan: Plan) -> list[str]:
    lines = []
    if plan.simulated is not None:
        bound = f"{format_seconds(plan.lower_bound_seconds)} by {plan.bound}"
        reached = plan.lower_bound_seconds / plan.step_seconds
        per_token = f", {plan.written_bytes_per_token / 1e6:.3g} MB written per token" * plan.strategy.uses_nvme
        lines.append(f"lower bound: {bound}, which is {reached:.0%} of the step time")
        lines.append(f"a billion tokens: {plan.hours_per_billion_tokens:.3g} hours{per_token}")
    for part, resource, share in plan.limits():
        lines.append(f"{part}: limited by {_LIMITS.get(resource, resource)}, busy {share:.0%} of its time")
    if plan.simulated is not None and plan.strategy.uses_nvme:
        lines.append(
            f"waiting for the drive: {format_seconds(plan.simulated.stall_seconds)} of "
            f"{format_seconds(plan.step_seconds)} a step"
        )
    read, written = plan.discarded_bytes
    if written and plan.simulated is not None:
        more = max(0.0, plan.simulate(discards=True).seconds - plan.step_seconds)
        lines.append(
            "speculative updates in the backward; a step that clips or overflows discards them, which costs a rank "
            f"{format_bytes(read)} more read, {format_bytes(written)} more written and {format_seconds(more)}"
        )
    elif plan.work.unasked and plan.work.scheme.update == "forward":
        lines.append(
            "updates in the forward: in the backward they would be no faster, or lack the NVMe space for a second slot"
        )
    daily = plan.drive_writes_per_day
    if daily is not None and plan.drive_days is None:
        lines.append("wear: none, since all state that changes stays in the host cache")
    elif plan.drive_days is not None:
        lines.append(
            f"wear: {daily:.3g} drive writes per day; drives rated for 1 a day over 5 years last "
            f"{format_seconds(plan.drive_days * DAY_SECONDS, digits=2)}"
        )
    return lines


def _frozen_table(plans: Sequence[FrozenPlan], machine: Machine) -> Table:
    tiers = {tier: title for tier, title in _tiers_on(machine).items() if tier != "nvme"}
    names = ("work", "fits", "per", *tiers.values(), "start", "read", "writes", "time", "tokens/s", "limit")
    table = table_of(*names, words=3, title=_FROZEN_TITLE)
    for plan in plans:
        table.add_row(
            plan.name,
            "[green]yes[/]" if plan.fits else "[yellow]no[/]",
            _unit_of(plan),
            *(format_bytes(getattr(plan.memory, f"{tier}_bytes")) for tier in tiers),
            _seconds(plan.start_seconds),
            format_bytes(plan.read_bytes * machine.ranks),
            "none",
            _seconds(plan.seconds),
            "" if math.isinf(plan.seconds) else _rate(plan.tokens_per_s),
            "" if math.isinf(plan.seconds) else _FROZEN_LIMITS.get(plan.limit, plan.limit),
        )
    return table


def _seconds(seconds: float) -> str:
    return "" if math.isinf(seconds) else format_seconds(seconds)


def _frozen_words(told: Answer) -> list[str]:
    plans = told.frozen
    trained = max(plan.trained_numel for plan in plans)
    lines = [
        f"adapters: rank {told.lora_rank} on all linear layers of the blocks, {format_count(trained)} parameters, in memory "
        f"with their optimizer; {_passing(told.frozen_work)}",
        f"start: time to the first step or token, {START_SECONDS:g} s for process and imports (assumed) and one read "
        "of the files",
        "staged weights are not read again: set pinned_bytes_max to the planned pool; wear: none",
    ]
    if any(plan.per == "round" and plan.tokens > 1 for plan in plans):
        lines.append("a round makes one token of each sequence")
    bits = plans[0].base_bits
    if bits < 16:
        lines.append(
            f"weights: {bits} bits of the blocks' matrices in files and pool, decoded in the gather at the speed of "
            "memory (assumed)"
        )
    if any(IN_TURNS in plan.busy for plan in plans):
        lines.append(
            "experts: only those that a token of any rank is routed to are read (expected, all equally likely); reads "
            "wait for the router, so that reading and computing take turns"
        )
    return lines


def _memory_table(title: str, memories: Mapping[str, Memory]) -> Table:
    table = table_of("tier", "user", *memories, words=2, title=f"{title}: memory of one rank")
    for tier, name in _TIERS.items():
        bytes_of = [getattr(memory, tier) for memory in memories.values()]
        users = dict.fromkeys(user for lines in bytes_of for user in lines)
        for number, user in enumerate(users):
            cells = (format_bytes(lines[user]) if user in lines else "" for lines in bytes_of)
            table.add_row("" if number else name, user, *cells)
        if users:
            sums = (f"[bold]{format_bytes(sum(lines.values()))}[/]" for lines in bytes_of)
            table.add_row("", "[bold]sum[/]", *sums, end_section=True)
    return table


def _tiers_on(machine: Machine) -> dict[str, str]:
    return {tier: title for tier, title in _TIERS.items() if tier != "device" or not machine.device_is_host}


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.3g}" if tokens_per_s < 1000 else format_count(tokens_per_s)


def _unit_of(plan: FrozenPlan) -> str:
    return "token" if plan.per == "round" and plan.tokens == 1 else plan.per


# --- For programs ---


def as_json(told: Answer, nvme_path: str) -> dict[str, Any]:
    """Return the whole result; docs/plan.md lists the keys."""
    plans, chosen = told.plans, told.chosen
    work, machine = plans[0].work, plans[0].machine
    model, drive = work.model, machine.drive
    experts, mixed = model.experts, drive.mixed if drive else None
    rates = "flops_per_s device_bytes device_bytes_per_s link_bytes_per_s host_bytes host_bytes_per_s drive_bytes "
    rates += "node_link_bytes_per_s network_bytes_per_s"
    return {
        "format": JSON_FORMAT,
        "model": {
            "params": model.numel,
            **_values(model, "layers hidden heads vocab seq"),
            "active_params": model.active_numel,
            "experts": experts and {**_values(experts, "count per_token"), "blocks": len(experts.blocks)},
        },
        "machine": {
            **_values(machine, f"name nodes ranks_per_node {rates}"),
            "read_bytes_per_s": drive.read_bytes_per_s if drive else None,
            "write_bytes_per_s": drive.write_bytes_per_s if drive else None,
            "mixed_bytes_per_s": sum(mixed) if mixed else None,
        },
        "batch": work.samples,
        "accumulation": work.micro_batches,
        "schedule": "vertical" if schedule_of(work) == "vertical" else "horizontal",
        "offload_activations": work.activations,
        **_values(work, "micro_batches_at_once checkpointing groups_per_block clipping gradient_bytes_max"),
        **_values(work, "activation_host_bytes_max activation_buffer_bytes"),
        **_values(work.scheme, "master_weights update speculative moments"),
        "durability": "step" if work.durable else "none",
        "autotp_size": work.tensor_ranks,
        "autoep_size": work.expert_ranks,
        "num_stages": work.stages,
        "tokens_per_step": work.tokens,
        "chosen": chosen.strategy.name if chosen else None,
        "config": config_for(chosen, nvme_path) if chosen else None,
        "eased": list(told.eased),
        "remedies": told.remedies,
        "strategies": [_plan_as_json(plan) for plan in plans],
        "lora_rank": told.lora_rank,
        "lora_eased": list(told.frozen_eased),
        "lora_micro_batches": {
            "batch": told.frozen_work.samples,
            "accumulation": told.frozen_work.micro_batches,
            "at_once": told.frozen_work.micro_batches_at_once,
        },
        "frozen": [_frozen_as_json(plan) for plan in told.frozen],
    }


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = {
        **_values(plan.strategy, "name stage"),
        "offload_param": plan.strategy.parameters,
        "offload_optimizer": plan.strategy.optimizer,
        "fits": plan.fits,
        "update": plan.strategy.update_of(plan.work.scheme),
        "speculative": plan.discarded_bytes[1] > 0,
        "reasons": list(plan.reasons),
        "memory_bytes_per_rank": _values(plan.memory, "device host nvme"),
        "pinned_bytes": plan.pipeline.pinned_bytes,
        "cache_bytes": plan.cache.nbytes,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "plain_read_bytes_per_rank": plan.plain_bytes[0],
        "plain_written_bytes_per_rank": plan.plain_bytes[1],
    }
    if plan.simulated is not None:
        simulated = plan.simulated
        moved = _values(simulated, "read_bytes written_bytes to_device_bytes to_host_bytes")
        result |= {
            **_values(plan, "step_seconds tokens_per_s drive_writes_per_day drive_days bound hours_per_billion_tokens"),
            **_values(simulated, "gradient_seconds stall_seconds pool_bytes_peak live_bytes_peak"),
            **{f"{name}_per_rank": nbytes for name, nbytes in moved.items()},
            "written_bytes_per_token": plan.written_bytes_per_token,
            "discarded_read_bytes_per_rank": plan.discarded_bytes[0],
            "discarded_written_bytes_per_rank": plan.discarded_bytes[1],
            "limits": [{"part": part, "resource": resource, "share": share} for part, resource, share in plan.limits()],
        }
    return result


def _frozen_as_json(plan: FrozenPlan) -> dict[str, Any]:
    return {
        **_values(plan, "name per base_bits fits pinned_bytes tokens start_seconds seconds tokens_per_s limit"),
        "reasons": list(plan.reasons),
        "memory_bytes_per_rank": _values(plan.memory, "device host nvme"),
        "trained_params": plan.trained_numel,
        "read_bytes_per_rank": round(plan.read_bytes),
        "written_bytes_per_rank": 0,
        "busy_seconds": {resource: _finite(seconds) for resource, seconds in plan.busy.items()},
    }


def _values(of: object, names: str) -> dict[str, Any]:
    return {name: _finite(value) for name, value in values_of(of, names).items()}


def _finite(value: Any) -> Any:
    """Return None for infinity, which JSON lacks."""
    return None if value == math.inf else value
