"""Floor 4. The pinned budget as one visible sum, a line per user, and what follows from it for the sub-groups.

The gathers of forward and backward and the optimizer's pipeline take turns, so the pool must hold the larger of the two,
and beside either the buffer through which single tensors are read and written, and what stays from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.errors import BudgetError
from infinity.store.layout import SPACE_ALIGN
from infinity.units import MIB, align_up, format_bytes

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

PINNED_BYTES_DEFAULT = 512 * MIB


@dataclass(frozen=True)
class PinnedBudget:
    """What the pool holds (bytes): the larger of `gather_bytes` and `pipeline_bytes`, `access_bytes` and `cache_bytes`."""

    gather_bytes: int
    pipeline_bytes: int
    access_bytes: int = ACCESS_BYTES
    cache_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """The sum."""
        return max(self.gather_bytes, self.pipeline_bytes) + self.access_bytes + self.cache_bytes


def gather_bytes(group_bytes_max: int) -> int:
    """Bytes that gathering needs when the largest group has `group_bytes_max`."""
    return GROUPS_HELD * align_up(group_bytes_max)


def comfortable_bytes(gather: int, sub_group_bytes: int) -> int:
    """A pool for full speed: look-ahead of as much again as gathering needs at least, and one sub-group more in flight."""
    gather_room = gather + gather // GROUPS_HELD * GATHERS_IN_USE
    return align_up(max(gather_room, (PIPELINE_DEPTH + 1) * sub_group_bytes) + ACCESS_BYTES, MIB)


def sub_group_numel_for(pinned_bytes: int, bytes_per_element: int) -> int:
    """The largest sub-group (elements, a multiple of SPACE_ALIGN) of which PIPELINE_DEPTH fit in `pinned_bytes`."""
    numel = (pinned_bytes - ACCESS_BYTES) // PIPELINE_DEPTH // bytes_per_element
    return max(0, numel) // SPACE_ALIGN * SPACE_ALIGN


def check_budget(pinned_bytes: int, need: PinnedBudget, largest_group: str, largest_group_bytes: int) -> None:
    """Raise BudgetError, with the number that would do, unless `pinned_bytes` holds `need`."""
    gathering = need.nbytes - max(need.gather_bytes, need.pipeline_bytes) + need.gather_bytes
    beside = f" beside the {format_bytes(need.cache_bytes)} of host_cache_bytes" if need.cache_bytes else ""
    if gathering > pinned_bytes:
        raise BudgetError(
            f"pinned_bytes_max (host_bytes_max) of {format_bytes(pinned_bytes)} is too small for group {largest_group} of "
            f"{format_bytes(largest_group_bytes)}: {GROUPS_HELD} of it and {format_bytes(need.access_bytes)} must fit{beside}, "
            f"so {gathering} bytes ({format_bytes(gathering)}) would do; wrapping smaller modules makes groups smaller"
        )
    if need.nbytes > pinned_bytes:
        raise BudgetError(
            f"pinned_bytes_max (host_bytes_max) of {format_bytes(pinned_bytes)} is too small for {PIPELINE_DEPTH} "
            f"sub-groups of {format_bytes(need.pipeline_bytes // PIPELINE_DEPTH)}{beside}: {need.nbytes} bytes "
            f"({format_bytes(need.nbytes)}) would do, or a smaller sub_group_size"
        )


def check_available(pinned_bytes: int) -> None:
    """Raise BudgetError where the machine has less memory available than the pool would take."""
    available = _available_bytes()
    if available is not None and pinned_bytes > available:
        raise BudgetError(
            f"a pinned pool of {format_bytes(pinned_bytes)} is more than the {format_bytes(available)} of memory that are "
            "available: lower pinned_bytes_max (host_bytes_max), or wrap smaller modules where a group asks for that much"
        )


def _available_bytes() -> int | None:
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
