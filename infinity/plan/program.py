"""Writes the step of one rank, for some work on some machine, as a program for the simulator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infinity.plan.estimate import HostCache, Pipeline, updated_in_backward
from infinity.plan.machine import Machine
from infinity.plan.splits import exchange_seconds, gather_seconds
from infinity.plan.step import Pause, Program, Step, SubGroup, Use
from infinity.plan.strategy import Strategy
from infinity.plan.work import ROOT, Work
from infinity.schedule.scheme import ADAM_MOMENTS, COMPUTE_BYTES, MOMENT_BYTES, Scheme
from infinity.schedule.spilling import BUFFER_SHARES, GRADIENT_BYTES, IN_HAND_SHARES

PARAMETER_BYTES = 12
"""Memory traffic of a fused update per element: parameter (whole or split) and gradient read, parameter written."""

ADAM_BYTES = PARAMETER_BYTES + ADAM_MOMENTS * 2 * MOMENT_BYTES
"""The same for AdamW, which also reads and writes its moments."""

NORM_BYTES = 4
"""The same for the norm of the gradients."""

CLIP_BYTES = 8
"""The same for clipping. (Gradients of offloaded state are scaled in the update.)"""

SIMULATED_SUB_GROUPS_MAX = 4096
"""Beyond this number, neighbours are simulated as one."""


def step_of(
    work: Work, machine: Machine, strategy: Strategy, pipeline: Pipeline, cache: HostCache, *, discards: bool = False
) -> Step:
    """Return the step of one rank for the simulator: a group per block, and the root, which stays gathered. discards:
    all steps discard their speculative updates, and repeat them in the forward."""
    program = _ProgramOfRank(work, machine, strategy, pipeline, cache, discards=discards)
    buffer_bytes = work.activation_buffer_bytes if strategy.uses_nvme else 0
    return Step(
        program=program.items(),
        group_bytes=program.group_bytes,
        look_ahead_bytes=pipeline.look_ahead_bytes + buffer_bytes // IN_HAND_SHARES,
        sub_groups_ahead=pipeline.sub_groups_ahead,
        pool_bytes=pipeline.pinned_bytes - pipeline.staying_bytes + buffer_bytes,
        overlap_gathers=not machine.device_is_host,
    )


class _Elements(NamedTuple):
    """Elements of a group, and their bytes on NVMe."""

    numel: int
    compute_bytes: int
    other_state_bytes: int


class _ProgramOfRank:
    def __init__(
        self,
        work: Work,
        machine: Machine,
        strategy: Strategy,
        pipeline: Pipeline,
        cache: HostCache,
        *,
        discards: bool,
    ) -> None:
        self._work, self._machine, self._strategy, self._discards = work, machine, strategy, discards
        self._numels, self._shards = work.group_numels, work.group_shards
        self._active_numels = work.group_active_numels
        compute, other = strategy.stored_bytes(work.scheme)
        self._compute_bytes = [
            compute * numel - cached for numel, cached in zip(self._shards, cache.compute, strict=True)
        ]
        """Bytes of compute parameters on NVMe, by group."""
        self._other_state_bytes = [
            math.ceil(other * numel) - cached for numel, cached in zip(self._shards, cache.other_state, strict=True)
        ]
        self._staying = pipeline.staying
        self.group_bytes = [
            compute * numel if on_nvme and group not in self._staying else 0
            for group, (numel, on_nvme) in enumerate(zip(self._shards, self._compute_bytes, strict=True))
        ]
        """Lease bytes of each group: all its compute parameters, or 0 if these stay staged or are all cached."""
        self._spilled = work.gradients_that_spill(strategy)
        """Bytes of spilled gradients, by group."""
        muon_flops = work.model.muon_flops_per_element / work.ranks if work.muon else 0.0
        self._muon_seconds = [numel * muon_flops / machine.flops_per_s for numel in work.group_matrix_numels]
        """Seconds of this rank's part of Muon's arithmetic, by group; memory traffic does not hide it."""
        self._saved = work.saved_elsewhere(device_is_host=machine.device_is_host)
        """Bytes of activations that a pass moves from the device and back, by group."""
        self._saved_on_drive = work.saved_on_drive if strategy.uses_nvme else [0] * len(self._shards)
        """The part of those that goes to the drive and back."""
        per_element = compute + other + work.gradient_itemsize * any(self._spilled)
        self._lease_bytes = math.ceil(pipeline.sub_group_numel * per_element)
        count = sum(-(-numel // pipeline.sub_group_numel) for numel in self._shards)
        count *= work.passes if any(self._spilled) else 1
        self._sub_group_numel = pipeline.sub_group_numel * max(1.0, count / SIMULATED_SUB_GROUPS_MAX)
        self._update_bytes_per_s = machine.memory_bytes_per_s(of_host=strategy.on_host)
        self._update = strategy.update_of(work.scheme)
        self._in_backward = updated_in_backward(work, strategy, cache)
        """Number of elements updated in the backward, by group."""
        self._program: list[Use | SubGroup | Pause] = []

    def items(self) -> Program:
        last = self._work.passes - 1
        for number in range(self._work.passes):
            self._forward(number)
            self._backward(updated=number == last, first=number == 0)
        if self._strategy.all_gradients_wait(self._work.scheme):
            clip = CLIP_BYTES if self._work.clipping and not self._strategy.on_host else 0
            seconds = (NORM_BYTES + clip) * self._work.shard_numel / self._update_bytes_per_s
            self._program.append(Pause(seconds, reads_go_on=not any(self._spilled)))
        if self._update == "step":
            self._step()
        return self._program

    def _forward(self, number: int) -> None:
        updated = self._update != "step" and number == 0

        def use(group: int) -> None:
            in_backward = 0 if self._discards else self._in_backward[group]
            # If only a part is updated here, its compute parameters are in host memory.
            made = updated and not in_backward
            if updated and in_backward < self._shards[group]:
                into = group if made and self.group_bytes[group] else None
                self._update_group(group, self._rest(group, in_backward), into=into)
            self._use(group, backward=False, first=number == 0, is_there=made or group in self._staying)

        self._pass(range(len(self._numels)), use, self._save)

    def _pass(self, groups: Sequence[int], use: Callable[[int], None], finish: Callable[[int, int], None]) -> None:
        """Add the uses of these groups, and what `finish` adds after each, given the use's place: if the device is not
        the host, once the next use is in flight."""
        behind = not self._machine.device_is_host
        used: list[tuple[int, int]] = []
        for group in groups:
            use(group)
            used.append((group, len(self._program) - 1))
            if len(used) > behind:
                finish(*used[-1 - behind])
        if behind:
            finish(*used[-1])

    def _save(self, group: int, place: int) -> None:
        self._program += [part._replace(write_bytes=part.lease_bytes, after=place) for part in self._passing(group)]

    def _passing(self, group: int) -> list[SubGroup]:
        nbytes = self._saved_on_drive[group]
        count = math.ceil(nbytes / max(1, self._work.activation_buffer_bytes // BUFFER_SHARES))
        return [SubGroup(lease_bytes=round(nbytes / max(1, count)), name=f"activations of group {group}")] * count

    def _backward(self, *, updated: bool, first: bool) -> None:
        """Add a backward: its uses, and after each the group's update or spilling of its gradients.

        Unless it is the `first` backward, spilled gradients are read again and added. On a CPU the update is spread
        over the next group's computation: [Note: Updates while autograd computes] in infinity/swap/gradient_lap.py.
        """
        spreads = self._machine.device_is_host and not self._work.scheme.collective
        waiting: list[Use | SubGroup | Pause] = []

        def use(group: int) -> None:
            # Read back the activations that it saved.
            self._program += [part._replace(read_bytes=part.lease_bytes) for part in self._passing(group)]
            self._use(group, backward=True, first=first, is_there=group in self._staying)
            whole = self._program.pop()
            assert isinstance(whole, Use)
            share = whole._replace(
                compute_seconds=whole.compute_seconds / (len(waiting) + 1), reduce_seconds=0.0, gradient_bytes=0
            )
            for sub_group in waiting:
                self._program += [share, sub_group]
                share = share._replace(gather_seconds=0.0, exchange_seconds=0.0)
            self._program.append(
                share._replace(reduce_seconds=whole.reduce_seconds, gradient_bytes=whole.gradient_bytes)
            )
            waiting.clear()

        def finish(group: int, place: int) -> None:
            if self._spilled[group]:
                self._spill(group, place, again=not first)
            elif updated and self._in_backward[group]:
                whole, rest = self._rest(group, 0), self._rest(group, self._in_backward[group])
                updates = len(self._program)
                self._update_group(group, _Elements(*map(operator.sub, whole, rest)), after=place)
                if spreads:
                    waiting.extend(self._program[updates:])
                    del self._program[updates:]

        self._pass(range(len(self._numels))[::-1], use, finish)
        self._program += waiting

    def _spill(self, group: int, place: int, *, again: bool) -> None:
        nbytes = self._spilled[group]
        count = max(1, math.ceil(self._shards[group] / self._sub_group_numel))
        sub_group = SubGroup(
            read_bytes=round(nbytes / count) if again else 0,
            write_bytes=round(nbytes / count),
            lease_bytes=min(round(nbytes / count), self._lease_bytes),
            update_seconds=(nbytes + GRADIENT_BYTES * self._shards[group]) / count / self._update_bytes_per_s,
            after=place,
        )
        self._program += [sub_group] * count

    def _use(self, group: int, *, backward: bool, first: bool, is_there: bool) -> None:
        """Add one use of a group. `first`: by the first micro-batch. `is_there`: its compute parameters are staged, or just
        made by its update."""
        work, machine, strategy = self._work, self._machine, self._strategy
        at_once, stretch = work.micro_batches_at_once, work.stretch
        tokens = work.samples_at_once * work.model.seq
        flops_per_numel = 2 * tokens * ((3 if work.checkpointing else 2) if backward else 1)
        compute_seconds = flops_per_numel * self._active_numels[group] / machine.flops_per_s
        from_host = strategy.parameters != "none" or strategy.optimizer == "nvme"
        numel, shard = self._numels[group], self._shards[group]
        gathered = self._stays_gathered(group, backward=backward, first=first)
        self._program.append(
            Use(
                group,
                read_bytes=0 if gathered or is_there else self._compute_bytes[group],
                compute_bytes=COMPUTE_BYTES * shard if from_host and not gathered and not machine.device_is_host else 0,
                gather_seconds=0.0 if gathered else stretch * gather_seconds(work, machine, group, COMPUTE_BYTES),
                exchange_seconds=stretch * exchange_seconds(work, machine, group, backward=backward),
                compute_seconds=stretch * (compute_seconds + at_once * machine.group_seconds),
                reduce_seconds=stretch * at_once * gather_seconds(work, machine, group, GRADIENT_BYTES)
                if backward
                else 0.0,
                gradient_bytes=GRADIENT_BYTES * shard if backward and strategy.on_host else 0,
                saved_bytes=0 if backward else self._saved[group],
                restored_bytes=self._saved[group] if backward else 0,
                live_bytes=COMPUTE_BYTES * numel,
            )
        )

    def _stays_gathered(self, group: int, *, backward: bool, first: bool = False) -> bool:
        if self._work.keeps_gathered:
            return backward or not first
        return backward and (group == ROOT or self._strategy.stage < 3)

    def _rest(self, group: int, in_backward: int) -> _Elements:
        """Return the elements of a group that are left without `in_backward` of them, which are uncached, or all."""
        compute, other = self._strategy.stored_bytes(self._work.scheme)
        return _Elements(
            self._shards[group] - in_backward,
            max(0, self._compute_bytes[group] - compute * in_backward),
            max(0, self._other_state_bytes[group] - math.ceil(other * in_backward)),
        )

    def _update_group(self, group: int, part: _Elements, *, into: int | None = None, after: int | None = None) -> None:
        """Add the sub-groups of a part of one group. Its compute parameters are staged if the backward gathered it, or
        if they stay and no update of them was discarded."""
        in_backward = after is not None
        if group in self._staying:
            staged = in_backward or not (self._discards and self._in_backward[group])
        else:
            staged = in_backward and not self._stays_gathered(group, backward=True)
        read = part.other_state_bytes + self._spilled[group]
        if self._work.scheme.compute_is_state() and not staged:
            read += part.compute_bytes
        written = part.compute_bytes + part.other_state_bytes
        muon_seconds = self._muon_seconds[group] * part.numel / self._shards[group]
        self._add_sub_groups(part.numel, read, written, muon_seconds, into=into, after=after)

    def _step(self) -> None:
        compute, other = sum(self._compute_bytes), sum(self._other_state_bytes)
        read = other + sum(self._spilled)
        if self._work.scheme.compute_is_state():
            read += sum(nbytes for group, nbytes in enumerate(self._compute_bytes) if group not in self._staying)
        self._add_sub_groups(self._work.shard_numel, read, other + compute, sum(self._muon_seconds))

    def _add_sub_groups(
        self,
        numel: int,
        read_bytes: int,
        written_bytes: int,
        muon_seconds: float,
        *,
        into: int | None = None,
        after: int | None = None,
    ) -> None:
        """Add `numel` elements in sub-groups. If a step has very many, neighbours move as one, in the lease of one."""
        count = max(1, math.ceil(numel / self._sub_group_numel))
        strategy = self._strategy
        traffic = update_bytes(strategy, self._work.scheme) * numel / count
        to_device = strategy.optimizer == "cpu" and strategy.parameters == "none" and not self._machine.device_is_host
        sub_group = SubGroup(
            read_bytes=round(read_bytes / count),
            write_bytes=round(written_bytes / count),
            lease_bytes=self._lease_bytes if read_bytes or written_bytes else 0,
            update_seconds=traffic / self._update_bytes_per_s + muon_seconds / count,
            compute_bytes=round(COMPUTE_BYTES * numel / count) if to_device else 0,
            into=into,
            after=after,
        )
        self._program += [sub_group] * count


def update_bytes(strategy: Strategy, scheme: Scheme) -> float:
    fused = PARAMETER_BYTES + scheme.moments * 2 * strategy.moment_bytes(scheme)
    if not strategy.on_host:
        return fused
    split = scheme.master_weights == "split" and not strategy.keeps_compute
    return fused if split else fused + COMPUTE_BYTES
