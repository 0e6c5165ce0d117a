"""Floor 3. One training step as discrete events: what drive, link, network, device and CPU do when, on one of many equal ranks.

It follows the same policies as the product (how far reads run ahead, how deep the optimizer's pipeline is) with the same pinned
budget, but on resources that are only numbers. So it tells what a step takes on a machine that one doesn't have.

[Note: What is simulated]
All ranks do the same, so one is simulated, and what ranks share (drives, network, memory bandwidth) comes as its share.
The step starts with nothing staged and ends when its last byte is written. A use of a group goes

    drive read -> lease -> copy to the device -> all-gather -> compute -> reduce-scatter -> gradients to the host

where compute follows the order of the uses, and the gather of the next use begins with the compute of this one
(`overlap_gathers`), or after it, as on a CPU. Then sub-groups go through read k + 1 | update k | write k - 1. Copies,
collectives and compute each keep their order and start as early as they can. A drive takes one transfer of a kind at a
time; demand reads interrupt writes; otherwise reads and writes alternate, or go on at once where it is known how fast.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infinity.errors import BudgetError
from infinity.schedule.floor import DriveSpeed


class Use(NamedTuple):
    """One use of a group: in a forward or a backward.

    Attributes:
        group: its number.
        read_bytes: what the drive must bring if the group isn't staged; less than the group where part of it is resident.
        copy_bytes: of its shard, from host memory to the device.
        gather_seconds, compute_seconds, reduce_seconds: of the all-gather, the computation, the reduce-scatter.
        gradient_bytes: of its shard, from the device to host memory.
        live_bytes: on the device from the gather to the end of the computation.
    """

    group: int
    read_bytes: int = 0
    copy_bytes: int = 0
    gather_seconds: float = 0.0
    compute_seconds: float = 0.0
    reduce_seconds: float = 0.0
    gradient_bytes: int = 0
    live_bytes: int = 0


class SubGroup(NamedTuple):
    """What is stepped together.

    Attributes:
        read_bytes, write_bytes: from and to the drive.
        lease_bytes: of the pool, from the start of its read to the end of its write.
        update_seconds: of Adam.
        copy_bytes: of new parameters, from host memory to the device.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    lease_bytes: int = 0
    update_seconds: float = 0.0
    copy_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step does, in its order.

    Attributes:
        uses: of the forwards and backwards of all micro-batches.
        group_bytes: the lease of each group.
        ends: with `place` uses behind us, `uses[place : ends[place]]` should be staged (`lookahead.plan_look_ahead`).
        between_seconds: from the last gradient to the first update: the norm, clipping.
        sub_groups: in the order in which they are stepped.
        sub_groups_ahead: how many are read ahead.
        pool_bytes: the pinned pool.
        overlap_gathers: whether a gather goes on beside the computation before it.
    """

    uses: Sequence[Use]
    group_bytes: Sequence[int]
    ends: Sequence[int]
    between_seconds: float = 0.0
    sub_groups: Sequence[SubGroup] = ()
    sub_groups_ahead: int = 1
    pool_bytes: int = 0
    overlap_gathers: bool = True


@dataclass(frozen=True)
class Resources:
    """What one rank has: its drives, and bytes per second of the link from host to device and back."""

    drive: DriveSpeed
    to_device_bytes_per_s: float = math.inf
    to_host_bytes_per_s: float = math.inf


class Interval(NamedTuple):
    """`resource` does `what` from `start` to `end` (seconds since the step began)."""

    resource: str
    what: str
    start: float
    end: float


@dataclass
class Simulated:
    """What became of a step.

    Attributes:
        seconds: from its begin until its last byte is written.
        gradient_seconds: from its begin until all gradients are where the optimizer reads them.
        stall_seconds: in which compute or update stood still for want of bytes from the drive.
        read_bytes, written_bytes: from and to the drive.
        to_device_bytes, to_host_bytes: over the link.
        pool_bytes_peak: leased at one time.
        live_bytes_peak: gathered at one time.
        timeline: what was done when, by resource: read, write, to_device, to_host, network, compute, update.
    """

    seconds: float = 0.0
    gradient_seconds: float = 0.0
    stall_seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    pool_bytes_peak: int = 0
    live_bytes_peak: int = 0
    timeline: list[Interval] = field(default_factory=list)

    def busy_seconds(self) -> dict[str, float]:
        """By resource: how long it did anything."""
        busy: dict[str, float] = {}
        for resource, _, start, end in self.timeline:
            busy[resource] = busy.get(resource, 0.0) + end - start
        return busy


def simulate(step: Step, resources: Resources) -> Simulated:
    """What `step` does with `resources`. Raises BudgetError where the pool can't hold what must be in it at once."""
    clock = _Clock()
    result = Simulated()
    pool = _Pool(step.pool_bytes, result)
    drive = _Drive(resources.drive, clock, result)
    link = _Link(resources, result)
    laps = _Gradients(step, clock, pool, drive, link, result)
    clock.run()
    if not laps.done:
        raise BudgetError(_too_small(step.pool_bytes, "groups", max(step.group_bytes, default=0)))
    update = _Update(step, clock, pool, drive, link, result)
    update.begin(result.gradient_seconds)
    clock.run()
    if not update.done:
        raise BudgetError(_too_small(step.pool_bytes, "sub-groups", max(sub.lease_bytes for sub in step.sub_groups)))
    result.seconds = max([result.gradient_seconds, *(end for _, _, _, end in result.timeline)])
    return result


def _too_small(pool_bytes: int, what: str, largest_bytes: int) -> str:
    return (
        f"a pinned pool of {pool_bytes} bytes can't hold the {what} of this step at once, of which the largest has "
        f"{largest_bytes} bytes: raise the pinned budget or make them smaller"
    )


class _Clock:
    """Events in the order of their times, and of their making where those are equal."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._made = 0

    def at(self, time: float, call: Callable[[float, int], None], argument: int) -> None:
        """Call `call(time, argument)` when `time` has come."""
        self._made += 1
        heapq.heappush(self._waiting, (time, self._made, call, argument))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._waiting:
            time, _, call, argument = heapq.heappop(self._waiting)
            call(time, argument)


class _Pool:
    """Leased bytes."""

    def __init__(self, nbytes: int, result: Simulated) -> None:
        self.free = self._nbytes = nbytes
        self._result = result

    def try_lease(self, nbytes: int) -> bool:
        if nbytes > self.free:
            return False
        self.free -= nbytes
        used = self._nbytes - self.free
        if used > self._result.pool_bytes_peak:
            self._result.pool_bytes_peak = used
        return True

    def give_back(self, nbytes: int) -> None:
        self.free += nbytes


class _Link:
    """Copies between host and device, each direction in its order."""

    def __init__(self, resources: Resources, result: Simulated) -> None:
        self._rates = resources.to_device_bytes_per_s, resources.to_host_bytes_per_s
        self._free = [0.0, 0.0]
        self._result = result

    def to_device(self, time: float, nbytes: int, what: str) -> float:
        """Copy from `time` or later on; when it ends."""
        self._result.to_device_bytes += nbytes
        return self._copy(0, time, nbytes, "to_device", what)

    def to_host(self, time: float, nbytes: int, what: str) -> float:
        self._result.to_host_bytes += nbytes
        return self._copy(1, time, nbytes, "to_host", what)

    def _copy(self, way: int, time: float, nbytes: int, resource: str, what: str) -> float:
        if not nbytes or self._rates[way] == math.inf:
            return time
        start = max(time, self._free[way])
        end = self._free[way] = start + nbytes / self._rates[way]
        self._result.timeline.append(Interval(resource, what, start, end))
        return end


_READ, _WRITE = 0, 1
_DIRECTIONS = ("read", "write")


class _Transfer:
    """One read or write of the drive: its bytes, and what to call at its end."""

    __slots__ = ("call", "left", "nbytes", "number", "what")

    def __init__(self, nbytes: int, what: str, call: Callable[[float, int], None], number: int) -> None:
        self.nbytes = nbytes
        self.left = float(nbytes)
        self.what = what
        self.call = call
        self.number = number


class _Drive:
    """Reads and writes, one of each under way; both at once or in turns."""

    def __init__(self, speed: DriveSpeed, clock: _Clock, result: Simulated) -> None:
        self._alone = speed.read_bytes_per_s, speed.write_bytes_per_s
        self._together = speed.together
        self._clock = clock
        self._result = result
        self._queues: tuple[deque[_Transfer], deque[_Transfer]] = deque(), deque()
        self._rates = [0.0, 0.0]
        """Bytes per second of either way since `_since`."""
        self._ends = [math.inf, math.inf]
        """When the transfers under way end, if nothing changes."""
        self._since = 0.0
        self._turn = _READ
        self._version = 0
        self.demanded = False
        """Whether somebody waits for the reads that are queued: they go first."""

    def read(self, time: float, nbytes: int, what: str, call: Callable[[float, int], None], number: int) -> None:
        """Queue a read; `call(time, number)` at its end."""
        self._result.read_bytes += nbytes
        self._queue(time, _READ, _Transfer(nbytes, what, call, number))

    def write(self, time: float, nbytes: int, what: str, call: Callable[[float, int], None], number: int) -> None:
        """Queue a write; `call(time, number)` at its end."""
        self._result.written_bytes += nbytes
        self._queue(time, _WRITE, _Transfer(nbytes, what, call, number))

    def demand(self, time: float, wanted: bool) -> None:
        """Somebody waits for a read now, or nobody does."""
        if wanted != self.demanded:
            self.demanded = wanted
            if self._together is None and self._queues[_WRITE]:
                self._go_on(time)

    def _queue(self, time: float, way: int, transfer: _Transfer) -> None:
        self._queues[way].append(transfer)
        if len(self._queues[way]) == 1:
            self._go_on(time)

    def _go_on(self, time: float) -> None:
        """Account for what was moved up to now, and decide what is moved from now on."""
        self._account(time)
        reads, writes = self._queues
        read_rate = write_rate = 0.0
        if reads and writes and self._together is not None:
            read_rate, write_rate = self._together
        elif reads and (self.demanded or self._turn == _READ or not writes):
            read_rate, self._turn = self._alone[_READ], _READ
        elif writes:
            write_rate, self._turn = self._alone[_WRITE], _WRITE
        self._since = time
        self._rates = [read_rate, write_rate]
        self._ends = [
            time + reads[0].left / read_rate if read_rate else math.inf,
            time + writes[0].left / write_rate if write_rate else math.inf,
        ]
        self._version += 1
        if reads or writes:
            self._clock.at(min(self._ends), self._moved, self._version)

    def _account(self, time: float) -> None:
        for way in (_READ, _WRITE):
            if self._rates[way] and time > self._since:
                transfer = self._queues[way][0]
                transfer.left -= (time - self._since) * self._rates[way]
                self._result.timeline.append(Interval(_DIRECTIONS[way], transfer.what, self._since, time))

    def _moved(self, time: float, version: int) -> None:
        """The earliest end that was foreseen by `version` of the rates."""
        if version != self._version:
            return
        ended = []
        self._account(time)
        self._since = time
        for way in (_READ, _WRITE):
            queue = self._queues[way]
            if self._ends[way] <= time:
                ended.append(queue.popleft())
                self._rates[way] = 0.0
                self._turn = _WRITE if way == _READ else _READ
        self._go_on(time)
        for transfer in ended:
            transfer.call(time, transfer.number)


_RESTING, _READING, _STAGED, _IN_USE = range(4)


class _Gradients:
    """Forwards and backwards: every use in its order."""

    def __init__(self, step: Step, clock: _Clock, pool: _Pool, drive: _Drive, link: _Link, result: Simulated) -> None:
        self._step, self._clock, self._pool, self._drive, self._link = step, clock, pool, drive, link
        self._result = result
        self._states = [_RESTING] * len(step.group_bytes)
        self._holders = [0] * len(step.group_bytes)
        """Uses of each group that were handed over and are not gathered yet."""
        self._next_uses = _next_uses([use.group for use in step.uses], len(step.group_bytes))
        self._read_up_to = 0
        """All uses before it are staged, being read, or behind us."""
        self._wanted_up_to = 0
        """The uses before it are those for which a group is worth keeping staged."""
        self._demanded: int | None = None
        """The use whose group is waited for."""
        self._demanded_since = 0.0
        self._network_free = self._compute_free = 0.0
        self._live_bytes = 0
        self._left = len(step.uses)
        self._end = 0.0
        if step.uses:
            clock.at(0.0, self._demand, 0)

    @property
    def done(self) -> bool:
        return self._left == 0

    def _demand(self, time: float, place: int) -> None:
        """Use `place` is next: go on with it as soon as its group is staged."""
        self._demanded, self._demanded_since = place, time
        self._try(time)

    def _try(self, time: float) -> None:
        """Hand the group over that is waited for, if it is here; start to read it, if there is room."""
        place = self._demanded
        if place is None:
            return
        group = self._step.uses[place].group
        state = self._states[group]
        if state == _RESTING and self._make_room(self._step.group_bytes[group]):
            self._start_read(time, place)
            state = self._states[group]
        if state == _READING:
            self._drive.demand(time, True)
        elif state in (_STAGED, _IN_USE):
            self._demanded = None
            self._drive.demand(time, False)
            self._hand_over(time, place)

    def _make_room(self, nbytes: int) -> bool:
        """Drop what is staged, needed latest first, until `nbytes` are free."""
        if self._pool.free >= nbytes:
            return True
        idle = [group for group, state in enumerate(self._states) if state == _STAGED]
        idle.sort(key=lambda group: self._next_uses.after(group), reverse=True)
        while self._pool.free < nbytes and idle:
            dropped = idle.pop(0)
            self._states[dropped] = _RESTING
            self._pool.give_back(self._step.group_bytes[dropped])
            self._read_up_to = 0
        return self._pool.free >= nbytes

    def _start_read(self, time: float, place: int) -> bool:
        use = self._step.uses[place]
        if not self._pool.try_lease(self._step.group_bytes[use.group]):
            return False
        if use.read_bytes:
            self._states[use.group] = _READING
            self._drive.read(time, use.read_bytes, f"group {use.group}", self._staged, use.group)
        else:
            self._states[use.group] = _STAGED
        return True

    def _staged(self, time: float, group: int) -> None:
        self._states[group] = _STAGED
        self._try(time)

    def _look_ahead(self, time: float, place: int) -> None:
        """Start what the policy wants staged with `place` uses behind us, for as long as there is room."""
        uses, states = self._step.uses, self._states
        self._read_up_to = max(self._read_up_to, place)
        self._wanted_up_to = self._step.ends[place]
        while self._read_up_to < self._wanted_up_to:
            if states[uses[self._read_up_to].group] == _RESTING and not self._start_read(time, self._read_up_to):
                return
            self._read_up_to += 1

    def _hand_over(self, time: float, place: int) -> None:
        """The group of use `place` is staged: copy, gather and compute follow in order."""
        use = self._step.uses[place]
        timeline = self._result.timeline
        self._states[use.group] = _IN_USE
        self._holders[use.group] += 1
        self._next_uses.used(use.group)
        self._look_ahead(time, place + 1)
        self._live_bytes += use.live_bytes
        self._result.live_bytes_peak = max(self._result.live_bytes_peak, self._live_bytes)
        gathered = self._link.to_device(time, use.copy_bytes, f"group {use.group}")
        if use.gather_seconds:
            start = max(gathered, self._network_free)
            gathered = self._network_free = start + use.gather_seconds
            timeline.append(Interval("network", f"gather {use.group}", start, gathered))
        start = max(gathered, self._compute_free)
        self._result.stall_seconds += min(time - self._demanded_since, start - self._compute_free)
        self._compute_free = start + use.compute_seconds
        timeline.append(Interval("compute", f"use {place} of group {use.group}", start, self._compute_free))
        self._clock.at(gathered, self._gathered, place)
        self._clock.at(self._compute_free, self._computed, place)
        if self._step.overlap_gathers and place + 1 < len(self._step.uses):
            self._clock.at(start, self._demand, place + 1)

    def _gathered(self, time: float, place: int) -> None:
        """The lease goes back, or the group stays staged where the policy wants it soon again."""
        group = self._step.uses[place].group
        self._holders[group] -= 1
        if self._holders[group]:
            return
        if self._next_uses.after(group) < self._wanted_up_to:
            self._states[group] = _STAGED
        else:
            self._states[group] = _RESTING
            self._pool.give_back(self._step.group_bytes[group])
        self._try(time)

    def _computed(self, time: float, place: int) -> None:
        use = self._step.uses[place]
        self._live_bytes -= use.live_bytes
        end = time
        if use.reduce_seconds:
            start = max(time, self._network_free)
            end = self._network_free = start + use.reduce_seconds
            self._result.timeline.append(Interval("network", f"reduce {use.group}", start, end))
        if use.gradient_bytes:
            end = self._link.to_host(end, use.gradient_bytes, f"gradients of group {use.group}")
        self._end = max(self._end, end)
        self._left -= 1
        if not self._left:
            self._result.gradient_seconds = self._end
        elif not self._step.overlap_gathers:
            self._clock.at(end, self._demand, place + 1)


class _NextUses:
    """Where in the step each group is used next."""

    def __init__(self, places: list[deque[int]]) -> None:
        self._places = places

    def after(self, group: int) -> float:
        """Its next use that is not behind us; infinite where there is none."""
        return self._places[group][0] if self._places[group] else math.inf

    def used(self, group: int) -> None:
        self._places[group].popleft()


def _next_uses(uses: Sequence[int], groups: int) -> _NextUses:
    places: list[deque[int]] = [deque() for _ in range(groups)]
    for place, group in enumerate(uses):
        places[group].append(place)
    return _NextUses(places)


class _Update:
    """The optimizer's lap: read k + 1 | update k | write k - 1. Nothing that was staged before is worth keeping."""

    def __init__(self, step: Step, clock: _Clock, pool: _Pool, drive: _Drive, link: _Link, result: Simulated) -> None:
        self._step, self._clock, self._drive, self._link = step, clock, drive, link
        self._result = result
        pool.give_back(step.pool_bytes - pool.free)
        self._pool = pool
        self._states = [_RESTING] * len(step.sub_groups)
        self._current: int | None = None
        self._current_since = 0.0
        self.done = not step.sub_groups

    def begin(self, time: float) -> None:
        """The gradients are there since `time`."""
        if self._step.between_seconds:
            end = time + self._step.between_seconds
            self._result.timeline.append(Interval("update", "norm and clipping", time, end))
            time = end
        if self._step.sub_groups:
            self._clock.at(time, self._next, 0)

    def _next(self, time: float, number: int) -> None:
        self._current, self._current_since = number, time
        for ahead in range(number, min(number + 1 + self._step.sub_groups_ahead, len(self._states))):
            if self._states[ahead] == _RESTING and not self._start_read(time, ahead):
                break
        self._try(time)

    def _start_read(self, time: float, number: int) -> bool:
        sub = self._step.sub_groups[number]
        if not self._pool.try_lease(sub.lease_bytes):
            return False
        self._states[number] = _READING if sub.read_bytes else _STAGED
        if sub.read_bytes:
            self._drive.read(time, sub.read_bytes, f"sub-group {number}", self._staged, number)
        return True

    def _staged(self, time: float, number: int) -> None:
        self._states[number] = _STAGED
        self._try(time)

    def _try(self, time: float) -> None:
        """Update the sub-group whose turn it is, if it is here."""
        number = self._current
        if number is None:
            return
        if self._states[number] == _RESTING:
            self._start_read(time, number)
        self._drive.demand(time, self._states[number] == _READING)
        if self._states[number] != _STAGED:
            return
        self._current = None
        self._states[number] = _IN_USE
        self._result.stall_seconds += time - self._current_since
        end = time + self._step.sub_groups[number].update_seconds
        self._result.timeline.append(Interval("update", f"sub-group {number}", time, end))
        self._clock.at(end, self._updated, number)

    def _updated(self, time: float, number: int) -> None:
        sub = self._step.sub_groups[number]
        if sub.write_bytes:
            self._drive.write(time, sub.write_bytes, f"sub-group {number}", self._written, number)
        else:
            self._pool.give_back(sub.lease_bytes)
        self._link.to_device(time, sub.copy_bytes, f"parameters of sub-group {number}")
        if number + 1 < len(self._states):
            self._next(time, number + 1)
        else:
            self.done = True

    def _written(self, time: float, number: int) -> None:
        self._pool.give_back(self._step.sub_groups[number].lease_bytes)
        self._try(time)
