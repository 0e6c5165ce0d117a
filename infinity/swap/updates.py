"""Floor 8. All updates that wait, one after another, as a pipeline through the pinned pool, three or more deep.

Sub-group k+1 is being read while k is updated and k-1 is being written; the pool is the only bound.
"""

from __future__ import annotations

from operator import itemgetter

from infinity.swap.paged_model import PagedModel
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup
from infinity.swap.wanted import Wanted


def finish_updates(paged: PagedModel, stager: Stager, sub_groups_ahead: int) -> None:
    """Run every update that is left, reading `sub_groups_ahead` sub-groups ahead; the last writes go on in the background.

    Raises IoError when a transfer failed: where that was a read, the updates that were not run still wait.
    """
    waiting = list(paged.updates)
    groups = [group for group in paged.groups if paged.updates.of(group)]
    for group in groups:
        group.forget(stager)
    try:
        _run(paged, stager, waiting, sub_groups_ahead)
    finally:
        for group in groups:
            paged.updates.point(group)


def _run(paged: PagedModel, stager: Stager, waiting: list[PagedSubGroup], sub_groups_ahead: int) -> None:
    wanted, ahead = Wanted.of([sub.chunk for sub in waiting if sub.moves], at_once=1 + sub_groups_ahead)
    done = 0
    for sub in _in_turn([sub for sub in waiting if sub.moves], [sub for sub in waiting if not sub.moves]):
        ahead.pass_to(done)
        ahead.fit()
        stager.want(wanted)
        done += sub.moves
        paged.updates.run(sub)


def _in_turn(moving: list[PagedSubGroup], staying: list[PagedSubGroup]) -> list[PagedSubGroup]:
    """All of them, those that stay in memory spread evenly: the drive reads and writes while they are updated."""
    placed = [((2 * k + 1) * len(staying), sub) for k, sub in enumerate(moving)]
    placed += [((2 * k + 1) * len(moving), sub) for k, sub in enumerate(staying)]
    return [sub for _, sub in sorted(placed, key=itemgetter(0))]
