"""The units that a look-ahead over a paged model chooses among, their bytes, and the bytes that may be held.

Pure data and arithmetic. The order of the uses to come is policy.py's.

A unit is a chunk; a group stands for room for compute parameters that the step is still to make, and a group or sub-group for
itself if nothing of it is staged (`PagedGroup.unit`, `PagedSubGroup.unit`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set

from infinity.schedule.pinned import look_ahead_room
from infinity.schedule.readahead import Limit, cycle_read_bytes
from infinity.schedule.residency import choose_to_stay
from infinity.swap.chunk import Chunk
from infinity.swap.group import PagedGroup
from infinity.swap.options import PagingOptions
from infinity.swap.paged_model import PagedModel
from infinity.swap.sub_group import PagedSubGroup

Unit = Chunk | PagedGroup | PagedSubGroup


class Units:
    """Arguments as for `StagingPolicy`."""

    def __init__(
        self, paged: PagedModel, options: PagingOptions, pool_bytes: int, look_ahead_bytes: int | None
    ) -> None:
        self._groups = paged.groups
        lease_bytes = {group: group.chunk.lease_bytes if group.chunk is not None else 0 for group in paged.groups}
        gathered: dict[Unit, int] = {}
        for group, nbytes in lease_bytes.items():
            gathered |= {group: nbytes, group.unit: nbytes}
        states: dict[Unit, int] = {sub.unit: sub.chunk.lease_bytes if sub.moves else 0 for sub in paged.sub_groups}
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

    def with_compute(self, sub: PagedSubGroup) -> tuple[Unit, ...]:
        """The state of a sub-group that is updated in the backward, after the compute parameters that it needs."""
        group = self._groups[sub.layout.space]
        return (group.unit, sub.unit) if group.masters_chunk is not None else (sub.unit,)

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
        held = dict.fromkeys([*stay, *(group.unit for group in stay)], 0)
        return (self.nbytes | held, left), (self.gathered_bytes | held, min(self.look_ahead_bytes, left))


class StepBytes:
    """Foretells a step of a model.

    Args:
        paged, units: what is foretold, and what may be staged of it.
        in_backward: the sub-groups that the backward updates.
        later: those that are updated after it.
        for_gathers: whether that is when their groups are gathered next, which spares that gather its read.
    """

    def __init__(
        self,
        paged: PagedModel,
        units: Units,
        *,
        in_backward: Set[PagedSubGroup],
        later: Sequence[PagedSubGroup],
        for_gathers: bool,
    ) -> None:
        self._paged, self._units = paged, units
        self._in_backward, self._later = in_backward, later
        self._made = set(later) if for_gathers else set()
        """What the first gather takes from an update."""
        self._made_later = frozenset(later)
        discarded = in_backward & self._made_later
        self._staying = {group.unit: not discarded.isdisjoint(group.members) for group in units.staying}
        """The groups that stay staged, and whether what is staged of one is discarded, and read again for the update after."""

    def of_updates(self) -> tuple[int, int]:
        """Bytes (read, written)."""
        spans = [span for sub in self._in_backward for span in sub.reads(compute=False)]
        staying = {group.index for group in self._units.staying}
        spans += [span for sub in self._later for span in sub.reads(compute=sub.layout.space not in staying)]
        written = sum(sub.layout.nbytes for sub in (*self._in_backward, *self._later))
        return sum(span.nbytes for span in spans), written

    def of_gathers(self, times: int | Mapping[str, int]) -> int:
        """Bytes read if each group is gathered so often (by name, or all of them), and nothing is kept but what stays."""
        read = 0
        for group in self._paged.groups:
            if group.is_routed:
                continue
            count = times if isinstance(times, int) else times[group.name]
            if group.masters_chunk is not None and not self._in_backward.isdisjoint(group.members):
                count = max(count, 2)  # its update in the backward takes the compute parameters that were read for it
            reads = [self._first_bytes(group, self._made), *[_compute_bytes(group)] * (count - 1)]
            read += sum(self._not_spared([group.unit] * count, reads))
        return read

    def of_cycle(self, cycle: Sequence[PagedGroup | PagedSubGroup], next_step: Iterable[Unit]) -> int:
        """Bytes that the gathers of a cycle read, without those that the updates for them read. `next_step`: the units of the
        step after it that may be staged by its end."""
        uses: list[Unit] = []
        reads: list[int] = []
        made = set(self._made)
        updating: list[Unit] = []
        for used in cycle:
            if isinstance(used, PagedSubGroup):
                *gathered, state = self._units.with_compute(used)
                if gathered != updating:  # stays staged from its gather, until its last member is updated
                    uses += gathered
                    reads += [0] * len(gathered)
                updating = gathered
                uses.append(state)
                reads.append(0)
                continue
            resident_sub_groups = [sub for sub in used.resident_sub_groups if sub in made]
            updated = [sub for sub in used.members if sub in made]
            made -= {*resident_sub_groups, *updated}
            uses += [*(sub.unit for sub in resident_sub_groups), *(sub.unit for sub in updated), used.unit]
            reads += [0] * (len(resident_sub_groups) + len(updated)) + [self._first_bytes(used, updated)]
        limits = self._units.limits(self._units.staying)
        return cycle_read_bytes(uses, [*self._not_spared(uses, reads)], next_step, *limits)

    def _first_bytes(self, group: PagedGroup, updated: Container[PagedSubGroup]) -> int:
        """What the first gather of a group in a step reads, for which an update makes those of `updated`. The read of one that
        stays is for updates, which take the old ones from there where these complete the masters."""
        if group.unit not in self._staying:
            return _compute_bytes(group, updated)
        return _compute_bytes(
            group, [sub for sub in self._made_later.intersection(group.members) if not sub.layout.split]
        )

    def _not_spared(self, uses: Sequence[Unit], reads: Sequence[int]) -> Iterator[int]:
        """The bytes that each use of a unit reads, of `reads` if nothing stayed."""
        to_read = {unit for unit, is_discarded in self._staying.items() if is_discarded}
        for unit, nbytes in zip(uses, reads, strict=True):
            yield nbytes if unit not in self._staying or unit in to_read else 0
            to_read.discard(unit)


def _compute_bytes(group: PagedGroup, updated: Container[PagedSubGroup] = ()) -> int:
    """Bytes that a gather of a group reads if nothing of it is staged, where an update has just made those of `updated`."""
    members = [sub for sub in group.members if sub not in updated and sub.gathers_from_nvme]
    of_arena = sum(sub.layout.numel * sub.layout.itemsize(sub.layout.gathered) for sub in members)
    return of_arena + sum(span.nbytes for span in group.foreign.reads)
