"""Floor 7. One training step as discrete events: what drive, link, network, device and CPU do when, on one of many equal ranks.

It follows the same policies as the product (how far reads run ahead, how deep the optimizer's pipeline is) with the same pinned
budget, but on resources that are only numbers. So it tells what a step takes on a machine that one doesn't have.

[Note: What is simulated]
All ranks do the same, so one is simulated, and what ranks share (drives, network, memory bandwidth) comes as its share.
The step starts with nothing staged and ends when its last byte is written. The training thread goes through a program, item by
item. A use of a group goes

    drive read -> lease -> copy to the device -> all-gather -> compute -> reduce-scatter -> gradients to the host

where compute follows the order of the uses, and the thread goes on to the next item with the compute of this one
(`overlap_gathers`), or after it, as on a CPU. An update of a sub-group keeps the thread busy, while others are read and
written: read k + 1 | update k | write k - 1. Updates come after a pause for the norm of all gradients, when the first have been
read already; or in the forward, each before the use of the group whose copy it makes; or in the backward, each when the
gradient that it takes is there. Copies, collectives and compute each keep their order and start as early as they can. A drive
takes one transfer of a kind at a time; demand reads interrupt writes; otherwise reads and writes alternate, or go on at once
where it is known how fast.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infinity.errors import BudgetError
from infinity.plan.lower_bound import DriveSpeed
from infinity.schedule.lookahead import plan_look_ahead
from infinity.schedule.timeline import Interval


class Use(NamedTuple):
    """One use of a group: in a forward or a backward.

    Attributes:
        group: its number.
        read_bytes: what the drive must bring if the group isn't staged; less than the group where part of it is resident.
        copy_bytes: of its shard, from host memory to the device.
        gather_seconds, compute_seconds, reduce_seconds: of the all-gather, the computation, the reduce-scatter.
        gradient_bytes: of its shard, from the device to host memory.
        saved_bytes, restored_bytes: of activations, after the computation to host memory, and back before it.
        live_bytes: on the device from the gather to the end of the computation.
    """

    group: int
    read_bytes: int = 0
    compute_bytes: int = 0
    gather_seconds: float = 0.0
    compute_seconds: float = 0.0
    reduce_seconds: float = 0.0
    gradient_bytes: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    live_bytes: int = 0


class SubGroup(NamedTuple):
    """An update of what is stepped together; or anything else that is read, or written, or both, between uses.

    Attributes:
        read_bytes, write_bytes: from and to the drive.
        lease_bytes: of the pool, from the start of its read to the end of its write.
        update_seconds: of Adam.
        copy_bytes: of new parameters, from host memory to the device.
        into: the group whose copy it makes, to be used next: leased by then, and kept until that use. None for no group.
        after: the place in the program of the use whose gradients, or activations, it takes. None for what is there.
        what: its name in the timeline; by its place where empty.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    lease_bytes: int = 0
    update_seconds: float = 0.0
    compute_bytes: int = 0
    into: int | None = None
    after: int | None = None
    what: str = ""


class Pause(NamedTuple):
    """All gradients are waited for, then something is done with them, such as the norm. No group is worth keeping beyond it.

    Attributes:
        seconds: what is done takes.
        reads_go_on: whether what comes after it may be read before: not where that has yet to be written.
    """

    seconds: float = 0.0
    reads_go_on: bool = False


Program = Sequence[Use | SubGroup | Pause]
"""What the training thread does, in its order."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step does.

    Attributes:
        program: see `Program`.
        group_bytes: the lease of each group.
        ends: with `place` items begun, what `program[place : ends[place]]` needs should be staged (`look_ahead_of`).
        pool_bytes: the pinned pool.
        overlap_gathers: whether a gather goes on beside the computation before it.
    """

    program: Program
    group_bytes: Sequence[int]
    ends: Sequence[int]
    pool_bytes: int = 0
    overlap_gathers: bool = True


def look_ahead_of(
    program: Program, group_bytes: Sequence[int], *, look_ahead_bytes: int, sub_groups_ahead: int = 1
) -> list[int]:
    """How far staging reaches at each place of `program`: as many bytes as may be held, groups and sub-groups alike
    (`lookahead.plan_look_ahead`); after a pause `sub_groups_ahead`, and what was staged by then. Beyond a pause that is still
    to come only where reads go on."""
    places = len(program)
    pause = next((place for place, item in enumerate(program) if isinstance(item, Pause)), places)
    chunks = _chunks_of(program, len(group_bytes))
    sizes = _lease_bytes(program, group_bytes)
    item = program[pause] if pause < places else None
    before = places if isinstance(item, Pause) and item.reads_go_on else pause
    ends = plan_look_ahead(chunks[:before], sizes, look_ahead_bytes)[: pause + 1]
    return ends + [max(ends[-1], min(place + sub_groups_ahead, places)) for place in range(pause + 1, places + 1)]


def _chunks_of(program: Program, groups: int) -> list[int]:
    """The number of what each item needs staged: of its group; sub-groups are counted after the groups, by their places."""
    return [item.group if isinstance(item, Use) else groups + place for place, item in enumerate(program)]


def _lease_bytes(program: Program, group_bytes: Sequence[int]) -> list[int]:
    """By those numbers."""
    return [*group_bytes, *(item.lease_bytes if isinstance(item, SubGroup) else 0 for item in program)]


@dataclass(frozen=True)
class Resources:
    """What one rank has: its drives, and bytes per second of the link from host to device and back."""

    drive: DriveSpeed
    to_device_bytes_per_s: float = math.inf
    to_host_bytes_per_s: float = math.inf


@dataclass
class Simulated:
    """What became of a step.

    Attributes:
        seconds: from its begin until its last byte is written.
        gradient_seconds: from its begin until all gradients are where updates read them.
        stall_seconds: in which the training thread and compute stood still for want of bytes from the drive.
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
    thread = _Thread(step, clock, pool, drive, link, result)
    clock.run()
    if thread.stuck_at is not None:
        raise BudgetError(_too_small(step, thread.stuck_at))
    result.seconds = max([result.gradient_seconds, *(end for _, _, _, end in result.timeline)])
    return result


def _too_small(step: Step, place: int) -> str:
    if isinstance(step.program[place], Use):
        what, largest_bytes = "groups", max(step.group_bytes)
    else:
        what, largest_bytes = "sub-groups", max(i.lease_bytes for i in step.program if isinstance(i, SubGroup))
    return (
        f"a pinned pool of {step.pool_bytes} bytes can't hold the {what} of this step at once, of which the largest has "
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


_ON_NVME, _READING, _STAGED, _IN_USE = range(4)


class _Thread:
    """The training thread: every item of the program in its order.

    A *chunk* is what is staged as a whole: a group, or a sub-group at its place (see `_chunks_of`).
    """

    def __init__(self, step: Step, clock: _Clock, pool: _Pool, drive: _Drive, link: _Link, result: Simulated) -> None:
        self._step, self._clock, self._pool, self._drive, self._link = step, clock, pool, drive, link
        self._result = result
        self._chunks = _chunks_of(step.program, len(step.group_bytes))
        self._lease_bytes = _lease_bytes(step.program, step.group_bytes)
        self._states = [_ON_NVME] * len(self._lease_bytes)
        self._idle: set[int] = set()
        """The chunks that are staged and could be dropped."""
        self._filling: int | None = None
        """The group whose copy is being made."""
        self._holders = [0] * len(step.group_bytes)
        """Uses of each group that were given out and are not gathered yet."""
        self._next_uses = _next_uses(self._chunks, len(self._lease_bytes))
        self._read_up_to = 0
        """What all items before it need is staged, being read, or behind us."""
        self._wanted_up_to = 0
        """The items before it are those for which a group is worth keeping staged."""
        self._demanded: int | None = None
        """The item that the thread is about to begin."""
        self._demanded_since = 0.0
        self._writing = 0
        """Sub-groups on their way back."""
        self._network_free = self._compute_free = 0.0
        self._live_bytes = 0
        self._gradients_at: list[float | None] = [None] * len(step.program)
        """When what each use brought, gradients or activations, was in host memory."""
        self._uses_left = sum(isinstance(item, Use) for item in step.program)
        clock.at(0.0, self._demand, 0)

    @property
    def stuck_at(self) -> int | None:
        """The item that never began."""
        return self._demanded

    def _demand(self, time: float, place: int) -> None:
        """Item `place` is next: begin it as soon as what it needs is here."""
        if place == len(self._step.program):
            return
        self._demanded, self._demanded_since = place, time
        self._look_ahead(time, place)
        self._try(time)

    def _try(self, time: float) -> None:
        """Begin the item that is demanded, if all is here; start to read what isn't, if there is room."""
        place = self._demanded
        if place is None:
            return
        item = self._step.program[place]
        if isinstance(item, Pause):
            if not self._uses_left:
                self._begin_pause(time, place, item)
            return
        if not self._is_staged(time, place, item):
            return
        if isinstance(item, Use):
            self._demanded = None
            self._copy_to_group(time, place, item)
        elif item.after is None or self._gradients_at[item.after] is not None:
            self._demanded = None
            self._update(time, place, item)

    def _is_staged(self, time: float, place: int, item: Use | SubGroup) -> bool:
        chunk = self._chunks[place]
        into = item.into if isinstance(item, SubGroup) else None
        if into is not None and not self._fill(into):
            return False
        if self._states[chunk] == _ON_NVME and self._make_room(self._lease_bytes[chunk]):
            self._start_read(time, place)
        self._drive.demand(time, self._states[chunk] == _READING)
        return self._states[chunk] in (_STAGED, _IN_USE)

    def _fill(self, group: int) -> bool:
        """Have a lease for a copy that is made, which stays until its use; whether there is one."""
        if self._states[group] == _ON_NVME:
            if not self._make_room(self._lease_bytes[group]):
                return False
            self._pool.try_lease(self._lease_bytes[group])
            self._states[group] = _STAGED
        self._idle.discard(group)
        self._filling = group
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Drop what is staged, needed latest first, until `nbytes` are free; what is wanted, only where no write is awaited."""
        if self._pool.free < nbytes:
            for chunk in sorted(self._idle, key=self._next_uses.after, reverse=True):
                if self._writing and self._next_uses.after(chunk) < self._wanted_up_to:
                    break
                self._drop(chunk)
                self._read_up_to = 0
                if self._pool.free >= nbytes:
                    break
        return self._pool.free >= nbytes

    def _drop(self, chunk: int) -> None:
        self._idle.discard(chunk)
        self._states[chunk] = _ON_NVME
        self._pool.give_back(self._lease_bytes[chunk])

    def _start_read(self, time: float, place: int) -> bool:
        item, chunk = self._step.program[place], self._chunks[place]
        assert not isinstance(item, Pause)
        if not self._pool.try_lease(self._lease_bytes[chunk]):
            return False
        if item.read_bytes:
            self._states[chunk] = _READING
            self._drive.read(time, item.read_bytes, self._name(place), self._staged, chunk)
        else:
            self._keep(chunk)
        return True

    def _name(self, place: int) -> str:
        item = self._step.program[place]
        if isinstance(item, Use):
            return f"group {item.group}"
        return (item.what if isinstance(item, SubGroup) else "") or f"sub-group {place}"

    def _keep(self, chunk: int) -> None:
        self._states[chunk] = _STAGED
        if chunk != self._filling:
            self._idle.add(chunk)

    def _staged(self, time: float, chunk: int) -> None:
        self._keep(chunk)
        self._try(time)

    def _look_ahead(self, time: float, place: int) -> None:
        """Start what the policy wants staged with `place` items begun, for as long as there is room."""
        self._read_up_to = max(self._read_up_to, place)
        self._wanted_up_to = self._step.ends[place]
        while self._read_up_to < self._wanted_up_to:
            chunk = self._chunks[self._read_up_to]
            pause = isinstance(self._step.program[self._read_up_to], Pause)
            if not pause and self._states[chunk] == _ON_NVME and not self._start_read(time, self._read_up_to):
                return
            self._read_up_to += 1

    def _take(self, time: float, place: int) -> None:
        """What item `place` needs is in use from now on."""
        chunk = self._chunks[place]
        self._idle.discard(chunk)
        self._states[chunk] = _IN_USE
        self._next_uses.used(chunk)
        if chunk == self._filling:
            self._filling = None
        self._look_ahead(time, place + 1)

    def _stalled(self, time: float, *since: float) -> None:
        """The thread waited for the drive up to now; it counts for as long as nothing was computed either."""
        self._result.stall_seconds += max(0.0, time - max(self._demanded_since, self._compute_free, *since))

    # Groups.

    def _copy_to_group(self, time: float, place: int, use: Use) -> None:
        """The group is staged: copy, gather and compute follow in order."""
        timeline = self._result.timeline
        self._holders[use.group] += 1
        self._take(time, place)
        self._stalled(time)
        self._live_bytes += use.live_bytes
        self._result.live_bytes_peak = max(self._result.live_bytes_peak, self._live_bytes)
        gathered = self._link.to_device(time, use.compute_bytes, f"group {use.group}")
        restored = self._link.to_device(time, use.restored_bytes, f"activations of group {use.group}")
        if use.gather_seconds:
            start = max(gathered, self._network_free)
            gathered = self._network_free = start + use.gather_seconds
            timeline.append(Interval("network", f"gather {use.group}", start, gathered))
        start = max(gathered, restored, self._compute_free)
        self._compute_free = start + use.compute_seconds
        timeline.append(Interval("compute", f"use {place} of group {use.group}", start, self._compute_free))
        self._clock.at(gathered, self._gathered, use.group)
        self._clock.at(self._compute_free, self._computed, place)
        if self._step.overlap_gathers:
            self._clock.at(start, self._demand, place + 1)

    def _gathered(self, time: float, group: int) -> None:
        """The lease goes back, or the group stays staged where the policy wants it soon again."""
        self._holders[group] -= 1
        if self._holders[group]:
            return
        if self._next_uses.after(group) < self._wanted_up_to or group == self._filling:
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
            end = self._link.to_host(end, use.gradient_bytes, f"gradients of group {use.group}")
        if use.saved_bytes:
            end = self._link.to_host(end, use.saved_bytes, f"activations of group {use.group}")
        self._clock.at(end, self._reduced, place)

    def _reduced(self, time: float, place: int) -> None:
        """What a use brought, gradients or activations, is in host memory."""
        self._gradients_at[place] = self._result.gradient_seconds = time
        self._uses_left -= 1
        if not self._step.overlap_gathers:
            self._demand(time, place + 1)
        else:
            self._try(time)

    # Updates.

    def _begin_pause(self, time: float, place: int, pause: Pause) -> None:
        self._demanded = None
        for chunk in [each for each in self._idle if each < len(self._step.group_bytes)]:
            self._drop(chunk)
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
            self._drive.write(time, sub.write_bytes, self._name(place), self._written, place)
        else:
            self._pool.give_back(sub.lease_bytes)
        self._link.to_device(time, sub.compute_bytes, f"parameters of {self._name(place)}")
        self._demand(time, place + 1)

    def _written(self, time: float, place: int) -> None:
        self._writing -= 1
        self._pool.give_back(self._lease_bytes[self._chunks[place]])
        self._try(time)


class _NextUses:
    """Where in the program each chunk is used next."""

    def __init__(self, places: list[deque[int]]) -> None:
        self._places = places

    def after(self, chunk: int) -> float:
        """Its next use that has not begun; infinite where there is none."""
        return self._places[chunk][0] if self._places[chunk] else math.inf

    def used(self, chunk: int) -> None:
        self._places[chunk].popleft()


def _next_uses(uses: Sequence[int], chunks: int) -> _NextUses:
    places: list[deque[int]] = [deque() for _ in range(chunks)]
    for place, chunk in enumerate(uses):
        places[chunk].append(place)
    return _NextUses(places)
