"""Whether the pinned budget holds what must be in it, and whether the machine does; what follows for the sub-groups.

The sum itself is in infinity/schedule/pinned.py, where the planner finds it too.
"""

from __future__ import annotations

import math

from infinity.aio import absent_bytes
from infinity.errors import BudgetError
from infinity.host_memory import available_bytes, ranks_here
from infinity.schedule.pinned import ACCESS_BYTES, GATHERS_IN_USE, GROUPS_HELD, PIPELINE_DEPTH, PinnedBudget
from infinity.store.layout import SPACE_ALIGN
from infinity.units import MIB, align_up, format_bytes

PINNED_BYTES_DEFAULT = 512 * MIB


def sub_group_numel_for(pinned_bytes: int, bytes_per_element: int) -> int:
    """The largest sub-group (elements, a multiple of SPACE_ALIGN) of which PIPELINE_DEPTH fit in `pinned_bytes`."""
    numel = (pinned_bytes - ACCESS_BYTES) // PIPELINE_DEPTH // bytes_per_element
    return max(0, numel) // SPACE_ALIGN * SPACE_ALIGN


def check_budget(pinned_bytes: int, need: PinnedBudget, largest_group: str, largest_group_bytes: int) -> None:
    """Raise BudgetError, with the number that would do, unless `pinned_bytes` holds `need`."""
    gathering = need.nbytes - max(need.gather_bytes, need.pipeline_bytes) + need.gather_bytes
    also = f" beside the {format_bytes(need.cache_bytes)} of host_cache_bytes" if need.cache_bytes else ""
    if need.activation_bytes:
        also += f" beside the {format_bytes(need.activation_bytes)} of offload_activations.buffer_bytes"
    if gathering > pinned_bytes:
        raise BudgetError(
            f"pinned_bytes_max of {format_bytes(pinned_bytes)} is too small for group {largest_group} of "
            f"{format_bytes(largest_group_bytes)}: {GROUPS_HELD} of it and {format_bytes(need.access_bytes)} must fit{also}, "
            f"so {gathering} bytes ({format_bytes(gathering)}) would do; wrapping smaller modules makes groups smaller"
        )
    if need.nbytes > pinned_bytes:
        sub_group_bytes = (need.pipeline_bytes - GATHERS_IN_USE * align_up(largest_group_bytes)) // PIPELINE_DEPTH
        raise BudgetError(
            f"pinned_bytes_max of {format_bytes(pinned_bytes)} is too small for {PIPELINE_DEPTH} "
            f"sub-groups of {format_bytes(sub_group_bytes)} and {GATHERS_IN_USE} groups{also}: {need.nbytes} bytes "
            f"({format_bytes(need.nbytes)}) would do, or a smaller sub_group_size"
        )


def check_available(pinned_bytes: int, memory_bytes: float) -> None:
    """Raise BudgetError where the pool would take more than this rank's share of the memory, `memory_of_rank`."""
    if pinned_bytes > memory_bytes:
        ranks = ranks_here()
        shared = f" to each of the {ranks} ranks on this machine" if ranks > 1 else ""
        raise BudgetError(
            f"a pinned pool of {format_bytes(pinned_bytes)} is more than the {format_bytes(memory_bytes)} of memory that are "
            f"available{shared}: lower pinned_bytes_max, raise the limit of the container or job if it has "
            "one, or wrap smaller modules where a group asks for that much"
        )


def memory_of_rank() -> float:
    """This rank's share of the memory that is available to the ranks of this machine (bytes); infinite where unknown.

    To be asked before any of them takes its part: later, a rank would count what others took and share the rest once more.
    """
    available = available_bytes()
    return math.inf if available is None else (available - absent_bytes()) / ranks_here()
