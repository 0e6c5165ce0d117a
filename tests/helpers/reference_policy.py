"""The groups to stage, as the notes of infinity/swap/policy.py define them, computed from scratch from all coming uses."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import chain, takewhile

import pytest
from chosen_anew import groups_to_stage

from infinity.swap.group import PagedGroup
from infinity.swap.policy import StagingPolicy
from infinity.swap.stager import Chunk
from infinity.swap.staging_units import Unit
from infinity.swap.sub_group import PagedSubGroup


def wanted_anew(policy: StagingPolicy, using: PagedGroup | None) -> list[Chunk]:
    """The chunks that should be staged now, soonest needed first."""
    units = policy.units
    steady = policy._phase or policy._paged.updates.waiting
    stay = units.staying if steady else units.stay_in(policy._traces[False].cycle)
    held = dict.fromkeys([*stay, *(group.unit for group in stay)], 0)
    room = units.room_bytes - sum(units.nbytes[group] for group in stay)
    fitting = groups_to_stage(_upcoming(policy, using), units.nbytes | held, room)
    chosen = groups_to_stage(fitting, units.gathered_bytes | held, min(room, units.look_ahead_bytes))
    return [unit for unit in chosen if isinstance(unit, Chunk)]


def _upcoming(policy: StagingPolicy, using: PagedGroup | None) -> Iterator[Unit]:
    updates = policy._paged.updates
    if using is not None:
        yield from (sub.unit for sub in updates.of(using))
        yield using.unit
    else:
        yield from (group.unit for group in policy._updated_from_compute)
    for used in policy._traces[policy._phase].upcoming(into_next=not policy._phase):
        if isinstance(used, PagedSubGroup):
            yield from policy.units.with_compute(used)
        else:
            yield from _units_of(used, updates.waiting, used.unit)
    yield from (sub.unit for sub in updates.waiting)
    yield from _next_step(policy)


def _next_step(policy: StagingPolicy) -> Iterator[Unit]:
    if not policy._phase:
        return
    in_backward = policy._in_backward if policy._paged.updates.speculation.is_due else ()
    stepped = dict.fromkeys(sub for sub in policy._paged.updates.stepped if sub not in in_backward)
    groups = [unit for unit in policy._traces[True].cycle if isinstance(unit, PagedGroup)]
    units: Iterable[Unit]
    if not policy._updates_wait:
        frozen = takewhile(lambda group: group.is_frozen, groups)
        units = chain((sub.unit for sub in stepped), (group.unit for group in frozen))
    else:
        compute = [group.unit if group.is_frozen else group for group in groups]
        units = chain.from_iterable(
            _units_of(group, stepped, unit) for group, unit in zip(groups, compute, strict=True)
        )
    yield from takewhile(lambda unit: unit not in policy._spilled, units)


def _units_of(group: PagedGroup, updated: Container[PagedSubGroup], compute: Unit) -> Iterator[Unit]:
    yield from (sub.unit for sub in group.resident_sub_groups if sub in updated)
    yield compute
    yield from (sub.unit for sub in group.members if sub in updated)


def check_policy(patch: pytest.MonkeyPatch) -> None:
    """From now on every policy is compared with this one."""
    look_ahead = StagingPolicy.look_ahead

    def checked(policy: StagingPolicy, using: PagedGroup | None = None) -> None:
        expected = wanted_anew(policy, using)
        look_ahead(policy, using)
        assert [unit for unit in policy._readahead.following if isinstance(unit, Chunk)] == expected

    patch.setattr(StagingPolicy, "look_ahead", checked)
