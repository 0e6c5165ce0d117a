"""Resources of a simulated step, as numbers: a clock of events, the link, the drive."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from infinity.plan.machine import DriveSpeed
from infinity.schedule.timeline import Interval


@dataclass
class Simulated:
    """The outcome of a step."""

    seconds: float = 0.0
    gradient_seconds: float = 0.0
    """Until all gradients are in host memory."""
    stall_seconds: float = 0.0
    """Time without training thread and compute, waiting for bytes from the drive."""
    read_bytes: int = 0
    written_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    pool_bytes_peak: int = 0
    live_bytes_peak: int = 0
    """Most bytes gathered at once, as the peak before it is of bytes leased."""
    timeline: list[Interval] = field(default_factory=list)


class Clock:
    """Events in the order of their times; at equal times, in the order in which they were made."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._made = 0

    def at(self, time: float, call: Callable[[float, int], None], argument: int) -> None:
        self._made += 1
        heapq.heappush(self._waiting, (time, self._made, call, argument))

    def run(self) -> None:
        while self._waiting:
            time, _, call, argument = heapq.heappop(self._waiting)
            call(time, argument)


class Link:
    """Copies between host and device at `bytes_per_s`, in order in each direction."""

    def __init__(self, bytes_per_s: float, timeline: list[Interval]) -> None:
        self._bytes_per_s = bytes_per_s
        self._timeline = timeline
        self._free = {"to_device": 0.0, "to_host": 0.0}
        self.nbytes = {"to_device": 0, "to_host": 0}

    def copy(self, way: str, time: float, nbytes: int, name: str) -> float:
        """Copy `nbytes` from `time` on, after the previous copy; return the end time."""
        self.nbytes[way] += nbytes
        if not nbytes or self._bytes_per_s == math.inf:
            return time
        start = max(time, self._free[way])
        end = self._free[way] = start + nbytes / self._bytes_per_s
        self._timeline.append(Interval(way, name, start, end))
        return end


READ, WRITE = 0, 1
_DIRECTIONS = ("read", "write")


@dataclass(slots=True)
class _Transfer:
    left: float
    name: str
    call: Callable[[float, int], None]
    number: int


class Drive:
    """Reads and writes, at most one of each in flight, at once or alternating."""

    def __init__(self, speed: DriveSpeed, clock: Clock, timeline: list[Interval]) -> None:
        self._alone = speed.read_bytes_per_s, speed.write_bytes_per_s
        self._mixed = speed.mixed
        self._clock = clock
        self._timeline = timeline
        self.nbytes = [0, 0]
        """Bytes started in each direction."""
        self._queues: tuple[deque[_Transfer], deque[_Transfer]] = deque(), deque()
        self._rates = [0.0, 0.0]
        """Bytes per second of each direction since `_since`."""
        self._ends = [math.inf, math.inf]
        """End times of the transfers in flight at the current rates."""
        self._since = 0.0
        self._turn = READ
        self._version = 0
        self.demanded = False
        """True while the thread waits for a queued read: reads then go first."""

    def start(
        self, way: int, time: float, nbytes: int, name: str, call: Callable[[float, int], None], number: int
    ) -> None:
        """Queue a transfer; `call(time, number)` runs at its end."""
        self.nbytes[way] += nbytes
        self._queues[way].append(_Transfer(float(nbytes), name, call, number))
        if len(self._queues[way]) == 1:
            self._go_on(time)

    def demand(self, time: float, wanted: bool) -> None:
        if wanted != self.demanded:
            self.demanded = wanted
            if self._mixed is None and self._queues[WRITE]:
                self._go_on(time)

    def _go_on(self, time: float) -> None:
        """Account for the bytes moved so far, and choose the next rates."""
        self._account(time)
        reads, writes = self._queues
        read_rate = write_rate = 0.0
        if reads and writes and self._mixed is not None:
            read_rate, write_rate = self._mixed
        elif reads and (self.demanded or self._turn == READ or not writes):
            read_rate, self._turn = self._alone[READ], READ
        elif writes:
            write_rate, self._turn = self._alone[WRITE], WRITE
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
        for way in (READ, WRITE):
            if self._rates[way] and time > self._since:
                transfer = self._queues[way][0]
                transfer.left -= (time - self._since) * self._rates[way]
                self._timeline.append(Interval(_DIRECTIONS[way], transfer.name, self._since, time))

    def _moved(self, time: float, version: int) -> None:
        """Event: a transfer ends, as predicted with `version` of the rates; ignored if they have changed since."""
        if version != self._version:
            return
        ended = []
        self._account(time)
        self._since = time
        for way in (READ, WRITE):
            queue = self._queues[way]
            if self._ends[way] <= time:
                ended.append(queue.popleft())
                self._rates[way] = 0.0
                self._turn = WRITE if way == READ else READ
        self._go_on(time)
        for transfer in ended:
            transfer.call(time, transfer.number)
