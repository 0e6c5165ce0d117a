"""What the look-ahead of a paged model chooses among: its chunks by number, their bytes, and how many may be held.

Data and arithmetic; follows nothing and moves nothing. The uses to come, and their order, are policy.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from infinity.schedule.pinned import look_ahead_room
from infinity.schedule.residency import choose_to_stay
from infinity.swap.chunk import Chunk
from infinity.swap.group import PagedGroup
from infinity.swap.options import PagingOptions
from infinity.swap.paged_model import PagedModel
from infinity.swap.sub_group import PagedSubGroup

Limit = tuple[Sequence[int], int]
"""The bytes of each unit, and how many of them may be chosen: see `LookAhead`."""


class Units:
    """First the groups by their number, then the sub-groups by theirs; then, again by number of the group, room for compute
    parameters that the step is still to make.

    Arguments as for `StagingPolicy`.
    """

    def __init__(
        self, paged: PagedModel, options: PagingOptions, pool_bytes: int, look_ahead_bytes: int | None
    ) -> None:
        self._paged = paged
        compute = [group.chunk for group in paged.groups]
        states = [sub.chunk if sub.moves else None for sub in paged.sub_groups]
        self._groups, self._sub_groups = len(compute), len(states)
        self.chunks: list[Chunk | None] = [*compute, *states, *[None] * len(compute)]
        """What is staged, by unit; None where that is nothing."""
        self.numbers = {chunk: unit for unit, chunk in enumerate(self.chunks) if chunk is not None}
        group_bytes = [_lease_bytes(chunk) for chunk in compute]
        self.nbytes = [*group_bytes, *map(_lease_bytes, states), *group_bytes]
        self.gathered_bytes = [*group_bytes, *[0] * len(states), *group_bytes]
        """The same, but nothing for sub-groups."""
        self.staying = frozenset(group.index for group in paged.groups if group.stays)
        """The groups that stay staged from step to step ..."""
        self.staying_bytes = sum(group_bytes[unit] for unit in self.staying)
        """... and what they take."""
        largest_group = max(group_bytes)
        self.room_bytes = look_ahead_room(pool_bytes, largest_group)
        """Bytes of the pool that reads ahead may hold ..."""
        self.look_ahead_bytes = self.room_bytes
        """... and as many of them as the user allows."""
        if look_ahead_bytes is not None:
            # A group is gathered for its backward while the one before it still needs its compute parameters for its update.
            least = 2 * largest_group if options.update == "backward" else 0
            self.look_ahead_bytes = min(self.room_bytes, max(look_ahead_bytes, least))

    def of(self, sub: PagedSubGroup) -> int:
        """The unit of a sub-group."""
        return self._groups + sub.layout.index

    def with_compute(self, unit: int) -> Iterator[int]:
        """A sub-group that is updated in the backward, and before it the group whose compute parameters that needs."""
        sub = self._paged.sub_groups[unit - self._groups]
        if self._paged.groups[sub.layout.space].completes is not None:
            yield sub.layout.space
        yield unit

    def room_for(self, group: PagedGroup) -> int:
        """The unit that stands for compute parameters of a group that the step is still to make."""
        return self._groups + self._sub_groups + group.index

    def stay_in(self, cycle: Sequence[int]) -> frozenset[int]:
        """The groups that stay staged from one evaluation like this to the next: those that do from step to step, and as many
        others as `choose_to_stay` finds room for."""
        groups = [*dict.fromkeys(index for index in cycle if self.nbytes[index] and index not in self.staying)]
        room_bytes = max(0, self.room_bytes - self.staying_bytes)
        stay = choose_to_stay([self.nbytes[index] for index in groups], room_bytes)
        return self.staying.union(groups[place] for place in stay)

    def limits(self, stay: Collection[int]) -> tuple[Limit, Limit]:
        """Of the look-ahead where the groups `stay` are held anyway: the room in the pool, and how far gathers may run ahead.
        What the updates of a group need counts as part of the group."""
        left = self.room_bytes - sum(self.nbytes[unit] for unit in stay)
        coming, gathered = [*self.nbytes], [*self.gathered_bytes]
        for group in stay:
            for unit in (group, self.room_for(self._paged.groups[group])):
                coming[unit] = gathered[unit] = 0
        return (coming, left), (gathered, min(self.look_ahead_bytes, left))


def _lease_bytes(chunk: Chunk | None) -> int:
    return chunk.lease_bytes if chunk is not None else 0
