"""In which of its slots a sub-group's bytes may change, and when: commits and checkpoints come first.

[Note: A/B slots]
In a durable run a sub-group has two extents, its slots, and a commit says in which of them its state is. An update reads that
one and writes the other, which is current from then on; more writes before the next commit go to the same one again. A range
that is written outside of an update takes the rest of the sub-group along first. So the committed bytes stay as they are until
another commit has taken their place (infinity/store/durable.py, [Note: What a record promises]).

What a checkpoint is copying must stay, too, until it is copied: see [Note: A copy of what goes on changing] in
infinity/store/arena_copy.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.store.arena_copy import Copying
from infinity.swap.chunk import Chunk
from infinity.swap.health import ModelHealth
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup


class Slots:
    """Writes sub-groups where that is allowed. Used by one thread at a time."""

    def __init__(self, sub_groups: Sequence[PagedSubGroup], health: ModelHealth, stager: Stager) -> None:
        self._sub_groups, self._health, self._stager = sub_groups, health, stager
        self._copying: Copying | None = None
        self._snapshot_slots: list[int] = []
        """By sub-group: the slot that the checkpoint copies."""

    def start_copying(self, copying: Copying) -> None:
        """A checkpoint has begun to copy all values as they are now; all of them are written."""
        self._copying = copying
        self._snapshot_slots = [sub.current_slot for sub in self._sub_groups]

    def write_current(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease to the slot that may be written to, where its values are from now on.

        Where no more than its gradient was read, all of it is in host memory, and the lease goes back.
        """
        if not sub.layout.nbytes:
            self._stager.release(sub.chunk, keep=False)
            return
        self._health.check_not_sealed()
        slot = sub.write_slot
        self.let_be_copied(sub, slot)
        sub.chunk.writes = sub.slot_span(slot)
        self._stager.write_back(sub.chunk)
        sub.current_slot = slot

    def write_other_slot(self, sub: PagedSubGroup) -> None:
        """Start writing the sub-group's lease to the slot that doesn't hold its values, which stay as they are."""
        self._health.check_not_sealed()
        slot = 1 - sub.current_slot
        self.let_be_copied(sub, slot)
        sub.chunk.writes = sub.slot_span(slot)
        self._stager.write_back(sub.chunk)

    def leave_committed(self, sub: PagedSubGroup) -> bool:
        """Before a range of a sub-group is written: where its values are committed, copy them to the other slot. Whether they
        were copied, so that what reads them is to be pointed there."""
        self._health.check_not_sealed()
        if sub.current_slot != sub.committed_slot:
            return False
        stager, slot = self._stager, sub.write_slot
        self.let_be_copied(sub, slot)
        name = f"committed state of sub-group {sub.layout.index}"
        reads, writes = sub.slot_span(sub.current_slot), sub.slot_span(slot)
        chunk = Chunk(name, sub.layout.nbytes, reads, writes, after=(sub.chunk,))
        stager.acquire(chunk)
        stager.write_back(chunk)
        stager.settle(chunk)
        sub.current_slot = slot
        return True

    def let_be_copied(self, sub: PagedSubGroup, slot: int) -> None:
        """Before a sub-group's bytes in that slot change, or those in host memory: wait until a checkpoint has copied them."""
        copying, index = self._copying, sub.layout.index
        if copying is None or copying.is_copied(index):
            return
        if sub.rests_in_host or slot == self._snapshot_slots[index]:
            with self._stager.stalling(f"the checkpoint's copy of {sub.chunk.name}"):
                copying.wait_for(index)

    def close(self) -> None:
        """Nothing is written any more."""
        self._copying = None
