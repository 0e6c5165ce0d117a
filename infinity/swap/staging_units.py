"""The units that a look-ahead over a paged model chooses among, their bytes, and the bytes that may be held.

Pure data and arithmetic. The order of the uses to come is policy.py's.

A unit is a chunk; a group stands for room for compute parameters that the step is still to make, and a group or sub-group for
itself if nothing of it is staged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from infinity.schedule.pinned import look_ahead_room
from infinity.schedule.readahead import Limit
from infinity.schedule.residency import choose_to_stay
from infinity.swap.chunk import Chunk
from infinity.swap.group import PagedGroup
from infinity.swap.options import PagingOptions
from infinity.swap.paged_model import PagedModel
from infinity.swap.sub_group import PagedSubGroup

Unit = Chunk | PagedGroup | PagedSubGroup


def compute_of(group: PagedGroup) -> Unit:
    """The unit of a group's compute parameters."""
    return group.chunk or group


def state_of(sub: PagedSubGroup) -> Unit:
    """The unit of a sub-group's state."""
    return sub.chunk if sub.moves else sub


class Units:
    """Arguments as for `StagingPolicy`."""

    def __init__(
        self, paged: PagedModel, options: PagingOptions, pool_bytes: int, look_ahead_bytes: int | None
    ) -> None:
        self._groups = paged.groups
        lease_bytes = {group: group.chunk.lease_bytes if group.chunk is not None else 0 for group in paged.groups}
        gathered = lease_bytes | {compute_of(group): nbytes for group, nbytes in lease_bytes.items()}
        states = {state_of(sub): sub.chunk.lease_bytes if sub.moves else 0 for sub in paged.sub_groups}
        self.nbytes: dict[Unit, int] = gathered | states
        self.gathered_bytes: dict[Unit, int] = gathered | dict.fromkeys(states, 0)
        """The same, but nothing for sub-groups."""
        self.staying = frozenset(group for group in paged.groups if group.stays)
        """The groups that stay staged from step to step ..."""
        self.staying_bytes = sum(lease_bytes[group] for group in self.staying)
        """... and what they take."""
        largest_group = max(lease_bytes.values())
        self.room_bytes = look_ahead_room(pool_bytes, largest_group)
        """Bytes of the pool that reads ahead may hold ..."""
        self.look_ahead_bytes = self.room_bytes
        """... and as many of them as the user allows."""
        if look_ahead_bytes is not None:
            # A group is gathered for its backward while the one before it still needs its compute parameters for its update.
            least = 2 * largest_group if options.update == "backward" else 0
            self.look_ahead_bytes = min(self.room_bytes, max(look_ahead_bytes, least))

    def with_compute(self, sub: PagedSubGroup) -> Iterator[Unit]:
        """The state of a sub-group that is updated in the backward, after the compute parameters that it needs."""
        group = self._groups[sub.layout.space]
        if group.completes is not None:
            yield compute_of(group)
        yield state_of(sub)

    def stay_in(self, cycle: Sequence[PagedGroup | PagedSubGroup]) -> frozenset[PagedGroup]:
        """The groups that stay staged from one evaluation like this to the next: those that do from step to step, and as many
        others as `choose_to_stay` finds room for."""
        used = [unit for unit in dict.fromkeys(cycle) if isinstance(unit, PagedGroup)]
        groups = [group for group in used if self.nbytes[group] and group not in self.staying]
        room_bytes = max(0, self.room_bytes - self.staying_bytes)
        stay = choose_to_stay([self.nbytes[group] for group in groups], room_bytes)
        return self.staying.union(groups[place] for place in stay)

    def limits(self, stay: Collection[PagedGroup]) -> tuple[Limit, Limit]:
        """Limits of the look-ahead if the groups `stay` are held anyway: the room in the pool, and how far gathers may run
        ahead. The updates of a group count as part of the group."""
        left = self.room_bytes - sum(self.nbytes[group] for group in stay)
        held = dict.fromkeys([*stay, *map(compute_of, stay)], 0)
        return (self.nbytes | held, left), (self.gathered_bytes | held, min(self.look_ahead_bytes, left))
