"""What of a model stays in pinned memory from step to step: from its layout to the planner's terms and back.

Owns nothing and moves nothing; the planner is infinity/schedule/residency.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.schedule.residency import Candidate, choose_resident
from infinity.schedule.scheme import Scheme
from infinity.store.layout import SPACE_ALIGN, Cached, Field, Layout, PartKey, SubGroup
from infinity.units import PAGE_BYTES, align_up

_PAGES_ROUNDED_UP = 3
"""In a sub-group with coded moments, two of codes and one of scales may be filled in part."""


@dataclass(frozen=True)
class _Part:
    """One part of a flat space. `like`: one of its sub-groups, all of which have the same fields. `ends`: where whole matrices
    end (elements from the part's start, ascending); empty where what stays may end anywhere."""

    key: PartKey
    numel: int
    like: SubGroup
    ends: tuple[int, ...]

    def stays(self, units: int) -> int:
        """How many elements stay where there is room for so many units."""
        numel = units * SPACE_ALIGN
        if not self.key.whole:
            return numel
        return (0, *self.ends)[bisect_right(self.ends, numel)]


def plan_cache(layout: Layout, scheme: Scheme, gathers: Sequence[int], cache_bytes: int) -> dict[PartKey, Cached]:
    """What stays of each part of each flat space in at most `cache_bytes`: what `plan_layout` takes as `cached`.

    Args:
        layout: of the model with nothing cached.
        scheme: when groups are updated, and whether their masters are split where they can be.
        gathers: by group, how often each micro-batch gathers it. Groups that come first are kept first: what is used at the
            end of forward and the beginning of backward may stay staged in between.
    """
    parts = _parts(layout)
    candidates: list[Candidate] = []
    owners: list[tuple[PartKey, bool]] = []
    for part in parts:
        resident = part.key.space == layout.resident_space
        for gathered, fields in _sets_of_fields(part.like, resident):
            unit_bytes = sum(part.like.field_numel(f, SPACE_ALIGN) * part.like.itemsize(f) for f in fields)
            stepped = part.like.trained
            reads = _compute_reads(part.like, scheme, gathers[part.key.space]) if gathered else int(stepped)
            candidates.append(Candidate(part.numel // SPACE_ALIGN, unit_bytes, reads, int(stepped)))
            owners.append((part.key, gathered))
    if coded := sum(sub.coded for sub in layout.sub_groups):  # and those that are cut where what stays of a part ends
        cache_bytes -= _PAGES_ROUNDED_UP * PAGE_BYTES * (coded + 2 * len(parts))
    resident_units = dict(zip(owners, choose_resident(candidates, max(0, cache_bytes)), strict=True))
    cached = {}
    for part in parts:
        state = part.stays(resident_units.get((part.key, False), 0))
        resident = part.key.space == layout.resident_space
        cached[part.key] = Cached(state if resident else part.stays(resident_units.get((part.key, True), 0)), state)
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
        for key in dict.fromkeys(PartKey(space, sub.trained, sub.whole) for sub in cuts):
            members = [sub for sub in cuts if (sub.trained, sub.whole) == (key.trained, key.whole)]
            ends = tuple(
                align_up(sub.start + piece.offset + piece.numel, SPACE_ALIGN) - members[0].start
                for sub in members
                for piece in sub.pieces
                if key.whole
            )
            parts.append(_Part(key, sum(sub.numel for sub in members), members[0], ends))
    return parts


def _sets_of_fields(sub: SubGroup, resident: bool) -> list[tuple[bool, tuple[Field, ...]]]:
    """The fields that stay or go together: (whether it is the one that is gathered, fields)."""
    gathered = () if resident else tuple(field for field in sub.on_nvme if field is sub.gathered)
    state = tuple(field for field in sub.on_nvme if field not in gathered)
    return [(is_gathered, fields) for is_gathered, fields in ((True, gathered), (False, state)) if fields]
