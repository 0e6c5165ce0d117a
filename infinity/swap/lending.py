"""Which groups' leases are the memory of gathered parameters. Training thread only.

[Note: Lent, not copied]
In a model that is only run, on one rank where the host computes, parameters are computed with where they are staged: the lease
is the gathered parameter's memory until FSDP2 frees it ([Note: Gathering alone] in infinity/fsdp2/unsharded.py). That is one
lease in use for longer, so one group at a time is lent, and an expert in it: the budget of two in use holds. What stays
gathered (the root, as a rule) would keep others from being lent, and is copied.

[Note: Lent for good]
Where the pool holds the whole model, nothing has to leave, and gathering takes longer than it is worth: a tenth of a token's
time. So there each group but experts is lent until somebody needs it freed, and FSDP2 is told not to free it after its forward.
It is freed before a forward with gradients, whose autograd would keep views of the lease. The first gather of a parameter
makes it, and copies.
"""

from __future__ import annotations

import torch

from infinity.fsdp2.sharding import in_backward, is_in_forward, is_running, resharding_after_forward
from infinity.fsdp2.unsharded import UnshardedMemory
from infinity.swap.group import PagedGroup
from infinity.swap.paged_model import PagedModel


class Lending:
    """Of one model. allowed: whether FSDP2 leaves it to us to give gathered parameters their elements. holds_all: whether the
    pool has room for all leases of the model at once."""

    def __init__(self, paged: PagedModel, *, allowed: bool, holds_all: bool) -> None:
        self._paged = paged
        self._allowed = allowed and not paged.stager.device.is_discrete
        self.for_good = self._allowed and holds_all
        """See [Note: Lent for good]."""
        self._lent: set[PagedGroup] = set()
        self._stays: set[PagedGroup] = set()
        """Those that FSDP2 was told not to free after their forward."""

    def __contains__(self, group: PagedGroup) -> bool:
        return group in self._lent

    def lend(self, group: PagedGroup) -> bool:
        """Whether a group that is being gathered may be lent now; then it is, until `end` or `take_back`."""
        if not self._allowed or torch.is_grad_enabled() or in_backward():
            return False
        module = group.sharded_module
        if not group.in_use or not group.is_frozen or module is None or not is_in_forward(module):
            return False
        if self.for_good and not group.is_routed:
            if not self._is_made(group):
                return False
            if resharding_after_forward(module):
                module.set_reshard_after_forward(False, recurse=False)
                self._stays.add(group)
        else:
            others = (other for other in self._lent if other is not group)
            if not resharding_after_forward(module) or any(other.is_routed == group.is_routed for other in others):
                return False
        self._lent.add(group)
        return True

    def begin_forward(self, group: PagedGroup) -> None:
        """The module of a group is called: what is lent for good may have to be freed before."""
        if group not in self._lent or in_backward():
            return
        if torch.is_grad_enabled():
            module = group.sharded_module
            assert module is not None
            module.reshard()

    def end(self, group: PagedGroup) -> None:
        """FSDP2 has no use any more for what a group was given, lent or not."""
        self._lent.discard(group)
        module = group.sharded_module
        if group in self._stays and module is not None:
            module.set_reshard_after_forward(True, recurse=False)
        self._stays.discard(group)

    def take_back(self) -> None:
        """Nothing that is gathered is in a lease after this, which may change then. What is being computed with is copied."""
        for group in [*self._lent]:
            module = group.sharded_module
            idle = module is not None and not is_running(module)
            for memory in self._memory_of(group):
                memory.take_back(copy=not idle)
            self.end(group)
            if module is not None and idle:
                module.reshard()

    def _memory_of(self, group: PagedGroup) -> list[UnshardedMemory]:
        """Of those of its parameters that were ever gathered."""
        shards = self._paged.shards[group.shards.start : group.shards.stop]
        return [shard.unsharded for shard in shards if shard.unsharded is not None]

    def _is_made(self, group: PagedGroup) -> bool:
        return len(self._memory_of(group)) == len(group.shards)
