"""Floor 8. Which groups' leases are the memory of gathered parameters. Training thread only.

[Note: Lent, not copied]
In a model that is only run, on one rank where the host computes, parameters are computed with where they are staged: the lease
is the gathered parameter's memory until FSDP2 frees it ([Note: Gathering alone] in infinity/fsdp2/unsharded.py). That is one
lease in use for longer, so one group at a time is lent, and an expert in it: the budget of two in use holds. What stays
gathered (the root, as a rule) would keep others from being lent, and is copied.
"""

from __future__ import annotations

import torch

from infinity.fsdp2.sharding import in_backward, is_gathered_for_its_forward
from infinity.swap.group import PagedGroup
from infinity.swap.paged_model import PagedModel


class Lending:
    """Of one model. allowed: whether FSDP2 leaves it to us to give gathered parameters their elements."""

    def __init__(self, paged: PagedModel, *, allowed: bool) -> None:
        self._paged = paged
        self._allowed = allowed and not paged.stager.device.is_discrete
        self._block: PagedGroup | None = None
        self._expert: PagedGroup | None = None

    def __contains__(self, group: PagedGroup) -> bool:
        return group in (self._block, self._expert)

    def lend(self, group: PagedGroup) -> bool:
        """Whether a group that is being gathered may be lent now; then it is, until `end` or `take_back`."""
        if not self._allowed or torch.is_grad_enabled() or in_backward():
            return False
        module = group.module() if group.module is not None else None
        if not group.in_use or not group.is_frozen or module is None or not is_gathered_for_its_forward(module):
            return False
        if group.is_routed:
            self._expert = self._expert or group
        else:
            self._block = self._block or group
        return group in self

    def end(self, group: PagedGroup) -> None:
        """FSDP2 has no use any more for what a group was given, lent or not."""
        if group is self._block:
            self._block = None
        elif group is self._expert:
            self._expert = None

    def take_back(self) -> None:
        """Nothing that is gathered is in a lease after this, which may change then."""
        lent, self._block, self._expert = (self._block, self._expert), None, None
        for index in (index for group in lent if group is not None for index in group.shards):
            if (memory := self._paged.shards[index].unsharded) is not None:
                memory.take_back()
