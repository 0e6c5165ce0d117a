"""Simulates one training step as discrete events on drive, link, network, device and CPU, for one of many equal ranks.

It runs the engine's own policies (look-ahead, eviction, optimizer pipeline) with the same pinned budget, on resources
that are only numbers. So it predicts a step on a machine that is not at hand.

[Note: What is simulated]
All ranks do the same, so one is simulated, with its share of drives, network and memory bandwidth. The step starts with
nothing staged and ends when its last byte is written. The thread runs a program item by item. A use of a group:

    drive read -> lease -> copy to the device -> all-gather -> compute -> reduce-scatter -> gradients to the host

Exchanges within a computation, as of tensor parallelism, are simulated as one before it.

Compute follows the order of the uses. The thread starts the next item when the compute of this one starts
(`overlap_gathers`), or when it ends, as on a CPU. An update of a sub-group keeps the thread busy while others are read
and written: read k + 1 | update k | write k - 1. Updates come after a pause for the norm of all gradients, with the
first sub-groups already read; or in the forward, before the use of the group whose compute parameters they make; or in
the backward, once their gradients are there. Copies, collectives and compute each keep their order and start as early
as possible. A drive runs one transfer of a kind at a time. Demand reads interrupt writes; otherwise reads and writes
alternate, or run at once if that rate is known.
"""

from __future__ import annotations

import enum
import math
from collections import deque

from infinity.errors import BudgetError
from infinity.plan.machine import DriveSpeed
from infinity.plan.resources import READ, WRITE, Clock, Drive, Link, Simulated
from infinity.plan.step import Pause, Step, SubGroup, Use
from infinity.schedule.readahead import Eviction
from infinity.schedule.timeline import Interval


def simulate(step: Step, drive: DriveSpeed, link_bytes_per_s: float = math.inf) -> Simulated:
    """Simulate `step` with one rank's share of the drives, and a link between host and device of this rate. Raises
    BudgetError if the pool cannot hold all bytes needed at once."""
    clock, result = Clock(), Simulated()
    drives, link = Drive(drive, clock, result.timeline), Link(link_bytes_per_s, result.timeline)
    thread = _Thread(step, clock, drives, link, result)
    clock.run()
    if thread.demanded is not None:  # the item never began
        raise BudgetError(_too_small(step, thread.demanded))
    result.read_bytes, result.written_bytes = drives.nbytes
    result.to_device_bytes, result.to_host_bytes = link.nbytes["to_device"], link.nbytes["to_host"]
    result.seconds = max([result.gradient_seconds, *(end for _, _, _, end in result.timeline)])
    return result


def _too_small(step: Step, place: int) -> str:
    if isinstance(step.program[place], Use):
        units, largest_bytes = "groups", max(step.group_bytes)
    else:
        units, largest_bytes = "sub-groups", max(i.lease_bytes for i in step.program if isinstance(i, SubGroup))
    return (
        f"a pinned pool of {step.pool_bytes} bytes can't hold the {units} that this step needs at once; the largest "
        f"has {largest_bytes} bytes: raise the pinned budget or make them smaller"
    )


class _State(enum.Enum):
    """State of a unit, which holds a lease in all states except ON_NVME."""

    ON_NVME = enum.auto()
    READING = enum.auto()
    STAGED = enum.auto()
    IN_USE = enum.auto()


class _Thread:
    """The training thread: runs all items of the program in order.

    A *unit* is staged as a whole: a group, or the sub-group at a place of the program (see `Step.units`).
    """

    def __init__(self, step: Step, clock: Clock, drive: Drive, link: Link, result: Simulated) -> None:
        self._step, self._clock, self._drive, self._link, self._result = step, clock, drive, link, result
        self._pool_free = step.pool_bytes
        self._units = step.units()
        self._lease_bytes = step.lease_bytes()
        self._ends = step.ends()
        self._states = [_State.ON_NVME] * len(self._lease_bytes)
        self._staged: Eviction[int] = Eviction()
        """Units that are READING or STAGED, except the one being filled."""
        self._filling: int | None = None
        """The group whose compute parameters are being made."""
        self._gathers = [0] * len(step.group_bytes)
        """Number of uses that began and are not gathered yet, by group."""
        self._uses: list[deque[int]] = [deque() for _ in self._lease_bytes]
        """Places of the uses that have not begun, by unit."""
        for place, unit in enumerate(self._units):
            self._uses[unit].append(place)
        self._read_up_to = 0
        """The units of all items before this place are staged, being read, or no longer needed."""
        self._wanted_up_to = 0
        """Units are kept staged for items before this place."""
        self.demanded: int | None = None
        """The item that the thread will begin next."""
        self._demanded_since = 0.0
        self._writing = 0
        """Number of sub-groups being written."""
        self._network_free = self._compute_free = 0.0
        self._live_bytes = 0
        self._gradients_at: list[float | None] = [None] * len(step.program)
        """Time at which the gradients or activations of a use reached host memory, by place."""
        self._uses_left = sum(isinstance(item, Use) for item in step.program)
        clock.at(0.0, self._demand, 0)

    def _demand(self, time: float, place: int) -> None:
        """Make item `place` the next one: it begins as soon as its unit is staged."""
        if place == len(self._step.program):
            return
        self.demanded, self._demanded_since = place, time
        self._look_ahead(time, place)
        self._try(time)

    def _try(self, time: float) -> None:
        """Begin the demanded item if its unit is staged; else start reading the unit if there is room."""
        place = self.demanded
        if place is None:
            return
        item = self._step.program[place]
        if isinstance(item, Pause):
            if not self._uses_left:
                self._begin_pause(time, place, item)
            return
        unit = self._units[place]
        into = item.into if isinstance(item, SubGroup) else None
        if into is not None and not self._fill(into):
            return
        if self._states[unit] is _State.ON_NVME and self._make_room(self._lease_bytes[unit]):
            self._start_read(time, place)
        self._drive.demand(time, self._states[unit] is _State.READING)
        if self._states[unit] not in (_State.STAGED, _State.IN_USE):
            return
        if isinstance(item, Use):
            self.demanded = None
            self._begin_use(time, place, item)
        elif item.after is None or self._gradients_at[item.after] is not None:
            self.demanded = None
            self._update(time, place, item)

    def _fill(self, group: int) -> bool:
        if self._states[group] is _State.ON_NVME:
            if not self._make_room(self._lease_bytes[group]):
                return False
            self._lease(group)
            self._states[group] = _State.STAGED
        else:
            self._staged.discard(group)
        self._filling = group
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Evict units until `nbytes` are free ([Note: What makes room]); return False if others must end first."""
        while self._pool_free < nbytes:
            unit = self._staged.victim(writes_in_flight=self._writing > 0)
            if unit is None or self._states[unit] is _State.READING:
                return False
            self._drop(unit)
            self._read_up_to = 0
        return True

    def _lease(self, unit: int) -> None:
        self._pool_free -= self._lease_bytes[unit]
        self._result.pool_bytes_peak = max(self._result.pool_bytes_peak, self._step.pool_bytes - self._pool_free)

    def _drop(self, unit: int) -> None:
        self._staged.discard(unit)
        self._states[unit] = _State.ON_NVME
        self._pool_free += self._lease_bytes[unit]

    def _start_read(self, time: float, place: int) -> bool:
        item, unit = self._step.program[place], self._units[place]
        assert not isinstance(item, Pause)
        if self._lease_bytes[unit] > self._pool_free:
            return False
        self._lease(unit)
        self._keep(unit)
        if item.read_bytes:
            self._states[unit] = _State.READING
            self._drive.start(READ, time, item.read_bytes, self._name(place), self._end_read, unit)
        return True

    def _name(self, place: int) -> str:
        item = self._step.program[place]
        if isinstance(item, Use):
            return f"group {item.group}"
        return (item.name if isinstance(item, SubGroup) else "") or f"sub-group {place}"

    def _keep(self, unit: int) -> None:
        self._states[unit] = _State.STAGED
        if unit != self._filling:
            self._staged.add(unit, self._needed_at(unit))

    def _end_read(self, time: float, unit: int) -> None:
        self._states[unit] = _State.STAGED
        self._try(time)

    def _needed_at(self, unit: int) -> int | None:
        """Return the place of the unit's next use if it is kept staged for that, else None."""
        uses = self._uses[unit]
        return uses[0] if uses and uses[0] < self._wanted_up_to else None

    def _look_ahead(self, time: float, place: int) -> None:
        before, self._wanted_up_to = self._wanted_up_to, self._ends[place]
        for unit in self._units[before : self._wanted_up_to]:
            self._staged.need(unit, self._needed_at(unit))
        self._read_up_to = max(self._read_up_to, place)
        while self._read_up_to < self._wanted_up_to:
            unit = self._units[self._read_up_to]
            pause = isinstance(self._step.program[self._read_up_to], Pause)
            if not pause and self._states[unit] is _State.ON_NVME and not self._start_read(time, self._read_up_to):
                return
            self._read_up_to += 1

    def _take(self, time: float, place: int) -> None:
        unit = self._units[place]
        self._staged.discard(unit)
        self._states[unit] = _State.IN_USE
        self._uses[unit].popleft()
        if unit == self._filling:
            self._filling = None
        self._look_ahead(time, place + 1)

    def _stalled(self, time: float, *since: float) -> None:
        """Count the thread's wait for the drive up to now as stall, as far as nothing was computed either."""
        self._result.stall_seconds += max(0.0, time - max(self._demanded_since, self._compute_free, *since))

    # Groups

    def _begin_use(self, time: float, place: int, use: Use) -> None:
        timeline = self._result.timeline
        self._gathers[use.group] += 1
        self._take(time, place)
        self._stalled(time)
        self._live_bytes += use.live_bytes
        self._result.live_bytes_peak = max(self._result.live_bytes_peak, self._live_bytes)
        gathered = self._link.copy("to_device", time, use.compute_bytes, f"group {use.group}")
        restored = self._link.copy("to_device", time, use.restored_bytes, f"activations of group {use.group}")
        if use.gather_seconds:
            start = max(gathered, self._network_free)
            gathered = self._network_free = start + use.gather_seconds
            timeline.append(Interval("network", f"gather {use.group}", start, gathered))
        start = computing = max(gathered, restored, self._compute_free)
        if use.exchange_seconds:
            start = max(start, self._network_free)
            computing = self._network_free = start + use.exchange_seconds
            timeline.append(Interval("network", f"exchange {use.group}", start, computing))
        self._compute_free = computing + use.compute_seconds
        timeline.append(Interval("compute", f"use {place} of group {use.group}", computing, self._compute_free))
        self._clock.at(gathered, self._gathered, use.group)
        self._clock.at(self._compute_free, self._computed, place)
        if self._step.overlap_gathers:
            self._clock.at(start, self._demand, place + 1)

    def _gathered(self, time: float, group: int) -> None:
        """Return the lease, or keep the group staged if the policy needs it again soon."""
        self._gathers[group] -= 1
        if self._gathers[group]:
            return
        if self._needed_at(group) is not None or group == self._filling:
            self._keep(group)
        else:
            self._drop(group)
        self._try(time)

    def _computed(self, time: float, place: int) -> None:
        use = self._step.program[place]
        assert isinstance(use, Use)
        self._live_bytes -= use.live_bytes
        end = time
        if use.reduce_seconds:
            start = max(time, self._network_free)
            end = self._network_free = start + use.reduce_seconds
            self._result.timeline.append(Interval("network", f"reduce {use.group}", start, end))
        if use.gradient_bytes:
            end = self._link.copy("to_host", end, use.gradient_bytes, f"gradients of group {use.group}")
        if use.saved_bytes:
            end = self._link.copy("to_host", end, use.saved_bytes, f"activations of group {use.group}")
        self._clock.at(end, self._reduced, place)

    def _reduced(self, time: float, place: int) -> None:
        self._gradients_at[place] = self._result.gradient_seconds = time
        self._uses_left -= 1
        if not self._step.overlap_gathers:
            self._demand(time, place + 1)
        else:
            self._try(time)

    # Updates

    def _begin_pause(self, time: float, place: int, pause: Pause) -> None:
        self.demanded = None
        groups = [unit for unit in self._staged if unit < len(self._step.group_bytes)]
        for group in groups:
            if self._states[group] is _State.STAGED:
                self._drop(group)
        end = time + pause.seconds
        if pause.seconds:
            self._result.timeline.append(Interval("update", "norm and clipping", time, end))
        self._clock.at(end, self._demand, place + 1)

    def _update(self, time: float, place: int, sub: SubGroup) -> None:
        self._take(time, place)
        gradients_at = self._gradients_at[sub.after] if sub.after is not None else None
        self._stalled(time, gradients_at or 0.0)
        end = time + sub.update_seconds
        self._result.timeline.append(Interval("update", self._name(place), time, end))
        self._clock.at(end, self._updated, place)

    def _updated(self, time: float, place: int) -> None:
        sub = self._step.program[place]
        assert isinstance(sub, SubGroup)
        if sub.write_bytes:
            self._writing += 1
            self._drive.start(WRITE, time, sub.write_bytes, self._name(place), self._written, place)
        else:
            self._pool_free += sub.lease_bytes
        self._link.copy("to_device", time, sub.compute_bytes, f"parameters of {self._name(place)}")
        self._demand(time, place + 1)

    def _written(self, time: float, place: int) -> None:
        self._writing -= 1
        self._pool_free += self._lease_bytes[self._units[place]]
        self._try(time)
