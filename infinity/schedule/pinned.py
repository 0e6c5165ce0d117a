"""The pinned budget as one visible sum, a line per user: what the pool of a rank must hold at once.

A group is gathered, or updated before that: the pool must hold what the larger of the two needs at once. It also holds the
buffer through which single tensors are read and written, and the host cache.

[Note: Why the worst case fits]
Leases lie anywhere in the slab. k leases in use leave k + 1 holes, so with room for k + 1 times the bytes asked for the largest
hole holds them. Everything else in the pool (staged and not used yet, or being written) is dropped or waited for. So whoever
asks for a lease gets it, whatever else there is:

    in use                asked for                    least pool
    2 groups of G         a group                      2 G + 3 G
    2 groups of G         a sub-group of S             2 G + 3 S      one of the two is being updated
    -                     one S after another          3 S            an optimizer step of its own

A group is leased before the first of its sub-groups, when no other sub-group is in use: no group is asked for beside one.

[Note: What waits for its gradients]
A group that is updated in the backward has its compute parameters and all of its state in the pool before its gradients are
computed, and then needs all of it at once. A drive that never idles meanwhile needs as much room again, to read for the next
group and to write for the one before. With less, the drive idles while compute goes on, and then compute while the drive reads;
at worst the shorter of the two times is lost. This is for speed alone, so it leaves most of the memory to others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.units import MIB, align_up

ACCESS_BYTES = 4 * MIB
"""The buffer through which single tensors are read and written (state_dict, initialisation), with the pages at its ends."""

GATHERS_IN_USE = 2
"""Groups in use at once: the one that FSDP2 copies now and the one it copied before; see [Note: When a group has been copied]
in infinity/swap/parameter_lap.py."""

GROUPS_HELD = 2 * GATHERS_IN_USE + 1
"""Room in groups: GATHERS_IN_USE leases, anywhere in the slab, leave GATHERS_IN_USE + 1 holes; with room for this many
groups the largest hole holds the next group."""

PIPELINE_DEPTH = 3
"""Sub-groups in memory during the step: one being read, one updated, one written."""

MEMORY_SHARE = 1 / 4
"""The share of a rank's memory up to which the pool may grow for what it could do without."""

SUB_GROUP_NUMEL_DEFAULT = 4 << 20
"""Elements: 56 MiB of state with 16-bit compute parameters, long past the size where a drive is at its limit."""

SUB_GROUP_NUMEL_IN_MEMORY = 64 << 20
"""Elements, if host memory holds all of the state: nothing is read ahead, and each sub-group costs some Python."""


@dataclass(frozen=True)
class PinnedBudget:
    """The pool (bytes): the larger of `gather_bytes` and `pipeline_bytes`, the access buffer, the host cache, and the buffer of
    saved activations on their way to NVMe and back."""

    gather_bytes: int
    pipeline_bytes: int
    access_bytes: int = ACCESS_BYTES
    cache_bytes: int = 0
    activation_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """The sum."""
        return (
            max(self.gather_bytes, self.pipeline_bytes) + self.access_bytes + self.cache_bytes + self.activation_bytes
        )


def gather_bytes(group_bytes_max: int) -> int:
    """Bytes that gathering needs when the largest group has `group_bytes_max`."""
    return GROUPS_HELD * align_up(group_bytes_max)


def whole_bytes(group_bytes: Sequence[int]) -> int:
    """Bytes that a pool needs to hold all groups of a model at once, by their bytes, and to gather one of them all the same."""
    return sum(map(align_up, group_bytes)) + gather_bytes(max(group_bytes, default=0)) + ACCESS_BYTES


def pipeline_bytes(group_bytes_max: int, sub_group_bytes: int) -> int:
    """Bytes that updating needs: the groups in use, between which the next one is updated, and the sub-groups of the pipeline.
    (One of these is in use; the leases in use leave holes, of which the largest holds the next one.)"""
    return GATHERS_IN_USE * align_up(group_bytes_max) + PIPELINE_DEPTH * sub_group_bytes


def comfortable_bytes(
    gather: int,
    sub_group_bytes: int,
    waiting_bytes: int = 0,
    memory_bytes: float = math.inf,
    gradient_bytes: int = 0,
    staying_bytes: int = 0,
) -> int:
    """A pool for full speed: look-ahead of as much again as gathering needs at least, and one sub-group more in flight.

    As far as the pool and the gradients that wait all the same (`gradient_bytes`) are within MEMORY_SHARE of `memory_bytes`,
    it has room for more: where groups are updated in the backward, for `waiting_bytes`, the compute parameters and the state of
    the two largest of them ([Note: What waits for its gradients]); then for `staying_bytes`, the compute parameters that may
    stay from step to step ([Note: Staying staged] in residency.py).
    """
    group_bytes_max = gather // GROUPS_HELD
    gather_room = gather + GATHERS_IN_USE * group_bytes_max
    pipeline = pipeline_bytes(group_bytes_max, sub_group_bytes) + sub_group_bytes
    waiting = GATHERS_IN_USE * group_bytes_max + waiting_bytes
    least = align_up(max(gather_room, pipeline) + ACCESS_BYTES, MIB)
    roomy = max(least, align_up(waiting + ACCESS_BYTES, MIB)) + align_up(staying_bytes, MIB)
    return max(least, int(min(roomy, MEMORY_SHARE * memory_bytes - gradient_bytes)) // MIB * MIB)


def look_ahead_room(pinned_bytes: int, group_bytes_max: int) -> int:
    """Bytes of the pool that may hold groups read ahead: all but the groups in use and the access buffer."""
    return max(0, pinned_bytes - ACCESS_BYTES - GATHERS_IN_USE * group_bytes_max)


def sub_groups_ahead(pinned_bytes: int, sub_group_bytes: int) -> int:
    """How many sub-groups the step reads ahead, so that as many can still be on their way back."""
    return max(1, (pinned_bytes // max(1, sub_group_bytes) - 1) // 2)
