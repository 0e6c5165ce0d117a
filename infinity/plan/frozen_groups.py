"""Bytes in files and in the pool for gathers of frozen groups, and bytes read again, by the engine's own policies.

[Note: Routed experts in the plan]
Each frozen expert is a group ([Note: Routed experts] in infinity/fsdp2/experts.py). docs/plan.md, "Mixtures of
experts", says what a gather reads of them and what stays.

Rounds of generation go through the blocks in one order. Let each round need the share p of all experts. Then m rounds
use 1 − (1 − p)^m of them, which is also the share of a round's experts that were used in the m rounds before it. They
are still staged if the pool holds that many. So with room for a share h, a round saves 1 − (1 − p)^m of its reads, with
the largest m for which that is at most h: nothing until a whole round's experts fit.

In training the order reverses. A backward needs the experts of its forward, and finds the share h of all experts, if
they were used. The next forward finds the share h that the backward used last, and needs the share p of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.work import Work
from infinity.schedule.readahead import cycle_read_bytes
from infinity.schedule.residency import choose_to_stay
from infinity.schedule.scheme import COMPUTE_BYTES

_BYTES_OF_64 = {4: 36, 8: 64, 16: 128}
"""Bytes of 64 elements of a matrix in files, by bits: NF4 has an fp32 scale per 64; int8's per row is neglected."""

BASE_BITS = tuple(_BYTES_OF_64)
"""Possible bits of the blocks' matrices in files. All other tensors have 16."""


@dataclass(frozen=True)
class FrozenGroups:
    """The groups of a model in the order of its forward, the root first. Bytes are for one rank.

    always: by group, bytes that each gather reads. experts: by group, bytes of all its routed experts. expected_share:
    expected share of the experts that a pass of all tokens needs.
    """

    always: tuple[int, ...]
    experts: tuple[int, ...]
    expert_bytes: int = 0
    expected_share: float = 1.0

    @classmethod
    def of(cls, work: Work, *, tokens: int, base_bits: int = 16) -> FrozenGroups:
        """Return the groups of `work.model`, through which `tokens` of all ranks pass while one is gathered. base_bits:
        16 is also the size of gathered elements."""

        def in_files(numel: int) -> int:
            shard = -(-numel // work.ranks)
            return -(-shard * _BYTES_OF_64[base_bits] // 64)

        numels = zip(work.group_numels, work.group_expert_numels, work.group_vector_numels, strict=True)
        always = [
            in_files(numel - of_experts - vectors) + COMPUTE_BYTES * -(-vectors // work.ranks)
            for numel, of_experts, vectors in numels
        ]
        routed = [in_files(numel) for numel in work.group_expert_numels]
        experts = work.model.experts
        return cls(
            tuple(always),
            tuple(routed),
            in_files(experts.numel) if experts is not None else 0,
            experts.distinct(tokens) / experts.count if experts is not None else 1.0,
        )

    def __len__(self) -> int:
        return len(self.always)

    @property
    def expected_experts_bytes(self) -> float:
        return self.expected_share * sum(self.experts)

    @property
    def expert_gathers(self) -> float:
        """Expected number of the experts that a pass of all tokens needs."""
        return self.expected_experts_bytes / self.expert_bytes if self.expert_bytes else 0.0

    @property
    def expected_bytes(self) -> float:
        return sum(self.always) + self.expected_experts_bytes

    @property
    def largest_bytes(self) -> int:
        return max(*self.always, self.expert_bytes)

    @property
    def root_bytes(self) -> int:
        return self.always[0]

    @property
    def whole_bytes(self) -> int:
        return sum(self.always) + sum(self.experts)

    def lora_read_bytes(self, room_bytes: int, passes: int) -> tuple[float, float]:
        """Return the bytes that a step of `passes` passes reads: groups that every pass needs, and routed experts.
        Blocks are gathered twice, the root once; staged groups are not read."""
        blocks = range(1, len(self))
        uses = [0, *blocks, *reversed(blocks)] * passes
        of_uses = [self.always[unit] for unit in uses]
        always = cycle_read_bytes(uses, of_uses, range(len(self)), (self.always, room_bytes))
        held, needed = self._held_share(self.always, room_bytes), self.expected_share
        return float(always), passes * sum(self.experts) * (2 * needed - min(held, needed) - held * needed)

    def round_read_bytes(self, room_bytes: int) -> tuple[float, float]:
        """Return the same for a forward in a series: the root stays gathered, others staged (`choose_to_stay`)."""
        blocks = self.always[1:]
        stay = choose_to_stay(blocks, room_bytes)
        held, needed = self._held_share(blocks, room_bytes), self.expected_share
        again = float(held == 1.0)  # share of a round's experts that stayed since an earlier round
        if again < 1 and needed < 1:
            again = 1 - (1 - needed) ** math.floor(math.log1p(-held) / math.log1p(-needed))
        return float(sum(blocks) - sum(blocks[place] for place in stay)), (1 - again) * self.expected_experts_bytes

    def _held_share(self, others: Sequence[int], room_bytes: int) -> float:
        """Return the share of all experts that the pool can hold besides the groups `others`, the one in use included."""
        if sum(others) > room_bytes or not any(self.experts):
            return 0.0
        left = room_bytes + self.largest_bytes - sum(others)
        return min(1.0, left / sum(self.experts))
