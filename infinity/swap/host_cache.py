"""Floor 8. What of a model stays in pinned memory from step to step: from its layout to the planner's terms and back.

Owns nothing and moves nothing; the planner is infinity/schedule/residency.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.schedule.residency import Candidate, choose_resident
from infinity.schedule.scheme import Scheme
from infinity.store.layout import SPACE_ALIGN, Cached, Field, Layout, SubGroup
from infinity.units import PAGE_BYTES

_PAGES_ROUNDED_UP = 3
"""In a sub-group with coded moments, two of codes and one of scales may be filled in part."""


@dataclass(frozen=True)
class _Part:
    """The trained or the frozen part of a flat space. `like`: one of its sub-groups, all of which have the same fields."""

    key: tuple[int, bool]
    numel: int
    like: SubGroup


def plan_cache(
    layout: Layout, scheme: Scheme, gathers: Sequence[int], cache_bytes: int
) -> dict[tuple[int, bool], Cached]:
    """What stays of each part of each flat space in at most `cache_bytes`: what `plan_layout` takes as `cached`.

    Args:
        layout: of the model with nothing cached.
        scheme: when groups are updated, and whether their masters are split where they can be.
        gathers: by group, how often each micro-batch gathers it. Groups that come first are kept first: what is used at the
            end of forward and the beginning of backward may stay staged in between.
    """
    parts = _parts(layout)
    candidates: list[Candidate] = []
    owners: list[tuple[tuple[int, bool], bool]] = []
    for part in parts:
        resident = part.key[0] == layout.resident_space
        for gathered, fields in _sets_of_fields(part.like, resident):
            unit_bytes = sum(part.like.field_numel(f, SPACE_ALIGN) * part.like.itemsize(f) for f in fields)
            stepped = part.like.trained
            reads = _compute_reads(part.like, scheme, gathers[part.key[0]]) if gathered else int(stepped)
            candidates.append(Candidate(part.numel // SPACE_ALIGN, unit_bytes, reads, int(stepped)))
            owners.append((part.key, gathered))
    if coded := sum(sub.coded for sub in layout.sub_groups):  # and those that are cut where what stays of a part ends
        cache_bytes -= _PAGES_ROUNDED_UP * PAGE_BYTES * (coded + 2 * len(parts))
    resident_units = dict(zip(owners, choose_resident(candidates, max(0, cache_bytes)), strict=True))
    cached = {}
    for part in parts:
        state = resident_units.get((part.key, False), 0) * SPACE_ALIGN
        whole = part.key[0] == layout.resident_space
        cached[part.key] = Cached(state if whole else resident_units.get((part.key, True), 0) * SPACE_ALIGN, state)
    return cached


def _compute_reads(sub: SubGroup, scheme: Scheme, gathers: int) -> int:
    """How often a step reads what is gathered of it, if that doesn't stay."""
    if not sub.trained:
        return gathers
    scheme_of_sub = Scheme("split" if sub.split else "full", scheme.update)
    return gathers if sub.held else scheme_of_sub.compute_reads(gathers, sub.itemsize(sub.gathered))


def _parts(layout: Layout) -> list[_Part]:
    parts = []
    for space, cuts in enumerate(layout.by_space):
        for trained in (True, False):
            members = [sub for sub in cuts if sub.trained is trained and not sub.whole]
            if members:
                parts.append(_Part((space, trained), sum(sub.numel for sub in members), members[0]))
    return parts


def _sets_of_fields(sub: SubGroup, resident: bool) -> list[tuple[bool, tuple[Field, ...]]]:
    """The fields that stay or go together: (whether it is the one that is gathered, fields)."""
    gathered = () if resident else tuple(field for field in sub.on_nvme if field is sub.gathered)
    state = tuple(field for field in sub.on_nvme if field not in gathered)
    return [(is_gathered, fields) for is_gathered, fields in ((True, gathered), (False, state)) if fields]
