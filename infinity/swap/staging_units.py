"""The units that the look-ahead over a paged model chooses from, with their bytes and the bytes that may be held.

Pure data and arithmetic; policy.py has the order of the coming uses.

A unit is a chunk. A group also stands for the room of compute parameters that the step is still to produce. A group or
sub-group of which nothing is staged stands for itself (`PagedGroup.unit`, `PagedSubGroup.unit`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set

from infinity.schedule.pinned import look_ahead_room
from infinity.schedule.readahead import Limit, cycle_read_bytes
from infinity.schedule.residency import choose_to_stay
from infinity.swap.group import PagedGroup
from infinity.swap.options import PagingOptions
from infinity.swap.paged_model import PagedModel
from infinity.swap.stager import Chunk
from infinity.swap.sub_group import PagedSubGroup

Unit = Chunk | PagedGroup | PagedSubGroup


class Units:
    """The units of one paged model. Arguments as for `StagingPolicy`."""

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
        """`nbytes`, with 0 for sub-groups."""
        self.staying = frozenset(group for group in paged.groups if group.stays)
        """The groups that stay staged from step to step."""
        self.staying_bytes = sum(lease_bytes[group] for group in self.staying)
        largest_group = max(lease_bytes.values())
        self.room_bytes = look_ahead_room(pool_bytes, largest_group)
        """Bytes of the pool that reads ahead may hold."""
        self.look_ahead_bytes = self.room_bytes
        """The part of `room_bytes` that the options allow."""
        if look_ahead_bytes is not None:
            # A group is gathered for its backward while the previous one still needs its compute parameters for its
            # update.
            least = 2 * largest_group if options.update == "backward" else 0
            self.look_ahead_bytes = min(self.room_bytes, max(look_ahead_bytes, least))

    def with_compute(self, sub: PagedSubGroup) -> tuple[Unit, ...]:
        """Return the units of an update in the backward: the compute parameters, if it needs them, and the state."""
        group = self._groups[sub.layout.space]
        return (group.unit, sub.unit) if group.masters_chunk is not None else (sub.unit,)

    def stay_in(self, cycle: Sequence[PagedGroup | PagedSubGroup]) -> frozenset[PagedGroup]:
        """Return the groups that stay staged from one such evaluation to the next: those that always stay, and as many
        others as `choose_to_stay` finds room for."""
        used = [unit for unit in dict.fromkeys(cycle) if isinstance(unit, PagedGroup)]
        groups = [group for group in used if self.nbytes[group] and group not in self.staying]
        room_bytes = max(0, self.room_bytes - self.staying_bytes)
        stay = choose_to_stay([self.nbytes[group] for group in groups], room_bytes)
        return self.staying.union(groups[place] for place in stay)

    def limits(self, stay: Collection[PagedGroup]) -> tuple[Limit, Limit]:
        """Return the limits of a look-ahead while the groups `stay` are held: the room in the pool, and how far gathers
        may run ahead. The updates of a group count as part of the group."""
        left = self.room_bytes - sum(self.nbytes[group] for group in stay)
        held = dict.fromkeys([*stay, *(group.unit for group in stay)], 0)
        return (self.nbytes | held, left), (self.gathered_bytes | held, min(self.look_ahead_bytes, left))


class StepBytes:
    """Predicts the bytes that a step of a model moves.

    Args:
        paged, units: the model, and what may be staged of it.
        in_backward: sub-groups that the backward updates.
        later: sub-groups that are updated after the backward.
        for_gathers: `later` are updated when their groups are gathered next, which saves that gather its read.
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
        """Sub-groups whose update saves the first gather its read."""
        self._made_later = frozenset(later)
        discarded = in_backward & self._made_later
        self._staying = {group.unit: not discarded.isdisjoint(group.members) for group in units.staying}
        """By group that stays staged: True if its staged bytes are discarded and read again for the later update."""

    def of_updates(self) -> tuple[int, int]:
        """Return the bytes (read, written) of all updates."""
        spans = [span for sub in self._in_backward for span in sub.reads(compute=False)]
        staying = {group.index for group in self._units.staying}
        spans += [span for sub in self._later for span in sub.reads(compute=sub.layout.space not in staying)]
        written = sum(sub.layout.nbytes for sub in (*self._in_backward, *self._later))
        return sum(span.nbytes for span in spans), written

    def of_gathers(self, times: int | Mapping[str, int]) -> int:
        """Return the bytes read if groups are gathered so often (each, or by name) and only those that stay are
        kept."""
        read = 0
        for group in self._paged.groups:
            if group.is_routed:
                continue
            count = times if isinstance(times, int) else times[group.name]
            if group.masters_chunk is not None and not self._in_backward.isdisjoint(group.members):
                count = max(count, 2)  # its update in the backward reuses the compute parameters that were read for it
            reads = [self._first_bytes(group, self._made), *[_compute_bytes(group)] * (count - 1)]
            read += sum(self._not_spared([group.unit] * count, reads))
        return read

    def of_cycle(self, cycle: Sequence[PagedGroup | PagedSubGroup], next_step: Iterable[Unit]) -> int:
        """Return the bytes that the gathers of a cycle read, without the reads of their updates. `next_step`: units of
        the next step that may be staged by the end of the cycle."""
        uses: list[Unit] = []
        reads: list[int] = []
        made = set(self._made)
        updating: list[Unit] = []
        for used in cycle:
            if isinstance(used, PagedSubGroup):
                *gathered, state = self._units.with_compute(used)
                if gathered != updating:  # staged from its gather until its last member is updated
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
        """Return the bytes that a group's first gather in a step reads, if updates produce the members `updated`. A
        group that stays reads for its updates, which take its old compute parameters if these complete the masters."""
        if group.unit not in self._staying:
            return _compute_bytes(group, updated)
        return _compute_bytes(
            group, [sub for sub in self._made_later.intersection(group.members) if not sub.layout.split]
        )

    def _not_spared(self, uses: Sequence[Unit], reads: Sequence[int]) -> Iterator[int]:
        """Yield the bytes that each use reads, given its `reads` if nothing stayed."""
        to_read = {unit for unit, is_discarded in self._staying.items() if is_discarded}
        for unit, nbytes in zip(uses, reads, strict=True):
            yield nbytes if unit not in self._staying or unit in to_read else 0
            to_read.discard(unit)


def _compute_bytes(group: PagedGroup, updated: Container[PagedSubGroup] = ()) -> int:
    """Return the bytes that a gather reads if nothing of the group is staged; updates have just produced `updated`."""
    members = [sub for sub in group.members if sub not in updated and sub.gathers_from_nvme]
    of_arena = sum(sub.layout.numel * sub.layout.itemsize(sub.layout.gathered) for sub in members)
    return of_arena + sum(span.nbytes for span in group.foreign.reads)
