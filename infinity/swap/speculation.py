"""Updates that were made before the factor of their step is known, and wait for the step to accept or discard them.

[Note: Speculative updates]
Where gradients are clipped, scaled or accumulated, what they are multiplied by is known only when the last of them has come. As
a rule it is what it was expected to be: the norm is below the clipping, nothing overflowed. So a group is updated in the
backward with the expected factor, from the slot that holds its values into the other one, and its gradients go on waiting. The
step accepts that, and the other slot is current from then on; or it discards it, and the update waits for its group's next use,
as if it had never been made early. Nothing of a discarded update is ever seen: the values are those of the slot that nobody
touched, and the new ties are kept here until then. So an exception, a failed write or a kill in between leaves the values of
the step before.

What can't be written to another slot is not updated early: what rests in host memory changes where it rests, and a gradient on
NVMe would be read once more. In a durable run the other slot is free, as the last step was committed before the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from infinity.schedule.update_timing import SpeculationPolicy, UpdateTiming
from infinity.store.layout import Layout, SubGroup
from infinity.swap.options import PagingOptions
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup


def is_speculative(layout: Layout, sub: SubGroup, options: PagingOptions) -> bool:
    """Whether the backward updates a sub-group for the step to accept, which takes another slot."""
    due = options.timing_of(sub.space) is UpdateTiming.SPECULATIVE
    moves = sub.trained and sub.space != layout.resident_space and sub.nbytes > 0
    return due and moves and not (sub.held or sub.cached or sub.gradient_itemsize)


def second_slot_bytes(layout: Layout, options: PagingOptions) -> int:
    """What the second slots take on NVMe."""
    return sum(sub.nbytes for sub in layout.sub_groups if is_speculative(layout, sub, options))


class Speculation:
    """What the backward of a step updates for the step to accept, and whether it should. Used by one thread at a time."""

    def __init__(self, stager: Stager) -> None:
        self.expected_scale: float | None = None
        """By what the step will probably multiply its gradients; None where this backward is not its last one."""
        self.is_due = True
        """Whether the next backward is to update what it may. Until it is, state may be read ahead for the step. Says the same
        until `accept`, after which all that reads a sub-group is pointed anew."""
        self._stager = stager
        self._policy = SpeculationPolicy()
        self._inputs: dict[int, Any] = {}
        """By number of their shard: all that updates depend on beside the gradient and the state."""
        self._ties: dict[PagedSubGroup, torch.Tensor] = {}
        """Of each sub-group whose other slot holds its update: what the ties will be."""

    def __iter__(self) -> Iterator[PagedSubGroup]:
        return iter(self._ties)

    @property
    def promises(self) -> bool:
        """Whether an update in this backward will probably be accepted."""
        return self.expected_scale is not None and self._policy.speculates

    def may_update(self, sub: PagedSubGroup) -> bool:
        """Whether the sub-group has another slot that may be written to, and all of it comes and goes."""
        movable = sub.moves and not sub.rests_in_host and sub.gradient_extent is None
        return movable and len(sub.slots) == 2 and sub.committed_slot in (None, sub.current_slot)

    def note_inputs(self, inputs: Mapping[int, Any]) -> None:
        """Shards are about to be updated from these."""
        self._inputs |= inputs

    def begin(self, sub: PagedSubGroup, ties: torch.Tensor) -> None:
        """Its update is being written to the other slot, and has these ties."""
        self._ties[sub] = ties

    def discard(self, sub: PagedSubGroup) -> bool:
        """The update of a sub-group is void. Whether there was one."""
        return self._ties.pop(sub, None) is not None

    def discard_all(self) -> None:
        """All of them are void."""
        self._ties.clear()
        self._inputs.clear()

    def accept(self, inputs: Mapping[int, Any], grad_scale: float) -> set[PagedSubGroup]:
        """The sub-groups that were updated as the step would, from these inputs, which are updated now; all others are as
        before. Whatever reads them is to be pointed to their other slot, as `defer` does."""
        were_updated = bool(self._ties)
        for sub in [*self._ties]:
            shards = [piece.shard for piece in sub.layout.pieces if piece.shard in inputs]
            if not shards or any(self._inputs.get(shard) != inputs[shard] for shard in shards):
                self.discard(sub)
        accepted = {*self._ties}
        for sub, ties in self._ties.items():
            self._stager.drop(sub.chunk)  # read since, from the slot that was current
            sub.current_slot, sub.ties = 1 - sub.current_slot, ties
        self.discard_all()
        as_planned = bool(accepted) or not were_updated  # not where settings were changed since the backward
        self._policy.note(as_expected=grad_scale == self.expected_scale and as_planned)
        self.is_due = self._policy.speculates
        return accepted

    def note_skipped(self) -> None:
        """The step changes nothing."""
        self._policy.note(as_expected=False)
