"""A training step as data: the program of one rank's training thread, and how far reads run ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infinity.schedule.readahead import plan_look_ahead


class Use(NamedTuple):
    """One use of a group: in a forward or a backward."""

    group: int
    read_bytes: int = 0
    """To read if the group is not staged; fewer than the group's if part of it is resident."""
    compute_bytes: int = 0
    """Of its shard's compute parameters, copied to the device."""
    gather_seconds: float = 0.0
    exchange_seconds: float = 0.0
    """On the network, while its computation waits."""
    compute_seconds: float = 0.0
    reduce_seconds: float = 0.0
    gradient_bytes: int = 0
    """Of its shard's gradients, copied to host memory."""
    saved_bytes: int = 0
    """Activations copied to host memory after the computation."""
    restored_bytes: int = 0
    live_bytes: int = 0
    """On the device from the gather to the end of the computation."""


class SubGroup(NamedTuple):
    """An update of one sub-group, or any other read, write or both between uses."""

    read_bytes: int = 0
    write_bytes: int = 0
    lease_bytes: int = 0
    """Of the pool, from the start of its read to the end of its write."""
    update_seconds: float = 0.0
    compute_bytes: int = 0
    """New compute parameters copied to the device."""
    into: int | None = None
    """Group whose compute parameters it makes, used next: leased from then on, and staged until that use."""
    after: int | None = None
    """Place of the use whose gradients or activations it takes. None if these are there already."""
    name: str = ""


class Pause(NamedTuple):
    """A wait for all gradients, followed by `seconds` of work on them, such as the norm. No group is kept staged across
    it. reads_go_on: later items may be read before it; False if their bytes have yet to be written."""

    seconds: float = 0.0
    reads_go_on: bool = False


Program = Sequence[Use | SubGroup | Pause]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step. group_bytes: lease of each group. look_ahead_bytes: bound for groups and sub-groups that are read ahead.
    sub_groups_ahead: sub-groups read ahead after a pause. overlap_gathers: a gather overlaps the computation before
    it."""

    program: Program
    group_bytes: Sequence[int]
    look_ahead_bytes: int = 0
    sub_groups_ahead: int = 1
    pool_bytes: int = 0
    overlap_gathers: bool = True

    def units(self) -> list[int]:
        """Return the number of each item's unit, by place: its group, or its own number, which follows the groups."""
        groups = len(self.group_bytes)
        return [item.group if isinstance(item, Use) else groups + place for place, item in enumerate(self.program)]

    def lease_bytes(self) -> list[int]:
        return [*self.group_bytes, *(item.lease_bytes if isinstance(item, SubGroup) else 0 for item in self.program)]

    def ends(self) -> list[int]:
        """Return `ends`: with `place` items begun, units of `program[place : ends[place]]` should be staged. Groups and
        sub-groups together hold at most `look_ahead_bytes` (`readahead.plan_look_ahead`). After a pause the bound is
        `sub_groups_ahead`, and everything staged by then. Reads cross a later pause only if it lets reads go on."""
        places = len(self.program)
        pause = next((place for place, item in enumerate(self.program) if isinstance(item, Pause)), places)
        item = self.program[pause] if pause < places else None
        before = places if isinstance(item, Pause) and item.reads_go_on else pause
        ends = plan_look_ahead(self.units()[:before], self.lease_bytes(), self.look_ahead_bytes)[: pause + 1]
        after = range(pause + 1, places + 1)
        return ends + [max(ends[-1], min(place + self.sub_groups_ahead, places)) for place in after]
