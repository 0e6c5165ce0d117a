"""Floor 3. The pinned budget as one visible sum, a line per user: what the pool of a rank must hold at once.

Where the optimizer has a phase of its own, the gathers of forward and backward and its pipeline take turns, and the pool must
hold the larger of the two. Where groups are updated in the passes, groups and sub-groups are in it together. Beside either
come the buffer through which single tensors are read and written, and what stays from step to step.

[Note: Why the worst case fits]
Leases lie anywhere in the slab: k of them leave k + 1 holes, and when what is left is k + 1 times what is asked for, the
largest hole holds it. Everything else in the pool (what is staged and not used yet, what is on its way back) is dropped or
waited for. So whoever asks gets it, whatever is in use at that time:

    in use                      asked for      least pool
    2 groups (G)                a group        2 G + 3 G
    1 sub-group (S)             a sub-group    S + 2 S
    2 groups                    a sub-group    2 G + 3 S       in the passes only
    a group and a sub-group     a group        G + S + 3 G     in the passes only
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.units import MIB, align_up

ACCESS_BYTES = 4 * MIB
"""The buffer through which single tensors are read and written (state_dict, initialisation), with the pages at its ends."""

GATHERS_IN_USE = 2
"""Groups in use at once: the one that FSDP2 copies now and the one it copied before; see [Note: When a group has been copied]
in infinity/swap/manager.py."""

GROUPS_HELD = 2 * GATHERS_IN_USE + 1
"""Room in groups: GATHERS_IN_USE leases, anywhere in the slab, leave GATHERS_IN_USE + 1 holes; with room for this many
groups the largest hole holds the next group."""

PIPELINE_DEPTH = 3
"""Sub-groups in memory during the step: one being read, one updated, one written."""

SUB_GROUP_NUMEL_DEFAULT = 4 << 20
"""Elements: 56 MiB of state with a 16-bit copy, long past the size where a drive is at its limit."""


@dataclass(frozen=True)
class PinnedBudget:
    """What the pool holds (bytes): the largest of `gather_bytes`, `pipeline_bytes` and `together_bytes`, which is 0 where
    updates have a phase of their own; `access_bytes`; and `cache_bytes`. See [Note: Why the worst case fits]."""

    gather_bytes: int
    pipeline_bytes: int
    access_bytes: int = ACCESS_BYTES
    cache_bytes: int = 0
    together_bytes: int = 0

    @property
    def moving_bytes(self) -> int:
        """Of what comes and goes."""
        return max(self.gather_bytes, self.pipeline_bytes, self.together_bytes)

    @property
    def nbytes(self) -> int:
        """The sum."""
        return self.moving_bytes + self.access_bytes + self.cache_bytes


def gather_bytes(group_bytes_max: int) -> int:
    """Bytes that gathering needs when the largest group has `group_bytes_max`."""
    return GROUPS_HELD * align_up(group_bytes_max)


def together_bytes(group_bytes_max: int, sub_group_bytes: int) -> int:
    """Bytes that gathers and updates need which go on in the same pass."""
    group, sub_group = align_up(group_bytes_max), align_up(sub_group_bytes)
    group_asked_for = group + sub_group + 3 * group
    sub_group_asked_for = GATHERS_IN_USE * group + (GATHERS_IN_USE + 1) * sub_group
    return max(group_asked_for, sub_group_asked_for)


def comfortable_bytes(gather: int, sub_group_bytes: int, *, together: bool = False) -> int:
    """A pool for full speed: look-ahead of as much again as gathering needs at least, and one sub-group more in flight.

    `together`: for updates in the passes, which need both at once.
    """
    gather_room = gather + gather // GROUPS_HELD * GATHERS_IN_USE
    pipeline_room = (PIPELINE_DEPTH + 1) * sub_group_bytes
    room = gather_room + pipeline_room if together else max(gather_room, pipeline_room)
    return align_up(room + ACCESS_BYTES, MIB)


def look_ahead_room(pinned_bytes: int, group_bytes_max: int, sub_group_bytes: int = 0) -> int:
    """Bytes of the pool that may hold what is read ahead: what the groups in use and the access buffer leave.

    With `sub_group_bytes`, for updates in the passes: half of what the sub-group in use leaves too, so that as much can still
    be on its way back.
    """
    room = max(0, pinned_bytes - ACCESS_BYTES - GATHERS_IN_USE * group_bytes_max - sub_group_bytes)
    return room // 2 if sub_group_bytes else room


def sub_groups_ahead(pinned_bytes: int, sub_group_bytes: int) -> int:
    """How many sub-groups the step reads ahead, so that as many can still be on their way back."""
    return max(1, (pinned_bytes // max(1, sub_group_bytes) - 1) // 2)
