"""Floor 7. What gathers of frozen groups need of files and pool, and what of it is read anew, by the product's own policies.

[Note: Routed experts]
Where only the experts are read that a token is routed to, a gather of T tokens reads E · (1 − (1 − k / E)^T) of a block's E
experts, expected, when every token takes k different ones, all equally likely, whatever the others take. Routers that have
favourites read fewer. The pool must have room for the most experts that a gather may read, min(E, k · T). All other parameters
of a block are read at every gather, as those of a dense one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.work import Work
from infinity.schedule.lookahead import cycle_read_bytes
from infinity.schedule.residency import UNITS_READ_AHEAD, choose_evenly, choose_to_stay
from infinity.schedule.scheme import COMPUTE_BYTES


@dataclass(frozen=True)
class FrozenGroups:
    """The groups of a model in the order of its forward, the root first. Bytes of one rank at 16 bits per parameter.

    Attributes:
        always: by group, what each gather reads.
        experts: by group, its routed experts, of which a gather reads some; none where all of them are read.
        expected_share, most_share: of the experts, what a gather reads, expected and at most.
    """

    always: tuple[int, ...]
    experts: tuple[int, ...]
    expected_share: float = 1.0
    most_share: float = 1.0

    @classmethod
    def of(cls, work: Work, *, tokens: int | None) -> FrozenGroups:
        """The groups of `work.model`. `tokens`: that pass through a group while it is gathered, where only the experts are read
        that they are routed to. None: all are read."""

        def shards(numels: Sequence[int]) -> tuple[int, ...]:
            root_first = [numels[-1], *numels[:-1]]
            return tuple(COMPUTE_BYTES * -(-numel // work.ranks) for numel in root_first)

        whole = work.group_numels
        experts = work.model.experts
        if tokens is None or experts is None:
            return cls(shards(whole), (0,) * len(whole))
        routed = work.group_expert_numels
        return cls(
            shards([numel - of_experts for numel, of_experts in zip(whole, routed, strict=True)]),
            shards(routed),
            experts.distinct(tokens) / experts.count,
            experts.distinct_max(tokens) / experts.count,
        )

    def __len__(self) -> int:
        return len(self.always)

    @property
    def routed(self) -> bool:
        return any(self.experts)

    @property
    def expected(self) -> list[float]:
        """By group, what a gather takes, expected."""
        return [fixed + self.expected_share * some for fixed, some in zip(self.always, self.experts, strict=True)]

    @property
    def expected_bytes(self) -> float:
        return sum(self.expected)

    @property
    def leases(self) -> list[int]:
        """By group, what a gather takes of the pool at most."""
        return [fixed + round(self.most_share * some) for fixed, some in zip(self.always, self.experts, strict=True)]

    @property
    def largest_bytes(self) -> int:
        return max(self.leases)

    @property
    def largest_block_bytes(self) -> int:
        return max(self.leases[1:])

    @property
    def root_bytes(self) -> int:
        return self.always[0]

    @property
    def whole_bytes(self) -> int:
        """All weights."""
        return sum(self.always) + sum(self.experts)

    def lora_read_bytes(self, room_bytes: int, passes: int) -> float:
        """What a step of so many passes reads where reads ahead may hold `room_bytes` of the pool.

        A block is gathered for the forward and for the backward, the root once. What stays staged is not read: from a forward
        to its backward, which needs the same experts; and from a backward to the next forward, which needs only a share of
        the experts that are staged.
        """
        blocks = range(1, len(self))
        uses = [0, *blocks, *reversed(blocks)] * passes
        limit = self.leases, room_bytes
        expected = [round(nbytes) for nbytes in self.expected]
        read = float(cycle_read_bytes(uses, [expected[unit] for unit in uses], range(len(self)), limit))
        if not self.routed:
            return read
        if self.whole_bytes <= room_bytes:
            return 0.0
        experts = [round(self.expected_share * nbytes) for nbytes in self.experts]
        backward_to_forward = passes * self._spared_before_forward(experts, limit)
        return read + (1 - self.expected_share) * backward_to_forward

    def _spared_before_forward(self, read_bytes: Sequence[int], limit: tuple[Sequence[int], int]) -> int:
        """Bytes that a forward doesn't read because its groups stayed since the backward before it."""
        blocks = range(1, len(self))
        uses = [0, *blocks, *reversed(blocks)]
        of_uses = [read_bytes[unit] for unit in uses]
        return cycle_read_bytes(uses, of_uses, (), limit) - cycle_read_bytes(uses, of_uses, range(len(self)), limit)

    def round_read_bytes(self, room_bytes: int) -> tuple[float, float]:
        """What a forward reads, one of many, where staged groups may hold `room_bytes`: bytes of what every round needs, and
        bytes of routed experts.

        What every round needs stays first, spread evenly (`choose_to_stay`); then experts, as all are equally likely.
        """
        if not self.routed:
            stay = choose_to_stay(self.always, room_bytes)
            return float(sum(self.always) - sum(self.always[place] for place in stay)), 0.0
        if self.whole_bytes <= room_bytes:
            return 0.0, 0.0
        left = max(0, room_bytes - UNITS_READ_AHEAD * self.largest_bytes)
        stay_bytes = sum(self.always[place] for place in choose_evenly(self.always, left))
        all_experts = sum(self.experts)
        held_share = min(1.0, (left - stay_bytes) / all_experts)
        return float(sum(self.always) - stay_bytes), (1 - held_share) * self.expected_share * all_experts
