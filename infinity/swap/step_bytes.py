"""The bytes that a step of a paged model reads and writes, foretold from what it updates when.

Arithmetic over what is placed where; follows nothing and moves nothing. What comes when is policy.py's.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set

from infinity.schedule.readahead import cycle_read_bytes
from infinity.swap.group import PagedGroup
from infinity.swap.paged_model import PagedModel
from infinity.swap.staging_units import Unit, Units, compute_of, state_of
from infinity.swap.sub_group import PagedSubGroup


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
        self._staying = {compute_of(group): not discarded.isdisjoint(group.members) for group in units.staying}
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
            if group.completes is not None and not self._in_backward.isdisjoint(group.members):
                count = max(count, 2)  # its update in the backward takes the compute parameters that were read for it
            reads = [self._first_bytes(group, self._made), *[_compute_bytes(group)] * (count - 1)]
            read += sum(self._not_spared([compute_of(group)] * count, reads))
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
                if gathered != updating:  # in use from the first member's update to the last one's
                    uses += gathered
                    reads += [_compute_bytes(self._paged.groups[used.layout.space])] * len(gathered)
                updating = gathered
                uses.append(state)
                reads.append(0)
                continue
            resident_sub_groups = [sub for sub in used.resident_sub_groups if sub in made]
            updated = [sub for sub in used.members if sub in made]
            made -= {*resident_sub_groups, *updated}
            uses += [*map(state_of, resident_sub_groups), *map(state_of, updated), compute_of(used)]
            reads += [0] * (len(resident_sub_groups) + len(updated)) + [self._first_bytes(used, updated)]
        limits = self._units.limits(self._units.staying)
        return cycle_read_bytes(uses, [*self._not_spared(uses, reads)], next_step, *limits)

    def _first_bytes(self, group: PagedGroup, updated: Container[PagedSubGroup]) -> int:
        """What the first gather of a group in a step reads, for which an update makes those of `updated`. The read of one that
        stays is for updates, which take the old ones from there where these complete the masters."""
        if compute_of(group) not in self._staying:
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
