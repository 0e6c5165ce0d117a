"""The work of one rank in a step: the model, its samples, and how they pass through its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from infinity.plan.strategy import Strategy
from infinity.plan.transformer import Transformer
from infinity.schedule import spilling
from infinity.schedule.scheme import ADAM_MOMENTS, APART, COMPUTE_BYTES, Scheme, is_left_to_forward
from infinity.units import align_up

DEFAULT_SCHEME = Scheme()

ROOT = 0
"""Number of the root among the groups. It is gathered first, and stays gathered from forward to backward."""


def moments_of(optimizer: str, model: Transformer) -> float:
    """Return the average number of moments per parameter: Muon has one in a block's matrices, AdamW's two elsewhere."""
    if optimizer == "Muon":
        return ADAM_MOMENTS - sum(Work(model).group_matrix_numels) / model.numel
    return {"AdamW": ADAM_MOMENTS, "Adam": ADAM_MOMENTS, "SGD": 1, "plain-SGD": 0}[optimizer]


@dataclass(frozen=True)
class Work:
    """The work of one rank in a step."""

    model: Transformer
    ranks: int = 1
    samples: int = 1
    micro_batches: int = 1
    micro_batches_at_once: int = 1
    """Micro-batches that pass through a group before the next: all in the vertical schedule, one in the horizontal."""
    checkpointing: bool = True
    """True if activations are kept only between blocks, and recomputed."""
    groups_per_block: int = 1
    keeps_gathered: bool = False
    """True if groups stay gathered from the first micro-batch to the last."""
    clipping: bool = True
    scheme: Scheme = DEFAULT_SCHEME
    gradient_bytes_max: int | None = None
    """Host memory in which gradients wait for their update; the others wait on NVMe. None: all fit."""
    activations: str = "none"
    """Where saved activations wait for their backward: "none" (the device), "cpu" or "nvme"."""
    activation_host_bytes_max: int | None = None
    """Host memory for those with "cpu"; the others stay on the device. None: all go there."""
    activation_buffer_bytes_max: int | None = None
    """Pinned buffer for those on NVMe; None for as much as they need."""
    durable: bool = False
    """True if every step is committed: state on NVMe then has two slots."""
    muon: bool = False
    tensor_ranks: int = 1
    """Neighbours that split each matrix, and share a batch."""
    expert_ranks: int = 1
    """Neighbours that share the experts of a block."""
    stages: int = 1
    """Stages of a pipeline, of which the largest is planned."""
    unasked: bool = False
    """True if speculative updates are a default. They are planned if they have an effect, make no step longer, and
    leave as much space free as their second slots take; else updates are in the forward."""

    @property
    def stage_ranks(self) -> int:
        return self.ranks // self.stages

    @property
    def data_ranks(self) -> int:
        """Ranks of a stage that have batches of their own."""
        return self.stage_ranks // self.tensor_ranks

    @cached_property
    def stage(self) -> Transformer:
        """The largest stage: the last blocks, and half of the root, or all of it if the head shares the embedding: it
        needs a layer of its own in another stage."""
        if self.stages == 1:
            return self.model
        model, experts = self.model, self.model.experts
        layers = -(-model.layers // self.stages)
        if experts is not None:
            before = model.layers - layers
            experts = replace(experts, blocks=tuple(block - before for block in experts.blocks if block >= before))
        root_numel = model.root_numel if model.tied_numel else -(-model.root_numel // 2)
        return replace(model, layers=layers, root_numel=root_numel, experts=experts)

    @property
    def shard_numel(self) -> int:
        return -(-sum(self.stored_numels) // self.stage_ranks)

    @property
    def passes(self) -> int:
        """Number of forwards of a step."""
        return self.micro_batches // self.micro_batches_at_once

    @property
    def samples_at_once(self) -> int:
        return self.samples * self.micro_batches_at_once

    @cached_property
    def whole_numels(self) -> list[int]:
        """Parameters of each group in the order of the forward, the root first."""
        return [self.stage.root_numel, *self._by_group(self.stage.block_numels)]

    @cached_property
    def stored_numels(self) -> list[int]:
        """The same, but parameters in no matrix once for each tensor rank, which has a copy."""
        vectors = [self.stage.root_vector_numel, *self._by_group([self.stage.vector_numel] * self.stage.layers)]
        copies = self.tensor_ranks - 1
        return [numel + copies * of_vectors for numel, of_vectors in zip(self.whole_numels, vectors, strict=True)]

    @cached_property
    def group_numels(self) -> list[int]:
        """Parameters of each group that a rank gathers: its part of matrices and experts that are split."""
        both = zip(self.stored_numels, self.group_expert_numels, strict=True)
        return [
            -(-(numel - experts) // self.tensor_ranks) + -(-experts // self.expert_ranks) for numel, experts in both
        ]

    @cached_property
    def group_expert_numels(self) -> list[int]:
        """Parameters of each group in routed experts, spread evenly over the groups of a block."""
        return [0, *self._by_group(self.stage.expert_numels)]

    @property
    def group_vector_numels(self) -> list[int]:
        """Parameters of each group that are in no matrix of a block; all of the root's."""
        return [self.stage.root_numel, *self._by_group([self.stage.vector_numel] * self.stage.layers)]

    @property
    def group_matrix_numels(self) -> list[int]:
        """Parameters of each group in matrices of a block, without experts."""
        parts = zip(self.whole_numels, self.group_vector_numels, self.group_expert_numels, strict=True)
        return [numel - vectors - experts for numel, vectors, experts in parts]

    @property
    def group_active_numels(self) -> list[int]:
        """Parameters of each group with which a rank computes for each of its tokens."""
        experts, numels = self.model.experts, self.whole_numels
        if experts is not None:
            idle = experts.count - experts.per_token
            both = zip(numels, self.group_expert_numels, strict=True)
            numels = [numel - of_experts * idle // experts.count for numel, of_experts in both]
        return [-(-numel // self.tensor_ranks) for numel in numels]

    def _by_group(self, of_blocks: Sequence[int]) -> list[int]:
        parts = self.groups_per_block
        evens = [of_block // parts for of_block in of_blocks]
        return [
            part
            for even, of_block in zip(evens, of_blocks, strict=True)
            for part in (*[even] * (parts - 1), of_block - even * (parts - 1))
        ]

    @cached_property
    def group_shards(self) -> list[int]:
        return [-(-numel // self.stage_ranks) for numel in self.stored_numels]

    @cached_property
    def gradient_itemsize(self) -> int:
        """Bytes per element of a gradient that waits for the update of a group on NVMe."""
        return spilling.gradient_itemsize(
            ranks=self.data_ranks, micro_batches=self.micro_batches, reduced_in_16_bits=False, computed_in_16_bits=True
        )

    def left_to_forward(self, strategy: Strategy) -> list[int]:
        """Return, by group, the elements updated before their next forward while others are updated in the backward.
        With speculative updates these are sub-groups, a part of every group."""
        balanced = strategy.update_of(self.scheme) == "backward" and self.gradient_bytes_max is None
        if not balanced or self.scheme.collective or not strategy.uses_nvme:
            return [0] * len(self.group_shards)
        if self.scheme.speculative:
            return [shard // APART for shard in self.group_shards]
        return [shard if is_left_to_forward(number) else 0 for number, shard in enumerate(self.group_shards)]

    def gradients_that_wait(self, strategy: Strategy) -> int:
        if strategy.all_gradients_wait(self.scheme):
            return self.shard_numel
        return sum(self.left_to_forward(strategy))

    def gradients_that_spill(self, strategy: Strategy) -> list[int]:
        """Return, by group, the bytes of gradients that wait on NVMe."""
        shards = self.group_shards
        if strategy.parameters != "nvme" or not strategy.all_gradients_wait(self.scheme):
            return [0] * len(shards)
        nbytes = [self.gradient_itemsize * shard for shard in shards]
        spilled = {*spilling.groups_that_spill(nbytes, self.gradient_bytes_max)}
        return [waiting if group in spilled else 0 for group, waiting in enumerate(nbytes)]

    @cached_property
    def saved_bytes(self) -> list[int]:
        """Bytes that a pass saves for the backward, without the logits, by group. In the last block each micro-batch
        goes forward and back before the next one, so only one saves activations there."""
        parts, recomputed = self.groups_per_block, self.checkpointing
        saved = self.stage.saved_bytes(self.samples, checkpointing=recomputed, tensor_ranks=self.tensor_ranks)
        of_block = saved // parts
        before = [self.micro_batches_at_once * of_block] * (len(self.group_numels) - 1 - parts)
        return [0, *before, *[of_block] * parts]

    def saved_elsewhere(self, *, device_is_host: bool) -> list[int]:
        """Return, by group, the saved bytes that leave the device, first saved first (none to a CPU's host memory)."""
        if self.activations == "none" or (self.activations == "cpu" and device_is_host):
            return [0] * len(self.saved_bytes)
        if self.activations == "nvme" or self.activation_host_bytes_max is None:
            return self.saved_bytes
        before = [0, *accumulate(self.saved_bytes)]
        most = self.activation_host_bytes_max
        return [min(nbytes, max(0, most - held)) for nbytes, held in zip(self.saved_bytes, before, strict=False)]

    @property
    def between_groups_bytes(self) -> int:
        """Hidden states of the micro-batches that wait for their turn in the next group, or the gradients of these.
        They are on the device, for all micro-batches except the computing one."""
        return 2 * (self.micro_batches_at_once - 1) * self.samples * self.model.seq * self.model.hidden

    @property
    def head_gradient_bytes(self) -> int:
        """Gradients of a head that is tied to the embedding; all but one micro-batch's wait for the embedding's."""
        return COMPUTE_BYTES * (self.micro_batches_at_once - 1) * -(-self.model.tied_numel // self.tensor_ranks)

    @property
    def saved_tensor_bytes(self) -> int:
        return self.model.saved_tensor_bytes(self.samples, checkpointing=self.checkpointing)

    @property
    def activation_buffer_bytes(self) -> int:
        if self.activations != "nvme":
            return 0
        least = max(spilling.BUFFER_BYTES_DEFAULT, align_up(spilling.BUFFER_SHARES * self.saved_tensor_bytes))
        return least if self.activation_buffer_bytes_max is None else self.activation_buffer_bytes_max

    @cached_property
    def saved_on_drive(self) -> list[int]:
        """Saved bytes that a pass writes to the drive and reads back, by group; the others stay in the buffer."""
        tensor = self.saved_tensor_bytes
        cut = [
            (group, min(tensor, nbytes - at))
            for group, nbytes in enumerate(self.saved_bytes)
            for at in range(0, nbytes, tensor)
        ]
        on_drive = [0] * len(self.saved_bytes)
        if self.activations == "nvme":
            moved = spilling.bytes_on_drive([nbytes for _, nbytes in cut], self.activation_buffer_bytes)
            for (group, _), nbytes in zip(cut, moved, strict=True):
                on_drive[group] += nbytes
        return on_drive

    @property
    def in_flight(self) -> int:
        """Micro-batches of which the first stage has saved activations at once, between their forward and backward."""
        return min(self.stages, self.micro_batches)

    @property
    def stretch(self) -> float:
        """Time of a step's passes over that of its micro-batches: more than 1 as stages wait for the first and last one
        (Narayanan et al., arXiv:2104.04473, section 2.2)."""
        return (self.micro_batches + self.stages - 1) / self.micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.data_ranks * self.samples * self.micro_batches * self.model.seq

    @property
    def flops(self) -> float:
        """Operations of one rank in a step."""
        whole = self.stage.flops(self.samples_at_once, checkpointing=self.checkpointing)
        return self.passes * whole / self.tensor_ranks
