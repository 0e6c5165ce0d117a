"""What should be staged, as the notes of infinity/swap/policy.py define it: chosen anew each time, from all that comes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import chain, takewhile
from typing import Any

import pytest
from chosen_anew import groups_to_stage

from infinity.swap.chunk import Chunk
from infinity.swap.group import PagedGroup
from infinity.swap.policy import StagingPolicy
from infinity.swap.sub_group import PagedSubGroup


def wanted_anew(policy: StagingPolicy, using: PagedGroup | None) -> list[Chunk]:
    """The chunks that should be staged now, soonest needed first."""
    steady = policy._phase or policy._paged.updates
    stay = policy.units.staying if steady else policy.units.stay_in(policy._traces[False].cycle)
    staying_bytes = sum(policy.units.nbytes[unit] for unit in stay)
    held = stay.union(policy.units.room_for(policy._paged.groups[unit]) for unit in stay)
    unit_bytes = [0 if unit in held else nbytes for unit, nbytes in enumerate(policy.units.nbytes)]
    gathered_bytes = [0 if unit in held else nbytes for unit, nbytes in enumerate(policy.units.gathered_bytes)]
    room = policy.units.room_bytes - staying_bytes
    fitting = groups_to_stage(_upcoming(policy, using), unit_bytes, room)
    chosen = groups_to_stage(fitting, gathered_bytes, min(room, policy.units.look_ahead_bytes))
    return [chunk for unit in chosen if (chunk := policy.units.chunks[unit]) is not None]


def _upcoming(policy: StagingPolicy, using: PagedGroup | None) -> Iterator[int]:
    paged = policy._paged
    groups = paged.groups
    if using is not None:
        yield from map(policy.units.of, paged.updates.of(using))
        yield using.index
    for index in policy._traces[policy._phase].upcoming(into_next=not policy._phase):
        if index >= len(groups):
            yield from policy.units.with_compute(index)
            continue
        yield from _units_of(policy, groups[index], paged.updates, index)
    yield from map(policy.units.of, paged.updates)
    yield from _next_step(policy)


def _next_step(policy: StagingPolicy) -> Iterator[int]:
    if not policy._phase:
        return
    in_backward = policy._in_backward if policy._paged.updates.speculation.is_due else ()
    stepped = dict.fromkeys(sub for sub in policy._paged.updates.stepped if sub not in in_backward)
    all_groups = policy._paged.groups
    groups = [all_groups[index] for index in policy._traces[True].cycle if index < len(all_groups)]
    units: Iterable[int]
    if not policy._updates_wait:
        frozen = takewhile(lambda group: group.is_frozen, groups)
        units = chain(map(policy.units.of, stepped), (group.index for group in frozen))
    else:
        compute = [group.index if group.is_frozen else policy.units.room_for(group) for group in groups]
        units = chain.from_iterable(
            _units_of(policy, group, stepped, unit) for group, unit in zip(groups, compute, strict=True)
        )
    yield from takewhile(lambda unit: unit not in policy._spilled, units)


def _units_of(
    policy: StagingPolicy, group: PagedGroup, updated: Container[PagedSubGroup], copies: int
) -> Iterator[int]:
    yield from (policy.units.of(sub) for sub in group.resident_sub_groups if sub in updated)
    yield copies
    yield from (policy.units.of(sub) for sub in group.members if sub in updated)


def check_policy(patch: pytest.MonkeyPatch) -> None:
    """From now on every policy is held against this."""
    wanted = StagingPolicy.wanted

    def checked(policy: StagingPolicy, using: PagedGroup | None = None) -> Any:
        expected = wanted_anew(policy, using)
        following = wanted(policy, using)
        assert list(following) == expected
        return following

    patch.setattr(StagingPolicy, "wanted", checked)
