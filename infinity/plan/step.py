"""A training step as data: what the training thread of one rank does, in order, and how far reads run ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infinity.schedule.readahead import plan_look_ahead


class Use(NamedTuple):
    """One use of a group: in a forward or a backward.

    Attributes:
        group: its number.
        read_bytes: what the drive must bring if the group isn't staged; less than the group where part of it is resident.
        compute_bytes: of its shard's compute parameters, from host memory to the device.
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
    """An update of one sub-group; or anything else that is read, or written, or both, between uses.

    Attributes:
        read_bytes, write_bytes: from and to the drive.
        lease_bytes: of the pool, from the start of its read to the end of its write.
        update_seconds: of Adam.
        compute_bytes: of new compute parameters, from host memory to the device.
        into: the group whose compute parameters it makes, to be used next: leased by then, and staged until that use. None for
            no group.
        after: the place in the program of the use whose gradients, or activations, it takes. None where these are there.
        name: in the timeline; its place where empty.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    lease_bytes: int = 0
    update_seconds: float = 0.0
    compute_bytes: int = 0
    into: int | None = None
    after: int | None = None
    name: str = ""


class Pause(NamedTuple):
    """The thread waits for all gradients, then works on them, for the norm, say. No group is worth keeping beyond it.

    Attributes:
        seconds: of that work.
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
        look_ahead_bytes: that groups and sub-groups which are read ahead may hold.
        sub_groups_ahead: read ahead after a pause.
        pool_bytes: the pinned pool.
        overlap_gathers: whether a gather goes on during the computation before it.
    """

    program: Program
    group_bytes: Sequence[int]
    look_ahead_bytes: int = 0
    sub_groups_ahead: int = 1
    pool_bytes: int = 0
    overlap_gathers: bool = True

    def units(self) -> list[int]:
        """By place in the program, the number of what the item needs staged: of its group, or, after the groups, its own."""
        groups = len(self.group_bytes)
        return [item.group if isinstance(item, Use) else groups + place for place, item in enumerate(self.program)]

    def lease_bytes(self) -> list[int]:
        """By those numbers."""
        return [*self.group_bytes, *(item.lease_bytes if isinstance(item, SubGroup) else 0 for item in self.program)]

    def ends(self) -> list[int]:
        """With `place` items begun, what `program[place : ends[place]]` needs should be staged.

        Groups and sub-groups alike hold at most `look_ahead_bytes` (`readahead.plan_look_ahead`). After a pause it is
        `sub_groups_ahead`, and what was staged by then. Beyond a pause that is still to come only where reads go on.
        """
        places = len(self.program)
        pause = next((place for place, item in enumerate(self.program) if isinstance(item, Pause)), places)
        item = self.program[pause] if pause < places else None
        before = places if isinstance(item, Pause) and item.reads_go_on else pause
        ends = plan_look_ahead(self.units()[:before], self.lease_bytes(), self.look_ahead_bytes)[: pause + 1]
        after = range(pause + 1, places + 1)
        return ends + [max(ends[-1], min(place + self.sub_groups_ahead, places)) for place in after]
