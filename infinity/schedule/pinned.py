"""The pinned budget as one sum, a line per user: the bytes that a rank's pool must hold at once.

A group is gathered, or updated before that; the pool must hold the larger of the two needs. It also holds the buffer
through which single tensors are read and written, and the host cache.

[Note: Why the worst case fits]
Leases lie anywhere in the slab. k leases in use leave k + 1 holes, so with room for k + 1 times the requested bytes the
largest hole holds the request. Everything else in the pool (staged and unused, or being written) is dropped or waited
for. So every request for a lease succeeds, with any other contents of the pool:

    in use                request                      least pool
    -                     a group of G                 G
    a group of G          a read of the next           G + 2 G
    a group of G          a sub-group of S             G + 2 S        the group is being updated
    -                     one S after another          3 S            an optimizer step of its own

A group is leased before its first sub-group, while nothing else is in use: FSDP2 gathers one group after the other.

[Note: What waits for its gradients]
A group that is updated in the backward has its compute parameters and all of its state in the pool before its gradients
are computed. Then it needs all of it at once. To keep the drive busy meanwhile takes as much room again, to read for
the next group and to write for the previous one. With less, the drive idles during compute and then compute waits for
the drive; at worst the shorter of the two times is lost. This only affects speed, so most memory is left to others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.units import MIB, align_up

ACCESS_BYTES = 4 * MIB
"""The buffer through which single tensors are read and written (state_dict, initialisation), with partial pages."""

GROUPS_HELD = 3
"""Room in groups: the lease of the group that FSDP2 copies, anywhere in the slab, leaves two holes. With room for three
groups the larger hole holds the next group, which is read meanwhile."""

GROUPS_AHEAD = 4
"""Groups that a comfortable pool reads further ahead."""

PIPELINE_DEPTH = 3
"""Sub-groups in memory during the step: one being read, one updated, one written."""

MEMORY_SHARE = 1 / 4
"""The share of a rank's memory up to which the pool grows beyond its needs."""

SUB_GROUP_NUMEL_DEFAULT = 4 << 20
"""Elements: 56 MiB of state with 16-bit compute parameters, far beyond the size at which a drive reaches its limit."""

SUB_GROUP_NUMEL_IN_MEMORY = 64 << 20
"""Elements, if host memory holds all of the state: nothing is read ahead, and each sub-group costs Python time."""


@dataclass(frozen=True)
class PinnedBudget:
    """The pool (bytes): the larger of `gather_bytes` and `pipeline_bytes`, the access buffer, the host cache, and the
    buffer of saved activations."""

    gather_bytes: int
    pipeline_bytes: int
    access_bytes: int = ACCESS_BYTES
    cache_bytes: int = 0
    activation_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return (
            max(self.gather_bytes, self.pipeline_bytes) + self.access_bytes + self.cache_bytes + self.activation_bytes
        )


def gather_bytes(group_bytes_max: int) -> int:
    """Return the bytes that gathering needs if the largest group has `group_bytes_max`."""
    return GROUPS_HELD * align_up(group_bytes_max)


def whole_bytes(group_bytes: Sequence[int]) -> int:
    """Return the bytes of a pool that holds all groups of a model at once, and can still gather one."""
    return sum(map(align_up, group_bytes)) + gather_bytes(max(group_bytes, default=0)) + ACCESS_BYTES


def pipeline_bytes(group_bytes_max: int, sub_group_bytes: int) -> int:
    """Return the bytes that updating needs: the group that is being updated, and the pipeline's sub-groups."""
    return align_up(group_bytes_max) + PIPELINE_DEPTH * sub_group_bytes


def comfortable_bytes(
    gather: int,
    sub_group_bytes: int,
    waiting_bytes: int = 0,
    memory_bytes: float = math.inf,
    gradient_bytes: int = 0,
    staying_bytes: int = 0,
) -> int:
    """Return the bytes of a pool for full speed: GROUPS_AHEAD, and one sub-group more in flight.

    While the pool and the gradients that wait anyway (`gradient_bytes`) are within MEMORY_SHARE of `memory_bytes`, it
    has room for more. First for `waiting_bytes`, the compute parameters and state of the two largest groups updated in
    the backward ([Note: What waits for its gradients]); then for `staying_bytes`, compute parameters that may stay
    ([Note: Staying staged] in residency.py).
    """
    group_bytes_max = gather // GROUPS_HELD
    gather_room = gather + GROUPS_AHEAD * group_bytes_max
    pipeline = pipeline_bytes(group_bytes_max, sub_group_bytes) + sub_group_bytes
    waiting = 2 * group_bytes_max + waiting_bytes  # the group that is gathered meanwhile, and the next
    least = align_up(max(gather_room, pipeline) + ACCESS_BYTES, MIB)
    roomy = max(least, align_up(waiting + ACCESS_BYTES, MIB)) + align_up(staying_bytes, MIB)
    return max(least, int(min(roomy, MEMORY_SHARE * memory_bytes - gradient_bytes)) // MIB * MIB)


def look_ahead_room(pinned_bytes: int, group_bytes_max: int) -> int:
    """Return the bytes of the pool for groups read ahead: all but the group in use and the access buffer."""
    return max(0, pinned_bytes - ACCESS_BYTES - group_bytes_max)


def sub_groups_ahead(pinned_bytes: int, sub_group_bytes: int) -> int:
    """Return how many sub-groups the step reads ahead, with room for as many that are being written."""
    return max(1, (pinned_bytes // max(1, sub_group_bytes) - 1) // 2)
