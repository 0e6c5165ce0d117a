"""Decides whether a model trains on a machine, in full and on frozen weights in their files. Pure.

[Note: Easings]
Some arguments cost time but no accuracy: gradients that wait on NVMe, and saved activations in host memory. If a model
does not fit and the user left them open, they are tried before it is rejected; the answer names those that were needed.

[Note: Remedies]
If nothing fits, the answer names changes that would make it fit; each was tried. A remedy is a ladder of values, from
the smallest change to the largest. Those that cost time or samples come first, then those that cost money.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any, NamedTuple

from infinity.plan.frozen import FrozenPlan, frozen_plans
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.planner import Plan, fastest_that_fits, plans_for, some_strategy_fits
from infinity.plan.work import Work

SEQ_MIN = 128

GROUPS_PER_BLOCK_MAX = 16
GPUS_MAX = 8
GPU_MEMORY_DOUBLINGS = 2
HOST_MEMORY_DOUBLINGS = 4
DRIVE_DOUBLINGS = 6
NODE_DOUBLINGS = 6

GB = 10**9

PAIRS_MAX = 3

EASINGS: dict[str, dict[str, Any]] = {
    "--gradient-memory 0": {"gradient_bytes_max": 0},
    "--offload-activations cpu": {"activations": "cpu"},
}
"""Arguments, and the attributes of `Work` that they change. [Note: Easings]"""

Easing = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """The arguments of `planner.plans_for`. easings: sets of arguments that may be added to make it fit, in order of
    trial."""

    work: Work
    machine: Machine
    pinned_bytes: int | None
    cache_bytes: int | None
    easings: tuple[Easing, ...] = ((),)
    lora_work: Work | None = None
    """Work of the adapters' training, if it is not `work`."""

    @property
    def pinned_sizes(self) -> dict[str, int | None]:
        return {"pinned_bytes": self.pinned_bytes, "cache_bytes": self.cache_bytes}

    def eased(self, easing: Easing) -> Work:
        changes = {name: value for argument in easing for name, value in EASINGS[argument].items()}
        left_open = {name: value for name, value in changes.items() if getattr(self.work, name) in (None, "none")}
        return replace(self.work, **left_open)

    def fits(self) -> bool:
        return any(
            some_strategy_fits(self.eased(easing), self.machine, **self.pinned_sizes)
            for easing in reversed(self.easings)
        )


@dataclass(frozen=True)
class Answer:
    """The plans and the verdicts. eased: arguments that were added to make full training fit (all permitted ones if
    none fits); frozen_eased: the same for the adapters. remedies: changes that would make it fit, if nothing does."""

    plans: list[Plan]
    chosen: Plan | None
    eased: Easing
    remedies: list[str]
    frozen: list[FrozenPlan]
    frozen_work: Work
    frozen_eased: Easing
    lora_rank: int


def answer(case: Case, *, lora_rank: int, base_bits: int) -> Answer:
    eased = next((easing for easing in case.easings if replace(case, easings=(easing,)).fits()), case.easings[-1])
    plans = plans_for(case.eased(eased), case.machine, **case.pinned_sizes)
    chosen = fastest_that_fits(plans)
    needed = [] if chosen is not None else remedies(case)
    sizes: dict[str, Any] = {"lora_rank": lora_rank, "base_bits": base_bits, **case.pinned_sizes}
    for frozen_eased in (*case.easings, ()):  # the last if none is enough
        frozen_work = case.lora_work or case.eased(frozen_eased)
        frozen = frozen_plans(frozen_work, case.machine, **sizes)
        if frozen[0].fits:
            break
    return Answer(plans, chosen, eased, needed, frozen, frozen_work, frozen_eased, lora_rank)


class _Step(NamedTuple):
    words: str
    change: Callable[[Case], Case]


_Ladder = Sequence[_Step]


def remedies(case: Case) -> list[str]:
    """Return changes that each make `case` fit, as arguments; pairs if no single one does, nothing if no pair does."""
    ladders = [ladder for ladder in (*_of_training(case), *_of_machine(case)) if ladder]
    alone = [step.words for ladder in ladders if (step := _first_that_fits(case, ladder)) is not None]
    if alone:
        return alone
    pairs = (_pair_that_fits(case, one, other) for one, other in combinations(ladders, 2))
    return list(islice((pair for pair in pairs if pair is not None), PAIRS_MAX))


def _first_that_fits(case: Case, ladder: _Ladder) -> _Step | None:
    if not ladder[-1].change(case).fits():
        return None
    return next(step for step in ladder if step.change(case).fits())


def _pair_that_fits(case: Case, one: _Ladder, other: _Ladder) -> str | None:
    """Find the smallest step of `one` that fits with the largest of `other`, then the smallest of `other` with that."""
    first = _first_that_fits(other[-1].change(case), one)
    if first is None:
        return None
    second = _first_that_fits(first.change(case), other)
    assert second is not None  # its last step was
    return f"{first.words} with {second.words}"


def _of_training(case: Case) -> Iterator[_Ladder]:
    work = case.work
    open_to_easing = any("--offload-activations cpu" in easing for easing in case.easings)
    on_device = work.activations == "none" and not open_to_easing and not case.machine.device_is_host
    for applies, step in (
        (work.gradient_bytes_max, _work("--gradient-memory 0", gradient_bytes_max=0)),
        (case.cache_bytes, _Step("--cache 0", _without_cache)),
        (case.pinned_bytes is not None, _Step("no --pinned-bytes-max", lambda case: replace(case, pinned_bytes=None))),
        (work.activation_buffer_bytes_max, _work("no --activation-buffer", activation_buffer_bytes_max=None)),
        (work.durable, _work("--durability none", durable=False)),
        (not work.checkpointing, _work("no --no-checkpointing", checkpointing=True)),
        (on_device, _work("--offload-activations cpu", activations="cpu")),
        (work.activations != "nvme" and not work.durable, _work("--offload-activations nvme", activations="nvme")),
    ):
        if applies:
            yield [step]
    yield [_work(f"--batch-size {count}", samples=count) for count in _halved(work.samples, 1)]
    seqs = _halved(work.model.seq, SEQ_MIN)
    yield [_work(f"--seq {count}", model=replace(work.model, seq=count)) for count in seqs]
    counts = _doubled(work.groups_per_block, GROUPS_PER_BLOCK_MAX)
    yield [_work(f"--groups-per-block {count}", groups_per_block=count) for count in counts]


def _of_machine(case: Case) -> Iterator[_Ladder]:
    machine = case.machine
    sizes = _larger(machine.host_bytes, HOST_MEMORY_DOUBLINGS)
    yield [_machine(f"--host-memory {size}GB", host_bytes=size * GB) for size in sizes]
    if not machine.device_is_host:
        sizes = _larger(machine.device_bytes, GPU_MEMORY_DOUBLINGS)
        yield [_machine(f"--gpu-memory {size}GB", device_bytes=size * GB) for size in sizes]
        link = " --node-link GB/s" if math.isinf(machine.node_link_bytes_per_s) else ""
        counts = _doubled(machine.ranks_per_node, GPUS_MAX)
        yield [_machine(f"--gpus {count}{link}", ranks_per_node=count) for count in counts]
    if machine.drive is None:
        yield [_machine("--read GB/s --write GB/s", drive=DriveSpeed(1.0, 1.0), drive_bytes=0)]
    elif not math.isinf(room := machine.drive_room_bytes):
        sizes = _larger(room, DRIVE_DOUBLINGS)
        yield [_machine(f"--drive-size {size}GB", drive_bytes=size * GB, drive_free_bytes=None) for size in sizes]
    network = " --network GB/s" if math.isinf(machine.network_bytes_per_s) else ""
    counts = _doubled(machine.nodes, machine.nodes << NODE_DOUBLINGS)
    yield [_machine(f"--nodes {count}{network}", nodes=count) for count in counts]


def _without_cache(case: Case) -> Case:
    pinned_bytes = None if case.pinned_bytes is None else case.pinned_bytes + (case.cache_bytes or 0)
    return replace(case, pinned_bytes=pinned_bytes, cache_bytes=0)


def _work(words: str, **changes: object) -> _Step:
    return _Step(words, lambda case: replace(case, work=replace(case.work, **changes)))  # type: ignore[arg-type]


def _machine(words: str, **changes: object) -> _Step:
    def change(case: Case) -> Case:
        machine = replace(case.machine, **changes)  # type: ignore[arg-type]
        return replace(case, machine=machine, work=replace(case.work, ranks=machine.ranks))

    return _Step(words, change)


def _halved(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def _doubled(value: int, most: int) -> Iterator[int]:
    while (value := value * 2) <= most:
        yield value


def _larger(nbytes: float, doublings: int) -> list[int]:
    return [math.ceil(nbytes * 2**power / 1e9) for power in range(1, doublings + 1)]
