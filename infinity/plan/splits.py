"""Splits of a model over ranks besides FSDP2's shards: which are possible, and the time of their collectives.

[Note: Splits in the plan]
Tensor ranks share a batch and have a part of each matrix: they divide state, gathers and compute, and add two all-reduces
of hidden states per block and pass. Expert ranks have batches of their own, and some experts of each block: they divide the
gathers of experts, and send each token to its experts and back. Stages have some blocks: they divide everything, send
hidden states on, and wait for the first and the last micro-batch (`Work.stretch`). `infinity.initialize` combines none of
the three with another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from infinity.plan.machine import Machine
from infinity.plan.work import ROOT, Work
from infinity.schedule.scheme import COMPUTE_BYTES

OPTIONS = {"tensor_ranks": "--tensor-parallel", "expert_ranks": "--expert-parallel", "stages": "--pipeline-stages"}
"""Options of `infinity-bench plan`, by attribute of `Work`."""


def unsplit(work: Work) -> Work:
    return replace(work, tensor_ranks=1, expert_ranks=1, stages=1)


def problem_of(work: Work) -> str | None:
    """Return why the model of `work` can't be split so; None if it can."""
    used = [name for name in OPTIONS if getattr(work, name) > 1]
    if not used:
        return None
    if len(used) > 1:
        return f"{' and '.join(OPTIONS[name] for name in used)}: infinity can't combine them: give one of them"
    name, count = used[0], getattr(work, used[0])
    model, experts, option = work.model, work.model.experts, f"{OPTIONS[name]} {count}"
    divided = {f"{work.ranks} ranks": work.ranks}
    if name == "tensor_ranks":
        heads = model.heads if model.key_value_heads is None else model.key_value_heads
        divided[f"{heads} {'attention' if heads == model.heads else 'key-value'} heads"] = heads
        if experts is not None:
            return f"{option}: infinity splits no mixture of experts over tensor ranks: use {OPTIONS['expert_ranks']}"
    elif work.durable:
        return f"{option} with --durability step, which infinity can't combine: leave one of the two out"
    elif name == "expert_ranks":
        if experts is None:
            return f"{option}: the model has no experts: describe a mixture of experts by --hf-config, or leave it out"
        divided[f"{experts.count} experts of a block"] = experts.count
    elif count > model.layers:
        return f"{option}: the model has only {model.layers} layers: give at most as many"
    elif work.micro_batches_at_once > 1:
        return f"{option} passes one micro-batch after the other: leave --schedule and --micro-batches-at-once out"
    wrong = next((words for words, number in divided.items() if number % count), None)
    return wrong and f"{option} must divide the {wrong}"


def splits_of(asked: Work, machine: Machine, left_open: Collection[str]) -> Iterator[Work]:
    """Yield `asked`, and with each possible split by one of its attributes that are left open. Tensor ranks are of one
    node."""
    yield asked
    for name in OPTIONS:
        most = machine.ranks_per_node if name == "tensor_ranks" else machine.ranks
        for count in range(2, most + 1) if name in left_open else ():
            split = replace(asked, **{name: count})  # type: ignore[arg-type]
            if most % count == 0 and problem_of(split) is None:
                yield split


def gather_seconds(work: Work, machine: Machine, group: int, itemsize: int) -> float:
    """Return the seconds of a gather of a rank's part of a group, or of the reduction of its gradients. Experts that are
    split are gathered apart, from their owners."""
    experts = -(-work.group_expert_numels[group] // work.expert_ranks) if work.expert_ranks > 1 else 0
    others = itemsize * (work.group_numels[group] - experts)
    seconds = machine.gather_seconds(others, work.data_ranks, apart=work.tensor_ranks)
    if experts:
        owners = work.stage_ranks // work.expert_ranks
        seconds += machine.gather_seconds(itemsize * experts, owners, apart=work.expert_ranks)
    return seconds


def exchange_seconds(work: Work, machine: Machine, group: int, *, backward: bool) -> float:
    """Return the seconds of a use of a group in which its computation waits for other ranks."""
    hidden_bytes = COMPUTE_BYTES * work.samples * work.model.seq * work.model.hidden
    if group == ROOT:  # sends to the next stage, or back
        seconds = machine.exchange_seconds(2 * hidden_bytes, 2, apart=work.stage_ranks) if work.stages > 1 else 0.0
        return work.micro_batches_at_once * seconds
    seconds = 4 * machine.gather_seconds(hidden_bytes, work.tensor_ranks)  # an all-reduce is two
    if work.model.experts is not None and work.group_expert_numels[group]:
        rows_bytes = work.model.experts.per_token * hidden_bytes
        seconds += 2 * machine.exchange_seconds(rows_bytes, work.expert_ranks)
    passes = 2 if backward and work.checkpointing else 1
    return passes * work.micro_batches_at_once * seconds / work.groups_per_block
